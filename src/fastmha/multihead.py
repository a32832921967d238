"""The class: multi-head attention with its four projections, a drop-in for the textbook one."""

import functools
import operator

import numpy as np

from . import _checks, _multihead_backward, _multihead_call, weights
from ._execute import project
from ._multihead_call import clear
from .functional import attention, attention_weights
from .rope import Rope

__all__ = ["MultiHeadAttention"]

_UNDRAWN = object()  # in place of a seed: the weights come from elsewhere


class MultiHeadAttention:
    """Multi-head attention: projections, attention in each head, projection of the joined heads.

    A drop-in for the class that textbooks write in NumPy: the same weights from the same seed, the
    same attributes and calls, without an L x S array unless `attn` is read.

    Parameters
    ----------
    d_model : int
        Size of a token.
    n_heads : int
        Number of query heads H, a divisor of `d_model`; head size d_k is ``d_model // n_heads``.
    seed : int or anything else that numpy.random.default_rng takes
        Weights are drawn from ``normal(0, 1/sqrt(d_model))`` in the order q, k, v, o.
    n_kv_heads : int, optional
        Number of key/value heads G, a divisor of `n_heads`, which is the default. Query head h uses
        key/value head ``h // (n_heads // n_kv_heads)``.
    bias : bool
        Whether the projections add a bias.
    dtype : dtype
        float64, float32, float16 or ml_dtypes.bfloat16 (also "bfloat16"): that of the weights and
        of the result. Inputs are converted to it.
    dropout : float
        Probability of dropping an attention weight, in training only.
    rope : Rope, optional
        Rotates queries and keys.
    window : (int, int), optional
        (left, right) as in `attention`.
    softcap : float, optional
        As in `attention`.
    alibi : bool
        Whether to add the biases of `alibi_slopes`.

    Attributes
    ----------
    Wq, Wo : (d_model, d_model) arrays
    Wk, Wv : (d_model, n_kv_heads * d_k) arrays
    bq, bk, bv, bo : arrays, or None without bias
        All are applied as ``x @ W + b``; assigning or editing one takes effect on the next call.
    d_model, n_heads, n_kv_heads, d_k : int
    dtype : numpy.dtype
    dropout, rope, window, softcap, alibi
        As given.
    attn : (B, n_heads, L, S) array
        The attention weights of the last call, before dropout.
    grads : list of arrays
        After `backward`: the gradients of `parameters()`, in that order.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind, or the sizes do not divide.

    Notes
    -----
    Several threads may call one object at a time, and each gets its own result; `attn`, `grads` and
    what `backward` needs are those of whichever call ended last. Copies and pickles do not carry
    `attn` and what `backward` needs.

    References
    ----------
    Vaswani et al., "Attention is all you need" (2017), section 3.2.2.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> layer = fastmha.MultiHeadAttention(d_model=8, n_heads=2)
    >>> x = np.random.default_rng(1).normal(size=(1, 3, 8))  # (B, L, d_model)
    >>> layer(x, causal=True).shape
    (1, 3, 8)
    >>> layer.attn[0, 0].sum(axis=-1)
    array([1., 1., 1.])
    """

    _last = None  # the _Call behind `attn`
    _saved = None  # what `backward` needs

    def __init__(
        self,
        d_model,
        n_heads,
        seed=0,
        *,
        n_kv_heads=None,
        bias=True,
        dtype=np.float64,
        dropout=0.0,
        rope=None,
        window=None,
        softcap=None,
        alibi=False,
    ):
        self.d_model, self.n_heads = _count(d_model, "d_model"), _count(n_heads, "n_heads")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model: expected a multiple of n_heads={n_heads}, got {d_model}")
        self.d_k = self.d_model // self.n_heads
        self.n_kv_heads = self.n_heads if n_kv_heads is None else _count(n_kv_heads, "n_kv_heads")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads: expected a divisor of n_heads={n_heads}, got {n_kv_heads}"
            )
        self.dtype = weights.float_dtype(dtype)
        if not 0 <= _checks.check_real(dropout, "dropout") <= 1:
            raise ValueError(f"dropout: expected a probability from 0 to 1, got {dropout}")
        if rope is not None and not isinstance(rope, Rope):
            raise TypeError(f"rope: expected a Rope or None, got {type(rope).__name__}")
        if rope is not None and rope.dim > self.d_k:
            raise ValueError(f"rope: expected at most d_k={self.d_k} dimensions, got {rope.dim}")
        _checks.check_window(window, False)
        _checks.check_softcap(softcap)
        self.dropout, self.rope, self.window = dropout, rope, window
        self.softcap, self.alibi = softcap, bool(alibi)
        if seed is not _UNDRAWN:
            self._draw(np.random.default_rng(seed), bias)

    def __setattr__(self, name, value):
        _multihead_call.check_spelling(self, name)
        object.__setattr__(self, name, value)

    def _draw(self, rng, bias):
        for name, shape in _multihead_call.parameter_shapes(self).items():
            if name.startswith("W"):
                drawn = rng.normal(0, 1 / np.sqrt(self.d_model), shape)
                setattr(self, name, drawn.astype(self.dtype, copy=False))
            else:
                setattr(self, name, np.zeros(shape, self.dtype) if bias else None)

    def parameters(self):
        """The arrays themselves: ``[Wq, bq, Wk, bk, Wv, bv, Wo, bo]``, without missing biases.

        Examples
        --------
        >>> import fastmha
        >>> sum(p.size for p in fastmha.MultiHeadAttention(512, 8).parameters())
        1050624
        """
        named = (getattr(self, name) for name in _multihead_call.parameter_shapes(self))
        return [x for x in named if x is not None]

    # --- the call ---------------------------------------------------------------------------------

    def forward(
        self,
        x,
        causal=False,
        *,
        context=None,
        mask=None,
        lengths=None,
        context_lengths=None,
        cache=None,
        positions=None,
        training=False,
        rng=None,
    ):
        """Attention of x to itself, to a context, or to all that a cache holds.

        Calling the object is the same.

        Parameters
        ----------
        x : (B, L, d_model) array
            Of any real dtype.
        causal : bool or {"top-left", "bottom-right"}
            As in `attention`.
        context : (B, S, d_model) array, optional
            Where keys and values come from; x itself without it.
        mask : array that broadcasts to (B, n_heads, L, S), optional
            Of bool: True = may attend. Of floats: added to the scores. It is used where it lies,
            also when `attn` is read or `backward` called: do not change it before.
        lengths : (B,) array of int, optional
            How many tokens of each member of x are in use. The others are never seen, and their
            results are 0.
        context_lengths : (B,) array of int, optional
            The same for the context.
        cache : KVCache, optional
            Keeps the keys and values. The call is then causal over all that is held, whatever
            `causal` says.
        positions : (L,) or (B, L) array of int, optional
            Where the tokens of x stand, for `rope` and ALiBi; default 0 ... L - 1, with a cache
            going on from its lengths. A context stands at 0 ... S - 1. Since ALiBi knows keys by
            their place, it takes only positions that rise by one, with a context only the default.
        training : bool
            Whether to drop weights, and to keep what `backward` needs.
        rng : int or numpy.random.Generator, optional
            Seed of the dropout; None draws a fresh one.

        Returns
        -------
        (B, L, d_model) array
            Of the object's dtype.

        Raises
        ------
        TypeError, ValueError
            If an argument is of the wrong kind, or its shape does not fit; the message names it.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> layer = fastmha.MultiHeadAttention(8, 2)
        >>> x = np.ones((2, 3, 8))
        >>> layer(x, lengths=[3, 1])[1].any(axis=-1)
        array([ True, False, False])
        """
        asked = _multihead_call.checked(
            self,
            x,
            causal=causal,
            context=context,
            mask=mask,
            lengths=lengths,
            context_lengths=context_lengths,
            cache=cache,
            positions=positions,
            training=training,
            rng=rng,
        )
        self._saved = None  # its memory goes before more is asked for
        q, k, v = self._heads(asked)
        if cache is not None:
            heads, self._last = _attend_cached(cache, q, k, v, asked)
            return self._joined(heads, asked)
        q, k, v = q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)
        options = asked.options
        if not training:
            heads = attention(q, k, v, layout="BLHD", **options)
        else:
            heads, lse = attention(q, k, v, layout="BLHD", return_lse=True, **options)
            self._saved = _multihead_backward.Saved(asked, q, k, v, heads, lse)
        self._last = _Call(functools.partial(attention_weights, q, k, layout="BLHD", **options))
        return self._joined(heads, asked)

    def __call__(self, *args, **kwargs):
        """The same as `forward`."""
        return self.forward(*args, **kwargs)

    @property
    def attn(self):
        """The weights (B, n_heads, L, S) of the last call, before dropout.

        float64 for float64, else float32; computed when first read, from that call's projected
        queries and keys. AttributeError before any call; RuntimeError if the call's cache has moved
        on since.
        """
        last = self._last  # read once: another thread may replace it
        if last is None:
            raise AttributeError(
                f"attn: expected a call before, got none; call the {type(self).__name__} first"
            )
        return last.weights()

    @attn.setter
    def attn(self, value):  # subclasses of the textbook class with a forward of their own do this
        self._last = _Call(None, value)

    def _split_heads(self, x):
        """(B, L, n*d_k) -> (B, n, L, d_k), a view; the call splits q, k and v by it."""
        return x.reshape(*x.shape[:2], x.shape[2] // self.d_k, self.d_k).swapaxes(1, 2)

    def _heads(self, asked):
        """Projected and rotated q (B, H, L, d_k), k and v (B, G, S, d_k)."""
        p = asked.parameters
        q = self._project_heads(asked.x, p["Wq"], p["bq"])
        k = self._project_heads(asked.source, p["Wk"], p["bk"])
        v = self._project_heads(asked.source, p["Wv"], p["bv"])
        if self.rope is not None:
            q, k = self.rope(q, asked.positions), self.rope(k, asked.key_positions)
        return q, k, v

    def _project_heads(self, x, W, b):
        """The projection, split by `_split_heads`: by the kernel itself, unless that was overridden."""
        if getattr(self._split_heads, "__func__", None) is MultiHeadAttention._split_heads:
            return project(x, W, b, self.d_k)
        return self._split_heads(project(x, W, b))

    def _joined(self, heads, asked):
        """The result, from the heads (B, L, H, d_k)."""
        p = asked.parameters
        out = project(heads.reshape(*heads.shape[:2], self.d_model), p["Wo"], p["bo"])
        return out if asked.lengths is None else clear(out, asked.lengths)

    # --- gradients --------------------------------------------------------------------------------

    def backward(self, grad_out):
        """The gradients of the last ``forward(..., training=True)``.

        Parameters
        ----------
        grad_out : (B, L, d_model) array
            The gradient of its result.

        Returns
        -------
        (B, L, d_model) array, or two of them
            The gradient of x; with a context the pair of those of x, and of the context
            (B, S, d_model). The gradients of `parameters()` are left in `grads`.

        Raises
        ------
        RuntimeError
            Without such a call, or after another one without ``training=True``.
        TypeError, ValueError
            If `grad_out` is of the wrong kind or shape.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> layer = fastmha.MultiHeadAttention(8, 2)
        >>> out = layer(np.ones((1, 3, 8)), causal=True, training=True)
        >>> layer.backward(2 * out).shape
        (1, 3, 8)
        >>> [g.shape for g in layer.grads][:2]
        [(8, 8), (8,)]
        """
        saved = self._saved
        if saved is None:
            raise RuntimeError("backward: expected a forward(..., training=True) before, got none")
        grad_out = _multihead_call.tokens(self, grad_out, "grad_out")
        if grad_out.shape != saved.asked.x.shape:
            raise ValueError(
                f"grad_out: expected shape {saved.asked.x.shape}, got {grad_out.shape}"
            )
        grad_out = clear(grad_out.copy(), saved.asked.lengths)
        grad_x, grad_context, self.grads = _multihead_backward.gradients(saved, grad_out, self.rope)
        return grad_x if saved.asked.source is saved.asked.x else (grad_x, grad_context)

    # --- caches, copies, weights of others --------------------------------------------------------

    def make_cache(self, batch, capacity=None):
        """An empty `KVCache` for this object, of its dtype.

        Parameters
        ----------
        batch : int
            Number of members B.
        capacity : int, optional
            The most tokens it can hold; None grows as needed.

        Returns
        -------
        KVCache

        Raises
        ------
        TypeError, ValueError
            As `KVCache`.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> layer = fastmha.MultiHeadAttention(8, 2)
        >>> cache = layer.make_cache(batch=1)
        >>> y = layer(np.ones((1, 5, 8)), cache=cache)
        >>> cache.lengths.tolist()
        [5]
        """
        from .cache import KVCache

        return KVCache(batch, self.n_kv_heads, self.d_k, capacity=capacity, dtype=self.dtype)

    def __getstate__(self):
        return {name: x for name, x in self.__dict__.items() if name not in ("_last", "_saved")}

    @classmethod
    def from_torch(cls, state, n_heads, *, prefix="", dtype=None, strict=True):
        """An object with the weights of ``torch.nn.MultiheadAttention``.

        Masks mean the opposite there: True in its ``key_padding_mask`` and ``attn_mask`` hides,
        True in `mask` here shows.

        Parameters
        ----------
        state : mapping of names to arrays or tensors
            ``in_proj_weight`` (or ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight``),
            ``in_proj_bias``, ``out_proj.weight``, ``out_proj.bias``.
        n_heads : int
        prefix : str
            What stands before these names, the last dot included.
        dtype : dtype, optional
            None keeps the stored one.
        strict : bool
            False passes over names that are left over under the prefix.

        Returns
        -------
        MultiHeadAttention
            With copies of the weights. Missing biases are zeros, or None where none is there.

        Raises
        ------
        TypeError
            If a weight holds no real numbers.
        ValueError
            If a weight is missing or of the wrong shape, or a name is left over.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> state = {"in_proj_weight": np.ones((12, 4)), "out_proj.weight": np.eye(4)}
        >>> fastmha.MultiHeadAttention.from_torch(state, 2).bq is None
        True
        """
        found = weights.from_torch(state, prefix=prefix, dtype=dtype, strict=strict)
        return cls._from_weights(found, n_heads)

    @classmethod
    def from_nanogpt(cls, state, n_heads, *, prefix="", dtype=None, strict=True):
        """An object with the weights of nanoGPT's attention.

        `state` holds ``c_attn.weight`` (3*d_model, d_model), ``c_attn.bias``, ``c_proj.weight`` and
        ``c_proj.bias``. All else as for `from_torch`.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> state = {"attn.c_attn.weight": np.ones((12, 4)), "attn.c_proj.weight": np.eye(4)}
        >>> fastmha.MultiHeadAttention.from_nanogpt(state, 2, prefix="attn.").d_model
        4
        """
        found = weights.from_nanogpt(state, prefix=prefix, dtype=dtype, strict=strict)
        return cls._from_weights(found, n_heads)

    @classmethod
    def from_gpt2(cls, state, n_heads, *, prefix="", dtype=None, strict=True):
        """An object with the weights of GPT-2's attention.

        `state` holds the names of `from_nanogpt`, the weights stored (in, out), among them
        ``c_attn.weight`` (d_model, 3*d_model). All else as for `from_torch`.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> state = {"c_attn.weight": np.ones((4, 12)), "c_proj.weight": np.eye(4)}
        >>> fastmha.MultiHeadAttention.from_gpt2(state, 2, dtype=np.float32).dtype
        dtype('float32')
        """
        found = weights.from_gpt2(state, prefix=prefix, dtype=dtype, strict=strict)
        return cls._from_weights(found, n_heads)

    @classmethod
    def from_bert(cls, state, n_heads, *, prefix="", dtype=None, strict=True):
        """An object with the weights of BERT's attention.

        `state` holds ``self.query.weight``, ``self.key.weight``, ``self.value.weight``,
        ``output.dense.weight``, and biases. All else as for `from_torch`.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> names = ("self.query", "self.key", "self.value", "output.dense")
        >>> state = {f"{name}.weight": np.eye(4) for name in names}
        >>> fastmha.MultiHeadAttention.from_bert(state, 2).Wk[0]
        array([1., 0., 0., 0.])
        """
        found = weights.from_bert(state, prefix=prefix, dtype=dtype, strict=strict)
        return cls._from_weights(found, n_heads)

    @classmethod
    def from_llama(
        cls, state, n_heads, n_kv_heads, *, prefix="", rope=None, dtype=None, strict=True
    ):
        """An object with the weights of the attention of Llama and its like.

        `state` holds ``q_proj.weight`` (d_model, d_model), ``k_proj.weight`` and ``v_proj.weight``
        (n_kv_heads*d_k, d_model), ``o_proj.weight``, and biases where there are any.

        Nothing is rotated unless a `rope` is given: ``Rope(d_k, interleaved=False, ...)`` for
        checkpoints in Hugging Face's format, with the base and the scaling of their configuration.
        All else as for `from_torch`.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> state = {f"{name}_proj.weight": np.eye(4) for name in "qo"}
        >>> state |= {f"{name}_proj.weight": np.eye(2, 4) for name in "kv"}
        >>> rope = fastmha.Rope(2, interleaved=False)
        >>> fastmha.MultiHeadAttention.from_llama(state, 2, 1, rope=rope).Wk.shape
        (4, 2)
        """
        n_heads, n_kv_heads = _count(n_heads, "n_heads"), _count(n_kv_heads, "n_kv_heads")
        found = weights.from_llama(
            state, n_heads, n_kv_heads, prefix=prefix, dtype=dtype, strict=strict
        )
        return cls._from_weights(found, n_heads, n_kv_heads=n_kv_heads, rope=rope)

    @classmethod
    def _from_weights(cls, found, n_heads, **options):
        bias, dtype = found.bq is not None, found.Wq.dtype
        layer = cls(len(found.Wq), n_heads, _UNDRAWN, bias=bias, dtype=dtype, **options)
        for name, x in found._asdict().items():
            setattr(layer, name, x)
        return layer

    def to_torch(self):
        """The weights as ``torch.nn.MultiheadAttention`` names and stores them.

        Returns
        -------
        dict of str to array
            ``in_proj_weight``, ``out_proj.weight``, and with biases ``in_proj_bias`` and
            ``out_proj.bias``: copies, of the object's dtype.

        Raises
        ------
        ValueError
            With fewer key/value heads than query heads, which that class does not know.

        Examples
        --------
        >>> import fastmha
        >>> state = fastmha.MultiHeadAttention(8, 2).to_torch()
        >>> {name: x.shape for name, x in state.items()}["in_proj_weight"]
        (24, 8)
        """
        if self.n_kv_heads != self.n_heads:
            raise ValueError(
                f"n_kv_heads: expected n_heads={self.n_heads}, which is all that PyTorch's class "
                f"knows, got {self.n_kv_heads}"
            )
        return weights.to_torch(weights.Weights(**_multihead_call.checked_parameters(self)))


class _Call:
    """What a call leaves behind: its weights, or how to get them."""

    def __init__(self, compute, value=None):
        self._compute, self._value = compute, value

    def weights(self):
        compute = self._compute  # read once: another thread may be in here too
        if compute is not None:
            self._value = compute()
            self._compute = None  # lets go of q and k
        return self._value


def _attend_cached(cache, q, k, v, asked):
    """Heads (B, L, H, d_k), causal over all that the cache holds, and the `_Call` for `attn`."""
    lengths, options = asked.lengths, asked.options
    cache.append(k, v, lengths=lengths)
    heads = cache.attend(q, lengths=lengths, **options)
    state = _state(cache)

    def compute():
        if _state(cache) != state:
            raise RuntimeError(
                "attn: expected the cache as the call left it, but it has moved on since"
            )
        return cache.weights(q, lengths=lengths, **options)

    return heads.swapaxes(1, 2), _Call(compute)


def _state(cache):
    """What tells whether a cache has moved on: its lengths, and its count of changes if it keeps
    one, since a truncated cache may have grown to the same lengths again."""
    return np.array(cache.lengths).tolist(), getattr(cache, "generation", None)


def _count(n, name):
    """A whole number of at least 1."""
    if isinstance(n, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an integer, got a bool")
    try:
        n = operator.index(n)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {type(n).__name__}") from None
    if n < 1:
        raise ValueError(f"{name}: expected at least 1, got {n}")
    return n
