"""The part of a mask that belongs to a tile: read in place, whatever its strides, and laid across lanes."""
from fastmha._block cimport Block, Panel
from fastmha._operand cimport Operand, load_lanes, load_row
from fastmha._simd cimport (
    INFINITY, LANES, real, vabs, vec, vload_bool, vloadu, vset, vstore, vstoreu, vtranspose,
)
from fastmha._storage cimport BOOL


cdef inline bint one_row(const Block *b, const Panel *p) noexcept nogil:
    """Whether all rows of the panel have the same mask, as with padding."""
    cdef int i
    for i in range(p.first + 1, p.first + p.count):
        if b.mask[i] != b.mask[p.first]:
            return False
    return True


cdef inline bint load_mask(
    const Operand *m, const Block *b, const Panel *p, Py_ssize_t atom, bint alike, Py_ssize_t *low,
    Py_ssize_t *high,
) noexcept nogil:
    """Fills b.bias with [key][row], or [key] where rows are `alike`, and leaves off the keys at both
    ends that no row sees. True if a key in between is hidden from a row, or biased."""
    cdef Py_ssize_t width = 1 if alike else p.vectors * LANES, first = low[0], last = high[0]
    cdef int v
    if alike:
        load_mask_row(m, b.mask[p.first] + (atom + first) * m.col, last - first, b.bias + first)
    else:
        for v in range(p.vectors):
            load_mask_lanes(m, b.mask + p.first + v * LANES, min(LANES, p.count - v * LANES), atom, first,
                            last, b.bias + v * LANES, width)
    while first < last and all_hidden(b.bias + first * width, width):
        first += 1
    while first < last and all_hidden(b.bias + (last - 1) * width, width):
        last -= 1
    low[0], high[0] = first, last
    return not all_zero(b.bias + first * width, (last - first) * width)


cdef inline bint all_hidden(const real *bias, Py_ssize_t n) noexcept nogil:
    """A NaN does not hide."""
    cdef Py_ssize_t i
    for i in range(n):
        if bias[i] != -INFINITY:
            return False
    return True


cdef inline bint all_zero(const real *bias, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i = 0
    cdef vec size
    cdef real lane[LANES]
    cdef int r
    while i + 4 * LANES <= n:                    # as a rule the first few tell
        size = vset(0)
        for r in range(4):
            size = size + vabs(vloadu(bias + i + r * LANES))  # a NaN stays
        vstoreu(lane, size)
        for r in range(LANES):
            if lane[r] != 0:
                return False
        i += 4 * LANES
    while i < n:
        if bias[i] != 0:
            return False
        i += 1
    return True


cdef inline void load_mask_row(
    const Operand *m, const char *data, Py_ssize_t n, real *out
) noexcept nogil:
    cdef Py_ssize_t j = 0
    if m.storage == BOOL and m.col == 1:
        while j + LANES <= n:
            vstoreu(out + j, vload_bool(<const unsigned char *>data + j))
            j += LANES
    load_row(data + j * m.col, m.storage, m.col, n - j, out + j)


cdef inline void load_mask_lanes(
    const Operand *m, const char *const *rows, int count, Py_ssize_t atom, Py_ssize_t low, Py_ssize_t high,
    real *out, Py_ssize_t pitch,
) noexcept nogil:
    """Like `load_lanes`, for the atom's keys low to high, and fast for bools too."""
    cdef const char *row[LANES]
    cdef vec block[LANES]
    cdef int r
    for r in range(LANES):
        row[r] = rows[r if r < count else count - 1] + atom * m.col
    if m.storage == BOOL and m.col == 1:
        while low + LANES <= high:
            for r in range(LANES):
                block[r] = vload_bool(<const unsigned char *>row[r] + low)
            vtranspose(block)
            for r in range(LANES):
                vstore(out + (low + r) * pitch, block[r])
            low += LANES
    for r in range(LANES):
        row[r] += low * m.col
    load_lanes(row, LANES, m.storage, m.col, high - low, out + low * pitch, pitch)
