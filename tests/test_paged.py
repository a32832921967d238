"""`fastmha.PagedKVCache`: contract section 6, by rule, against a model, and bit by bit."""

import copy
import pickle

import numpy as np
import pytest
from caching import ASKED, STORED, cache_dtype, draw, expected, join, kept, poison
from comparing import assert_same_bits
from drawing import FLOATS, as_dtype
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import fastmha
from fastmha import KVCache, PagedKVCache, _cached, attention

PAGES = [1, 7, 16, 96, 100, 192, 256]


def poison_unused(cache):
    """All slots and table entries that nobody may read."""
    used = np.zeros((cache.n_pages, cache.page_size), bool)
    for sequence in cache._sequences.values():
        sequence.table[sequence.used :] = -(2**60)
        for i, page in enumerate(sequence.pages.tolist()):
            used[page, : max(0, sequence.length - i * cache.page_size)] = True
    pages, slots = np.nonzero(~used)
    for store in (cache._k, cache._v):
        poison(store, (pages, slice(None), slots))


def contents(cache):
    """What is held, for comparisons."""
    found = [cache.free_pages, cache.generation]
    for seq, sequence in cache._sequences.items():
        found += [seq, sequence.length, sequence.pages.tolist()]
        for store in (cache._k, cache._v):
            with np.errstate(invalid="ignore"):  # what was never written may be anything
                rows = np.moveaxis(store.rows[sequence.pages], 2, 1).astype(np.float64)
            found.append(rows.reshape(-1, *rows.shape[2:])[: sequence.length].tolist())
    return found


def filled(lengths, page_size=4, n_pages=100, heads=2, width=4, **options):
    """A cache with sequences of some lengths, and their ids."""
    rng = np.random.default_rng(0)
    cache = PagedKVCache(n_pages, page_size, heads, width, **options)
    seqs = [cache.add_sequence() for _ in lengths]
    k, v = (draw(rng, sum(lengths), heads, width) for _ in "kv")
    cache.append(seqs, k, v, cu_seqlens=np.cumsum([0, *lengths]))
    return cache, seqs


@pytest.fixture(autouse=True)
def garbage_in_tables(monkeypatch):
    """Entries of block tables that are not used hold what would be the end of the process."""
    held = PagedKVCache._held

    def spoiled(self, found):
        result = held(self, found)
        for row, sequence in zip(result.table, found, strict=True):
            row[sequence.used :] = -(2**60)
        return result

    monkeypatch.setattr(PagedKVCache, "_held", spoiled)


# --- the same bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("options", [{}, {"window": (40, 0)}, {"alibi_slopes": fastmha.alibi_slopes(4)}])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("page_size", "parts"),
    [*((size, [97, 1, 1, 95, 6]) for size in PAGES), (192, [200]), (7, [1] * 200), (96, [1] * 200)],
)
def test_section_4_paged_rows_are_rows_of_the_full_causal_call(page_size, parts, dtype, options, threads):
    rng = np.random.default_rng(1)
    q, k, v = (draw(rng, 2, heads, 200, 17, dtype=as_dtype(dtype)) for heads in (4, 2, 2))
    full, lse = attention(q, k, v, causal=True, return_lse=True, **options)
    cache = PagedKVCache(2 * -(-200 // page_size) + 1, page_size, 2, 17, dtype=as_dtype(dtype))
    seqs = [cache.add_sequence(), cache.add_sequence()]
    done = 0
    with fastmha.num_threads(threads):
        for n in parts:
            new = slice(done, done + n)
            cache.append(seqs, k[:, :, new], v[:, :, new])
            poison_unused(cache)
            out = cache.attend(seqs, q[:, :, new], return_lse=True, **options)
            assert_same_bits(out[0], full[:, :, new])
            assert_same_bits(out[1], lse[:, :, new])
            done += n


@pytest.mark.parametrize("stored", STORED)
def test_section_4_paged_is_contiguous_for_every_storage(stored):
    rng = np.random.default_rng(2)
    q, k, v = (draw(rng, 2, heads, 150, 12) for heads in (6, 2, 2))
    whole = KVCache(2, 2, 12, dtype=cache_dtype(stored))
    whole.append(k, v)
    for page_size in PAGES:
        cache = PagedKVCache(400, page_size, 2, 12, dtype=cache_dtype(stored))
        seqs = [cache.add_sequence(), cache.add_sequence()]
        cache.append(seqs, k, v)
        poison_unused(cache)
        for n in (150, 3, 1):
            assert_same_bits(cache.attend(seqs, q[:, :, -n:]), whole.attend(q[:, :, -n:]))


def test_section_4_packed_is_padded():
    rng = np.random.default_rng(3)
    cache, seqs = filled([100, 3, 0, 57, 58, 1])
    counts = [4, 1, 0, 2, 2, 1]
    cu = np.cumsum([0, *counts]).astype(np.int32)
    q = draw(rng, 13, 4, 4)
    options = {"window": (50, 0), "softcap": 3.0, "sinks": np.ones(4), "dropout_p": 0.3, "rng": 5}
    out, lse = cache.attend(seqs, q, cu_seqlens=cu, return_lse=True, **options)
    assert out.shape == (13, 4, 4) and lse.shape == (4, 13)
    assert not out[10:].any() and (lse[:, 10:] == -np.inf).all()
    for b, n in enumerate(counts):
        # The place in seqs is the batch member.
        padded = np.zeros((6, 4, n, 4), np.float32)
        padded[b] = q[cu[b] : cu[b + 1]].swapaxes(0, 1)
        alone = cache.attend(seqs, padded, return_lse=True, **options)
        assert_same_bits(out[cu[b] : cu[b + 1]], alone[0][b].swapaxes(0, 1))
        assert_same_bits(lse[:, cu[b] : cu[b + 1]], alone[1][b])
    target = np.empty_like(out)
    assert cache.attend(seqs, q, cu_seqlens=cu, out=target, **options) is target
    assert_same_bits(target, out)


def test_rule_3_13_one_fresh_seed_for_a_packed_call():
    cache, (seq,) = filled([400], heads=1)
    seqs, q = [seq] * 2, np.zeros((3, 1, 4), np.float32)
    ours = cache.attend(seqs, q, cu_seqlens=[0, 1, 3], dropout_p=0.5)
    assert not np.array_equal(ours, cache.attend(seqs, q, cu_seqlens=[0, 1, 3], dropout_p=0.5))


OPTIONS = [
    {"scale": -0.3},
    {"softcap": 2.0},
    {"sinks": np.array([0.5, -1.0, 2.0, 0.0])},
    {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0])},
    {"window": (3, 0)},
    {"mask": np.arange(11) % 3 != 1},
    {"mask": np.cos(np.arange(2 * 4 * 5 * 11)).reshape(2, 4, 5, 11)},
    {"dropout_p": 0.4, "rng": 3},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_section_6_options_of_attention(options):
    rng = np.random.default_rng(4)
    q, k, v = (draw(rng, 2, heads, 11, 8) for heads in (4, 2, 2))
    cache = PagedKVCache(9, 3, 2, 8)
    seqs = [cache.add_sequence(), cache.add_sequence()]
    cache.append(seqs, k, v)
    q = q[:, :, 6:]
    whole = attention(q, k, v, causal="bottom-right", return_lse=True, **options)
    out, lse = cache.attend(seqs, q, return_lse=True, **options)
    assert_same_bits(out, whole[0])
    assert_same_bits(lse, whole[1])
    swapped = cache.attend(seqs, q.swapaxes(1, 2), layout="BLHD", **options)
    assert_same_bits(swapped.swapaxes(1, 2), out)
    target = np.empty_like(out)
    assert cache.attend(seqs, q, out=target, **options) is target
    assert_same_bits(target, out)


# --- sharing ------------------------------------------------------------------------------------------


def test_section_6_forks_share_full_pages_and_copy_on_write():
    cache, (origin,) = filled([10])
    assert cache.free_pages == 97
    forks = [cache.fork(origin) for _ in range(3)]
    assert cache.free_pages == 97
    before = [x for x in contents(cache) if isinstance(x, list)]
    token = np.ones((1, 2, 1, 4))
    cache.append([forks[0]], token, token)
    assert cache.free_pages == 96  # the page that was not full
    cache.append([origin], 2 * token, 2 * token)
    assert cache.free_pages == 95
    shared = [cache._sequences[s].pages[:2].tolist() for s in (origin, *forks)]
    assert all(pages == shared[0] for pages in shared)
    pair = np.concatenate([3 * token, 4 * token])
    cache.append(forks[1:], pair, pair)
    assert cache.free_pages == 94  # the last to write keeps the page
    after = [x for x in contents(cache) if isinstance(x, list)]
    for i, value in enumerate((2, 1, 3, 4)):
        for kind in (1, 2):
            assert after[3 * i + kind] == [*before[kind], np.full((2, 4), value).tolist()]
    for seq in forks:
        cache.free(seq)
    assert cache.free_pages == 97
    cache.free(origin)
    assert cache.free_pages == 100


def test_section_6_a_fork_of_full_pages_copies_nothing():
    cache, (origin,) = filled([8])
    fork = cache.fork(origin)
    token = np.ones((1, 2, 1, 4))
    cache.append([fork], token, token)
    assert cache.free_pages == 97
    assert cache.length(origin) == 8 and cache.length(fork) == 9


def test_section_6_a_fork_outlives_its_origin():
    rng = np.random.default_rng(5)
    k, v, q = (draw(rng, 1, 2, 10, 4) for _ in range(3))
    cache = PagedKVCache(6, 4, 2, 4)
    origin = cache.add_sequence()
    cache.append([origin], k, v)
    fork = cache.fork(origin)
    cache.free(origin)
    other = cache.add_sequence()
    cache.append([other], np.full_like(k, np.nan), np.full_like(v, np.nan))
    assert_same_bits(cache.attend([fork], q), attention(q, k, v, causal=True))


# --- errors -------------------------------------------------------------------------------------------


def test_section_6_out_of_pages_changes_nothing():
    cache, (a, b) = filled([10, 4], n_pages=6)
    fork = cache.fork(a)
    before = contents(cache)
    new = np.ones((3, 2, 5, 4))
    for seqs, n in (([b], 9), ([a, b], 5), ([fork, a, b], 3)):
        x = np.ones((len(seqs), 2, n, 4))
        with pytest.raises(MemoryError, match=r"^n_pages: expected \d+ free pages"):
            cache.append(seqs, x, x)
        assert contents(cache) == before
    cache.append([fork, a], new[:2, :, :2], new[:2, :, :2])  # one copy is all it takes
    assert cache.free_pages == 1
    with pytest.raises(MemoryError):
        cache.append([fork, a], new[:2, :, :1], new[:2, :, :1])
    cache.append([a], new[:1, :, :4], new[:1, :, :4])
    assert cache.free_pages == 0 and cache.length(a) == 16


def test_section_6_unknown_ids():
    cache, (a, b) = filled([3, 3])
    cache.free(b)
    before, x = contents(cache), np.zeros((2, 2, 1, 4))
    for call in (
        lambda seq: cache.length(seq), lambda seq: cache.free(seq), lambda seq: cache.fork(seq),
        lambda seq: cache.append([a, seq], x, x), lambda seq: cache.attend([a, seq], x),
    ):  # fmt: skip
        for seq in (b, 99, -1, "a", None):
            with pytest.raises(KeyError, match="seq: expected the id"):
                call(seq)
    assert contents(cache) == before
    assert cache.add_sequence() not in (a, b)


X = np.zeros((2, 2, 3, 4), np.float32)
P = np.zeros((6, 2, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "name"),
    [
        ((-1, 1, 1, 1), {}, ValueError, "n_pages"),
        ((1, 0, 1, 1), {}, ValueError, "page_size"),
        ((1, 1.5, 1, 1), {}, TypeError, "page_size"),
        ((1, 1, None, 1), {}, TypeError, "n_kv_heads"),
        ((1, 1, 1, -1), {}, ValueError, "d_k"),
        ((1, 1, 1, 1), {"dtype": np.uint8}, TypeError, "dtype"),
    ],
)
def test_section_7_wrong_caches(arguments, options, kind, name):
    with pytest.raises(kind, match=f"^{name}: expected"):
        PagedKVCache(*arguments, **options)


@pytest.mark.parametrize(
    ("k", "v", "cu", "kind", "name"),
    [
        (X[:1], X, None, ValueError, "k"),
        (X[:, :1], X, None, ValueError, "k"),
        (X, X[:, :, :1], None, ValueError, "v"),
        (X.astype(int), X, None, TypeError, "k"),
        (P, P, None, ValueError, "k"),
        (X, X, [0, 3, 6], ValueError, "k"),
        (P, P[:5], [0, 3, 6], ValueError, "v"),
        (P, P, [0, 3], ValueError, "cu_seqlens"),
        (P, P, [0, 3, 7], ValueError, "cu_seqlens"),
        (P, P, [1, 3, 6], ValueError, "cu_seqlens"),
        (P, P, [0, 3, 2], ValueError, "cu_seqlens"),
        (P, P, [0.0, 3.0, 6.0], TypeError, "cu_seqlens"),
        (P, P, np.array([0, 3, 6], np.int16), TypeError, "cu_seqlens"),
    ],
)
def test_section_7_wrong_appends_change_nothing(k, v, cu, kind, name):
    cache, seqs = filled([5, 6])
    before = contents(cache)
    with pytest.raises(kind, match=f"^{name}: expected"):
        cache.append(seqs, k, v, cu_seqlens=cu)
    assert contents(cache) == before


def test_section_7_wrong_ids():
    cache, (a, b) = filled([5, 6])
    with pytest.raises(ValueError, match=r"^seqs: expected ids that are all different"):
        cache.append([a, a], X, X)
    with pytest.raises(TypeError, match=r"^seqs: expected"):
        cache.append(a, X[:1], X[:1])
    with pytest.raises(ValueError, match=r"^k: expected"):
        cache.append([a, b, cache.add_sequence()], X, X)


@pytest.mark.parametrize(
    ("q", "options", "kind", "name"),
    [
        (X[:1], {}, ValueError, "q"),
        (np.zeros((2, 3, 1, 4)), {}, ValueError, "q"),
        (X[..., :2], {}, ValueError, "q"),
        (X.astype(int), {}, TypeError, "q"),
        (P, {}, ValueError, "q"),
        (X, {"mask": np.ones(5, bool)}, ValueError, "mask"),
        (X, {"layout": "LBHD"}, ValueError, "layout"),
        (X, {"scale": np.nan}, ValueError, "scale"),
        (X, {"out": np.empty((2, 2, 3, 3), np.float32)}, ValueError, "out"),
        (X, {"cu_seqlens": [0, 1, 2]}, ValueError, "q"),
        (P[:, :, :3], {"cu_seqlens": [0, 1, 2]}, ValueError, "q"),
        (P, {"cu_seqlens": [0, 1]}, ValueError, "cu_seqlens"),
        (P, {"cu_seqlens": [0, 1, 9]}, ValueError, "cu_seqlens"),
        (P, {"cu_seqlens": [0, 1, 2], "mask": np.ones(6, bool)}, ValueError, "mask"),
        (P, {"cu_seqlens": [0, 1, 2], "layout": "BLHD"}, ValueError, "layout"),
        (P, {"cu_seqlens": [0, 1, 2], "sinks": np.ones(3)}, ValueError, "sinks"),
        (P, {"cu_seqlens": [0, 1, 2], "dropout_p": -1.0}, ValueError, "dropout_p"),
        (P, {"cu_seqlens": [0, 1, 2], "out": np.empty((6, 2, 3), np.float32)}, ValueError, "out"),
        (P, {"cu_seqlens": [0, 1, 2], "out": P}, ValueError, "out"),
    ],
)
def test_section_7_wrong_queries(q, options, kind, name):
    cache, seqs = filled([5, 6])
    with pytest.raises(kind, match=f"^{name}: expected"):
        cache.attend(seqs, q, **options)


def test_contract_15_no_sequences_and_no_tokens():
    cache, seqs = filled([5, 0])
    assert cache.attend([], np.zeros((0, 2, 3, 4))).shape == (0, 2, 3, 4)
    assert cache.attend(seqs, np.zeros((2, 2, 0, 4))).shape == (2, 2, 0, 4)
    out, lse = cache.attend([], P, cu_seqlens=[0], return_lse=True)
    assert out.shape == (6, 2, 4) and not out.any() and (lse == -np.inf).all()
    with pytest.raises(ValueError, match=r"^sinks"):
        cache.attend([], P, cu_seqlens=[0], sinks=np.ones(3))
    cache.append([], np.zeros((0, 2, 3, 4)), np.zeros((0, 2, 3, 4)))
    cache.append(seqs, np.zeros((2, 2, 0, 4)), np.zeros((2, 2, 0, 4)))
    assert [cache.length(seq) for seq in seqs] == [5, 0]
    assert not cache.attend(seqs[1:], np.ones((1, 2, 2, 4))).any()
    assert PagedKVCache(0, 4, 1, 4).free_pages == 0


def test_the_kernels_refuse_tables_that_lead_outside():
    cache, seqs = filled([5, 6])
    held = cache._held([cache._sequences[seq] for seq in seqs])
    problem = _cached.ask(held, X)
    for row, entry, value in ((0, 0, -1), (1, 1, 100), (0, 1, 2**62)):
        table = held.table.copy()
        table[row, entry] = value
        with pytest.raises(ValueError, match="pages"):
            _cached.answer(held._replace(table=table), problem, None, False, False)
    for table in (held.table[:, :1].copy(), held.table[:1], held.table.ravel()[:3].copy()):
        with pytest.raises(ValueError, match="pages"):
            _cached.answer(held._replace(table=table), problem, None, False, False)


@pytest.mark.parametrize("dtype", STORED)
def test_c19_copies_share_nothing(dtype):
    rng = np.random.default_rng(6)
    cache, (a, b) = filled([10, 3], dtype=cache_dtype(dtype))
    c = cache.fork(a)
    q, x = draw(rng, 3, 2, 2, 4), draw(rng, 3, 2, 2, 4)
    out = cache.attend([a, b, c], q)
    copies = [copy.copy(cache), copy.deepcopy(cache)]
    copies += [pickle.loads(pickle.dumps(cache, n)) for n in range(2, 6)]
    cache.append([a, b, c], x, x)
    after = cache.attend([a, b, c], q)
    for other in copies:
        assert_same_bits(other.attend([a, b, c], q), out)
        other.append([a, b, c], x, x)
        assert_same_bits(other.attend([a, b, c], q), after)
        other.append([a, b, c], x * np.nan, x)
        assert other.add_sequence() == 3
    assert_same_bits(cache.attend([a, b, c], q), after)


# --- against a model ----------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """A cache, and lists of stored rows by id."""

    @initialize(
        heads=st.sampled_from([(1, 1), (4, 2)]),
        widths=st.sampled_from([(4, 4), (8, 5)]),
        stored=st.sampled_from(STORED),
        asked=st.sampled_from(ASKED),
        pages=st.sampled_from([(12, 4), (40, 1), (3, 96), (10, 13)]),
    )
    def make(self, heads, widths, stored, asked, pages):
        (self.H, self.G), (self.D, self.E) = heads, widths
        self.stored, self.asked = stored, asked
        self.cache = PagedKVCache(*pages, self.G, self.D, self.E, dtype=cache_dtype(stored))
        self.rng = np.random.default_rng(7)
        self.model = {}

    def chosen(self, data):
        """Some ids, all different."""
        return data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True)) if self.model else []

    def counts(self, seqs, data, packed):
        counts = st.sampled_from([0, 1, 1, 2, 5, 20])
        return [data.draw(counts) for _ in seqs] if packed else [data.draw(counts)] * len(seqs)

    def length(self, seq):
        k = self.model[seq][0]
        return (k[0] if isinstance(k, tuple) else k).shape[1]

    def pages(self, length):
        return -(-length // self.cache.page_size)

    @rule()
    def add(self):
        if len(self.model) < 6:
            widths = (self.D, self.E)
            nothing = [kept(np.zeros((self.G, 0, width), np.float32), self.stored) for width in widths]
            self.model[self.cache.add_sequence()] = nothing

    @rule(data=st.data())
    def fork(self, data):
        if self.model and len(self.model) < 6:
            seq = data.draw(st.sampled_from(sorted(self.model)))
            self.model[self.cache.fork(seq)] = list(self.model[seq])

    @rule(data=st.data())
    def free(self, data):
        if self.model:
            seq = data.draw(st.sampled_from(sorted(self.model)))
            self.cache.free(seq)
            del self.model[seq]

    @rule(data=st.data(), packed=st.booleans())
    def append(self, data, packed):
        seqs = self.chosen(data)
        counts = self.counts(seqs, data, packed)
        k, v = ([draw(self.rng, self.G, n, width) for n in counts] for width in (self.D, self.E))
        before = contents(self.cache)
        try:
            if packed:
                rows = [
                    np.concatenate([np.zeros((self.G, 0, width), np.float32), *x], 1).swapaxes(0, 1)
                    for x, width in ((k, self.D), (v, self.E))
                ]
                self.cache.append(seqs, *rows, cu_seqlens=np.cumsum([0, *counts]))
            elif seqs:
                self.cache.append(seqs, np.stack(k), np.stack(v))
        except MemoryError:
            assert contents(self.cache) == before
            # No more is asked for than pages of their own for all that is new.
            needed = [
                self.pages(self.length(seq) + n) - self.length(seq) // self.cache.page_size
                for seq, n in zip(seqs, counts, strict=True)
                if n
            ]
            assert sum(needed) > self.cache.free_pages
            return
        for seq, *new in zip(seqs, k, v, strict=True):
            new = [kept(x, self.stored) for x in new]
            self.model[seq] = [join(pair) for pair in zip(self.model[seq], new, strict=True)]

    @rule(deep=st.booleans())
    def replace(self, deep):
        self.cache = copy.deepcopy(self.cache) if deep else pickle.loads(pickle.dumps(self.cache))

    @rule(data=st.data(), packed=st.booleans(), options=st.sampled_from([{}, {"window": (3, 0)}]))
    def attend(self, data, packed, options):
        seqs = self.chosen(data)
        counts = self.counts(seqs, data, packed)
        q = [draw(self.rng, self.H, n, self.D, dtype=as_dtype(self.asked)) for n in counts]
        poison_unused(self.cache)
        if packed:
            empty = np.zeros((self.H, 0, self.D), as_dtype(self.asked))
            rows = np.concatenate([empty, *q], 1).swapaxes(0, 1)
            offsets = np.cumsum([0, *counts])
            out, lse = self.cache.attend(seqs, rows, cu_seqlens=offsets, return_lse=True, **options)
            parts = [slice(start, start + n) for start, n in zip(offsets[:-1], counts, strict=True)]
            found = [(out[p].swapaxes(0, 1), lse[:, p]) for p in parts]
        elif seqs:
            found = zip(*self.cache.attend(seqs, np.stack(q), return_lse=True, **options), strict=True)
        else:
            found = []
        for seq, x, pair in zip(seqs, q, found, strict=True):
            right = expected(x, *self.model[seq], **options)
            assert_same_bits(pair[0], right[0])
            assert_same_bits(pair[1], right[1])

    @invariant()
    def pages_add_up(self):
        if hasattr(self, "cache"):
            cache = self.cache
            assert {seq: cache.length(seq) for seq in self.model} == {s: self.length(s) for s in self.model}
            users = [0] * cache.n_pages
            for sequence in cache._sequences.values():
                assert sequence.used == self.pages(sequence.length)
                for page in sequence.pages.tolist():
                    users[page] += 1
            assert users == cache._users
            assert sorted(cache._free) == [page for page, n in enumerate(users) if not n]


TestMachine = Machine.TestCase
