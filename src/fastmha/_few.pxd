"""Few queries, as in decoding: keys across lanes, and then value dimensions, where queries would leave lanes
empty.

A block of keys is transposed in registers as it comes, so that each is read once and, where it can be
loaded as a vector, copied nowhere. Each score, and each weighted sum, is the same chain of multiply-adds
that `_tile` makes of it: the same bits. What lies between the two is the same code, for a tile of one
vector of queries. What comes next is asked for ahead of time, since rows are too many streams for the
processor to foresee, and in the order in which it lies, which is one stream (together measured at twice
the speed).
"""
from fastmha._block cimport Panel
from fastmha._rows cimport Rows
from fastmha._simd cimport (
    INFINITY, LANES, LINE, inlined, prefetch_lines, real, vec, vfma, vfma_in_place, vload, vloadu, vmax, vset,
    vstore, vtranspose,
)
from fastmha._storage cimport BFLOAT16, FLOAT16, FLOAT32, INT8, REAL, load_one, storage_bytes, vload_from

cdef inline vec load_part(const int storage, const Rows *rows, Py_ssize_t j, Py_ssize_t i) noexcept nogil:
    """LANES elements of a row, from the i-th on."""
    if storage == REAL:
        return vloadu(<const real *>rows.at[j] + i)
    if storage == INT8:
        return vload_from(rows.at[j] + i, INT8) * vset(rows.factor[j])
    return vload_from(rows.at[j] + i * storage_bytes(storage), storage)


cdef inline real load_element(
    const int storage, const Rows *rows, Py_ssize_t j, Py_ssize_t i
) noexcept nogil:
    cdef real x = load_one(rows.at[j] + i * storage_bytes(storage), storage)
    return x * rows.factor[j] if storage == INT8 else x


cdef struct Coming:
    # Where in some rows, end to end, is what shall be asked for next.
    const Rows *rows
    Py_ssize_t row, last, offset
    Py_ssize_t bytes                    # of a row
    Py_ssize_t ahead                    # how far from the rows lies what is meant


cdef inline inlined ask(Coming *c, Py_ssize_t span) noexcept nogil:
    """Asks for the next `span` bytes; those past the end of a row are not missed."""
    if c.row <= c.last:
        if span >= LINE or c.offset % LINE == 0:
            prefetch_lines(c.rows.at[c.row] + c.offset + c.ahead, span)
        c.offset += span
        if c.offset >= c.bytes:
            c.offset = 0
            c.row += 1


# --- scores ------------------------------------------------------------------------------------------

cdef inline inlined score_keys(
    const int R, const int G, const int storage, Py_ssize_t d, const Rows *keys,
    const Rows *values, Py_ssize_t first, Py_ssize_t last, const real *queries, real *tile, vec *most,
) noexcept nogil:
    """The products of R queries with G times LANES keys from `first` on; those after `last` repeat it and are
    not written. Their values are asked for, which come next."""
    cdef Py_ssize_t size = storage_bytes(storage)
    cdef Coming coming = Coming(values, first, -1 if values == NULL else last, 0, d * size, 0)
    cdef vec sums[8]
    cdef vec block[LANES]
    cdef real lane[LANES]
    cdef Py_ssize_t i = 0, j
    cdef int r, g, n
    for n in range(R * G):
        sums[n] = vset(0)
    while i + LANES <= d:
        for g in range(G):
            for n in range(LANES):
                j = min(first + g * LANES + n, last)
                block[n] = load_part(storage, keys, j, i)
            ask(&coming, LANES * LANES * size)
            vtranspose(block)
            for n in range(LANES):
                for r in range(R):
                    sums[g * R + r] = vfma(block[n], vset(queries[(i + n) * LANES + r]), sums[g * R + r])
        i += LANES
    while i < d:
        for g in range(G):
            for n in range(LANES):
                lane[n] = load_element(storage, keys, min(first + g * LANES + n, last), i)
            for r in range(R):
                sums[g * R + r] = vfma(vloadu(lane), vset(queries[i * LANES + r]), sums[g * R + r])
        i += 1
    for g in range(G):
        for n in range(LANES):
            block[n] = sums[g * R + min(n, R - 1)]
        vtranspose(block)
        for n in range(LANES):
            j = first + g * LANES + n
            if j <= last:
                vstore(tile + j * LANES, block[n])
                most[0] = vmax(most[0], block[n])


cdef inline inlined score_all_keys(
    const int R, const int storage, Py_ssize_t d, const Rows *keys, const Rows *values, Py_ssize_t low,
    Py_ssize_t high, const real *queries, real *tile, vec *most,
) noexcept nogil:
    cdef Py_ssize_t many = (4 if R == 1 else 8 // R) * LANES
    while high - low >= many:
        score_keys(R, 4 if R == 1 else 8 // R, storage, d, keys, values, low, high - 1, queries, tile, most)
        low += many
    while low < high:
        score_keys(R, 1, storage, d, keys, values, low, high - 1, queries, tile, most)
        low += LANES


cdef inline inlined score_few_rows(
    const int R, Py_ssize_t d, const Rows *keys, const Rows *values, Py_ssize_t low, Py_ssize_t high,
    const real *queries, real *tile, vec *most,
) noexcept nogil:
    if keys.storage == INT8:
        score_all_keys(R, INT8, d, keys, values, low, high, queries, tile, most)
    elif REAL == FLOAT32 and keys.storage == FLOAT16:
        score_all_keys(R, FLOAT16, d, keys, values, low, high, queries, tile, most)
    elif REAL == FLOAT32 and keys.storage == BFLOAT16:
        score_all_keys(R, BFLOAT16, d, keys, values, low, high, queries, tile, most)
    else:
        score_all_keys(R, REAL, d, keys, values, low, high, queries, tile, most)


cdef inline vec score_few(
    const Panel *p, Py_ssize_t d, const Rows *keys, const Rows *values, Py_ssize_t low, Py_ssize_t high,
    real *tile,
) noexcept nogil:
    """`score_atom` for few rows; returns their maxima. Lanes without a row repeat the last."""
    cdef vec most = vset(-INFINITY)
    if p.count == 1:
        score_few_rows(1, d, keys, values, low, high, p.queries, tile, &most)
    elif p.count == 2:
        score_few_rows(2, d, keys, values, low, high, p.queries, tile, &most)
    elif LANES < 16 or p.count <= 4:
        score_few_rows(4, d, keys, values, low, high, p.queries, tile, &most)
    else:
        score_few_rows(8, d, keys, values, low, high, p.queries, tile, &most)
    return most


# --- weighted sums -----------------------------------------------------------------------------------

cdef inline inlined add_value(
    const int R, const int C, const int storage, const Rows *values, Py_ssize_t j, Py_ssize_t first,
    const real *tile, vec *sums,
) noexcept nogil:
    """Adds one weighted value: C times LANES of its dimensions, from `first` on, for R rows."""
    cdef vec part[8]
    cdef vec weight
    cdef int r, n
    for n in range(C):
        part[n] = load_part(storage, values, j, first + n * LANES)
    for r in range(R):
        weight = vset(tile[j * LANES + r])
        for n in range(C):
            sums[n * R + r] = vfma_in_place(part[n], weight, sums[n * R + r])


cdef inline inlined sum_columns(
    const int R, const int C, const int storage, const Rows *values, Py_ssize_t low, Py_ssize_t high,
    Py_ssize_t width, Py_ssize_t first, Py_ssize_t ahead, const real *tile, vec keep, vec add, real *out,
) noexcept nogil:
    """C times LANES dimensions of the values, from `first` on, for R rows; asks for what lies `ahead`."""
    cdef vec sums[8]
    cdef vec block[LANES]
    cdef Coming coming
    cdef Py_ssize_t done = first * (high - low), size = storage_bytes(storage), j, i
    cdef int n
    # Narrow types wait for arithmetic, not for memory: with several keys at a time a step takes five sixths
    # of the time. Reals, which wait for memory, would lose a tenth.
    cdef int together = 1 if storage == REAL else 8 // C
    for n in range(R * C):
        sums[n] = vset(0)
    coming = Coming(values, low + done // width, high - 1, done % width * size, width * size, ahead)
    j = low
    while j + together <= high:
        ask(&coming, together * C * LANES * size)
        for n in range(together):
            add_value(R, C, storage, values, j + n, first, tile, sums)
        j += together
    while j < high:
        add_value(R, C, storage, values, j, first, tile, sums)
        j += 1
    for n in range(C):
        for i in range(LANES):
            block[i] = sums[n * R + min(i, R - 1)]
        vtranspose(block)
        for i in range(LANES):
            vstore(out, vfma(block[i], add, vload(out) * keep))
            out += LANES


cdef inline inlined sum_all_columns(
    const int R, const int storage, Py_ssize_t width, const Rows *values, Py_ssize_t low, Py_ssize_t high,
    Py_ssize_t ahead, const real *tile, vec keep, vec add, real *out,
) noexcept nogil:
    cdef Py_ssize_t e = 0, j
    cdef vec sum
    while width - e >= 8 // R * LANES:
        sum_columns(R, 8 // R, storage, values, low, high, width, e, ahead, tile, keep, add, out + e * LANES)
        e += 8 // R * LANES
    while width - e >= LANES:
        sum_columns(R, 1, storage, values, low, high, width, e, ahead, tile, keep, add, out + e * LANES)
        e += LANES
    while e < width:
        sum = vset(0)
        for j in range(low, high):
            sum = vfma(vset(load_element(storage, values, j, e)), vload(tile + j * LANES), sum)
        vstore(out + e * LANES, vfma(sum, add, vload(out + e * LANES) * keep))
        e += 1


cdef inline inlined sum_few_rows(
    const int R, Py_ssize_t width, const Rows *values, Py_ssize_t low, Py_ssize_t high, Py_ssize_t ahead,
    const real *tile, vec keep, vec add, real *out,
) noexcept nogil:
    if values.storage == INT8:
        sum_all_columns(R, INT8, width, values, low, high, ahead, tile, keep, add, out)
    elif REAL == FLOAT32 and values.storage == FLOAT16:
        sum_all_columns(R, FLOAT16, width, values, low, high, ahead, tile, keep, add, out)
    elif REAL == FLOAT32 and values.storage == BFLOAT16:
        sum_all_columns(R, BFLOAT16, width, values, low, high, ahead, tile, keep, add, out)
    else:
        sum_all_columns(R, REAL, width, values, low, high, ahead, tile, keep, add, out)


cdef inline void sum_few(
    const Panel *p, Py_ssize_t width, const Rows *values, Py_ssize_t low, Py_ssize_t high, Py_ssize_t ahead,
    const real *tile, vec keep, vec add,
) noexcept nogil:
    """`sum_values` for few rows. The keys of the next atom are likely to be so many bytes `ahead`."""
    if p.count == 1:
        sum_few_rows(1, width, values, low, high, ahead, tile, keep, add, p.out)
    elif p.count == 2:
        sum_few_rows(2, width, values, low, high, ahead, tile, keep, add, p.out)
    elif LANES < 16 or p.count <= 4:
        sum_few_rows(4, width, values, low, high, ahead, tile, keep, add, p.out)
    else:
        sum_few_rows(8, width, values, low, high, ahead, tile, keep, add, p.out)
