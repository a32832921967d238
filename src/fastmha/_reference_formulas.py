"""The formulas of `fastmha.reference`: float64, whole (B, H, L, S) arrays at a time.

Here query and key have the same number of heads, the options are checked (`Options`), and hiding
is always a selection and never a product with zero: what lies in a hidden key or value (NaN,
infinity, uninitialised memory) cannot reach a result.
"""

from typing import Any, NamedTuple

import numpy as np


class Probabilities(NamedTuple):
    """What `probabilities` finds; the first four (B, H, L, S), the rest (B, H, L, 1)."""

    weights: Any  # after softmax, before dropout; 0 where hidden
    visible: Any
    kept: Any  # factors of dropout: 0 or 1/(1 - p)
    cap_slope: Any  # derivative of the soft cap
    lse: Any  # log of the sum of exponentials, sinks left out
    sink_weight: Any  # the share of the denominator that the sink takes


def query_positions(L, S, o):
    """Where each query stands among the keys, (B or 1, L).

    Query i stands at i, or, aligned bottom-right, where the last query meets the last key:
    ``i + S - L``, and with lengths ``i + key_length - query_length`` for each member.
    """
    i = np.arange(L)[None, :]
    if o.causal != "bottom-right":
        return i
    held = S if o.key_lengths is None else o.key_lengths[:, None]
    asked = L if o.query_lengths is None else o.query_lengths[:, None]
    return i + held - asked


def visible_keys(positions, S, o):
    """Who may see whom: bool, (B or 1, H or 1, L, S); True = may attend."""
    p = positions[:, None, :, None]  # (B or 1, 1, L, 1)
    i = np.arange(positions.shape[-1])[:, None]  # (L, 1)
    j = np.arange(S)  # (S,)
    left, right = o.window
    visible = np.ones((*p.shape[:-1], S), bool)
    if o.causal:
        visible &= j <= p
    if left >= 0:
        visible &= j >= p - left
    if right >= 0:
        visible &= j <= p + right
    if o.key_lengths is not None:
        visible = visible & (j < o.key_lengths[:, None, None, None])
    if o.query_lengths is not None:
        visible = visible & (i < o.query_lengths[:, None, None, None])
    if o.mask is not None:
        visible = visible & (o.mask if o.mask.dtype == bool else o.mask != -np.inf)
    return visible


def saturating_sum(scores, mask, dtype):
    """``scores + mask`` rounded to dtype, where finite terms never add up to an infinity.

    Only -inf hides a key: a mask full of ``finfo.min`` must not turn into one.
    """
    largest = float(np.finfo(dtype).max)
    infinite = np.isinf(scores) | np.isinf(mask)
    total = scores + np.where(np.isinf(mask), mask, np.clip(mask, -largest, largest))
    total = np.where(infinite, total, np.clip(total, -largest, largest))
    return total.astype(dtype).astype(np.float64)


def masked_scores(q, k, positions, o):
    """Scores before anything is excluded, and the derivative of the soft cap: (B, H, L, S)."""
    scores = q @ k.swapaxes(-1, -2) * o.scale
    cap_slope = np.ones_like(scores)
    if o.softcap:
        t = np.tanh(scores / o.softcap)
        scores, cap_slope = o.softcap * t, (1 - t) * (1 + t)
    if o.slopes is not None:
        distance = np.abs(positions[:, None, :, None] - np.arange(k.shape[-2]))
        scores = scores - o.slopes[:, None, None] * distance
    if o.mask is not None and o.mask.dtype != bool:
        scores = saturating_sum(scores, o.mask, o.arithmetic)
    return scores, cap_slope


def probabilities(q, k, o):
    """Weights, log-sum-exp and all that the gradients need, for (B, H, L, D) and (B, H, S, D).

    ``weights[i, j] = exp(s[i, j] - m) / (sum_j exp(s[i, j] - m) + exp(sink - m))``
    with m the largest of them all, so that no exponential overflows.
    """
    H, L, S = q.shape[1], q.shape[2], k.shape[2]
    positions = query_positions(L, S, o)
    scores, cap_slope = masked_scores(q, k, positions, o)
    visible = visible_keys(positions, S, o) & (scores != -np.inf)
    scores = np.where(visible, scores, -np.inf)

    top = scores.max(-1, keepdims=True, initial=-np.inf)  # a NaN stays
    top = np.where(top == -np.inf, 0.0, top)  # rows that see nothing
    lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))

    sink = np.array(-np.inf) if o.sinks is None else o.sinks[:, None, None]
    top = np.maximum(top, sink)
    terms, sink_term = np.exp(scores - top), np.exp(sink - top)
    total = terms.sum(-1, keepdims=True) + sink_term
    weights = np.where(visible, terms / total, 0.0)
    sink_weight = np.where(visible.any(-1, keepdims=True), sink_term / total, 0.0)

    kept = np.ones_like(weights)
    if o.dropout_p > 0:
        pattern = dropout_mask(o.seed, o.dropout_p, o.members, H, positions, S)
        kept = pattern / (1 - o.dropout_p) if o.dropout_p < 1 else np.zeros_like(weights)
    return Probabilities(weights, visible, kept, cap_slope, lse, sink_weight)


def weighted_sum(weights, rows, visible):
    """``sum_j weights[..., i, j] * rows[..., j, :]`` over the visible j alone.

    Hidden weights are 0, so the matrix product will do unless ``0 * rows`` is not 0.
    """
    if np.isfinite(rows).all():
        return weights @ rows
    columns = [
        np.where(visible, weights * rows[..., None, :, e], 0.0).sum(-1)
        for e in range(rows.shape[-1])
    ]
    return np.stack(columns, axis=-1)


def attend(q, k, v, o):
    """Output (B, H, L, E) and the `Probabilities` behind it."""
    with np.errstate(all="ignore"):
        p = probabilities(q, k, o)
        return weighted_sum(p.weights * p.kept, v, p.visible), p


def gradients(grad_out, q, k, v, o):
    """Gradients of q, k, v, the scores after the mask (B, H, L, S), and the sinks (H,).

    With P the weights and P' those after dropout::

        dV = P'^T dO        dP = (dO V^T) * kept        delta = rowsum(P * dP) = rowsum(dO * O)
        dS = P * (dP - delta)      dQ = scale * dS K      dK = scale * dS^T Q

    The sink has no value, hence dP = 0 there, and its gradient is ``-sum(P_sink * delta)``.
    """
    with np.errstate(all="ignore"):
        p = probabilities(q, k, o)
        seen_by = p.visible.swapaxes(-1, -2)  # (B, H, S, L)
        dv = weighted_sum((p.weights * p.kept).swapaxes(-1, -2), grad_out, seen_by)
        dp = np.where(p.visible, grad_out @ v.swapaxes(-1, -2) * p.kept, 0.0)
        delta = (p.weights * dp).sum(-1, keepdims=True)
        ds = np.where(p.visible, p.weights * (dp - delta), 0.0)
        dsinks = -np.where(p.visible.any(-1, keepdims=True), p.sink_weight * delta, 0.0)
        dots = np.where(p.visible, ds * p.cap_slope * o.scale, 0.0)
        dq = weighted_sum(dots, k, p.visible)
        dk = weighted_sum(dots.swapaxes(-1, -2), q, seen_by)
        return dq, dk, dv, ds, dsinks.sum((0, 2, 3))


def fold(grad, batch, G):
    """(B, H, S, D) -> (B or 1, G, S, D): sum over all that shared a key/value head."""
    B, H, S, D = grad.shape
    grad = grad.reshape(B, G, H // G if G else 1, S, D).sum(2)
    return grad.sum(0, keepdims=True) if batch == 1 else grad


def sum_to(grad, shape):
    """The gradient of an array of this shape that was broadcast to the shape of grad."""
    grad = grad.sum(tuple(range(grad.ndim - len(shape))))
    return grad.sum(tuple(axis for axis, n in enumerate(shape) if n == 1), keepdims=True)


def philox4x32(counter, key):
    """Philox4x32-10: four random 32-bit words from four counter words and two key words.

    Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    Parameters
    ----------
    counter : four broadcastable arrays of 32-bit values
    key : two 32-bit values

    Returns
    -------
    Four uint64 arrays holding 32-bit words.

    Examples
    --------
    >>> [f"{int(word):08x}" for word in philox4x32((0, 0, 0, 0), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = (int(word) for word in key)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (b >> half) ^ c1 ^ np.uint64(k0),
            b & low,
            (a >> half) ^ c3 ^ np.uint64(k1),
            a & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def dropout_mask(seed, p, members, n_heads, positions, n_keys):
    """The weights that dropout keeps: a pure function of the seed and of who looks at whom.

    `philox4x32` with key (low, high half of seed) and counter (key position // 4, query position,
    head, batch member); word ``key position % 4`` decides: kept where it is >= p * 2**32.

    Parameters
    ----------
    seed : int below 2**64
    p : probability of dropping
    members : (B,) numbers of the batch members
    n_heads : H
    positions : (L,) or (B or 1, L) query positions
    n_keys : S

    Returns
    -------
    (B, H, L, S) bool, True = kept

    Examples
    --------
    >>> dropout_mask(0, 0.5, [0], 1, [0, 1], 8)[0, 0].astype(int)
    array([[0, 1, 1, 1, 1, 0, 1, 0],
           [0, 1, 0, 0, 0, 1, 1, 0]])
    """
    members, positions = np.asarray(members), np.atleast_2d(positions)
    counter = (
        np.arange(-(-n_keys // 4)),
        positions[:, None, :, None] % 2**32,
        np.arange(n_heads)[:, None, None],
        members[:, None, None, None],
    )
    words = np.stack(np.broadcast_arrays(*philox4x32(counter, (seed % 2**32, seed >> 32))), -1)
    words = words.reshape(len(members), n_heads, positions.shape[1], 4 * len(counter[0]))
    return words[..., :n_keys] >= p * 2.0**32
