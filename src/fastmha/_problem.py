"""What is asked: the arguments of a call become one checked record.

Every mistake in them is explained here or in `_checks`, and nothing is computed before all checks are
done. They run in a fixed order: kinds and dtypes, ranks, sizes, then the options one by one.
"""

import operator
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ._checks import (
    BOUNDLESS,
    check_causal,
    check_dropout,
    check_flag,
    check_lengths,
    check_mask,
    check_offsets,
    check_per_head,
    check_scale,
    check_softcap,
    check_window,
)
from ._dtypes import STORAGE, computed_in, float_array, real_array, storage

NO_VALUE = object()


class Options(NamedTuple):
    """How scores become weights: what the kernels unpack, in this order."""

    scale: float
    softcap: float = 0.0
    left: int = BOUNDLESS  # a query at position p sees the keys p - left to p + right
    right: int = BOUNDLESS
    shift: int = 0  # query i stands at position i + shift
    shifts: np.ndarray | None = None  # int64 (B,), in place of shift
    slopes: np.ndarray | None = None  # float64 (H,)
    sinks: np.ndarray | None = None  # float64 (H,)
    key_lengths: np.ndarray | None = None  # int64 (B,)
    query_lengths: np.ndarray | None = None
    dropout_p: float = 0.0
    seed: int = 0
    query_starts: np.ndarray | None = None  # int64 (B,), of a packed batch
    key_starts: np.ndarray | None = None


class Problem(NamedTuple):
    """A checked call."""

    q: np.ndarray  # (..., L, D)
    k: np.ndarray  # (..., S, D), broadcastable, or with fewer heads
    v: np.ndarray  # (..., S, E)
    mask: np.ndarray | None  # broadcastable to (..., L, S)
    lead: tuple  # the leading axes of the result: (..., H)
    options: Options

    @property
    def out_shape(self):
        return (*self.lead, self.q.shape[-2], self.v.shape[-1])

    @property
    def lse_dtype(self):
        return computed_in(self.q.dtype)


# --- query, key and value ---------------------------------------------------------------------------


def operands(query, key, value, axes=None, swapped=False):
    """The three arrays, of one floating-point dtype, with `axes` axes (None: at least two).

    `swapped` arrays come as (..., L, H, D); those returned are always (..., H, L, D)."""
    q, k, v = float_array(query, "query"), float_array(key, "key"), float_array(value, "value")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"query, key, value: expected one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; "
            "convert them with .astype"
        )
    if not q.ndim == k.ndim == v.ndim == (axes or max(2, v.ndim)):
        for x, name in ((q, "query"), (k, "key"), (v, "value")):
            if x.ndim < 2 if axes is None else x.ndim != axes:
                raise ValueError(
                    f"{name}: expected {'at least 2' if axes is None else axes} axes, got {x.ndim} "
                    f"(shape {x.shape})"
                )
    if swapped:
        q, k, v = q.swapaxes(-3, -2), k.swapaxes(-3, -2), v.swapaxes(-3, -2)
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"key: expected the query's head size {q.shape[-1]} as last axis, got {k.shape[-1]}"
        )
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"value: expected the key's length {k.shape[-2]}, got {v.shape[-2]}")
    return q, k, v


def broadcast_lead(q, k, v, enable_gqa):
    """The leading axes of the result by PyTorch's rules: they broadcast, and with `enable_gqa` the
    last of them, the heads, may be a multiple of the key's and the value's."""
    check_flag(enable_gqa, "enable_gqa")
    lead = q.shape[:-2]
    if lead == k.shape[:-2] == v.shape[:-2]:
        return lead
    leads = [x.shape[:-2] for x in (q, k, v)]
    heads = [lead[-1] if lead else 1 for lead in leads]
    H = max(heads) if min(heads) else 0
    for name, G in (("key", heads[1]), ("value", heads[2])):
        if enable_gqa and G not in (1, heads[0]):
            check_groups(heads[0], G, name)
        elif G not in (1, H) and heads[0] != 1:
            hint = "; a query with more heads needs enable_gqa=True" if heads[0] > G > 0 else ""
            raise ValueError(f"{name}: expected {heads[0]} heads like the query, got {G}{hint}")
    if enable_gqa and heads[0] > 1:
        leads[1:] = [(*lead[:-1], 1) if lead else lead for lead in leads[1:]]
    try:
        return np.broadcast_shapes(*leads)
    except ValueError:
        raise ValueError(
            f"query, key, value: expected leading axes that broadcast, got {leads[0]}, {leads[1]} "
            f"and {leads[2]}"
        ) from None


def check_groups(H, G, name):
    if H % G if G else H:
        raise ValueError(
            f"{name}: expected a number of heads that divides the query's {H}, got {G}"
        )


def grouped_lead(q, k, v):
    """(B, H) of four-axis arrays: G divides H, and one key/value batch may serve all queries."""
    lead = B, H = q.shape[:2]
    if lead == k.shape[:2] == v.shape[:2]:
        return lead
    for x, name in ((k, "key"), (v, "value")):
        if x.shape[0] not in (B, 1):
            raise ValueError(
                f"{name}: expected a batch axis of {B} like the query's, or 1, got {x.shape[0]}"
            )
    check_groups(H, k.shape[1], "key")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"value: expected the key's {k.shape[1]} heads, got {v.shape[1]}")
    return lead


# --- whole calls ------------------------------------------------------------------------------------


# What a call without options asks depends on shapes alone, and is remembered: where sequences are short,
# checks take longer than attention. So would `Problem(...)`, a function of Python's; hence `tuple.__new__`.
remembered = {}


def plain(checked, query, key, value, *options):
    """The lead and the options of ``checked(query, key, value, *options)``, where the arrays may stay
    `as_they_are`."""
    asked = checked, query.shape, key.shape, value.shape, options
    known = remembered.get(asked)
    if known is None:
        problem = checked(query, key, value, *options)
        known = problem.lead, problem.options
        if len(remembered) >= 256:
            remembered.clear()
        remembered[asked] = known
    return known


def as_they_are(query, key, value):
    """Whether the kernels take the arrays without a check of each."""
    return (
        type(query) is type(key) is type(value) is np.ndarray
        and query.dtype is key.dtype is value.dtype
        and STORAGE.get(query.dtype)
        and query.flags.aligned
        and key.flags.aligned
        and value.flags.aligned
    )


def torch_problem(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    rng=None,
):
    """A call of `scaled_dot_product_attention`."""
    if (
        attn_mask is scale is rng is None
        and type(is_causal) is type(enable_gqa) is bool
        and type(dropout_p) is float
        and dropout_p == 0
        and as_they_are(query, key, value)
    ):
        lead, options = plain(checked_torch, query, key, value, is_causal, enable_gqa)
        return tuple.__new__(Problem, (query, key, value, None, lead, options))
    return checked_torch(
        query, key, value, is_causal, enable_gqa, attn_mask, dropout_p, scale, rng
    )


def checked_torch(
    query,
    key,
    value,
    is_causal,
    enable_gqa,
    attn_mask=None,
    dropout_p=0.0,
    scale=None,
    rng=None,
):
    q, k, v = operands(query, key, value)
    lead = broadcast_lead(q, k, v, enable_gqa)
    check_flag(is_causal, "is_causal")
    if attn_mask is not None:
        if is_causal:
            raise ValueError(
                "attn_mask: expected None with is_causal=True, as in PyTorch; "
                "fastmha.attention applies both"
            )
        attn_mask = check_mask(attn_mask, "attn_mask", lead, q.shape[-2], k.shape[-2])
    dropout_p, seed = check_dropout(dropout_p, rng)
    options = Options(
        check_scale(scale, q.shape[-1]),
        right=0 if is_causal else BOUNDLESS,
        dropout_p=dropout_p,
        seed=seed,
    )
    return Problem(q, k, v, attn_mask, lead, options)


def full_problem(
    query,
    key,
    value,
    mask,
    causal,
    window,
    scale,
    softcap,
    alibi_slopes,
    sinks,
    key_lengths,
    query_lengths,
    dropout_p,
    rng,
    layout,
):
    """A call of `attention`; `value` is NO_VALUE where only weights are asked for."""
    if (
        mask is window is scale is softcap is alibi_slopes is sinks is None
        and key_lengths is query_lengths is rng is None
        and type(causal) is bool
        and type(layout) is str
        and type(dropout_p) is float
        and dropout_p == 0
        and as_they_are(query, key, value)
    ):
        lead, options = plain(checked_full, query, key, value, causal, layout)
        if layout == "BLHD":
            query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
        return tuple.__new__(Problem, (query, key, value, None, lead, options))
    return checked_full(
        query,
        key,
        value,
        causal,
        layout,
        mask,
        window,
        scale,
        softcap,
        alibi_slopes,
        sinks,
        key_lengths,
        query_lengths,
        dropout_p,
        rng,
    )


def checked_full(
    query,
    key,
    value,
    causal,
    layout,
    mask=None,
    window=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    key_lengths=None,
    query_lengths=None,
    dropout_p=0.0,
    rng=None,
):
    if not isinstance(layout, str) or layout not in ("BHLD", "BLHD"):
        raise ValueError(f"layout: expected 'BHLD' or 'BLHD', got {layout!r}")
    if value is NO_VALUE:
        key = float_array(key, "key")
        value = np.empty((*key.shape[:-1], 0), key.dtype)
    q, k, v = operands(query, key, value, axes=4, swapped=layout == "BLHD")
    lead = B, H = grouped_lead(q, k, v)
    (_, _, L, D), S = q.shape, k.shape[2]
    if mask is not None:
        mask = check_mask(mask, "mask", lead, L, S)
    causal, bottom_right = check_causal(causal)
    left, right = check_window(window, causal)
    shifts = None
    if key_lengths is not None:
        key_lengths = check_lengths(key_lengths, "key_lengths", B, S)
    if query_lengths is not None:
        query_lengths = check_lengths(query_lengths, "query_lengths", B, L)
    if bottom_right and (key_lengths is not None or query_lengths is not None):
        shifts = (S if key_lengths is None else key_lengths) - (
            L if query_lengths is None else query_lengths
        )
    dropout_p, seed = check_dropout(dropout_p, rng)
    options = Options(
        check_scale(scale, D),
        check_softcap(softcap),
        left,
        right,
        S - L if bottom_right else 0,
        shifts,
        None if alibi_slopes is None else check_per_head(alibi_slopes, "alibi_slopes", H),
        None if sinks is None else check_per_head(sinks, "sinks", H),
        key_lengths,
        query_lengths,
        dropout_p,
        seed,
    )
    return Problem(q, k, v, mask, lead, options)


def packed_problem(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    causal,
    window,
    scale,
    softcap,
    alibi_slopes,
    sinks,
    dropout_p,
    rng,
):
    """A call of `attention_varlen`; its arrays come out as (H, T, D) and so on."""
    q, k, v = operands(query, key, value, axes=3, swapped=True)
    H, D = q.shape[0], q.shape[2]
    check_groups(H, k.shape[0], "key")
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"value: expected the key's {k.shape[0]} heads, got {v.shape[0]}")
    queries = check_offsets(cu_seqlens_q, "cu_seqlens_q", q.shape[1])
    if cu_seqlens_k is None:
        keys = check_offsets(queries, "cu_seqlens_q", k.shape[1])
    else:
        keys = check_offsets(cu_seqlens_k, "cu_seqlens_k", k.shape[1])
    if keys.shape != queries.shape:
        raise ValueError(f"cu_seqlens_k: expected {queries.size} offsets, got {keys.size}")
    causal, bottom_right = check_causal(causal)
    left, right = check_window(window, causal)
    key_lengths, query_lengths = np.diff(keys), np.diff(queries)
    dropout_p, seed = check_dropout(dropout_p, rng)
    options = Options(
        check_scale(scale, D),
        check_softcap(softcap),
        left,
        right,
        0,
        key_lengths - query_lengths if bottom_right else None,
        None if alibi_slopes is None else check_per_head(alibi_slopes, "alibi_slopes", H),
        None if sinks is None else check_per_head(sinks, "sinks", H),
        key_lengths,
        query_lengths,
        dropout_p,
        seed,
        queries[:-1].copy(),
        keys[:-1].copy(),
    )
    return Problem(q, k, v, None, (H,), options)


def check_gradient(problem, swapped, grad_out, out, lse, grad_mask, grad_sinks, rng):
    """grad_out, out and lse of a backward call, as arrays that fit the problem."""
    shape = problem.out_shape
    lse_shape = shape[:-1]
    if swapped:
        shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    arrays = []
    for x, name in ((grad_out, "grad_out"), (out, "out")):
        x = float_array(x, name)
        if x.dtype != problem.q.dtype:
            raise TypeError(f"{name}: expected the query's dtype {problem.q.dtype}, got {x.dtype}")
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {x.shape}")
        arrays.append(x.swapaxes(-3, -2) if swapped else x)
    lse = float_array(lse, "lse")
    if lse.shape != lse_shape:
        raise ValueError(f"lse: expected shape {lse_shape}, got {lse.shape}")
    if lse.dtype != problem.lse_dtype:
        raise TypeError(f"lse: expected {problem.lse_dtype}, as the forward call returned, got {lse.dtype}")
    check_flag(grad_mask, "grad_mask")
    check_flag(grad_sinks, "grad_sinks")
    if grad_mask and (problem.mask is None or problem.mask.dtype == bool):
        raise ValueError("grad_mask: expected a float mask with it, got " + (
            "none" if problem.mask is None else "a bool mask, which has no gradient"
        ))
    if grad_sinks and problem.options.sinks is None:
        raise ValueError("grad_sinks: expected sinks with it, got none")
    if problem.options.dropout_p and rng is None:
        raise ValueError("rng: expected the seed of the forward call, got None")
    return (*arrays, lse)


def check_parts(outs, lses):
    """Partial results to merge, as lists of arrays."""
    for x, name in ((outs, "outs"), (lses, "lses")):
        if not isinstance(x, Iterable):
            raise TypeError(f"{name}: expected a sequence of arrays, got {type(x).__name__}")
    outs = [float_array(x, f"outs[{i}]") for i, x in enumerate(outs)]
    lses = [float_array(x, f"lses[{i}]") for i, x in enumerate(lses)]
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"lses: expected one LSE for each of at least one output, got {len(lses)} for {len(outs)}"
        )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.dtype != outs[0].dtype:
            raise TypeError(f"outs[{i}]: expected {outs[0].dtype} like the first, got {out.dtype}")
        if out.shape != outs[0].shape or out.ndim < 1:
            raise ValueError(f"outs[{i}]: expected shape {outs[0].shape}, got {out.shape}")
        if lse.shape != out.shape[:-1]:
            raise ValueError(f"lses[{i}]: expected shape {out.shape[:-1]}, got {lse.shape}")
    return outs, lses


def five_steps(X, W_Q, W_K, W_V, W_O, h, trace):
    """The arguments of `multi_head_attention`, all arrays of one floating-point dtype."""
    names = ("X", "W_Q", "W_K", "W_V", "W_O")
    arrays = [real_array(x, name) for x, name in zip((X, W_Q, W_K, W_V, W_O), names, strict=True)]
    for x, name in zip(arrays, names, strict=True):
        if x.ndim not in ((2, 3) if name == "X" else (2,)):
            expected = "2 or 3 axes" if name == "X" else "2 axes"
            raise ValueError(f"{name}: expected {expected}, got shape {x.shape}")
    common = np.result_type(*arrays)
    common = common if storage(common) else np.dtype(np.float64)
    X, W_Q, W_K, W_V, W_O = (x.astype(common, copy=False) for x in arrays)
    try:
        h = operator.index(h)
    except TypeError:
        raise TypeError(f"h: expected an int, got {type(h).__name__}") from None
    if h < 1:
        raise ValueError(f"h: expected at least 1 head, got {h}")
    if trace is not None and not callable(trace):
        raise TypeError(f"trace: expected a callable, got {type(trace).__name__}")
    for W, name in ((W_Q, "W_Q"), (W_K, "W_K"), (W_V, "W_V")):
        if W.shape[0] != X.shape[-1] or W.shape[1] % h:
            raise ValueError(
                f"{name}: expected ({X.shape[-1]}, a multiple of h = {h}), got {W.shape}"
            )
    if W_K.shape != W_Q.shape:
        raise ValueError(f"W_K: expected the shape of W_Q, {W_Q.shape}, got {W_K.shape}")
    if W_O.shape[0] != W_V.shape[1]:
        raise ValueError(f"W_O: expected {W_V.shape[1]} rows, as W_V has columns, got {W_O.shape}")
    return X, W_Q, W_K, W_V, W_O, h
