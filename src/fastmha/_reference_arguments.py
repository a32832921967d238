"""What goes into `fastmha.reference` and what comes out: checks, conversions, rounding.

The checks are short and ask for no more than the formulas need; like all of the reference they
share no code with the rest of the package.
"""

import math
import operator
import secrets
from typing import Any, NamedTuple

import numpy as np

FLOATS = ("float64", "float32", "float16", "bfloat16")


class Options(NamedTuple):
    """The options of one call, after the checks: what the formulas read."""

    scale: float
    mask: Any  # (B, H, L, S), bool or float64, or None
    causal: Any  # False, True, "top-left" or "bottom-right"
    window: tuple  # keys to the left and right of the query's position, -1: unbounded
    softcap: float  # 0: off
    slopes: Any  # (H,) or None
    sinks: Any  # (H,) or None
    key_lengths: Any  # (B,) or None
    query_lengths: Any  # (B,) or None
    dropout_p: float
    seed: int
    members: Any  # (B,) numbers of the batch members in the dropout pattern
    arithmetic: Any  # float64, or float32 for all other dtypes: where masks saturate


def options(
    q, k, dtype, *, mask=None, causal=False, window=None, scale=None, softcap=None,
    alibi_slopes=None, sinks=None, key_lengths=None, query_lengths=None, dropout_p=0.0, rng=None,
):
    """The `Options` of a call on (B, H, L, D) and (B, H, S, D)."""
    (B, H, L, D), S = q.shape, k.shape[2]
    require(scale is not None or D > 0, "scale", "a number where the head size is 0", scale)
    kinds = (bool, np.bool_, str)
    require(isinstance(causal, kinds), "causal", "a bool or a str", causal, TypeError)
    alignments = (False, True, "top-left", "bottom-right")
    require(causal in alignments, "causal", "'top-left' or 'bottom-right'", causal)
    dropout_p = probability("dropout_p", dropout_p)
    return Options(
        scale=1 / math.sqrt(D) if scale is None else finite("scale", scale),
        mask=None if mask is None else broadcast_mask("mask", mask, (B, H, L, S)),
        causal=causal,
        window=window_sides(window),
        softcap=cap(softcap),
        slopes=per_head("alibi_slopes", alibi_slopes, H),
        sinks=per_head("sinks", sinks, H),
        key_lengths=lengths("key_lengths", key_lengths, B, S),
        query_lengths=lengths("query_lengths", query_lengths, B, L),
        dropout_p=dropout_p,
        seed=seed(rng) if dropout_p > 0 else 0,
        members=np.arange(B),
        arithmetic=np.float64 if dtype.name == "float64" else np.float32,
    )


def require(holds, name, expected, got, error=ValueError):
    if not holds:
        raise error(f"{name}: expected {expected}, got {got!r}")


# Arrays


def array(name, x):
    masked = isinstance(x, np.ma.MaskedArray)
    require(not masked, name, "an array (see .filled() and mask)", "a masked array", TypeError)
    if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        return np.from_dlpack(x)
    return np.asarray(x)


def real_array(name, x):
    x = array(name, x)
    require(is_float(x.dtype) or x.dtype.kind in "iu", name, "real numbers", x.dtype, TypeError)
    return x


def float_array(name, x):
    x = array(name, x)
    expected = f"{' or '.join(FLOATS)} (convert with .astype())"
    require(is_float(x.dtype), name, expected, x.dtype, TypeError)
    return x


def query_key_value(query, key, value):
    """The three in float64, and the dtype that they have."""
    q, k, v = float_array("query", query), float_array("key", key), float_array("value", value)
    given = ", ".join(x.dtype.name for x in (q, k, v))
    equal = q.dtype.name == k.dtype.name == v.dtype.name  # whatever their byte order
    require(equal, "query, key, value", "one dtype (convert with .astype())", given, TypeError)
    return (*(x.astype(np.float64) for x in (q, k, v)), q.dtype)


def check_sizes(q, k, v):
    require(k.shape[-1] == q.shape[-1], "key", f"head size {q.shape[-1]} of the query", k.shape)
    require(v.shape[-2] == k.shape[-2], "value", f"length {k.shape[-2]} of the key", v.shape)


def group_size(name, H, G):
    """How many query heads share a key/value head."""
    require(H % G == 0 if G else H == 0, name, f"heads that divide the query's {H}", G)
    return H // G if G else 1


def four_axes(query, key, value, layout):
    """float64 (B, H, L, D), (B, H, S, D), (B, H, S, E), key/value heads repeated; the dtype."""
    require(layout in ("BHLD", "BLHD"), "layout", "'BHLD' or 'BLHD'", layout)
    q, k, v, dtype = query_key_value(query, key, value)
    for name, x in ("query", q), ("key", k), ("value", v):
        require(x.ndim == 4, name, f"4 axes, {layout}", x.shape)
        require(len(x) in (len(q), 1), name, f"a batch of {len(q)} or 1", x.shape)
    if layout == "BLHD":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    check_sizes(q, k, v)
    require(v.shape[1] == k.shape[1], "value", f"{k.shape[1]} heads, as key", v.shape[1])
    group = group_size("key", q.shape[1], k.shape[1])
    k, v = (np.broadcast_to(x, (len(q), *x.shape[1:])).repeat(group, axis=1) for x in (k, v))
    return q, k, v, dtype


def packed(query, key, value):
    """float64 (1, H, T, D), (1, H, T', D), (1, H, T', E) of the packed arrays; the dtype."""
    named = {"query": query, "key": key, "value": value}
    arrays = [float_array(name, x) for name, x in named.items()]
    for name, x in zip(named, arrays, strict=True):
        require(x.ndim == 3, name, "(T, heads, size)", x.shape)
    return four_axes(*(x[None] for x in arrays), "BLHD")


def sequences(cu_seqlens_q, cu_seqlens_k, T, T_k):
    """The number, the rows and the keys of each packed sequence."""

    def offsets(name, cu, total):
        cu = np.array(array(name, cu))
        require(cu.dtype in (np.int32, np.int64), name, "int32 or int64", cu.dtype, TypeError)
        rising = cu.ndim == 1 and cu.size > 0 and cu[0] == 0 and np.all(cu[:-1] <= cu[1:])
        require(rising and cu[-1] <= total, name, f"offsets rising from 0, up to {total}", cu)
        return cu.tolist()

    q = offsets("cu_seqlens_q", cu_seqlens_q, T)
    k = offsets("cu_seqlens_k", cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, T_k)
    require(len(q) == len(k), "cu_seqlens_k", f"{len(q)} offsets", len(k))
    return [(b, slice(*q[b : b + 2]), slice(*k[b : b + 2])) for b in range(len(q) - 1)]


def broadcast_mask(name, mask, shape):
    mask = array(name, mask)
    expected = "bool (True = may attend) or float (added); convert with .astype()"
    require(mask.dtype == bool or is_float(mask.dtype), name, expected, mask.dtype, TypeError)
    try:
        return np.broadcast_to(mask.astype(bool if mask.dtype == bool else np.float64), shape)
    except ValueError:
        require(False, name, f"a shape that broadcasts to {shape}", mask.shape)


def lengths(name, given, B, limit):
    if given is None:
        return None
    given = np.array(array(name, given))
    require(given.dtype.kind in "iu", name, "integers", given.dtype, TypeError)
    fits = given.shape == (B,) and np.all(given >= 0) and np.all(given <= limit)
    require(fits, name, f"{B} lengths from 0 to {limit}", given)
    return given.astype(np.int64)


def per_head(name, given, H):
    if given is None:
        return None
    given = real_array(name, given)
    require(given.shape == (H,), name, f"one number per query head, ({H},)", given.shape)
    return given.astype(np.float64)


def output_gradient(grad_out, out, lse, dtype, shape, lse_shape):
    g = float_array("grad_out", grad_out)
    require(g.dtype == dtype, "grad_out", f"the query's dtype, {dtype}", g.dtype, TypeError)
    for name, x, wanted in ("grad_out", g, shape), ("out", out, shape), ("lse", lse, lse_shape):
        require(np.shape(x) == wanted, name, wanted, np.shape(x))
    return g.astype(np.float64)


def chosen(name, index, size):
    try:
        return np.atleast_1d(np.arange(size)[slice(None) if index is None else index])
    except IndexError:
        require(False, name, f"indices below {size}", index)


# Scalars


def number(name, x):
    real = np.ndim(x) == 0 and np.asarray(x).dtype.kind in "iuf"
    require(real, name, "a real number", x, TypeError)
    return float(x)


def finite(name, x):
    x = number(name, x)
    require(math.isfinite(x), name, "a finite number", x)
    return x


def size(name, n):
    n = operator.index(n)
    require(n >= 1, name, "at least 1", n)
    return n


def probability(name, p):
    p = number(name, p)
    require(0 <= p <= 1, name, "a probability from 0 to 1", p)
    return p


def cap(softcap):
    softcap = 0.0 if softcap is None else finite("softcap", softcap)
    require(softcap >= 0, "softcap", "0 or more", softcap)
    return softcap


def window_sides(window):
    try:
        left, right = (-1, -1) if window is None else map(operator.index, window)
    except (TypeError, ValueError):
        raise TypeError(f"window: expected two ints, (left, right), got {window!r}") from None
    require(min(left, right) >= -1, "window", "-1 (unbounded) or more", window)
    return min(left, 2**40), min(right, 2**40)


def seed(rng):
    if rng is None:
        return secrets.randbits(64)
    if isinstance(rng, np.random.Generator):
        return int(rng.integers(2**64 - 1, dtype=np.uint64, endpoint=True))
    is_int = isinstance(rng, (int, np.integer)) and not isinstance(rng, bool)
    require(is_int, "rng", "an int seed, a numpy.random.Generator or None", rng, TypeError)
    require(0 <= rng < 2**64, "rng", "a seed from 0 to 2**64 - 1", rng)
    return int(rng)


def forward_seed(dropout_p, rng):
    """For the gradients: a fresh seed would be another pattern than the forward call's."""
    require(rng is not None or not dropout_p, "rng", "the seed of the forward call", rng)
    return rng


# Dtypes and results


def is_float(dtype):
    return dtype.name in FLOATS


def float_dtype(name, dtype):
    if isinstance(dtype, str) and dtype == "bfloat16":
        from ml_dtypes import bfloat16 as dtype
    dtype = np.dtype(dtype)
    require(is_float(dtype), name, " or ".join(FLOATS), dtype, TypeError)
    return dtype


def promoted(*dtypes):
    """NumPy's promotion, with float64 for what is not one of the four."""
    dtype = np.result_type(*dtypes)
    return dtype if is_float(dtype) else np.dtype(np.float64)


def lse_dtype(dtype):
    return np.dtype(np.float64 if dtype.name == "float64" else np.float32)


def rounded(x, dtype):
    """A fresh, writable, C-contiguous, native array of the dtype."""
    with np.errstate(all="ignore"):
        return np.array(x, dtype=dtype.newbyteorder("="), order="C")


def delivered(result, out, inputs):
    """The result, or `out` with the result in it."""
    if out is None:
        return result
    writable = isinstance(out, np.ndarray) and out.flags.writeable
    require(writable, "out", "a writable NumPy array", type(out), TypeError)
    require(out.dtype == result.dtype, "out", result.dtype, out.dtype, TypeError)
    require(out.shape == result.shape, "out", result.shape, out.shape)
    shared = any(x is not None and np.shares_memory(out, np.asarray(x)) for x in inputs)
    require(not shared, "out", "memory of its own", "some of an input's")
    out[...] = result
    return out
