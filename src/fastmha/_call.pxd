"""What is asked of the kernels: the record that all pieces of a call share."""
from fastmha._dropout cimport Dropout
from fastmha._operand cimport MOST_AXES, Operand
from fastmha._simd cimport LANES, PANEL_VECTORS, real

cdef extern from * nogil:
    """
    #include "_simd.h"
    enum {
      /* Keys in a block. Part of the numerics, so the same in every build: each block is an atom with
       * its own maximum, its own sum and its own weighted values, and atoms merge in ascending order.
       * Anything from 48 to 192 runs alike. */
      ATOM = 96,
      PANEL = PANEL_VECTORS * LANES, /* rows of queries that a register tile spans */
      BLOCK_PANELS = PANEL < 128 ? 128 / PANEL : 1,
      /* Rows of queries that share a reading of the keys: 128 take 2 to 7 per cent less time than 64, and 256
       * no less than 128. */
      BLOCK = BLOCK_PANELS * PANEL
    };
    /* Further than any two positions are apart; sums of a few stay in range. */
    #define BOUNDLESS (PTRDIFF_MAX / 8)
    """
    const Py_ssize_t BOUNDLESS
    enum:
        ATOM
        PANEL
        BLOCK_PANELS
        BLOCK


cdef struct Call:
    Operand q, k, v, out, lse, mask, weights
    Operand k_scales, v_scales          # one for each row of int8 keys and values
    int leads
    Py_ssize_t lead[MOST_AXES]          # shape of the leading axes
    Py_ssize_t queries, keys, d, e
    Py_ssize_t out_width                # elements of a row of `out`
    Py_ssize_t left, right              # a query at position p sees keys p - left to p + right
    Py_ssize_t shift                    # query i stands at position i + shift
    const long long *shifts             # for each index of the first leading axis, in place of shift
    const long long *key_lengths        # for each index of the first leading axis, or NULL
    const long long *query_lengths
    const long long *query_starts       # of a packed batch: the members' first rows, or NULL
    const long long *key_starts
    # Key j of a member lies in row j of k and v; or in row j % ring; or in row j % page of the page
    # table[member][j // page].
    Py_ssize_t ring, page               # 0 for none
    const long long *table              # members x table_row
    Py_ssize_t table_row
    const double *slopes                # for each index of the last leading axis, or NULL
    const double *sinks
    bint raw                            # scores need no more than a scale, which the weights apply
    real scale                          # of a score: at least 0 if raw
    real sign                           # of q
    real softcap                        # 0 for none
    Dropout dropout
    real sharpness                      # a weight is 2**(sharpness * (score - maximum))
    # So many heads that share a key/value head are stacked: their queries are rows of one list, that
    # few of them need not waste lanes, and keys are read once for all.
    Py_ssize_t stack
    Py_ssize_t blocks, grain            # blocks of rows for a stack; blocks in a piece of work
    Py_ssize_t total                    # blocks in all
    int threads                         # that work on them
    bint far                            # whether the arrays are too large to be at hand
    char *scratch
    size_t slot_bytes
