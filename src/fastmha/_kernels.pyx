"""Fused attention, built once for each instruction set and precision.

The loop over keys is the whole idea. For a block of query rows, the scores with ATOM keys at a time are
computed, masked, exponentiated and multiplied with the values, all in a tile that never leaves the
cache; running maxima and sums make the parts add up to the softmax over all keys. No L x S array exists.

    memory read for L queries, S keys:   plain   L*D + S*D + S*E, and 6 times L*S for the scores
                                         here    L*D + (S*D + S*E) * L / BLOCK

Rows lie across lanes, so that each row's arithmetic is one fixed sequence, whatever its neighbours, the
number of threads and the width of the registers.

    _kernels   a call: its arrays, its pieces, its threads         _stages   scores to weights
    _call      what its pieces share                               _mask     a mask's part for a tile
    _rows      an atom's keys or values, wherever they lie         _few      few queries: keys across lanes
    _block     rows of queries: from arrays into lanes, and back   _dropout  which weights are kept
    _atom      one atom of keys for one panel of rows              _math     exponential and its kin
    _tile      the register tile: all the multiply-adds            _simd     vectors
"""
from time import perf_counter

from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_STRIDED, PyBUF_STRIDED_RO, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.math cimport ceil
from libc.stdint cimport int8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from fastmha._atom cimport merge, step
from fastmha._block cimport (
    Block, Panel, Prefetch, block_bytes, clear_panel, close_panel, deal_scratch, end_of_keys, find_rows,
    first_atom, open_block, plan_prefetch, prefetch_some, tile_bytes,
)
from fastmha._call cimport ATOM, BLOCK, BOUNDLESS, PANEL, Call
from fastmha._gradient cimport Gradient, gradient_piece, head_bytes, mask_gradient_piece, mask_gradient_pieces
from fastmha._math cimport vexp
from fastmha._operand cimport MOST_AXES, Operand, bind, load_lanes, load_row, locate, store_lanes, store_row
from fastmha._project cimport (
    Projection, blocks, pack_steps, packed_bytes, plan_projection, project_block,
)
from fastmha._quantise cimport quantise_row
from fastmha._rotate cimport Rotation, rotate_row
from fastmha._rows cimport Rows, fetch
from fastmha._simd cimport (
    FUSED, INFINITY, LANES, PANEL_VECTORS, REAL_BYTES, TILE_ROWS, TINY, real, vec, vfma, vless, vload,
    vmax, vset, vstore, vstoreu,
)
from fastmha._stages cimport finite
from fastmha._storage cimport from_double, BOOL, FLOAT32, INT8, REAL, storage_bytes
from fastmha._team cimport (
    Body, Scratch, give_scratch, look_for_signals, parallel_for, take_scratch, thread_limit,
)

vector_bytes = LANES * REAL_BYTES
fused = bool(FUSED)


# --- attention ---------------------------------------------------------------------------------------

cdef void pass_over_keys(const Call *c, Block *b, Panel *panels, Py_ssize_t atom, Py_ssize_t stop,
                         bint values_too) noexcept nogil:
    """The atoms up to `stop`, each for all panels: for the outputs, or for the probabilities."""
    cdef Rows keys, values
    cdef Py_ssize_t n
    cdef int i, values_finite
    while atom < stop:
        n = min(<Py_ssize_t>ATOM, b.keys - atom)
        fetch(&keys, c, b, &c.k, b.k, &c.k_scales, b.k_scales, atom, n, c.d, b.key_copy)
        if values_too:
            fetch(&values, c, b, &c.v, b.v, &c.v_scales, b.v_scales, atom, n, c.e, b.value_copy)
        values_finite = -1                       # not looked at yet
        for i in range(b.panels):
            step(c, b, &panels[i], atom, &keys, &values if values_too else NULL, &values_finite)
        atom += ATOM


cdef void close_block(const Call *c, Block *b) noexcept nogil:
    cdef int i
    if c.weights.data != NULL:
        pass_over_keys(c, b, b.panel, first_atom(c, b), end_of_keys(c, b), False)
    for i in range(b.panels):
        close_panel(c, b, &b.panel[i])


cdef void attend_piece(void *arg, Py_ssize_t piece, int slot) noexcept nogil:
    """Some blocks of rows, each over all its keys."""
    cdef const Call *c = <const Call *>arg
    cdef Py_ssize_t number = piece * c.grain, stop = min((piece + 1) * c.grain, c.total)
    cdef Block pair[2]
    cdef Block *b = &pair[0]
    cdef Block *after = &pair[1]
    cdef Prefetch ahead
    cdef Py_ssize_t following
    cdef bint found
    find_rows(c, number, b)
    while number < stop:
        number += 1
        open_block(c, c.scratch + slot * c.slot_bytes, b)
        # This thread's next piece is likely to be as many on as there are threads. (Where queries end before
        # the array does, finding rows writes, which is for one thread alone.)
        following = number if number < stop else (piece + c.threads) * c.grain
        found = following < c.total and (number < stop or c.far and c.query_lengths == NULL)
        if found:
            find_rows(c, following, after)
        if c.far:
            plan_prefetch(c, b, after if found else NULL, &ahead)
        pass_over_keys(c, b, b.panel, first_atom(c, b), end_of_keys(c, b), True)
        if b.ahead != NULL:
            prefetch_some(&ahead, ahead.rows)
        close_block(c, b)
        b, after = after, b


# --- few rows, many keys -----------------------------------------------------------------------------
# Where there are fewer blocks than threads, atoms are dealt out instead. Each leaves a partial result of
# its own and they are merged in order, so that the bits do not depend on who did what. The partial
# results are bounded: ROUND atoms at a time.

cdef enum:
    ROUND = 64


cdef struct Split:
    const Call *c
    const Block *b                      # its rows and queries are for all to read
    real *parts                         # [atom of the round][panel]: out, most and total
    Py_ssize_t part_reals
    Py_ssize_t first, stop              # the round's keys
    char *scratch                       # a slot's own


cdef Panel part_of(const Split *s, Py_ssize_t atom, int i) noexcept nogil:
    """The panel that has seen only this atom of the round."""
    cdef Panel p = s.b.panel[i]
    p.out = s.parts + ((atom - s.first) // ATOM * s.b.panels + i) * s.part_reals
    p.most = p.out + s.c.e * PANEL
    p.total = p.most + PANEL
    return p


cdef void attend_atoms(void *arg, Py_ssize_t piece, int slot) noexcept nogil:
    cdef const Split *s = <const Split *>arg
    cdef const Call *c = s.c
    cdef Block b = s.b[0]
    cdef Py_ssize_t atom = s.first + piece * c.grain * ATOM
    cdef Py_ssize_t stop = min(s.stop, atom + c.grain * ATOM)
    cdef int i
    deal_scratch(c, &b, s.scratch + slot * tile_bytes(c))
    while atom < stop:
        for i in range(b.panels):
            b.panel[i] = part_of(s, atom, i)
            clear_panel(c, &b.panel[i])
        pass_over_keys(c, &b, b.panel, atom, min(stop, atom + ATOM), True)
        atom += ATOM


cdef int attend_split(Call *c, Py_ssize_t number, int threads) except -1 nogil:
    """One block of rows, its keys dealt out to threads."""
    cdef Split s
    cdef Block b
    cdef Panel part
    cdef double asked = 0
    cdef Py_ssize_t stop, atom, atoms
    cdef int i
    find_rows(c, number, &b)
    open_block(c, c.scratch, &b)
    s.c, s.b = c, &b
    s.part_reals = (c.e + 2) * PANEL
    s.scratch = c.scratch + block_bytes(c)
    s.parts = <real *>(s.scratch + threads * tile_bytes(c))
    stop = end_of_keys(c, &b)
    s.first = first_atom(c, &b)
    while s.first < stop:
        s.stop = min(stop, s.first + ROUND * ATOM)
        atoms = (s.stop - s.first + ATOM - 1) // ATOM
        parallel_for(attend_atoms, &s, (atoms + c.grain - 1) // c.grain, threads)
        atom = s.first
        while atom < s.stop:
            for i in range(b.panels):
                part = part_of(&s, atom, i)
                merge(c, &b.panel[i], &part)
            atom += ATOM
        s.first = s.stop
        if look_for_signals(&asked):
            return -1
    close_block(c, &b)
    return 0


cdef int attend_all(Call *c) except -1:
    """The call, in blocks of rows, or in atoms of keys where blocks are few."""
    cdef double keys = min(<double>c.keys, <double>c.left + c.right + BLOCK)
    cdef double cost = min(BLOCK, c.queries * c.stack) * (keys + 16) * (c.d + c.e + 16)
    cdef double enough = 2e6                     # some 40 us of work, for threads contend over less
    cdef double too_long = 2e9                   # a tenth of a second, in which nothing looks for Ctrl-C
    cdef int threads = thread_limit()
    cdef Py_ssize_t number
    cdef double heads = c.total // c.blocks
    cdef size_t split_bytes = block_bytes(c) + threads * tile_bytes(c)
    cdef Scratch scratch
    # Below that rows are likely to be at hand, and asking for them cost 3 to 9 % of calls of some 100 rows.
    c.far = heads * (c.queries * c.stack + c.keys) * (c.d + c.e) * sizeof(real) > 2 ** 22
    if cost < too_long and (c.total >= threads or keys < 8 * ATOM or cost < 2 * enough):
        c.grain = <Py_ssize_t>max(1.0, min(1e6, enough / cost))
        return run(attend_piece, c)
    c.grain = <Py_ssize_t>max(1.0, min(<double>ROUND, enough / (cost / keys * ATOM)))
    split_bytes += ROUND * (BLOCK // PANEL) * (c.e + 2) * PANEL * sizeof(real)
    scratch = take_scratch(split_bytes)
    if scratch.start == NULL:
        raise MemoryError("no memory for the kernel's scratch")
    c.scratch = <char *>scratch.start
    try:
        with nogil:
            for number in range(c.total):
                attend_split(c, number, threads)
    finally:
        give_scratch(scratch)
    return 0


# --- entry -------------------------------------------------------------------------------------------

cdef Py_ssize_t gcd(Py_ssize_t a, Py_ssize_t b) noexcept nogil:
    while b:
        a, b = b, a % b
    return a


cdef const void *vector(Py_buffer *view, array, Py_ssize_t length, Py_ssize_t itemsize) except? NULL:
    """A contiguous vector of the call, such as lengths or slopes; NULL for None."""
    if array is None:
        return NULL
    PyObject_GetBuffer(array, view, PyBUF_SIMPLE)
    if view.len != length * itemsize or view.itemsize != itemsize:
        raise ValueError("a vector of another length or dtype")
    return view.buf


cdef enum:
    CALL_VIEWS = 17                     # buffers that a call holds


cdef int bind_keys(
    Call *c, Operand *o, const Py_buffer *view, int storage, Py_ssize_t rows, Py_ssize_t cols,
    bint vector=False,
) except -1:
    """Fits keys, values or scales to the call, or to its pages."""
    cdef Py_ssize_t lead[2]
    if c.page == 0:
        return bind(o, view, storage, c.leads, c.lead, rows, cols, vector)
    if view.ndim != 4 - vector or c.leads != 2:
        raise ValueError("pages of too few or too many axes")
    lead[0], lead[1] = view.shape[0], c.lead[1]
    bind(o, view, storage, 2, lead, rows, cols, vector)
    o.page, o.lead[0] = o.lead[0], 0
    return 0


cdef int settle(Call *c, const Py_buffer *k, table, Py_buffer *view) except -1:
    """Checks where keys lie, where that is not simply one row after the other."""
    cdef Py_ssize_t member, n, last, rows = k.shape[k.ndim - 2]
    if c.keys < 0 or c.keys > (rows if c.ring == 0 and c.page == 0 else BOUNDLESS):
        raise ValueError("keys beyond the arrays")
    if c.ring and (c.ring != rows or c.ring % ATOM or c.page):
        raise ValueError("a ring of another size")
    if (c.ring or c.page) and c.key_starts != NULL:
        raise ValueError("keys in two places")
    if c.page == 0:
        return 0
    PyObject_GetBuffer(table, view, PyBUF_SIMPLE)
    c.table = <const long long *>view.buf
    c.table_row = view.len // 8 // max(<Py_ssize_t>1, c.lead[0])
    if c.page != rows or c.table_row * c.lead[0] * 8 != view.len or view.itemsize != 8:
        raise ValueError("pages of another size")
    for member in range(c.lead[0]):
        last = c.keys if c.key_lengths == NULL else c.key_lengths[member]
        last = (last + c.page - 1) // c.page
        if last > c.table_row:
            raise ValueError("keys beyond the table of pages")
        for n in range(last):
            if not 0 <= c.table[member * c.table_row + n] < k.shape[0]:
                raise ValueError("pages beyond the arrays")
    return 0


cdef int open_call(
    Call *c, Py_buffer *views, tuple arrays, tuple storages, options, place=None
) except -1:
    """Fits the arrays (q, k, v, out, lse, mask, weights) and the options together.

    `views` has zeros where the buffers go. They are held until `close_views`, also after an error.
    """
    cdef Py_buffer *o = &views[3]
    cdef int axis, packed
    cdef Py_ssize_t heads, members, rows
    cdef double scale, softcap, dropout_p, log2e = 1.4426950408889634
    cdef long long left, right
    cdef uint64_t seed
    lse, mask, weights = arrays[4:]
    (
        scale, softcap, left, right, shift, shifts, slopes, sinks, key_lengths, query_lengths, dropout_p,
        seed, query_starts, key_starts,
    ) = options
    k_scales = v_scales = table = None
    memset(c, 0, sizeof(c[0]))
    for axis, array in enumerate(arrays):
        if array is not None:
            PyObject_GetBuffer(array, &views[axis], PyBUF_STRIDED if axis in (3, 4, 6) else PyBUF_STRIDED_RO)
    if o.ndim < 2 or views[0].ndim < 2 or views[1].ndim < 2 or views[2].ndim < 2 or o.ndim > MOST_AXES:
        raise ValueError("arrays of too few or too many axes")
    packed = query_starts is not None            # members lie in rows, not along an axis
    c.leads = o.ndim - 2 + packed
    if packed:
        c.lead[0] = len(query_starts)
    for axis in range(packed, c.leads):
        c.lead[axis] = o.shape[axis - packed]
    c.queries = o.shape[o.ndim - 2]
    c.out_width = o.shape[o.ndim - 1]
    c.d = views[0].shape[views[0].ndim - 1]
    c.e = views[2].shape[views[2].ndim - 1]
    c.keys = rows = views[1].shape[views[1].ndim - 2]
    if place is not None:
        c.keys, c.ring, c.page, table, k_scales, v_scales = place
    bind(&c.q, &views[0], storages[0], c.leads, c.lead, c.queries, c.d)
    bind_keys(c, &c.k, &views[1], storages[1], rows, c.d)
    bind_keys(c, &c.v, &views[2], storages[2], rows, c.e)
    if k_scales is not None:
        PyObject_GetBuffer(k_scales, &views[14], PyBUF_STRIDED_RO)
        PyObject_GetBuffer(v_scales, &views[15], PyBUF_STRIDED_RO)
        bind_keys(c, &c.k_scales, &views[14], FLOAT32, rows, 1, True)
        bind_keys(c, &c.v_scales, &views[15], FLOAT32, rows, 1, True)
    bind(&c.out, o, storages[3], c.leads, c.lead, c.queries, c.out_width)
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
    c.query_starts = <const long long *>vector(&views[12], query_starts, members, 8)
    c.key_starts = <const long long *>vector(&views[13], key_starts, members, 8)
    if packed and (c.key_lengths == NULL or c.query_lengths == NULL or c.key_starts == NULL and c.page == 0):
        raise ValueError("a packed batch without its lengths")
    for axis in range(members):
        if (
            not within(c.query_starts, c.query_lengths, axis, c.queries)
            or not within(c.key_starts, c.key_lengths, axis, c.keys)
        ):
            raise ValueError("lengths beyond the arrays")
    settle(c, &views[1], table, &views[16])
    if packed:
        c.queries, c.keys = greatest(c.query_lengths, members), greatest(c.key_lengths, members)
    c.left = <Py_ssize_t>min(<long long>BOUNDLESS, left)
    c.right = <Py_ssize_t>min(<long long>BOUNDLESS, right)
    c.shift = shift
    # What only float lacks the range for must not turn into 0, which is off, or into infinity.
    c.softcap = max(TINY, from_double(softcap)) if softcap > 0 else 0
    c.dropout.threshold = <uint64_t>ceil(dropout_p * 4294967296.0)
    c.dropout.factor = <real>(1 / (1 - dropout_p)) if dropout_p < 1 else 0
    c.dropout.seed_low = <uint32_t>seed
    c.dropout.seed_high = <uint32_t>(seed >> 32)
    c.raw = from_double(scale) != 0 and softcap == 0 and slopes is None
    c.raw = c.raw and (mask is None or c.mask.storage == BOOL)
    c.sign = -1 if c.raw and scale < 0 else 1
    c.scale = from_double(scale * c.sign)
    c.sharpness = from_double(scale * c.sign * log2e) if c.raw else <real>log2e
    # Heads that share keys are stacked where the queries of one would leave lanes empty.
    c.stack = gcd(c.k.group, c.v.group) if c.leads and c.queries < PANEL else 1
    return count_blocks(c)


cdef bint within(
    const long long *starts, const long long *lengths, Py_ssize_t member, Py_ssize_t rows
) noexcept nogil:
    """Whether a member's rows are among those there are."""
    cdef long long start = starts[member] if starts != NULL else 0
    if lengths == NULL:
        return True
    return 0 <= start <= rows and 0 <= lengths[member] <= rows - start


cdef Py_ssize_t greatest(const long long *lengths, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i, most = 0
    for i in range(n):
        most = max(most, lengths[i])
    return most


cdef int count_blocks(Call *c) noexcept nogil:
    cdef int axis
    c.blocks = (c.queries * c.stack + BLOCK - 1) // BLOCK
    c.total = c.blocks
    for axis in range(c.leads):
        c.total *= c.lead[axis] // c.stack if axis == c.leads - 1 else c.lead[axis]
    return 0


cdef void close_views(Py_buffer *views, int n) noexcept:
    cdef int i
    for i in range(n):
        PyBuffer_Release(&views[i])              # does nothing where there is none


def attend(q, k, v, out, lse, mask, weights, tuple storages, options, place=None):
    """Attention of q (..., L, D) over k (..., S, D) and v (..., S, E), into out (..., L, E).

    `lse` (..., L), `mask`, which broadcasts to (..., L, S), and `weights` (..., L, S), zeros where the
    probabilities go, may be None; `storages` says what the seven arrays hold. `options` is the tuple
    (scale, softcap, left, right, shift, shifts, slopes, sinks, key_lengths, query_lengths, dropout_p,
    seed, query_starts, key_starts): slopes and sinks float64, shifts, lengths and starts int64, any of
    them None. With starts the batch is packed: q is (H, T, D) and so on, lse (H, T), and member b has the
    rows from its start on.

    `place`, for caches, is the tuple (S, ring, page, table, k_scales, v_scales). Where `ring` is not 0, k
    is (..., ring, D), and key j lies in row j % ring. Where `page` is not 0, k is (pages, G, page, D), and
    key j of a member lies in row j % page of the page table[member, j // page]; `table` is int64, with
    at least as many columns as are used. Scales have the shapes of k and v without the last axis,
    float32, or are None.
    """
    cdef Py_buffer views[CALL_VIEWS]
    cdef Call c
    memset(views, 0, sizeof(views))
    try:
        open_call(&c, views, (q, k, v, out, lse, mask, weights), storages, options, place)
        if c.out_width != c.e:
            raise ValueError("arrays whose shapes do not fit")
        c.slot_bytes = block_bytes(&c)
        if c.total:
            attend_all(&c)
    finally:
        close_views(views, CALL_VIEWS)


# --- gradients ---------------------------------------------------------------------------------------

cdef void gradient_body(void *arg, Py_ssize_t piece, int slot) noexcept nogil:
    cdef const Gradient *g = <const Gradient *>arg
    gradient_piece(g, piece, slot, g.c.scratch + slot * g.c.slot_bytes)


cdef void mask_gradient_body(void *arg, Py_ssize_t piece, int slot) noexcept nogil:
    cdef const Gradient *g = <const Gradient *>arg
    mask_gradient_piece(g, piece, slot, g.c.scratch + slot * g.c.slot_bytes)


def attend_backward(
    grad, q, k, v, out, lse, mask, dq, dk, dv, dmask, tuple storages, options, Py_ssize_t chunk,
):
    """The gradients of `attend`: dq (chunks, ..., L, D), dk (..., S, D), dv (..., S, E).

    dq comes in parts, one for each `chunk` of keys, a multiple of ATOM. dk and dv have the heads of k and
    v, and all other axes of the output. `dmask`, zeros of the mask's own shape, or None, holds reals.
    `storages` says what the first ten arrays hold; `options` are those of `attend`.
    """
    cdef Py_buffer views[CALL_VIEWS + 6]
    cdef Py_buffer *more = &views[CALL_VIEWS]
    cdef Gradient g
    cdef Py_ssize_t pieces, axis, rows, keys
    cdef int i, given_up = 0
    cdef double asked = perf_counter()
    memset(views, 0, sizeof(views))
    memset(&g, 0, sizeof(g))
    try:
        open_call(
            &g.c, views, (q, k, v, dq[0], None, mask, None),
            (storages[1], storages[2], storages[3], storages[7], 0, storages[6], 0), options,
        )
        g.c.stack = 1
        count_blocks(&g.c)
        if g.c.out_width != g.c.d or g.c.k.group != g.c.v.group or chunk < 1 or chunk % ATOM:
            raise ValueError("arrays whose shapes do not fit")
        for i, array in enumerate((grad, out, lse, dk, dv, dmask)):
            if array is not None:
                PyObject_GetBuffer(array, &more[i], PyBUF_STRIDED if i >= 3 else PyBUF_STRIDED_RO)
        rows = views[0].shape[views[0].ndim - 2]
        keys = views[1].shape[views[1].ndim - 2]
        bind(&g.grad, &more[0], storages[0], g.c.leads, g.c.lead, rows, g.c.e)
        bind(&g.out, &more[1], storages[4], g.c.leads, g.c.lead, rows, g.c.e)
        bind(&g.lse, &more[2], storages[5], g.c.leads, g.c.lead, rows, 1, True)
        bind(&g.dk, &more[3], storages[8], g.c.leads, g.c.lead, keys, g.c.d)
        bind(&g.dv, &more[4], storages[9], g.c.leads, g.c.lead, keys, g.c.e)
        if g.dk.group != g.c.k.group or g.dv.group != g.c.k.group:
            raise ValueError("arrays whose shapes do not fit")
        g.chunk = min(chunk, (g.c.keys + ATOM - 1) // ATOM * ATOM)
        g.chunks = max(<Py_ssize_t>1, (g.c.keys + chunk - 1) // chunk)
        if len(dq) != g.chunks:
            raise ValueError("arrays whose shapes do not fit")
        g.dq_part = dq.strides[0]
        g.d_pitch = (g.c.d + LANES - 1) // LANES * LANES
        g.e_pitch = (g.c.e + LANES - 1) // LANES * LANES
        g.c.slot_bytes = head_bytes(&g)
        g.given_up, g.asked = &given_up, &asked
        pieces = g.chunks
        for axis in range(g.c.leads):
            pieces *= g.c.lead[axis] // g.c.k.group if axis == g.c.leads - 1 else g.c.lead[axis]
        if pieces:
            run_pieces(gradient_body, &g, &g.c, pieces, &given_up)
        if dmask is not None:
            bind(&g.dmask, &more[5], REAL, g.c.leads, g.c.lead, g.c.queries, g.c.keys)
            if g.c.total:
                run_pieces(mask_gradient_body, &g, &g.c, mask_gradient_pieces(&g), &given_up)
    finally:
        close_views(views, CALL_VIEWS + 6)


# --- running -----------------------------------------------------------------------------------------

cdef int run(Body body, Call *c) except -1:
    """All blocks of a call, `grain` of them a piece."""
    return run_pieces(body, c, c, (c.total + c.grain - 1) // c.grain)


cdef int run_pieces(Body body, void *arg, Call *c, Py_ssize_t pieces, const int *given_up=NULL) except -1:
    """All pieces, on as many threads as there are pieces and the user allows. Pieces that look for
    signals themselves say in `given_up` that Python's error is set."""
    cdef int threads = <int>min(<Py_ssize_t>thread_limit(), pieces)
    cdef Scratch scratch = take_scratch(c.slot_bytes * threads)
    c.threads = threads
    if scratch.start == NULL:
        raise MemoryError("no memory for the kernel's scratch")
    c.scratch = <char *>scratch.start
    try:
        with nogil:
            parallel_for(body, arg, pieces, threads)
    finally:
        give_scratch(scratch)
    return -1 if given_up != NULL and given_up[0] else 0


# --- softmax -----------------------------------------------------------------------------------------

cdef enum:
    CHUNK = 1024                                 # elements of a row that are in scratch at a time


cdef void softmax_rows(const Call *c, Py_ssize_t number, real *tile) noexcept nogil:
    """LANES rows of c.q into c.out, which have c.queries rows of c.d elements in each lead."""
    cdef Py_ssize_t head = number // c.blocks, start, n, j, row = number % c.blocks * LANES
    cdef Py_ssize_t rows = min(<Py_ssize_t>LANES, c.queries - row)
    cdef Py_ssize_t index[MOST_AXES]
    cdef const char *x[LANES]
    cdef char *y[LANES]
    cdef vec most = vset(-INFINITY), total = vset(0), sum, part, base
    cdef int axis, turn, r
    for axis in range(c.leads - 1, -1, -1):
        index[axis] = head % c.lead[axis]
        head = head // c.lead[axis]
    for turn in range(3):                        # the maximum; the sum; the quotients
        base = finite(most)
        for r in range(rows):
            x[r] = locate(&c.q, c.leads, index) + (row + r) * c.q.row
            y[r] = locate(&c.out, c.leads, index) + (row + r) * c.out.row
        start = 0
        while start < c.d:
            n = min(<Py_ssize_t>CHUNK, c.d - start)
            load_lanes(x, rows, c.q.storage, c.q.col, n, tile, LANES)
            sum = part = vset(0)
            for j in range(n):
                if turn == 0:
                    most = vmax(most, vload(tile + j * LANES))
                elif turn == 1:
                    # Short sums of sums: one long one would lose digits.
                    if j % 32 == 0:
                        sum = sum + part
                        part = vset(0)
                    part = part + vexp(vload(tile + j * LANES) - base)
                else:
                    vstore(tile + j * LANES, vexp(vload(tile + j * LANES) - base) * total)
            if turn == 1:
                total = total + (sum + part)
            elif turn == 2:
                store_lanes(y, rows, c.out.storage, c.out.col, n, tile, LANES)
            for r in range(rows):
                x[r] += n * c.q.col
                y[r] += n * c.out.col
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


# --- rows for caches ---------------------------------------------------------------------------------

cdef void store_all(
    const Operand *x, const Operand *out, const Operand *scales, const Py_ssize_t *lead, Py_ssize_t n,
    Py_ssize_t d, const long long *first, const long long *slots, real *row,
) noexcept nogil:
    cdef Py_ssize_t i, head, j, place, slot
    cdef const char *source
    cdef char *target
    cdef char *factor
    cdef float scale
    for i in range(lead[0]):
        place, slot = i, 0
        if first != NULL:
            place, slot = first[i], slots[i]
        for head in range(lead[1]):
            source = x.data + i * x.lead[0] + head * x.lead[1]
            target = out.data + place * out.lead[0] + head * out.lead[1] + slot * out.row
            factor = scales.data + place * scales.lead[0] + head * scales.lead[1] + slot * scales.row
            for j in range(n):
                load_row(source + j * x.row, x.storage, x.col, d, row)
                if scales.data != NULL:
                    scale = quantise_row(row, d, <int8_t *>(target + j * out.row))
                    memcpy(factor + j * scales.row, &scale, sizeof(float))
                else:
                    store_row(target + j * out.row, out.storage, out.col, d, row)


def store(x, int x_storage, out, int out_storage, scales=None, first=None, slots=None):
    """Rows of x (A, B, n, D) into out, of the same shape, as elements of another type.

    For int8 each row's scale goes into `scales` (A, B, n), float32. With `first` and `slots`, int64 (A,),
    n is 1, and the rows x[i] go to out[first[i], :, slots[i]].
    """
    cdef Py_buffer views[5]
    cdef Operand o[3]
    cdef Py_ssize_t lead[2]
    cdef Py_ssize_t out_lead[2]
    cdef Py_ssize_t n, d, i, room
    cdef const long long *places = NULL
    cdef const long long *rows = NULL
    cdef Scratch scratch
    memset(views, 0, sizeof(views))
    memset(o, 0, sizeof(o))
    try:
        PyObject_GetBuffer(x, &views[0], PyBUF_STRIDED_RO)
        PyObject_GetBuffer(out, &views[1], PyBUF_STRIDED)
        if views[0].ndim != 4 or views[1].ndim != 4 or (out_storage == INT8) != (scales is not None):
            raise ValueError("arrays of too few or too many axes")
        lead[0], lead[1], n, d = views[0].shape[0], views[0].shape[1], views[0].shape[2], views[0].shape[3]
        out_lead[0], out_lead[1], room = views[1].shape[0], views[1].shape[1], views[1].shape[2]
        bind(&o[0], &views[0], x_storage, 2, lead, n, d)
        bind(&o[1], &views[1], out_storage, 2, out_lead, room, d)
        if scales is not None:
            PyObject_GetBuffer(scales, &views[2], PyBUF_STRIDED)
            bind(&o[2], &views[2], FLOAT32, 2, out_lead, room, 1, True)
        if views[1].shape[3] != d or d > 1 and out_storage == INT8 and o[1].col != 1:
            raise ValueError("arrays whose shapes do not fit")
        places = <const long long *>vector(&views[3], first, lead[0], 8)
        rows = <const long long *>vector(&views[4], slots, lead[0], 8)
        if out_lead[1] != lead[1] or (places == NULL) != (rows == NULL):
            raise ValueError("arrays whose shapes do not fit")
        if places == NULL and (out_lead[0] != lead[0] or room != n) or places != NULL and n != 1:
            raise ValueError("arrays whose shapes do not fit")
        if places != NULL:
            for i in range(lead[0]):
                if not (0 <= places[i] < out_lead[0] and 0 <= rows[i] < room):
                    raise ValueError("places beyond the array")
        scratch = take_scratch(d * sizeof(real))
        if scratch.start == NULL:
            raise MemoryError("no memory for the kernel's scratch")
        with nogil:
            store_all(&o[0], &o[1], &o[2], lead, n, d, places, rows, <real *>scratch.start)
        give_scratch(scratch)
    finally:
        for i in range(5):
            PyBuffer_Release(&views[i])


# --- projections -------------------------------------------------------------------------------------

cdef void pack_piece(void *arg, Py_ssize_t piece, int slot) noexcept nogil:
    cdef const Projection *p = <const Projection *>arg
    pack_steps(p, piece, <real *>(p.scratch + slot * p.slot_bytes))


cdef void project_piece(void *arg, Py_ssize_t piece, int slot) noexcept nogil:
    cdef const Projection *p = <const Projection *>arg
    cdef Py_ssize_t number
    for number in range(piece * p.grain, min((piece + 1) * p.grain, blocks(p))):
        project_block(p, number, <real *>(p.scratch + slot * p.slot_bytes))


cdef int project_all(Projection *p, int threads) except -1 nogil:
    """As many columns at a time as are copied at a time."""
    cdef Py_ssize_t group = p.stop
    while p.first < p.columns:
        if p.panels != NULL:
            parallel_for(pack_piece, p, (p.steps + p.packed_steps - 1) // p.packed_steps, threads)
        parallel_for(project_piece, p, (blocks(p) + p.grain - 1) // p.grain, threads)
        p.first = p.stop
        p.stop = min(p.columns, p.stop + group)
    return 0


def project(x, w, bias, out, int w_storage, int out_storage):
    """x (B, L, d_in) @ w (d_in, d_out) + bias (d_out,), into out (B, L, heads, d_out / heads).

    x holds reals side by side; `bias` may be None, else it is stored as `w` is. w and out may have any
    strides.
    """
    cdef Py_buffer views[4]
    cdef Projection p
    cdef Py_ssize_t heads
    cdef int axis, threads
    cdef Scratch scratch
    memset(views, 0, sizeof(views))
    memset(&p, 0, sizeof(p))
    try:
        for axis, array in enumerate((x, w, bias, out)):
            if array is not None:
                PyObject_GetBuffer(array, &views[axis], PyBUF_STRIDED if axis == 3 else PyBUF_STRIDED_RO)
        if views[0].ndim != 3 or views[1].ndim != 2 or views[3].ndim != 4:
            raise ValueError("arrays of too few or too many axes")
        p.members, p.rows, p.steps = views[0].shape[0], views[0].shape[1], views[0].shape[2]
        p.columns = views[1].shape[1]
        heads, p.head_columns = views[3].shape[2], views[3].shape[3]
        bind(&p.x, &views[0], REAL, 1, &p.members, p.rows, p.steps)
        bind(&p.w, &views[1], w_storage, 0, NULL, p.steps, p.columns)
        if bias is not None:
            bind(&p.bias, &views[2], w_storage, 0, NULL, 1, p.columns)
        if (
            heads * p.head_columns != p.columns or views[3].shape[0] != p.members
            or views[3].shape[1] != p.rows
        ):
            raise ValueError("arrays whose shapes do not fit")
        if views[3].itemsize != storage_bytes(out_storage) or p.x.row % <Py_ssize_t>sizeof(real):
            raise TypeError("an array of another dtype or alignment")
        if p.steps > 1 and p.x.col != sizeof(real):
            raise ValueError("x is not contiguous in its last axis")
        p.out.data, p.out.storage = <char *>views[3].buf, out_storage
        p.out.lead[0], p.out.row = views[3].strides[0], views[3].strides[1]
        p.head_stride, p.out.col = views[3].strides[2], views[3].strides[3]
        if p.members * p.rows * p.columns == 0:
            return
        if p.rows == 1 or p.x.lead[0] == p.rows * p.x.row and p.out.lead[0] == p.rows * p.out.row:
            # The members' rows follow one another: one list of them makes fuller blocks.
            if p.rows == 1:
                p.x.row, p.out.row = p.x.lead[0], p.out.lead[0]
            p.rows, p.members = p.rows * p.members, 1
        plan_projection(&p, thread_limit())
        threads = <int>min(<Py_ssize_t>thread_limit(), (blocks(&p) + p.grain - 1) // p.grain)
        scratch = take_scratch(p.slot_bytes * threads + packed_bytes(&p))
        if scratch.start == NULL:
            raise MemoryError("no memory for the kernel's scratch")
        p.scratch = <char *>scratch.start
        if packed_bytes(&p):
            p.panels = <real *>(p.scratch + threads * p.slot_bytes)
        try:
            with nogil:
                project_all(&p, threads)
        finally:
            give_scratch(scratch)
    finally:
        for axis in range(4):
            PyBuffer_Release(&views[axis])


# --- rotary positions --------------------------------------------------------------------------------

cdef void rotate_piece(void *arg, Py_ssize_t piece, int slot) noexcept nogil:
    cdef const Rotation *o = <const Rotation *>arg
    cdef Py_ssize_t number
    for number in range(piece * o.grain, min((piece + 1) * o.grain, o.total)):
        rotate_row(o, number, <real *>(o.scratch + slot * o.slot_bytes))


def rotate(x, cos, sin, out, int storage, bint interleaved):
    """The rows of x (B, H, L, D), their pairs turned, into out of the same shape, both stored alike.

    cos and sin (B or 1, L, pairs) hold reals, contiguous in the last axis; x's and out's strides are free.
    """
    cdef Py_buffer views[4]
    cdef Rotation o
    cdef Py_ssize_t pieces
    cdef int i, threads
    cdef Py_ssize_t lead[2]
    cdef Scratch scratch
    memset(views, 0, sizeof(views))
    memset(&o, 0, sizeof(o))
    try:
        for i, array in enumerate((x, cos, sin, out)):
            PyObject_GetBuffer(array, &views[i], PyBUF_STRIDED if i == 3 else PyBUF_STRIDED_RO)
        if views[0].ndim != 4 or views[1].ndim != 3 or views[2].ndim != 3 or views[3].ndim != 4:
            raise ValueError("arrays of too few or too many axes")
        lead[0], lead[1] = views[3].shape[0], views[3].shape[1]
        o.heads, o.rows, o.width = lead[1], views[3].shape[2], views[3].shape[3]
        o.pairs, o.interleaved = views[1].shape[2], interleaved
        bind(&o.x, &views[0], storage, 2, lead, o.rows, o.width)
        bind(&o.out, &views[3], storage, 2, lead, o.rows, o.width)
        bind(&o.cos, &views[1], REAL, 1, lead, o.rows, o.pairs)
        bind(&o.sin, &views[2], REAL, 1, lead, o.rows, o.pairs)
        if 2 * o.pairs > o.width or views[0].shape[0] != lead[0] or views[0].shape[1] != lead[1]:
            raise ValueError("arrays whose shapes do not fit")
        for i in range(1, 3):
            if views[i].shape[0] not in (1, lead[0]) or views[i].strides[0] % sizeof(real):
                raise ValueError("arrays whose shapes do not fit")
            if o.pairs > 1 and views[i].strides[2] != sizeof(real) or views[i].strides[1] % sizeof(real):
                raise ValueError("angles are not contiguous in their last axis")
        o.total = lead[0] * lead[1] * o.rows
        o.grain = max(<Py_ssize_t>1, 65536 // max(<Py_ssize_t>1, o.width))
        pieces = (o.total + o.grain - 1) // o.grain
        threads = <int>max(<Py_ssize_t>1, min(<Py_ssize_t>thread_limit(), pieces))
        o.slot_bytes = (2 * o.width * sizeof(real) + 63) // 64 * 64
        scratch = take_scratch(o.slot_bytes * threads)
        if scratch.start == NULL:
            raise MemoryError("no memory for the kernel's scratch")
        o.scratch = <char *>scratch.start
        try:
            with nogil:
                parallel_for(rotate_piece, &o, pieces, threads)
        finally:
            give_scratch(scratch)
    finally:
        for i in range(4):
            PyBuffer_Release(&views[i])


# --- the machine's limit -----------------------------------------------------------------------------

def fma_peak(double seconds=0.2):
    """Fused multiply-adds of one thread at their fastest, in floating-point operations a second.

    As many independent chains as a register tile has, all in registers: what the products of the
    kernels are measured against.
    """
    cdef vec acc[PANEL_VECTORS * TILE_ROWS]
    cdef vec factor = vset(<real>0.999), term = vset(<real>0.001)
    cdef Py_ssize_t _i, turns = 0
    cdef real keep[LANES]
    cdef int r
    for r in range(PANEL_VECTORS * TILE_ROWS):
        acc[r] = vset(<real>r)
    begin = perf_counter()
    elapsed = 0.0
    while elapsed < seconds:
        with nogil:
            for _i in range(100_000):
                for r in range(PANEL_VECTORS * TILE_ROWS):
                    acc[r] = vfma(acc[r], factor, term)
        turns += 1
        elapsed = perf_counter() - begin
    for r in range(1, PANEL_VECTORS * TILE_ROWS):
        acc[0] = acc[0] + acc[r]
    vstoreu(keep, acc[0])                        # so that none of it is left out
    operations = 2.0 * LANES * PANEL_VECTORS * TILE_ROWS * 100_000 * turns
    return operations / elapsed if keep[0] == keep[0] else 0.0
