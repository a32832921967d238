"""The functions: attention in PyTorch's words, with every option, and the short forms of textbooks."""

import numpy as np

from . import _problem
from ._dispatch import kernels
from ._dtypes import computed_in, real_array, storage
from ._execute import attend, attend_backward, project, sink_gradient, weigh


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    rng=None,
):
    """Attention with PyTorch's signature and meaning: ``softmax(query key^T scale + mask) value``.

    No L x S array is made, whatever the arguments.

    Parameters
    ----------
    query : (..., H, L, D) array of float64, float32, float16 or bfloat16
        Of any strides, like all inputs.
    key : (..., H, S, D) array
    value : (..., H, S, E) array
        Of the query's dtype. The leading axes of the three broadcast against one another.
    attn_mask : array that broadcasts to (..., H, L, S), optional
        Of bool: True = may attend. Of floats: added to the scores, always; -inf hides.
    dropout_p : float
        Probability with which a weight is dropped, whenever it is not 0.
    is_causal : bool
        Query i sees the keys j <= i (aligned at the top left). Not together with `attn_mask`.
    scale : float, optional
        Default 1/sqrt(D).
    enable_gqa : bool
        Whether key and value may have fewer heads G, a divisor of H: query head h then uses
        key/value head ``h // (H // G)``.
    rng : int or numpy.random.Generator, optional
        Seed of the dropout; None draws a fresh one.

    Returns
    -------
    (..., H, L, E) array
        Fresh, C-contiguous, of the query's dtype. Rows that see no key are exactly 0.

    Raises
    ------
    TypeError
        For arrays of another or of different dtypes.
    ValueError
        For shapes that do not fit, and for values out of range.

    References
    ----------
    Vaswani et al., "Attention is all you need", 2017, equation 1. The arguments are those of
    ``torch.nn.functional.scaled_dot_product_attention``.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> v = np.arange(5.0)[:, None]
    >>> fastmha.scaled_dot_product_attention(np.zeros((2, 1)), np.zeros((5, 1)), v, is_causal=True)
    array([[0. ],
           [0.5]])
    """
    problem = _problem.torch_problem(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, rng
    )
    return attend(problem)[0]


def sdpa(Q, K, V, mask=None):
    """Attention in short: ``softmax(Q K^T / sqrt(d_k)) V``.

    Parameters
    ----------
    Q, K, V : (..., n, d_k), (..., m, d_k) and (..., m, d_v) arrays
        Of one dtype: float64, float32, float16 or bfloat16.
    mask : array that broadcasts to (..., n, m), optional
        Of bool: True = may attend. Of floats: added to the scores.

    Returns
    -------
    (..., n, d_v) array
        Of the dtype of `Q`.

    Raises
    ------
    TypeError, ValueError
        As `scaled_dot_product_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> fastmha.sdpa(np.zeros((1, 2)), np.zeros((3, 2)), np.array([[0.0], [1.0], [5.0]]))
    array([[2.]])
    """
    return scaled_dot_product_attention(Q, K, V, mask)


def attention(
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
    return_lse=False,
    out=None,
):
    """Attention with every option there is, in memory linear in the length.

    The scores are ``query key^T scale``; then ``softcap * tanh(score / softcap)``; then ALiBi and the
    float mask are added; then what may not be seen is hidden; then comes the softmax, with sinks in
    its denominator; then dropout; then the weighted sum of the values.

    Parameters
    ----------
    query : (B, H, L, D) array of float64, float32, float16 or bfloat16
    key : (B or 1, G, S, D) array
    value : (B or 1, G, S, E) array
        H is a multiple of G; query head h uses key/value head ``h // (H // G)``.
    mask : array that broadcasts to (B, H, L, S), optional
        Of bool: True = may attend. Of floats: added to the scores, always; -inf hides.
    causal : bool or {"top-left", "bottom-right"}
        Query i stands at position p = i ("top-left", which True means), or at i + S - L
        ("bottom-right", the convention of caches), and sees the keys j <= p. For L = 2, S = 5::

            top-left  1 . . . .      bottom-right  1 1 1 1 .
                      1 1 . . .                    1 1 1 1 1

    window : (int, int), optional
        (left, right): the query at position p sees keys p - left to p + right, ends included; -1 is
        unbounded. The cost is proportional to the window.
    scale : float, optional
        Default 1/sqrt(D).
    softcap : float, optional
        None or 0: none.
    alibi_slopes : (H,) array, optional
        Adds ``-slope * abs(p - j)``.
    sinks : (H,) array, optional
        One more logit a head in the denominator, without a value.
    key_lengths, query_lengths : (B,) arrays of int, optional
        Keys past a member's length are hidden. Queries past it neither ask nor answer: zeros, and
        an LSE of -inf. Bottom-right alignment is then per member, at
        p = i + key_length - query_length, so that padded equals packed.
    dropout_p : float
        Probability with which a weight is dropped; the others are divided by 1 - dropout_p.
    rng : int or numpy.random.Generator, optional
        Seed of the dropout; None draws a fresh one. The pattern is a pure function of the seed, the
        batch member, the head, and the positions of query and key.
    layout : {"BHLD", "BLHD"}
        With "BLHD", query, key, value and the output are (B, L, H, D), (B, S, G, D) and so on. No
        copies are made for it.
    return_lse : bool
        Whether to return the log-sum-exp too.
    out : array, optional
        Where to put the output: of its shape and dtype, and sharing no memory with an input.

    Returns
    -------
    out : (B, H, L, E) or (B, L, H, E) array
        Of the query's dtype. Rows that see no key are exactly 0.
    lse : (B, H, L) array
        Only with `return_lse`: ``log(sum_j exp(score_j))``, without the sinks, -inf in rows that see
        no key; float64 for float64, else float32.

    Raises
    ------
    TypeError, ValueError
        As `scaled_dot_product_attention`; the message names the argument.

    See Also
    --------
    fastmha.reference.attention : the same in a few lines of NumPy.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> q = k = np.zeros((1, 1, 4, 2))
    >>> v = np.arange(4.0).reshape(1, 1, 4, 1)
    >>> fastmha.attention(q, k, v, window=(1, 0)).ravel()
    array([0. , 0.5, 1.5, 2.5])
    """
    problem = _problem.full_problem(
        query,
        key,
        value,
        mask=mask,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_lengths=key_lengths,
        query_lengths=query_lengths,
        dropout_p=dropout_p,
        rng=rng,
        layout=layout,
    )
    swapped = layout == "BLHD"
    _problem.check_flag(return_lse, "return_lse")
    if out is not None:
        out = _problem.check_out(out, problem, swapped, (query, key, value, mask))
    result, lse = attend(problem, out=out, swapped=swapped, want_lse=return_lse)
    return (result, lse) if return_lse else result


def attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
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
    grad_mask=False,
    grad_sinks=False,
):
    """The gradients of `attention`, by recomputing its weights: memory stays linear in the length.

    With p the weights and ``delta = sum_e grad_out * out`` of each row::

        ds = p * (grad_out value^T - delta)
        dq = scale * ds key      dk = scale * ds^T query      dv = p^T grad_out

    The bits depend neither on the number of threads nor on the layout.

    Parameters
    ----------
    grad_out : (B, H, L, E) array
        The gradient of the output, of the query's dtype.
    query, key, value : arrays
        Those of the forward call; so are all options. With dropout, `rng` is its int seed.
    out : (B, H, L, E) array
        What it returned.
    lse : (B, H, L) array
        The log-sum-exp that it returned.
    grad_mask : bool
        Whether to return the gradient of the float mask too.
    grad_sinks : bool
        Whether to return the gradient of the sinks too.

    Returns
    -------
    dq, dk, dv : arrays
        Of the shapes and the dtype of query, key and value; those of grouped heads and of a batch
        that serves all members are sums.
    dmask : array
        Only with `grad_mask`: of the mask's own shape and dtype.
    dsinks : (H,) array
        Only with `grad_sinks`: float64 for float64, else float32.

    Raises
    ------
    TypeError, ValueError
        As `attention`; ValueError for `grad_mask` with a bool mask.

    References
    ----------
    Dao et al., "FlashAttention", 2022, appendix B.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> q = k = np.zeros((1, 1, 4, 2))
    >>> v = np.arange(4.0).reshape(1, 1, 4, 1)
    >>> out, lse = fastmha.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = fastmha.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> dv.ravel().round(4)
    array([2.0833, 1.0833, 0.5833, 0.25  ])
    """
    problem = _problem.full_problem(
        query,
        key,
        value,
        mask=mask,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_lengths=key_lengths,
        query_lengths=query_lengths,
        dropout_p=dropout_p,
        rng=rng,
        layout=layout,
    )
    swapped = layout == "BLHD"
    grad_out, out, lse = _problem.check_gradient(
        problem, swapped, grad_out, out, lse, grad_mask, grad_sinks, rng
    )
    dq, dk, dv, dmask = attend_backward(problem, grad_out, out, lse, swapped, grad_mask)
    results = [dq, dk, dv]
    if grad_mask:
        results.append(dmask)
    if grad_sinks:
        results.append(sink_gradient(problem, grad_out, out, lse))
    return tuple(results)


def attention_weights(
    query,
    key,
    *,
    heads=None,
    rows=None,
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
    """The probabilities that `attention` weighs the values with, for chosen heads and rows.

    They are those before dropout; `dropout_p` and `rng` are checked and otherwise passed over, so
    that the options of an `attention` call can be handed on as they are.

    Parameters
    ----------
    query, key : (B, H, L, D) and (B or 1, G, S, D) arrays
    heads, rows : int, slice or sequence of int, optional
        Which query heads and which queries; None: all. No array is made beyond what is asked for.
    mask, causal, window, scale, softcap, alibi_slopes, sinks, key_lengths, query_lengths, layout
        As in `attention`.

    Returns
    -------
    (B, heads, rows, S) array
        Of the query's dtype, float32 for half types. Rows sum to 1, less than 1 with sinks, and to
        0 where no key is seen.

    Raises
    ------
    TypeError, ValueError
        As `attention`; also for heads or rows that do not exist.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> q = k = np.zeros((1, 2, 3, 4))
    >>> fastmha.attention_weights(q, k, heads=0, causal=True)[0, 0].round(2)
    array([[1.  , 0.  , 0.  ],
           [0.5 , 0.5 , 0.  ],
           [0.33, 0.33, 0.33]])
    """
    problem = _problem.full_problem(
        query,
        key,
        _problem.NO_VALUE,
        mask=mask,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_lengths=key_lengths,
        query_lengths=query_lengths,
        dropout_p=dropout_p,
        rng=rng,
        layout=layout,
    )
    H, L = problem.lead[1], problem.q.shape[2]
    return weigh(problem, _problem.chosen(heads, "heads", H), _problem.chosen(rows, "rows", L))


def merge_attention(outs, lses):
    """Combine attention over disjoint sets of keys into attention over all of them.

    ``lse = log(sum_i exp(lse_i))`` and ``out = sum_i exp(lse_i - lse) out_i``. A part that saw no
    key, with an LSE of -inf, changes nothing.

    Parameters
    ----------
    outs : sequence of (..., L, E) arrays
        Outputs without sinks, of one dtype.
    lses : sequence of (..., L) arrays
        Their log-sum-exps.

    Returns
    -------
    out : (..., L, E) array
        Of the dtype of the parts.
    lse : (..., L) array
        float64 for float64, else float32.

    Raises
    ------
    TypeError, ValueError
        For parts whose numbers, shapes or dtypes do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> out, lse = fastmha.merge_attention([np.array([[1.0]]), np.array([[4.0]])],
    ...                                    [np.array([0.0]), np.log([2.0])])
    >>> out, lse.round(6)
    (array([[3.]]), array([1.098612]))
    """
    outs, lses = _problem.check_parts(outs, lses)
    dtype = outs[0].dtype
    exact = computed_in(dtype)
    lses = [lse.astype(exact) for lse in lses]
    most = np.maximum.reduce(lses)
    base = np.where(np.isneginf(most), 0, most)
    with np.errstate(under="ignore", invalid="ignore", divide="ignore"):
        weights = [np.exp(lse - base) for lse in lses]
        total = sum(weights)
        seen = total != 0
        share = np.where(seen, total, 1)[..., None]
        # A part that weighs nothing is left out: what it holds may not be finite.
        out = sum(
            np.where(w[..., None] != 0, part.astype(exact) * (w[..., None] / share), 0)
            for w, part in zip(weights, outs, strict=True)
        )
        lse = np.where(seen, base + np.log(np.where(seen, total, 1)), -np.inf)
    return out.astype(dtype), lse.astype(exact)


def softmax(x, axis=-1):
    """The softmax, ``exp(x - max) / sum(exp(x - max))``, in one pass of fused kernels.

    Parameters
    ----------
    x : array
        Real numbers; integers count as float64.
    axis : int
        Along which the result sums up to 1.

    Returns
    -------
    array
        Of the shape and dtype of `x`. Where all of a row is -inf, zeros.

    Raises
    ------
    TypeError
        For arrays that are not of real numbers.
    ValueError
        For an axis that is not there.

    Examples
    --------
    >>> import fastmha
    >>> fastmha.softmax([0.0, 0.0, 0.0, 0.0])
    array([0.25, 0.25, 0.25, 0.25])
    """
    x = real_array(x, "x")
    if not storage(x.dtype):
        x = x.astype(np.float64)
    axis = _problem.check_axis(axis, x.ndim)
    out = np.empty(x.shape, x.dtype)
    rows_last = [np.moveaxis(array, axis, -1) for array in (x, out)]
    if x.ndim == 1:
        rows_last = [array[None] for array in rows_last]
    kernels(x.dtype).softmax(*rows_last, storage(x.dtype))
    return out


def multi_head_attention(X, W_Q, W_K, W_V, W_O, h, *, trace=None):
    """Multi-head self-attention in its five steps: project, split, attend, concatenate, output.

    Parameters
    ----------
    X : (L, d_model) or (B, L, d_model) array
    W_Q, W_K : (d_model, h * d_k) arrays
    W_V : (d_model, h * d_v) array
    W_O : (h * d_v, d_out) array
        Applied as ``X @ W``, without biases.
    h : int
        Number of heads.
    trace : callable, optional
        Called as ``trace(step, shape)`` after each of "project", "split", "attend" (once a head),
        "concat" and "output".

    Returns
    -------
    (L, d_out) or (B, L, d_out) array

    Raises
    ------
    TypeError, ValueError
        For arguments of the wrong kind or of sizes that do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> I = np.eye(4)
    >>> fastmha.multi_head_attention(np.zeros((3, 4)), I, I, I, I, h=2).shape
    (3, 4)
    """
    X, W_Q, W_K, W_V, W_O, h = _problem.five_steps(X, W_Q, W_K, W_V, W_O, h, trace)
    tell = trace or (lambda step, shape: None)
    batch = X[None] if X.ndim == 2 else X

    def times(x, W):
        return project(x, W, None).reshape(*X.shape[:-1], W.shape[1])

    q, k, v = times(batch, W_Q), times(batch, W_K), times(batch, W_V)
    tell("project", q.shape)
    q, k, v = (x.reshape(*x.shape[:-1], h, x.shape[-1] // h).swapaxes(-3, -2) for x in (q, k, v))
    tell("split", q.shape)
    # Heads side by side in memory, so that to concatenate them is to look at them differently.
    heads = np.empty((*X.shape[:-1], h, v.shape[-1]), X.dtype)
    attend(_problem.torch_problem(q, k, v), out=heads.swapaxes(-3, -2))
    for i in range(h):
        tell("attend", heads[..., i, :].shape)
    concatenated = heads.reshape(*X.shape[:-1], W_O.shape[0])
    tell("concat", concatenated.shape)
    out = times(concatenated.reshape(*batch.shape[:2], W_O.shape[0]), W_O)
    tell("output", out.shape)
    return out
