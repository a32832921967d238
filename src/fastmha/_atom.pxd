"""One atom of keys for one panel of rows: the step that all paths are made of."""
from libc.stdint cimport uint32_t

from fastmha._block cimport Block, Panel, Prefetch, per_head, prefetch_some, share
from fastmha._call cimport ATOM, BOUNDLESS, PANEL, Call
from fastmha._dropout cimport drop_weights
from fastmha._few cimport score_few, sum_few
from fastmha._mask cimport load_mask, one_row
from fastmha._math cimport exp2_scaled
from fastmha._operand cimport store_lanes
from fastmha._rows cimport Rows, all_finite, copy_rows, prefetch_rows
from fastmha._simd cimport (
    INFINITY, LANES, PANEL_VECTORS, TILE_ROWS, bit_vec, bits, inlined, prefetch_lines, real, vec, vfma, vless,
    vload, vload_words, vloadu, vmax, vset, vstore, vstoreu,
)
from fastmha._stages cimport (
    add_bias, add_huge_bias, cap_scores, find_maximum, finite, hide_masked, hide_outside, mark_hidden,
    scale_scores, slope_of_cap, subtract_distance, weigh,
)
from fastmha._storage cimport BOOL
from fastmha._tile cimport score_rows, value_rows


# --- scores ------------------------------------------------------------------------------------------

cdef inline inlined stand(
    const int V, const Block *b, const Panel *p, Py_ssize_t atom, Py_ssize_t offset, Py_ssize_t least,
    Py_ssize_t most, vec *places,
) noexcept nogil:
    """The rows' positions plus an offset, counted from the atom's start, between two bounds."""
    cdef real lane[PANEL]
    cdef int i, v
    for i in range(V * LANES):
        lane[i] = <real>max(least, min(most, b.position[p.first + min(i, p.count - 1)] - atom + offset))
    for v in range(V):
        places[v] = vloadu(lane + v * LANES)


cdef inline void prefetch_mask(
    const Call *c, const Panel *p, const char *const *mask, Py_ssize_t place, Py_ssize_t tile
) noexcept nogil:
    """Asks for some rows of an atom's mask: for all, tile by tile. Worth a tenth with a mask of L x S, whose
    rows lie in as many pages."""
    cdef Py_ssize_t share_of_tile = (PANEL * TILE_ROWS + ATOM - 1) // ATOM, n
    for n in range(tile * share_of_tile, min(<Py_ssize_t>p.count, (tile + 1) * share_of_tile)):
        prefetch_lines(mask[n] + place, ATOM * c.mask.col)


cdef inline inlined score_atom(
    const int V, const Call *c, const Panel *p, const Rows *keys, const Rows *values,
    const char *const *mask, Py_ssize_t place, Prefetch *ahead, Py_ssize_t low, Py_ssize_t high, real *tile,
    vec *most,
) noexcept nogil:
    """The products of keys low to high with the panel's queries. `values`, if not NULL, are wanted next, and
    after them this place in the rows of the `mask`; what lies `ahead` little by little."""
    cdef Py_ssize_t j = low, left
    cdef const real *rows = keys.data + low * keys.row
    cdef int v
    for v in range(V):
        most[v] = vset(-INFINITY)
    tile += low * V * LANES
    if V == 1:
        # With one vector a row of the tile, six chains would wait for one another.
        while high - j >= 2 * TILE_ROWS:
            score_rows(2 * TILE_ROWS, V, c.d, rows, keys.row, p.queries, tile, most)
            rows += 2 * TILE_ROWS * keys.row
            tile += 2 * TILE_ROWS * V * LANES
            j += 2 * TILE_ROWS
    while high - j >= TILE_ROWS:
        if values != NULL:
            prefetch_rows(values, j, j + TILE_ROWS, c.e)
        if mask != NULL:
            prefetch_mask(c, p, mask, place, j // TILE_ROWS)
        if ahead != NULL:
            prefetch_some(ahead, ahead.share)
        score_rows(TILE_ROWS, V, c.d, rows, keys.row, p.queries, tile, most)
        rows += TILE_ROWS * keys.row
        tile += TILE_ROWS * V * LANES
        j += TILE_ROWS
    left = high - j
    if left == 5:
        score_rows(5, V, c.d, rows, keys.row, p.queries, tile, most)
    elif left == 4:
        score_rows(4, V, c.d, rows, keys.row, p.queries, tile, most)
    elif left == 3:
        score_rows(3, V, c.d, rows, keys.row, p.queries, tile, most)
    elif left == 2:
        score_rows(2, V, c.d, rows, keys.row, p.queries, tile, most)
    elif left == 1:
        score_rows(1, V, c.d, rows, keys.row, p.queries, tile, most)


cdef inline inlined score_unmasked(
    const int V, const Call *c, const Block *b, const Panel *p, Py_ssize_t atom, const Rows *keys,
    const Rows *values, const char *const *dense, Py_ssize_t low, Py_ssize_t high, vec *most,
) noexcept nogil:
    """The scores before any key is hidden. `most` is not theirs where they are but scaled."""
    cdef vec slope[4]
    cdef vec position[4]
    cdef int v
    if V == 1 and b.few:
        most[0] = score_few(p, c.d, keys, values, low, high, b.tile)
    else:
        score_atom(
            V, c, p, keys, values if p.first == 0 else NULL, dense,
            (atom + ATOM) * c.mask.col, b.ahead, low, high, b.tile, most,
        )
    if c.raw:
        return
    scale_scores(V, low, high, b.tile, c.scale)
    if c.softcap > 0:
        cap_scores(V, low, high, b.tile, c.softcap, most)
        if b.cap_slope != NULL:
            slope_of_cap(V, low, high, b.tile, c.softcap, b.cap_slope)
    if c.slopes != NULL:
        stand(V, b, p, atom, 0, -BOUNDLESS, BOUNDLESS, position)
        for v in range(V):
            slope[v] = per_head(c.slopes, b, p, v)
        subtract_distance(V, low, high, b.tile, slope, position, most)


cdef inline bint any_infinite(vec x) noexcept nogil:
    cdef real lane[LANES]
    cdef int i
    vstoreu(lane, x)
    for i in range(LANES):
        if lane[i] == INFINITY:
            return True
    return False


cdef inline bint score_tile(
    const Call *c, const Block *b, const Panel *p, Py_ssize_t atom, const Rows *keys, const Rows *values,
    Py_ssize_t *low, Py_ssize_t *high, vec *most,
) noexcept nogil:
    """The final scores of an atom's keys low to high, and their maxima: all others are hidden from all
    the panel's rows. True if some in between are hidden from some, or may be. `values`, if not NULL, are
    wanted next."""
    cdef bint partly = False
    if p.vectors == 1:
        score_vectors(1, c, b, p, atom, keys, values, low, high, most, &partly)
    elif p.vectors == 2:
        score_vectors(2, c, b, p, atom, keys, values, low, high, most, &partly)
    elif PANEL_VECTORS > 2 and p.vectors == 3:
        score_vectors(3, c, b, p, atom, keys, values, low, high, most, &partly)
    elif PANEL_VECTORS > 2:
        score_vectors(PANEL_VECTORS, c, b, p, atom, keys, values, low, high, most, &partly)
    return partly


cdef inline inlined score_vectors(
    const int V, const Call *c, const Block *b, const Panel *p, Py_ssize_t atom, const Rows *keys,
    const Rows *values, Py_ssize_t *low, Py_ssize_t *high, vec *most, bint *partly,
) noexcept nogil:
    cdef Py_ssize_t lowest = p.lowest - atom, highest = p.highest - atom
    cdef bint masked = False, outside, alike = False, huge = False
    cdef vec first[4]
    cdef vec last[4]
    cdef vec found[4]                            # in registers, for no store can change what is but local
    cdef vec greatest
    cdef const char *const *dense = NULL         # the rows' masks, if worth asking for
    cdef int v
    low[0] = max(<Py_ssize_t>0, lowest - c.left)
    high[0] = min(min(<Py_ssize_t>ATOM, b.keys - atom), highest + c.right + 1)
    if c.mask.data != NULL and low[0] < high[0]:
        alike = one_row(b, p)
        masked = load_mask(&c.mask, b, p, atom, alike, low, high)
        if not alike and c.mask.col <= <Py_ssize_t>sizeof(double):
            dense = &b.mask[p.first]
    if low[0] >= high[0]:
        return
    outside = highest - c.left > low[0] or lowest + c.right < high[0] - 1
    while True:
        score_unmasked(V, c, b, p, atom, keys, values, dense, low[0], high[0], found)
        if masked and c.mask.storage == BOOL:
            hide_masked(V, low[0], high[0], b.tile, b.bias, alike, found)
        elif masked and huge:
            add_huge_bias(V, low[0], high[0], b.tile, b.bias, alike, found)
        elif masked:
            add_bias(V, low[0], high[0], b.tile, b.bias, alike, found)
            greatest = found[0]
            for v in range(1, V):
                greatest = vmax(greatest, found[v])
            huge = any_infinite(greatest)
            if huge:
                continue
        break
    if outside:
        stand(V, b, p, atom, -c.left, 0, ATOM, first)
        stand(V, b, p, atom, c.right, -1, ATOM, last)
        hide_outside(V, low[0], high[0], b.tile, first, last, found)
    elif not (c.raw or masked or c.softcap > 0 or c.slopes != NULL):
        find_maximum(V, low[0], high[0], b.tile, found)
    for v in range(V):
        most[v] = found[v]
    partly[0] = masked or outside


# --- weighted sums -----------------------------------------------------------------------------------

cdef inline inlined sum_values(
    const int V, Py_ssize_t width, const Rows *values, Prefetch *ahead, Py_ssize_t low, Py_ssize_t high,
    const real *tile, const vec *keep, const vec *add, real *out,
) noexcept nogil:
    """out = out * keep + (weighted sums of the values) * add."""
    cdef Py_ssize_t e = 0, left, n = high - low
    cdef const real *columns = values.data + low * values.row
    tile += low * V * LANES
    if V == 1:
        while width - e >= 2 * TILE_ROWS:
            value_rows(2 * TILE_ROWS, V, n, columns, values.row, tile, keep, add, out)
            columns += 2 * TILE_ROWS
            out += 2 * TILE_ROWS * V * LANES
            e += 2 * TILE_ROWS
    while width - e >= TILE_ROWS:
        if ahead != NULL:
            prefetch_some(ahead, ahead.share)
        value_rows(TILE_ROWS, V, n, columns, values.row, tile, keep, add, out)
        columns += TILE_ROWS
        out += TILE_ROWS * V * LANES
        e += TILE_ROWS
    left = width - e
    if left == 5:
        value_rows(5, V, n, columns, values.row, tile, keep, add, out)
    elif left == 4:
        value_rows(4, V, n, columns, values.row, tile, keep, add, out)
    elif left == 3:
        value_rows(3, V, n, columns, values.row, tile, keep, add, out)
    elif left == 2:
        value_rows(2, V, n, columns, values.row, tile, keep, add, out)
    elif left == 1:
        value_rows(1, V, n, columns, values.row, tile, keep, add, out)


cdef inline void sum_seen_values(
    int vectors, const Call *c, const Panel *p, const Rows *values, Py_ssize_t low, Py_ssize_t high,
    const real *tile, const real *marks, const vec *keep, const vec *add,
) noexcept nogil:
    """`sum_values` where values that are not finite lie among the hidden: 0 * NaN would show them."""
    cdef Py_ssize_t e, j
    cdef int v
    cdef vec sum
    cdef real *place
    for e in range(c.e):
        for v in range(vectors):
            sum = vset(0)
            for j in range(low, high):
                sum = vless(
                    vset(0), vload(marks + (j * vectors + v) * LANES),
                    vfma(vset(values.data[j * values.row + e]), vload(tile + (j * vectors + v) * LANES), sum),
                    sum,
                )
            place = p.out + (e * vectors + v) * LANES
            vstore(place, vfma(sum, add[v], vload(place) * keep[v]))


# --- steps -------------------------------------------------------------------------------------------

cdef inline inlined drop(
    const int V, const Call *c, const Block *b, const Panel *p, Py_ssize_t atom, Py_ssize_t low,
    Py_ssize_t high,
) noexcept nogil:
    cdef bits lane[PANEL]
    cdef bit_vec positions[4]
    cdef bit_vec heads[4]
    cdef int i, v
    for i in range(V * LANES):
        lane[i] = <bits><uint32_t>b.position[p.first + min(i, p.count - 1)]
    for v in range(V):
        positions[v] = vload_words(lane + v * LANES)
    for i in range(V * LANES):
        lane[i] = b.head[p.first + min(i, p.count - 1)]
    for v in range(V):
        heads[v] = vload_words(lane + v * LANES)
    drop_weights(V, low, high, b.tile, &c.dropout, atom, positions, heads, b.member)


cdef inline inlined rescale(
    const int V, const Call *c, Panel *p, const vec *most, const vec *total, vec *keep, vec *add
) noexcept nogil:
    """Takes in a maximum and a sum of weights. `keep` and `add` bring what the panel has, and what
    comes to it, to the greater maximum. Where nothing was seen, nothing weighs."""
    cdef vec before, now, base
    cdef int v
    for v in range(V):
        before = vload(p.most + v * LANES)
        now = vmax(before, most[v])
        base = finite(now)
        keep[v] = exp2_scaled(before - base, vset(c.sharpness))
        add[v] = exp2_scaled(most[v] - base, vset(c.sharpness))
        vstore(p.most + v * LANES, now)
        vstore(p.total + v * LANES, vfma(total[v], add[v], vload(p.total + v * LANES) * keep[v]))


cdef inline inlined advance(
    const int V, const Call *c, const Block *b, Panel *p, Py_ssize_t atom, const Rows *keys, Rows *values,
    int *values_finite,
) noexcept nogil:
    """Takes the panel one atom of keys further."""
    cdef Py_ssize_t low, high, distance
    cdef bint careful = False
    cdef vec most[4]
    cdef vec total[4]
    cdef vec keep[4]
    cdef vec add[4]
    if score_tile(c, b, p, atom, keys, values, &low, &high, most):
        if values.data == NULL:
            copy_rows(values, &c.v, min(<Py_ssize_t>ATOM, b.keys - atom), c.e, b.value_copy)
        if values_finite[0] < 0:
            values_finite[0] = all_finite(values, min(<Py_ssize_t>ATOM, b.keys - atom), c.e)
        careful = not values_finite[0]
        if careful:
            mark_hidden(V, low, high, b.tile, b.bias)
    if low >= high:
        return
    weigh(V, low, high, b.tile, most, c.sharpness, total)
    if c.dropout.threshold:
        drop(V, c, b, p, atom, low, high)
    rescale(V, c, p, most, total, keep, add)
    if careful:
        sum_seen_values(V, c, p, values, low, high, b.tile, b.bias, keep, add)
    elif V == 1 and b.few:
        distance = keys.at[low] + ATOM * c.k.row - values.at[low]
        sum_few(p, c.e, values, low, high, distance, b.tile, keep[0], add[0])
    else:
        if p.first == 0 and keys.data != b.key_copy:
            # The next atom's, or where heads are short those of some heads further on.
            prefetch_rows(keys, ATOM, ATOM + min(<Py_ssize_t>ATOM, b.keys - atom), c.d)
        sum_values(V, c.e, values, b.ahead, low, high, b.tile, keep, add, p.out)


cdef inline void merge(const Call *c, Panel *p, const Panel *part) noexcept nogil:
    """Takes the panel further by what another, which began anew, saw of one atom: the same bits."""
    cdef vec most, total, keep, add
    cdef real *place
    cdef Py_ssize_t e
    cdef int v
    cdef Panel one
    for v in range(p.vectors):
        one = p[0]
        one.most += v * LANES
        one.total += v * LANES
        most, total = vload(part.most + v * LANES), vload(part.total + v * LANES)
        rescale(1, c, &one, &most, &total, &keep, &add)
        for e in range(c.e):
            place = p.out + (e * p.vectors + v) * LANES
            vstore(place, vfma(vload(part.out + (e * p.vectors + v) * LANES), add, vload(place) * keep))


cdef inline void write_weights(
    const Call *c, const Block *b, const Panel *p, Py_ssize_t atom, const Rows *keys
) noexcept nogil:
    """The atom's probabilities, once the panel has been through all atoms."""
    cdef Py_ssize_t low, high, j
    cdef char *rows[LANES]
    cdef vec most[4]
    cdef vec base, part
    cdef real *place
    cdef int v, r, count
    score_tile(c, b, p, atom, keys, NULL, &low, &high, most)
    if low >= high:
        return
    for v in range(p.vectors):
        base = finite(vload(p.most + v * LANES))
        part = share(c, b, p, v)
        for j in range(low, high):
            place = b.tile + (j * p.vectors + v) * LANES
            vstore(place, exp2_scaled(vload(place) - base, vset(c.sharpness)) * part)
        count = min(LANES, p.count - v * LANES)
        for r in range(count):
            rows[r] = b.weights[p.first + v * LANES + r] + (atom + low) * c.weights.col
        store_lanes(rows, count, c.weights.storage, c.weights.col, high - low,
                    b.tile + (low * p.vectors + v) * LANES, p.vectors * LANES)


cdef inline void step(
    const Call *c, const Block *b, Panel *p, Py_ssize_t atom, const Rows *keys, Rows *values,
    int *values_finite,
) noexcept nogil:
    """`advance` with V a constant, as it must be; or where there are no values `write_weights`."""
    if values == NULL:
        write_weights(c, b, p, atom, keys)
    elif p.vectors == 1:
        advance(1, c, b, p, atom, keys, values, values_finite)
    elif p.vectors == 2:
        advance(2, c, b, p, atom, keys, values, values_finite)
    elif PANEL_VECTORS > 2 and p.vectors == 3:
        advance(3, c, b, p, atom, keys, values, values_finite)
    elif PANEL_VECTORS > 2:
        advance(PANEL_VECTORS, c, b, p, atom, keys, values, values_finite)
