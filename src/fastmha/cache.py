"""The cache of keys and values, for models that write a token at a time."""

import numpy as np

from . import _cached
from ._cached import Held, count
from ._checks import BOUNDLESS, check_lengths, check_out
from ._plan import ATOM

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of the tokens so far, for a batch of sequences of any lengths.

    Each member of the batch has a length of its own and goes on from it; what lies beyond is never
    seen. Queries stand at the end of the keys. A token's result has the same bits as its row in one
    causal call on the whole sequence.

    Parameters
    ----------
    batch : int
        Number of members B.
    n_kv_heads : int
        Number of key/value heads G.
    d_k : int
        Size D of keys.
    d_v : int, optional
        Size E of values, by default `d_k`.
    capacity : int, optional
        The most tokens that a member may hold. None: as many as come, in memory that doubles.
    window : int, optional
        How many earlier keys a query sees beside its own; the older ones are forgotten. Memory is
        then a ring for so many tokens and the last append. `capacity` counts those that are kept.
    dtype : dtype
        What keys and values are stored in: float64, float32, float16, ml_dtypes.bfloat16 (also
        "bfloat16"), or "int8" with one scale a token and head. Queries may be of any dtype. int8
        keeps the largest magnitude of a row exactly and the rest to 1/254 of it; a row that is not
        finite is NaN.

    Attributes
    ----------
    lengths : (B,) array of int64
        How many tokens each member has seen: a copy.
    batch, n_kv_heads, d_k, d_v, capacity, window, dtype
        As given.
    generation : int
        Rises with every change.
    nbytes : int
        What the storage takes up.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind or out of range.

    Notes
    -----
    Threads may attend at the same time, but not while another one changes the cache. Pickles and
    copies hold the tokens that are in use, and share nothing.

    See Also
    --------
    PagedKVCache : sequences that come and go, and share their beginnings.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> cache = fastmha.KVCache(batch=1, n_kv_heads=2, d_k=8)
    >>> rng = np.random.default_rng(0)
    >>> for n in (5, 1):  # a prompt, then a token
    ...     k, v = rng.standard_normal((2, 1, 2, n, 8), np.float32)
    ...     cache.append(k, v)
    ...     out = cache.attend(rng.standard_normal((1, 4, n, 8), np.float32))
    >>> out.shape, cache.lengths.tolist()
    ((1, 4, 1, 8), [6])
    """

    def __init__(self, batch, n_kv_heads, d_k, d_v=None, *, capacity=None, window=None, dtype=np.float32):
        self.batch = count(batch, "batch")
        self.n_kv_heads = count(n_kv_heads, "n_kv_heads")
        self.d_k = count(d_k, "d_k")
        self.d_v = self.d_k if d_v is None else count(d_v, "d_v")
        self.capacity = None if capacity is None else count(capacity, "capacity")
        self.window = None if window is None else count(window, "window")
        self.dtype = _cached.cache_dtype(dtype)
        self.generation = 0
        self._last = 0  # how many tokens the last append brought, one number or (B,)
        self._slots = 0
        self._set_lengths(np.zeros(self.batch, np.int64))
        self._k, self._v = self._empty(0)
        if self.capacity and self.window is None:
            self._reserve(self.capacity, 0)

    # --- what is held -----------------------------------------------------------------------------

    @property
    def lengths(self):
        """How many tokens each member has seen, (B,) int64: a copy."""
        return self._lengths.copy()

    @property
    def nbytes(self):
        """What the storage takes up, in bytes."""
        return self._k.nbytes + self._v.nbytes

    def __repr__(self):
        return (
            f"KVCache(batch={self.batch}, n_kv_heads={self.n_kv_heads}, d_k={self.d_k}, "
            f"d_v={self.d_v}, capacity={self.capacity}, window={self.window}, "
            f"dtype={self.dtype.name}, lengths={self._lengths.tolist()})"
        )

    def _set_lengths(self, lengths, most=None):
        """`most` is given where members stay as unlike one another as they are."""
        self._lengths = lengths  # another array: a query may be using the one that was there
        if most is None:
            most = int(lengths.max(initial=0))
            self._alike = bool((lengths == most).all())
        self._most = most
        self.generation += 1

    def _empty(self, slots):
        lead = (self.batch, self.n_kv_heads, slots)
        return [_cached.empty_store((*lead, width), self.dtype) for width in (self.d_k, self.d_v)]

    # --- changes ----------------------------------------------------------------------------------

    def append(self, k, v, lengths=None):
        """Take copies of the keys and values of new tokens.

        The time is in proportion to the new tokens, whatever is held.

        Parameters
        ----------
        k : (B, G, n, D) array of float64, float32, float16 or bfloat16
        v : (B, G, n, E) array
            They are converted to the cache's dtype.
        lengths : (B,) array of int, optional
            How many of the n tokens each member takes: the first ones. None: all.

        Raises
        ------
        TypeError
            For arrays of another dtype.
        ValueError
            For shapes that do not fit, and where a fixed capacity is exceeded. The cache is then as
            it was.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> cache = fastmha.KVCache(2, 1, 4, capacity=8)
        >>> cache.append(np.ones((2, 1, 3, 4)), np.ones((2, 1, 3, 4)), lengths=[3, 1])
        >>> cache.lengths.tolist()
        [3, 1]
        """
        k = _cached.new_rows(k, "k", (self.batch, self.n_kv_heads, None, self.d_k))
        n = k.shape[2]
        v = _cached.new_rows(v, "v", (self.batch, self.n_kv_heads, n, self.d_v))
        taken = None if lengths is None else check_lengths(lengths, "lengths", self.batch, n)
        self._reserve(self._needed(n, taken), n)
        if taken is None and self._alike:
            self._put_alike(k, v, n)
        else:
            self._put_each(k, v, np.full(self.batch, n) if taken is None else taken)
        self._last = n if taken is None else taken
        if taken is None:
            self._set_lengths(self._lengths + n, self._most + n if self.batch else 0)
        else:
            self._set_lengths(self._lengths + taken)

    def truncate(self, n):
        """Forget all but the first tokens.

        Parameters
        ----------
        n : int or (B,) array of int
            How many tokens to keep: of all members, where those that hold fewer stay as they are,
            or of each.

        Raises
        ------
        TypeError
            For anything else.
        ValueError
            For more tokens than are held, and for a cache with a window, which has forgotten what
            would come last.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> cache = fastmha.KVCache(1, 1, 4)
        >>> cache.append(np.ones((1, 1, 3, 4)), np.ones((1, 1, 3, 4)))
        >>> cache.truncate(1)
        >>> cache.lengths.tolist()
        [1]
        """
        if self.window is not None:
            raise ValueError(f"window: expected None where tokens go, got {self.window}")
        if np.ndim(n) == 0:
            n = count(n, "n")
            if n > self._most:
                raise ValueError(f"n: expected at most the {self._most} tokens held, got {n}")
            kept = np.minimum(self._lengths, n)
        else:
            kept = check_lengths(n, "n", self.batch, self._most)
            if (kept > self._lengths).any():
                raise ValueError(
                    f"n: expected at most the tokens held, {self._lengths.tolist()}, got {kept.tolist()}"
                )
        self._set_lengths(kept)

    def reset(self):
        """Forget everything; the memory is kept for what comes next.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> cache = fastmha.KVCache(1, 1, 4)
        >>> cache.append(np.ones((1, 1, 3, 4)), np.ones((1, 1, 3, 4)))
        >>> cache.reset()
        >>> cache.lengths.tolist()
        [0]
        """
        self._last = 0
        self._set_lengths(np.zeros(self.batch, np.int64))

    def _needed(self, n, taken):
        """Slots that the tokens to keep and the new ones take up."""
        left = BOUNDLESS if self.window is None else self.window
        if taken is None:
            needed = min(self._most, left) + n
        else:
            needed = int((np.minimum(self._lengths, left) + taken).max(initial=0))
        if self.capacity is not None and needed > self.capacity:
            raise ValueError(
                f"k: expected at most capacity={self.capacity} tokens with the "
                f"{np.minimum(self._lengths, left).tolist()} that are kept, got "
                f"{n if taken is None else taken.tolist()} more"
            )
        return needed

    def _reserve(self, needed, n):
        """Makes room for an append of n tokens, before anything else changes."""
        slots = self._slots
        if self.window is None:
            if needed <= slots:
                return
            slots = max(needed, 2 * slots, 16) if self.capacity is None else self.capacity
        else:
            # Whole atoms, so that the kernels find each in one piece. A ring that a long append has
            # left too large shrinks again, at a cost that is small beside that append's.
            enough = self.window + 2 * n
            if needed <= slots <= max(4 * enough, 16 * ATOM):
                return
            slots = -(-max(needed, min(2 * slots, enough)) // ATOM) * ATOM
        stores = self._empty(slots)
        for old, new in zip((self._k, self._v), stores, strict=True):
            if self.window is None:
                held = (slice(None), slice(None), slice(self._most))
                _cached.move(old, held, new, held)
            else:
                for b, length in enumerate(self._lengths.tolist()):
                    kept = np.arange(max(0, length - self.window), length)
                    _cached.move(
                        old, (b, slice(None), kept % max(1, self._slots)),
                        new, (b, slice(None), kept % slots),
                    )  # fmt: skip
        self._k, self._v = stores
        self._slots = slots

    def _put_alike(self, k, v, n):
        """n tokens of every member, all at the same place."""
        start, done = self._most, 0
        while done < n:  # twice where a ring closes
            place = (start + done) % self._slots if self.window is not None else start
            run = min(n - done, self._slots - place)
            index = (slice(None), slice(None), slice(place, place + run))
            _cached.put(self._k, index, k[:, :, done : done + run])
            _cached.put(self._v, index, v[:, :, done : done + run])
            done += run

    def _put_each(self, k, v, taken):
        """So many tokens of each member, each at a place of its own."""
        members = np.repeat(np.arange(self.batch), taken)
        tokens = np.arange(len(members)) - np.repeat(np.cumsum(taken) - taken, taken)
        slots = self._lengths[members] + tokens
        if self.window is not None:
            slots %= max(1, self._slots)
        for store, x in ((self._k, k), (self._v, v)):
            one_each = x.shape[2] == 1 and len(members) == self.batch
            rows = x[:, :, 0] if one_each else x[members, :, tokens]
            _cached.scatter(store, members, slots, rows)

    # --- queries ----------------------------------------------------------------------------------

    def attend(
        self,
        q,
        lengths=None,
        *,
        mask=None,
        window=None,
        scale=None,
        softcap=None,
        alibi_slopes=None,
        sinks=None,
        dropout_p=0.0,
        rng=None,
        layout="BHLD",
        return_lse=False,
        out=None,
    ):
        """Attention of the last tokens to themselves and to all before them.

        Parameters
        ----------
        q : (B, H, L, D) array of float64, float32, float16 or bfloat16
            Query i of a member stands at position length - L + i, and sees the keys up to there.
            With a window, L is at most the length of the last append.
        lengths : (B,) array of int, optional
            How many of the L queries of each member count: the first ones, and they stand at the
            end of its keys. The others give zeros, and an LSE of -inf.
        mask : array that broadcasts to (B, H, L, S), optional
            S is the longest of `lengths`, tokens that were forgotten included.
        window : (int, int), optional
            As in `attention`; with a cache that has a window, no wider than that.
        scale, softcap, alibi_slopes, sinks, dropout_p, rng, layout, return_lse, out
            As in `attention`.

        Returns
        -------
        out : (B, H, L, E) or (B, L, H, E) array
            Of the query's dtype.
        lse : (B, H, L) array
            Only with `return_lse`.

        Raises
        ------
        TypeError, ValueError
            As `attention`.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> cache = fastmha.KVCache(1, 1, 2, 1)
        >>> cache.append(np.zeros((1, 1, 5, 2)), np.arange(5.0).reshape(1, 1, 5, 1))
        >>> cache.attend(np.zeros((1, 1, 2, 2))).ravel()
        array([1.5, 2. ])
        """
        held = self._held()
        problem = _cached.ask(
            held,
            q,
            lengths,
            mask=mask,
            window=window,
            scale=scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            dropout_p=dropout_p,
            rng=rng,
            layout=layout,
        )
        if self.window is not None:
            self._check_asked(problem)
        swapped = layout == "BLHD"
        if out is not None:
            out = check_out(out, problem, swapped, (problem.q, problem.mask))
        out, lse = _cached.answer(held, problem, out, swapped, return_lse)
        return (out, lse) if return_lse else out

    def weights(self, q, lengths=None, **options):
        """The probabilities that `attend` weighs the values with, those before dropout.

        Parameters
        ----------
        q, lengths, and the options but `return_lse` and `out`
            As in `attend`.

        Returns
        -------
        (B, H, L, S) array
            S is the longest of `lengths`, tokens that were forgotten included. float64 for float64,
            else float32.

        Raises
        ------
        TypeError, ValueError
            As `attend`.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> cache = fastmha.KVCache(1, 1, 2)
        >>> cache.append(np.zeros((1, 1, 4, 2)), np.zeros((1, 1, 4, 2)))
        >>> cache.weights(np.zeros((1, 1, 2, 2)))[0, 0].round(2)
        array([[0.33, 0.33, 0.33, 0.  ],
               [0.25, 0.25, 0.25, 0.25]])
        """
        held = self._held()
        problem = _cached.ask(held, q, lengths, **options)
        if self.window is not None:
            self._check_asked(problem)
        return _cached.weigh(held, problem)

    def _held(self):
        (k, k_scales), (v, v_scales) = self._k, self._v
        most, ring, left = self._most, 0, BOUNDLESS
        if self.window is not None:
            ring, left = self._slots, self.window
        else:
            k, v = k[:, :, :most], v[:, :, :most]
            if k_scales is not None:
                k_scales, v_scales = k_scales[:, :, :most], v_scales[:, :, :most]
        return Held(k, v, k_scales, v_scales, self._lengths, most, self._alike, left, ring)

    def _check_asked(self, problem):
        """A ring holds what the last append's tokens see, and no more."""
        asked = problem.options.query_lengths
        if asked is None:
            asked = problem.q.shape[2]
        if np.any(asked > self._last):
            raise ValueError(
                f"q: expected at most the {self._last} tokens of the last append with "
                f"window={self.window}, got {asked}"
            )

    # --- copies -----------------------------------------------------------------------------------

    def __getstate__(self):
        state = self.__dict__.copy()
        slots = self._slots if self.window is not None else self._most
        for name in ("_k", "_v"):
            rows, scales = state[name]
            scales = None if scales is None else scales[:, :, :slots].copy()
            state[name] = _cached.Store(rows[:, :, :slots].copy(), scales)
        state["_slots"] = slots
        return state
