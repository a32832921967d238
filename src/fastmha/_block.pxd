"""A block of query rows that share a key/value head: from arrays into panels, and back.

A row is one query of one head. Rows of a block lie across lanes in panels; whatever differs from row to
row (its head, its position, where it lies in the arrays) is in a table.
"""
from libc.string cimport memset

from fastmha._call cimport ATOM, BLOCK, BLOCK_PANELS, BOUNDLESS, PANEL, Call
from fastmha._math cimport vexp, vlog
from fastmha._operand cimport MOST_AXES, Operand, load_lanes, locate, store_lanes
from fastmha._simd cimport (
    INFINITY, LANES, TILE_ROWS, bits, prefetch_early, real, vec, vfma, vless, vload, vloadu, vmax, vset,
    vstore, vstoreu,
)
from fastmha._stages cimport scale_scores
from fastmha._storage cimport from_double, storage_bytes, store_one


cdef struct Panel:
    # Rows across lanes, and how far their softmax has come.
    int first, count                    # rows of the block
    int vectors
    Py_ssize_t lowest, highest          # of the rows' positions
    real *queries                       # [d][row]
    real *out                           # [e][row], not yet divided
    real *most                          # maximum of the scores so far
    real *total                         # sum of the weights so far
    real *grad                          # [e][row] of the output's gradient, going back
    real *part                          # what the row's weights are multiplied with, going back


cdef struct Prefetch:
    # Rows to be asked for while a block is at work: the next block's queries, and its keys and values where
    # they are others; last the rows its own outputs go to.
    const Call *call
    Block *block                        # lets go of this when all is asked for
    const Block *after                  # the next block, or NULL
    Py_ssize_t queries, keys            # how many
    Py_ssize_t done, rows               # of all
    Py_ssize_t share                    # at a time


cdef struct Block:
    int rows
    bint few                            # so few rows that keys lie across lanes instead
    const char *q[BLOCK]
    const char *mask[BLOCK]
    char *out[BLOCK]
    char *lse[BLOCK]
    char *weights[BLOCK]
    Py_ssize_t position[BLOCK]
    bits head[BLOCK]
    Py_ssize_t member                   # flat index of the leading axes but heads
    Py_ssize_t keys                     # those within the member's length
    Py_ssize_t lowest, highest          # of the rows' positions
    const char *k
    const char *v
    const char *k_scales                # NULL where there are none
    const char *v_scales
    const long long *table              # the member's row of it
    int panels
    Panel panel[BLOCK_PANELS]
    real *tile                          # [key][row] of a panel: scores, then weights
    real *bias                          # [key][row] or [key]: the mask's part for the tile
    real *cap_slope                     # [key][row]: the softcap's derivative, or NULL if not wanted
    real *key_copy                      # [key][d] and [key][e], where they can't be read in place
    real *value_copy
    Prefetch *ahead                     # what is still to be asked for, or NULL


cdef inline char *entry(
    const Operand *o, int leads, const char *base, Py_ssize_t head, Py_ssize_t query
) noexcept nogil:
    """Where an operand has its part for a query of the head that is so many after the base's."""
    if o.data == NULL:
        return NULL
    return <char *>base + (head * o.lead[leads - 1] if leads else 0) + query * o.row


cdef inline const char *base(const Operand *o, int leads, const Py_ssize_t *index) noexcept nogil:
    return locate(o, leads, index) if o.data else NULL


cdef inline void find_rows(const Call *c, Py_ssize_t number, Block *b) noexcept nogil:
    """Fills the table. Blocks of a head go from the last to the first: under a causal mask the costly
    ones start early. Rows past a member's length neither ask nor answer: they are done here."""
    cdef Py_ssize_t index[MOST_AXES]
    cdef Py_ssize_t first = (c.blocks - 1 - number % c.blocks) * BLOCK, rest = number // c.blocks
    cdef Py_ssize_t _row, head, query, e, n, limit = c.queries, shift = c.shift
    cdef const char *q
    cdef const char *mask
    cdef const char *out
    cdef const char *lse
    cdef const char *weights
    cdef int axis
    b.ahead = NULL
    b.member = 0
    for axis in range(c.leads - 1, -1, -1):
        n = c.lead[axis] // c.stack if axis == c.leads - 1 else c.lead[axis]
        index[axis] = rest % n
        rest = rest // n
        if axis == c.leads - 1:
            index[axis] *= c.stack
            b.member = rest
    b.keys = c.keys if c.key_lengths == NULL else c.key_lengths[index[0]]
    if c.query_lengths != NULL:
        limit = c.query_lengths[index[0]]
    if c.shifts != NULL:
        shift = c.shifts[index[0]]
    b.k = locate(&c.k, c.leads, index)
    b.v = locate(&c.v, c.leads, index)
    b.k_scales, b.v_scales = base(&c.k_scales, c.leads, index), base(&c.v_scales, c.leads, index)
    b.table = c.table + index[0] * c.table_row if c.page else NULL
    q, mask, out = base(&c.q, c.leads, index), base(&c.mask, c.leads, index), base(&c.out, c.leads, index)
    lse, weights = base(&c.lse, c.leads, index), base(&c.weights, c.leads, index)
    if c.query_starts != NULL:
        q += c.query_starts[index[0]] * c.q.row
        out += c.query_starts[index[0]] * c.out.row
        lse += c.query_starts[index[0]] * c.lse.row
    if c.key_starts != NULL:
        b.k += c.key_starts[index[0]] * c.k.row
        b.v += c.key_starts[index[0]] * c.v.row
    b.rows = 0
    head, query = first // c.queries, first % c.queries
    for _row in range(first, min(first + BLOCK, c.queries * c.stack)):
        n = b.rows
        b.out[n] = entry(&c.out, c.leads, out, head, query)
        b.lse[n] = entry(&c.lse, c.leads, lse, head, query)
        if query < limit:
            b.q[n] = entry(&c.q, c.leads, q, head, query)
            b.mask[n] = entry(&c.mask, c.leads, mask, head, query)
            b.weights[n] = entry(&c.weights, c.leads, weights, head, query)
            b.position[n] = query + shift
            b.head[n] = <bits>(index[c.leads - 1] + head) if c.leads else 0
            b.rows += 1
        elif c.query_starts == NULL:             # else the row is another member's
            for e in range(c.out_width):
                store_one(b.out[n] + e * c.out.col, 0, c.out.storage)
            if b.lse[n] != NULL:
                store_one(b.lse[n], -INFINITY, c.lse.storage)
        query += 1
        if query == c.queries:
            query = 0
            head += 1


cdef inline Py_ssize_t first_atom(const Call *c, const Block *b) noexcept nogil:
    return max(<Py_ssize_t>0, b.lowest - c.left) // ATOM * ATOM


cdef inline Py_ssize_t end_of_keys(const Call *c, const Block *b) noexcept nogil:
    return min(b.keys, b.highest + c.right + 1)


cdef inline void pack_panel(const Call *c, const Block *b, Panel *p) noexcept nogil:
    """The panel's queries, and a softmax that has seen nothing yet."""
    cdef Py_ssize_t i
    cdef int v
    p.lowest = p.highest = b.position[p.first]
    for i in range(p.first, p.first + p.count):
        p.lowest = min(p.lowest, b.position[i])
        p.highest = max(p.highest, b.position[i])
    for v in range(p.vectors):
        load_lanes(
            b.q + p.first + v * LANES, min(LANES, p.count - v * LANES), c.q.storage, c.q.col, c.d,
            p.queries + v * LANES, p.vectors * LANES,
        )
    if c.sign < 0:
        scale_scores(1, 0, c.d * p.vectors, p.queries, c.sign)
    clear_panel(c, p)


cdef inline void clear_panel(const Call *c, Panel *p) noexcept nogil:
    cdef int i
    memset(p.out, 0, c.e * p.vectors * LANES * sizeof(real))
    for i in range(p.vectors * LANES):
        p.most[i] = -INFINITY
        p.total[i] = 0


cdef inline size_t tile_bytes(const Call *c) noexcept nogil:
    """What `deal_scratch` deals out."""
    return rounded_up((2 * ATOM * PANEL + ATOM * (c.d + c.e)) * sizeof(real))


cdef inline size_t block_bytes(const Call *c) noexcept nogil:
    """What `open_block` deals out."""
    return tile_bytes(c) + rounded_up(BLOCK * (c.d + c.e + 2) * sizeof(real))


cdef inline size_t rounded_up(size_t bytes) noexcept nogil:
    return (bytes + 63) // 64 * 64


cdef inline void deal_scratch(const Call *c, Block *b, char *scratch) noexcept nogil:
    b.tile = <real *>scratch
    b.bias = b.tile + ATOM * PANEL
    b.cap_slope = NULL
    b.key_copy = b.bias + ATOM * PANEL
    b.value_copy = b.key_copy + ATOM * c.d


cdef inline void open_block(const Call *c, char *scratch, Block *b) noexcept nogil:
    """Packs the queries of a block whose rows are found."""
    cdef real *place = <real *>(scratch + tile_bytes(c))
    cdef Panel *p
    cdef int n
    deal_scratch(c, b, scratch)
    b.panels = (b.rows + PANEL - 1) // PANEL
    b.few = b.rows <= LANES // 2
    b.lowest, b.highest = BOUNDLESS, -BOUNDLESS
    for n in range(b.panels):
        p = &b.panel[n]
        p.first = n * PANEL
        p.count = min(PANEL, b.rows - p.first)
        p.vectors = (p.count + LANES - 1) // LANES
        p.queries = place
        p.out = p.queries + c.d * PANEL
        p.most = p.out + c.e * PANEL
        p.total = p.most + PANEL
        place = p.total + PANEL
        pack_panel(c, b, p)
        b.lowest, b.highest = min(b.lowest, p.lowest), max(b.highest, p.highest)


# Where sequences are short, a block waits for its rows. They are asked for ahead of time, a few between two
# tiles of work, for a burst would block the way to the memory.

cdef inline void plan_prefetch(const Call *c, Block *b, const Block *after, Prefetch *f) noexcept nogil:
    """For a block that is open, and the next, whose rows are found, or NULL."""
    cdef Py_ssize_t tiles = 1, keys
    cdef int i
    for i in range(b.panels):
        keys = min(b.keys, b.panel[i].highest + c.right + 1)
        keys -= max(<Py_ssize_t>0, b.panel[i].lowest - c.left)
        tiles += max(<Py_ssize_t>0, keys + (keys + ATOM - 1) // ATOM * c.e) // TILE_ROWS
    f.call, f.block, f.after = c, b, after
    f.queries = after.rows if after != NULL else 0
    f.keys = min(<Py_ssize_t>ATOM, after.keys) if after != NULL and after.k != b.k and c.page == 0 else 0
    f.rows = f.queries + 2 * f.keys + b.rows
    f.done = 0
    f.share = max(<Py_ssize_t>4, f.rows // tiles + 1)
    b.ahead = f


cdef inline void prefetch_some(Prefetch *f, Py_ssize_t count) noexcept nogil:
    """Asks for the next few rows."""
    cdef const Call *c = f.call
    cdef Py_ssize_t first = f.done, stop = min(f.rows, f.done + count), n
    cdef Py_ssize_t values = f.queries + f.keys, outputs = values + f.keys
    for n in range(first, min(stop, f.queries)):
        prefetch_early(f.after.q[n], c.d * storage_bytes(c.q.storage))
    for n in range(max(first, f.queries), min(stop, values)):
        prefetch_early(f.after.k + (n - f.queries) * c.k.row, c.d * storage_bytes(c.k.storage))
    for n in range(max(first, values), min(stop, outputs)):
        prefetch_early(f.after.v + (n - values) * c.v.row, c.e * storage_bytes(c.v.storage))
    for n in range(max(first, outputs), stop):
        prefetch_early(f.block.out[n - outputs], c.e * storage_bytes(c.out.storage))
    f.done = stop
    if stop == f.rows:
        f.block.ahead = NULL


cdef inline vec per_head(const double *numbers, const Block *b, const Panel *p, int v) noexcept nogil:
    """The heads' numbers, for the v-th vector of the panel's rows."""
    cdef real lane[LANES]
    cdef int r
    for r in range(LANES):
        lane[r] = from_double(numbers[b.head[p.first + min(v * LANES + r, p.count - 1)]])
    return vloadu(lane)


cdef inline vec share(const Call *c, const Block *b, const Panel *p, int v) noexcept nogil:
    """What a weight relative to the maximum is multiplied with to be a probability; 0 in rows that saw
    nothing. A sink is one more key, of weight exp(sink - most) and without a value."""
    cdef vec total = vload(p.total + v * LANES), whole = total, part = vset(1), most, sink, greater
    if c.sinks != NULL:
        most = scaled_maximum(c, p, v)
        sink = per_head(c.sinks, b, p, v)
        greater = vmax(most, sink)
        part = vexp(most - greater)
        whole = vfma(total, part, vexp(sink - greater))
    return vless(total, vset(0.5), vset(0), part / whole)


cdef inline vec scaled_maximum(const Call *c, const Panel *p, int v) noexcept nogil:
    return vload(p.most + v * LANES) * vset(c.scale if c.raw else 1)


cdef inline void close_panel(const Call *c, const Block *b, const Panel *p) noexcept nogil:
    """Divides by the sums of the weights and unpacks; rows that saw nothing are 0, their LSE -inf."""
    cdef vec total, part
    cdef real lse[LANES]
    cdef real *place
    cdef Py_ssize_t e
    cdef int v, r, count
    for v in range(p.vectors):
        part = share(c, b, p, v)
        for e in range(c.e):
            place = p.out + (e * p.vectors + v) * LANES
            vstore(place, vfma(vload(place), part, vset(0)))  # + 0: no -0
        count = min(LANES, p.count - v * LANES)
        store_lanes(
            b.out + p.first + v * LANES, count, c.out.storage, c.out.col, c.e, p.out + v * LANES,
            p.vectors * LANES,
        )
        if c.lse.data != NULL:
            total = vload(p.total + v * LANES)
            vstoreu(lse, vless(total, vset(0.5), vset(-INFINITY), scaled_maximum(c, p, v) + vlog(total)))
            for r in range(count):
                store_one(b.lse[p.first + v * LANES + r], lse[r], c.lse.storage)
