"""The functions: attention in PyTorch's words, and with every option."""

import numpy as np

from . import _checks, _problem
from ._dtypes import computed_in
from ._execute import attend, attend_backward, shares, sink_gradient, weigh


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
        Query i stands at position p = i ("top-left", which True means), or at p = i + S - L
        ("bottom-right", the convention of caches), and sees the keys j <= p.
    window : (int, int), optional
        (left, right): the query at position p sees keys p - left to p + right, ends included; -1 is
        unbounded. The cost is proportional to the window.
    scale : float, optional
        Default 1/sqrt(D).
    softcap : float, optional
        Scores stay between -softcap and softcap; None or 0: none.
    alibi_slopes : (H,) array, optional
        Scores fall by the slope with each step from p to the key, on either side.
    sinks : (H,) array, optional
        One more logit a head in the denominator, without a value.
    key_lengths, query_lengths : (B,) arrays of int, optional
        Keys past a member's length are hidden. Queries past it neither ask nor answer: zeros, and
        an LSE of -inf. Bottom-right alignment is then per member, at
        p = i + key_length - query_length, so that padded equals packed.
    dropout_p : float
        Probability with which a weight is dropped.
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
        Only with `return_lse`: the logarithm of the sum of the scores' exponentials, without the
        sinks, -inf in rows that see no key; float64 for float64, else float32.

    Raises
    ------
    TypeError, ValueError
        As `scaled_dot_product_attention`; the message names the argument.

    See Also
    --------
    fastmha.reference.attention : all options at once, in plain NumPy.

    Examples
    --------
    Every option in NumPy. Here are two heads, three queries and five keys:

    >>> import numpy as np
    >>> from fastmha import attention, reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.normal(size=(1, 2, n, 4)) for n in (3, 5, 5))
    >>> scores = q @ k.swapaxes(2, 3) / np.sqrt(4)  # (B, H, L, S)
    >>> i, j = np.arange(3)[:, None], np.arange(5)
    >>> def weights(scores, seen=True, sink=0):
    ...     e = np.where(seen, np.exp(scores), 0)
    ...     total = e.sum(-1, keepdims=True) + sink
    ...     return e / np.where(total > 0, total, 1)  # rows that see nothing: 0
    >>> def same(weights, **options):
    ...     return np.allclose(weights @ v, attention(q, k, v, **options))
    >>> def draw(seen):  # a row for each query
    ...     for row in seen:
    ...         print(*np.where(row, "1", "."))

    `causal`, at the top left: ``j <= i``.

    >>> draw(j <= i)
    1 . . . .
    1 1 . . .
    1 1 1 . .
    >>> same(weights(scores, j <= i), causal=True)
    True

    `causal`, at the bottom right: ``j <= i + S - L``.

    >>> draw(j <= i + 2)
    1 1 1 . .
    1 1 1 1 .
    1 1 1 1 1
    >>> same(weights(scores, j <= i + 2), causal="bottom-right")
    True

    `window`: ``p - left <= j <= p + right``.

    >>> seen = (i - 1 <= j) & (j <= i + 2)
    >>> draw(seen)
    1 1 1 . .
    1 1 1 1 .
    . 1 1 1 1
    >>> same(weights(scores, seen), window=(1, 2))
    True
    >>> same(weights(scores, (i + 1 <= j) & (j <= i + 2)), window=(1, 0), causal="bottom-right")
    True

    `mask` of bool: as it says.

    >>> mask = (i + j) % 3 > 0
    >>> draw(mask)
    . 1 1 . 1
    1 1 . 1 1
    1 . 1 1 .
    >>> same(weights(scores, mask), mask=mask)
    True

    `mask` of floats: ``score + mask``.

    >>> mask = np.where(j < 4, i - 0.5 * j, -np.inf)
    >>> draw(mask > -np.inf)
    1 1 1 1 .
    1 1 1 1 .
    1 1 1 1 .
    >>> same(weights(scores + mask), mask=mask)
    True

    `key_lengths`, `query_lengths`: ``j < key_length`` and ``i < query_length``; with bottom-right
    also ``j <= i + key_length - query_length``.

    >>> seen = (j < 4) & (i < 2) & (j <= i + 4 - 2)
    >>> draw(seen)
    1 1 1 . .
    1 1 1 1 .
    . . . . .
    >>> same(weights(scores, seen), key_lengths=[4], query_lengths=[2], causal="bottom-right")
    True

    `scale`: ``scale * query key^T``.

    >>> same(weights(0.3 * q @ k.swapaxes(2, 3)), scale=0.3)
    True

    `softcap`: ``softcap * tanh(score / softcap)``.

    >>> same(weights(2 * np.tanh(scores / 2)), softcap=2.0)
    True

    `alibi_slopes`: ``score - slope * abs(p - j)``.

    >>> abs(i - j)
    array([[0, 1, 2, 3, 4],
           [1, 0, 1, 2, 3],
           [2, 1, 0, 1, 2]])
    >>> slopes = np.array([0.5, 0.25])
    >>> same(weights(scores - slopes[:, None, None] * abs(i - j)), alibi_slopes=slopes)
    True

    `sinks`: ``exp(score) / (sum_j exp(score_j) + exp(sink))``.

    >>> sinks = np.array([0.5, -1.0])
    >>> same(weights(scores, sink=np.exp(sinks)[:, None, None]), sinks=sinks)
    True

    `dropout_p`, `rng`: ``weight * kept / (1 - dropout_p)``.

    >>> kept = reference.dropout_mask(7, 0.4, [0], 2, [0, 1, 2], 5)  # seed, p, members, H, p_i, S
    >>> draw(kept[0, 1])
    1 . . . 1
    . 1 . 1 .
    1 . . 1 1
    >>> same(weights(scores) * kept / (1 - 0.4), dropout_p=0.4, rng=7)
    True

    `layout`: ``(B, L, H, D)``, the same numbers in another order.

    >>> swapped = attention(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="BLHD")
    >>> np.array_equal(swapped.swapaxes(1, 2), attention(q, k, v))
    True

    `return_lse`, `out`: ``log(sum_j exp(score_j))``, and the output where it is wanted.

    >>> mine = np.empty((1, 2, 3, 4))
    >>> out, lse = attention(q, k, v, return_lse=True, out=mine)
    >>> np.allclose(lse, np.log(np.exp(scores).sum(-1))) and out is mine
    True

    Fewer heads of keys and values: each serves H // G query heads.

    >>> grouped, whole = (attention(q, x, x) for x in (k[:, :1], k[:, [0, 0]]))
    >>> np.array_equal(grouped, whole)
    True
    """
    problem = _problem.full_problem(
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
    )
    swapped = layout == "BLHD"
    if return_lse is not False:
        _checks.check_flag(return_lse, "return_lse")
    if out is not None:
        out = _checks.check_out(out, problem, swapped, (query, key, value, mask))
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

    With p the weights, p_sink the sink's share of the denominator, r = kept / (1 - dropout_p), or 1
    without dropout, and ``delta = sum_e grad_out * out`` of each row::

        dp = r * (grad_out value^T)      dv = (r * p)^T grad_out
        dmask = p * (dp - delta)         dsinks = -sum_i p_sink * delta
        ds = dmask                       or dmask * (1 - tanh(score / softcap)^2)
        dq = scale * ds key              dk = scale * ds^T query

    Gradients of what serves several are sums: of shared heads, of a batch of 1, of a mask that
    broadcasts. The bits depend neither on the number of threads nor on the layout.

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
        Of the shapes and the dtype of query, key and value.
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
    return weigh(problem, _checks.chosen(heads, "heads", H), _checks.chosen(rows, "rows", L))


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
    weights, lse = shares(np.stack([lse.astype(exact) for lse in lses], axis=-1))
    with np.errstate(under="ignore", invalid="ignore"):
        # A part that weighs nothing is left out: what it holds may not be finite.
        out = sum(
            np.where(weights[..., i, None] != 0, part.astype(exact) * weights[..., i, None], 0)
            for i, part in enumerate(outs)
        )
    return out.astype(dtype), lse
