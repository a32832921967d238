"""The team of threads and the pool of scratch memory: one for the process, shared by all kernels."""
cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept

cdef extern from "_team.h" nogil:
    ctypedef int (*Poll)() noexcept
    ctypedef struct Block:
        void *start
        size_t size
    void start_team()
    int FORKED
    int run_job(Body body, void *arg, Py_ssize_t pieces, int threads, Poll poll)
    Block take_block "take_scratch"(size_t size)
    void give_block "give_scratch"(Block block)
    int poll_now_and_then(double *asked, Poll poll)
    int fastmha_get_num_threads()
    void fastmha_set_num_threads(int n)

start_team()


cdef int interrupted() noexcept with gil:
    """Lets Python handle signals: -1, with the error set, where Ctrl-C was pressed."""
    return PyErr_CheckSignals()


cdef int parallel_for(Body body, void *arg, Py_ssize_t pieces, int threads) except -1 nogil:
    """body(arg, piece, slot) for every piece, on at most `threads` threads: slots 0 to threads - 1."""
    cdef int ended = run_job(body, arg, pieces, threads, <Poll>interrupted)
    if ended == FORKED:
        with gil:
            raise RuntimeError("a signal handler forked in this call: the parent alone has its result")
    return ended


cdef int look_for_signals(double *asked) noexcept nogil:
    """For the caller's own thread, slot 0, inside long pieces: now and then, whether to give up. Then
    Python's error is set."""
    return poll_now_and_then(asked, <Poll>interrupted)


cdef Scratch take_scratch(size_t size) noexcept nogil:
    """Memory aligned to 64 bytes; its start is NULL where there is none."""
    cdef Block block = take_block(size)
    return Scratch(start=block.start, size=block.size)


cdef void give_scratch(Scratch scratch) noexcept nogil:
    give_block(Block(start=scratch.start, size=scratch.size))


cdef int thread_limit() noexcept nogil:
    """The most threads a job gets."""
    return fastmha_get_num_threads()


def set_limit(int n):
    fastmha_set_num_threads(n)


def get_limit():
    return fastmha_get_num_threads()
