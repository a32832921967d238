"""x @ W + b for the class's projections: rows of x, one element at a time, times rows of W, lane by lane.

For a block of rows, whose sums lie in the first-level cache, W goes by a few rows at a time. Those are
copied, and so are the elements of x that they meet: rows that are a power of two apart would push one
another out of the cache (measured at half the speed). For few rows W is read in place, as fast as memory
allows. Each element's sum runs over the steps in order and in one chain of multiply-adds: the same bits
for one row and for many.

Two rows by four steps are taken together: eight factors and four vectors of W in registers, eight
multiply-adds for six loads and two stores.
"""
from libc.string cimport memset

from fastmha._operand cimport Operand, load_row, store_row
from fastmha._simd cimport LANES, real, vec, vfma, vload, vloadu, vset, vstore
from fastmha._storage cimport REAL

cdef extern from * nogil:
    """
    #include "_simd.h"
    enum {
      PROJECT_ROWS = 32,                 /* whose sums take up 16 KiB */
      PROJECT_COLUMNS = 512 / REAL_BYTES,
      PROJECT_STEPS = 8,                 /* rows of W that are copied at a time */
      PROJECT_FEW = 4                    /* rows of x for which nothing is copied */
    };
    """
    enum:
        PROJECT_ROWS
        PROJECT_COLUMNS
        PROJECT_STEPS
        PROJECT_FEW


cdef struct Projection:
    Operand x                           # (B, L, d_in): reals, side by side
    Operand w                           # (d_in, d_out)
    Operand bias                        # (1, d_out), or NULL
    Operand out                         # (B, L, heads, d_out / heads): its `col` is within a head
    Py_ssize_t head_stride
    Py_ssize_t members, rows, steps, columns, head_columns
    Py_ssize_t row_blocks, column_blocks, grain
    char *scratch
    size_t slot_bytes


cdef inline size_t project_bytes() noexcept nogil:
    cdef size_t reals = (PROJECT_ROWS + PROJECT_STEPS + 1) * PROJECT_COLUMNS + PROJECT_ROWS * PROJECT_STEPS
    return reals * sizeof(real)


cdef inline void take_steps(
    const int R, const int K, Py_ssize_t width, const real *const *x, const real *w, Py_ssize_t w_row,
    real *sums,
) noexcept nogil:
    """sums[r][n] += x[r][k] * w[k][n], k by k, for R rows and K steps."""
    cdef vec factor[8]
    cdef vec term[4]
    cdef vec sum
    cdef Py_ssize_t n = 0
    cdef int r, k
    for r in range(R):
        for k in range(K):
            factor[r * K + k] = vset(x[r][k])
    while n < width:
        for k in range(K):
            term[k] = vloadu(w + k * w_row + n)
        for r in range(R):
            sum = vload(sums + r * PROJECT_COLUMNS + n)
            for k in range(K):
                sum = vfma(factor[r * K + k], term[k], sum)
            vstore(sums + r * PROJECT_COLUMNS + n, sum)
        n += LANES


cdef inline void take_chunk(
    Py_ssize_t rows, Py_ssize_t steps, Py_ssize_t width, const real **x, const real *w, Py_ssize_t w_row,
    real *sums,
) noexcept nogil:
    """All steps for all rows; leaves each x after the last step."""
    cdef Py_ssize_t step = 0, r
    while step < steps:
        r = 0
        if steps - step >= 4:
            while rows - r >= 2:
                take_steps(2, 4, width, x + r, w, w_row, sums + r * PROJECT_COLUMNS)
                r += 2
            if r < rows:
                take_steps(1, 4, width, x + r, w, w_row, sums + r * PROJECT_COLUMNS)
            for r in range(rows):
                x[r] += 4
            step += 4
            w += 4 * w_row
        else:
            for r in range(rows):
                take_steps(1, 1, width, x + r, w, w_row, sums + r * PROJECT_COLUMNS)
                x[r] += 1
            step += 1
            w += w_row


cdef inline void project_block(const Projection *p, Py_ssize_t number, real *scratch) noexcept nogil:
    """One block of rows by one block of columns."""
    cdef Py_ssize_t column = number % p.column_blocks * PROJECT_COLUMNS
    cdef Py_ssize_t row = number // p.column_blocks % p.row_blocks * PROJECT_ROWS
    cdef Py_ssize_t member = number // p.column_blocks // p.row_blocks
    cdef Py_ssize_t rows = min(<Py_ssize_t>PROJECT_ROWS, p.rows - row)
    cdef Py_ssize_t columns = min(<Py_ssize_t>PROJECT_COLUMNS, p.columns - column)
    cdef Py_ssize_t width = (columns + LANES - 1) // LANES * LANES, step = 0, steps, k, r, j
    cdef real *sums = scratch
    cdef real *w_copy = sums + PROJECT_ROWS * PROJECT_COLUMNS
    cdef real *bias = w_copy + PROJECT_STEPS * PROJECT_COLUMNS
    cdef real *x_copy = bias + PROJECT_COLUMNS
    cdef const real *x[PROJECT_ROWS]
    cdef const real *source[PROJECT_ROWS]
    cdef const char *w = p.w.data + column * p.w.col
    for r in range(rows):
        x[r] = <const real *>(p.x.data + member * p.x.lead[0] + (row + r) * p.x.row)
    memset(sums, 0, rows * PROJECT_COLUMNS * sizeof(real))
    if (
        rows <= PROJECT_FEW and p.w.storage == REAL and p.w.col == sizeof(real)
        and p.w.row % <Py_ssize_t>sizeof(real) == 0 and width == columns
    ):
        take_chunk(rows, p.steps, width, x, <const real *>w, p.w.row // <Py_ssize_t>sizeof(real), sums)
        step = p.steps
    else:
        memset(w_copy, 0, PROJECT_STEPS * PROJECT_COLUMNS * sizeof(real))
    while step < p.steps:
        steps = min(<Py_ssize_t>PROJECT_STEPS, p.steps - step)
        for k in range(steps):
            load_row(w + (step + k) * p.w.row, p.w.storage, p.w.col, columns, w_copy + k * PROJECT_COLUMNS)
        for r in range(rows):
            source[r] = x_copy + r * PROJECT_STEPS
            for k in range(steps):
                x_copy[r * PROJECT_STEPS + k] = x[r][step + k]
        take_chunk(rows, steps, width, source, w_copy, PROJECT_COLUMNS, sums)
        step += steps
    if p.bias.data != NULL:
        load_row(p.bias.data + column * p.bias.col, p.bias.storage, p.bias.col, columns, bias)
        for r in range(rows):
            for j in range(columns):
                sums[r * PROJECT_COLUMNS + j] += bias[j]
    for r in range(rows):
        write_heads(p, member, row + r, column, columns, sums + r * PROJECT_COLUMNS)


cdef inline void write_heads(
    const Projection *p, Py_ssize_t member, Py_ssize_t row, Py_ssize_t column, Py_ssize_t columns,
    const real *sums,
) noexcept nogil:
    """A row's sums, to the heads that they belong to."""
    cdef char *out = p.out.data + member * p.out.lead[0] + row * p.out.row
    cdef Py_ssize_t done = 0, run, head, place
    while done < columns:
        head, place = (column + done) // p.head_columns, (column + done) % p.head_columns
        run = min(columns - done, p.head_columns - place)
        store_row(out + head * p.head_stride + place * p.out.col, p.out.storage, p.out.col, run, sums + done)
        done += run
