"""The arrays of a call, by their buffers: where each lies, and how far apart its parts are.

Buffers are asked for without their format, which NumPy can't give for bfloat16; what an array holds
comes as a `Storage` code. The checks here are those that protect memory, and nothing else: whoever
calls the kernels has explained every mistake to the user before.
"""
from cpython.buffer cimport Py_buffer

from fastmha._simd cimport LANES, real, vec, vload, vloadu, vset, vstore, vstoreu, vtranspose
from fastmha._storage cimport (
    BFLOAT16, FLOAT16, INT8, REAL, STORAGES, load_one, loads_vectors, storage_bytes, store_one,
    stores_vectors, vload_from, vstore_to,
)

cdef enum:
    MOST_AXES = 64


cdef struct Operand:
    char *data                          # NULL where the call has none
    int storage
    Py_ssize_t row, col                 # strides of the last two axes, in bytes
    Py_ssize_t lead[MOST_AXES]          # strides of the leading axes, 0 where it is broadcast
    Py_ssize_t group                    # so many indices of the last leading axis share one entry
    Py_ssize_t page                     # from one page to the next, where there are pages


cdef inline int bind(
    Operand *o, const Py_buffer *view, int storage, int leads, const Py_ssize_t *lead,
    Py_ssize_t rows, Py_ssize_t cols, bint vector=False,
) except -1:
    """Fits an array to (*lead, rows, cols), or to (*lead, rows) if a `vector`, by NumPy's broadcasting.

    An entry of the last leading axis may serve several of the call's, if their numbers divide.
    """
    cdef int skipped = leads + 2 - vector - view.ndim, axis, own
    cdef Py_ssize_t want, have, stride
    if not 0 <= storage < STORAGES or view.itemsize != storage_bytes(storage) or skipped < 0:
        raise TypeError("an array of another dtype or with more axes")
    o.data = <char *>view.buf
    o.storage = storage
    o.group = 1
    o.row = o.col = o.page = 0
    for axis in range(leads + 2 - vector):
        own = axis - skipped
        want = lead[axis] if axis < leads else rows if axis == leads else cols
        have = view.shape[own] if own >= 0 else 1
        stride = view.strides[own] if own >= 0 and have > 1 else 0
        if axis == leads - 1 and have > 0 and want % have == 0:
            o.group = max(<Py_ssize_t>1, want // have)
        elif have != 1 and have != want:
            raise ValueError("arrays whose shapes do not fit")
        if axis < leads:
            o.lead[axis] = stride
        elif axis == leads:
            o.row = stride
        else:
            o.col = stride
    return 0


cdef inline char *locate(const Operand *o, int leads, const Py_ssize_t *index) noexcept nogil:
    """The operand's part for one index of the leading axes."""
    cdef Py_ssize_t offset = 0
    cdef int axis
    for axis in range(leads - 1):
        offset += index[axis] * o.lead[axis]
    if leads:
        offset += index[leads - 1] // o.group * o.lead[leads - 1]
    return o.data + offset


cdef inline Py_ssize_t load_vectors(
    const int storage, const char *p, Py_ssize_t n, vec factor, real *out
) noexcept nogil:
    """As many of n neighbours as fill vectors; int8 is multiplied with the factor."""
    cdef Py_ssize_t i = 0, size = storage_bytes(storage)
    cdef vec x
    while i + LANES <= n:
        x = vload_from(p + i * size, storage)
        vstoreu(out + i, x * factor if storage == INT8 else x)
        i += LANES
    return i


cdef inline void load_row(
    const char *p, int storage, Py_ssize_t step, Py_ssize_t n, real *out, real factor=1
) noexcept nogil:
    """n elements that lie `step` bytes apart, as reals side by side; int8 times the factor."""
    cdef Py_ssize_t i = 0
    if loads_vectors(storage, step):
        # With the storage a constant, as it must be for speed.
        if storage == REAL:
            i = load_vectors(REAL, p, n, vset(1), out)
        elif storage == FLOAT16:
            i = load_vectors(FLOAT16, p, n, vset(1), out)
        elif storage == BFLOAT16:
            i = load_vectors(BFLOAT16, p, n, vset(1), out)
        elif storage == INT8:
            i = load_vectors(INT8, p, n, vset(factor), out)
        else:
            i = load_vectors(storage, p, n, vset(1), out)
    while i < n:
        out[i] = load_one(p + i * step, storage)
        if storage == INT8:
            out[i] *= factor
        i += 1


cdef inline void store_row(
    char *p, int storage, Py_ssize_t step, Py_ssize_t n, const real *values
) noexcept nogil:
    """n reals to elements that lie `step` bytes apart."""
    cdef Py_ssize_t i = 0
    if stores_vectors(storage, step):
        while i + LANES <= n:
            vstore_to(p + i * step, vloadu(values + i), storage)
            i += LANES
    while i < n:
        store_one(p + i * step, values[i], storage)
        i += 1


cdef inline void load_lanes(
    const char *const *rows, Py_ssize_t count, int storage, Py_ssize_t col, Py_ssize_t cols, real *out,
    Py_ssize_t pitch,
) noexcept nogil:
    """out[c * pitch + r] = element c of row r, for `count` <= LANES rows: they come to lie across lanes.

    Lanes beyond `count` repeat the last row.
    """
    cdef const char *row[LANES]
    cdef vec block[LANES]
    cdef Py_ssize_t c = 0
    cdef int r
    for r in range(LANES):
        row[r] = rows[r if r < count else count - 1]
    if loads_vectors(storage, col):
        while c + LANES <= cols:
            for r in range(LANES):
                block[r] = vload_from(row[r] + c * col, storage)
            vtranspose(block)
            for r in range(LANES):
                vstore(out + (c + r) * pitch, block[r])
            c += LANES
    while c < cols:
        for r in range(LANES):
            out[c * pitch + r] = load_one(row[r] + c * col, storage)
        c += 1


cdef inline void store_lanes(
    char *const *rows, Py_ssize_t count, int storage, Py_ssize_t col, Py_ssize_t cols,
    const real *values, Py_ssize_t pitch,
) noexcept nogil:
    """Element c of row r = values[c * pitch + r], for `count` <= LANES rows."""
    cdef vec block[LANES]
    cdef Py_ssize_t c = 0
    cdef int r
    if stores_vectors(storage, col):
        while c + LANES <= cols:
            for r in range(LANES):
                block[r] = vload(values + (c + r) * pitch)
            vtranspose(block)
            for r in range(count):
                vstore_to(rows[r] + c * col, block[r], storage)
            c += LANES
    while c < cols:
        for r in range(count):
            store_one(rows[r] + c * col, values[c * pitch + r], storage)
        c += 1
