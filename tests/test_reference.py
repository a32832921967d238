"""The oracle is checked before anything is checked against it.

Four independent witnesses: values worked out by hand, a scalar double loop in plain Python
(`plain_attention`), PyTorch with its autograd, and finite differences. Rule numbers are those of
the project's contract.
"""

import copy
import math
import pickle

import numpy as np
import pytest

from fastmha import reference
from fastmha.reference import attention, attention_backward
from fastmha.reference import scaled_dot_product_attention as sdpa

pytestmark = pytest.mark.filterwarnings("error")

DTYPES = ["float64", "float32", "float16", "bfloat16"]


def as_dtype(name):
    if name == "bfloat16":
        return pytest.importorskip("ml_dtypes").bfloat16
    return np.dtype(name)


def F(shape, s=1.0, dtype=np.float32):
    """cos(s), cos(2 s), ... in the given shape."""
    return np.cos(s * np.arange(1, math.prod(shape) + 1)).reshape(shape).astype(dtype)


def Z(*shape, dtype=np.float32):
    """Zero queries and keys: the output is the plain mean of the visible rows of V."""
    return np.zeros(shape, dtype)


def R(n, dtype=np.float32):
    """V = 0, 1, 2, ..."""
    return np.arange(n).reshape(1, 1, n, 1).astype(dtype)


def assert_close(actual, desired, tolerance=1e-12):
    """Equal up to a fraction of the largest value; NaN and infinities in the same places."""
    desired = np.asarray(desired, np.float64)
    actual = np.asarray(actual).astype(np.float64)
    finite = desired[np.isfinite(desired)]
    scale = max(1.0, np.abs(finite).max(initial=0.0))
    np.testing.assert_allclose(actual, desired, rtol=0, atol=tolerance * scale)


# A scalar double loop that knows every option


def philox_word(seed, member, head, position, j):
    """Philox4x32-10 on Python integers."""
    c = [j // 4, position % 2**32, head, member]
    k = [seed % 2**32, seed // 2**32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[j % 4]


def plain_attention(
    q, k, v, *, mask=None, causal=False, window=(-1, -1), scale=None, softcap=0, alibi_slopes=None,
    sinks=None, key_lengths=None, query_lengths=None, dropout_p=0, rng=0,
):
    """Output, log-sum-exp and weights, one query and one key at a time."""
    (B, H, L, D), (G, S), E = q.shape, k.shape[1:3], v.shape[3]
    out, lse, weights = np.zeros((B, H, L, E)), np.full((B, H, L), -np.inf), np.zeros((B, H, L, S))
    scale = D**-0.5 if scale is None else scale
    for b, h, i in np.ndindex(B, H, L):
        n_keys = S if key_lengths is None else int(key_lengths[b])
        n_queries = L if query_lengths is None else int(query_lengths[b])
        p = i + n_keys - n_queries if causal == "bottom-right" else i
        if i >= n_queries:
            continue
        scores = {}
        for j in range(n_keys):
            seen = not causal or j <= p
            seen = seen and (window[0] < 0 or j >= p - window[0])
            seen = seen and (window[1] < 0 or j <= p + window[1])
            s = sum(q[b, h, i, d] * k[b, h * G // H, j, d] for d in range(D)) * scale
            if softcap:
                s = softcap * math.tanh(s / softcap)
            if alibi_slopes is not None:
                s -= alibi_slopes[h] * abs(p - j)
            if mask is not None:
                m = np.broadcast_to(mask, (B, H, L, S))[b, h, i, j]
                seen = seen and (m if mask.dtype == bool else m != -np.inf)
                s += 0 if mask.dtype == bool else m
            if seen:
                scores[j] = s
        if not scores:
            continue
        top = max(scores.values())
        total = sum(math.exp(s - top) for s in scores.values())
        lse[b, h, i] = top + math.log(total)
        if sinks is not None:
            total += math.exp(sinks[h] - top)
        for j, s in scores.items():
            weights[b, h, i, j] = w = math.exp(s - top) / total
            if dropout_p:
                w *= (philox_word(rng, b, h, p, j) >= dropout_p * 2**32) / (1 - dropout_p)
            out[b, h, i] += w * v[b, h * G // H, j]
    return out, lse, weights


def random_case(seed):
    """Arrays, and a random choice among all options that fit together."""
    rng = np.random.default_rng(seed)

    def maybe(value):
        return value if rng.random() < 0.5 else None

    B, G, group = rng.integers(1, 3), rng.integers(1, 3), rng.integers(1, 4)
    L, S, D, E = (int(n) for n in rng.integers(1, 8, 4))
    H = int(G * group)
    q, k = rng.normal(size=(B, H, L, D)), rng.normal(size=(B, G, S, D))
    v = rng.normal(size=(B, G, S, E))
    mask_shape = [(L, S), (S,), (B, 1, 1, S), (H, 1, S), (B, H, L, S), (1, H, L, 1)][seed % 6]
    masks = [None, rng.random(mask_shape) < 0.7, rng.normal(size=mask_shape)]
    masks.append(np.where(rng.random(mask_shape) < 0.7, masks[2], -np.inf))
    options = {
        "mask": masks[rng.integers(4)],
        "causal": [False, True, "top-left", "bottom-right"][rng.integers(4)],
        "window": maybe(tuple(int(n) for n in rng.integers(-1, 5, 2))),
        "scale": maybe(float(rng.normal())),
        "softcap": maybe(float(rng.uniform(0.3, 2))),
        "alibi_slopes": maybe(rng.uniform(0, 1, H)),
        "sinks": maybe(rng.normal(size=H)),
        "key_lengths": maybe(rng.integers(0, S + 1, B)),
        "query_lengths": maybe(rng.integers(0, L + 1, B)),
        "dropout_p": float(rng.choice([0, 0, 0.3])),
        "rng": int(rng.integers(2**63)),
    }
    return q, k, v, {name: x for name, x in options.items() if x is not None}


@pytest.mark.parametrize("seed", range(60))
def test_every_option_equals_a_double_loop(seed):
    q, k, v, options = random_case(seed)
    out, lse, weights = plain_attention(q, k, v, **options)
    got, got_lse = attention(q, k, v, return_lse=True, **options)
    assert_close(got, out)
    assert_close(got_lse, lse)
    assert_close(reference.attention_weights(q, k, **options), weights)


# Rules of section 3


@pytest.mark.parametrize("name", DTYPES)
def test_rule_3_1_dtype_of_query_is_kept_and_result_rounded_once(name):
    dtype = as_dtype(name)
    q, k, v = (F((2, 3, 5, 4), s).astype(dtype) for s in (1, 0.7, 0.3))
    out, lse = attention(q, k, v, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if name == "float64" else np.float32)
    exact, exact_lse, _ = plain_attention(*(x.astype(np.float64) for x in (q, k, v)))
    assert_close(out, exact.astype(dtype), 1e-12 if name == "float64" else 1e-7)
    assert_close(lse, exact_lse.astype(lse.dtype), 1e-12 if name == "float64" else 1e-7)


def test_rule_3_1_wrong_dtypes_are_type_errors():
    x = Z(1, 1, 2, 2)
    for other in (x.astype(np.float64), x.astype(int), x.astype(complex), np.ma.array(x), x > 0):
        with pytest.raises(TypeError, match="key"):
            sdpa(x, other, x)
    assert sdpa([[1.0]], [[1.0]], [[2.0]]).dtype == np.float64


def test_rule_3_1_half_types_do_not_overflow_before_scaling():
    q = np.full((1, 1, 1, 64), 300, np.float16)
    k, v = np.full((1, 1, 2, 64), 300, np.float16), np.array([1, 3], np.float16).reshape(1, 1, 2, 1)
    assert sdpa(q, k, v).item() == 2.0
    k[:, :, 1] = 300.25
    out = sdpa(q, k, v)
    assert out.item() == 3.0 and out.dtype == np.float16
    large = np.full((1, 1, 4, 1), 60000, np.float16)
    assert sdpa(q[..., :1], large, large).item() == 60000


def test_rule_3_2_scale():
    q, k, v = F((2, 2, 3, 4)), F((2, 2, 5, 4), 0.7), F((2, 2, 5, 3), 0.3)
    means = np.broadcast_to(v.mean(2, keepdims=True), (2, 2, 3, 3))
    assert_close(attention(q, k, v, scale=0), means, 1e-7)
    assert np.array_equal(attention(q, k, v, scale=-0.3), attention(-q, k, v, scale=0.3))
    for scale in (0.5, np.float64(0.5), np.float32(0.5), np.array(0.5)):
        out = attention(q, k, v, scale=scale, softcap=np.float64(2))
        assert out.dtype == np.float32
        assert np.array_equal(out, attention(q, k, v, scale=0.5, softcap=2))
    with pytest.raises(TypeError, match="scale"):
        attention(q, k, v, scale="1")


def test_rule_3_2_head_size_zero_needs_a_scale():
    with pytest.raises(ValueError, match="scale"):
        sdpa(Z(1, 1, 2, 0), Z(1, 1, 3, 0), R(3))
    assert sdpa(Z(1, 1, 2, 0), Z(1, 1, 3, 0), R(3), scale=1.0).ravel().tolist() == [1, 1]


def test_rule_3_2_softcap():
    q, k, v = F((1, 2, 3, 4)), F((1, 2, 5, 4), 0.7), F((1, 2, 5, 3), 0.3)
    assert np.array_equal(attention(q, k, v, softcap=0), attention(q, k, v))
    assert_close(attention(q, k, v, softcap=1e8), attention(q, k, v), 1e-7)
    for wrong in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="softcap"):
            attention(q, k, v, softcap=wrong)
    # after the cap comes the mask: a hidden key keeps no weight
    hidden = np.array([1, 0], bool)
    assert attention(Z(1, 1, 1, 1), Z(1, 1, 2, 1), R(2), mask=hidden, softcap=1).item() == 0


def test_rule_3_3_true_means_may_attend():
    mask = np.array([1, 0, 0], bool)
    assert sdpa(Z(1, 1, 1, 2), Z(1, 1, 3, 2), R(3), attn_mask=mask).item() == 0
    assert reference.sdpa(Z(1, 2), Z(3, 2), R(3)[0, 0], mask).item() == 0


def test_rule_3_3_float_masks_are_added():
    out = sdpa(Z(1, 1, 1, 2), Z(1, 1, 2, 2), R(2), attn_mask=np.array([[0, 1]], np.float32))
    assert out.item() == pytest.approx(0.7310586, abs=1e-7)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("fill", [np.finfo(np.float32).min, np.finfo(np.float64).min])
def test_rule_3_3_finite_masks_saturate(name, fill):
    q, k, v = (F((1, 1, 3, n), s).astype(as_dtype(name)) for n, s in ((4, 1), (4, 0.7), (2, 0.3)))
    mask = np.zeros((3, 3), type(fill))
    mask[1] = fill
    out = sdpa(q, k, v, attn_mask=mask)
    tolerance = 1e-7 if name == "float32" else 8e-3
    assert_close(out[0, 0, 1], v[0, 0].astype(np.float64).mean(0), tolerance)
    assert out.dtype == q.dtype
    with np.errstate(over="ignore"):
        twice = mask + mask  # -inf: now the row sees nothing
    assert not sdpa(q, k, v, attn_mask=twice)[0, 0, 1].any()


def test_rule_3_3_sums_are_float32_ones_for_float32():
    q, k, v = np.ones((1, 1)), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    single = [x.astype(np.float32) for x in (q, k, v)]
    for mask in ([-1e10, -1e10], [-1e39, -1e40]):  # the score is lost; beyond float32 both saturate
        assert sdpa(*single, attn_mask=np.array(mask)).item() == 0.5
    assert sdpa(q, k, v, attn_mask=np.array([-1e10, -1e10])).item() == pytest.approx(0.7310586)
    assert sdpa(q, k, v, attn_mask=np.array([-1e39, -1e40])).item() == 0


def test_rule_3_3_sums_saturate_in_float64_too():
    largest = np.finfo(np.float64).max
    q, k = np.array([[1.0]]), np.array([[-largest], [-largest]])
    out = sdpa(q, k, np.array([[0.0], [1.0]]), attn_mask=np.array([-largest, -largest]), scale=1.0)
    assert out.item() == 0.5


def test_rule_3_3_masks_of_other_dtypes():
    for dtype in (np.int64, np.uint8, complex):
        with pytest.raises(TypeError, match=r"attn_mask.*astype\(bool\)|attn_mask.*\.astype"):
            sdpa(Z(1, 1, 1, 2), Z(1, 1, 3, 2), R(3), attn_mask=np.ones(3, dtype))


def test_rule_3_3_masks_broadcast():
    B, H, L, S = 2, 3, 4, 5
    q, k, v = F((B, H, L, 2)), F((B, H, S, 2), 0.7), F((B, H, S, 3), 0.3)
    for shape in [(S,), (1, S), (L, S), (1, 1, 1, S), (B, 1, 1, S), (B, 1, L, 1), (1, H, L, S),
                  (H, 1, 1), (B, H, L, S), ()]:
        for mask in (F(shape, 1.3) > -0.5, F(shape, 1.3)):
            whole = np.broadcast_to(mask, (B, H, L, S)).copy()
            assert np.array_equal(sdpa(q, k, v, mask), sdpa(q, k, v, whole))
            assert np.array_equal(attention(q, k, v, mask=mask), sdpa(q, k, v, whole))
    for shape in [(L, S + 1), (S + 1,), (1, B, H, L, S), (2, L, S)]:
        with pytest.raises(ValueError, match="mask"):
            sdpa(q, k, v, np.ones(shape, bool))
    # three axes are heads, queries, keys
    mask = np.array([[[1, 0]], [[0, 1]]], bool)
    out = sdpa(Z(2, 2, 1, 1), Z(2, 2, 2, 1), np.broadcast_to(R(2), (2, 2, 2, 1)), mask)
    assert out[..., 0, 0].tolist() == [[0, 1], [0, 1]]


def test_rule_3_4_both_alignments():
    q, k = Z(1, 1, 2, 2), Z(1, 1, 5, 2)
    assert sdpa(q, k, R(5), is_causal=True).ravel().tolist() == [0, 0.5]
    for causal, expected in [(True, [0, 0.5]), ("top-left", [0, 0.5]), ("bottom-right", [1.5, 2])]:
        assert attention(q, k, R(5), causal=causal).ravel().tolist() == expected
    assert attention(q[:, :, :1], k, R(5), causal="bottom-right").item() == 2
    # more queries than keys: the first ones see nothing
    out, lse = attention(Z(1, 1, 5, 2), Z(1, 1, 2, 2), R(2), causal="bottom-right", return_lse=True)
    assert out.ravel().tolist() == [0, 0, 0, 0, 0.5]
    assert np.isneginf(lse[0, 0, :3]).all() and lse[0, 0, 3] == 0
    with pytest.raises(ValueError, match="causal"):
        attention(q, k, R(5), causal="bottom")


def test_rule_3_4_causal_and_mask_both_apply_or_are_refused():
    q, v, mask = Z(1, 1, 4, 2), R(4), np.array([0, 1, 1, 1], bool)
    assert attention(q, q, v, mask=mask, causal=True).ravel().tolist() == [0, 1, 1.5, 2]
    with pytest.raises(ValueError, match="attn_mask"):
        sdpa(q, q, v, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("window, expected", [
    ((2, 0), [0, 0.5, 1, 2, 3, 4, 5, 6]),
    ((3, 0), [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]),
    ((1, 1), [0.5, 1, 2, 3, 4, 5, 6, 6.5]),
    ((0, 0), range(8)),
    ((-1, -1), [3.5] * 8),
])
def test_rule_3_5_window_includes_both_ends(window, expected):
    out = attention(Z(1, 1, 8, 2), Z(1, 1, 8, 2), R(8), window=window)
    assert out.ravel().tolist() == list(expected)


def test_rule_3_5_window_like_causal_and_its_alignment():
    q, k, v = F((1, 1, 8, 2)), F((1, 1, 8, 2), 0.7), F((1, 1, 8, 3), 0.3)
    causal = attention(q, k, v, causal=True)
    for left in (7, 10**9, 10**30, -1):
        assert np.array_equal(attention(q, k, v, window=(left, 0)), causal)
    rows = (attention(q, k, v, window=(6, 0)) != causal).any((0, 1, 3))
    assert rows.tolist() == [False] * 7 + [True]
    two, five = Z(1, 1, 2, 2), Z(1, 1, 5, 2)
    assert attention(two, five, R(5), window=(1, 1)).ravel().tolist() == [0.5, 1]
    bottom = attention(two, five, R(5), window=(1, 1), causal="bottom-right")
    assert bottom.ravel().tolist() == [2.5, 3.5]
    with pytest.raises(ValueError, match="window"):
        attention(q, k, v, window=(-2, 0))
    with pytest.raises(TypeError, match="window"):
        attention(q, k, v, window=3)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rule_3_6_rows_that_see_nothing(name, kind):
    dtype = as_dtype(name)
    q, k, v = (F((1, 1, 3, n), s).astype(dtype) for n, s in ((4, 1), (4, 0.7), (2, 0.3)))
    mask = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 1]], bool)
    mask = mask if kind == "bool" else np.where(mask, 0, -np.inf).astype(np.float32)
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    expected = [[0.625263, 0.4223485], [0, 0], [0.5510126, 0.3442521]]
    tolerance = {"float64": 1e-7, "float32": 1e-7, "float16": 1e-3, "bfloat16": 8e-3}[name]
    assert_close(out[0, 0], expected, tolerance)
    assert not out[0, 0, 1].any() and np.isneginf(lse[0, 0, 1])
    weights = reference.attention_weights(q, k, mask=mask)
    assert not weights[0, 0, 1].any()
    assert_close(weights.sum(-1)[0, 0], [1, 0, 1], 1e-6)
    # one query alone, and heads in groups
    assert not attention(q[:, :, :1], k, v, mask=mask[1:2]).any()
    grouped = attention(np.repeat(q, 4, axis=1), np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1),
                        mask=mask)
    assert np.array_equal(grouped, np.repeat(out, 4, axis=1))
    grads = attention_backward(np.ones_like(out), q, k, v, out, lse, mask=mask)
    assert all(np.isfinite(g.astype(np.float64)).all() for g in grads)
    assert not grads[0][0, 0, 1].any()


HIDING = [
    {"mask": np.arange(6) < 4},
    {"mask": np.where(np.arange(6) < 4, 0.0, -np.inf)},
    {"key_lengths": [4, 4]},
    {"window": (1, 0), "causal": True},
    {"causal": True},
    {"mask": np.arange(6) < 4, "softcap": 1.0, "alibi_slopes": [0.5, 0.25], "sinks": [0.0, 1.0]},
    {"mask": np.arange(6) < 4, "dropout_p": 0.5, "rng": 3},
]


@pytest.mark.parametrize("options", HIDING)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_rule_3_7_hidden_keys_do_not_count(options, junk):
    q, k, v = (F((2, 2, 4, 3)), F((2, 2, 6, 3), 0.7), F((2, 2, 6, 2), 0.3))  # keys 4, 5 hidden
    dirty_k, dirty_v = k.copy(), v.copy()
    dirty_k[:, :, 4:] = dirty_v[:, :, 4:] = junk
    out, lse = attention(q, k, v, return_lse=True, **options)
    dirty, dirty_lse = attention(q, dirty_k, dirty_v, return_lse=True, **options)
    assert_close(dirty, out, 1e-7)
    assert np.array_equal(dirty_lse, lse)
    g = F(out.shape, 0.2)
    clean_grads = attention_backward(g, q, k, v, out, lse, **options)
    dirty_grads = attention_backward(g, q, dirty_k, dirty_v, out, lse, **options)
    for clean, grad in zip(clean_grads, dirty_grads, strict=True):
        assert_close(grad, clean, 1e-6)


def test_rule_3_7_visible_nan_stays_in_its_rows_and_columns():
    q, k, v = F((1, 1, 4, 3)), F((1, 1, 4, 3), 0.7), F((1, 1, 4, 2), 0.3)
    clean = attention(q, k, v, causal=True)
    for junk in (math.nan, math.inf):  # a score of +inf or NaN: the row
        bad = k.copy()
        bad[0, 0, 2] = junk * np.sign(q[0, 0, 2])
        out = attention(q, bad, v, causal=True)
        assert np.array_equal(out[0, 0, :2], clean[0, 0, :2]) and np.isnan(out[0, 0, 2]).all()
    bad = v.copy()
    bad[0, 0, 2, 1] = math.nan  # in V: the column
    out = attention(q, k, bad, causal=True)
    expected = np.zeros((4, 2), bool)
    expected[2:, 1] = True
    assert np.array_equal(np.isnan(out[0, 0]), expected)
    assert_close(out[~np.isnan(out)], clean[~np.isnan(out)], 1e-7)
    # behind a mask of -inf even a NaN score is hidden
    bad = k.copy()
    bad[0, 0, 3] = math.nan
    mask = np.array([0, 0, 0, -np.inf])
    assert np.array_equal(attention(q, bad, v, mask=mask), attention(q, k, v, mask=mask))


def test_rule_3_8_only_minus_infinity_hides():
    q, v = np.array([[1.0]]), np.array([[0.0], [1.0]])
    for base in (-1e300, -1e9, 1e9, 1e15):
        k = np.array([[base], [base]])
        assert reference.sdpa(q, k, v).item() == 0.5
    out = reference.sdpa(q, np.array([[-1e9], [-1e9 + 1]]), v)
    assert out.item() == pytest.approx(0.7310585786)
    assert reference.sdpa(q, np.array([[-np.inf], [-np.inf]]), v).item() == 0
    assert reference.sdpa(q, np.array([[-np.inf], [2.0]]), v).item() == 1


def test_rule_3_9_grouped_heads():
    v = np.array([1, 2], np.float32).reshape(1, 2, 1, 1)
    q, k = Z(1, 4, 1, 2), Z(1, 2, 1, 2)
    assert sdpa(q, k, v, enable_gqa=True).ravel().tolist() == [1, 1, 2, 2]
    assert attention(q, k, v).ravel().tolist() == [1, 1, 2, 2]
    with pytest.raises(ValueError, match="enable_gqa"):
        sdpa(q, k, v)
    assert sdpa(q, k[:, :1], v[:, :1]).ravel().tolist() == [1, 1, 1, 1]
    for call in (lambda x: attention(x, k, v), lambda x: sdpa(x, k, v, enable_gqa=True)):
        with pytest.raises(ValueError, match=r"3.*2"):
            call(Z(1, 3, 1, 2))


def test_rule_3_9_one_batch_member_serves_all():
    q, k, v = F((3, 4, 5, 2)), F((1, 2, 6, 2), 0.7), F((1, 2, 6, 3), 0.3)
    k3, v3 = np.repeat(k, 3, axis=0), np.repeat(v, 3, axis=0)
    out, lse = attention(q, k, v, return_lse=True)
    assert np.array_equal(out, attention(q, k3, v3))
    assert np.array_equal(out, attention(q, k, v3))
    g = F(out.shape, 0.2)
    dq, dk, dv = attention_backward(g, q, k, v, out, lse)
    dq3, dk3, dv3 = attention_backward(g, q, k3, v3, out, lse)
    assert np.array_equal(dq, dq3)
    assert_close(dk, dk3.sum(0, keepdims=True), 1e-6)
    assert_close(dv, dv3.sum(0, keepdims=True), 1e-6)
    with pytest.raises(ValueError, match="key"):
        attention(q, k3[:2], v3[:2])


def test_rule_3_9_leading_axes_broadcast():
    q, k, v = F((2, 1, 3, 5, 4)), F((4, 1, 6, 4), 0.7), F((6, 2), 0.3)
    out = sdpa(q, k, v)
    assert out.shape == (2, 4, 3, 5, 2)
    assert_close(out[1, 2, 1], sdpa(q[1, 0, 1], k[2, 0], v), 1e-7)
    assert sdpa(F((1, 2, 4)), F((3, 6, 4)), F((1, 6, 2))).shape == (3, 2, 2)


def pack(x, lengths):
    """(B, H, L, D) -> (T, H, D)."""
    return np.concatenate([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lengths)])


def test_rule_3_10_padded_equals_packed():
    q, k, v = (F((3, 4, 5, 3), 1, "f8"), F((3, 2, 7, 3), 0.7, "f8"), F((3, 2, 7, 2), 0.3, "f8"))
    queries, keys = np.array([5, 0, 3]), np.array([7, 2, 4])
    cu_q, cu_k = np.array([0, 5, 5, 8]), np.array([0, 7, 9, 13], np.int32)
    for options in ({}, {"causal": True}, {"causal": "bottom-right", "window": (2, 1)},
                    {"causal": "bottom-right", "alibi_slopes": reference.alibi_slopes(4),
                     "dropout_p": 0.4, "rng": 5, "sinks": np.arange(4.0)}):
        lengths = {"key_lengths": keys, "query_lengths": queries}
        out, lse = attention(q, k, v, return_lse=True, **options, **lengths)
        assert not out[1].any() and not out[2, :, 3:].any() and np.isneginf(lse[2, :, 3:]).all()
        packed = pack(q, queries), pack(k, keys), pack(v, keys)
        got, got_lse = reference.attention_varlen(*packed, cu_q, cu_k, return_lse=True, **options)
        assert_close(got, pack(out, queries))
        assert_close(got_lse, np.concatenate([lse[0], lse[2, :, :3]], axis=-1))

        g = F(out.shape, 0.2, "f8")
        sinks = "sinks" in options
        grads = attention_backward(g, q, k, v, out, lse, **options, **lengths, grad_sinks=sinks)
        got = reference.attention_varlen_backward(
            pack(g, queries), *packed, got, got_lse, cu_q, cu_k, **options, grad_sinks=sinks
        )
        for x, y, n in zip(got, grads, (queries, keys, keys), strict=False):
            assert_close(x, pack(y, n))
        assert not grads[0][2, :, 3:].any() and not grads[1][1].any()
        if sinks:
            assert_close(got[3], grads[3])


def test_rule_3_10_rows_past_the_last_offset():
    q = v = F((6, 2, 3))
    out, lse = reference.attention_varlen(q, q, v, [0, 2, 4], return_lse=True)
    assert not out[4:].any() and np.isneginf(lse[:, 4:]).all() and np.isfinite(lse[:, :4]).all()
    for grad in reference.attention_varlen_backward(out, q, q, v, out, lse, [0, 2, 4]):
        assert grad.shape == (6, 2, 3) and not grad[4:].any()
    for wrong in ([1, 2], [0, 3, 2], [0, 7], [], [[0, 2]]):
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            reference.attention_varlen(q, q, v, np.array(wrong, np.int64))
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        reference.attention_varlen(q, q, v, [0.0, 2.0])
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        reference.attention_varlen(q, q, v, [0, 2, 4], [0, 4])


def test_rule_3_10_wrong_lengths():
    q, v = Z(2, 1, 3, 2), Z(2, 1, 3, 1)
    for wrong in ([4, 1], [-1, 1], [1], [[1, 1]]):
        with pytest.raises(ValueError, match="key_lengths"):
            attention(q, q, v, key_lengths=wrong)
    with pytest.raises(TypeError, match="query_lengths"):
        attention(q, q, v, query_lengths=[1.0, 2.0])


def test_rule_3_11_split_keys_merge_to_the_whole():
    q, k, v = F((2, 2, 3, 4), 1, "f8"), F((2, 2, 9, 4), 0.7, "f8"), F((2, 2, 9, 3), 0.3, "f8")
    mask = np.broadcast_to(np.arange(9) >= [[3], [9], [0]], (3, 9))  # row 1 sees nothing
    whole = attention(q, k, v, mask=mask, return_lse=True)
    for n in range(1, 9):
        parts = [
            attention(q, k[:, :, j], v[:, :, j], mask=mask[:, j], return_lse=True)
            for j in np.array_split(np.arange(9), n)
        ]
        merged = reference.merge_attention(*zip(*parts, strict=True))
        assert_close(merged[0], whole[0])
        assert_close(merged[1], whole[1])


def test_rule_3_11_merging_empty_parts():
    nothing, empty = np.zeros((2, 3), np.float32), np.full(2, -np.inf, np.float32)
    out, lse = F((2, 3)), F((2,), 0.3)
    merged = reference.merge_attention([nothing, nothing], [empty, empty])
    assert not merged[0].any() and np.isneginf(merged[1]).all()
    for parts in ([(nothing, empty), (out, lse)], [(out, lse), (nothing * np.nan, empty)]):
        merged = reference.merge_attention(*zip(*parts, strict=True))
        assert np.array_equal(merged[0], out) and np.array_equal(merged[1], lse)
        assert merged[0].dtype == merged[1].dtype == np.float32
    with pytest.raises(ValueError, match="outs"):
        reference.merge_attention([], [])
    with pytest.raises(ValueError, match="lses"):
        reference.merge_attention([out], [lse[:1]])


def test_rule_3_12_sinks():
    out, lse = attention(Z(1, 2, 1, 1), Z(1, 2, 3, 1), R(3)[:, [0, 0]], sinks=[0.0, math.log(3)],
                         return_lse=True)
    assert_close(out.ravel(), [3 / 4, 3 / 6], 1e-7)
    assert_close(lse.ravel(), [math.log(3)] * 2, 1e-7)
    q, k, v = F((1, 2, 3, 4)), F((1, 2, 5, 4), 0.7), F((1, 2, 5, 2), 0.3)
    assert np.array_equal(attention(q, k, v, sinks=[-np.inf, -np.inf]), attention(q, k, v))
    out, lse = attention(q, k, v, sinks=[1e9, 1e9], return_lse=True)
    assert not out.any()
    for grad in attention_backward(out + 1, q, k, v, out, lse, sinks=[1e9, 1e9], grad_sinks=True):
        assert not grad.any()
    assert not attention(q, k, v, sinks=[1.0, 1.0], mask=np.zeros(5, bool)).any()
    with pytest.raises(ValueError, match="sinks"):
        attention(q, k, v, sinks=[1.0])


def test_rule_3_12_alibi_uses_absolute_positions():
    q, k, v = F((1, 6, 9, 4), 1, "f8"), F((1, 6, 9, 4), 0.7, "f8"), F((1, 6, 9, 2), 0.3, "f8")
    slopes = reference.alibi_slopes(6)
    whole = attention(q, k, v, causal=True, alibi_slopes=slopes)
    last = attention(q[:, :, 7:], k, v, causal="bottom-right", alibi_slopes=slopes)
    assert_close(last, whole[:, :, 7:])
    bias = -slopes[:, None, None] * np.abs(np.arange(9)[:, None] - np.arange(9))
    assert_close(attention(q, k, v, alibi_slopes=slopes), attention(q, k, v, mask=bias))


def test_section_5_alibi_slopes_of_the_published_code():
    assert reference.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert reference.alibi_slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    expected = [2.0**-n for n in range(1, 9)] + [2.0**-n for n in (0.5, 1.5, 2.5, 3.5)]
    assert_close(reference.alibi_slopes(12), expected, 1e-15)
    assert reference.alibi_slopes(1).tolist() == [2.0**-8]
    with pytest.raises(ValueError, match="n_heads"):
        reference.alibi_slopes(0)


@pytest.mark.parametrize("counter, key, expected", [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
])
def test_rule_3_13_philox_known_answers(counter, key, expected):
    counter, key = ([int(word, 16) for word in text.split()] for text in (counter, key))
    words = reference.philox4x32(counter, key)
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_rule_3_13_pattern_is_that_of_the_rule():
    seed, p, positions = 0x123456789ABCDEF0, 0.3, np.array([[0, 5, 2], [7, 8, -1]])
    kept = reference.dropout_mask(seed, p, [3, 1], 2, positions, 7)
    for b, h, i, j in np.ndindex(2, 2, 3, 7):
        word = philox_word(seed, (3, 1)[b], h, int(positions[b, i]), j)
        assert kept[b, h, i, j] == (word >= p * 2**32)
    word = philox_word(0, 0, 0, 0, 1)
    for p, expected in [(word / 2**32, True), ((word + 0.5) / 2**32, False)]:
        assert reference.dropout_mask(0, p, [0], 1, [0], 2)[0, 0, 0, 1] == expected


def test_rule_3_13_dropout_scale_and_range():
    q, k, v = Z(1, 1, 10_000, 1), Z(1, 1, 4, 1), np.ones((1, 1, 4, 1), np.float32)
    out = sdpa(q, k, v, dropout_p=0.25, rng=0)
    assert_close(np.unique(out), [0, 1 / 3, 2 / 3, 1, 4 / 3], 1e-7)
    assert abs(out.mean() - 1) < 0.012
    assert np.array_equal(out, sdpa(q, k, v, dropout_p=0.25, rng=0))
    half = sdpa(*(x.astype(np.float16) for x in (q, k, v)), dropout_p=0.25, rng=0)
    assert np.array_equal(out.astype(np.float16), half)
    assert not np.array_equal(out, sdpa(q, k, v, dropout_p=0.25))
    assert not sdpa(q, k, v, dropout_p=1).any()
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="dropout_p"):
            sdpa(q, k, v, dropout_p=wrong)


def legacy_state():
    """NumPy's global random state, which nothing may touch."""
    return np.random.get_state()[1].tolist()  # noqa: NPY002


def test_rule_3_13_generator_gives_one_uint64():
    q, k, v = F((2, 2, 5, 3)), F((2, 2, 6, 3), 0.7), F((2, 2, 6, 2), 0.3)
    rng, twin = np.random.default_rng(7), np.random.default_rng(7)
    before = legacy_state()
    out = sdpa(q, k, v, dropout_p=0.5, rng=rng)
    seed = int(twin.bit_generator.random_raw())
    assert np.array_equal(out, sdpa(q, k, v, dropout_p=0.5, rng=seed))
    assert rng.random() == twin.random()
    sdpa(q, k, v, dropout_p=0.5)
    sdpa(q, k, v, dropout_p=0.0, rng=rng)
    assert rng.random() == twin.random()  # p = 0 draws nothing
    assert legacy_state() == before
    for wrong in (-1, 2**64):
        with pytest.raises(ValueError, match="rng"):
            sdpa(q, k, v, dropout_p=0.5, rng=wrong)
    with pytest.raises(TypeError, match="rng"):
        sdpa(q, k, v, dropout_p=0.5, rng=0.5)


def test_rule_3_13_members_and_positions():
    q, k, v = (F((2, 3, 2, *size), 0.7, "f8") for size in ((5, 4), (8, 4), (8, 2)))
    flat = [x.reshape(6, *x.shape[2:]) for x in (q, k, v)]
    out = sdpa(q, k, v, dropout_p=0.5, rng=9)
    assert np.array_equal(out.reshape(6, 2, 5, 2), attention(*flat, dropout_p=0.5, rng=9))
    options = {"causal": "bottom-right", "dropout_p": 0.5, "rng": 9}
    whole = attention(*flat, **options)
    assert_close(attention(flat[0][:, :, 3:], *flat[1:], **options), whole[:, :, 3:])


def test_rule_3_14_strides_and_results():
    base = [F((2, 3, 5, 4)), F((2, 3, 7, 4), 0.7), F((2, 3, 7, 2), 0.3)]
    expected = attention(*base)
    views = {
        "transposed": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
        "fortran": np.asfortranarray,
        "negative": lambda x: np.ascontiguousarray(x[:, ::-1, :, ::-1])[:, ::-1, :, ::-1],
        "stepped": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        "swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    }
    for view in views.values():
        given = [view(x) for x in base]
        for x in given:
            x.flags.writeable = False
        out = attention(*given)
        assert np.array_equal(out, expected)
        assert out.flags.c_contiguous and out.flags.writeable and out.dtype.isnative
    one_row = np.broadcast_to(F((1, 1, 1, 4)), (2, 3, 33, 4))
    assert_close(attention(base[0], one_row, one_row), np.broadcast_to(F((4,)), (2, 3, 5, 4)), 1e-7)


def test_rule_3_14_out():
    q, k, v = F((2, 3, 5, 4)), F((2, 3, 7, 4), 0.7), F((2, 3, 7, 2), 0.3)
    out = np.empty((2, 3, 5, 2), np.float32)
    assert attention(q, k, v, out=out) is out
    assert np.array_equal(out, attention(q, k, v))
    with pytest.raises(ValueError, match="out"):
        attention(q, k, v, out=np.empty((2, 3, 5, 4), np.float32))
    with pytest.raises(TypeError, match="out"):
        attention(q, k, v, out=np.empty((2, 3, 5, 2)))
    buffer = np.zeros((2, 3, 5, 8), np.float32)
    q_part, out_part = buffer[..., :4], buffer[..., 4:]
    attention(q_part, q_part, q_part, out=out_part)  # interleaved, not shared
    with pytest.raises(ValueError, match="out"):
        attention(q_part, q_part, q_part, out=buffer[..., 2:6])


@pytest.mark.parametrize("B, H, L, S, E", [
    (0, 2, 3, 4, 5), (1, 0, 3, 4, 5), (1, 2, 0, 4, 5), (1, 2, 3, 0, 5), (1, 2, 3, 4, 0),
])
@pytest.mark.parametrize("name", ["float64", "float16"])
def test_rule_3_15_zero_sizes(B, H, L, S, E, name):
    q, k, v = (np.ones(s, name) for s in ((B, H, L, 2), (B, H, S, 2), (B, H, S, E)))
    mask = np.zeros((L, S))
    out, lse = attention(q, k, v, mask=mask, causal=True, dropout_p=0.5, rng=1, return_lse=True)
    assert out.shape == (B, H, L, E) and out.dtype == name and lse.shape == (B, H, L)
    if S == 0:
        assert not out.any() and np.isneginf(lse).all()
    grads = attention_backward(out, q, k, v, out, lse, mask=mask, causal=True, dropout_p=0.5, rng=1,
                               grad_mask=True)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape, mask.shape]
    assert sdpa(q, k, v, enable_gqa=True).shape == (B, H, L, E)
    assert reference.attention_weights(q, k).shape == (B, H, L, S)


def test_rule_3_15_value_size_of_its_own():
    out = sdpa(F((2, 3, 5, 8)), F((2, 3, 7, 8), 0.7), F((2, 3, 7, 3), 0.3))
    assert out.shape == (2, 3, 5, 3)
    assert_close(out[0, 0, 0], [0.3524112, 0.3839862, 0.3812608], 1e-7)
    assert_close(out[1, 2, 4], [0.1295431, -0.014069, -0.1564243], 1e-7)


def test_rule_3_16_layouts():
    q, k, v = F((2, 4, 5, 3)), F((2, 2, 6, 3), 0.7), F((2, 2, 6, 2), 0.3)
    swapped = [x.swapaxes(1, 2) for x in (q, k, v)]
    options = {"causal": True, "alibi_slopes": reference.alibi_slopes(4)}
    out, lse = attention(q, k, v, return_lse=True, **options)
    got, got_lse = attention(*swapped, return_lse=True, layout="BLHD", **options)
    assert np.array_equal(got.swapaxes(1, 2), out) and np.array_equal(got_lse, lse)
    assert got.flags.c_contiguous
    grads = attention_backward(out, q, k, v, out, lse, **options)
    got = attention_backward(got, *swapped, got, lse, layout="BLHD", **options)
    for x, y in zip(got, grads, strict=True):
        assert np.array_equal(x.swapaxes(1, 2), y)
    with pytest.raises(ValueError, match="layout"):
        attention(q, k, v, layout="LBHD")


def test_attention_weights_of_chosen_heads_and_rows():
    q, k = F((2, 4, 5, 3), dtype=np.float16), F((2, 2, 6, 3), 0.7, np.float16)
    whole = reference.attention_weights(q, k, causal=True, dropout_p=0.5)
    assert whole.dtype == np.float32 and whole.shape == (2, 4, 5, 6)
    chosen = reference.attention_weights(q, k, causal=True, heads=[2, 0], rows=slice(1, 3))
    assert np.array_equal(chosen, whole[:, [2, 0], 1:3])
    one = reference.attention_weights(q, k, causal=True, heads=3, rows=-1)
    assert np.array_equal(one, whole[:, 3:, -1:])
    with pytest.raises(ValueError, match="heads"):
        reference.attention_weights(q, k, heads=[4])


# Gradients


def central_differences(f, x, step=1e-6):
    grad = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        if np.isfinite(x[index]):
            value = x[index]
            x[index] = value + step
            above = f()
            x[index] = value - step
            grad[index] = (above - f()) / (2 * step)
            x[index] = value
    return grad


@pytest.mark.parametrize("seed", range(60, 84))
def test_gradients_equal_finite_differences(seed):
    q, k, v, options = random_case(seed)
    out, lse = attention(q, k, v, return_lse=True, **options)
    weight = np.random.default_rng(seed).normal(size=out.shape)
    mask, sinks = options.get("mask"), options.get("sinks")
    wanted = {"grad_mask": mask is not None and mask.dtype != bool, "grad_sinks": sinks is not None}
    grads = attention_backward(weight, q, k, v, out, lse, **wanted, **options)
    inputs = [q, k, v] + [mask] * wanted["grad_mask"] + [sinks] * wanted["grad_sinks"]
    for x, grad in zip(inputs, grads, strict=True):
        numeric = central_differences(lambda: (attention(q, k, v, **options) * weight).sum(), x)
        assert grad.shape == x.shape and grad.dtype == x.dtype
        assert_close(grad, numeric, 1e-7)


def test_gradient_arguments():
    q, v, mask = F((1, 2, 3, 4)), F((1, 2, 3, 2), 0.3), np.ones((3, 3), bool)
    out, lse = attention(q, q, v, return_lse=True)
    for wrong in ({"grad_mask": True}, {"grad_mask": True, "mask": mask}, {"grad_sinks": True}):
        with pytest.raises(ValueError, match="grad_"):
            attention_backward(out, q, q, v, out, lse, **wrong)
    with pytest.raises(ValueError, match="rng"):
        attention_backward(out, q, q, v, out, lse, dropout_p=0.5)
    with pytest.raises(ValueError, match="lse"):
        attention_backward(out, q, q, v, out, lse[:, :1])
    with pytest.raises(TypeError, match="grad_out"):
        attention_backward(out.astype(np.float64), q, q, v, out, lse)


def torch_attention(q, k, v, o, visible, kept):
    """Every option as a formula that PyTorch can differentiate; who is visible is given."""
    torch = pytest.importorskip("torch")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    L, S = q.shape[2], k.shape[2]
    scores = q @ k.transpose(-1, -2) * o.get("scale", q.shape[3] ** -0.5)
    if "softcap" in o:
        scores = o["softcap"] * torch.tanh(scores / o["softcap"])
    if "alibi_slopes" in o:
        positions = np.arange(L) + (S - L if o.get("causal") == "bottom-right" else 0)
        distance = np.abs(positions[:, None] - np.arange(S))
        scores = scores - torch.from_numpy(o["alibi_slopes"][:, None, None] * distance)
    if "mask" in o and o["mask"].dtype != torch.bool:
        scores = scores + o["mask"]
    visible, kept = torch.from_numpy(visible), torch.from_numpy(kept)
    scores = torch.where(visible, scores, torch.full_like(scores, -1e300))
    if "sinks" in o:
        sink = o["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.where(visible, torch.softmax(scores, -1)[..., :S], 0.0)
    return (weights * kept) @ v


@pytest.mark.parametrize("seed", range(100, 140))
def test_results_and_gradients_equal_pytorch(seed):
    torch = pytest.importorskip("torch")
    q, k, v, options = random_case(seed)
    options = {n: x for n, x in options.items() if not n.endswith("lengths")}
    hiding = {n: x for n, x in options.items() if n in ("mask", "causal", "window")}
    visible = plain_attention(q, k, v, scale=0.0, **hiding)[2] > 0
    kept = np.ones(visible.shape)
    if p := options["dropout_p"]:
        shift = k.shape[2] - q.shape[2] if options["causal"] == "bottom-right" else 0
        for b, h, i, j in np.ndindex(kept.shape):
            kept[b, h, i, j] = philox_word(options["rng"], b, h, i + shift, j) >= p * 2**32
        kept /= 1 - p
    tensors = {n: torch.tensor(x) for n, x in options.items() if n in ("mask", "sinks")}
    inputs = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    for x in tensors.values():
        if x.dtype != torch.bool:
            inputs.append(x.requires_grad_())
    expected = torch_attention(*inputs[:3], {**options, **tensors}, visible, kept)
    weight = np.random.default_rng(seed).normal(size=expected.shape)
    expected.backward(torch.from_numpy(weight))

    out, lse = attention(q, k, v, return_lse=True, **options)
    assert_close(out, expected.detach().numpy())
    wanted = {"grad_mask": "mask" in tensors and tensors["mask"].dtype != torch.bool,
              "grad_sinks": "sinks" in tensors}
    grads = attention_backward(weight, q, k, v, out, lse, **wanted, **options)
    for grad, x in zip(grads, inputs, strict=True):
        expected_grad = np.zeros(x.shape) if x.grad is None else x.grad.numpy()
        assert_close(grad, np.where(np.isfinite(x.detach().numpy()), expected_grad, 0))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (3, 5, 4), (5, 4), (2, 1, 3, 5, 4)])
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "gqa"])
def test_scaled_dot_product_attention_is_that_of_pytorch(dtype, shape, kind):
    torch = pytest.importorskip("torch")
    q, k = F(shape, 1, dtype), F((*shape[:-2], 7, 4), 0.7, dtype)
    v, options = F((*shape[:-2], 7, 6), 0.3, dtype), {}
    if kind == "causal":
        options = {"is_causal": True}
    elif kind in ("bool", "float"):
        options = {"attn_mask": F((5, 7), 1.3, dtype)}
        if kind == "bool":
            options["attn_mask"] = options["attn_mask"] > -0.5
    elif kind == "gqa" and len(shape) == 4:
        q, options = F((2, 6, 5, 4), 1, dtype), {"enable_gqa": True, "scale": 0.3}
    as_tensors = {n: torch.tensor(x) if n == "attn_mask" else x for n, x in options.items()}
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.tensor(x) for x in (q, k, v)), **as_tensors
    )
    assert_close(sdpa(q, k, v, **options), expected.numpy(), 1e-12 if dtype == "float64" else 1e-6)


# Functions of section 1


def test_softmax():
    x = F((3, 4, 5), dtype="f8") * 50
    for axis in (-1, 0, 1):
        expected = np.exp(x - x.max(axis, keepdims=True))
        expected /= expected.sum(axis, keepdims=True)
        assert_close(reference.softmax(x, axis), expected, 1e-15)
    assert reference.softmax([1, 1]).tolist() == [0.5, 0.5]
    assert reference.softmax(np.array([1e4, 0], np.float16)).dtype == np.float16
    assert reference.softmax([-np.inf, -np.inf]).tolist() == [0, 0]
    assert np.isnan(reference.softmax([1.0, np.nan])).all()
    assert np.isnan(reference.softmax([1.0, np.inf])).all()
    assert reference.softmax(np.zeros((2, 0))).shape == (2, 0)
    with pytest.raises(TypeError, match="x"):
        reference.softmax([1j])


def test_multi_head_attention_in_five_steps():
    X, W = F((2, 6, 8), dtype="f8"), [F((8, 8), s, "f8") for s in (0.7, 0.3, 1.1, 1.7)]
    steps = []
    out = reference.multi_head_attention(X, *W, 4, trace=lambda *step: steps.append(step))
    assert [step for step, _ in steps] == ["project", "split", *["attend"] * 4, "concat", "output"]
    assert dict(steps) == {"project": (2, 6, 8), "split": (2, 4, 6, 2), "attend": (2, 6, 2),
                           "concat": (2, 6, 8), "output": (2, 6, 8)}
    q, k, v = ((X @ w).reshape(2, 6, 4, 2).swapaxes(1, 2) for w in W[:3])
    joined = plain_attention(q, k, v)[0].swapaxes(1, 2).reshape(2, 6, 8)
    assert_close(out, joined @ W[3])
    assert_close(reference.multi_head_attention(X[1], *W, 4), out[1])
    assert reference.multi_head_attention(*(x.astype("f4") for x in (X, *W)), 2).dtype == "f4"
    with pytest.raises(ValueError, match="h=3"):
        reference.multi_head_attention(X, *W, 3)
    with pytest.raises(ValueError, match="W_O"):
        reference.multi_head_attention(X, *W[:3], W[3][:7], 4)


# The class of section 2


class Textbook:
    """The class that people learn from."""

    def __init__(self, d_model, n_heads, seed=0):
        self.d_model, self.n_heads, self.d_k = d_model, n_heads, d_model // n_heads
        rng, s = np.random.default_rng(seed), 1 / np.sqrt(d_model)
        self.Wq, self.bq = rng.normal(0, s, (d_model, d_model)), np.zeros(d_model)
        self.Wk, self.bk = rng.normal(0, s, (d_model, d_model)), np.zeros(d_model)
        self.Wv, self.bv = rng.normal(0, s, (d_model, d_model)), np.zeros(d_model)
        self.Wo, self.bo = rng.normal(0, s, (d_model, d_model)), np.zeros(d_model)

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


NAMES = ["Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo", "bo"]


def test_rule_2_1_weights_are_bit_identical():
    ours, book = reference.MultiHeadAttention(24, 4, 7), Textbook(24, 4, 7)
    for name in NAMES:
        assert np.array_equal(getattr(ours, name), getattr(book, name))
        assert getattr(ours, name).dtype == np.float64
    x = F((2, 5, 24), dtype="f8")
    for layer in (ours, book):
        layer.Wv = layer.Wv + 1
        layer.bo[:] = 3
    assert_close(ours(x), book.forward(x))


def test_rule_2_2_parameters():
    layer = reference.MultiHeadAttention(24, 4)
    assert all(x is getattr(layer, n) for x, n in zip(layer.parameters(), NAMES, strict=True))
    assert sum(x.size for x in layer.parameters()) == 4 * 24**2 + 4 * 24


@pytest.mark.parametrize("causal", [False, True])
def test_rule_2_4_and_2_5_result_and_weights_of_the_textbook(causal):
    ours, book = reference.MultiHeadAttention(24, 4, 1), Textbook(24, 4, 1)
    x = np.random.default_rng(0).normal(size=(3, 7, 24))
    assert_close(ours.forward(x, causal), book.forward(x, causal))
    assert_close(ours.attn, book.attn)
    assert np.array_equal(ours(x, causal=causal), ours.forward(x, causal))
    single = reference.MultiHeadAttention(24, 4, 1, dtype=np.float32)
    assert_close(single(x, causal), book.forward(x, causal), 1e-5)


def test_rule_2_5_attn_before_a_call_and_in_copies():
    layer = reference.MultiHeadAttention(8, 2)
    with pytest.raises(AttributeError, match="call"):
        _ = layer.attn
    out = layer(F((1, 3, 8)))
    assert layer.attn.shape == (1, 2, 3, 3)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not hasattr(twin, "attn")
        assert np.array_equal(twin(F((1, 3, 8))), out)


def test_rule_2_6_causality_is_exact():
    layer, x = reference.MultiHeadAttention(16, 4), F((2, 9, 16), dtype="f8")
    before = layer(x, causal=True)
    changed = x.copy()
    changed[:, 5:] += 1
    after = layer(changed, causal=True)
    assert np.array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5] != after[:, 5]).any()


def test_rule_2_7_and_2_8_arguments():
    with pytest.raises(ValueError, match="d_model"):
        reference.MultiHeadAttention(10, 3)
    with pytest.raises(ValueError, match="n_kv_heads"):
        reference.MultiHeadAttention(12, 4, n_kv_heads=3)
    layer = reference.MultiHeadAttention(8, 2)
    for wrong in (np.zeros((3, 8)), np.zeros((1, 3, 9))):
        with pytest.raises(ValueError, match="x: expected"):
            layer(wrong)
    with pytest.raises(TypeError, match="x"):
        layer(np.zeros((1, 3, 8), complex))
    layer.Wq = np.zeros((8, 7))
    with pytest.raises(ValueError, match="Wq"):
        layer(np.zeros((1, 3, 8)))
    x = np.arange(24).reshape(1, 3, 8) % 5
    for dtype in (np.int32, np.uint8, np.float32, np.float16):
        layer = reference.MultiHeadAttention(8, 2)
        out = layer(x.astype(dtype))
        assert out.dtype == np.float64 and np.array_equal(out, layer(x.astype(np.float64)))


@pytest.mark.parametrize("name", DTYPES)
def test_section_2_dtypes(name):
    layer = reference.MultiHeadAttention(8, 2, dtype=as_dtype(name))
    out = layer(np.ones((1, 3, 8)))
    assert out.dtype == as_dtype(name)
    assert all(x.dtype == as_dtype(name) for x in layer.parameters())
    assert layer.attn.dtype == (np.float64 if name == "float64" else np.float32)


def test_section_2_heads_are_split_by_transposing():
    layer = reference.MultiHeadAttention(4, 2)
    layer.Wq = layer.Wk = layer.Wv = layer.Wo = np.eye(4)
    x = np.array([[[1, 0, 0, 0], [0, 0, 0, 1]]])
    assert_close(layer(x)[0], [[0.6697615, 0, 0, 0.5], [0.5, 0, 0, 0.6697615]], 1e-7)


def test_section_2_lengths_are_padding():
    layer = reference.MultiHeadAttention(8, 2)
    layer.bv[:], layer.bo[:] = 1, 2
    x = F((2, 3, 8), dtype="f8")
    out = layer(x, lengths=[3, 1])
    assert_close(out[1, 0], (x[1, 0] @ layer.Wv + layer.bv) @ layer.Wo + layer.bo)
    assert not out[1, 1:].any()
    assert not layer.attn[1, :, 1:].any() and not layer.attn[1, :, :, 1:].any()
    junk = x.copy()
    junk[1, 1:] = np.nan
    assert np.array_equal(layer(junk, lengths=[3, 1]), out)
    # the same as a mask: every row of member 1 sees its first token alone
    mask = (np.arange(3) < np.array([3, 1])[:, None])[:, None, None]
    masked = layer(x, mask=mask)
    assert_close(masked[0], out[0])
    assert_close(masked[1], np.broadcast_to(out[1, 0], (3, 8)))


def test_section_2_causal_and_padding_both_apply():
    layer = reference.MultiHeadAttention(1, 1)
    layer.Wq[:], layer.Wk[:], layer.Wv[:], layer.Wo[:] = 0, 0, 1, 1
    x = np.arange(4.0).reshape(1, 4, 1)
    out = layer(x, causal=True, mask=np.array([0, 1, 1, 1], bool))
    np.testing.assert_allclose(out.ravel(), [0, 1, 1.5, 2], rtol=1e-15)  # the last bit is NumPy's


def test_section_2_context_groups_and_other_options():
    rng = np.random.default_rng(3)
    x, context = rng.normal(size=(2, 4, 12)), rng.normal(size=(2, 5, 12))
    layer = reference.MultiHeadAttention(
        12, 4, n_kv_heads=2, bias=False, window=(2, 1), softcap=1.5, alibi=True
    )
    assert layer.Wk.shape == layer.Wv.shape == (12, 6)
    assert layer.bq is None and len(layer.parameters()) == 4
    q = (x @ layer.Wq).reshape(2, 4, 4, 3).swapaxes(1, 2)
    k, v = ((context @ w).reshape(2, 5, 2, 3).swapaxes(1, 2) for w in (layer.Wk, layer.Wv))
    heads, _, weights = plain_attention(
        q, k, v, causal=True, window=(2, 1), softcap=1.5, key_lengths=[5, 2], query_lengths=[3, 4],
        alibi_slopes=reference.alibi_slopes(4),
    )
    out = layer(x, causal=True, context=context, lengths=[3, 4], context_lengths=[5, 2])
    assert_close(out, heads.swapaxes(1, 2).reshape(2, 4, 12) @ layer.Wo)
    assert_close(layer.attn, weights)
    with pytest.raises(ValueError, match="context_lengths"):
        layer(x, context_lengths=[5, 2])


def test_section_2_dropout_acts_in_training_only():
    layer, x = reference.MultiHeadAttention(8, 2, dropout=0.5), F((2, 5, 8), dtype="f8")
    plain = reference.MultiHeadAttention(8, 2)
    assert np.array_equal(layer(x), plain(x))
    dropped = layer(x, training=True, rng=4)
    assert np.array_equal(dropped, layer(x, training=True, rng=4))
    assert not np.array_equal(dropped, plain(x))
    assert np.array_equal(layer.attn, plain.attn)


@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_section_2_backward_equals_finite_differences(with_context, bias):
    rng = np.random.default_rng(5)
    layer = reference.MultiHeadAttention(4, 2, n_kv_heads=1, bias=bias, dropout=0.3, softcap=2.0)
    x, context = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 4, 4))
    weight = rng.normal(size=(2, 3, 4))
    options = {"lengths": [2, 3], "training": True, "rng": 8}
    options |= {"context": context, "context_lengths": [4, 2]} if with_context else {"causal": True}
    with pytest.raises(RuntimeError, match="training"):
        layer.backward(weight)
    layer(x, **options)
    grads = layer.backward(weight)
    grads = [*(grads if with_context else [grads]), *layer.grads]
    inputs = [x, *([context] if with_context else []), *layer.parameters()]
    for value, grad in zip(inputs, grads, strict=True):
        numeric = central_differences(lambda: (layer(x, **options) * weight).sum(), value)
        assert grad.dtype == np.float64
        assert_close(grad, numeric, 1e-7)
    layer(x)
    with pytest.raises(RuntimeError, match="training"):
        layer.backward(weight)
