"""The short forms of textbooks: attention in one line, its softmax, and the layer in five steps."""

import numpy as np

from . import _checks, _problem
from ._dispatch import kernels
from ._dtypes import real_array, storage
from ._execute import attend, project
from .functional import scaled_dot_product_attention


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
    axis = _checks.check_axis(axis, x.ndim)
    out = np.empty(x.shape, x.dtype)
    rows_last = [np.moveaxis(array, axis, -1) for array in (x, out)]
    if x.ndim == 1:
        rows_last = [array[None] for array in rows_last]
    kernels(x.dtype).softmax(*rows_last, storage(x.dtype))
    return out
