"""How work is cut up where the cut shows in the bits: pure functions of sizes, never of the threads.

What does not show in the bits (the path for few rows, the size of a piece of work) the kernels decide.
"""

ATOM = 96  # keys in a block of the kernels
_PIECES = 16  # of work that a backward call should have at least
_LEAST = 8 * ATOM  # keys in a chunk, for each has all queries packed for it


def backward_chunk(heads, keys):
    """Keys in a piece of a backward call with so many key/value heads, all members counted.

    Each piece sums up dq over its keys alone; the parts are added in order. Where heads are many, one
    chunk has all the keys.
    """
    wanted = -(-_PIECES // max(1, heads))
    chunk = max(_LEAST, -(-keys // wanted))
    return -(-chunk // ATOM) * ATOM
