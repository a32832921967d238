"""What happens to a tile of scores between the two products, one function a stage, in the order of the
formula: scale, cap, distance, bias, hide, maximum, weigh.

A tile is `tile[key][query]`: V vectors a key, from key `low` to key `high` of an atom. Each stage reads
and writes it whole, which stays in the first-level cache, and finds the maxima on the way. Hiding is always
a selection, never a sum with minus infinity, so that what a hidden key holds does not matter.
"""
from fastmha._math cimport exp2_scaled, vtanh
from fastmha._simd cimport (
    INFINITY, LANES, REAL_MAX, inlined, real, vabs, vec, vfma, vless, vload, vmax, vset, vstore,
)


cdef inline inlined scale_scores(
    const int V, Py_ssize_t low, Py_ssize_t high, real *tile, real scale
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(low * V, high * V):
        vstore(tile + i * LANES, vload(tile + i * LANES) * vset(scale))


cdef inline inlined cap_scores(
    const int V, Py_ssize_t low, Py_ssize_t high, real *tile, real cap, vec *most
) noexcept nogil:
    """cap * tanh(score / cap)."""
    cdef Py_ssize_t j
    cdef int v
    cdef real *place
    cdef vec score
    clear_maximum(V, most)
    for j in range(low, high):
        for v in range(V):
            place = tile + (j * V + v) * LANES
            score = vtanh(vload(place) / vset(cap)) * vset(cap)
            vstore(place, score)
            most[v] = vmax(most[v], score)


cdef inline inlined slope_of_cap(
    const int V, Py_ssize_t low, Py_ssize_t high, const real *tile, real cap, real *slope
) noexcept nogil:
    """The derivative of `cap_scores`, 1 - tanh**2, from what it returned."""
    cdef Py_ssize_t i
    cdef vec t
    for i in range(low * V, high * V):
        t = vload(tile + i * LANES) / vset(cap)
        vstore(slope + i * LANES, vset(1) - t * t)


cdef inline inlined subtract_distance(
    const int V, Py_ssize_t low, Py_ssize_t high, real *tile, const vec *slope, const vec *position, vec *most
) noexcept nogil:
    """ALiBi: slope * |position - key|, positions counted from the atom's start."""
    cdef Py_ssize_t j
    cdef int v
    cdef real *place
    cdef vec score
    clear_maximum(V, most)
    for j in range(low, high):
        for v in range(V):
            place = tile + (j * V + v) * LANES
            score = vfma(slope[v], vset(0) - vabs(position[v] - vset(<real>j)), vload(place))
            score = vless(score, vset(-REAL_MAX), vset(-REAL_MAX), score)  # only -inf hides
            vstore(place, score)
            most[v] = vmax(most[v], score)


cdef inline inlined add_bias(
    const int V, Py_ssize_t low, Py_ssize_t high, real *tile, const real *bias, bint one_row, vec *most
) noexcept nogil:
    """Adds bias[key][query], or bias[key] if it has but `one_row` for all queries. A bias of minus infinity
    hides, and only that: other sums saturate. Where one becomes infinite, `add_huge_bias` is for it."""
    cdef Py_ssize_t j
    cdef int v
    cdef real *place
    cdef vec b, score
    clear_maximum(V, most)
    for j in range(low, high):
        for v in range(V):
            place = tile + (j * V + v) * LANES
            b = vset(bias[j]) if one_row else vload(bias + (j * V + v) * LANES)
            score = vmax(vset(-REAL_MAX), vload(place) + b)
            score = vless(b, vset(-REAL_MAX), vset(-INFINITY), score)
            vstore(place, score)
            most[v] = vmax(most[v], score)


cdef inline inlined add_huge_bias(
    const int V, Py_ssize_t low, Py_ssize_t high, real *tile, const real *bias, bint one_row, vec *most
) noexcept nogil:
    """`add_bias`, saturating upwards too: only a score of plus infinity is one."""
    cdef Py_ssize_t j
    cdef int v
    cdef real *place
    cdef vec b, score, total
    clear_maximum(V, most)
    for j in range(low, high):
        for v in range(V):
            place = tile + (j * V + v) * LANES
            b = vset(bias[j]) if one_row else vload(bias + (j * V + v) * LANES)
            score = vload(place)
            total = vmax(vset(-REAL_MAX), score + b)
            # Finite terms cancel out and leave REAL_MAX, an infinite one leaves a NaN.
            total = vless(vset(REAL_MAX), total, score - score + (b - b) + vset(REAL_MAX), total)
            total = vless(b, vset(-REAL_MAX), vset(-INFINITY), total)
            vstore(place, total)
            most[v] = vmax(most[v], total)


cdef inline inlined hide_masked(
    const int V, Py_ssize_t low, Py_ssize_t high, real *tile, const real *bias, bint one_row, vec *most
) noexcept nogil:
    """Hides where bias, laid out as in `add_bias`, is minus infinity."""
    cdef Py_ssize_t j
    cdef int v
    cdef real *place
    cdef vec b, score
    clear_maximum(V, most)
    for j in range(low, high):
        for v in range(V):
            place = tile + (j * V + v) * LANES
            b = vset(bias[j]) if one_row else vload(bias + (j * V + v) * LANES)
            score = vless(b, vset(-REAL_MAX), vset(-INFINITY), vload(place))
            vstore(place, score)
            most[v] = vmax(most[v], score)


cdef inline inlined hide_outside(
    const int V, Py_ssize_t low, Py_ssize_t high, real *tile, const vec *first, const vec *last, vec *most
) noexcept nogil:
    """Hides the keys before `first` and after `last` of each query, counted from the atom's start."""
    cdef Py_ssize_t j
    cdef int v
    cdef real *place
    cdef vec key, score
    clear_maximum(V, most)
    for j in range(low, high):
        key = vset(<real>j)
        for v in range(V):
            place = tile + (j * V + v) * LANES
            score = vless(key, first[v], vset(-INFINITY), vload(place))
            score = vless(last[v], key, vset(-INFINITY), score)
            vstore(place, score)
            most[v] = vmax(most[v], score)


cdef inline inlined find_maximum(
    const int V, Py_ssize_t low, Py_ssize_t high, const real *tile, vec *most
) noexcept nogil:
    cdef Py_ssize_t j
    cdef int v
    clear_maximum(V, most)
    for j in range(low, high):
        for v in range(V):
            most[v] = vmax(most[v], vload(tile + (j * V + v) * LANES))


cdef inline inlined clear_maximum(const int V, vec *most) noexcept nogil:
    cdef int v
    for v in range(V):
        most[v] = vset(-INFINITY)


cdef inline vec finite(vec most) noexcept nogil:
    """A maximum to subtract: 0 in place of minus infinity, where nothing was seen."""
    return vless(most, vset(-REAL_MAX), vset(0), most)


cdef inline inlined weigh(
    const int V, Py_ssize_t low, Py_ssize_t high, real *tile, const vec *most, real sharpness,
    vec *total,
) noexcept nogil:
    """Scores become weights 2**(sharpness * (score - most)), summed up in the order of the keys."""
    cdef vec base[4]
    cdef vec weight
    cdef Py_ssize_t j
    cdef int v
    for v in range(V):
        base[v] = finite(most[v])
        total[v] = vset(0)
    for j in range(low, high):
        for v in range(V):
            weight = exp2_scaled(vload(tile + (j * V + v) * LANES) - base[v], vset(sharpness))
            vstore(tile + (j * V + v) * LANES, weight)
            total[v] = total[v] + weight


cdef inline inlined mark_hidden(
    const int V, Py_ssize_t low, Py_ssize_t high, const real *scores, real *marks
) noexcept nogil:
    """marks = 1 where a key is seen, 0 where it is hidden."""
    cdef Py_ssize_t i
    for i in range(low * V, high * V):
        vstore(marks + i * LANES, vless(vload(scores + i * LANES), vset(-REAL_MAX), vset(0), vset(1)))
