"""`fastmha.KVCache`: contract section 6, by rule, against a model, and bit by bit."""

import copy
import itertools
import pickle

import numpy as np
import pytest
from caching import ASKED, STORED, cache_dtype, cut, draw, expected, join, kept, poison
from comparing import assert_same_bits, error
from drawing import FLOATS, as_dtype
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import fastmha
from fastmha import KVCache, _cached, attention

PARTS = [[200], [97, 1, 1, 95, 6], [1] * 200]


def poison_unused(cache):
    for store in (cache._k, cache._v):
        for b, length in enumerate(cache.lengths.tolist()):
            if cache.window is None:
                unused = np.arange(length, cache._slots)
            else:  # all but what the last append's tokens see
                last = int(np.broadcast_to(cache._last, cache.batch)[b])
                held = np.arange(max(0, length - last - cache.window), length)
                unused = np.setdiff1d(np.arange(cache._slots), held % max(1, cache._slots))
            poison(store, (b, slice(None), unused))


def contents(cache):
    """What is held, for comparisons."""
    found = [cache.lengths.tolist()]
    for store in (cache._k, cache._v):
        rows = [store.rows[b, :, :n].astype(np.float64) for b, n in enumerate(cache.lengths)]
        found += [x.tolist() for x in rows]
    return found


# --- the same bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", PARTS, ids=["whole", "chunks", "tokens"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("window", [None, (40, 0), (130, 0)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_section_4_cached_rows_are_rows_of_the_full_causal_call(dtype, window, alibi, threads, parts):
    rng = np.random.default_rng(1)
    q, k, v = (draw(rng, 2, heads, 200, 17, dtype=as_dtype(dtype)) for heads in (4, 2, 2))
    options = {"window": window, "alibi_slopes": fastmha.alibi_slopes(4) if alibi else None}
    full, lse = attention(q, k, v, causal=True, return_lse=True, **options)
    caches = [KVCache(2, 2, 17, dtype=as_dtype(dtype))]
    if window:
        caches.append(KVCache(2, 2, 17, dtype=as_dtype(dtype), window=window[0]))
    with fastmha.num_threads(threads):
        for cache in caches:
            done = 0
            for n in parts:
                new = slice(done, done + n)
                cache.append(k[:, :, new], v[:, :, new])
                poison_unused(cache)
                out = cache.attend(q[:, :, new], return_lse=True, **options)
                assert_same_bits(out[0], full[:, :, new])
                assert_same_bits(out[1], lse[:, :, new])
                done += n


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (6, 1)])
def test_section_4_members_of_any_lengths(heads):
    rng, (H, G) = np.random.default_rng(2), heads
    lengths = np.array([100, 0, 193, 1])
    q, k, v = (draw(rng, 4, n, 193, 24) for n in (H, G, G))
    cache = KVCache(4, G, 24)
    k[1] = v[3, :, 1:] = np.nan
    cache.append(k, v, lengths=lengths)
    poison_unused(cache)
    out, lse = cache.attend(q, lengths=lengths, return_lse=True)
    for b, n in enumerate(lengths):
        alone = expected(q[b, :, :n], k[b, :, :n], v[b, :, :n])
        assert_same_bits(out[b, :, :n], alone[0])
        assert_same_bits(lse[b, :, :n], alone[1])
        assert not out[b, :, n:].any() and (lse[b, :, n:] == -np.inf).all()
    # Without lengths, the queries of every member are its last.
    out = cache.attend(q[:, :, :3])
    for b, n in enumerate(lengths):
        assert_same_bits(out[b], expected(q[b, :, :3], k[b, :, :n], v[b, :, :n])[0])


OPTIONS = {
    "scale": 0.3,
    "softcap": 2.0,
    "sinks": np.array([0.5, -1.0, 2.0, 0.0]),
    "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0]),
    "window": (3, 0),
    "mask": np.arange(9) % 3 != 1,
    "bias": np.cos(np.arange(4 * 5 * 9)).reshape(4, 5, 9),
    "dropout": 0.4,
}


@pytest.mark.parametrize("ring", [None, 20])
@pytest.mark.parametrize("name", OPTIONS)
def test_section_6_options_of_attention(name, ring):
    rng = np.random.default_rng(3)
    q, k, v = (draw(rng, 2, heads, 9, 8) for heads in (4, 2, 2))
    options = {name: OPTIONS[name]}
    if name == "dropout":
        options = {"dropout_p": 0.4, "rng": 7}
    elif name == "bias":
        options = {"mask": OPTIONS["bias"]}
    cache = KVCache(2, 2, 8, window=ring)
    cache.append(k[:, :, :4], v[:, :, :4])
    cache.append(k[:, :, 4:], v[:, :, 4:])
    whole = attention(q[:, :, 4:], k, v, causal="bottom-right", return_lse=True, **options)
    out, lse = cache.attend(q[:, :, 4:], return_lse=True, **options)
    assert_same_bits(out, whole[0])
    assert_same_bits(lse, whole[1])
    swapped = cache.attend(q[:, :, 4:].swapaxes(1, 2), layout="BLHD", **options)
    assert_same_bits(swapped.swapaxes(1, 2), out)
    target = np.empty_like(out)
    assert cache.attend(q[:, :, 4:], out=target, **options) is target
    assert_same_bits(target, out)
    if name != "dropout":
        weights = cache.weights(q[:, :, 4:], **options)
        plain = fastmha.attention_weights(q[:, :, 4:], k, causal="bottom-right", **options)
        assert_same_bits(weights, plain)


def test_rule_3_13_a_drawn_seed_leaves_no_trace():
    cache = KVCache(1, 1, 4)
    cache.append(np.ones((1, 1, 50, 4)), np.ones((1, 1, 50, 4)))
    q = np.ones((1, 1, 50, 4))
    np.random.seed(0)  # noqa: NPY002
    state = np.random.get_state()[1].tolist()  # noqa: NPY002
    assert not np.array_equal(cache.attend(q, dropout_p=0.5), cache.attend(q, dropout_p=0.5))
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


# --- dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("stored", STORED)
def test_section_6_any_query_asks_any_storage(stored, asked, given):
    rng = np.random.default_rng(4)
    k, v = (draw(rng, 2, 2, 101, n, dtype=as_dtype(given)) for n in (33, 16))
    q = draw(rng, 2, 4, 3, 33, dtype=as_dtype(asked))
    cache = KVCache(2, 2, 33, 16, dtype=cache_dtype(stored))
    cache.append(k[:, :, :100], v[:, :, :100])
    cache.append(k[:, :, 100:], v[:, :, 100:])
    poison_unused(cache)
    out, lse = cache.attend(q, return_lse=True)
    for b in range(2):
        alone = expected(q[b], kept(k[b], stored), kept(v[b], stored))
        assert_same_bits(out[b], alone[0])
        assert_same_bits(lse[b], alone[1])


@pytest.mark.parametrize("D", [64, 128])
def test_issue_5_int8_is_close(D):
    rng = np.random.default_rng(5)
    q, k, v = (draw(rng, 2, heads, 700, D) for heads in (4, 2, 2))
    caches = [KVCache(2, 2, D, dtype=dtype) for dtype in (np.float32, "int8")]
    for cache in caches:
        cache.append(k, v)
    exact, coarse = (cache.attend(q) for cache in caches)
    assert np.linalg.norm(coarse - exact) / np.linalg.norm(exact) < 0.012
    exact, coarse = (cache.attend(q[:, :, -1:]) for cache in caches)
    assert np.linalg.norm(coarse - exact) / np.linalg.norm(exact) < 0.012


def test_section_6_int8_rows_of_zeros_and_of_nan():
    k = np.zeros((1, 1, 5, 4), np.float32)
    v = np.array([[0, 0], [1, -127], [np.nan, 1], [np.inf, 1], [1e-45, 1e-44]], np.float32)
    cache = KVCache(1, 1, 4, 2, dtype="int8")
    cache.append(k, v[None, None])
    q = np.zeros((1, 1, 1, 4), np.float32)
    rows = [cache.attend(q, mask=np.arange(5) == j).ravel().tolist() for j in range(5)]
    assert rows[0] == [0, 0] and rows[1] == [1, -127]
    assert np.isnan(rows[2]).all() and np.isnan(rows[3]).all()
    assert np.isfinite(rows[4]).all() and np.abs(rows[4]).max() < 1e-40


def test_section_6_int8_of_float64_beyond_float32_saturates():
    cache = KVCache(1, 1, 1, dtype="int8")
    cache.append(np.zeros((1, 1, 1, 1)), np.full((1, 1, 1, 1), 1e300))
    assert np.isfinite(cache.attend(np.zeros((1, 1, 1, 1)))).all()


def test_a35_too_large_for_half_is_infinite():
    cache = KVCache(1, 1, 1, dtype=np.float16)
    cache.append(np.zeros((1, 1, 1, 1), np.float32), np.full((1, 1, 1, 1), 1e6, np.float32))
    assert cache.attend(np.zeros((1, 1, 1, 1), np.float32)).item() == np.inf


# --- growth, bounds, copies ---------------------------------------------------------------------------


def test_issue_5_appending_a_token_copies_no_cache(monkeypatch):
    sizes = []
    make = _cached.empty_store
    monkeypatch.setattr(
        _cached, "empty_store", lambda shape, dtype: sizes.append(shape[2]) or make(shape, dtype)
    )
    cache, token = KVCache(1, 1, 2), np.ones((1, 1, 1, 2), np.float32)
    for _ in range(5000):
        cache.append(token, token)
    assert len(sizes) <= 2 * (2 + np.log2(5000)) and sum(sizes) < 2 * 4 * 5000
    sizes.clear()
    ring = KVCache(1, 1, 2, window=300)
    for _ in range(5000):
        ring.append(token, token)
    assert max(sizes) <= 300 + 2 * 96 and len(sizes) <= 12
    sizes.clear()
    fixed = KVCache(1, 1, 2, capacity=500)
    made = len(sizes)
    for _ in range(500):
        fixed.append(token, token)
    assert len(sizes) == made


def test_section_6_a_ring_shrinks_after_a_long_prompt():
    rng = np.random.default_rng(6)
    q, k, v = (draw(rng, 1, 1, 4000, 4) for _ in range(3))
    cache = KVCache(1, 1, 4, window=10)
    whole = attention(q, k, v, causal=True, window=(10, 0))
    cache.append(k[:, :, :3990], v[:, :, :3990])
    assert_same_bits(cache.attend(q[:, :, :3990]), whole[:, :, :3990])
    large = cache.nbytes
    for t in range(3990, 4000):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        assert_same_bits(cache.attend(q[:, :, t : t + 1]), whole[:, :, t : t + 1])
    assert cache.nbytes < large / 10


@pytest.mark.parametrize("window", [None, 4])
def test_a35_at_and_past_capacity(window):
    rng = np.random.default_rng(7)
    k, v = draw(rng, 2, 1, 9, 3), draw(rng, 2, 1, 9, 3)
    cache = KVCache(2, 1, 3, capacity=8, window=window)
    with pytest.raises(ValueError, match=r"^k: expected at most capacity=8 .*got 9"):
        cache.append(k, v)
    assert cache.lengths.tolist() == [0, 0]
    cache.append(k, v, lengths=[8, 2])
    before, generation = contents(cache), cache.generation
    new = slice(0, 5 if window else 1)
    with pytest.raises(ValueError, match="capacity"):
        cache.append(k[:, :, new], v[:, :, new])
    with pytest.raises(ValueError, match="capacity"):
        cache.append(k[:, :, :6], v[:, :, :6], lengths=[5, 6])
    assert contents(cache) == before and cache.generation == generation
    cache.append(k[:, :, :5], v[:, :, :5], lengths=[0, 5])
    assert cache.lengths.tolist() == [8, 7]


def test_a35_appending_copies():
    k = np.ones((1, 1, 2, 4))
    cache = KVCache(1, 1, 4, dtype=np.float64)
    cache.append(k, k)
    k[:] = np.nan
    assert cache.attend(np.ones((1, 1, 1, 4))).ravel().tolist() == [1, 1, 1, 1]
    lengths = cache.lengths
    lengths[:] = 99
    assert cache.lengths.tolist() == [2]


@pytest.mark.parametrize("window", [None, 7])
def test_a35_reset_is_as_fresh(window):
    rng = np.random.default_rng(8)
    q, k, v = (draw(rng, 1, 1, 30, 4) for _ in range(3))
    cache, fresh = KVCache(1, 1, 4, window=window), KVCache(1, 1, 4, window=window)
    cache.append(np.full_like(k, np.nan), np.full_like(v, np.nan))
    cache.reset()
    assert cache.lengths.tolist() == [0]
    for c in (cache, fresh):
        c.append(k[:, :, :20], v[:, :, :20])
    assert_same_bits(cache.attend(q[:, :, :20]), fresh.attend(q[:, :, :20]))


def test_section_6_truncate():
    rng = np.random.default_rng(9)
    q, k, v = (draw(rng, 3, 1, 9, 4) for _ in range(3))
    cache = KVCache(3, 1, 4)
    cache.append(k, v, lengths=[9, 5, 2])
    cache.truncate(5)
    assert cache.lengths.tolist() == [5, 5, 2]
    cache.truncate([5, 0, 1])
    assert cache.lengths.tolist() == [5, 0, 1]
    poison_unused(cache)
    cache.append(k[:, :, :1], v[:, :, :1])
    out = cache.attend(q[:, :, :1])
    joined = np.concatenate([k[0, :, :5], k[0, :, :1]], 1), np.concatenate([v[0, :, :5], v[0, :, :1]], 1)
    assert_same_bits(out[0], expected(q[0, :, :1], *joined)[0])
    for n, kind in (
        (7, ValueError),
        (-1, ValueError),
        (True, TypeError),
        (1.0, TypeError),
        (None, TypeError),
    ):
        with pytest.raises(kind, match=r"^n: expected"):
            cache.truncate(n)
    for n, kind in (([6, 1, 3], ValueError), ([6, 1], ValueError), ([1.0, 1.0, 1.0], TypeError)):
        with pytest.raises(kind, match=r"^n: expected"):
            cache.truncate(n)
    assert cache.lengths.tolist() == [6, 1, 2]
    with pytest.raises(ValueError, match="window"):
        KVCache(1, 1, 4, window=3).truncate(0)


def test_section_6_a_ring_answers_for_the_last_append():
    token = np.ones((1, 1, 3, 4), np.float32)
    cache = KVCache(1, 1, 4, window=5)
    with pytest.raises(ValueError, match=r"^q: expected at most the 0 tokens"):
        cache.attend(token)
    cache.append(token, token)
    cache.append(token[:, :, :2], token[:, :, :2])
    with pytest.raises(ValueError, match=r"^q: expected at most the 2 tokens"):
        cache.attend(token)
    with pytest.raises(ValueError, match=r"^window: expected at most the 5"):
        cache.attend(token[:, :, :2], window=(6, 0))
    with pytest.raises(ValueError, match=r"^window"):
        cache.weights(token[:, :, :2], window=(-1, 0))
    assert cache.weights(token[:, :, :2], window=(2, -1)).shape == (1, 1, 2, 5)
    assert cache.attend(token, lengths=[2]).shape == (1, 1, 3, 4)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("kind", [None, "window", "capacity"])
def test_c19_copies_share_nothing(dtype, kind):
    rng = np.random.default_rng(10)
    q, k, v = (draw(rng, 2, 2, 40, 8) for _ in range(3))
    options = {} if kind is None else {kind: 50}
    cache = KVCache(2, 2, 8, dtype=cache_dtype(dtype), **options)
    cache.append(k, v, lengths=[40, 13])
    out = cache.attend(q, lengths=[40, 13])
    makers = [copy.copy, copy.deepcopy]
    makers += [lambda c, n=n: pickle.loads(pickle.dumps(c, n)) for n in range(2, 6)]
    copies = [make(cache) for make in makers]
    cache.append(k[:, :, :3], v[:, :, :3])
    after = cache.attend(q[:, :, :3])
    for other in copies:
        assert other.lengths.tolist() == [40, 13]
        assert_same_bits(other.attend(q, lengths=[40, 13]), out)
        other.append(k[:, :, :3], v[:, :, :3])
        assert_same_bits(other.attend(q[:, :, :3]), after)
        other.append(k[:, :, :3] * np.nan, v[:, :, :3])
    assert_same_bits(cache.attend(q[:, :, :3]), after)
    if kind == "capacity":
        with pytest.raises(ValueError, match="capacity"):
            copies[1].append(k, v)


def test_section_6_generation_rises_with_every_change():
    cache, token = KVCache(1, 1, 4), np.ones((1, 1, 1, 4))
    seen = [cache.generation]
    for change in (
        lambda: cache.append(token, token), lambda: cache.truncate(0),
        lambda: cache.append(token, token), cache.reset,
    ):  # fmt: skip
        change()
        seen.append(cache.generation)
    assert seen == sorted(set(seen))
    cache.attend(token)
    assert cache.generation == seen[-1]


def test_contract_15_zero_sizes():
    for batch, heads, D, E, n in itertools.product((0, 1), (0, 2), (0, 3), (0, 3), (0, 2)):
        for window in (None, 4):
            cache = KVCache(batch, heads, D, E, window=window)
            cache.append(np.zeros((batch, heads, n, D)), np.zeros((batch, heads, n, E)))
            out = cache.attend(np.zeros((batch, heads, n, D)), scale=1.0)
            assert out.shape == (batch, heads, n, E) and not out.any()
    assert KVCache(1, 1, 3).attend(np.ones((1, 1, 2, 3))).tolist() == [[[[0, 0, 0]] * 2]]


# --- errors -------------------------------------------------------------------------------------------

K = np.zeros((2, 2, 3, 4), np.float32)
Q = np.zeros((2, 4, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "name"),
    [
        ((-1, 1, 1), {}, ValueError, "batch"),
        ((1.0, 1, 1), {}, TypeError, "batch"),
        ((True, 1, 1), {}, TypeError, "batch"),
        ((1, -2, 1), {}, ValueError, "n_kv_heads"),
        ((1, 1, "4"), {}, TypeError, "d_k"),
        ((1, 1, 1, -1), {}, ValueError, "d_v"),
        ((1, 1, 1), {"capacity": -1}, ValueError, "capacity"),
        ((1, 1, 1), {"capacity": 2.5}, TypeError, "capacity"),
        ((1, 1, 1), {"window": -1}, ValueError, "window"),
        ((1, 1, 1), {"window": (3, 0)}, TypeError, "window"),
        ((1, 1, 1), {"dtype": np.int32}, TypeError, "dtype"),
        ((1, 1, 1), {"dtype": "int4"}, TypeError, "dtype"),
        ((1, 1, 1), {"dtype": complex}, TypeError, "dtype"),
    ],
)
def test_section_7_wrong_caches(arguments, options, kind, name):
    with pytest.raises(kind, match=f"^{name}: expected"):
        KVCache(*arguments, **options)


@pytest.mark.parametrize(
    ("k", "v", "lengths", "kind", "name"),
    [
        (K[:1], K, None, ValueError, "k"),
        (K[:, :1], K, None, ValueError, "k"),
        (K[..., :3], K, None, ValueError, "k"),
        (K[0], K, None, ValueError, "k"),
        (K, K[:, :, :2], None, ValueError, "v"),
        (K, K[..., :3], None, ValueError, "v"),
        (K.astype(int), K, None, TypeError, "k"),
        (K, K.astype(complex), None, TypeError, "v"),
        (K, np.ma.array(K), None, TypeError, "v"),
        (K, K, [3, 4], ValueError, "lengths"),
        (K, K, [3], ValueError, "lengths"),
        (K, K, [-1, 3], ValueError, "lengths"),
        (K, K, [1.0, 2.0], TypeError, "lengths"),
    ],
)
@pytest.mark.parametrize("window", [None, 4])
def test_section_7_wrong_appends_change_nothing(k, v, lengths, kind, name, window):
    cache = KVCache(2, 2, 4, window=window)
    cache.append(K + 1, K + 2)
    before, generation = contents(cache), cache.generation
    with pytest.raises(kind, match=f"^{name}: expected"):
        cache.append(k, v, lengths=lengths)
    assert contents(cache) == before and cache.generation == generation


@pytest.mark.parametrize(
    ("q", "options", "kind", "name"),
    [
        (Q[:1], {}, ValueError, "q"),
        (Q[:, :3], {}, ValueError, "q"),
        (Q[..., :3], {}, ValueError, "q"),
        (Q[0], {}, ValueError, "q"),
        (Q.astype(int), {}, TypeError, "q"),
        (Q, {"lengths": [4, 1]}, ValueError, "lengths"),
        (Q, {"lengths": [1]}, ValueError, "lengths"),
        (Q, {"mask": np.ones(4, bool)}, ValueError, "mask"),
        (Q, {"mask": np.ones(3, int)}, TypeError, "mask"),
        (Q, {"scale": np.inf}, ValueError, "scale"),
        (Q, {"softcap": -1}, ValueError, "softcap"),
        (Q, {"sinks": np.ones(3)}, ValueError, "sinks"),
        (Q, {"alibi_slopes": np.ones(2)}, ValueError, "alibi_slopes"),
        (Q, {"window": (-2, 0)}, ValueError, "window"),
        (Q, {"dropout_p": 2.0}, ValueError, "dropout_p"),
        (Q, {"rng": -1}, ValueError, "rng"),
        (Q, {"layout": "BDLH"}, ValueError, "layout"),
        (Q, {"layout": "BLHD"}, ValueError, "q"),
        (Q, {"out": np.empty((2, 4, 3, 5), np.float32)}, ValueError, "out"),
        (Q, {"out": np.empty((2, 4, 3, 4))}, TypeError, "out"),
        (Q, {"out": Q}, ValueError, "out"),
    ],
)
def test_section_7_wrong_queries(q, options, kind, name):
    cache = KVCache(2, 2, 4)
    cache.append(K, K)
    with pytest.raises(kind, match=f"^{name}: expected"):
        cache.attend(q, **options)


@pytest.mark.parametrize("window", [None, 10])
def test_a9_nothing_unused_has_influence(window):
    rng = np.random.default_rng(11)
    for dtype in STORED:
        q, k, v = (draw(rng, 2, 2, 300, 16) for _ in range(3))
        cache = KVCache(2, 2, 16, dtype=cache_dtype(dtype), window=window)
        cache.append(k, v, lengths=[300, 40])
        cache.append(k[:, :, :5], v[:, :, :5], lengths=[2, 5])
        results = []
        for spoil in (lambda: None, lambda: poison_unused(cache)):  # noqa: B023
            spoil()
            results.append(cache.attend(q[:, :, :5], lengths=[2, 5]))
        assert_same_bits(*results)
        assert np.isfinite(results[1].astype(np.float64)).all()


def test_contract_14_strides_of_what_is_appended():
    rng = np.random.default_rng(12)
    x = draw(rng, 2, 7, 3, 2, 8)  # (B, L, 3, G, D)
    q, k, v = (x[:, :, i].swapaxes(1, 2) for i in range(3))
    for dtype in STORED:
        results = []
        for copied in (False, True):
            cache = KVCache(2, 2, 8, dtype=cache_dtype(dtype))
            a, b, c = (np.ascontiguousarray(y) if copied else y for y in (q, k, v))
            cache.append(b, c, lengths=[7, 6])
            cache.append(b[:, :, ::-1], c[..., ::-1])
            results.append(cache.attend(a))
        assert_same_bits(*results)


# --- against a model ----------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """A cache, and lists of stored rows."""

    @initialize(
        batch=st.integers(1, 3),
        heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
        widths=st.sampled_from([(4, 4), (8, 5), (33, 16)]),
        stored=st.sampled_from(STORED),
        asked=st.sampled_from(ASKED),
        window=st.sampled_from([None, None, 0, 3, 30]),
        capacity=st.sampled_from([None, None, 40]),
    )
    def make(self, batch, heads, widths, stored, asked, window, capacity):
        self.batch, (self.H, self.G), (self.D, self.E) = batch, heads, widths
        self.stored, self.asked, self.window, self.capacity = stored, asked, window, capacity
        self.cache = KVCache(
            batch, self.G, self.D, self.E, capacity=capacity, window=window, dtype=cache_dtype(stored)
        )
        self.rng = np.random.default_rng(13)
        self.model = [self.nothing() for _ in range(batch)]
        self.last = [0] * batch

    def nothing(self):
        return [kept(np.zeros((self.G, 0, width), np.float32), self.stored) for width in (self.D, self.E)]

    def lengths(self):
        return [(k[0] if isinstance(k, tuple) else k).shape[1] for k, _ in self.model]

    @rule(
        n=st.sampled_from([0, 1, 1, 1, 2, 7, 30]),
        shares=st.none() | st.lists(st.floats(0, 1), min_size=3, max_size=3),
    )
    def append(self, n, shares):
        k, v = (draw(self.rng, self.batch, self.G, n, width) for width in (self.D, self.E))
        taken = [n] * self.batch if shares is None else [round(n * s) for s in shares[: self.batch]]
        for b, m in enumerate(taken):
            k[b, :, m:] = v[b, :, m:] = np.nan
        room = [
            (length if self.window is None else min(length, self.window)) + m
            for length, m in zip(self.lengths(), taken, strict=True)
        ]
        arguments = {} if shares is None else {"lengths": taken}
        if self.capacity is not None and max(room) > self.capacity:
            with pytest.raises(ValueError, match="capacity"):
                self.cache.append(k, v, **arguments)
            return
        self.cache.append(k, v, **arguments)
        for b, m in enumerate(taken):
            new = kept(k[b, :, :m], self.stored), kept(v[b, :, :m], self.stored)
            self.model[b] = [join(pair) for pair in zip(self.model[b], new, strict=True)]
        self.last = taken

    @rule(n=st.integers(0, 40))
    def truncate(self, n):
        most = max(self.lengths())
        if self.window is not None or n > most:
            with pytest.raises(ValueError):
                self.cache.truncate(n)
            return
        self.cache.truncate(n)
        self.model = [[cut(x, slice(0, n)) for x in pair] for pair in self.model]

    @rule(shares=st.lists(st.floats(0, 1), min_size=3, max_size=3))
    def truncate_each(self, shares):
        if self.window is None:
            n = [round(length * s) for length, s in zip(self.lengths(), shares, strict=False)]
            self.cache.truncate(n)
            self.model = [[cut(x, slice(0, m)) for x in pair] for m, pair in zip(n, self.model, strict=True)]

    @rule()
    def reset(self):
        self.cache.reset()
        self.model, self.last = [self.nothing() for _ in range(self.batch)], [0] * self.batch

    @rule(deep=st.booleans())
    def replace(self, deep):
        self.cache = copy.deepcopy(self.cache) if deep else pickle.loads(pickle.dumps(self.cache))

    @rule(
        n=st.sampled_from([1, 1, 2, 5, 30]),
        ragged=st.booleans(),
        options=st.sampled_from([{}, {"softcap": 3.0}, {"window": (2, 0)}, {"scale": -0.2}]),
    )
    def attend(self, n, ragged, options):
        asked = [min(n, last) for last in self.last] if ragged or self.window is not None else None
        if self.window is not None and options.get("window", (0,))[0] > self.window:
            options = {}
        q = draw(self.rng, self.batch, self.H, n, self.D, dtype=as_dtype(self.asked))
        poison_unused(self.cache)
        arguments = {} if asked is None else {"lengths": asked}
        out, lse = self.cache.attend(q, return_lse=True, **arguments, **options)
        if self.window is not None and "window" not in options:
            options = {**options, "window": (self.window, 0)}
        for b, (k, v) in enumerate(self.model):
            m = n if asked is None else asked[b]
            right = expected(q[b, :, :m], k, v, **options)
            assert_same_bits(out[b, :, :m], right[0])
            assert_same_bits(lse[b, :, :m], right[1])
            assert not out[b, :, m:].any() and (lse[b, :, m:] == -np.inf).all()

    @invariant()
    def lengths_agree(self):
        if hasattr(self, "cache"):
            assert self.cache.lengths.tolist() == self.lengths()


TestMachine = Machine.TestCase


def test_the_model_of_int8_is_close():
    rng = np.random.default_rng(14)
    x = draw(rng, 3, 50, 16)
    rows, scales = kept(x, "int8")
    assert error(rows * scales, x) < 0.5 / 127 + 1e-6
