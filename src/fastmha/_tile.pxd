"""The register tile, where nearly all the time is spent: R rows by V vectors of accumulators.

Queries lie across lanes. Scores and weighted sums are then the same product of a few scalars, read in
place and broadcast, with vectors of a packed panel:

    scores[key][query] = sum over d   of K[key][d]   * Qt[d][query]        rows are keys
    sums[e][query]     = sum over key of V[key][e]   * P[key][query]       rows are value dimensions

R and V are constants wherever these are called, and all is `inlined`, so that there is code for each of them
and all accumulators stay in registers. Per step: V loads, R broadcasts, R * V multiply-adds. The sums run
over d, and over keys, in order: nothing here depends on R and V but speed.
"""
from fastmha._simd cimport (
    LANES, PANEL_VECTORS, TILE_ROWS, TILE_STEPS, TINY, inlined, real, vabs, vec, vfma, vfma_in_place, vless,
    vload, vmax, vset, vstore,
)

cdef enum:
    MOST_ACCUMULATORS = 24
    MOST_VECTORS = 4


cdef inline inlined multiply_add(
    const int R, const int V, const real *scalars, Py_ssize_t row, const real *panel, vec *sums
) noexcept nogil:
    """sums[r * V + v] += scalars[r * row] * panel[v]."""
    cdef vec x[MOST_VECTORS]
    cdef vec scalar
    cdef int r, v
    for v in range(V):
        x[v] = vload(panel + v * LANES)
    for r in range(R):
        scalar = vset(scalars[r * row])
        for v in range(V):
            sums[r * V + v] = vfma_in_place(scalar, x[v], sums[r * V + v])


cdef inline inlined accumulate(
    const int R, const int V, Py_ssize_t steps, const real *scalars, Py_ssize_t row, Py_ssize_t step,
    const real *panel, Py_ssize_t pitch, vec *sums,
) noexcept nogil:
    """sums[r * V + v] += sum over n < steps of scalars[r * row + n * step] * panel[n * pitch][v]."""
    cdef Py_ssize_t _n
    if TILE_STEPS == 4 and R == TILE_ROWS and V > 1:
        for _n in range(steps >> 2):
            multiply_add(R, V, scalars, row, panel, sums)
            multiply_add(R, V, scalars + step, row, panel + pitch, sums)
            multiply_add(R, V, scalars + 2 * step, row, panel + 2 * pitch, sums)
            multiply_add(R, V, scalars + 3 * step, row, panel + 3 * pitch, sums)
            scalars += 4 * step
            panel += 4 * pitch
        steps &= 3
    for _n in range(steps):
        multiply_add(R, V, scalars, row, panel, sums)
        scalars += step
        panel += pitch


cdef inline inlined clear(const int n, vec *sums) noexcept nogil:
    cdef int i
    for i in range(n):
        sums[i] = vset(0)


cdef inline inlined score_rows(
    const int R, const int V, Py_ssize_t d, const real *keys, Py_ssize_t row, const real *queries,
    real *scores, vec *most,
) noexcept nogil:
    """Scores of R keys, and the running maxima while they are still in registers."""
    cdef vec sums[MOST_ACCUMULATORS]
    cdef int r, v
    clear(R * V, sums)
    accumulate(R, V, d, keys, row, 1, queries, V * LANES, sums)
    for r in range(R):
        for v in range(V):
            vstore(scores + (r * V + v) * LANES, sums[r * V + v])
            most[v] = vmax(most[v], sums[r * V + v])


cdef inline inlined value_rows(
    const int R, const int V, Py_ssize_t keys, const real *values, Py_ssize_t row,
    const real *weights, const vec *keep, const vec *add, real *out,
) noexcept nogil:
    """out = out * keep + (weighted sums of R value dimensions) * add."""
    cdef vec sums[MOST_ACCUMULATORS]
    cdef real *place
    cdef int r, v
    clear(R * V, sums)
    accumulate(R, V, keys, values, 1, row, weights, V * LANES, sums)
    for r in range(R):
        for v in range(V):
            place = out + (r * V + v) * LANES
            vstore(place, vfma(sums[r * V + v], add[v], vload(place) * keep[v]))


cdef inline inlined project_rows(
    const int R, const int V, Py_ssize_t steps, const real *x, Py_ssize_t row, const real *panel, real *out,
    Py_ssize_t pitch,
) noexcept nogil:
    """out[r] += sum over the steps of x[r][step] * panel[step], for R rows of x."""
    cdef vec sums[MOST_ACCUMULATORS]
    cdef int r, v
    for r in range(R):
        for v in range(V):
            sums[r * V + v] = vload(out + r * pitch + v * LANES)
    accumulate(R, V, steps, x, row, 1, panel, V * LANES, sums)
    for r in range(R):
        for v in range(V):
            vstore(out + r * pitch + v * LANES, sums[r * V + v])


cdef inline inlined gradient_rows(
    const int R, const int V, Py_ssize_t e, const real *values, Py_ssize_t row, const real *grad,
    const real *weights, const real *kept, const vec *delta, real *out,
) noexcept nogil:
    """Gradients of the scores of R keys: weight * (grad . value - delta), 0 where the weight is.

    `kept`, where not NULL, says what dropout multiplied each weight with.
    """
    cdef vec sums[MOST_ACCUMULATORS]
    cdef vec weight
    cdef int r, v, i
    clear(R * V, sums)
    accumulate(R, V, e, values, row, 1, grad, V * LANES, sums)
    for r in range(R):
        for v in range(V):
            i = r * V + v
            weight = vload(weights + i * LANES)
            if kept != NULL:
                sums[i] = sums[i] * vload(kept + i * LANES)
            # A hidden value may be NaN, and so may the product with its gradient.
            vstore(out + i * LANES, vless(vabs(weight), vset(TINY), vset(0), weight * (sums[i] - delta[v])))


cdef inline inlined outer_rows(
    const int R, const int V, int panels, const real *tile, Py_ssize_t tile_size, const real *rows,
    Py_ssize_t pitch, real *sums, Py_ssize_t sums_pitch,
) noexcept nogil:
    """sums[key] += sum over all queries of tile[key][query] * rows[query], for R keys and V vectors.

    `tile` has a tile of `tile_size` reals for each of the panels; the queries go by in order.
    """
    cdef vec acc[MOST_ACCUMULATORS]
    cdef Py_ssize_t queries = PANEL_VECTORS * LANES
    cdef int r, v, _n
    for r in range(R):
        for v in range(V):
            acc[r * V + v] = vload(sums + r * sums_pitch + v * LANES)
    for _n in range(panels):
        accumulate(R, V, queries, tile, queries, 1, rows, pitch, acc)
        rows += queries * pitch
        tile += tile_size
    for r in range(R):
        for v in range(V):
            vstore(sums + r * sums_pitch + v * LANES, acc[r * V + v])
