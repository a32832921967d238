"""The paged cache: sequences that come and go in one memory, and share their beginnings."""

import itertools

import numpy as np

from . import _cached
from ._cached import Held, count
from ._checks import check_out

__all__ = ["PagedKVCache"]

# A packed call takes sequences with so few queries by themselves: heads that share keys are then read
# together for them.
_FEW = 8


class _Sequence:
    """A sequence's pages in order, with room for more, and how many tokens they hold."""

    def __init__(self, pages=(), length=0):
        self.table, self.used = np.array(pages, np.int64), len(pages)
        self.length = length

    @property
    def pages(self):
        return self.table[: self.used]

    def add_page(self, page):
        if self.used == len(self.table):
            self.table = np.resize(self.table, max(8, 2 * self.used))
        self.table[self.used] = page
        self.used += 1


class PagedKVCache:
    """Keys and values of many sequences, in pages of one memory.

    A sequence takes a page when it needs one, and gives its pages back when it is freed. A fork
    shares the pages of its origin, and takes pages of its own only for what it appends.

    Parameters
    ----------
    n_pages : int
        Number of pages: all the memory there is.
    page_size : int
        Tokens in a page. The kernels read pages whose size is a multiple of 96 in place; those of
        other sizes they gather, some tokens at a time.
    n_kv_heads : int
        Number of key/value heads G.
    d_k : int
        Size D of keys.
    d_v : int, optional
        Size E of values, by default `d_k`.
    dtype : dtype
        What keys and values are stored in, as for `KVCache`.

    Attributes
    ----------
    n_pages, page_size, n_kv_heads, d_k, d_v, dtype
        As given.
    free_pages : int
        How many pages no sequence uses.
    nbytes : int
        What the pages take up.
    generation : int
        Rises with every change.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind or out of range.

    See Also
    --------
    KVCache : a batch of sequences that stay together.

    References
    ----------
    Kwon et al., "Efficient memory management for large language model serving with PagedAttention",
    2023.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> cache = fastmha.PagedKVCache(n_pages=8, page_size=4, n_kv_heads=1, d_k=2)
    >>> prompt = cache.add_sequence()
    >>> cache.append([prompt], np.zeros((1, 1, 6, 2)), np.ones((1, 1, 6, 2)))
    >>> answer = cache.fork(prompt)
    >>> cache.append([answer], np.zeros((1, 1, 1, 2)), np.full((1, 1, 1, 2), 8.0))
    >>> cache.length(prompt), cache.length(answer), cache.free_pages
    (6, 7, 5)
    >>> cache.attend([prompt, answer], np.zeros((2, 1, 1, 2)))[:, 0, 0]
    array([[1., 1.],
           [2., 2.]])
    """

    def __init__(self, n_pages, page_size, n_kv_heads, d_k, d_v=None, *, dtype=np.float32):
        self.n_pages = count(n_pages, "n_pages")
        self.page_size = count(page_size, "page_size", 1)
        self.n_kv_heads = count(n_kv_heads, "n_kv_heads")
        self.d_k = count(d_k, "d_k")
        self.d_v = self.d_k if d_v is None else count(d_v, "d_v")
        self.dtype = _cached.cache_dtype(dtype)
        self.generation = 0
        shape = (self.n_pages, self.n_kv_heads, self.page_size)
        self._k = _cached.empty_store((*shape, self.d_k), self.dtype)
        self._v = _cached.empty_store((*shape, self.d_v), self.dtype)
        self._users = [0] * self.n_pages  # how many sequences have the page
        self._free = list(range(self.n_pages))[::-1]
        self._sequences = {}
        self._next = 0

    @property
    def free_pages(self):
        """How many pages no sequence uses."""
        return len(self._free)

    @property
    def nbytes(self):
        """What the pages take up, in bytes."""
        return self._k.nbytes + self._v.nbytes

    def __repr__(self):
        return (
            f"PagedKVCache(n_pages={self.n_pages}, page_size={self.page_size}, "
            f"n_kv_heads={self.n_kv_heads}, d_k={self.d_k}, d_v={self.d_v}, "
            f"dtype={self.dtype.name}, free_pages={self.free_pages})"
        )

    # --- sequences --------------------------------------------------------------------------------

    def add_sequence(self):
        """Begin a sequence.

        Returns
        -------
        int
            Its id, which no other sequence of this cache has had.

        Examples
        --------
        >>> import fastmha
        >>> cache = fastmha.PagedKVCache(8, 4, 1, 2)
        >>> seq = cache.add_sequence()
        >>> cache.length(seq)
        0
        """
        return self._add(_Sequence())

    def fork(self, seq):
        """Begin a sequence that goes on from where another one is now.

        Nothing is copied: full pages stay shared, and whichever of the two appends first to a page
        that is not full copies that one.

        Parameters
        ----------
        seq : int
            The other one.

        Returns
        -------
        int
            The id of the new one.

        Raises
        ------
        KeyError
            For an unknown id.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> cache = fastmha.PagedKVCache(8, 4, 1, 2)
        >>> seq = cache.add_sequence()
        >>> cache.append([seq], np.ones((1, 1, 6, 2)), np.ones((1, 1, 6, 2)))
        >>> other = cache.fork(seq)
        >>> cache.length(other), cache.free_pages
        (6, 6)
        """
        other = self._find(seq)
        for page in other.pages.tolist():
            self._users[page] += 1
        return self._add(_Sequence(other.pages, other.length))

    def free(self, seq):
        """End a sequence; pages that no other one shares can be taken again.

        Parameters
        ----------
        seq : int
            Its id, which is unknown from now on.

        Raises
        ------
        KeyError
            For an unknown id.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> cache = fastmha.PagedKVCache(8, 4, 1, 2)
        >>> seq = cache.add_sequence()
        >>> cache.append([seq], np.ones((1, 1, 6, 2)), np.ones((1, 1, 6, 2)))
        >>> cache.free(seq)
        >>> cache.free_pages
        8
        """
        ended = self._find(seq)
        del self._sequences[seq]
        for page in ended.pages.tolist():
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
        self.generation += 1

    def length(self, seq):
        """The number of tokens of a sequence.

        Parameters
        ----------
        seq : int
            Its id.

        Returns
        -------
        int

        Raises
        ------
        KeyError
            For an unknown id.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> cache = fastmha.PagedKVCache(8, 4, 1, 2)
        >>> seq = cache.add_sequence()
        >>> cache.append([seq], np.ones((1, 1, 6, 2)), np.ones((1, 1, 6, 2)))
        >>> cache.length(seq)
        6
        """
        return self._find(seq).length

    def _add(self, sequence):
        seq, self._next = self._next, self._next + 1
        self._sequences[seq] = sequence
        self.generation += 1
        return seq

    def _find(self, seq):
        found = self._sequences.get(seq)
        if found is None:
            raise KeyError(f"seq: expected the id of a sequence of this cache, got {seq!r}")
        return found

    def _find_all(self, seqs):
        try:
            seqs = list(seqs)
        except TypeError:
            raise TypeError(f"seqs: expected a sequence of ids, got {type(seqs).__name__}") from None
        return seqs, [self._find(seq) for seq in seqs]

    # --- new tokens -------------------------------------------------------------------------------

    def append(self, seqs, k, v, *, cu_seqlens=None):
        """Take copies of the keys and values of new tokens.

        Parameters
        ----------
        seqs : sequence of int
            Ids of B sequences, all different.
        k : (B, G, n, D) array of float64, float32, float16 or bfloat16
        v : (B, G, n, E) array
            They are converted to the cache's dtype. With `cu_seqlens`: (T, G, D) and (T, G, E).
        cu_seqlens : (B + 1,) array of int32 or int64, optional
            Sequence b has the tokens ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``.

        Raises
        ------
        KeyError
            For an unknown id.
        MemoryError
            If there are too few free pages.
        TypeError, ValueError
            For arguments of the wrong kind, and shapes that do not fit. After any error the cache
            is as it was.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> cache = fastmha.PagedKVCache(8, 4, 1, 2)
        >>> a, b = cache.add_sequence(), cache.add_sequence()
        >>> k = v = np.ones((5, 1, 2))
        >>> cache.append([a, b], k, v, cu_seqlens=[0, 2, 5])
        >>> cache.length(a), cache.length(b)
        (2, 3)
        """
        seqs, found = self._find_all(seqs)
        if len(set(seqs)) < len(seqs):
            raise ValueError(f"seqs: expected ids that are all different, got {seqs}")
        B, G, D, E = len(seqs), self.n_kv_heads, self.d_k, self.d_v
        if cu_seqlens is None:
            k = _cached.new_rows(k, "k", (B, G, None, D))
            v = _cached.new_rows(v, "v", (B, G, k.shape[2], E))
            taken = [k.shape[2]] * B
            k, v = (x.swapaxes(1, 2).reshape(-1, G, x.shape[3]) for x in (k, v))
        else:
            k = _cached.new_rows(k, "k", (None, G, D))
            v = _cached.new_rows(v, "v", (len(k), G, E))
            taken = np.diff(_cached.check_packing(cu_seqlens, B, len(k))).tolist()
        pages, slots = self._take(found, taken)
        T = len(pages)
        _cached.scatter(self._k, pages, slots, k[:T])
        _cached.scatter(self._v, pages, slots, v[:T])
        for sequence, n in zip(found, taken, strict=True):
            sequence.length += n
        self.generation += 1

    def _take(self, found, taken):
        """Gives sequences the pages for so many new tokens: where these go, (T,) pages and rows."""
        size = self.page_size
        needed, copies = 0, {}
        for sequence, n in zip(found, taken, strict=True):
            needed += -(-(sequence.length + n) // size) - sequence.used
            if n and sequence.length % size:
                page = int(sequence.pages[-1])
                copies[page] = copies.get(page, 0) + 1
        # Of those that share a page, the last one to write to it may keep it.
        needed += sum(min(n, self._users[page] - 1) for page, n in copies.items())
        if needed > len(self._free):
            raise MemoryError(
                f"n_pages: expected {needed} free pages for the new tokens, got {len(self._free)} "
                f"of {self.n_pages}"
            )
        pages, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for sequence, n in zip(found, taken, strict=True):
            if n and sequence.length % size:
                self._own_last(sequence)
            while sequence.used * size < sequence.length + n:
                sequence.add_page(self._new_page())
            places = np.arange(sequence.length, sequence.length + n)
            pages.append(sequence.table[places // size])
            slots.append(places % size)
        return np.concatenate(pages), np.concatenate(slots)

    def _new_page(self):
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _own_last(self, sequence):
        """A copy of the last page, if others have it too."""
        shared = sequence.pages[-1]
        if self._users[shared] > 1:
            page = self._new_page()
            used = slice(sequence.length % self.page_size)
            for store in (self._k, self._v):
                _cached.move(store, (shared, slice(None), used), store, (page, slice(None), used))
            self._users[shared] -= 1
            sequence.pages[-1] = page

    # --- queries ----------------------------------------------------------------------------------

    def attend(
        self,
        seqs,
        q,
        *,
        cu_seqlens=None,
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
        """Attention of the last tokens of some sequences to all of each.

        Parameters
        ----------
        seqs : sequence of int
            Ids of B sequences; its place here is a sequence's batch member in the dropout.
        q : (B, H, n, D) array of float64, float32, float16 or bfloat16
            Query i of a sequence stands at position length - n + i, and sees the keys up to there.
            With `cu_seqlens`: (T, H, D).
        cu_seqlens : (B + 1,) array of int32 or int64, optional
            Sequence b has the queries ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``.
        mask : array that broadcasts to (B, H, n, S), optional
            S is the longest of the sequences. Not with `cu_seqlens`.
        layout : {"BHLD", "BLHD"}
            Not with `cu_seqlens`.
        window, scale, softcap, alibi_slopes, sinks, dropout_p, rng, return_lse, out
            As in `attention`.

        Returns
        -------
        out : (B, H, n, E), (B, n, H, E) or (T, H, E) array
            Of the query's dtype. Rows past the last offset are zeros.
        lse : (B, H, n) or (H, T) array
            Only with `return_lse`. -inf past the last offset.

        Raises
        ------
        KeyError
            For an unknown id.
        TypeError, ValueError
            As `attention`.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> cache = fastmha.PagedKVCache(8, 4, 1, 2, 1)
        >>> seq = cache.add_sequence()
        >>> cache.append([seq], np.zeros((1, 1, 5, 2)), np.arange(5.0).reshape(1, 1, 5, 1))
        >>> cache.attend([seq], np.zeros((1, 1, 2, 2))).ravel()
        array([1.5, 2. ])
        """
        found = self._find_all(seqs)[1]
        if cu_seqlens is not None:
            if mask is not None:
                raise ValueError("mask: expected None with cu_seqlens, got a mask")
            if layout != "BHLD":
                raise ValueError(f"layout: expected 'BHLD' with cu_seqlens, got {layout!r}")
        held = self._held(found)
        problem = _cached.ask(
            held,
            q,
            offsets=cu_seqlens,
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
        packed = cu_seqlens is not None
        swapped = packed or layout == "BLHD"
        if out is not None:
            out = check_out(out, problem, swapped, (problem.q, problem.mask))
        if packed:
            out, lse = self._attend_packed(found, problem, out, return_lse)
        else:
            out, lse = _cached.answer(held, problem, out, swapped, return_lse)
        return (out, lse) if return_lse else out

    def _held(self, found):
        lengths = np.array([sequence.length for sequence in found], np.int64)
        most = int(lengths.max(initial=0))
        # Entries past a sequence's own are never read.
        table = np.empty((len(found), -(-most // self.page_size)), np.int64)
        for row, sequence in zip(table, found, strict=True):
            row[: sequence.used] = sequence.pages
        (k, k_scales), (v, v_scales) = self._k, self._v
        page = self.page_size
        return Held(k, v, k_scales, v_scales, lengths, most, False, page=page, table=table)

    def _attend_packed(self, found, problem, out, want_lse):
        starts, counts = problem.options.query_starts, problem.options.query_lengths
        end = int(starts[-1] + counts[-1]) if found else 0
        T, H, E = problem.q.shape[1], problem.q.shape[0], self.d_v
        if out is None:
            out = np.empty((T, H, E), problem.q.dtype)
        lse = np.empty((H, T), problem.lse_dtype) if want_lse else None
        out[end:] = 0
        if want_lse:
            lse[:, end:] = -np.inf
        few = counts <= _FEW
        split = few.any() and not few.all() and not problem.options.dropout_p
        for members in (few, ~few) if split else (slice(None),):
            part = problem.options._replace(
                shifts=problem.options.shifts[members],
                key_lengths=problem.options.key_lengths[members],
                query_lengths=counts[members],
                query_starts=starts[members],
            )
            held = self._held(list(itertools.compress(found, members)) if split else found)
            _cached.run(held, problem._replace(options=part), out.swapaxes(0, 1), lse)
        return out, lse

    # --- copies -----------------------------------------------------------------------------------

    def __getstate__(self):
        used = np.flatnonzero(self._users)
        state = self.__dict__ | {"_used": used}
        for name in ("_k", "_v"):
            rows, scales = state[name]
            state[name] = _cached.Store(rows[used], None if scales is None else scales[used])
        for name in ("_users", "_free"):
            state[name] = state[name].copy()
        state["_sequences"] = {
            seq: _Sequence(sequence.pages, sequence.length) for seq, sequence in self._sequences.items()
        }
        return state

    def __setstate__(self, state):
        used = state.pop("_used")
        self.__dict__.update(state)
        for name in ("_k", "_v"):
            held = state[name]
            store = _cached.empty_store((self.n_pages, *held.rows.shape[1:]), self.dtype)
            _cached.move(held, slice(None), store, used)
            setattr(self, name, store)
