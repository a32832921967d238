"""The class: section 2 of the contract, and cases A5, A8, A20, A28, A30, A33, A37, A38e and C19."""

import copy
import pickle
import threading
import tracemalloc

import numpy as np
import pytest

from fastmha import reference, weights
from fastmha.functional import attention, attention_weights
from fastmha.multihead import MultiHeadAttention
from fastmha.rope import Rope, alibi_slopes

DTYPES = ["float64", "float32", "float16", "bfloat16"]
NAMES = ["Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo", "bo"]


def as_dtype(name):
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


def tokens(B=2, L=5, d=12, seed=0):
    return np.random.default_rng(seed).normal(size=(B, L, d))


def close(actual, desired, tolerance=1e-12):
    assert np.shape(actual) == np.shape(desired)
    actual, desired = np.asarray(actual, np.float64), np.asarray(desired, np.float64)
    assert np.abs(actual - desired).max(initial=0) <= tolerance * np.abs(desired).max(initial=0)


def filled(layer, seed=7):
    """The layer, its biases no longer 0."""
    rng = np.random.default_rng(seed)
    for b in (layer.bq, layer.bk, layer.bv, layer.bo):
        b[...] = rng.normal(size=b.shape)
    return layer


class Textbook:
    """The class that people learn from."""

    def __init__(self, d_model, n_heads, seed=0):
        self.d_model, self.n_heads, self.d_k = d_model, n_heads, d_model // n_heads
        rng, s = np.random.default_rng(seed), 1 / np.sqrt(d_model)
        self.Wq, self.bq = rng.normal(0, s, (d_model, d_model)), np.zeros(d_model)
        self.Wk, self.bk = rng.normal(0, s, (d_model, d_model)), np.zeros(d_model)
        self.Wv, self.bv = rng.normal(0, s, (d_model, d_model)), np.zeros(d_model)
        self.Wo, self.bo = rng.normal(0, s, (d_model, d_model)), np.zeros(d_model)

    def parameters(self):
        return [self.Wq, self.bq, self.Wk, self.bk, self.Wv, self.bv, self.Wo, self.bo]

    def _split_heads(self, x):
        B, L, _ = x.shape
        return x.reshape(B, L, self.n_heads, self.d_k).transpose(0, 2, 1, 3)

    def forward(self, x, causal=False):
        B, L, _ = x.shape
        q = self._split_heads(x @ self.Wq + self.bq)
        k = self._split_heads(x @ self.Wk + self.bk)
        v = self._split_heads(x @ self.Wv + self.bv)
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(self.d_k)
        if causal:
            scores = np.where(np.tril(np.ones((L, L), bool)), scores, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        self.attn = e / e.sum(-1, keepdims=True)
        out = (self.attn @ v).transpose(0, 2, 1, 3).reshape(B, L, self.d_model)
        return out @ self.Wo + self.bo

    __call__ = forward


# --- the drop-in: rules 2.1 to 2.8


@pytest.mark.parametrize("seed", [0, 7])
def test_rule_2_1_weights_are_bit_identical(seed):
    ours, book = MultiHeadAttention(24, 4, seed), Textbook(24, 4, seed)
    for name in NAMES:
        assert np.array_equal(getattr(ours, name), getattr(book, name))
        assert getattr(ours, name).dtype == np.float64
    assert np.array_equal(MultiHeadAttention(24, 4).Wq, Textbook(24, 4).Wq)


@pytest.mark.parametrize("name", ["W_q", "W_Q", "wq", "w_o", "WV", "b_q", "B_k"])
def test_a_weight_by_another_name_is_not_taken_in_silence(name):
    layer = MultiHeadAttention(8, 2)
    ours = name[0].upper().replace("B", "b") + name[-1].lower()
    with pytest.raises(AttributeError, match=f"^{name}: expected {ours}"):
        setattr(layer, name, getattr(layer, ours))

    class Other(MultiHeadAttention):
        pass

    setattr(Other, name, property(lambda self: 0, lambda self, x: setattr(self, ours, x)))
    other = Other(8, 2)
    setattr(other, name, 2 * getattr(layer, ours))
    assert np.array_equal(getattr(other, ours), 2 * getattr(layer, ours))
    layer.w_quality = layer.bk = np.ones(8)  # names of other things, and the true ones


def test_rule_2_1_parameters_may_be_assigned_and_edited():
    ours, book = MultiHeadAttention(24, 4, 7), Textbook(24, 4, 7)
    x = tokens(d=24)
    ours(x)
    for layer in (ours, book):
        layer.Wv = layer.Wv + 1
        layer.Wq[:, 0] = 2
        layer.bo[:] = 3
    close(ours(x), book(x))
    ours.Wk = ours.Wk.astype(np.float32)  # another dtype, other strides: values count
    book.Wk = ours.Wk.astype(np.float64)
    ours.Wo = np.asfortranarray(ours.Wo)
    ours.bq, book.bq = [1] * 24, np.ones(24)
    close(ours(x), book(x))


def test_rule_2_2_parameters():
    layer = MultiHeadAttention(24, 4)
    assert all(x is getattr(layer, n) for x, n in zip(layer.parameters(), NAMES, strict=True))
    for n_heads in (1, 8, 64):
        layer = MultiHeadAttention(512, n_heads)
        assert sum(x.size for x in layer.parameters()) == 4 * 512**2 + 4 * 512 == 1050624


def test_rule_2_3_attributes_and_split_heads():
    layer = MultiHeadAttention(24, 4)
    assert (layer.d_model, layer.n_heads, layer.d_k) == (24, 4, 6)
    x = tokens(d=24)
    assert np.array_equal(layer._split_heads(x), Textbook(24, 4)._split_heads(x))


def test_rule_2_3_subclasses_may_override_split_heads():
    class Reversed(MultiHeadAttention):
        def _split_heads(self, x):
            return super()._split_heads(x)[:, ::-1]

    class Spelled(MultiHeadAttention):
        _split_heads = Textbook._split_heads

    x = tokens()
    plain, turned = MultiHeadAttention(12, 3, 1), Reversed(12, 3, 1)
    close(Spelled(12, 3, 1)(x, True), plain(x, True))
    heads = np.r_[8:12, 4:8, 0:4]
    turned.Wo = turned.Wo[heads]
    close(turned(x), plain(x))
    close(turned.attn, plain.attn[:, ::-1])


def test_rule_2_3_subclasses_may_bring_their_own_forward():
    class Own(MultiHeadAttention):
        def forward(self, x, causal=False):
            q, k = self._split_heads(x @ self.Wq), self._split_heads(x @ self.Wk)
            self.attn = attention_weights(q, k, causal=causal)
            return x

    own = Own(12, 3)
    assert own(tokens()) is not None
    close(own.attn.sum(-1), np.ones((2, 3, 5)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("B", "L", "d", "heads"), [(3, 7, 24, 4), (1, 1, 6, 6), (2, 70, 64, 1)])
def test_rule_2_4_and_2_5_results_of_the_textbook(B, L, d, heads, causal):
    ours, book = MultiHeadAttention(d, heads, 1), Textbook(d, heads, 1)
    x = tokens(B, L, d)
    out = ours.forward(x, causal)
    close(out, book.forward(x, causal))
    close(ours.attn, book.attn)
    assert out.flags.c_contiguous and out.flags.writeable and out.dtype == np.float64
    assert np.array_equal(ours(x, causal=causal), out)
    single = MultiHeadAttention(d, heads, 1, dtype=np.float32)
    close(single(x, causal), book(x, causal), 1e-5)
    assert single(x).dtype == np.float32


def test_rule_2_5_attn_before_a_call():
    layer = MultiHeadAttention(8, 2)
    with pytest.raises(AttributeError, match=r"attn.*call"):
        _ = layer.attn
    assert not hasattr(layer, "attn")


def test_rule_2_5_attn_is_of_that_call():
    layer, x = filled(MultiHeadAttention(12, 3)), tokens()
    layer(x, causal=True)
    expected = layer.attn.copy()
    assert layer.attn is layer.attn  # computed once
    layer(x, causal=True)
    x[:] = 0
    for p in layer.parameters():
        p[...] = 9
    layer.softcap, layer.window = 1.0, (0, 0)
    assert np.array_equal(layer.attn, expected)


def test_rule_2_5_nothing_of_size_L_x_S_is_allocated():
    L, H = 1024, 2
    layer, x = MultiHeadAttention(16, H, alibi=True), tokens(1, L, 16)
    mask, lengths = np.ones((1, 1, 1, L), bool), [L - 1]
    layer(x[:, :8])
    tracemalloc.start()
    try:
        layer(x, causal=True, mask=mask, lengths=lengths)
        forward = tracemalloc.get_traced_memory()[1]
        assert layer.attn.shape == (1, H, L, L)
        reading = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert forward < L * L < H * L * L * 8 < reading


def test_rule_2_6_causality_is_exact():
    layer, x = filled(MultiHeadAttention(16, 4)), tokens(2, 9, 16)
    before, free = layer(x, causal=True), layer(x)
    for t in range(8):
        changed = x.copy()
        changed[:, t + 1 :] += 1
        after = layer(changed, causal=True)
        assert np.array_equal(before[:, : t + 1], after[:, : t + 1])
        assert (before[:, t + 1] != after[:, t + 1]).any()  # the control
        assert not np.array_equal(layer(changed)[:, 0], free[:, 0])


def test_rule_2_6_rows_sum_to_one():
    layer = MultiHeadAttention(16, 4)
    for causal in (False, True):
        layer(tokens(2, 9, 16), causal=causal)
        np.testing.assert_allclose(layer.attn.sum(-1), 1, atol=1e-12)
    assert not np.triu(layer.attn, 1).any()


@pytest.mark.parametrize(
    ("arguments", "options", "name"),
    [
        ((10, 3), {}, "d_model"),
        ((0, 1), {}, "d_model"),
        ((8, 0), {}, "n_heads"),
        ((8, -2), {}, "n_heads"),
        ((12, 4), {"n_kv_heads": 3}, "n_kv_heads"),
        ((12, 4), {"n_kv_heads": 0}, "n_kv_heads"),
        ((12, 4), {"n_kv_heads": 8}, "n_kv_heads"),
        ((8, 2), {"dropout": 1.5}, "dropout"),
        ((8, 2), {"dropout": -0.1}, "dropout"),
        ((8, 2), {"dropout": np.nan}, "dropout"),
        ((8, 2), {"window": (-2, 0)}, "window"),
        ((8, 2), {"softcap": -1.0}, "softcap"),
        ((8, 2), {"rope": Rope(6, interleaved=True)}, "rope"),
    ],
)
def test_rule_2_7_wrong_sizes(arguments, options, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        MultiHeadAttention(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "name"),
    [
        ((8.0, 2), {}, "d_model"),
        ((8, "2"), {}, "n_heads"),
        ((8, True), {}, "n_heads"),
        ((8, 2), {"n_kv_heads": 1.0}, "n_kv_heads"),
        ((8, 2), {"dtype": np.int32}, "dtype"),
        ((8, 2), {"dtype": np.complex128}, "dtype"),
        ((8, 2), {"dtype": bool}, "dtype"),
        ((8, 2), {"dropout": "0.1"}, "dropout"),
        ((8, 2), {"window": 3}, "window"),
        ((8, 2), {"softcap": "1"}, "softcap"),
        ((8, 2), {"rope": lambda x, positions: x}, "rope"),
    ],
)
def test_rule_2_7_wrong_kinds(arguments, options, name):
    with pytest.raises(TypeError, match=f"^{name}: expected"):
        MultiHeadAttention(*arguments, **options)


def test_rule_2_7_options_are_keyword_only():
    with pytest.raises(TypeError):
        MultiHeadAttention(8, 2, 0, 1)
    with pytest.raises(TypeError):
        MultiHeadAttention(8, 2)(tokens(d=8), False, tokens(d=8))


X = np.zeros((2, 3, 8))


@pytest.mark.parametrize(
    ("x", "options", "error", "name"),
    [
        (np.zeros((3, 8)), {}, ValueError, "x"),
        (np.zeros((1, 2, 3, 8)), {}, ValueError, "x"),
        (np.zeros((2, 3, 9)), {}, ValueError, "x"),
        (X.astype(complex), {}, TypeError, "x"),
        (X.astype(bool), {}, TypeError, "x"),
        (X.astype(object), {}, TypeError, "x"),
        (np.ma.array(X), {}, TypeError, "x"),
        (X, {"causal": "both"}, ValueError, "causal"),
        (X, {"causal": 1}, TypeError, "causal"),
        (X, {"context": np.zeros((2, 8))}, ValueError, "context"),
        (X, {"context": np.zeros((1, 4, 8))}, ValueError, "context"),
        (X, {"context": np.zeros((2, 4, 9))}, ValueError, "context"),
        (X, {"context_lengths": [3, 3]}, ValueError, "context_lengths"),
        (X, {"context": X, "context_lengths": [3]}, ValueError, "context_lengths"),
        (X, {"lengths": [3]}, ValueError, "lengths"),
        (X, {"lengths": [3, 4]}, ValueError, "lengths"),
        (X, {"lengths": [3, -1]}, ValueError, "lengths"),
        (X, {"lengths": [3.0, 1.0]}, TypeError, "lengths"),
        (X, {"mask": np.ones((3, 3), int)}, TypeError, "mask"),
        (X, {"mask": np.ones((3, 2), bool)}, ValueError, "mask"),
        (X, {"mask": np.ones((4, 3, 3), bool)}, ValueError, "mask"),  # (B*H, L, S)
        (X, {"positions": [0, 1]}, ValueError, "positions"),
        (X, {"positions": [0.0, 1.0, 2.0]}, TypeError, "positions"),
        (X, {"cache": {}}, TypeError, "cache"),
        (X, {"training": True, "rng": 2**64}, ValueError, "rng"),
        (X, {"training": True, "rng": "seed"}, TypeError, "rng"),
    ],
)
def test_rule_2_7_wrong_arguments(x, options, error, name):
    layer = MultiHeadAttention(8, 2)
    with pytest.raises(error, match=f"^{name}: expected"):
        layer(x, **options)


@pytest.mark.parametrize("name", NAMES)
def test_rule_2_7_wrong_parameters(name):
    layer = MultiHeadAttention(8, 2)
    setattr(layer, name, np.zeros(7))
    with pytest.raises(ValueError, match=f"^{name}: expected shape"):
        layer(X)
    setattr(layer, name, np.zeros(8, complex))
    with pytest.raises(TypeError, match=f"^{name}: expected real"):
        layer(X)


@pytest.mark.parametrize("dtype", ["i4", "u1", "f4", "f2", "f8", ">f8", "longdouble", "bfloat16"])
def test_rule_2_8_any_real_dtype(dtype):
    x = (np.arange(24).reshape(1, 3, 8) % 5).astype(as_dtype(dtype))
    layer = MultiHeadAttention(8, 2)
    out = layer(x)
    assert out.dtype == np.float64
    assert np.array_equal(out, layer(x.astype(np.float64)))
    assert np.array_equal(out, layer(x.tolist()))


def test_rule_2_8_inputs_stay_as_they_are():
    base = tokens(4, 3, 16)
    kept = base.copy()
    base.flags.writeable = False
    layer = MultiHeadAttention(8, 2)
    out = layer(base[::2, ::-1, ::2], lengths=[1, 2])
    assert np.array_equal(out, layer(np.ascontiguousarray(base[::2, ::-1, ::2]), lengths=[1, 2]))
    assert np.array_equal(base, kept)


# --- beyond the textbook


@pytest.mark.parametrize("name", DTYPES)
def test_section_2_dtypes(name):
    dtype = as_dtype(name)
    layer = MultiHeadAttention(32, 2, dtype=name if name == "bfloat16" else dtype)
    assert layer.dtype == dtype and all(p.dtype == dtype for p in layer.parameters())
    x = tokens(2, 5, 32).astype(dtype).astype(np.float64)
    out = layer(x, causal=True)
    assert out.dtype == dtype
    assert layer.attn.dtype == (np.float64 if name == "float64" else np.float32)
    exact = Textbook(32, 2)
    for n in NAMES:
        setattr(exact, n, getattr(layer, n).astype(np.float64))
    eps = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[name]
    close(out, exact(x, True), eps)
    twin = pickle.loads(pickle.dumps(layer))
    assert twin.dtype == dtype and np.array_equal(twin(x, causal=True), out)


@pytest.mark.parametrize("causal", [False, True, "bottom-right"])
@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": 2, "bias": False},
        {"window": (2, 1), "alibi": True},
        {"softcap": 1.5, "n_kv_heads": 1},
        {"window": (1, -1), "softcap": 3.0, "alibi": True, "n_kv_heads": 2, "dropout": 0.4},
    ],
)
def test_section_2_options_equal_the_reference(options, with_context, causal):
    ours = MultiHeadAttention(12, 4, 3, **options)
    plain = reference.MultiHeadAttention(12, 4, 3, **options)
    if ours.bq is not None:
        filled(ours), filled(plain)
    x, context = tokens(), tokens(L=7, seed=1)
    call = {"mask": np.random.default_rng(2).random((2, 1, 5, 7 if with_context else 5)) < 0.7}
    call["lengths"] = [5, 3]
    if with_context:
        call |= {"context": context, "context_lengths": [2, 7]}
    for more in ({}, {"training": True, "rng": 5}):
        close(ours(x, causal, **call, **more), plain(x, causal, **call, **more))
        close(ours.attn, plain.attn)


def test_section_2_without_bias_and_with_fewer_heads():
    layer = MultiHeadAttention(12, 4, bias=False)
    assert [layer.bq, layer.bk, layer.bv, layer.bo] == [None] * 4
    assert [p is w for p, w in zip(layer.parameters(), [layer.Wq, layer.Wk], strict=False)]
    assert len(layer.parameters()) == 4
    layer = MultiHeadAttention(12, 4, n_kv_heads=2)
    assert layer.Wk.shape == layer.Wv.shape == (12, 6) and layer.bk.shape == (6,)
    assert layer.Wq.shape == layer.Wo.shape == (12, 12)


def test_a38e_heads_are_split_by_transposing():
    layer = MultiHeadAttention(4, 2)
    layer.Wq = layer.Wk = layer.Wv = layer.Wo = np.eye(4)
    out = layer(np.array([[[1, 0, 0, 0], [0, 0, 0, 1]]]))
    close(out[0], [[0.6697615, 0, 0, 0.5], [0.5, 0, 0, 0.6697615]], 1e-7)


def test_a5_padding_mask_shows_where_it_is_true():
    layer, x = filled(MultiHeadAttention(8, 2)), tokens(2, 3, 8)
    mask = (np.arange(3) < np.array([3, 1])[:, None])[:, None, None]
    out = layer(x, mask=mask)
    alone = (x[1, 0] @ layer.Wv + layer.bv) @ layer.Wo + layer.bo
    close(out[1], np.broadcast_to(alone, (3, 8)))
    close(out[0], layer(x[:1])[0])


def test_a8_causal_and_padding_both_apply():
    layer = MultiHeadAttention(1, 1)
    layer.Wq[:], layer.Wk[:], layer.Wv[:], layer.Wo[:] = 0, 0, 1, 1
    x = np.arange(4.0).reshape(1, 4, 1)
    for mask in ([False, True, True, True], [-np.inf, 0.0, 0.0, 0.0]):
        out = layer(x, causal=True, mask=np.array(mask))
        close(out.ravel(), [0, 1, 1.5, 2])
        assert out[0, 0] == 0 and not layer.attn[0, 0, 0].any()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"n_kv_heads": 1}, {"alibi": True}])
def test_a8_no_later_token_reaches_a_causal_row(name, options):
    layer = MultiHeadAttention(8, 2, dtype=as_dtype(name), **options)
    x = tokens(2, 9, 8)
    call = {"causal": True, "training": True, "rng": 1}
    for mask in (None, np.ones(9, bool), np.zeros((9, 9))):
        before = layer(x, mask=mask, **call)
        for t in (0, 4, 7):
            changed = x.copy()
            changed[:, t + 1 :] = 1e3
            assert np.array_equal(layer(changed, mask=mask, **call)[:, : t + 1], before[:, : t + 1])


def test_a20_members_do_not_reach_one_another():
    layer, x = filled(MultiHeadAttention(8, 2)), tokens(2, 3, 8)
    changed = x.copy()
    changed[1] += 5
    mask = (np.arange(3) < np.array([3, 1])[:, None])[:, None, None]
    for call in ({"lengths": [3, 1]}, {"mask": mask}, {"mask": np.tile(mask, (1, 2, 3, 1))}):
        before, after = layer(x, **call), layer(changed, **call)
        assert np.array_equal(before[0], after[0])
        assert not np.array_equal(before[1, 0], after[1, 0])


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("junk", [np.nan, np.inf])
def test_section_2_lengths_are_padding(name, junk):
    layer, x = filled(MultiHeadAttention(8, 2, dtype=as_dtype(name))), tokens(2, 3, 8)
    out = layer(x, lengths=[3, 1])
    assert not out[1, 1:].any()
    assert not layer.attn[1, :, 1:].any() and not layer.attn[1, :, :, 1:].any()
    close(out[1, :1], layer(x[1:, :1])[0], 1e-2)
    x[1, 1:] = junk
    for training in (False, True):
        assert np.array_equal(layer(x, lengths=[3, 1], training=training), out)
    assert not layer(x, lengths=[0, 0]).any()


def test_section_2_context_lengths_are_padding():
    layer, x, context = filled(MultiHeadAttention(8, 2)), tokens(2, 3, 8), tokens(2, 4, 8, 1)
    out = layer(x, context=context, context_lengths=[4, 2])
    close(out[1], layer(x[1:], context=context[1:, :2])[0])
    context[1, 2:] = np.nan
    assert np.array_equal(layer(x, context=context, context_lengths=[4, 2]), out)
    assert layer.attn.shape == (2, 2, 3, 4)
    empty = layer(x, context=context[:, :0])
    assert np.array_equal(empty, np.broadcast_to(layer.bo, (2, 3, 8)))


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (0, 0, 8)])
def test_zero_sizes(shape):
    layer = MultiHeadAttention(8, 2, rope=Rope(4, interleaved=True), alibi=True)
    B, L, _ = shape
    for call in ({}, {"causal": True}, {"lengths": np.full(B, L)}, {"training": True}):
        assert layer(np.zeros(shape), **call).shape == shape
        assert layer.attn.shape == (B, 2, L, L)


# --- weights: A28


@pytest.mark.parametrize("name", DTYPES)
def test_a28_weights_belong_to_the_output(name):
    layer = filled(MultiHeadAttention(8, 2, dtype=as_dtype(name), n_kv_heads=1, softcap=5.0))
    x = tokens(2, 4, 8).astype(layer.dtype)
    mask = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]], bool)
    out = layer(x, mask=mask)
    attn = layer.attn
    assert attn.shape == (2, 2, 4, 4)
    assert np.array_equal(attn != 0, np.broadcast_to(mask, attn.shape))
    np.testing.assert_allclose(attn.sum(-1), np.broadcast_to([1, 0, 1, 1], (2, 2, 4)), atol=1e-6)
    x, v, Wo = (y.astype(np.float64) for y in (x, layer.Wv, layer.Wo))
    v = layer._split_heads(x @ v + layer.bv.astype(np.float64))
    joined = (attn @ v).swapaxes(1, 2).reshape(2, 4, 8)
    eps = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[name]
    close(out, joined @ Wo + layer.bo.astype(np.float64), eps)
    assert np.array_equal(layer(x, mask=mask), out)  # reading changes nothing


def test_a28_weights_are_never_those_of_an_earlier_call():
    layer = MultiHeadAttention(8, 2)
    layer(tokens(2, 4, 8))
    assert layer.attn.shape == (2, 2, 4, 4)
    layer(tokens(1, 6, 8), causal=True)
    assert layer.attn.shape == (1, 2, 6, 6) and not np.triu(layer.attn, 1).any()
    layer(tokens(1, 2, 8), context=tokens(1, 3, 8))
    assert layer.attn.shape == (1, 2, 2, 3)


def test_a28_weights_are_those_before_dropout():
    layer, plain = MultiHeadAttention(8, 2, dropout=0.5), MultiHeadAttention(8, 2)
    x = tokens(d=8)
    layer(x, training=True, rng=3), plain(x)
    assert np.array_equal(layer.attn, plain.attn)


# --- dropout: A37


def test_a37_dropout_acts_in_training_only():
    layer, plain, x = MultiHeadAttention(8, 2, dropout=0.5), MultiHeadAttention(8, 2), tokens(d=8)
    assert np.array_equal(layer(x), plain(x))
    assert np.array_equal(layer(x, rng=3), plain(x))
    dropped = layer(x, training=True, rng=4)
    assert np.array_equal(dropped, layer(x, training=True, rng=4))
    assert not np.array_equal(dropped, plain(x))
    assert not np.array_equal(dropped, layer(x, training=True, rng=5))
    assert not np.array_equal(layer(x, training=True), layer(x, training=True))
    close(dropped, reference.MultiHeadAttention(8, 2, dropout=0.5)(x, training=True, rng=4))


def test_a37_scale_and_range():
    layer = MultiHeadAttention(1, 1, dropout=0.25)
    layer.Wq[:], layer.Wv[:], layer.Wo[:] = 0, 0, 1
    layer.bv[:] = 1  # every value is 1
    out = layer(np.zeros((500, 4, 1)), training=True, rng=0)
    assert set(np.round(out.ravel() * 3).astype(int)) <= {0, 1, 2, 3, 4}
    np.testing.assert_allclose(out * 3, np.round(out * 3), atol=1e-12)
    assert abs(out.mean() - 1) < 0.03
    layer.dropout = 1.0
    assert not layer(np.zeros((2, 4, 1)), training=True).any()
    layer.dropout = 1.5
    with pytest.raises(ValueError, match="dropout"):
        layer(np.zeros((2, 4, 1)), training=True)


def test_a37_random_state():
    x, zero, half = tokens(d=8), MultiHeadAttention(8, 2), MultiHeadAttention(8, 2, dropout=0.5)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    half(x, training=True)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    rng, same = np.random.default_rng(1), np.random.default_rng(1)
    zero(x, training=True, rng=rng)  # nothing dropped, nothing drawn
    first = half(x, training=True, rng=rng)
    seed = int(same.integers(2**64 - 1, dtype=np.uint64, endpoint=True))
    assert np.array_equal(half(x, training=True, rng=seed), first)
    assert rng.integers(1000) == same.integers(1000)  # one number it was


def test_a37_pattern_is_the_same_for_every_number_of_threads():
    threads = pytest.importorskip("fastmha._threads")
    layer, x = MultiHeadAttention(16, 4, dropout=0.3, dtype=np.float32), tokens(2, 65, 16)
    outs = []
    for n in (1, 2):
        with threads.num_threads(n):
            outs.append(layer(x, causal=True, training=True, rng=9))
    assert np.array_equal(*outs)


# --- positions


@pytest.mark.parametrize("interleaved", [False, True])
def test_section_2_rope_rotates_queries_and_keys(interleaved):
    rope = Rope(2, interleaved=interleaved)
    layer, x = filled(MultiHeadAttention(12, 3, n_kv_heads=1, rope=rope)), tokens()
    q, k, v = (
        layer._split_heads(x @ getattr(layer, "W" + n) + getattr(layer, "b" + n)) for n in "qkv"
    )

    def expected(p, p_keys):
        out = attention(rope(q, p), rope(k, p_keys), v, causal=True)
        return out.swapaxes(1, 2).reshape(2, 5, 12) @ layer.Wo + layer.bo

    close(layer(x, causal=True), expected(range(5), range(5)))
    p = np.array([[0, 0, 0, 1, 2], [3, 4, 7, 8, 9]])
    close(layer(x, causal=True, positions=p), expected(p, p))
    close(layer.attn, attention_weights(rope(q, p), rope(k, p), causal=True))
    close(layer(x, causal=True, positions=p, context=x), expected(p, range(5)))
    moved = layer(x, causal=True, positions=np.arange(5) + 1000)
    close(moved, layer(x, causal=True), 1e-11)  # only differences count


def test_a33_left_padding_has_positions_of_its_own():
    rope = Rope(4, interleaved=False)
    layer, x = filled(MultiHeadAttention(8, 2, rope=rope)), tokens(2, 6, 8)
    padding = np.array([0, 2])
    positions = np.maximum(np.arange(6) - padding[:, None], 0)
    mask = (np.arange(6) >= padding[:, None])[:, None, None]
    out = layer(x, causal=True, positions=positions, mask=mask)
    close(out[1, 2:], layer(x[1:, 2:], causal=True)[0])
    # without them only differences count, so that padding alone changes nothing either
    close(layer(x, causal=True, mask=mask)[1, 2:], out[1, 2:], 1e-11)


def test_section_2_alibi_takes_positions_that_rise_by_one():
    layer, x = MultiHeadAttention(12, 3, alibi=True), tokens()
    out = layer(x, causal=True)
    q, k, v = (layer._split_heads(x @ W) for W in (layer.Wq, layer.Wk, layer.Wv))
    heads = attention(q, k, v, causal=True, alibi_slopes=alibi_slopes(3))
    close(out, heads.swapaxes(1, 2).reshape(2, 5, 12) @ layer.Wo)
    for positions in (range(5), range(7, 12), [[-2, -1, 0, 1, 2], [0, 1, 2, 3, 4]]):
        assert np.array_equal(layer(x, causal=True, positions=positions), out)
    with pytest.raises(ValueError, match="positions"):
        layer(x, positions=[0, 0, 0, 1, 2])
    layer(x, context=x, positions=range(5))
    with pytest.raises(ValueError, match="positions"):
        layer(x, context=x, positions=range(1, 6))


# --- caches


class PlainCache:
    """What the class asks of a cache, in a few lines: float64 arrays that grow."""

    window = None

    def __init__(self, batch, heads, d_k):
        self.k, self.v = np.zeros((2, batch, heads, 0, d_k))
        self.lengths = np.zeros(batch, np.int64)

    def append(self, k, v, lengths=None):
        n = np.full(len(k), k.shape[2]) if lengths is None else np.asarray(lengths)
        S = (self.lengths + n).max()
        for name, new in (("k", k), ("v", v)):
            held = getattr(self, name)
            grown = np.full((*held.shape[:2], S, held.shape[3]), np.nan)
            grown[:, :, : held.shape[2]] = held
            for b, start in enumerate(self.lengths):
                grown[b, :, start : start + n[b]] = new[b, :, : n[b]]
            setattr(self, name, grown)
        self.lengths = self.lengths + n

    def _all(self, function, q, *rest, lengths, options):
        return function(
            q,
            self.k.astype(q.dtype),
            *(x.astype(q.dtype) for x in rest),
            causal="bottom-right",
            key_lengths=self.lengths,
            query_lengths=lengths,
            **options,
        )

    def attend(self, q, lengths=None, **options):
        return self._all(attention, q, self.v, lengths=lengths, options=options)

    def weights(self, q, lengths=None, **options):
        return self._all(attention_weights, q, lengths=lengths, options=options)


def kv_cache(layer, batch):
    return layer.make_cache(batch)


def plain_cache(layer, batch):
    return PlainCache(batch, layer.n_kv_heads, layer.d_k)


both_caches = pytest.mark.parametrize("make", [plain_cache, kv_cache])
CACHED = [
    {},
    {"n_kv_heads": 2, "bias": False},
    {"rope": Rope(4, interleaved=False), "dtype": np.float32},
    {"alibi": True, "window": (3, 0)},
    {"rope": Rope(2, interleaved=True), "n_kv_heads": 1, "softcap": 2.0},
]


@both_caches
@pytest.mark.parametrize("options", CACHED)
def test_a33_a30_prefill_steps_and_chunks_agree(make, options):
    layer, x = MultiHeadAttention(16, 4, **options), tokens(2, 9, 16)
    whole = layer(x, causal=True)
    whole_attn = layer.attn
    tolerance = 1e-5 if layer.dtype == np.float32 else 1e-12
    for chunks in ([9], [1] * 9, [4, 3, 2]):
        cache, done = make(layer, 2), 0
        for n in chunks:
            out = layer(x[:, done : done + n], cache=cache)
            close(out, whole[:, done : done + n], tolerance)
            close(layer.attn, whole_attn[:, :, done : done + n, : done + n], tolerance)
            done += n
        assert cache.lengths.tolist() == [9, 9]


@both_caches
@pytest.mark.parametrize("options", CACHED)
def test_section_2_cached_lengths_are_per_member(make, options):
    layer, x = MultiHeadAttention(16, 4, **options), tokens(2, 9, 16)
    tolerance = 1e-5 if layer.dtype == np.float32 else 1e-12
    cache = make(layer, 2)
    junk = x[:, :5].copy()
    junk[1, 3:] = np.nan
    out = layer(junk, cache=cache, lengths=[5, 3])
    assert cache.lengths.tolist() == [5, 3] and not out[1, 3:].any()
    first = layer(np.concatenate([x[:1, :6], x[:1, 6:7]], 1), causal=True)
    second = layer(np.concatenate([x[1:, :3], x[1:, 5:7]], 1), causal=True)
    close(out[0], first[0, :5], tolerance)
    close(out[1, :3], second[0, :3], tolerance)
    out = layer(x[:, 5:7], cache=cache)  # each goes on from its own length
    close(out[0], first[0, 5:], tolerance)
    close(out[1], second[0, 3:], tolerance)


@both_caches
def test_section_2_cached_calls_are_causal_whatever_is_asked(make):
    layer, x = MultiHeadAttention(8, 2), tokens(1, 4, 8)
    expected = layer(x, causal=True)
    for causal in (False, True, "top-left"):
        close(layer(x, causal, cache=make(layer, 1)), expected)
    mask = np.array([True, False, True, True])
    cache = make(layer, 1)
    layer(x[:, :3], cache=cache)
    out = layer(x[:, 3:], cache=cache, mask=mask)
    close(out, layer(x, causal=True, mask=mask)[:, 3:])


@both_caches
def test_rule_2_5_attn_after_a_cache_has_moved_on(make):
    layer, x = MultiHeadAttention(8, 2), tokens(1, 4, 8)
    cache = make(layer, 1)
    layer(x[:, :2], cache=cache)
    assert layer.attn.shape == (1, 2, 2, 2)
    layer(x[:, 2:3], cache=cache)
    MultiHeadAttention(8, 2, 1)(x[:, 3:], cache=cache)
    with pytest.raises(RuntimeError, match=r"attn.*cache"):
        _ = layer.attn


@both_caches
@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"training": True}, ValueError, "training"),
        ({"context": X}, ValueError, "context"),
        ({"mask": np.ones((3, 4), bool)}, ValueError, "mask"),
        ({"mask": np.ones((3, 3), int)}, TypeError, "mask"),
        ({"lengths": [3, 4]}, ValueError, "lengths"),
        ({"positions": [1, 2]}, ValueError, "positions"),
        ({"causal": "no"}, ValueError, "causal"),
    ],
)
def test_section_2_wrong_cached_calls_leave_the_cache_alone(make, options, error, name):
    layer = MultiHeadAttention(8, 2)
    cache = make(layer, 2)
    with pytest.raises(error, match=f"^{name}: expected"):
        layer(X, cache=cache, **options)
    assert cache.lengths.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"^cache: expected"):
        layer(X[:1], cache=cache)
    assert cache.lengths.tolist() == [0, 0]


@both_caches
def test_section_2_positions_of_a_cached_call_may_be_given(make):
    layer = MultiHeadAttention(8, 2, rope=Rope(4, interleaved=True))
    x, p = tokens(1, 4, 8), np.array([3, 1, 4, 15])
    cache = make(layer, 1)
    layer(x[:, :3], cache=cache, positions=p[:3])
    out = layer(x[:, 3:], cache=cache, positions=p[3:])
    close(out, layer(x, causal=True, positions=p)[:, 3:])


@pytest.mark.parametrize("name", [*DTYPES, "int8"])
def test_section_2_caches_of_other_dtypes(name):
    layer, x = MultiHeadAttention(8, 2), tokens(1, 4, 8)
    assert kv_cache(layer, 1).lengths.tolist() == [0]
    from fastmha.cache import KVCache

    cache = KVCache(1, 2, 4, dtype=name if name == "int8" else as_dtype(name))
    out = layer(x, cache=cache)
    assert out.dtype == np.float64
    eps = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3}.get(name, 5e-2)
    close(out, layer(x, causal=True), eps)


@both_caches
def test_section_4_a_cached_token_has_the_bits_of_its_row(make):
    layer, x = MultiHeadAttention(64, 4, dtype=np.float32), tokens(2, 9, 64)
    whole = layer(x, causal=True)
    cache = make(layer, 2)
    for t in range(9):
        assert np.array_equal(layer(x[:, t : t + 1], cache=cache), whole[:, t : t + 1])


# --- gradients


def differences(f, x, step=1e-6):
    """Central differences of a scalar function; x is changed in place, and back."""
    grad = np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        kept = x[i]
        x[i] = kept + step
        above = f()
        x[i] = kept - step
        grad[i] = (above - f()) / (2 * step)
        x[i] = kept
    return grad


def test_section_2_backward_needs_a_training_call():
    layer, x = MultiHeadAttention(8, 2), tokens(d=8)
    for call in (None, {}, {"causal": True}):
        if call is not None:
            layer(x, training=True)
            layer(x, **call)
        with pytest.raises(RuntimeError, match="training"):
            layer.backward(x)
    layer(x, training=True)
    for wrong in (x[:1], x[:, :2], x[..., :4], x[0]):
        with pytest.raises(ValueError, match=r"^grad_out: expected shape"):
            layer.backward(wrong)
    with pytest.raises(TypeError, match=r"^grad_out: expected"):
        layer.backward(x.astype(complex))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({}, {}),
        ({"bias": False, "n_kv_heads": 1}, {"causal": True}),
        ({"dropout": 0.3, "softcap": 2.0}, {"causal": True, "lengths": [2, 3]}),
        ({"rope": Rope(2, interleaved=True), "window": (1, 1)}, {"positions": [[3, 1, 2]] * 2}),
        ({"rope": Rope(2, interleaved=False, scaling=YARN)}, {"context": 4}),
        ({"alibi": True, "n_kv_heads": 1}, {"context": 4, "context_lengths": [4, 2]}),
        ({"dropout": 0.5}, {"mask": np.tri(3, 4, dtype=bool), "context": 4, "lengths": [1, 3]}),
    ],
)
def test_section_2_backward_equals_finite_differences(options, call):
    layer = MultiHeadAttention(4, 2, **options)
    if layer.bq is not None:
        filled(layer)
    x, weight = tokens(2, 3, 4), tokens(2, 3, 4, 1)
    inputs, call = [x], {"training": True, "rng": 8, **call}
    if "context" in call:
        call["context"] = tokens(2, call["context"], 4, 2)
        inputs.append(call["context"])
    layer(x, **call)
    grads = layer.backward(weight)
    grads = [*(grads if "context" in call else [grads]), *layer.grads]
    for value, grad in zip([*inputs, *layer.parameters()], grads, strict=True):
        numeric = differences(lambda: (layer(x, **call) * weight).sum(), value)
        assert grad.dtype == np.float64 and grad.shape == value.shape
        scale = max(np.abs(numeric).max(), 0.1)  # differences are good to 1e-9
        assert np.abs(grad - numeric).max() <= 1e-7 * scale


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("with_context", [False, True])
def test_section_2_backward_equals_the_reference(name, with_context):
    options = {"n_kv_heads": 2, "dropout": 0.2, "softcap": 4.0, "alibi": True}
    ours = filled(MultiHeadAttention(16, 4, 1, dtype=as_dtype(name), **options))
    plain = reference.MultiHeadAttention(16, 4, 1, **options)
    for n in NAMES:
        setattr(plain, n, getattr(ours, n).astype(np.float64))
    x, g, context = (tokens(2, L, 16, seed).astype(ours.dtype) for seed, L in enumerate((5, 5, 6)))
    call = {"causal": True, "lengths": [5, 3], "training": True, "rng": 2}
    if with_context:
        call["context"] = context
    ours(x, **call)
    plain(
        x.astype(np.float64),
        **{**call, **({"context": context.astype(np.float64)} if with_context else {})},
    )
    found, expected = ours.backward(g), plain.backward(g.astype(np.float64))
    if not with_context:
        found, expected = (found,), (expected,)
    assert len(ours.grads) == 8
    eps = {"float64": 1e-11, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}[name]
    names = [*("x", "context")[: len(found)], *NAMES]
    for n, ours_, theirs in zip(
        names, [*found, *ours.grads], [*expected, *plain.grads], strict=True
    ):
        assert ours_.dtype == ours.dtype and ours_.flags.c_contiguous, n
        # the gradient of bk is 0 but for softcap and rounding: measure against that of bq
        scale = np.abs(np.asarray(plain.grads[1] if n == "bk" else theirs, np.float64)).max()
        assert np.abs(ours_.astype(np.float64) - theirs).max() <= eps * scale, n


def test_section_2_padding_has_no_gradient():
    layer, x = filled(MultiHeadAttention(8, 2)), tokens(2, 3, 8)
    g = tokens(2, 3, 8, 1)
    layer(x, lengths=[3, 1], training=True)
    clean, grads = layer.backward(g), layer.grads
    assert not clean[1, 1:].any()
    junk, junk_g = x.copy(), g.copy()
    junk[1, 1:] = junk_g[1, 1:] = np.nan
    layer(junk, lengths=[3, 1], training=True)
    assert np.array_equal(layer.backward(junk_g), clean)
    assert all(np.array_equal(a, b) for a, b in zip(grads, layer.grads, strict=True))


def test_section_2_backward_is_of_the_call_as_it_was():
    layer, x = MultiHeadAttention(8, 2), tokens(2, 3, 8)
    layer(x, training=True)
    expected = layer.backward(np.ones_like(x))
    layer(x, training=True)
    x[:] = 0
    assert np.array_equal(layer.backward(np.ones_like(x)), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_section_2_backward_equals_pytorch(causal):
    torch = pytest.importorskip("torch")
    ours, x, g = filled(MultiHeadAttention(12, 3)), tokens(), tokens(seed=1)
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict({n: torch.from_numpy(p) for n, p in ours.to_torch().items()})
    tensor = torch.from_numpy(x).requires_grad_()
    hidden = torch.from_numpy(~np.tri(5, dtype=bool)) if causal else None
    out, _ = theirs(tensor, tensor, tensor, attn_mask=hidden)
    close(ours(x, causal, training=True), out.detach().numpy())
    out.backward(torch.from_numpy(g))
    close(ours.backward(g), tensor.grad.numpy(), 1e-11)
    grads = weights.to_torch(weights.Weights(*ours.grads))
    for name, p in theirs.named_parameters():
        close(grads[name], p.grad.numpy(), 1e-11)


def test_section_2_gradients_train():
    layer, x = MultiHeadAttention(8, 2), tokens(4, 6, 8)
    target, losses = np.cumsum(x, axis=1) / 3, []
    for _ in range(30):
        error = layer(x, causal=True, training=True) - target
        losses.append((error**2).mean())
        layer.backward(2 * error / error.size)
        for p, g in zip(layer.parameters(), layer.grads, strict=True):
            p -= 0.5 * g
    assert losses[-1] < 0.9 * losses[0]
    assert sorted(losses, reverse=True) == losses


# --- copies and threads: C19


def copies(layer):
    yield copy.deepcopy(layer)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(layer, protocol))


def test_c19_copies_compute_the_same():
    layer = filled(
        MultiHeadAttention(
            8, 2, 3, n_kv_heads=1, rope=Rope(4, interleaved=True), window=(2, 0), dropout=0.1
        )
    )
    x = tokens(d=8)
    out = layer(x, causal=True, training=True, rng=1)
    assert layer.attn.any()
    for twin in copies(layer):
        assert not hasattr(twin, "attn")  # rule 2.5: copies do not carry it
        with pytest.raises(RuntimeError):
            twin.backward(x)
        assert np.array_equal(twin(x, causal=True, training=True, rng=1), out)
        for p, q in zip(twin.parameters(), layer.parameters(), strict=True):
            assert not np.shares_memory(p, q)
    assert layer.attn.any()


def test_c19_joblib(tmp_path):
    joblib = pytest.importorskip("joblib")
    layer, x = MultiHeadAttention(8, 2, dtype=np.float32), tokens(d=8)
    joblib.dump(layer, tmp_path / "layer")
    assert np.array_equal(joblib.load(tmp_path / "layer")(x), layer(x))
    mapped = joblib.load(tmp_path / "layer", mmap_mode="r")
    assert np.array_equal(mapped(x), layer(x))


def test_read_only_parameters_will_do():
    layer, x = MultiHeadAttention(8, 2), tokens(d=8)
    out = layer(x)
    for p in layer.parameters():
        p.flags.writeable = False
    assert np.array_equal(layer(x), out)


def test_threads_share_an_object():
    layer = MultiHeadAttention(16, 4, rope=Rope(4, interleaved=False), dtype=np.float32)
    inputs = [tokens(1, L, 16, L) for L in (3, 5, 17)]
    expected = [layer(x, causal=True) for x in inputs]
    wrong = []

    def work(i):
        for _ in range(100):
            if not np.array_equal(layer(inputs[i], causal=True), expected[i]):
                wrong.append(i)
            if layer.attn.shape[2] not in (3, 5, 17):
                wrong.append("attn")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_mask_in_the_place_of_causal_is_told_where_it_goes():
    """Textbooks whose second argument is the mask are common."""
    with pytest.raises(TypeError, match="pass a mask as mask="):
        MultiHeadAttention(8, 2)(np.ones((1, 3, 8)), np.ones((3, 3), bool))
