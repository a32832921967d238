"""x @ W + b for the class's projections, on the register tile of the scores: rows of x are its scalars, and a
panel of W's columns lies across lanes.

W is copied by panels first, as many columns at a time as take up a few megabytes, for all threads to read.
Then blocks of rows meet blocks of these columns, a few steps at a time; x is copied too, for rows that are a
power of two apart push one another out of the cache (measured at half the speed). For few rows W is read in
place, as fast as memory allows. Each element's sum runs over the steps in order and in one chain of
multiply-adds: the same bits for one row and for many.
"""
from libc.string cimport memcpy, memset

from fastmha._call cimport PANEL
from fastmha._operand cimport Operand, load_row, store_row
from fastmha._simd cimport (
    LANES, PANEL_VECTORS, TILE_ROWS, inlined, real, vec, vfma, vload, vloadu, vset, vstore,
)
from fastmha._storage cimport REAL
from fastmha._tile cimport project_rows

cdef extern from * nogil:
    """
    #include "_simd.h"
    enum {
      PROJECT_ROWS = 48,
      PROJECT_COLUMNS = 2048 / REAL_BYTES, /* at most: a block's sums take up 96 KiB */
      PROJECT_STEPS = PANEL * REAL_BYTES > 64 ? 64 : 128, /* of which a panel fits the first-level cache */
      PACKED_BYTES = 4 << 20,
      PIECE_BYTES = 256 << 10,             /* copied in a piece of work */
      FEW_ROWS = 4,                        /* for which nothing is copied */
      /* From row to row of sums, and of the copy of x: no power of two, which would crowd in a cache. */
      SUMS_PITCH = PROJECT_COLUMNS + 64 / REAL_BYTES,
      X_PITCH = PROJECT_STEPS + 64 / REAL_BYTES
    };
    """
    enum:
        PROJECT_ROWS
        PROJECT_COLUMNS
        PROJECT_STEPS
        PACKED_BYTES
        PIECE_BYTES
        FEW_ROWS
        SUMS_PITCH
        X_PITCH


cdef struct Projection:
    Operand x                           # (B, L, d_in): reals, side by side
    Operand w                           # (d_in, d_out)
    Operand bias                        # (1, d_out), or NULL
    Operand out                         # (B, L, heads, d_out / heads): its `col` is within a head
    Py_ssize_t head_stride
    Py_ssize_t members, rows, steps, columns, head_columns
    Py_ssize_t block_rows, row_blocks
    Py_ssize_t first, stop              # the columns that lie in `panels` now, or are read in place
    Py_ssize_t block_columns, grain
    Py_ssize_t packed_steps             # in a piece of work
    real *panels                        # [panel][step][lane], or NULL where W is read in place
    Py_ssize_t panel_reals              # from one panel to the next
    char *scratch
    size_t slot_bytes


cdef inline void plan_projection(Projection *p, int threads) noexcept nogil:
    """How a projection is cut up, which does not show in the bits."""
    cdef Py_ssize_t group = PROJECT_COLUMNS
    cdef double cost
    p.row_blocks = (p.rows + PROJECT_ROWS - 1) // PROJECT_ROWS
    p.block_rows = ((p.rows + p.row_blocks - 1) // p.row_blocks + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    p.panel_reals = p.steps * PANEL + 64 // <Py_ssize_t>sizeof(real)
    p.first = 0
    p.stop = p.columns
    if not reads_in_place(p):
        group = PACKED_BYTES // (p.panel_reals * <Py_ssize_t>sizeof(real))
        p.stop = min(p.columns, max(<Py_ssize_t>PROJECT_COLUMNS, group * PANEL))
    p.block_columns = PROJECT_COLUMNS
    p.packed_steps = max(<Py_ssize_t>1, PIECE_BYTES // (p.stop * <Py_ssize_t>sizeof(real)))
    # Rows read in place come from memory, best in long pieces; copied ones make pieces of equal work.
    while p.block_columns > 2 * PANEL and blocks(p) < (threads if reads_in_place(p) else 4 * threads):
        p.block_columns //= 2
    cost = <double>p.block_columns * (p.steps + 8) * (3 if reads_in_place(p) else p.block_rows)
    p.grain = <Py_ssize_t>max(1.0, min(1e6, 1e6 / cost))
    p.slot_bytes = (PROJECT_ROWS * (SUMS_PITCH + X_PITCH) + PROJECT_COLUMNS) * sizeof(real)


cdef inline bint reads_in_place(const Projection *p) noexcept nogil:
    return (
        p.rows <= FEW_ROWS and p.columns % LANES == 0 and p.w.storage == REAL and p.w.col == sizeof(real)
        and p.w.row % <Py_ssize_t>sizeof(real) == 0
    )


cdef inline Py_ssize_t blocks(const Projection *p) noexcept nogil:
    """Pieces of rows by columns, of the columns at hand."""
    return p.members * p.row_blocks * ((p.stop - p.first + p.block_columns - 1) // p.block_columns)


cdef inline size_t packed_bytes(const Projection *p) noexcept nogil:
    return 0 if reads_in_place(p) else (p.stop + PANEL - 1) // PANEL * p.panel_reals * sizeof(real)


cdef inline void pack_steps(const Projection *p, Py_ssize_t number, real *line) noexcept nogil:
    """Some of W's rows, by panels; 0 where there are no columns."""
    cdef Py_ssize_t step, panel, columns = p.stop - p.first
    cdef Py_ssize_t start = number * p.packed_steps
    cdef const char *source = p.w.data + start * p.w.row + p.first * p.w.col
    cdef Py_ssize_t whole = columns // PANEL if p.w.storage == REAL and p.w.col == sizeof(real) else 0
    for step in range(start, min(p.steps, start + p.packed_steps)):
        for panel in range(whole):
            memcpy(p.panels + panel * p.panel_reals + step * PANEL, source + panel * PANEL * p.w.col,
                   PANEL * sizeof(real))
        for panel in range(whole, (columns + PANEL - 1) // PANEL):
            memset(line, 0, PANEL * sizeof(real))
            load_row(source + panel * PANEL * p.w.col, p.w.storage, p.w.col,
                     min(<Py_ssize_t>PANEL, columns - panel * PANEL), line)
            memcpy(p.panels + panel * p.panel_reals + step * PANEL, line, PANEL * sizeof(real))
        source += p.w.row


cdef inline void project_panel(
    Py_ssize_t rows, Py_ssize_t steps, const real *x, const real *panel, real *sums
) noexcept nogil:
    """Some steps further with all rows of a panel of columns."""
    while rows >= TILE_ROWS:
        project_rows(TILE_ROWS, PANEL_VECTORS, steps, x, X_PITCH, panel, sums, SUMS_PITCH)
        x += TILE_ROWS * X_PITCH
        sums += TILE_ROWS * SUMS_PITCH
        rows -= TILE_ROWS
    while rows >= 2:
        project_rows(2, PANEL_VECTORS, steps, x, X_PITCH, panel, sums, SUMS_PITCH)
        x += 2 * X_PITCH
        sums += 2 * SUMS_PITCH
        rows -= 2
    if rows:
        project_rows(1, PANEL_VECTORS, steps, x, X_PITCH, panel, sums, SUMS_PITCH)


cdef inline inlined take_steps(
    const int R, const int K, Py_ssize_t width, const real *x, Py_ssize_t x_row, const real *w,
    Py_ssize_t w_row, real *sums,
) noexcept nogil:
    """sums[r][n] += x[r][k] * w[k][n], k by k, for R rows and K steps."""
    cdef vec factor[8]
    cdef vec term[4]
    cdef vec sum
    cdef Py_ssize_t n = 0
    cdef int r, k
    for r in range(R):
        for k in range(K):
            factor[r * K + k] = vset(x[r * x_row + k])
    while n < width:
        for k in range(K):
            term[k] = vloadu(w + k * w_row + n)
        for r in range(R):
            sum = vload(sums + r * SUMS_PITCH + n)
            for k in range(K):
                sum = vfma(factor[r * K + k], term[k], sum)
            vstore(sums + r * SUMS_PITCH + n, sum)
        n += LANES


cdef inline void project_few(
    Py_ssize_t rows, Py_ssize_t steps, Py_ssize_t width, const real *x, Py_ssize_t x_row, const real *w,
    Py_ssize_t w_row, real *sums,
) noexcept nogil:
    """All steps, with W's rows side by side from memory: two rows of x by four steps at a time."""
    cdef Py_ssize_t step = 0, r
    while steps - step >= 4:
        r = 0
        while rows - r >= 2:
            take_steps(2, 4, width, x + r * x_row + step, x_row, w, w_row, sums + r * SUMS_PITCH)
            r += 2
        if r < rows:
            take_steps(1, 4, width, x + r * x_row + step, x_row, w, w_row, sums + r * SUMS_PITCH)
        step += 4
        w += 4 * w_row
    while step < steps:
        for r in range(rows):
            take_steps(1, 1, width, x + r * x_row + step, x_row, w, w_row, sums + r * SUMS_PITCH)
        step += 1
        w += w_row


cdef inline void project_block(const Projection *p, Py_ssize_t number, real *scratch) noexcept nogil:
    """One block of rows by one block of columns."""
    cdef Py_ssize_t row = number % p.row_blocks * p.block_rows
    cdef Py_ssize_t member = number // p.row_blocks % p.members
    cdef Py_ssize_t column = number // p.row_blocks // p.members * p.block_columns
    cdef Py_ssize_t rows = min(p.block_rows, p.rows - row)
    cdef Py_ssize_t columns = min(p.block_columns, p.stop - p.first - column)
    cdef Py_ssize_t step = 0, steps, r, j, x_row = p.x.row // <Py_ssize_t>sizeof(real)
    cdef const real *x = <const real *>(p.x.data + member * p.x.lead[0] + row * p.x.row)
    cdef const real *panels = p.panels + column // PANEL * p.panel_reals
    cdef real *sums = scratch
    cdef real *x_copy = sums + PROJECT_ROWS * SUMS_PITCH
    cdef real *bias = x_copy + PROJECT_ROWS * X_PITCH
    column += p.first
    for r in range(rows):
        memset(sums + r * SUMS_PITCH, 0, (columns + PANEL - 1) // PANEL * PANEL * sizeof(real))
    if p.panels == NULL:
        project_few(rows, p.steps, columns, x, x_row, <const real *>(p.w.data + column * p.w.col),
                    p.w.row // <Py_ssize_t>sizeof(real), sums)
        step = p.steps
    while step < p.steps:
        steps = min(<Py_ssize_t>PROJECT_STEPS, p.steps - step)
        for r in range(rows):
            load_row(<const char *>(x + r * x_row + step), REAL, sizeof(real), steps, x_copy + r * X_PITCH)
        for j in range((columns + PANEL - 1) // PANEL):
            project_panel(rows, steps, x_copy, panels + j * p.panel_reals + step * PANEL, sums + j * PANEL)
        step += steps
    if p.bias.data != NULL:
        load_row(p.bias.data + column * p.bias.col, p.bias.storage, p.bias.col, columns, bias)
        for r in range(rows):
            for j in range(columns):
                sums[r * SUMS_PITCH + j] += bias[j]
    for r in range(rows):
        write_heads(p, member, row + r, column, columns, sums + r * SUMS_PITCH)


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
