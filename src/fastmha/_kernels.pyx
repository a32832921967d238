"""Fused attention, built once for each instruction set and precision.

The loop over keys is the whole idea. For a block of queries, the scores with ATOM keys at a time are
computed, masked, exponentiated and multiplied with the values, all in a tile that never leaves the
cache; running maxima and sums make the parts add up to the softmax over all keys. No L x S array exists.

    memory read for L queries, S keys:   plain   L*D + S*D + S*E  and 6 times L*S for the scores
                                         here    L*D + (S*D + S*E) * L / BLOCK

    attend -> attend_piece -> attend_block -> advance: pack queries; for each atom of keys and each panel
    of queries: score, scale, bias, hide, maximum, weigh, sum up; at the end divide and unpack.

Queries lie across lanes, so that each row's arithmetic is one fixed sequence, whatever its neighbours,
the number of threads and the width of the registers.
"""
from time import perf_counter

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_STRIDED, PyBUF_STRIDED_RO, PyBuffer_Release, PyObject_GetBuffer
from libc.math cimport ceil
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from fastmha._call cimport ATOM, BLOCK, BLOCK_PANELS, BOUNDLESS, PANEL, Call
from fastmha._dropout cimport drop_weights
from fastmha._math cimport exp2_scaled, vexp, vlog
from fastmha._operand cimport MOST_AXES, Operand, bind, load_lanes, load_row, locate, store_lanes
from fastmha._simd cimport (
    FUSED, INFINITY, LANES, PANEL_VECTORS, REAL_BYTES, TILE_ROWS, bit_vec, bits, real, vec, vfma, vless,
    vload, vload_bool, vload_words, vloadu, vmax, vset, vstore, vstoreu, vtranspose,
)
from fastmha._stages cimport (
    add_bias, cap_scores, finite, find_maximum, hide_masked, hide_outside, mark_hidden, scale_scores,
    subtract_distance, weigh,
)
from fastmha._storage cimport BOOL, REAL, load_one, store_one
from fastmha._team cimport Body, Scratch, give_scratch, parallel_for, take_scratch, thread_limit
from fastmha._tile cimport score_rows, value_rows

vector_bytes = LANES * REAL_BYTES
fused = bool(FUSED)


cdef struct Panel:
    # Queries across lanes, and how far their softmax has come.
    Py_ssize_t first, count
    int vectors
    real *queries                       # [d][query]
    real *out                           # [e][query], not yet divided
    real *most                          # maximum of the scores so far
    real *total                         # sum of the weights so far


cdef struct Block:
    # A block of queries of one head, where its operands lie, and scratch for it.
    Py_ssize_t first, rows              # rows of the output
    Py_ssize_t count                    # those of them that ask: within the member's length
    Py_ssize_t keys                     # those within the member's length
    Py_ssize_t shift                    # query i stands at position i + shift
    Py_ssize_t head, member             # for the pattern of dropout
    real slope, sink
    int panels
    Panel panel[BLOCK_PANELS]
    const char *q
    const char *k
    const char *v
    const char *mask
    char *weights
    char *out
    char *lse
    real *tile                          # [key][query]: scores, then weights
    real *bias                          # [key][query] or [key]: the mask's part for the tile
    real *key_copy                      # [key][d] and [key][e], where they can't be read in place
    real *value_copy


cdef struct Rows:
    # An atom's keys or values, ready to be read as scalars.
    const real *data
    Py_ssize_t row                      # in reals


# --- scratch and packing -----------------------------------------------------------------------------

cdef size_t slot_bytes(const Call *c) noexcept nogil:
    cdef Py_ssize_t reals = BLOCK * (c.d + c.e + 2) + 2 * ATOM * PANEL + ATOM * (c.d + c.e + 2 * LANES)
    return (reals * sizeof(real) + 63) // 64 * 64


cdef void open_block(const Call *c, Py_ssize_t number, char *scratch, Block *b) noexcept nogil:
    """Finds the block's operands and packs its queries. The blocks of a head go from the last to the
    first: under a causal mask the costly ones start early."""
    cdef Py_ssize_t head = number // c.blocks, i, lane
    cdef Py_ssize_t index[MOST_AXES]
    cdef real *place = <real *>scratch
    cdef Panel *p
    cdef int axis, n
    for axis in range(c.leads - 1, -1, -1):
        index[axis] = head % c.lead[axis]
        head = head // c.lead[axis]
    b.keys = c.keys if c.key_lengths == NULL else c.key_lengths[index[0]]
    b.shift = c.shift if c.shifts == NULL else c.shifts[index[0]]
    b.head = index[c.leads - 1] if c.leads else 0
    b.member = number // c.blocks // (c.lead[c.leads - 1] if c.leads else 1)
    b.first = (c.blocks - 1 - number % c.blocks) * BLOCK
    b.rows = min(<Py_ssize_t>BLOCK, c.queries - b.first)
    b.count = b.rows
    if c.query_lengths != NULL:
        b.count = max(<Py_ssize_t>0, min(b.rows, <Py_ssize_t>c.query_lengths[index[0]] - b.first))
    b.slope = <real>c.slopes[index[c.leads - 1]] if c.slopes != NULL else 0
    b.sink = <real>c.sinks[index[c.leads - 1]] if c.sinks != NULL else -INFINITY
    b.panels = <int>((b.count + PANEL - 1) // PANEL)
    b.q = locate(&c.q, c.leads, index) + b.first * c.q.row
    b.k = locate(&c.k, c.leads, index)
    b.v = locate(&c.v, c.leads, index)
    b.out = locate(&c.out, c.leads, index) + b.first * c.out.row
    b.weights = NULL
    if c.weights.data != NULL:
        b.weights = locate(&c.weights, c.leads, index) + b.first * c.weights.row
    b.mask = locate(&c.mask, c.leads, index) + b.first * c.mask.row if c.mask.data else NULL
    b.lse = locate(&c.lse, c.leads, index) + b.first * c.lse.row if c.lse.data else NULL
    b.tile = place
    b.bias = b.tile + ATOM * PANEL
    place = b.bias + ATOM * PANEL
    for n in range(b.panels):
        p = &b.panel[n]
        p.first = b.first + n * PANEL
        p.count = min(<Py_ssize_t>PANEL, b.first + b.count - p.first)
        p.vectors = <int>((p.count + LANES - 1) // LANES)
        p.queries = place
        p.out = p.queries + c.d * PANEL
        p.most = p.out + c.e * PANEL
        p.total = p.most + PANEL
        place = p.total + PANEL
        memset(p.out, 0, c.e * p.vectors * LANES * sizeof(real))
        for lane in range(PANEL):
            p.most[lane] = -INFINITY
            p.total[lane] = 0
        for i in range(p.vectors):
            load_lanes(
                b.q + (n * PANEL + i * LANES) * c.q.row, c.q.storage, c.q.row, c.q.col,
                min(<Py_ssize_t>LANES, p.count - i * LANES), c.d, p.queries + i * LANES, p.vectors * LANES,
            )
        if c.sign < 0:
            scale_scores(1, 0, c.d * p.vectors, p.queries, c.sign)
    b.key_copy = place
    b.value_copy = b.key_copy + ATOM * c.d


cdef Rows ready(
    const Operand *o, const char *data, Py_ssize_t first, Py_ssize_t n, Py_ssize_t width, real *copy
) noexcept nogil:
    """n rows from `first` on: read in place where they are reals side by side, else copied."""
    cdef Rows rows
    cdef Py_ssize_t j
    data += first * o.row
    if o.storage == REAL and (o.col == sizeof(real) or width == 1) and o.row % <Py_ssize_t>sizeof(real) == 0:
        rows.data = <const real *>data
        rows.row = o.row // <Py_ssize_t>sizeof(real)
        return rows
    for j in range(n):
        load_row(data + j * o.row, o.storage, o.col, width, copy + j * width)
    rows.data = copy
    rows.row = width
    return rows


# --- the mask of a tile ------------------------------------------------------------------------------

cdef inline bint load_mask(
    const Call *c, const Block *b, const Panel *p, Py_ssize_t atom, Py_ssize_t *low, Py_ssize_t *high
) noexcept nogil:
    """Fills b.bias for the tile's keys, without those at both ends that no query sees. True if some
    key in between is hidden from some query, or biased."""
    cdef const Operand *m = &c.mask
    cdef const char *data = b.mask + (p.first - b.first) * m.row + atom * m.col
    cdef Py_ssize_t width = p.vectors * LANES, j, first = high[0], last = low[0] - 1
    cdef bint some = False, seen
    cdef int v, r, rows
    cdef vec least, most
    cdef vec block[LANES]
    cdef real ends[LANES]
    if m.row == 0:
        for j in range(low[0], high[0]):
            b.bias[j] = load_one(data + j * m.col, m.storage)
            if b.bias[j] != -INFINITY:
                first = min(first, j)
                last = j
            some |= b.bias[j] != 0
        if some:
            low[0], high[0] = first, last + 1
        return some
    for v in range(p.vectors):
        load_mask_lanes(m, data + v * LANES * m.row, min(<Py_ssize_t>LANES, p.count - v * LANES),
                        low[0], high[0], b.bias + v * LANES, width)
    for j in range(low[0], high[0]):
        most = vset(-INFINITY)
        least = vset(0)
        for v in range(p.vectors):
            block[0] = vload(b.bias + j * width + v * LANES)
            most = vmax(block[0], most)
            least = vless(vset(0), block[0], block[0], vless(block[0], least, block[0], least))
        seen = False
        vstoreu(ends, most)
        for r in range(LANES):
            seen |= ends[r] != -INFINITY
        vstoreu(ends, least)
        for r in range(LANES):
            some |= ends[r] != 0
        if seen:
            first = min(first, j)
            last = j
    if some:
        low[0], high[0] = first, last + 1
    return some


cdef inline void load_mask_lanes(
    const Operand *m, const char *data, Py_ssize_t rows, Py_ssize_t low, Py_ssize_t high, real *out,
    Py_ssize_t pitch,
) noexcept nogil:
    """Like `load_lanes`, for keys low to high, and fast for bools too."""
    cdef vec block[LANES]
    cdef int r
    if m.storage == BOOL and m.col == 1:
        while low + LANES <= high:
            for r in range(LANES):
                block[r] = vload_bool(<const unsigned char *>data + (r if r < rows else rows - 1) * m.row + low)
            vtranspose(block)
            for r in range(LANES):
                vstore(out + (low + r) * pitch, block[r])
            low += LANES
    load_lanes(data + low * m.col, m.storage, m.row, m.col, rows, high - low, out + low * pitch, pitch)


# --- an atom of keys for a panel of queries ----------------------------------------------------------

cdef inline void stand(
    const int V, const Block *b, const Panel *p, Py_ssize_t atom, Py_ssize_t offset, Py_ssize_t least,
    Py_ssize_t most, vec *places,
) noexcept nogil:
    """The queries' positions plus an offset, counted from the atom's start, between two bounds."""
    cdef real lane[PANEL]
    cdef Py_ssize_t i
    cdef int v
    for i in range(V * LANES):
        lane[i] = <real>max(least, min(most, p.first + min(i, p.count - 1) + b.shift - atom + offset))
    for v in range(V):
        places[v] = vloadu(lane + v * LANES)


cdef inline void drop(
    const int V, const Call *c, const Block *b, const Panel *p, Py_ssize_t atom, Py_ssize_t low,
    Py_ssize_t high,
) noexcept nogil:
    cdef bits lane[PANEL]
    cdef bit_vec positions[4]
    cdef Py_ssize_t i
    cdef int v
    for i in range(V * LANES):
        lane[i] = <bits><uint32_t>(p.first + i + b.shift)
    for v in range(V):
        positions[v] = vload_words(lane + v * LANES)
    drop_weights(V, low, high, b.tile, &c.dropout, atom, positions, b.head, b.member)


cdef inline void score_atom(
    const int V, const Call *c, const Panel *p, const Rows *keys, Py_ssize_t low, Py_ssize_t high,
    real *tile, vec *most,
) noexcept nogil:
    """The products of keys low to high with the panel's queries."""
    cdef Py_ssize_t j = low, left
    cdef const real *rows = keys.data + low * keys.row
    cdef int v
    for v in range(V):
        most[v] = vset(-INFINITY)
    tile += low * V * LANES
    while high - j >= TILE_ROWS:
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


cdef inline void sum_values(
    const int V, const Call *c, const Panel *p, const Rows *values, Py_ssize_t low, Py_ssize_t high,
    const real *tile, const vec *keep, const vec *add,
) noexcept nogil:
    """p.out = p.out * keep + (weighted sums of the values) * add."""
    cdef Py_ssize_t e = 0, left, n = high - low
    cdef const real *columns = values.data + low * values.row
    cdef real *out = p.out
    tile += low * V * LANES
    while c.e - e >= TILE_ROWS:
        value_rows(TILE_ROWS, V, n, columns, values.row, tile, keep, add, out)
        columns += TILE_ROWS
        out += TILE_ROWS * V * LANES
        e += TILE_ROWS
    left = c.e - e
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


cdef void sum_seen_values(
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


cdef bint all_finite(const Rows *rows, Py_ssize_t low, Py_ssize_t high, Py_ssize_t width) noexcept nogil:
    cdef vec sum = vset(0)
    cdef real lane[LANES]
    cdef real rest = 0
    cdef Py_ssize_t j, e
    cdef int r
    for j in range(low, high):
        e = 0
        while e + LANES <= width:
            sum = vfma(vloadu(rows.data + j * rows.row + e), vset(0), sum)
            e += LANES
        while e < width:
            rest += rows.data[j * rows.row + e] * 0
            e += 1
    vstoreu(lane, sum)
    for r in range(LANES):
        rest += lane[r]
    return rest == 0


cdef inline bint score_tile(
    const int V, const Call *c, const Block *b, const Panel *p, Py_ssize_t atom, const Rows *keys,
    Py_ssize_t *low, Py_ssize_t *high, vec *most,
) noexcept nogil:
    """The final scores of an atom's keys low to high, and their maxima: all others are hidden from all
    the panel's queries. True if some in between are hidden from some."""
    cdef Py_ssize_t begins = p.first + b.shift - atom, ends = begins + p.count - 1
    cdef bint masked = False, outside
    cdef vec first[4]
    cdef vec last[4]
    low[0] = max(<Py_ssize_t>0, begins - c.left)
    high[0] = min(min(<Py_ssize_t>ATOM, b.keys - atom), ends + c.right + 1)
    if b.mask != NULL and low[0] < high[0]:
        masked = load_mask(c, b, p, atom, low, high)
    if low[0] >= high[0]:
        return False
    outside = ends - c.left > low[0] or begins + c.right < high[0] - 1
    score_atom(V, c, p, keys, low[0], high[0], b.tile, most)
    if not c.raw:
        scale_scores(V, low[0], high[0], b.tile, c.scale)
        if c.softcap > 0:
            cap_scores(V, low[0], high[0], b.tile, c.softcap)
        if c.slopes != NULL:
            stand(V, b, p, atom, 0, -BOUNDLESS, BOUNDLESS, first)
            subtract_distance(V, low[0], high[0], b.tile, b.slope, first)
    if masked:
        if c.mask.storage == BOOL:
            hide_masked(V, low[0], high[0], b.tile, b.bias, c.mask.row == 0)
        else:
            add_bias(V, low[0], high[0], b.tile, b.bias, c.mask.row == 0)
    if outside:
        stand(V, b, p, atom, -c.left, 0, ATOM, first)
        stand(V, b, p, atom, c.right, -1, ATOM, last)
        hide_outside(V, low[0], high[0], b.tile, first, last)
    if masked or outside or not c.raw:
        find_maximum(V, low[0], high[0], b.tile, most)
    return masked or outside


cdef inline void advance(
    const int V, const Call *c, const Block *b, Panel *p, Py_ssize_t atom, const Rows *keys,
    const Rows *values, int *values_finite,
) noexcept nogil:
    """Takes the panel one atom of keys further."""
    cdef Py_ssize_t low, high
    cdef bint careful = False
    cdef vec most[4]
    cdef vec total[4]
    cdef vec keep[4]
    cdef vec add[4]
    cdef vec most_before, most_now, base
    cdef int v
    if score_tile(V, c, b, p, atom, keys, &low, &high, most):
        if values_finite[0] < 0:
            values_finite[0] = all_finite(values, 0, min(<Py_ssize_t>ATOM, b.keys - atom), c.e)
        careful = not values_finite[0]
        if careful:
            mark_hidden(V, low, high, b.tile, b.bias)
    if low >= high:
        return
    weigh(V, low, high, b.tile, most, c.sharpness, total)
    if c.dropout.threshold:
        drop(V, c, b, p, atom, low, high)
    # Both sides of the merge are scaled to the greater maximum. Nothing seen yet weighs nothing.
    for v in range(V):
        most_before = vload(p.most + v * LANES)
        most_now = vmax(most_before, most[v])
        base = finite(most_now)
        keep[v] = exp2_scaled(most_before - base, vset(c.sharpness))
        add[v] = exp2_scaled(most[v] - base, vset(c.sharpness))
        vstore(p.most + v * LANES, most_now)
        vstore(p.total + v * LANES, vfma(total[v], add[v], vload(p.total + v * LANES) * keep[v]))
    if careful:
        sum_seen_values(V, c, p, values, low, high, b.tile, b.bias, keep, add)
    else:
        sum_values(V, c, p, values, low, high, b.tile, keep, add)


cdef inline void write_weights(
    const int V, const Call *c, const Block *b, const Panel *p, Py_ssize_t atom, const Rows *keys,
) noexcept nogil:
    """The atom's probabilities, once the panel has been through all atoms."""
    cdef Py_ssize_t low, high, j, rows, row
    cdef vec most[4]
    cdef vec base, part, whole
    cdef real *place
    cdef int v
    score_tile(V, c, b, p, atom, keys, &low, &high, most)
    if low >= high:
        return
    for v in range(V):
        base = finite(vload(p.most + v * LANES))
        parts(c, b, p, v, &part, &whole)
        for j in range(low, high):
            place = b.tile + (j * V + v) * LANES
            vstore(place, exp2_scaled(vload(place) - base, vset(c.sharpness)) * part)
        row = p.first - b.first + v * LANES
        rows = min(<Py_ssize_t>LANES, p.count - v * LANES)
        store_lanes(
            b.weights + row * c.weights.row + (atom + low) * c.weights.col, c.weights.storage, c.weights.row,
            c.weights.col, rows, high - low, b.tile + (low * V + v) * LANES, V * LANES,
        )


cdef inline void parts(
    const Call *c, const Block *b, const Panel *p, int v, vec *part, vec *most
) noexcept nogil:
    """What a weight relative to the maximum is multiplied with to be a probability, 0 in rows that saw
    nothing; and the maximum, in units of the scaled scores."""
    cdef vec total = vload(p.total + v * LANES), whole = total, share = vset(1), greater
    most[0] = vload(p.most + v * LANES) * vset(c.scale if c.raw else 1)
    if c.sinks != NULL:
        # One more key of weight exp(sink - most), and without a value.
        greater = vmax(most[0], vset(b.sink))
        share = vexp(most[0] - greater)
        whole = vfma(total, share, vexp(vset(b.sink) - greater))
    part[0] = vless(total, vset(0.5), vset(0), share / whole)


cdef void close_panel(const Call *c, const Block *b, const Panel *p) noexcept nogil:
    """Divides by the sums of the weights and unpacks; rows that saw nothing are 0, their LSE -inf."""
    cdef vec total, most, part
    cdef real lse[LANES]
    cdef real *place
    cdef Py_ssize_t e, rows, row
    cdef int v, r
    for v in range(p.vectors):
        parts(c, b, p, v, &part, &most)
        for e in range(c.e):
            place = p.out + (e * p.vectors + v) * LANES
            vstore(place, vfma(vload(place), part, vset(0)))  # + 0: no -0
        rows = min(<Py_ssize_t>LANES, p.count - v * LANES)
        row = p.first - b.first + v * LANES
        store_lanes(b.out + row * c.out.row, c.out.storage, c.out.row, c.out.col, rows, c.e,
                    p.out + v * LANES, p.vectors * LANES)
        if b.lse != NULL:
            total = vload(p.total + v * LANES)
            vstoreu(lse, vless(total, vset(0.5), vset(-INFINITY), most + vlog(total)))
            for r in range(rows):
                store_one(b.lse + (row + r) * c.lse.row, lse[r], c.lse.storage)


cdef void close_silent(const Call *c, const Block *b) noexcept nogil:
    """Rows past the member's length: zeros, and an LSE of minus infinity."""
    cdef Py_ssize_t row, e
    for row in range(b.count, b.rows):
        for e in range(c.e):
            store_one(b.out + row * c.out.row + e * c.out.col, 0, c.out.storage)
        if b.lse != NULL:
            store_one(b.lse + row * c.lse.row, -INFINITY, c.lse.storage)


cdef void attend_block(const Call *c, Py_ssize_t number, char *scratch) noexcept nogil:
    cdef Block b
    cdef int i
    open_block(c, number, scratch, &b)
    pass_over_keys(c, &b, False)
    if b.weights != NULL:
        pass_over_keys(c, &b, True)
    for i in range(b.panels):
        close_panel(c, &b, &b.panel[i])
    close_silent(c, &b)


cdef void pass_over_keys(const Call *c, Block *b, bint weights) noexcept nogil:
    """All atoms of keys, each for all panels: for the outputs, or for the probabilities after them."""
    cdef Rows keys, values
    cdef Panel *p
    cdef Py_ssize_t n, atom = max(<Py_ssize_t>0, b.first + b.shift - c.left) // ATOM * ATOM
    cdef Py_ssize_t stop = min(b.keys, b.first + b.count + b.shift + c.right)
    cdef int i, values_finite
    while b.count and atom < stop:
        n = min(<Py_ssize_t>ATOM, b.keys - atom)
        keys = ready(&c.k, b.k, atom, n, c.d, b.key_copy)
        if not weights:
            values = ready(&c.v, b.v, atom, n, c.e, b.value_copy)
        values_finite = -1                       # not looked at yet
        for i in range(b.panels):
            p = &b.panel[i]
            # V must be a constant where the stages are called.
            if p.vectors == 1:
                step(1, c, b, p, atom, &keys, &values, &values_finite, weights)
            elif p.vectors == 2:
                step(2, c, b, p, atom, &keys, &values, &values_finite, weights)
            elif PANEL_VECTORS > 2 and p.vectors == 3:
                step(3, c, b, p, atom, &keys, &values, &values_finite, weights)
            elif PANEL_VECTORS > 2:
                step(PANEL_VECTORS, c, b, p, atom, &keys, &values, &values_finite, weights)
        atom += ATOM


cdef inline void step(
    const int V, const Call *c, const Block *b, Panel *p, Py_ssize_t atom, const Rows *keys,
    const Rows *values, int *values_finite, bint weights,
) noexcept nogil:
    if weights:
        write_weights(V, c, b, p, atom, keys)
    else:
        advance(V, c, b, p, atom, keys, values, values_finite)


cdef void attend_piece(void *arg, Py_ssize_t piece, int slot) noexcept nogil:
    cdef const Call *c = <const Call *>arg
    cdef Py_ssize_t number
    for number in range(piece * c.grain, min((piece + 1) * c.grain, c.total)):
        attend_block(c, number, c.scratch + slot * c.slot_bytes)


# --- entry -------------------------------------------------------------------------------------------

cdef const void *vector(Py_buffer *view, array, Py_ssize_t length, Py_ssize_t itemsize) except? NULL:
    """A contiguous vector of the call, such as lengths or slopes; NULL for None."""
    if array is None:
        return NULL
    PyObject_GetBuffer(array, view, PyBUF_SIMPLE)
    if view.len != length * itemsize or view.itemsize != itemsize:
        raise ValueError("a vector of another length or dtype")
    return view.buf


cdef int grain_of(const Call *c) noexcept nogil:
    """Blocks of queries in a piece of work: enough for some 40 us, for threads contend over less."""
    cdef double cost = <double>BLOCK * (min(c.keys, c.left + c.right) + 16) * (c.d + c.e + 16)
    return <int>max(1.0, min(1e6, 2e6 / cost))


def attend(q, k, v, out, lse, mask, weights, tuple storages, options):
    """Attention of q (..., L, D) over k (..., S, D) and v (..., S, E), into out (..., L, E).

    `lse` (..., L), `mask`, which broadcasts to (..., L, S), and `weights` (..., L, S), zeros where the
    probabilities go, may be None; `storages` says what the seven arrays hold. `options` is the tuple
    (scale, softcap, left, right, shift, shifts, slopes, sinks, key_lengths, query_lengths, dropout_p,
    seed, member): slopes and sinks float64, shifts and lengths int64, any of them None.
    """
    cdef Py_buffer views[12]
    cdef Py_buffer *o = &views[3]
    cdef int axis
    cdef Py_ssize_t heads, members
    cdef Call c
    cdef double scale, softcap, dropout_p, log2e = 1.4426950408889634
    cdef long long left, right
    cdef uint64_t seed
    (
        scale, softcap, left, right, shift, shifts, slopes, sinks, key_lengths, query_lengths, dropout_p,
        seed, member,
    ) = options
    memset(views, 0, sizeof(views))
    memset(&c, 0, sizeof(c))
    try:
        for axis, array in enumerate((q, k, v, out, lse, mask, weights)):
            if array is not None:
                PyObject_GetBuffer(
                    array, &views[axis], PyBUF_STRIDED if axis in (3, 4, 6) else PyBUF_STRIDED_RO
                )
        if o.ndim < 2 or views[0].ndim < 2 or views[1].ndim < 2 or o.ndim > MOST_AXES:
            raise ValueError("arrays of too few or too many axes")
        c.leads = o.ndim - 2
        c.total = 1
        for axis in range(c.leads):
            c.lead[axis] = o.shape[axis]
            c.total *= o.shape[axis]
        c.queries = o.shape[o.ndim - 2]
        c.e = o.shape[o.ndim - 1]
        c.d = views[0].shape[views[0].ndim - 1]
        c.keys = views[1].shape[views[1].ndim - 2]
        bind(&c.q, &views[0], storages[0], c.leads, c.lead, c.queries, c.d)
        bind(&c.k, &views[1], storages[1], c.leads, c.lead, c.keys, c.d)
        bind(&c.v, &views[2], storages[2], c.leads, c.lead, c.keys, c.e)
        bind(&c.out, o, storages[3], c.leads, c.lead, c.queries, c.e)
        if lse is not None:
            bind(&c.lse, &views[4], storages[4], c.leads, c.lead, c.queries, 1, True)
        if mask is not None:
            bind(&c.mask, &views[5], storages[5], c.leads, c.lead, c.queries, c.keys)
        if weights is not None:
            bind(&c.weights, &views[6], storages[6], c.leads, c.lead, c.queries, c.keys)
        heads = c.lead[c.leads - 1] if c.leads else 0
        members = c.lead[0] if c.leads else 0
        c.slopes = <const double *>vector(&views[7], slopes, heads, 8)
        c.sinks = <const double *>vector(&views[8], sinks, heads, 8)
        c.shifts = <const long long *>vector(&views[9], shifts, members, 8)
        c.key_lengths = <const long long *>vector(&views[10], key_lengths, members, 8)
        c.query_lengths = <const long long *>vector(&views[11], query_lengths, members, 8)
        for axis in range(members):
            if (
                c.key_lengths != NULL and not 0 <= c.key_lengths[axis] <= c.keys
                or c.query_lengths != NULL and not 0 <= c.query_lengths[axis] <= c.queries
            ):
                raise ValueError("lengths beyond the arrays")
        c.left = <Py_ssize_t>min(<long long>BOUNDLESS, left)
        c.right = <Py_ssize_t>min(<long long>BOUNDLESS, right)
        c.shift = shift
        c.softcap = <real>softcap
        c.dropout.threshold = <uint64_t>ceil(dropout_p * 4294967296.0)
        c.dropout.factor = <real>(1 / (1 - dropout_p)) if dropout_p < 1 else 0
        c.dropout.seed_low = <uint32_t>seed
        c.dropout.seed_high = <uint32_t>(seed >> 32)
        c.dropout.member = <uint32_t>(<Py_ssize_t>member)
        c.raw = scale != 0 and softcap == 0 and slopes is None and (mask is None or c.mask.storage == BOOL)
        c.sign = -1 if c.raw and scale < 0 else 1
        c.scale = <real>(scale * c.sign)
        c.sharpness = <real>(scale * c.sign * log2e) if c.raw else <real>log2e
        c.blocks = (c.queries + BLOCK - 1) // BLOCK
        c.total *= c.blocks
        c.grain = grain_of(&c)
        c.slot_bytes = slot_bytes(&c)
        if c.total:
            run(attend_piece, &c)
    finally:
        for axis in range(12):
            PyBuffer_Release(&views[axis])       # does nothing where there is none


cdef int run(Body body, Call *c) except -1:
    """All pieces of a call, on as many threads as there are pieces and the user allows."""
    cdef Py_ssize_t pieces = (c.total + c.grain - 1) // c.grain
    cdef int threads = <int>min(<Py_ssize_t>thread_limit(), pieces)
    cdef Scratch scratch = take_scratch(c.slot_bytes * threads)
    if scratch.start == NULL:
        raise MemoryError("no memory for the kernel's scratch")
    c.scratch = <char *>scratch.start
    try:
        with nogil:
            parallel_for(body, c, pieces, threads)
    finally:
        give_scratch(scratch)
    return 0


# --- softmax -----------------------------------------------------------------------------------------

cdef enum:
    CHUNK = 1024                                 # elements of a row that are in scratch at a time


cdef void softmax_rows(const Call *c, Py_ssize_t number, real *tile) noexcept nogil:
    """LANES rows of c.q into c.out, which have c.queries rows of c.d elements in each lead."""
    cdef Py_ssize_t head = number // c.blocks, start, n, j, row = number % c.blocks * LANES
    cdef Py_ssize_t rows = min(<Py_ssize_t>LANES, c.queries - row)
    cdef Py_ssize_t index[MOST_AXES]
    cdef const char *x
    cdef char *y
    cdef vec most = vset(-INFINITY), total = vset(0), sum, base
    cdef int axis, turn
    for axis in range(c.leads - 1, -1, -1):
        index[axis] = head % c.lead[axis]
        head = head // c.lead[axis]
    x = locate(&c.q, c.leads, index) + row * c.q.row
    y = locate(&c.out, c.leads, index) + row * c.out.row
    for turn in range(3):                        # the maximum; the sum; the quotients
        base = finite(most)
        start = 0
        while start < c.d:
            n = min(<Py_ssize_t>CHUNK, c.d - start)
            load_lanes(x + start * c.q.col, c.q.storage, c.q.row, c.q.col, rows, n, tile, LANES)
            sum = vset(0)
            for j in range(n):
                if turn == 0:
                    most = vmax(most, vload(tile + j * LANES))
                else:
                    sum = sum + vexp(vload(tile + j * LANES) - base)
                    if turn == 2:
                        vstore(tile + j * LANES, vexp(vload(tile + j * LANES) - base) * total)
            if turn == 1:
                total = total + sum
            elif turn == 2:
                store_lanes(y + start * c.out.col, c.out.storage, c.out.row, c.out.col, rows, n, tile, LANES)
            start += CHUNK
        if turn == 1:
            total = vless(total, vset(0.5), vset(0), vset(1) / total)


cdef void softmax_piece(void *arg, Py_ssize_t piece, int slot) noexcept nogil:
    cdef const Call *c = <const Call *>arg
    cdef Py_ssize_t number
    for number in range(piece * c.grain, min((piece + 1) * c.grain, c.total)):
        softmax_rows(c, number, <real *>(c.scratch + slot * c.slot_bytes))


def softmax(x, out, int storage):
    """exp(x - max) / sum along the last axis of x, an array of two axes or more, into out."""
    cdef Py_buffer views[2]
    cdef Call c
    cdef int axis
    memset(views, 0, sizeof(views))
    memset(&c, 0, sizeof(c))
    try:
        PyObject_GetBuffer(x, &views[0], PyBUF_STRIDED_RO)
        PyObject_GetBuffer(out, &views[1], PyBUF_STRIDED)
        if not 2 <= views[0].ndim <= MOST_AXES:
            raise ValueError("an array of too few or too many axes")
        c.leads = views[0].ndim - 2
        c.total = 1
        for axis in range(c.leads):
            c.lead[axis] = views[0].shape[axis]
            c.total *= c.lead[axis]
        c.queries = views[0].shape[c.leads]
        c.d = views[0].shape[c.leads + 1]
        bind(&c.q, &views[0], storage, c.leads, c.lead, c.queries, c.d)
        bind(&c.out, &views[1], storage, c.leads, c.lead, c.queries, c.d)
        c.blocks = (c.queries + LANES - 1) // LANES
        c.total *= c.blocks
        c.grain = max(<Py_ssize_t>1, 20000 // (c.d * LANES + 1))
        c.slot_bytes = CHUNK * LANES * sizeof(real)
        if c.total:
            run(softmax_piece, &c)
    finally:
        for axis in range(2):
            PyBuffer_Release(&views[axis])


# --- the machine's limit -----------------------------------------------------------------------------

def fma_peak(double seconds=0.2):
    """Fused multiply-adds of one thread at their fastest, in floating-point operations a second.

    As many independent chains as a register tile has, all in registers: what the products of the
    kernels are measured against.
    """
    cdef vec acc[PANEL_VECTORS * TILE_ROWS]
    cdef vec factor = vset(<real>0.999), term = vset(<real>0.001)
    cdef Py_ssize_t i, turns = 0
    cdef real keep[LANES]
    cdef int r
    for r in range(PANEL_VECTORS * TILE_ROWS):
        acc[r] = vset(<real>r)
    begin = perf_counter()
    elapsed = 0.0
    while elapsed < seconds:
        with nogil:
            for i in range(100_000):
                for r in range(PANEL_VECTORS * TILE_ROWS):
                    acc[r] = vfma(acc[r], factor, term)
        turns += 1
        elapsed = perf_counter() - begin
    for r in range(1, PANEL_VECTORS * TILE_ROWS):
        acc[0] = acc[0] + acc[r]
    vstoreu(keep, acc[0])                        # so that none of it is left out
    operations = 2.0 * LANES * PANEL_VECTORS * TILE_ROWS * 100_000 * turns
    return operations / elapsed if keep[0] == keep[0] else 0.0
