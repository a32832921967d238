"""What the tests of both caches share: tokens, a model of what is stored, and what attention to it is."""

import importlib.util

import numpy as np
from drawing import as_dtype

import fastmha

STORED = ["float32", "float64", "float16", "int8"]
ASKED = ["float32", "float64", "float16"]
if importlib.util.find_spec("ml_dtypes"):
    STORED.append("bfloat16")
    ASKED.append("bfloat16")


def draw(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def cache_dtype(name):
    return name if name == "int8" else as_dtype(name)


def kept(x, name):
    """Rows (..., D) as a cache of that dtype keeps them: (values, or int8 and scales)."""
    x = np.asarray(x)
    if name != "int8":
        if x.dtype == np.float64 and name in ("float16", "bfloat16"):
            x = x.astype(np.float32)
        with np.errstate(over="ignore"):
            return x.astype(as_dtype(name))
    x = x.astype(np.float32)
    scales = np.abs(x).max(-1, keepdims=True, initial=0) / np.float32(127)
    with np.errstate(invalid="ignore"):
        scales = np.where(np.isfinite(scales), scales, np.float32(np.nan))
        rows = np.rint(x / np.where(scales > 0, scales, 1))
    return np.where(scales > 0, np.clip(rows, -127, 127), 0), scales


def read(stored, wide):
    """Stored rows as the kernels for `wide` read them."""
    if isinstance(stored, tuple):
        rows, scales = stored
        return rows.astype(wide) * scales.astype(wide)
    return stored.astype(wide)


def expected(q, k, v, **options):
    """Attention of the last tokens, one member (H, L, D), (G, S, D), (G, S, E), as stored, by the
    function: in float64 if something is float64, else in float32. (out, lse) of q's dtype."""
    dtypes = [x.dtype for x in (q, k, v) if not isinstance(x, tuple)]
    wide = np.float64 if np.float64 in dtypes else np.float32
    k, v = read(k, wide), read(v, wide)
    out, lse = fastmha.attention(
        q.astype(wide)[None], k[None], v[None], causal="bottom-right", return_lse=True, **options
    )
    exact = np.float64 if q.dtype == np.float64 else np.float32
    with np.errstate(over="ignore"):
        return out[0].astype(q.dtype), lse[0].astype(exact)


def join(parts, axis=-2):
    """Stored rows after one another."""
    if isinstance(parts[0], tuple):
        return tuple(np.concatenate(x, axis) for x in zip(*parts, strict=True))
    return np.concatenate(parts, axis)


def cut(stored, index):
    """The same tokens (axis -2) of stored rows."""
    if isinstance(stored, tuple):
        return tuple(x[..., index, :] for x in stored)
    return stored[..., index, :]


def poison(store, index):
    """Rows that nobody may read."""
    if store.scales is not None:
        store.rows[index], store.scales[index] = 127, np.nan
    else:
        store.rows[index] = np.nan
