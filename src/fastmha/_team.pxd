"""Threads and scratch memory, for the kernel modules to cimport. `_team.h` tells how they work."""
ctypedef void (*Body)(void *arg, Py_ssize_t piece, int slot) noexcept nogil

ctypedef struct Scratch:
    void *start
    size_t size

cdef int parallel_for(Body body, void *arg, Py_ssize_t pieces, int threads) except -1 nogil
cdef int look_for_signals(double *asked) noexcept nogil
cdef Scratch take_scratch(size_t size) noexcept nogil
cdef void give_scratch(Scratch scratch) noexcept nogil
cdef int thread_limit() noexcept nogil
