"""Weight dictionaries of other libraries, read into the four projections of the class.

PyTorch's linear layers hold their weights as (out, in) and compute ``x @ W.T + b``; GPT-2's hold
(in, out), like the class here. Fused projections hold the queries' part first, then the keys', then
the values'. A square matrix fits both ways round, so each format has its function: nothing is
guessed from shapes, and whatever is missing, of another shape or left over is an error that names
the key.
"""

from typing import NamedTuple

import numpy as np

from ._dtypes import FLOATS, as_array, storage

__all__ = ["from_bert", "from_gpt2", "from_llama", "from_nanogpt", "from_torch", "to_torch"]


class Weights(NamedTuple):
    """What a dictionary held: for ``x @ W + b``, of one dtype, in memory of their own."""

    Wq: np.ndarray  # (d_model, d_model)
    bq: np.ndarray | None  # None: all four are
    Wk: np.ndarray  # (d_model, n_kv_heads * d_k)
    bk: np.ndarray | None
    Wv: np.ndarray
    bv: np.ndarray | None
    Wo: np.ndarray
    bo: np.ndarray | None


def from_torch(state, *, prefix="", dtype=None, strict=True):
    """Weights of ``torch.nn.MultiheadAttention``.

    Parameters
    ----------
    state : mapping of names to arrays or tensors
        ``in_proj_weight`` (3*d_model, d_model), or ``q_proj_weight``, ``k_proj_weight`` and
        ``v_proj_weight``; ``in_proj_bias``; ``out_proj.weight`` and ``out_proj.bias``.
    prefix : str
        What stands before these names, the last dot included.
    dtype : dtype or None
        None keeps the stored one (the promoted one of several; float64 for integers).
    strict : bool
        False passes over names left over under the prefix.

    Returns
    -------
    Weights

    Raises
    ------
    TypeError
        If `state` is no mapping, or a weight holds no real numbers.
    ValueError
        If a weight is missing or of a wrong shape, or a name is left over.

    Examples
    --------
    >>> import numpy as np
    >>> from fastmha.weights import from_torch
    >>> state = {"in_proj_weight": np.array([[1.0], [3.0], [2.0]]), "out_proj.weight": np.eye(1)}
    >>> found = from_torch(state)
    >>> found.Wq, found.Wk, found.Wv, found.bq
    (array([[1.]]), array([[3.]]), array([[2.]]), None)
    """
    read = _Reader(state, prefix)
    d = read.width("out_proj.weight")
    if "in_proj_weight" in read or "q_proj_weight" not in read:
        W = np.split(read.weight("in_proj_weight", (3 * d, d)), 3)
    else:
        W = [read.weight(f"{name}_proj_weight", (d, d)) for name in "qkv"]
    b = read.bias("in_proj_bias", 3 * d)
    b = [None] * 3 if b is None else np.split(b, 3)
    W.append(read.weight("out_proj.weight", (d, d)))
    b.append(read.bias("out_proj.bias", d))
    return read.finish([w.T for w in W], b, dtype, strict)


def from_nanogpt(state, *, prefix="", dtype=None, strict=True):
    """Weights of the attention of nanoGPT.

    ``c_attn.weight`` (3*d_model, d_model), ``c_attn.bias``, ``c_proj.weight``, ``c_proj.bias``.
    Parameters, result and errors as for `from_torch`.
    """
    return _read_fused(state, prefix, dtype, strict, transposed=True)


def from_gpt2(state, *, prefix="", dtype=None, strict=True):
    """Weights of the attention of GPT-2.

    The names of `from_nanogpt`, the weights stored (in, out), ``c_attn.weight``
    (d_model, 3*d_model) among them. Parameters, result and errors as for `from_torch`.
    """
    return _read_fused(state, prefix, dtype, strict, transposed=False)


def _read_fused(state, prefix, dtype, strict, transposed):
    read = _Reader(state, prefix)
    d = read.width("c_proj.weight")
    qkv = read.weight("c_attn.weight", (3 * d, d) if transposed else (d, 3 * d))
    W = [*np.split(qkv, 3, axis=0 if transposed else 1), read.weight("c_proj.weight", (d, d))]
    b = read.bias("c_attn.bias", 3 * d)
    b = [None] * 3 if b is None else np.split(b, 3)
    b.append(read.bias("c_proj.bias", d))
    return read.finish([w.T for w in W] if transposed else W, b, dtype, strict)


def from_bert(state, *, prefix="", dtype=None, strict=True):
    """Weights of the attention of BERT.

    ``self.query.weight``, ``self.key.weight``, ``self.value.weight``, ``output.dense.weight``, and
    biases. Parameters, result and errors as for `from_torch`.
    """
    names = ("self.query", "self.key", "self.value", "output.dense")
    return _read_four(state, names, prefix, dtype, strict)


def from_llama(state, n_heads, n_kv_heads, *, prefix="", dtype=None, strict=True):
    """Weights of the attention of Llama and its like.

    ``q_proj.weight``, ``k_proj.weight`` and ``v_proj.weight`` (n_kv_heads*d_k, d_model) with d_k
    d_model // n_heads, ``o_proj.weight``, and biases where there are any. Other parameters, result
    and errors as for `from_torch`.
    """
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return _read_four(state, names, prefix, dtype, strict, (n_heads, n_kv_heads))


def _read_four(state, names, prefix, dtype, strict, heads=(1, 1)):
    read = _Reader(state, prefix)
    d = read.width(f"{names[-1]}.weight")
    if heads[0] < 1 or d % heads[0]:
        raise ValueError(f"n_heads: expected a divisor of d_model={d}, got {heads[0]}")
    kv = d // heads[0] * heads[1]
    widths = (d, kv, kv, d)
    W = [read.weight(f"{n}.weight", (width, d)).T for n, width in zip(names, widths, strict=True)]
    b = [read.bias(f"{n}.bias", width) for n, width in zip(names, widths, strict=True)]
    return read.finish(W, b, dtype, strict)


def to_torch(weights):
    """`Weights` as ``torch.nn.MultiheadAttention`` stores them: the inverse of `from_torch`.

    Parameters
    ----------
    weights : Weights
        Of n_kv_heads == n_heads.

    Returns
    -------
    dict of str to array
        Copies; where all biases are None, none.
    """
    parts = ("Wq", "Wk", "Wv")
    state = {"in_proj_weight": np.concatenate([getattr(weights, name).T for name in parts])}
    b = [weights.bq, weights.bk, weights.bv, weights.bo]
    if any(x is not None for x in b):
        d = len(weights.Wq)
        b = [np.zeros(d, weights.Wq.dtype) if x is None else x for x in b]
        state["in_proj_bias"] = np.concatenate(b[:3])
        state["out_proj.bias"] = b[3].copy()
    state["out_proj.weight"] = weights.Wo.T.copy()
    return state


class _Reader:
    """Takes the entries of a dictionary one by one, and knows what is left."""

    def __init__(self, state, prefix):
        if not (hasattr(state, "keys") and hasattr(state, "__getitem__")):
            raise TypeError(f"state: expected a dict of weights, got {type(state).__name__}")
        if not isinstance(prefix, str):
            raise TypeError(f"prefix: expected a str, got {type(prefix).__name__}")
        self.state, self.prefix = state, prefix
        keys = (key for key in state.keys() if isinstance(key, str) and key.startswith(prefix))
        self.names = {key.removeprefix(prefix) for key in keys}
        self.taken = {}

    def __contains__(self, name):
        return name in self.names

    def width(self, name):
        """d_model: the length of the square output projection."""
        x = self._take(name)
        if x.ndim != 2 or x.shape[0] != x.shape[1]:
            raise ValueError(
                f"{self.prefix}{name}: expected shape (d_model, d_model), got {x.shape}"
            )
        return len(x)

    def weight(self, name, shape):
        x = self._take(name)
        if x.shape != shape:
            raise ValueError(f"{self.prefix}{name}: expected shape {shape}, got {x.shape}")
        return x

    def bias(self, name, width):
        return self.weight(name, (width,)) if name in self.names else None

    def finish(self, W, b, dtype, strict):
        """The `Weights`, once nothing is left over."""
        left = sorted(name for name in self.names - self.taken.keys() if not _known_beside(name))
        if strict and left:
            raise ValueError(
                f"{self.prefix}{left[0]}: expected no such name (strict=False passes over it), got "
                f"{len(left)} left over"
            )
        dtype = _common_dtype(self.taken.values()) if dtype is None else float_dtype(dtype)
        if any(x is not None for x in b):
            b = [np.zeros(w.shape[1], dtype) if x is None else x for w, x in zip(W, b, strict=True)]
        pairs = (x for pair in zip(W, b, strict=True) for x in pair)
        with np.errstate(all="ignore"):  # what a narrower dtype cannot hold is infinite there
            return Weights(*(None if x is None else np.array(x, dtype, order="C") for x in pairs))

    def _take(self, name):
        if name not in self.names:
            near = ", ".join(sorted(self.names)[:6]) or "none"
            raise ValueError(f"{self.prefix}{name}: expected this weight, got these names: {near}")
        if name not in self.taken:
            self.taken[name] = _stored_array(self.state[self.prefix + name], self.prefix + name)
        return self.taken[name]


def _known_beside(name):
    """What real checkpoints carry beside the projections: mask buffers, a layer norm, a table."""
    return name in ("bias", "masked_bias", "rotary_emb.inv_freq") or name.startswith(
        "output.LayerNorm."
    )


def _stored_array(x, name):
    """An array, from what knows how to become one; PyTorch is known by its manners alone."""
    if hasattr(x, "detach"):  # a tensor that wants a gradient refuses to become an array
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":  # which NumPy lacks; float32 holds all its values
            return np.asarray(x.float()).astype(float_dtype("bfloat16"))
    return real_array(x, name)


def real_array(x, name):
    """`x` as an array of real numbers of any kind: integers or floats, no bools."""
    x = as_array(x, name)
    if x.dtype.kind not in "iuf" and not (x.dtype.kind == "V" and storage(x.dtype)):
        raise TypeError(f"{name}: expected real numbers, got {x.dtype}")
    return x


def _common_dtype(arrays):
    dtypes = {x.dtype for x in arrays}
    try:
        dtype = np.result_type(*dtypes)
    except TypeError:  # float16 and bfloat16 have none
        dtype = np.dtype(np.float32)
    return dtype.newbyteorder("=") if storage(dtype) else np.dtype(np.float64)


def float_dtype(dtype):
    """One of the four dtypes as an object of NumPy's, native; "bfloat16" needs ml_dtypes."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        try:
            from ml_dtypes import bfloat16 as dtype
        except ImportError:
            raise ImportError(
                "dtype: bfloat16 is a type of the package ml_dtypes, which is not installed"
            ) from None
    dtype = np.dtype(dtype).newbyteorder("=")
    if not storage(dtype):
        raise TypeError(f"dtype: expected {FLOATS}, got {dtype}")
    return dtype
