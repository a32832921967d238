"""The way back: gradients by recomputing the weights, tile by tile, from the log-sum-exp.

    ds = p * (grad . v - delta)     dq = ds k * scale     dk = ds^T q * scale     dv = p^T grad

with delta = grad . out of each row. One pass, keys outside and queries inside, makes p and ds once and
needs five products. Scores and ds have queries across lanes, as on the way there, and so has dq, whose
sums are kept for all of a head's queries. dk and dv have their columns across lanes: rows of q and of the
gradient are loaded as vectors, and the scalars come from the tiles, so nothing is transposed.

Heads that share keys go one after the other; each sum has one fixed order.
"""
from libc.string cimport memset

from fastmha._atom cimport drop, rescale, score_tile, sum_values
from fastmha._block cimport (
    Block, Panel, end_of_keys, entry, find_rows, first_atom, per_head, rounded_up, scaled_maximum, share,
)
from fastmha._call cimport ATOM, BLOCK, BLOCK_PANELS, BOUNDLESS, PANEL, Call
from fastmha._math cimport exp2_scaled, vexp, vlog
from fastmha._operand cimport MOST_AXES, Operand, load_lanes, load_row, locate, store_lanes, store_row
from fastmha._rows cimport Rows, all_finite, ready
from fastmha._simd cimport (
    INFINITY, LANES, MANTISSA, PANEL_VECTORS, REAL_MAX, TILE_ROWS, TINY, real, vabs, vec, vfma, vless, vload,
    vloadu, vmax, vset, vstore,
)
from fastmha._stages cimport scale_scores, weigh
from fastmha._storage cimport load_one
from fastmha._team cimport look_for_signals
from fastmha._tile cimport gradient_rows, outer_rows


cdef struct Gradient:
    Call c                              # of the way there; `out` is dq, or a part of it
    Operand grad, out, lse              # of the output; what it was; its log-sum-exp
    Operand dk, dv
    Operand dmask                       # or NULL
    Py_ssize_t chunk                    # keys that a piece of work has
    Py_ssize_t chunks
    Py_ssize_t d_pitch, e_pitch         # D and E in whole vectors
    Py_ssize_t dq_part                  # bytes from one chunk's part of dq to the next
    int *given_up                       # set when the caller's thread was interrupted
    double *asked                       # when it last looked for that


cdef struct Head:
    # One head's queries, packed, and room for tiles.
    Block *blocks
    real *q_rows                        # [row][d], in whole vectors, and
    real *grad_rows                     # [row][e]: 0 past the last row and in rows that saw nothing
    bint *finite                        # for each block of rows
    real *tile
    real *bias
    real *cap_slope
    real *weights                       # [panel][key][row]
    real *scores                        # [panel][key][row]: gradients of the scores
    real *key_copy
    real *value_copy
    real *dk                            # [key][d] and [key][e], sums over the heads
    real *dv


cdef inline size_t head_bytes(const Gradient *g) noexcept nogil:
    cdef const Call *c = &g.c
    cdef Py_ssize_t rows = c.blocks * BLOCK
    cdef Py_ssize_t reals = rows * (2 * c.d + c.e + 3 + g.d_pitch + g.e_pitch)
    reals += ATOM * PANEL * (3 + 2 * BLOCK_PANELS) + ATOM * (c.d + c.e)
    reals += g.chunk * (g.d_pitch + g.e_pitch)
    return rounded_up(c.blocks * sizeof(Block)) + rounded_up(c.blocks * sizeof(bint)) + rounded_up(
        reals * sizeof(real)
    )


cdef inline void deal_head(const Gradient *g, char *scratch, Head *h) noexcept nogil:
    cdef const Call *c = &g.c
    cdef Py_ssize_t rows = c.blocks * BLOCK, n
    cdef real *place
    cdef int i
    cdef Panel *p
    h.blocks = <Block *>scratch
    scratch += rounded_up(c.blocks * sizeof(Block))
    h.finite = <bint *>scratch
    scratch += rounded_up(c.blocks * sizeof(bint))
    place = <real *>scratch
    h.q_rows = place
    h.grad_rows = h.q_rows + rows * g.d_pitch
    h.dk = h.grad_rows + rows * g.e_pitch
    h.dv = h.dk + g.chunk * g.d_pitch
    h.tile = h.dv + g.chunk * g.e_pitch
    h.bias = h.tile + ATOM * PANEL
    h.cap_slope = h.bias + ATOM * PANEL
    h.weights = h.cap_slope + ATOM * PANEL
    h.scores = h.weights + BLOCK_PANELS * ATOM * PANEL
    place = h.scores + BLOCK_PANELS * ATOM * PANEL
    for n in range(c.blocks):
        for i in range(BLOCK_PANELS):
            p = &h.blocks[n].panel[i]
            p.queries = place
            p.out = p.queries + c.d * PANEL
            p.grad = p.out + c.d * PANEL
            p.most = p.grad + c.e * PANEL
            p.total = p.most + PANEL
            p.part = p.total + PANEL
            place = p.part + PANEL
    h.key_copy = place
    h.value_copy = h.key_copy + ATOM * c.d


cdef inline void pack_head(
    const Gradient *g, Py_ssize_t head, Py_ssize_t first, Py_ssize_t last, Head *h
) noexcept nogil:
    """Packs blocks first to last of the queries of one head, counted through the leading axes."""
    cdef const Call *c = &g.c
    cdef Py_ssize_t index[MOST_AXES]
    cdef Py_ssize_t n
    cdef const char *grad
    cdef const char *out
    cdef const char *lse
    find_index(c, head, index)
    grad = locate(&g.grad, c.leads, index)
    out = locate(&g.out, c.leads, index)
    lse = locate(&g.lse, c.leads, index)
    if c.query_starts != NULL:
        grad += c.query_starts[index[0]] * g.grad.row
        out += c.query_starts[index[0]] * g.out.row
        lse += c.query_starts[index[0]] * g.lse.row
    memset(h.q_rows + first * BLOCK * g.d_pitch, 0, (last - first) * BLOCK * g.d_pitch * sizeof(real))
    memset(h.grad_rows + first * BLOCK * g.e_pitch, 0, (last - first) * BLOCK * g.e_pitch * sizeof(real))
    for n in range(first, last):
        # `find_rows` counts a head's blocks from the last.
        find_rows(c, (head + 1) * c.blocks - 1 - n, &h.blocks[n])
        pack_block(g, &h.blocks[n], n, grad + n * BLOCK * g.grad.row, out + n * BLOCK * g.out.row,
                   lse + n * BLOCK * g.lse.row, h)
        divide_exactly(g, &h.blocks[n], h)


cdef inline void find_index(const Call *c, Py_ssize_t head, Py_ssize_t *index) noexcept nogil:
    cdef int axis
    for axis in range(c.leads - 1, -1, -1):
        index[axis] = head % c.lead[axis]
        head = head // c.lead[axis]


cdef inline void pack_block(
    const Gradient *g, Block *b, Py_ssize_t n, const char *grad, const char *out, const char *lse, Head *h
) noexcept nogil:
    """One block: queries and gradients in both layouts, and what each row has to know of itself.

    A row's `most` becomes what is subtracted from its scores, its `total` becomes delta, its `part` is its
    log-sum-exp for now. Rows that saw nothing subtract infinity, and so weigh nothing.
    """
    cdef const Call *c = &g.c
    cdef real *q_row = h.q_rows + n * BLOCK * g.d_pitch
    cdef real *grad_row = h.grad_rows + n * BLOCK * g.e_pitch
    cdef const char *rows[LANES]
    cdef real lane[LANES]
    cdef vec total, x
    cdef Panel *p
    cdef Rows all_rows
    cdef Py_ssize_t e
    cdef int i, v, r, row, count
    b.tile, b.bias, b.cap_slope = h.tile, h.bias, h.cap_slope if c.softcap > 0 else NULL
    b.panels = (b.rows + PANEL - 1) // PANEL
    b.lowest, b.highest = BOUNDLESS, -BOUNDLESS
    for i in range(b.panels):
        p = &b.panel[i]
        p.first = i * PANEL
        p.count = min(PANEL, b.rows - p.first)
        p.vectors = PANEL_VECTORS
        p.lowest = b.position[p.first]
        p.highest = b.position[p.first + p.count - 1]
        b.lowest, b.highest = min(b.lowest, p.lowest), max(b.highest, p.highest)
        memset(p.out, 0, c.d * PANEL * sizeof(real))
        for v in range(PANEL_VECTORS):
            row = p.first + v * LANES
            count = max(0, min(LANES, p.count - v * LANES))
            if count == 0:
                memset_lanes(p, v, c.d, c.e)
                continue
            load_lanes(b.q + row, count, c.q.storage, c.q.col, c.d, p.queries + v * LANES, PANEL)
            for r in range(count):
                rows[r] = out + (row + r) * g.out.row
            load_lanes(rows, count, g.out.storage, g.out.col, c.e, p.grad + v * LANES, PANEL)
            total = vset(0)
            # The output is loaded where the gradient will be, which is loaded a column at a time.
            for r in range(count):
                rows[r] = grad + (row + r) * g.grad.row
            for e in range(c.e):
                for r in range(LANES):
                    lane[r] = load_one(rows[r if r < count else count - 1] + e * g.grad.col, g.grad.storage)
                x = vloadu(lane)
                total = vfma(x, vload(p.grad + e * PANEL + v * LANES), total)
                vstore(p.grad + e * PANEL + v * LANES, x)
            vstore(p.total + v * LANES, total)
            for r in range(LANES):
                lane[r] = INFINITY
                if r < count:
                    lane[r] = load_one(lse + (row + r) * g.lse.row, g.lse.storage)
                    if lane[r] == -INFINITY:
                        lane[r] = INFINITY
                    else:
                        load_row(b.q[row + r], c.q.storage, c.q.col, c.d, q_row + (row + r) * g.d_pitch)
                        load_row(rows[r], g.grad.storage, g.grad.col, c.e, grad_row + (row + r) * g.e_pitch)
            x = vloadu(lane)
            vstore(p.part + v * LANES, x)
            if c.sinks != NULL:
                x = with_sink(x, per_head(c.sinks, b, p, v))
            vstore(p.most + v * LANES, x / vset(c.scale) if c.raw else x)
        if c.sign < 0:
            scale_scores(1, 0, c.d * PANEL_VECTORS, p.queries, c.sign)
    all_rows.data, all_rows.row = q_row, g.d_pitch
    h.finite[n] = all_finite(&all_rows, b.rows, g.d_pitch)
    all_rows.data, all_rows.row = grad_row, g.e_pitch
    h.finite[n] = h.finite[n] and all_finite(&all_rows, b.rows, g.e_pitch)


cdef inline void memset_lanes(Panel *p, int v, Py_ssize_t d, Py_ssize_t e) noexcept nogil:
    """A vector of lanes without rows."""
    cdef Py_ssize_t i
    for i in range(d):
        vstore(p.queries + i * PANEL + v * LANES, vset(0))
    for i in range(e):
        vstore(p.grad + i * PANEL + v * LANES, vset(0))
    vstore(p.most + v * LANES, vset(INFINITY))
    vstore(p.total + v * LANES, vset(0))
    vstore(p.part + v * LANES, vset(INFINITY))


cdef enum:
    # Beyond it, a log-sum-exp is held with an error that shows in float's weights.
    LARGE = 256


cdef inline void divide_exactly(const Gradient *g, Block *b, Head *h) noexcept nogil:
    """Fills the panels' `part`. A weight is exp(score - lse); but the number that holds a large log-sum-exp
    does not hold the sum any more. For rows with one, a pass over the keys finds the maximum and the sum
    again, as on the way there, and a weight is exp(score - maximum) / sum. If that is not the given
    log-sum-exp, to a few roundings, it is one over more keys than these: then it is what counts."""
    cdef const Call *c = &g.c
    cdef Panel panel[BLOCK_PANELS]
    cdef Panel *p
    cdef vec large, lse, found, close
    cdef real given
    cdef bint some = False
    cdef int i, v, r
    for i in range(b.panels):
        p = &panel[i]
        p[0] = b.panel[i]
        p.most = h.scores + i * 2 * PANEL        # where nothing lies yet
        p.total = p.most + PANEL
        for r in range(PANEL):
            p.most[r], p.total[r] = -INFINITY, 0
            given = b.panel[i].part[r]
            some |= LARGE < given < INFINITY or -INFINITY < given < -LARGE
    if not some:
        for i in range(b.panels):
            for r in range(PANEL):
                b.panel[i].part[r] = 1
        return
    pass_over_scores(c, b, panel, h.key_copy)
    for i in range(b.panels):
        p = &b.panel[i]
        for v in range(PANEL_VECTORS):
            lse = vload(p.part + v * LANES)
            large = vless(vset(LARGE), vabs(lse), vset(1), vset(0))
            found = scaled_maximum(c, &panel[i], v) + vlog(vload(panel[i].total + v * LANES))
            close = vabs(lse) * vset(<real>8 / <real>(1ULL << MANTISSA))
            large = vless(vabs(found - lse), close, large, vset(0))
            vstore(p.most + v * LANES, vless(vset(0), large, vload(panel[i].most + v * LANES),
                                             vload(p.most + v * LANES)))
            vstore(p.part + v * LANES, vless(vset(0), large, share(c, b, &panel[i], v), vset(1)))


cdef inline void pass_over_scores(
    const Call *c, const Block *b, Panel *panels, real *key_copy
) noexcept nogil:
    """The maxima of the scores, and the sums of the weights relative to them."""
    cdef Py_ssize_t atom = first_atom(c, b), stop = end_of_keys(c, b), low, high
    cdef Rows keys
    cdef vec most[4]
    cdef vec total[4]
    cdef vec keep[4]
    cdef vec add[4]
    cdef int i
    while atom < stop:
        ready(&keys, &c.k, b.k, atom, min(<Py_ssize_t>ATOM, b.keys - atom), c.d, key_copy)
        for i in range(b.panels):
            score_tile(c, b, &panels[i], atom, &keys, NULL, &low, &high, most)
            if low < high:
                weigh(PANEL_VECTORS, low, high, b.tile, most, c.sharpness, total)
                rescale(PANEL_VECTORS, c, &panels[i], most, total, keep, add)
        atom += ATOM


cdef inline vec with_sink(vec lse, vec sink) noexcept nogil:
    """log(exp(lse) + exp(sink)); infinity stays."""
    cdef vec greater = vmax(lse, sink)
    cdef vec sum = greater + vlog(vexp(lse - greater) + vexp(sink - greater))
    return vless(lse, vset(INFINITY), sum, lse)


# --- one tile ----------------------------------------------------------------------------------------

cdef inline bint tile_gradients(
    const Gradient *g, const Block *b, const Panel *p, Py_ssize_t atom, const Rows *keys,
    const Rows *values, real *weights, real *scores, Py_ssize_t n, bint *partly,
) noexcept nogil:
    """The atom's weights, as dropout leaves them, and the gradients of its scores, for n keys. False
    if no row of the panel sees any of them; `partly` if some see not all."""
    cdef const Call *c = &g.c
    cdef Py_ssize_t low, high, i
    cdef vec most[4]
    cdef vec delta[4]
    cdef vec part[4]
    cdef vec x, factor
    cdef real *place
    cdef const real *kept = NULL
    cdef int v
    if score_tile(c, b, p, atom, keys, NULL, &low, &high, most):
        partly[0] = True
    if low >= high:
        return False
    for v in range(PANEL_VECTORS):
        most[v] = vload(p.most + v * LANES)
        delta[v] = vload(p.total + v * LANES)
        part[v] = vload(p.part + v * LANES)
    for i in range(low, high):
        for v in range(PANEL_VECTORS):
            place = b.tile + (i * PANEL_VECTORS + v) * LANES
            # Selected, for the row's log-sum-exp may be NaN.
            x = vless(vload(place), vset(-REAL_MAX), vset(0),
                      exp2_scaled(vload(place) - most[v], vset(c.sharpness)) * part[v])
            vstore(weights + (i * PANEL_VECTORS + v) * LANES, x)
    if c.dropout.threshold:
        for i in range(low * PANEL_VECTORS, high * PANEL_VECTORS):
            vstore(b.tile + i * LANES, vset(1))
        drop(PANEL_VECTORS, c, b, p, atom, low, high)
        kept = b.tile
    gradient_keys(c, values, low, high, p.grad, weights, kept, delta, scores)
    if kept != NULL:
        for i in range(low * PANEL_VECTORS, high * PANEL_VECTORS):
            # What is seen but dropped becomes -0: a NaN in the output's gradient shows there all the same.
            x = vload(weights + i * LANES)
            factor = vload(kept + i * LANES)
            factor = vless(vset(0), factor, factor, vset(-<real>0.0))
            vstore(weights + i * LANES, vless(vset(0), x, x * factor, x))
    memset(weights, 0, low * PANEL * sizeof(real))
    memset(weights + high * PANEL, 0, (n - high) * PANEL * sizeof(real))
    memset(scores, 0, low * PANEL * sizeof(real))
    memset(scores + high * PANEL, 0, (n - high) * PANEL * sizeof(real))
    return True


cdef inline void gradient_keys(
    const Call *c, const Rows *values, Py_ssize_t low, Py_ssize_t high, const real *grad,
    const real *weights, const real *kept, const vec *delta, real *scores,
) noexcept nogil:
    cdef Py_ssize_t j = low
    cdef const real *rows
    cdef Py_ssize_t place
    while j < high:
        rows = values.data + j * values.row
        place = j * PANEL
        if high - j >= TILE_ROWS:
            gradient_rows(TILE_ROWS, PANEL_VECTORS, c.e, rows, values.row, grad, weights + place,
                          kept + place if kept != NULL else NULL, delta, scores + place)
            j += TILE_ROWS
        else:
            gradient_rows(1, PANEL_VECTORS, c.e, rows, values.row, grad, weights + place,
                          kept + place if kept != NULL else NULL, delta, scores + place)
            j += 1


cdef inline void apply_cap_slope(const Block *b, Py_ssize_t n, real *scores) noexcept nogil:
    """Back through the softcap. Where a key is hidden there is no derivative to speak of."""
    cdef Py_ssize_t i
    cdef vec x
    for i in range(n * PANEL_VECTORS):
        x = vload(scores + i * LANES)
        vstore(scores + i * LANES, vless(vabs(x), vset(TINY), vset(0), x * vload(b.cap_slope + i * LANES)))


# --- sums --------------------------------------------------------------------------------------------

cdef inline void add_outer(
    Py_ssize_t n, int panels, const real *tiles, const real *rows, Py_ssize_t pitch, real *sums
) noexcept nogil:
    """sums[key] += sum over the panels' queries of tile[key][query] * rows[query], for n keys."""
    cdef Py_ssize_t j = 0, column, vectors = pitch // LANES
    while j < n:
        column = 0
        while column < vectors:
            if n - j >= TILE_ROWS and vectors - column >= PANEL_VECTORS:
                outer_rows(TILE_ROWS, PANEL_VECTORS, panels, tiles + j * PANEL, ATOM * PANEL,
                           rows + column * LANES, pitch, sums + j * pitch + column * LANES, pitch)
                column += PANEL_VECTORS
            elif n - j >= TILE_ROWS:
                outer_rows(TILE_ROWS, 1, panels, tiles + j * PANEL, ATOM * PANEL, rows + column * LANES,
                           pitch, sums + j * pitch + column * LANES, pitch)
                column += 1
            else:
                outer_rows(1, 1, panels, tiles + j * PANEL, ATOM * PANEL, rows + column * LANES, pitch,
                           sums + j * pitch + column * LANES, pitch)
                column += 1
        j += TILE_ROWS if n - j >= TILE_ROWS else 1


cdef inline void add_seen_outer(
    Py_ssize_t n, int panels, const real *tiles, const real *rows, Py_ssize_t pitch, real *sums
) noexcept nogil:
    """`add_outer` where rows that are not finite lie among those that do not see a key, whose factor is
    +0."""
    cdef Py_ssize_t j, column, i
    cdef real factor
    for j in range(n):
        for i in range(panels * PANEL):
            factor = tiles[i // PANEL * ATOM * PANEL + j * PANEL + i % PANEL]
            if factor != 0 or 1 / factor < 0:
                for column in range(pitch):
                    sums[j * pitch + column] += factor * rows[i * pitch + column]


cdef inline void add_keys(
    Py_ssize_t n, Py_ssize_t d, const Rows *keys, const real *scores, bint careful, real *sums
) noexcept nogil:
    """sums[d][query] += sum over n keys of scores[key][query] * key[d]; keys that are not finite may
    lie among those not seen if `careful`."""
    cdef vec one[PANEL_VECTORS]
    cdef vec sum, score
    cdef Py_ssize_t i, j
    cdef int v
    for v in range(PANEL_VECTORS):
        one[v] = vset(1)
    if careful:
        for i in range(d):
            for v in range(PANEL_VECTORS):
                sum = vload(sums + i * PANEL + v * LANES)
                for j in range(n):
                    score = vload(scores + j * PANEL + v * LANES)
                    sum = vless(vabs(score), vset(TINY), sum,
                                vfma(vset(keys.data[j * keys.row + i]), score, sum))
                vstore(sums + i * PANEL + v * LANES, sum)
        return
    sum_values(PANEL_VECTORS, d, keys, NULL, 0, n, scores, one, one, sums)


cdef inline void go_back(
    const Gradient *g, Head *h, Py_ssize_t n, Py_ssize_t atom, const Rows *keys, const Rows *values,
    int *keys_finite, real *dk, real *dv,
) noexcept nogil:
    """One block of rows and one atom of keys: all five products."""
    cdef const Call *c = &g.c
    cdef Block *b = &h.blocks[n]
    cdef Py_ssize_t width = min(<Py_ssize_t>ATOM, b.keys - atom)
    cdef real *weights = h.weights
    cdef real *scores = h.scores
    cdef const real *grad_rows
    cdef const real *q_rows
    cdef bint seen[BLOCK_PANELS]        # only those of the panels there are
    cdef bint partly = False, careful
    cdef int i, first, last
    first, last = b.panels, -1
    memset(seen, 0, sizeof(seen))
    for i in range(b.panels):
        weights = h.weights + i * ATOM * PANEL
        scores = h.scores + i * ATOM * PANEL
        seen[i] = tile_gradients(g, b, &b.panel[i], atom, keys, values, weights, scores, width, &partly)
        if seen[i]:
            first = min(first, i)
            last = i
            if b.cap_slope != NULL:
                apply_cap_slope(b, width, scores)
        else:
            memset(weights, 0, width * PANEL * sizeof(real))
            memset(scores, 0, width * PANEL * sizeof(real))
            partly = True
    if last < first:
        return
    if partly and keys_finite[0] < 0:
        keys_finite[0] = all_finite(keys, width, c.d)
    for i in range(first, last + 1):
        if seen[i]:
            add_keys(width, c.d, keys, h.scores + i * ATOM * PANEL, partly and not keys_finite[0],
                     b.panel[i].out)
    careful = partly and not h.finite[n]
    grad_rows = h.grad_rows + (n * BLOCK + first * PANEL) * g.e_pitch
    q_rows = h.q_rows + (n * BLOCK + first * PANEL) * g.d_pitch
    weights = h.weights + first * ATOM * PANEL
    scores = h.scores + first * ATOM * PANEL
    if careful:
        add_seen_outer(width, last + 1 - first, weights, grad_rows, g.e_pitch, dv)
        add_seen_outer(width, last + 1 - first, scores, q_rows, g.d_pitch, dk)
    else:
        add_outer(width, last + 1 - first, weights, grad_rows, g.e_pitch, dv)
        add_outer(width, last + 1 - first, scores, q_rows, g.d_pitch, dk)


cdef inline void store_dq(const Gradient *g, const Head *h, Py_ssize_t chunk) noexcept nogil:
    cdef const Call *c = &g.c
    cdef const Block *b
    cdef const Panel *p
    cdef char *rows[LANES]
    cdef Py_ssize_t n
    cdef int i, v, r, count
    for n in range(c.blocks):
        b = &h.blocks[n]
        for i in range(b.panels):
            p = &b.panel[i]
            scale_scores(1, 0, c.d * PANEL_VECTORS, p.out, c.scale * c.sign)
            for v in range(PANEL_VECTORS):
                count = max(0, min(LANES, p.count - v * LANES))
                for r in range(count):
                    rows[r] = b.out[p.first + v * LANES + r] + chunk * g.dq_part
                if count:
                    store_lanes(rows, count, c.out.storage, c.out.col, c.d, p.out + v * LANES, PANEL)


cdef inline void store_rows(
    const Operand *o, int leads, const Py_ssize_t *index, Py_ssize_t first, Py_ssize_t n, Py_ssize_t width,
    Py_ssize_t pitch, real *rows, real factor,
) noexcept nogil:
    """n rows, times a factor, to the operand's rows from `first` on."""
    cdef char *place = locate(o, leads, index) + first * o.row
    cdef Py_ssize_t j, i
    for j in range(n):
        for i in range(width):
            rows[j * pitch + i] *= factor
        store_row(place + j * o.row, o.storage, o.col, width, rows + j * pitch)


cdef inline bint given_up(const Gradient *g, int slot) noexcept nogil:
    """Whether to stop. Pieces are long: a head with all its keys."""
    if slot == 0 and not g.given_up[0] and look_for_signals(g.asked):
        g.given_up[0] = 1
    return g.given_up[0]


cdef inline void gradient_piece(
    const Gradient *g, Py_ssize_t piece, int slot, char *scratch
) noexcept nogil:
    """The heads that share one key/value head, over one chunk of its keys."""
    cdef const Call *c = &g.c
    cdef Py_ssize_t index[MOST_AXES]
    cdef Py_ssize_t chunk = piece % g.chunks, group = piece // g.chunks, head, sharers, n, atom, first = 0
    cdef Py_ssize_t start = chunk * g.chunk, stop = min(c.keys, start + g.chunk), limit
    cdef Head h
    cdef Rows keys, values
    cdef Block *b
    cdef int keys_finite
    sharers = c.k.group
    deal_head(g, scratch, &h)
    memset(h.dk, 0, g.chunk * g.d_pitch * sizeof(real))
    memset(h.dv, 0, g.chunk * g.e_pitch * sizeof(real))
    for head in range(group * sharers, (group + 1) * sharers):
        pack_head(g, head, 0, c.blocks, &h)
        if c.blocks == 0:
            continue
        atom = start
        b = &h.blocks[0]
        limit = min(stop, b.keys)
        while atom < limit:
            if given_up(g, slot):
                return
            n = min(<Py_ssize_t>ATOM, b.keys - atom)
            ready(&keys, &c.k, b.k, atom, n, c.d, h.key_copy)
            ready(&values, &c.v, b.v, atom, n, c.e, h.value_copy)
            keys_finite = -1
            for n in range(c.blocks):
                b = &h.blocks[n]
                if b.rows and b.highest + c.right >= atom and b.lowest - c.left < atom + ATOM:
                    go_back(g, &h, n, atom, &keys, &values, &keys_finite,
                            h.dk + (atom - start) * g.d_pitch, h.dv + (atom - start) * g.e_pitch)
            b = &h.blocks[0]
            atom += ATOM
        store_dq(g, &h, chunk)
    find_index(c, group * sharers, index)
    if c.key_starts != NULL and c.blocks:
        # What lies past the member's keys is another member's.
        stop = min(stop, h.blocks[0].keys)
        first = c.key_starts[index[0]]
    store_rows(&g.dk, c.leads, index, first + start, stop - start, c.d, g.d_pitch, h.dk, c.scale * c.sign)
    store_rows(&g.dv, c.leads, index, first + start, stop - start, c.e, g.e_pitch, h.dv, 1)


# --- the mask's gradient -----------------------------------------------------------------------------

cdef inline void mask_gradient_block(
    const Gradient *g, Head *h, Py_ssize_t n, const Py_ssize_t *index
) noexcept nogil:
    """Adds the gradients of one block's scores to those of the mask, which its strides sum up."""
    cdef const Call *c = &g.c
    cdef Block *b = &h.blocks[n]
    cdef char *base = locate(&g.dmask, c.leads, index) + n * BLOCK * g.dmask.row
    cdef real *place
    cdef Rows keys, values
    cdef Py_ssize_t atom = 0, width, j
    cdef int i, r
    cdef bint partly
    while b.rows and atom < b.keys:
        width = min(<Py_ssize_t>ATOM, b.keys - atom)
        ready(&keys, &c.k, b.k, atom, width, c.d, h.key_copy)
        ready(&values, &c.v, b.v, atom, width, c.e, h.value_copy)
        for i in range(b.panels):
            if not tile_gradients(
                g, b, &b.panel[i], atom, &keys, &values, h.weights, h.scores, width, &partly
            ):
                continue
            for r in range(b.panel[i].count):
                for j in range(width):
                    place = <real *>(base + (i * PANEL + r) * g.dmask.row + (atom + j) * g.dmask.col)
                    place[0] += h.scores[j * PANEL + r]
        atom += ATOM


cdef inline Py_ssize_t mask_gradient_pieces(const Gradient *g) noexcept nogil:
    """Entries of the mask's leading axes, times blocks of rows if it has rows."""
    cdef Py_ssize_t pieces = g.c.blocks if g.dmask.row else 1
    cdef int axis
    for axis in range(g.c.leads):
        if g.dmask.lead[axis]:
            pieces *= g.c.lead[axis]
    return pieces


cdef inline void mask_gradient_piece(
    const Gradient *g, Py_ssize_t piece, int slot, char *scratch
) noexcept nogil:
    """All that goes to one part of the mask: the heads that share it, in order."""
    cdef const Call *c = &g.c
    cdef Py_ssize_t index[MOST_AXES]
    cdef Py_ssize_t own, head, n, first = 0, last = c.blocks
    cdef Head h
    cdef int axis
    deal_head(g, scratch, &h)
    if g.dmask.row:
        first, last, piece = piece % c.blocks, piece % c.blocks + 1, piece // c.blocks
    for head in range(c.total // c.blocks):
        find_index(c, head, index)
        own = 0
        for axis in range(c.leads):
            if g.dmask.lead[axis]:
                own = own * c.lead[axis] + index[axis]
        if own == piece:
            pack_head(g, head, first, last, &h)
            for n in range(first, last):
                if given_up(g, slot):
                    return
                mask_gradient_block(g, &h, n, index)
