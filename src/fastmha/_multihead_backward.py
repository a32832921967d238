"""The gradients of the class: back through the projections, the rotation and the attention."""

from typing import Any, NamedTuple

import numpy as np

from ._dtypes import computed_in


class Saved(NamedTuple):
    """What a call with ``training=True`` keeps."""

    asked: Any  # the checked call; rows of x and the context past their lengths are 0
    q: np.ndarray  # (B, L, H, d_k), projected and rotated
    k: np.ndarray  # (B, S, G, d_k)
    v: np.ndarray
    heads: np.ndarray  # (B, L, H, d_k)
    lse: np.ndarray  # (B, H, L)


def gradients(saved, grad_out, rope):
    """Gradients of x, of the context (None without one), and of the parameters, as a list.

    With ``y = x @ W + b``: ``dx = dy @ W.T``, ``dW = x.T @ dy`` and ``db = sum(dy)``, the last two
    over all tokens. Rows past the lengths are 0 in `grad_out`, and so in all that follows.

    Parameters
    ----------
    saved : Saved
    grad_out : (B, L, d_model)
    rope : Rope or None
    """
    from .functional import attention_backward

    asked, q, k, v, heads, lse = saved
    p = asked.parameters
    joined = heads.reshape(grad_out.shape)
    grad_heads = _product(grad_out, p["Wo"].T).astype(q.dtype, copy=False).reshape(heads.shape)
    dq, dk, dv = attention_backward(grad_heads, q, k, v, heads, lse, layout="BLHD", **asked.options)
    if rope is not None:
        dq = _rotated_back(rope, dq, asked.positions)
        dk = _rotated_back(rope, dk, asked.key_positions)
    dq, dk, dv = (dy.reshape(*dy.shape[:2], -1) for dy in (dq, dk, dv))

    grads = []
    pairs = {
        "q": (asked.x, dq),
        "k": (asked.source, dk),
        "v": (asked.source, dv),
        "o": (joined, grad_out),
    }
    for name, (x, dy) in pairs.items():
        grads.append(_weight_gradient(x, dy))
        if p["b" + name] is not None:
            grads.append(dy.sum((0, 1), dtype=computed_in(dy.dtype)).astype(dy.dtype))
    dx = _product(dq, p["Wq"].T)
    dsource = _product(dk, p["Wk"].T) + _product(dv, p["Wv"].T)
    if asked.source is asked.x:
        return (dx + dsource).astype(q.dtype, copy=False), None, grads
    return dx.astype(q.dtype, copy=False), dsource.astype(q.dtype, copy=False), grads


def _product(x, W):
    """(B, L, n) @ (n, m), in the arithmetic type."""
    exact = computed_in(x.dtype)
    B, L, n = x.shape
    with np.errstate(all="ignore"):
        y = x.reshape(B * L, n).astype(exact, copy=False) @ W.astype(exact, copy=False)
    return y.reshape(B, L, W.shape[1])


def _weight_gradient(x, dy):
    """The sum over all tokens of the outer products of (B, L, n) and (B, L, m): (n, m)."""
    exact = computed_in(x.dtype)
    x, dy = (y.reshape(-1, y.shape[2]) for y in (x, dy))
    with np.errstate(all="ignore"):
        product = x.T.astype(exact, copy=False) @ dy.astype(exact, copy=False)
        return product.astype(x.dtype, copy=False)


def _rotated_back(rope, grad, positions):
    """(B, L, H, d_k), back through the rotation."""
    return rope.backward(grad.swapaxes(1, 2), positions).swapaxes(1, 2)
