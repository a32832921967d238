"""The package's own exponential, logarithm and hyperbolic tangent, alike lane by lane in every build.

2**f = 1 + f * q(f) for |f| <= 1/2, where q is the polynomial of least relative error (by Remez's
exchange): 2.6e-9 with six coefficients for float, 1.8e-17 with eleven for double. Numbers are rounded
by adding 1.5 * 2**MANTISSA, which leaves the integer in the low bits. What is below the normal numbers
is flushed to zero, so that denormals never enter the kernels.
"""
from fastmha._simd cimport (
    EXPONENT_BIAS, MANTISSA, REAL_BYTES, real, vabs, vec, vexponent, vfma, vless, vmantissa, vscale, vset,
)


cdef inline real rounder() noexcept nogil:
    """1.5 * 2**MANTISSA, and the bias that `vscale` wants."""
    return <real>(3ULL << (MANTISSA - 1)) + EXPONENT_BIAS


cdef inline vec exp2_tail(vec f) noexcept nogil:
    """q(f) = (2**f - 1) / f for |f| <= 1/2."""
    cdef vec q
    if REAL_BYTES == 4:
        q = vset(0.0001559467816132662)
        q = vfma(q, f, vset(0.0013406643902351759))
        q = vfma(q, f, vset(0.009617692972993062))
        q = vfma(q, f, vset(0.05550310551013797))
        q = vfma(q, f, vset(0.24022652782887738))
        return vfma(q, f, vset(0.6931472149680279))
    else:
        q = vset(4.078071929588337e-10)
        q = vfma(q, f, vset(7.072570412814423e-09))
        q = vfma(q, f, vset(1.0180647659234139e-07))
        q = vfma(q, f, vset(1.3215442675329823e-06))
        q = vfma(q, f, vset(1.5252727385193868e-05))
        q = vfma(q, f, vset(0.0001540353044157213))
        q = vfma(q, f, vset(0.0013333558153439966))
        q = vfma(q, f, vset(0.009618129107607003))
        q = vfma(q, f, vset(0.05550410866479039))
        q = vfma(q, f, vset(0.24022650695910097))
        return vfma(q, f, vset(0.6931471805599457))


cdef inline vec exp2_scaled(vec x, vec c) noexcept nogil:
    """2**(x * c) for x * c <= 0: 0 for minus infinity, and a NaN stays one."""
    cdef vec shifted = vfma(x, c, vset(rounder()))
    cdef vec f = vfma(x, c, vset(rounder()) - shifted)
    cdef vec power = vfma(f, exp2_tail(f), vset(1)) * vscale(shifted)
    return vless(shifted, vset(rounder() + 2 - EXPONENT_BIAS), vset(0), power)


cdef inline vec vexp(vec x) noexcept nogil:
    """e**x for x <= 0, to the last places of small results too: log2(e) in two parts."""
    cdef vec shifted = vfma(x, vset(log2e()), vset(rounder()))
    cdef vec f = vfma(x, vset(log2e_rest()), vfma(x, vset(log2e()), vset(rounder()) - shifted))
    cdef vec power = vfma(f, exp2_tail(f), vset(1)) * vscale(shifted)
    return vless(shifted, vset(rounder() + 2 - EXPONENT_BIAS), vset(0), power)


cdef inline real log2e() noexcept nogil:
    return <real>1.4426950408889634


cdef inline real log2e_rest() noexcept nogil:
    """What log2(e) has beyond `log2e`."""
    return <real>(1.9259629911266175e-08 if REAL_BYTES == 4 else 2.0355273740931033e-17)


cdef inline vec vlog(vec x) noexcept nogil:
    """The natural logarithm of a positive normal number, by log(m) = 2 artanh((m - 1) / (m + 1))."""
    cdef vec m = vmantissa(x), e = vexponent(x), s, z, series
    cdef vec high = vset(1.4142135623730951)
    cdef int k
    e = vless(high, m, e + vset(1), e)
    m = vless(high, m, m * vset(0.5), m)
    s = (m - vset(1)) / (m + vset(1))
    z = s * s
    series = vset(<real>2 / 23)
    for k in range(21, 1, -2):
        series = vfma(series, z, vset(<real>2 / k))
    # 2s + s z series, then e ln 2 in two parts, smallest first. A NaN has no mantissa to speak of.
    s = vfma(s * z, series, s + s)
    s = vfma(e, vset(0.6931471805599453 if REAL_BYTES == 8 else 0.693145751953125),
             vfma(e, vset(2.3190468138462996e-17 if REAL_BYTES == 8 else 1.42860677e-06), s))
    return vless(x, vset(0), x, vless(vset(0), x, s, x))


cdef inline vec vtanh(vec x) noexcept nogil:
    """By 2**n (1 + f q(f)) - 1 = e**(2|x|) - 1, which keeps every digit of small arguments."""
    cdef vec a = vabs(x), shifted, f, power, less_one, y
    a = vless(vset(20), a, vset(20), a)
    shifted = vfma(a, vset(2 * log2e()), vset(rounder()))
    f = vfma(a, vset(2 * log2e_rest()), vfma(a, vset(2 * log2e()), vset(rounder()) - shifted))
    power = vscale(shifted)
    less_one = vfma(power, f * exp2_tail(f), power - vset(1))
    y = less_one / (less_one + vset(2))
    return vless(x, vset(0), vset(0) - y, y)
