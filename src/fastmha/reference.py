"""Attention in plain NumPy: the oracle of the package, and the page that explains every option.

The functions and the class have the names and signatures of the fast ones and share no code with
them. Everything is computed in float64, whole (B, H, L, S) arrays at a time, and rounded once, at
the end, to the dtype the package promises.

One letter, one meaning: **B** batch, **H** query heads, **G** key/value heads, **L** queries,
**S** keys, **D** query/key head size, **E** value head size, **T** tokens of a packed batch.

What is computed, in this order:

1. ``scores = q . k * scale``                                     (`masked_scores`)
2. ``scores = softcap * tanh(scores / softcap)``
3. ``scores += -slope * |query position - key position|`` (ALiBi), then the additive mask
4. keys that may not be seen are excluded                         (`visible_keys`)
5. ``weights = softmax(scores)``, a sink joining the denominator  (`probabilities`)
6. dropout                                                        (`dropout_mask`)
7. ``out = weights @ v``, over the visible keys alone             (`weighted_sum`)

The names in brackets are those of `fastmha._reference_formulas`, where each step is a few lines;
`attention` below explains every option.
"""

import math

import numpy as np

from . import _reference_arguments as args
from ._reference_formulas import (
    attend,
    dropout_mask,
    fold,
    gradients,
    philox4x32,
    probabilities,
    sum_to,
)

__all__ = [
    "MultiHeadAttention",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_weights",
    "dropout_mask",
    "merge_attention",
    "multi_head_attention",
    "philox4x32",
    "scaled_dot_product_attention",
    "sdpa",
    "softmax",
]


def softmax(x, axis=-1):
    """Softmax, ``exp(x - max) / sum(exp(x - max))``; all -inf gives zeros.

    Parameters
    ----------
    x : array of any shape; integers count as float64
    axis : int

    Returns
    -------
    Array of the shape and dtype of x.

    Examples
    --------
    >>> softmax([0.0, 0.0, -np.inf, 0.0, 0.0])
    array([0.25, 0.25, 0.  , 0.25, 0.25])
    """
    x = args.real_array("x", x)
    dtype, x = args.promoted(x.dtype), x.astype(np.float64)
    with np.errstate(all="ignore"):
        top = x.max(axis, keepdims=True, initial=-np.inf)
        terms = np.exp(x - np.where(top == -np.inf, 0.0, top))
        total = terms.sum(axis, keepdims=True)
        return args.rounded(np.where(total == 0, 0.0, terms / total), dtype)


def sdpa(Q, K, V, mask=None):
    """Scaled dot-product attention in short: ``softmax(Q K^T / sqrt(d_k)) V``.

    Vaswani et al., "Attention is all you need" (2017), equation 1.

    Parameters
    ----------
    Q, K, V : (..., n, d_k), (..., m, d_k), (..., m, d_v)
    mask : broadcastable to (..., n, m); bool: True = may attend; float: added to the scores

    Returns
    -------
    (..., n, d_v)

    Examples
    --------
    >>> sdpa(np.zeros((1, 2)), np.zeros((3, 2)), np.array([[0.0], [1.0], [5.0]]))
    array([[2.]])
    """
    return scaled_dot_product_attention(Q, K, V, mask)


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False, *, rng=None,
):
    """``torch.nn.functional.scaled_dot_product_attention`` on NumPy arrays.

    Parameters
    ----------
    query, key, value : (..., H, L, D), (..., G, S, D), (..., G, S, E)
        Leading axes, heads among them, broadcast against one another.
    attn_mask : broadcastable to (..., H, L, S); bool (True = may attend) or float (added)
    dropout_p : probability of dropping a weight; applied whenever it is not 0
    is_causal : query i sees the keys j <= i; not together with `attn_mask`
    scale : factor of the scores, default 1/sqrt(D)
    enable_gqa : let query head h use key/value head ``h // (H // G)``
    rng : seed or Generator of the dropout

    Returns
    -------
    (..., H, L, E), the dtype of the query

    Examples
    --------
    >>> v = np.arange(5.0)[:, None]
    >>> scaled_dot_product_attention(np.zeros((2, 1)), np.zeros((5, 1)), v, is_causal=True)
    array([[0. ],
           [0.5]])
    """
    q, k, v, dtype = args.query_key_value(query, key, value)
    for name, x in ("query", q), ("key", k), ("value", v):
        args.require(x.ndim >= 2, name, "at least 2 axes", x.shape)
    is_bool = isinstance(is_causal, (bool, np.bool_))
    args.require(is_bool, "is_causal", "a bool", is_causal, TypeError)
    both = is_causal and attn_mask is not None
    args.require(not both, "attn_mask", "None with is_causal=True", "both")
    if enable_gqa and min(q.ndim, k.ndim, v.ndim) > 2:
        H = q.shape[-3]
        k = np.repeat(k, args.group_size("key", H, k.shape[-3]), axis=-3)
        v = np.repeat(v, args.group_size("value", H, v.shape[-3]), axis=-3)
    args.check_sizes(q, k, v)
    leads = [x.shape[:-2] for x in (q, k, v)]
    try:
        lead = np.broadcast_shapes(*leads)
    except ValueError:
        expected = "leading axes that broadcast (grouped heads need enable_gqa=True)"
        raise ValueError(f"query, key, value: expected {expected}, got {leads}") from None

    B, H = math.prod(lead[:-1]), lead[-1] if lead else 1
    q, k, v = (np.broadcast_to(x, lead + x.shape[-2:]) for x in (q, k, v))
    q, k, v = (x.reshape(B, H, *x.shape[-2:]) for x in (q, k, v))
    L, S, E = *q.shape[-2:-1], *v.shape[-2:]
    if attn_mask is not None:
        attn_mask = args.broadcast_mask("attn_mask", attn_mask, (*lead, L, S))
        attn_mask = attn_mask.reshape(B, H, L, S)
    o = args.options(
        q, k, dtype, mask=attn_mask, causal=is_causal, scale=scale, dropout_p=dropout_p, rng=rng
    )
    out, _ = attend(q, k, v, o)
    return args.rounded(out.reshape(*lead, L, E), dtype)


def attention(
    query, key, value, *, mask=None, causal=False, window=None, scale=None, softcap=None,
    alibi_slopes=None, sinks=None, key_lengths=None, query_lengths=None, dropout_p=0.0, rng=None,
    layout="BHLD", return_lse=False, out=None,
):
    """Attention with every option there is.

    Parameters
    ----------
    query, key, value : (B, H, L, D), (B or 1, G, S, D), (B or 1, G, S, E)
        H is a multiple of G; query head h uses key/value head ``h // (H // G)``.
    mask : broadcastable to (B, H, L, S)
        bool: True = may attend. float: added to the scores, whatever it holds; -inf hides.
    causal : False, True, "top-left" or "bottom-right"
        Query i stands at position p = i ("top-left", the same as True) or i + S - L
        ("bottom-right"), and sees the keys j <= p.
    window : (left, right)
        The query at p sees the keys p - left ... p + right, ends included; -1 = unbounded.
    scale : factor of ``q . k``, default 1/sqrt(D)
    softcap : scores become ``softcap * tanh(score / softcap)``; None or 0: off
    alibi_slopes : (H,); adds ``-slope * |p - j|``
    sinks : (H,); one logit more in each head's denominator, without a value
    key_lengths, query_lengths : (B,) ints
        Keys past a length are hidden; queries past one give zeros. Bottom-right, query i then
        stands at i + key_length - query_length.
    dropout_p, rng : weights are dropped with probability `dropout_p`, the others divided by
        ``1 - dropout_p``; `rng` is an int seed or a Generator (see `dropout_mask`)
    layout : "BHLD", or "BLHD" for (B, L, H, D), (B, S, G, D) and so on
    return_lse : also return the log-sum-exp
    out : array to write the result to

    Returns
    -------
    out : (B, H, L, E) (or (B, L, H, E)), the dtype of the query; 0 in rows that see nothing
    lse : (B, H, L), only with `return_lse`
        ``log(sum_j exp(score))``, sinks left out; float64 for float64, else float32; -inf in
        rows that see nothing.

    Examples
    --------
    >>> q = k = np.zeros((1, 1, 4, 2))
    >>> v = np.arange(4.0).reshape(1, 1, 4, 1)
    >>> attention(q, k, v, window=(1, 0)).ravel()
    array([0. , 0.5, 1.5, 2.5])
    """
    q, k, v, dtype = args.four_axes(query, key, value, layout)
    o = args.options(
        q, k, dtype, mask=mask, causal=causal, window=window, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, key_lengths=key_lengths,
        query_lengths=query_lengths, dropout_p=dropout_p, rng=rng,
    )
    result, p = attend(q, k, v, o)
    result = args.rounded(result.swapaxes(1, 2) if layout == "BLHD" else result, dtype)
    result = args.delivered(result, out, (query, key, value, mask))
    return (result, args.rounded(p.lse[..., 0], args.lse_dtype(dtype))) if return_lse else result


def attention_backward(
    grad_out, query, key, value, out, lse, *, mask=None, causal=False, window=None, scale=None,
    softcap=None, alibi_slopes=None, sinks=None, key_lengths=None, query_lengths=None,
    dropout_p=0.0, rng=None, layout="BHLD", grad_mask=False, grad_sinks=False,
):
    """Gradients of `attention`; see `gradients` for the formulas.

    Parameters
    ----------
    grad_out : gradient of the result, of its shape and dtype
    query, key, value, and the options : as in the forward call; with dropout the same int seed
    out, lse : what the forward call returned
        Only their shapes are looked at: this function computes everything anew.
    grad_mask, grad_sinks : also return the gradients of the float mask, of the sinks

    Returns
    -------
    dq, dk, dv : of the shapes and dtype of query, key, value
    dmask : of the shape and dtype of the mask, only with `grad_mask`
    dsinks : (H,) of the dtype of the sinks, only with `grad_sinks`

    Examples
    --------
    >>> q = k = np.zeros((1, 1, 4, 2))
    >>> v = np.arange(4.0).reshape(1, 1, 4, 1)
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> dv.ravel().round(4)
    array([2.0833, 1.0833, 0.5833, 0.25  ])
    """
    q, k, v, dtype = args.four_axes(query, key, value, layout)
    o = args.options(
        q, k, dtype, mask=mask, causal=causal, window=window, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, key_lengths=key_lengths,
        query_lengths=query_lengths, dropout_p=dropout_p, rng=args.forward_seed(dropout_p, rng),
    )
    has_bias = o.mask is not None and o.mask.dtype != bool
    args.require(has_bias or not grad_mask, "grad_mask", "a float mask with it", mask)
    args.require(o.sinks is not None or not grad_sinks, "grad_sinks", "sinks with it", sinks)
    B, H, L, E = *q.shape[:3], v.shape[3]
    swapped = layout == "BLHD"
    shape = (B, L, H, E) if swapped else (B, H, L, E)
    g = args.output_gradient(grad_out, out, lse, dtype, shape, (B, H, L))

    dq, dk, dv, ds, dsinks = gradients(g.swapaxes(1, 2) if swapped else g, q, k, v, o)
    G = np.shape(key)[2 if swapped else 1]
    dk, dv = fold(dk, np.shape(key)[0], G), fold(dv, np.shape(value)[0], G)
    result = [args.rounded(x.swapaxes(1, 2) if swapped else x, dtype) for x in (dq, dk, dv)]
    if grad_mask:
        mask = np.asarray(mask)
        result.append(args.rounded(sum_to(ds, mask.shape), mask.dtype))
    if grad_sinks:
        result.append(args.rounded(dsinks, args.promoted(np.asarray(sinks).dtype)))
    return tuple(result)


def attention_varlen(
    query, key, value, cu_seqlens_q, cu_seqlens_k=None, *, causal=False, window=None, scale=None,
    softcap=None, alibi_slopes=None, sinks=None, dropout_p=0.0, rng=None, return_lse=False,
    out=None,
):
    """`attention` on sequences of different lengths, packed one after the other.

    Parameters
    ----------
    query, key, value : (T, H, D), (T', G, D), (T', G, E)
    cu_seqlens_q, cu_seqlens_k : (B + 1,) int32 or int64
        Sequence b has the rows ``cu[b] ... cu[b + 1] - 1``; `cu_seqlens_k` defaults to
        `cu_seqlens_q`. Sequence b is batch member b of the dropout pattern.
    other options : as in `attention`

    Returns
    -------
    out : (T, H, E); rows past the last offset are 0
    lse : (H, T), only with `return_lse`; -inf past the last offset

    Examples
    --------
    >>> q = k = np.zeros((5, 1, 2))
    >>> v = np.arange(5.0).reshape(5, 1, 1)
    >>> attention_varlen(q, k, v, np.array([0, 2, 5])).ravel()
    array([0.5, 0.5, 3. , 3. , 3. ])
    """
    q, k, v, dtype = args.packed(query, key, value)
    o = args.options(
        q, k, dtype, causal=causal, window=window, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, rng=rng,
    )
    result, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, rows, keys in args.sequences(cu_seqlens_q, cu_seqlens_k, q.shape[2], k.shape[2]):
        o = o._replace(members=[b])
        result[:, :, rows], p = attend(q[:, :, rows], k[:, :, keys], v[:, :, keys], o)
        lse[:, :, rows] = p.lse[..., 0]
    result = args.rounded(result[0].swapaxes(0, 1), dtype)
    result = args.delivered(result, out, (query, key, value))
    return (result, args.rounded(lse[0], args.lse_dtype(dtype))) if return_lse else result


def attention_varlen_backward(
    grad_out, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k=None, *, causal=False,
    window=None, scale=None, softcap=None, alibi_slopes=None, sinks=None, dropout_p=0.0, rng=None,
    grad_sinks=False,
):
    """Gradients of `attention_varlen`: dq, dk, dv, and with `grad_sinks` dsinks (H,).

    Parameters as in `attention_varlen` and `attention_backward`; rows past the last offset have
    zero gradients.

    Examples
    --------
    >>> q = k = np.zeros((3, 1, 2))
    >>> v = np.arange(3.0).reshape(3, 1, 1)
    >>> out, lse = attention_varlen(q, k, v, [0, 2], return_lse=True)
    >>> attention_varlen_backward(np.ones_like(out), q, k, v, out, lse, [0, 2])[2].ravel()
    array([1., 1., 0.])
    """
    q, k, v, dtype = args.packed(query, key, value)
    o = args.options(
        q, k, dtype, causal=causal, window=window, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p,
        rng=args.forward_seed(dropout_p, rng),
    )
    args.require(o.sinks is not None or not grad_sinks, "grad_sinks", "sinks with it", sinks)
    H, T = q.shape[1:3]
    g = args.output_gradient(grad_out, out, lse, dtype, (T, H, v.shape[3]), (H, T))
    g = g.swapaxes(0, 1)[None]
    dq, dk, dv, dsinks = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), np.zeros(H)
    for b, rows, keys in args.sequences(cu_seqlens_q, cu_seqlens_k, T, k.shape[2]):
        dq[:, :, rows], dk[:, :, keys], dv[:, :, keys], _, ds = gradients(
            g[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], o._replace(members=[b])
        )
        dsinks += ds
    dk, dv = (fold(x, 1, np.shape(key)[1]) for x in (dk, dv))
    result = [args.rounded(x[0].swapaxes(0, 1), dtype) for x in (dq, dk, dv)]
    if grad_sinks:
        result.append(args.rounded(dsinks, args.promoted(np.asarray(sinks).dtype)))
    return tuple(result)


def attention_weights(
    query, key, *, heads=None, rows=None, mask=None, causal=False, window=None, scale=None,
    softcap=None, alibi_slopes=None, sinks=None, key_lengths=None, query_lengths=None,
    dropout_p=0.0, rng=None, layout="BHLD",
):
    """The probabilities themselves, before dropout.

    Parameters
    ----------
    query, key : (B, H, L, D), (B or 1, G, S, D)
    heads, rows : int, sequence of ints or slice; the heads and queries wanted, default all
    other options : as in `attention`; dropout is accepted and changes nothing

    Returns
    -------
    (B, heads, rows, S), whatever the layout; the dtype of the query, float32 for half types

    Examples
    --------
    >>> attention_weights(np.zeros((1, 1, 3, 2)), np.zeros((1, 1, 3, 2)), causal=True, rows=1)
    array([[[[0.5, 0.5, 0. ]]]])
    """
    q, k, _, dtype = args.four_axes(query, key, key, layout)
    args.probability("dropout_p", dropout_p)
    o = args.options(
        q, k, dtype, mask=mask, causal=causal, window=window, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, key_lengths=key_lengths,
        query_lengths=query_lengths,
    )
    heads, rows = args.chosen("heads", heads, q.shape[1]), args.chosen("rows", rows, q.shape[2])
    with np.errstate(all="ignore"):
        weights = probabilities(q, k, o).weights
    return args.rounded(weights[:, heads][:, :, rows], args.lse_dtype(dtype))


def merge_attention(outs, lses):
    """Combine results over disjoint sets of keys into the result over all of them.

    ``lse = log(sum_n exp(lse_n))`` and ``out = sum_n exp(lse_n - lse) * out_n``; a part whose LSE
    is -inf saw nothing and has no influence.

    Parameters
    ----------
    outs : sequence of (..., L, E)
    lses : sequence of (..., L)

    Returns
    -------
    out, lse : (..., L, E), (..., L), of the dtypes of the parts

    Examples
    --------
    >>> outs, lses = [np.array([[1.0]]), np.array([[4.0]])], [np.log([2.0]), np.log([1.0])]
    >>> out, lse = merge_attention(outs, lses)
    >>> out, np.exp(lse)
    (array([[2.]]), array([3.]))
    """
    outs = [args.float_array(f"outs[{n}]", x) for n, x in enumerate(outs)]
    lses = [args.float_array(f"lses[{n}]", x) for n, x in enumerate(lses)]
    args.require(len(outs) == len(lses) > 0, "outs, lses", "as many, one at least",
                 (len(outs), len(lses)))
    shape, dtypes = outs[0].shape, (outs[0].dtype, lses[0].dtype)
    for n, (x, lse) in enumerate(zip(outs, lses, strict=True)):
        args.require(x.shape == shape, f"outs[{n}]", shape, x.shape)
        args.require(lse.shape == shape[:-1], f"lses[{n}]", shape[:-1], lse.shape)
        given = (x.dtype, lse.dtype)
        args.require(given == dtypes, f"outs[{n}], lses[{n}]", dtypes, given, TypeError)
    parts, logs = np.stack(outs).astype(np.float64), np.stack(lses).astype(np.float64)
    with np.errstate(all="ignore"):
        top = logs.max(0)
        top = np.where(top == -np.inf, 0.0, top)
        terms = np.exp(logs - top)
        total = terms.sum(0)
        saw = logs != -np.inf  # (n, ..., L)
        out = np.where(saw[..., None], terms[..., None] * parts, 0.0).sum(0) / total[..., None]
        out = np.where(saw.any(0)[..., None], out, 0.0)
        lse = top + np.log(total)
    return args.rounded(out, outs[0].dtype), args.rounded(lse, lses[0].dtype)


def alibi_slopes(n_heads):
    """ALiBi slopes as in the authors' code: (n_heads,) float64.

    Press, Smith, Lewis, "Train short, test long" (2022). For n a power of two head i has slope
    ``2**(-8 * (i + 1) / n)``. Else: the slopes of the next lower power of two, then every other
    slope of the next higher one.

    Examples
    --------
    >>> alibi_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    n_heads = args.size("n_heads", n_heads)
    n = 2 ** (n_heads.bit_length() - 1)  # the largest power of two not above n_heads
    first = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    between = [2.0 ** (-8.0 * (i + 1) / (2 * n)) for i in range(0, 2 * n, 2)]
    return np.array(first + between[: n_heads - n])


def multi_head_attention(X, W_Q, W_K, W_V, W_O, h, *, trace=None):
    """Multi-head self-attention in its five steps, without biases.

    Parameters
    ----------
    X : (L, d_model) or (B, L, d_model)
    W_Q, W_K, W_V : (d_model, h * d_k), (d_model, h * d_k), (d_model, h * d_v)
    W_O : (h * d_v, d_model)
        Arrays of different real dtypes are promoted by NumPy's rules, integers to float64.
    h : number of heads
    trace : called as ``trace(step, shape)`` after each step

    Returns
    -------
    (L, d_model) or (B, L, d_model)

    Examples
    --------
    >>> X, eye = np.array([[1.0, 0, 0, 0], [0, 0, 0, 1]]), np.eye(4)
    >>> multi_head_attention(X, eye, eye, eye, eye, 2, trace=print).round(4)
    project (2, 4)
    split (2, 2, 2)
    attend (2, 2)
    attend (2, 2)
    concat (2, 4)
    output (2, 4)
    array([[0.6698, 0.    , 0.    , 0.5   ],
           [0.5   , 0.    , 0.    , 0.6698]])
    """
    named = {"X": X, "W_Q": W_Q, "W_K": W_K, "W_V": W_V, "W_O": W_O}
    given = [args.real_array(name, x) for name, x in named.items()]
    dtype = args.promoted(*(x.dtype for x in given))
    X, W_Q, W_K, W_V, W_O = (x.astype(dtype).astype(np.float64) for x in given)
    h = args.size("h", h)
    args.require(X.ndim in (2, 3), "X", "(L, d_model) or (B, L, d_model)", X.shape)
    for name, W in ("W_Q", W_Q), ("W_K", W_K), ("W_V", W_V):
        fits = W.ndim == 2 and W.shape[0] == X.shape[-1] and W.shape[1] % h == 0
        args.require(fits, name, f"({X.shape[-1]}, a multiple of h={h})", W.shape)
    args.require(W_K.shape == W_Q.shape, "W_K", f"{W_Q.shape}, as W_Q", W_K.shape)
    fits = W_O.ndim == 2 and W_O.shape[0] == W_V.shape[1]
    args.require(fits, "W_O", f"({W_V.shape[1]}, d_model)", W_O.shape)
    trace = trace or (lambda step, shape: None)

    with np.errstate(all="ignore"):
        Q, K, V = X @ W_Q, X @ W_K, X @ W_V
    trace("project", Q.shape)
    Q, K, V = (x.reshape(*x.shape[:-1], h, x.shape[-1] // h).swapaxes(-2, -3) for x in (Q, K, V))
    trace("split", Q.shape)
    heads = []
    for i in range(h):
        heads.append(sdpa(Q[..., i, :, :], K[..., i, :, :], V[..., i, :, :]))
        trace("attend", heads[-1].shape)
    joined = np.concatenate(heads, axis=-1)
    trace("concat", joined.shape)
    with np.errstate(all="ignore"):
        result = joined @ W_O
    trace("output", result.shape)
    return args.rounded(result, dtype)


class MultiHeadAttention:
    """Multi-head attention with its four projections: the textbook class, and a few options.

    Parameters
    ----------
    d_model, n_heads : width of the model, number of heads; head size d_k = d_model // n_heads
    seed : of the weights, ``normal(0, 1/sqrt(d_model))`` in the order q, k, v, o
    n_kv_heads : fewer key/value heads than query heads; default n_heads
    bias : False: no biases (the attributes are None)
    dtype : of the parameters and the result; x is converted to it
    dropout : probability, in training only
    window, softcap : as in `attention`
    alibi : add `alibi_slopes` biases

    Attributes
    ----------
    Wq, bq, Wk, bk, Wv, bv, Wo, bo : arrays, used as ``x @ W + b``
        (d_model, d_model) and (d_model,); those of k and v n_kv_heads * d_k wide.
    attn : (B, n_heads, L, S), the weights of the last call, before dropout
    grads : after `backward`, the gradients of `parameters()`

    Examples
    --------
    >>> layer = MultiHeadAttention(8, 2)
    >>> x = np.ones((1, 3, 8))
    >>> layer(x, causal=True).shape, layer.attn.shape
    ((1, 3, 8), (1, 2, 3, 3))
    """

    def __init__(
        self, d_model, n_heads, seed=0, *, n_kv_heads=None, bias=True, dtype=np.float64,
        dropout=0.0, window=None, softcap=None, alibi=False,
    ):
        self.d_model, self.n_heads = args.size("d_model", d_model), args.size("n_heads", n_heads)
        self.n_kv_heads = args.size("n_kv_heads", n_heads if n_kv_heads is None else n_kv_heads)
        divides = self.d_model % self.n_heads == 0
        args.require(divides, "d_model", f"a multiple of n_heads={n_heads}", d_model)
        args.group_size("n_kv_heads", self.n_heads, self.n_kv_heads)
        self.d_k = self.d_model // self.n_heads
        self.dtype = args.float_dtype("dtype", dtype)
        args.probability("dropout", dropout)
        args.window_sides(window)
        args.cap(softcap)
        self.dropout, self.window, self.softcap, self.alibi = dropout, window, softcap, alibi

        rng = np.random.default_rng(seed)
        for name, width in self._widths():
            W = rng.normal(0, 1 / np.sqrt(self.d_model), (self.d_model, width))
            setattr(self, "W" + name, W.astype(self.dtype))
            setattr(self, "b" + name, np.zeros(width, self.dtype) if bias else None)

    def _widths(self):
        kv = self.n_kv_heads * self.d_k
        return ("q", self.d_model), ("k", kv), ("v", kv), ("o", self.d_model)

    def parameters(self):
        """``[Wq, bq, Wk, bk, Wv, bv, Wo, bo]``, the arrays themselves, without missing biases."""
        named = (getattr(self, kind + name) for name, _ in self._widths() for kind in "Wb")
        return [x for x in named if x is not None]

    def _split_heads(self, x):
        """(B, L, heads * d_k) -> (B, heads, L, d_k)."""
        B, L, width = x.shape
        return x.reshape(B, L, width // self.d_k, self.d_k).transpose(0, 2, 1, 3)

    def _join_heads(self, x):
        """(B, heads, L, d_k) -> (B, L, heads * d_k)."""
        B, heads, L, d_k = x.shape
        return x.transpose(0, 2, 1, 3).reshape(B, L, heads * d_k)

    def forward(
        self, x, causal=False, *, context=None, mask=None, lengths=None, context_lengths=None,
        training=False, rng=None,
    ):
        """Attention of x to itself or to a context; calling the object is the same.

        Parameters
        ----------
        x : (B, L, d_model), any real dtype
        causal : as in `attention`
        context : (B, S, d_model), where keys and values come from; default x
        mask : broadcastable to (B, n_heads, L, S); bool or float, as in `attention`
        lengths, context_lengths : (B,) tokens in use of x, of the context
            Those past a length are never seen, and their results are 0.
        training : apply dropout, and keep what `backward` needs
        rng : seed or Generator of the dropout

        Returns
        -------
        (B, L, d_model)
        """
        x = self._tokens("x", x)
        B, L = x.shape[:2]
        lengths = args.lengths("lengths", lengths, B, L)
        x = _clear_rows(x, lengths)
        if context is None:
            none = context_lengths is None
            args.require(none, "context_lengths", "None without a context", context_lengths)
            source, held = x, lengths
        else:
            source = self._tokens("context", context)
            args.require(len(source) == B, "context", f"a batch of {B}, as x", source.shape)
            held = args.lengths("context_lengths", context_lengths, B, source.shape[1])
            source = _clear_rows(source, held)

        w = self._float64_parameters()
        with np.errstate(all="ignore"):
            q = self._split_heads(x @ w["Wq"] + w["bq"])
            k = self._split_heads(source @ w["Wk"] + w["bk"])
            v = self._split_heads(source @ w["Wv"] + w["bv"])
        k, v = (np.repeat(y, self.n_heads // self.n_kv_heads, axis=1) for y in (k, v))
        o = args.options(
            q, k, self.dtype, mask=mask, causal=causal, window=self.window, softcap=self.softcap,
            alibi_slopes=alibi_slopes(self.n_heads) if self.alibi else None, key_lengths=held,
            query_lengths=lengths, dropout_p=self.dropout if training else 0.0, rng=rng,
        )
        heads, p = attend(q, k, v, o)
        self.attn = args.rounded(p.weights, args.lse_dtype(self.dtype))
        joined = self._join_heads(heads)
        self._saved = None
        if training:
            self._saved = (x, None if context is None else source, lengths, q, k, v, joined, o, w)
        with np.errstate(all="ignore"):
            return args.rounded(_clear_rows(joined @ w["Wo"] + w["bo"], lengths), self.dtype)

    __call__ = forward

    def backward(self, grad_out):
        """Gradients of the last ``forward(..., training=True)``.

        Parameters
        ----------
        grad_out : (B, L, d_model), the gradient of its result

        Returns
        -------
        The gradient of x, or where a context was given the pair of those of x and the context;
        leaves those of the parameters in ``grads``.
        """
        if getattr(self, "_saved", None) is None:
            raise RuntimeError("backward: call forward(..., training=True) first")
        x, context, lengths, q, k, v, joined, o, w = self._saved
        g = self._tokens("grad_out", grad_out)
        args.require(g.shape == x.shape, "grad_out", x.shape, g.shape)
        g = _clear_rows(g, lengths)
        with np.errstate(all="ignore"):
            dq, dk, dv, _, _ = gradients(self._split_heads(g @ w["Wo"].T), q, k, v, o)
            dk, dv = (fold(y, len(x), self.n_kv_heads) for y in (dk, dv))
            dq, dk, dv = (self._join_heads(y) for y in (dq, dk, dv))

            source = x if context is None else context
            pairs = {"q": (x, dq), "k": (source, dk), "v": (source, dv), "o": (joined, g)}
            self.grads = []
            for name, (inputs, dy) in pairs.items():
                self.grads.append(args.rounded(np.einsum("bli,blj->ij", inputs, dy), self.dtype))
                if getattr(self, "b" + name) is not None:
                    self.grads.append(args.rounded(dy.sum((0, 1)), self.dtype))
            dx, dsource = dq @ w["Wq"].T, dk @ w["Wk"].T + dv @ w["Wv"].T
        if context is None:
            return args.rounded(dx + dsource, self.dtype)
        return args.rounded(dx, self.dtype), args.rounded(dsource, self.dtype)

    def _tokens(self, name, x):
        x = args.real_array(name, x)
        fits = x.ndim == 3 and x.shape[2] == self.d_model
        args.require(fits, name, f"(B, L, {self.d_model})", x.shape)
        return x.astype(self.dtype).astype(np.float64)

    def _float64_parameters(self):
        found = {}
        for name, width in self._widths():
            for kind, shape in ("W", (self.d_model, width)), ("b", (width,)):
                x = getattr(self, kind + name)
                x = np.zeros(shape) if x is None else np.asarray(x).astype(self.dtype)
                args.require(x.shape == shape, kind + name, shape, x.shape)
                found[kind + name] = x.astype(np.float64)
        return found

    def __getattr__(self, name):
        advice = ": no call yet; call the object first" if name == "attn" else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    def __getstate__(self):
        return {k: x for k, x in self.__dict__.items() if k not in ("attn", "_saved")}


def _clear_rows(x, lengths):
    """(B, L, n) with zeros past each length."""
    if lengths is None:
        return x
    return np.where((np.arange(x.shape[1]) < lengths[:, None])[:, :, None], x, 0.0)
