"""What this processor and its operating system can run."""
cdef extern from "_cpu.h":
    int cpu_level()


def level():
    """The number of instruction sets beyond the baseline: 1 with AVX2 and FMA, 2 with AVX-512 too."""
    return cpu_level()
