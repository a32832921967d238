"""Rows of reals to int8, for caches: each with one scale, the largest magnitude over 127."""
from libc.stdint cimport int8_t

from fastmha._simd cimport LANES, MANTISSA, bits, real, vabs, vec, vfma, vloadu, vmax, vset, vstoreu


cdef inline float quantise_row(const real *x, Py_ssize_t n, int8_t *out) noexcept nogil:
    """x = out * scale, to the nearest. A row with a NaN or an infinity is NaN as a whole."""
    cdef vec size = vset(0), product = vset(0)
    cdef real lane[2 * LANES]
    cdef real most = 0, zero = 0, y
    cdef real whole = <real>(<bits>3 << (MANTISSA - 1))   # to add and subtract it rounds
    cdef float scale
    cdef Py_ssize_t i = 0
    while i + LANES <= n:
        size = vmax(size, vabs(vloadu(x + i)))
        product = vfma(vloadu(x + i), vset(0), product)
        i += LANES
    vstoreu(lane, size)
    vstoreu(lane + LANES, product)
    while i < n:
        most = max(most, x[i] if x[i] > 0 else -x[i])
        zero += x[i] * 0
        i += 1
    for i in range(LANES):
        most = max(most, lane[i])
        zero += lane[LANES + i]
    scale = <float>(most / 127)
    if zero != 0:                                # then it is NaN
        scale = <float>zero
    if not scale > 0:
        for i in range(n):
            out[i] = 0
        return scale
    for i in range(n):
        # The bounds are for scales that are denormal and may be half of what they should be.
        y = x[i] / <real>scale
        y = min(<real>127, max(<real>-127, y)) + whole
        out[i] = <int8_t>(y - whole)
    return scale
