"""How results are compared: by their error against that of the plain computation, or bit by bit."""

import math

import numpy as np

from fastmha import reference

# Allowed in any case, in units of the last place of the dtype, relative to the largest value: the
# plain computation may have been lucky, as on arrays of a single element. Half types are computed
# in float32 and rounded once.
FLOOR = {"float64": 0, "float32": 4, "float16": 1, "bfloat16": 1}


def native(x):
    """`x` as an array in native byte order."""
    x = np.asarray(x)
    return x.astype(x.dtype.newbyteorder("="), copy=False)


def arithmetic(dtype):
    """What a dtype is computed in."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def precision(dtype):
    """(epsilon, smallest number that counts) of one of the four dtypes."""
    if dtype.name == "bfloat16":
        return 2.0**-7, float(np.finfo(np.float32).smallest_normal)
    info = np.finfo(dtype)
    if dtype == np.float16:
        return float(info.eps), float(info.smallest_subnormal)
    return float(info.eps), float(info.smallest_normal)


def error(actual, expected, floor=0.0):
    """The largest difference between finite values, relative to the largest value or `floor`."""
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    finite = np.isfinite(actual) & np.isfinite(expected)
    if not finite.any():
        return 0.0
    actual, expected = actual[finite], expected[finite]
    largest = max(np.abs(expected).max(), floor)
    with np.errstate(over="ignore"):
        difference = np.abs(actual - expected).max()
    return float(difference / largest) if difference else 0.0


def assert_close(actual, expected, dtype, plain=None, floor=0.0, slack=0.0):
    """`actual`, of dtype `dtype`, is `expected` up to 1e-12 of the largest value in float64, and
    else up to twice the error of the `plain` computation at that precision, or a few roundings and
    `slack`.

    NaNs and infinities must be in the same places. With `floor`, errors are relative to no less.
    """
    dtype = np.dtype(dtype)
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == dtype, f"dtype {actual.dtype}, expected {dtype}"
    assert actual.shape == np.shape(expected), f"{actual.shape}, expected {np.shape(expected)}"
    a, e = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    special = ~(np.isfinite(a) & np.isfinite(e))
    assert np.array_equal(a[special], e[special], equal_nan=True), (
        f"NaN or infinity: {a[special][:9]}, expected {e[special][:9]}"
    )
    epsilon, least = precision(dtype)
    bound = 1e-12
    if dtype != np.float64:
        honest = 0 if plain is None else 2 * error(plain, expected, floor)
        bound = max(FLOOR[dtype.name] * epsilon + slack, honest)
    worst = error(actual, expected, max(floor, least / epsilon))
    assert worst <= bound, f"error {worst:.3g} of the largest value, at most {bound:.3g}"


def assert_same_bits(actual, expected):
    """Equal bit by bit, a NaN being any NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype == bool:
        assert np.array_equal(actual, expected)
        return
    word = np.dtype(f"u{actual.dtype.itemsize}")
    a, e = (np.ascontiguousarray(x) for x in (actual, expected))
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        differ = (a.view(word) != e.view(word)) & ~(np.isnan(a) & np.isnan(e))
    assert not differ.any(), (
        f"{differ.sum()} of {differ.size} differ, first at {np.argwhere(differ)[0]}: "
        f"{a[differ][0]}, expected {e[differ][0]}"
    )


def assert_no_negative_zero(x):
    assert not (np.signbit(x) & (x == 0)).any()


def assert_attends(out, lse, query, key, value, options):
    """(out, lse) is what `fastmha.reference` says of this call of `attention`; no LSE: None."""
    query, key, value = (native(x) for x in (query, key, value))
    dtype = query.dtype
    expected, expected_lse = reference.attention(query, key, value, return_lse=True, **options)
    plain = plain_lse = None
    slack = 0.0
    if dtype != np.float64:
        plain, plain_lse, size = plain_attention(query, key, value, **options)
        slack = size * precision(np.dtype(np.float32))[0]
    assert_close(out, expected, dtype, plain, slack=slack)
    if lse is not None:
        # Logarithms are as exact as their arguments: absolutely below 1, relatively above.
        unit = np.where(np.isfinite(expected_lse), np.maximum(np.abs(expected_lse), 1), 1)
        assert_close(
            (lse / unit).astype(lse.dtype),
            expected_lse / unit,
            arithmetic(dtype),
            None if plain_lse is None else plain_lse / unit,
            floor=1.0,
            slack=slack,
        )


def plain_attention(
    query,
    key,
    value,
    *,
    mask=None,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    key_lengths=None,
    query_lengths=None,
    dropout_p=0.0,
    rng=None,
    layout="BHLD",
):
    """The textbook's computation with whole arrays, in the arithmetic of the query's dtype.

    Returns the output, the LSE, and the size of the largest sum of terms of which a score consists:
    so many roundings are honest.
    """
    dtype = native(query).dtype
    real = arithmetic(dtype).type
    q, k, v = (np.asarray(x).astype(real) for x in (query, key, value))
    if layout == "BLHD":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    (B, H, L, D), (G, S) = q.shape, k.shape[1:3]
    k, v = (x.repeat(H // G if G else 1, axis=1) for x in (k, v))
    scale = real(1 / math.sqrt(D) if scale is None else scale)
    held = np.full(B, S) if key_lengths is None else np.asarray(key_lengths).astype(int)
    asked = np.full(B, L) if query_lengths is None else np.asarray(query_lengths).astype(int)
    i, j = np.arange(L)[:, None], np.arange(S)
    shift = held - asked if causal == "bottom-right" else 0 * held
    position = i + shift[:, None, None, None]
    left, right = (-1, -1) if window is None else window
    seen = (j < held[:, None, None, None]) & (i < asked[:, None, None, None])
    seen = seen & (not causal or j <= position)
    seen = seen & (left < 0 or j >= position - left) & (right < 0 or j <= position + right)
    with np.errstate(all="ignore"):
        scores = q @ k.swapaxes(-1, -2) * scale
        size = np.abs(q) @ np.abs(k).swapaxes(-1, -2) * np.abs(scale)
        if softcap:
            scores = np.tanh(scores / real(softcap)) * real(softcap)
        if alibi_slopes is not None:
            slopes = np.asarray(alibi_slopes).astype(real)[:, None, None]
            distance = slopes * np.abs(position - j).astype(real)
            scores, size = scores - distance, size + distance
        if mask is not None:
            mask = np.asarray(mask)
            seen = seen & (mask if mask.dtype == bool else mask != -np.inf)
            if mask.dtype != bool:
                most = np.finfo(real).max
                bias = np.clip(mask.astype(np.float64), -most, most).astype(real)
                scores = np.clip(scores + bias, -most, most)
                size = size + np.abs(bias)
        scores = np.where(seen, scores, -np.inf)
        most = scores.max(-1, keepdims=True, initial=-np.inf)
        most = np.where(most == -np.inf, 0, most)
        weights = np.exp(scores - most)
        total = weights.sum(-1, keepdims=True)
        lse = (most + np.log(total))[..., 0]
        if sinks is not None:
            total = total + np.exp(np.asarray(sinks).astype(real)[:, None, None] - most)
        weights = np.where(total > 0, weights / total, 0)
        if dropout_p:
            positions = position[:, 0, :, 0]
            kept = reference.dropout_mask(rng, dropout_p, np.arange(B), H, positions, S)
            weights = weights * kept * real(1 / (1 - dropout_p) if dropout_p < 1 else 0)
        out = (weights.astype(real) @ v).astype(dtype)
    size = size.max(initial=0, where=seen & (size < 1e4))  # beyond: a bias that swallows the score
    return out.swapaxes(1, 2) if layout == "BLHD" else out, lse.astype(real), float(size)
