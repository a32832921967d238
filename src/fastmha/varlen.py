"""Attention over packed batches: sequences of different lengths, one after the other, without padding."""

from . import _checks, _problem
from ._execute import attend, attend_backward, sink_gradient


def attention_varlen(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    rng=None,
    return_lse=False,
    out=None,
):
    """`attention` over sequences that are packed one after the other.

    Each sequence's result has the bits of a call of its own.

    Parameters
    ----------
    query : (T, H, D) array
    key : (T', G, D) array
    value : (T', G, E) array
    cu_seqlens_q : (B + 1,) array of int32 or int64
        Sequence b has the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1``. Offsets rise, from
        0; members may be empty. For lengths 2 and 3: ``[0, 2, 5]``.
    cu_seqlens_k : (B + 1,) array, optional
        The same for key and value; None: as `cu_seqlens_q`.
    causal, window, scale, softcap, alibi_slopes, sinks, dropout_p, rng
        As in `attention`; sequence b is batch member b of the pattern of dropout.
    return_lse : bool
        Whether to return the log-sum-exp too.
    out : (T, H, E) array, optional
        Where to put the output.

    Returns
    -------
    out : (T, H, E) array
        Of the query's dtype; rows past the last offset are 0.
    lse : (H, T) array
        Only with `return_lse`; -inf past the last offset.

    Raises
    ------
    TypeError, ValueError
        As `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> q = k = np.zeros((5, 1, 2))
    >>> v = np.arange(5.0).reshape(5, 1, 1)
    >>> fastmha.attention_varlen(q, k, v, np.array([0, 2, 5])).ravel()
    array([0.5, 0.5, 3. , 3. , 3. ])

    Here two queries have three keys, and three have four. Query and key of a row and a column
    belong to the same sequence, and each option counts from its start:

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.normal(size=(n, 1, 4)) for n in (5, 7, 7))
    >>> cu_q, cu_k = np.array([0, 2, 5]), np.array([0, 3, 7])
    >>> of_q, of_k = (np.repeat([0, 1], np.diff(cu)) for cu in (cu_q, cu_k))  # of which sequence
    >>> i, j = np.arange(5) - cu_q[of_q], np.arange(7) - cu_k[of_k]
    >>> p = i + (np.diff(cu_k) - np.diff(cu_q))[of_q]  # bottom-right
    >>> seen = (of_q[:, None] == of_k) & (j <= p[:, None])
    >>> for row in seen:
    ...     print(*np.where(row, "1", "."))
    1 1 . . . . .
    1 1 1 . . . .
    . . . 1 1 . .
    . . . 1 1 1 .
    . . . 1 1 1 1
    >>> e = np.where(seen, np.exp(q[:, 0] @ k[:, 0].T / np.sqrt(4)), 0)
    >>> out = fastmha.attention_varlen(q, k, v, cu_q, cu_k, causal="bottom-right")
    >>> np.allclose(e / e.sum(-1, keepdims=True) @ v[:, 0], out[:, 0])
    True
    """
    problem = _problem.packed_problem(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        rng=rng,
    )
    _checks.check_flag(return_lse, "return_lse")
    if out is not None:
        out = _checks.check_out(out, problem, True, (query, key, value))
    result, lse = attend(problem, out=out, swapped=True, want_lse=return_lse)
    return (result, lse) if return_lse else result


def attention_varlen_backward(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k=None,
    *,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    rng=None,
    grad_sinks=False,
):
    """The gradients of `attention_varlen`; see `attention_backward`.

    Parameters
    ----------
    grad_out : (T, H, E) array
        The gradient of the output, of the query's dtype.
    query, key, value, cu_seqlens_q, cu_seqlens_k, and all options
        Those of the forward call; with dropout, `rng` is its int seed.
    out, lse : (T, H, E) and (H, T) arrays
        What it returned.
    grad_sinks : bool
        Whether to return the gradient of the sinks too.

    Returns
    -------
    dq, dk, dv : arrays
        Of the shapes and the dtype of query, key and value; rows past the last offsets are 0.
    dsinks : (H,) array
        Only with `grad_sinks`.

    Raises
    ------
    TypeError, ValueError
        As `attention_backward`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> q = k = np.zeros((5, 1, 2))
    >>> v = np.arange(5.0).reshape(5, 1, 1)
    >>> offsets = np.array([0, 2, 5])
    >>> out, lse = fastmha.attention_varlen(q, k, v, offsets, return_lse=True)
    >>> gradients = fastmha.attention_varlen_backward(np.ones_like(out), q, k, v, out, lse, offsets)
    >>> gradients[2].ravel()
    array([1., 1., 1., 1., 1.])
    """
    problem = _problem.packed_problem(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        rng=rng,
    )
    grad_out, out, lse = _problem.check_gradient(
        problem, True, grad_out, out, lse, False, grad_sinks, rng
    )
    gradients = attend_backward(problem, grad_out, out, lse, swapped=True)[:3]
    return (*gradients, sink_gradient(problem, grad_out, out, lse)) if grad_sinks else gradients
