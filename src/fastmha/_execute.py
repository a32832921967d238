"""A checked problem is run: memory for the results, then the kernels."""

import math

import numpy as np

from ._dispatch import kernels
from ._dtypes import computed_in, storage
from ._plan import backward_chunk
from ._problem import Options, Problem


def attend(problem, out=None, swapped=False, want_lse=False):
    """The output (..., L, E), or (..., L, H, E) if `swapped`; and the LSE (..., L), or None."""
    q, k, v, mask, lead, options = problem
    dtype = q.dtype
    code = storage(dtype)
    if out is None:
        L, E = q.shape[-2], v.shape[-1]
        out = np.empty((*lead[:-1], L, lead[-1], E) if swapped else (*lead, L, E), dtype)
    place = out.swapaxes(-3, -2) if swapped else out
    lse = np.empty((*lead, q.shape[-2]), problem.lse_dtype) if want_lse else None
    if 0 in lead:
        return out, lse
    if options.query_starts is not None:
        end = _end(options.query_starts, options.query_lengths)
        place[:, end:] = 0
        if want_lse:
            lse[:, end:] = -np.inf
    lse_code = 0 if lse is None else storage(lse.dtype)
    mask_code = 0 if mask is None else storage(mask.dtype)
    codes = code, code, code, code, lse_code, mask_code, 0
    kernels(dtype).attend(q, k, v, place, lse, mask, None, codes, options)
    return out, lse


def _end(starts, lengths):
    """The first row past a packed batch."""
    return starts[-1] + lengths[-1] if len(starts) else 0


def attend_backward(problem, grad, out, lse, swapped=False, grad_mask=False):
    """dq, dk, dv, and dmask or None, laid out like query, key, value and mask."""
    q, k, v, mask, lead, options = problem
    exact = computed_in(q.dtype)
    *batch, _ = lead
    L, S, D, G, E = q.shape[-2], k.shape[-2], q.shape[-1], k.shape[-3], v.shape[-1]
    packed = options.query_starts is not None
    if packed:
        S = options.key_lengths.max(initial=0)
    chunk = backward_chunk(G * (len(options.query_starts) if packed else math.prod(batch)), S)
    chunks = max(1, -(-S // chunk))
    # Keys and values that serve all members get the sum over them.
    shared = [bool(batch) and x.shape[0] != batch[0] for x in (k, v)]
    parts = _arrays((chunks, *lead, L, D), exact if chunks > 1 else q.dtype, swapped)
    dk = _arrays((*batch, G, k.shape[-2], D), exact if shared[0] else q.dtype, swapped)
    dv = _arrays((*batch, G, k.shape[-2], E), exact if shared[1] else q.dtype, swapped)
    if packed:  # the kernels pass over rows of no member
        parts[...] = dk[...] = dv[...] = 0
    elif chunks > 1 and options.query_lengths is not None:
        parts[1:] = 0  # and over rows that do not ask, but for the first part
    if 0 in lead:
        parts[...] = dk[...] = dv[...] = 0
    dmask = np.zeros(mask.shape, exact) if grad_mask else None
    arrays = (grad, q, k, v, out, lse, mask, parts, dk, dv)
    codes = tuple(0 if x is None else storage(x.dtype) for x in arrays)
    if 0 not in lead:
        kernels(q.dtype).attend_backward(*arrays, dmask, codes, options, chunk)
    with np.errstate(all="ignore"):  # infinities and NaN are the caller's
        dq = parts[0] if chunks == 1 else parts.sum(axis=0)
        dk = dk.sum(axis=0, keepdims=True) if shared[0] else dk
        dv = dv.sum(axis=0, keepdims=True) if shared[1] else dv
        dq, dk, dv = (x.swapaxes(-3, -2) if swapped else x for x in (dq, dk, dv))
        dq, dk, dv = (np.ascontiguousarray(x, q.dtype) for x in (dq, dk, dv))
        return dq, dk, dv, dmask.astype(mask.dtype, copy=False) if grad_mask else None


def sink_gradient(problem, grad, out, lse):
    """dsinks (H,): the sink's weight, exp(sink - log of the whole denominator), times -grad . out."""
    exact = problem.lse_dtype
    sinks = np.broadcast_to(problem.options.sinks.astype(exact)[:, None], lse.shape)
    weight = shares(np.stack([sinks, lse], axis=-1))[0][..., 0]
    with np.errstate(under="ignore", invalid="ignore", over="ignore"):
        delta = np.einsum("...e,...e->...", grad.astype(exact), out.astype(exact))
        terms = np.where(np.isneginf(lse), 0, weight * delta)
        all_but_heads = (*range(terms.ndim - 2), terms.ndim - 1)
        return -terms.sum(all_but_heads, np.float64).astype(exact)


def shares(logs):
    """The softmax over the last axis of logs (..., n), and its LSE (...): each row a query with n keys,
    whose scores are 0 and whose mask is the row, on an identity of values."""
    *lead, n = logs.shape
    rows = logs.reshape(-1, n)
    query, key = np.zeros((1, len(rows), 1), logs.dtype), np.zeros((1, n, 1), logs.dtype)
    value = np.eye(n, dtype=logs.dtype)[None]
    out, lse = attend(Problem(query, key, value, rows, (1,), Options(1.0)), want_lse=True)
    return out.reshape(logs.shape), lse.reshape(lead)


def _arrays(shape, dtype, swapped):
    """(..., H, L, D) that lies in memory as (..., L, H, D) if `swapped`."""
    if not swapped:
        return np.empty(shape, dtype)
    *rest, H, L, D = shape
    return np.empty((*rest, L, H, D), dtype).swapaxes(-3, -2)


def project(x, W, b, head_size=None):
    """x (B, L, n) @ W (n, m) + b, all of one dtype: (B, L, m), or with a `head_size`, and heads apart
    in memory, (B, m // head_size, L, head_size)."""
    (B, L, _), m, code = x.shape, W.shape[1], storage(W.dtype)
    exact = computed_in(x.dtype)
    if x.dtype != exact or x.strides[2] != x.itemsize:
        x = np.ascontiguousarray(x, exact)
    if head_size is None:
        out = np.empty((B, L, m), W.dtype)
        place = out.reshape(B, L, 1, m)
    else:
        out = np.empty((B, m // head_size, L, head_size), W.dtype)
        place = out.swapaxes(1, 2)
    kernels(exact).project(x, W, b, place, code, code)
    return out


def rotate(x, cos, sin, interleaved):
    """x (..., L, D), its pairs turned by angles (B or 1, L, pairs) in the arithmetic type, B the first of
    three axes or more."""
    out = np.empty(x.shape, x.dtype)
    if x.size:
        whole = (len(x) if x.ndim > 2 else 1, -1, *x.shape[-2:])
        kernels(x.dtype).rotate(
            x.reshape(whole), cos, sin, out.reshape(whole), storage(x.dtype), interleaved
        )
    return out


def weigh(problem, heads, rows):
    """The probabilities (B, heads, rows, S), for lists of heads and rows (None: all)."""
    (B, H), L, S = problem.lead, problem.q.shape[2], problem.k.shape[2]
    shape = (B, H if heads is None else len(heads), L if rows is None else len(rows), S)
    weights = np.zeros(shape, problem.lse_dtype)
    if not weights.size:
        return weights
    for i, part in [(slice(None), problem)] if heads is None else _by_head(problem, heads):
        for place, n, run in [(0, L, part)] if rows is None else _by_run(part, rows):
            _weigh_all(run, weights[:, i, place : place + n])
    return weights


def _weigh_all(problem, weights):
    q, k, v, mask, lead, options = problem
    out = np.empty((*lead, q.shape[2], 0), q.dtype)
    code = storage(q.dtype)
    codes = (
        code,
        code,
        code,
        code,
        0,
        0 if mask is None else storage(mask.dtype),
        storage(weights.dtype),
    )
    kernels(q.dtype).attend(q, k, v, out, None, mask, weights, codes, options)


def _by_head(problem, heads):
    """(place, part) for each of the heads: views, no copies."""
    q, k, v, mask, (B, H), options = problem
    for place, h in enumerate(heads):
        g = h // (H // k.shape[1])
        per_head = mask is not None and mask.ndim > 2 and mask.shape[-3] > 1
        yield (
            slice(place, place + 1),
            problem._replace(
                q=q[:, h : h + 1],
                k=k[:, g : g + 1],
                v=v[:, g : g + 1],
                mask=mask[..., h : h + 1, :, :] if per_head else mask,
                lead=(B, 1),
                options=options._replace(
                    slopes=None if options.slopes is None else options.slopes[h : h + 1],
                    sinks=None if options.sinks is None else options.sinks[h : h + 1],
                ),
            ),
        )


def _by_run(problem, rows):
    """(place, length, part) for each run of consecutive rows."""
    q, mask, options = problem.q, problem.mask, problem.options
    place = 0
    while place < len(rows):
        first, n = rows[place], 1
        while place + n < len(rows) and rows[place + n] == first + n:
            n += 1
        per_row = mask is not None and mask.ndim > 1 and mask.shape[-2] > 1
        lengths, shifts = options.query_lengths, options.shifts
        yield (
            place,
            n,
            problem._replace(
                q=q[:, :, first : first + n],
                mask=mask[..., first : first + n, :] if per_row else mask,
                options=options._replace(
                    shift=options.shift + first,
                    shifts=None if shifts is None else shifts + first,
                    query_lengths=None if lengths is None else np.clip(lengths - first, 0, n),
                ),
            ),
        )
        place += n
