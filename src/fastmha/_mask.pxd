"""The part of a mask that belongs to a tile: read in place, whatever its strides, and laid across lanes."""
from fastmha._block cimport Block, Panel
from fastmha._operand cimport Operand, load_lanes
from fastmha._simd cimport (
    INFINITY, LANES, real, vabs, vec, vload, vload_bool, vmax, vset, vstore, vstoreu, vtranspose,
)
from fastmha._storage cimport BOOL, load_one


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
    cdef Py_ssize_t width = p.vectors * LANES, j, first = high[0], last = low[0] - 1
    cdef const char *data
    cdef real lane[LANES]
    cdef vec bias, most, size
    cdef bint some = False, seen
    cdef int v, r
    if not alike:
        for v in range(p.vectors):
            load_mask_lanes(m, b.mask + p.first + v * LANES, min(LANES, p.count - v * LANES), atom, low[0],
                            high[0], b.bias + v * LANES, width)
    data = b.mask[p.first] + atom * m.col
    for j in range(low[0], high[0]):
        if alike:
            b.bias[j] = load_one(data + j * m.col, m.storage)
            seen = b.bias[j] != -INFINITY
            some |= b.bias[j] != 0
        else:
            most, size = vset(-INFINITY), vset(0)
            for v in range(p.vectors):
                bias = vload(b.bias + j * width + v * LANES)
                most = vmax(most, bias)          # a NaN is seen
                size = size + vabs(bias)
            vstoreu(lane, most)
            seen = False
            for r in range(LANES):
                seen |= lane[r] != -INFINITY
            vstoreu(lane, size)
            for r in range(LANES):
                some |= lane[r] != 0
        if seen:
            first = min(first, j)
            last = j
    if some:
        low[0], high[0] = first, last + 1
    return some


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
