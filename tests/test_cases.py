"""Bugs that were reported of other libraries, by their number in the project's collection of cases.

Inputs and values are the project's own. Each stands for a kind of bug; the other tests go through
the kinds.
"""

import concurrent.futures
import itertools
import math
import warnings

import numpy as np
import pytest
from comparing import assert_close, assert_same_bits, error
from drawing import FLOATS, SAME_NUMBERS, arrange, as_dtype

import fastmha
from fastmha import attention, attention_weights, merge_attention, reference
from fastmha import scaled_dot_product_attention as sdpa

T, F_ = True, False
NAN, INF = math.nan, math.inf


def F(shape, s=1.0, dtype=np.float32):
    """cos(s), cos(2 s), ... in the given shape."""
    return np.cos(s * np.arange(1, math.prod(shape) + 1)).reshape(shape).astype(dtype)


def Z(*shape, dtype=np.float32):
    """Zero queries and keys: the output is the plain mean of the visible rows of V."""
    return np.zeros(shape, dtype)


def R(n, dtype=np.float32):
    """V = 0, 1, 2, ..."""
    return np.arange(n).reshape(1, 1, n, 1).astype(dtype)


def three(dtype=np.float32):
    """Query, key and value of A1."""
    return F((1, 1, 3, 4), 1, dtype), F((1, 1, 3, 4), 0.7, dtype), F((1, 1, 3, 2), 0.3, dtype)


def near(actual, expected, tolerance=2e-7):
    return np.allclose(np.asarray(actual).astype(np.float64).ravel(), np.ravel(expected), 0, tolerance)


ROUNDING = {"float64": 5e-8, "float32": 2e-7, "float16": 1e-3, "bfloat16": 8e-3}

# --- A: meaning and numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kind", ["bool", "float64", "float32", "float16"])
def test_A1_a_row_whose_every_key_is_masked_is_zero(name, kind):
    q, k, v = three(as_dtype(name))
    mask = np.array([[T, T, T], [F_, F_, F_], [T, F_, T]])
    given = mask if kind == "bool" else np.where(mask, 0, -INF).astype(kind)
    expected = [[0.625263, 0.4223485], [0, 0], [0.5510126, 0.3442521]]
    for out in (sdpa(q, k, v, given), attention(q, k, v, mask=given)):
        assert near(out, expected, ROUNDING[name])
        assert not out[0, 0, 1].any()
    # one query alone, and heads in groups
    for i in range(3):
        assert near(sdpa(q[:, :, i : i + 1], k, v, given[i : i + 1]), expected[i], ROUNDING[name])
    grouped = sdpa(np.repeat(q, 4, 1), np.repeat(k, 2, 1), np.repeat(v, 2, 1), given, enable_gqa=True)
    assert_same_bits(grouped, np.repeat(sdpa(q, k, v, given), 4, 1))
    _, lse = attention(q, k, v, mask=given, return_lse=True)
    assert np.isneginf(lse[0, 0]).tolist() == [F_, T, F_]
    weights = attention_weights(q, k, mask=given)
    assert not weights[0, 0, 1].any()
    assert near(weights.sum(-1), [1, 0, 1], 1e-6)


@pytest.mark.parametrize("name", FLOATS)
def test_A3_the_most_negative_number_is_not_minus_infinity(name):
    q, k, v = three(as_dtype(name))
    least = np.finfo(np.float64 if name == "float64" else np.float32).min
    mask = np.zeros((3, 3), least.dtype)
    mask[1] = least
    out = sdpa(q, k, v, mask)
    assert out.dtype == q.dtype
    assert near(out[0, 0, 1], [0.5492279, 0.3201638], ROUNDING[name])
    with np.errstate(over="ignore"):
        twice = mask + mask  # -inf: now the row sees nothing
    assert not sdpa(q, k, v, twice)[0, 0, 1].any()
    # and beside keys without a bias it hides, almost
    mask[1] = [0, least, least]
    assert near(sdpa(q, k, v, mask)[0, 0, 1], v[0, 0, 0], ROUNDING[name])


@pytest.mark.parametrize("name", [name for name in FLOATS if name != "float64"])
def test_A3_masks_beyond_float32_saturate(name):
    q, k, v = three(as_dtype(name))
    for fill in (-1e39, np.finfo(np.float64).min):
        out = sdpa(q, k, v, np.full((3, 3), fill))
        assert near(out[0, 0, 1], [0.5492279, 0.3201638], ROUNDING[name])
    for fill in (1e39, np.finfo(np.float64).max):
        out = sdpa(q, k, v, np.array([0, fill, 0]))
        assert near(out[0, 0], [v[0, 0, 1]] * 3, 0)


@pytest.mark.parametrize("name", ["float64", "float32"])
@pytest.mark.parametrize("sign", [1, -1])
def test_A3_sums_of_finite_scores_and_biases_saturate(name, sign):
    """The score is large enough to push the bias over the edge, and must not."""
    largest = np.finfo(name).max
    large = largest ** np.array(0.49, name)
    q, k = np.full((1, 1, 2, 1), large, name), np.full((1, 1, 3, 1), sign * large, name)
    mask = np.full((2, 3), sign * largest, name)
    for bias in (mask, mask[:1], np.array(sign * np.finfo(np.float64).max)):
        out, lse = attention(q, k, R(3, name), mask=bias, scale=1.0, return_lse=True)
        assert out.ravel().tolist() == [1, 1]
        assert np.isfinite(lse).all()


@pytest.mark.parametrize("kind", FLOATS)
def test_A4_a_float_mask_of_zeros_and_ones_is_added(kind):
    mask = np.array([[0, 1]]).astype(as_dtype(kind))
    assert near(sdpa(Z(1, 1, 1, 2), Z(1, 1, 2, 2), R(2), attn_mask=mask), 0.7310586)
    assert near(attention(Z(1, 1, 1, 2), Z(1, 1, 2, 2), R(2), mask=mask), 0.7310586)
    assert near(fastmha.sdpa(Z(1, 2), Z(2, 2), R(2)[0, 0], mask), 0.7310586)


def test_A5_true_means_may_attend():
    q, k, v = Z(1, 1, 1, 2), Z(1, 1, 3, 2), R(3)
    mask = np.array([T, F_, F_])
    assert sdpa(q, k, v, attn_mask=mask).item() == 0
    assert attention(q, k, v, mask=mask).item() == 0
    assert fastmha.sdpa(q, k, v, mask=mask).item() == 0
    assert attention_weights(q, k, mask=mask).ravel().tolist() == [1, 0, 0]


def test_A6_both_corners_of_a_causal_mask():
    q, k, v = Z(1, 1, 2, 2), Z(1, 1, 5, 2), R(5)
    assert sdpa(q, k, v, is_causal=True).ravel().tolist() == [0, 0.5]
    for causal, expected in ((True, [0, 0.5]), ("top-left", [0, 0.5]), ("bottom-right", [1.5, 2])):
        assert attention(q, k, v, causal=causal).ravel().tolist() == expected
    one = Z(1, 1, 1, 2)
    assert sdpa(one, k, v, is_causal=True).item() == 0
    assert attention(one, k, v, causal="bottom-right").item() == 2
    # more queries than keys: the first see nothing
    out, lse = attention(Z(1, 1, 5, 2), Z(1, 1, 2, 2), R(2), causal="bottom-right", return_lse=True)
    assert out.ravel().tolist() == [0, 0, 0, 0, 0.5]
    assert np.isneginf(lse).ravel().tolist() == [T, T, T, F_, F_]
    assert attention(Z(1, 1, 5, 2), Z(1, 1, 2, 2), R(2), causal=True).ravel().tolist() == [
        0,
        0.5,
        0.5,
        0.5,
        0.5,
    ]


def test_A8_causal_and_a_mask_both_apply_or_are_refused():
    q, v, mask = Z(1, 1, 4, 2), R(4), np.array([F_, T, T, T])
    with pytest.raises(ValueError, match="attn_mask"):
        sdpa(q, q, v, attn_mask=mask, is_causal=True)
    expected = [0, 1, 1.5, 2]
    for given in (mask, np.where(mask, 0, -INF), np.broadcast_to(mask, (1, 1, 4, 4))):
        assert attention(q, q, v, mask=given, causal=True).ravel().tolist() == expected
    assert attention(q, q, v, mask=mask, causal=True, window=(10, 0)).ravel().tolist() == expected


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("lead", [(), (2,), (2, 4), (2, 2, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5, "rng": 1}, {"scale": -0.3}], ids=str)
def test_A8_no_number_of_axes_looks_ahead(name, lead, options):
    q, k, v = (F((*lead, 6, n), s, as_dtype(name)) for n, s in ((8, 1), (8, 0.7), (5, 0.3)))
    expected = sdpa(q, k, v, is_causal=True, **options)
    for i in range(6):
        later_k, later_v = k.copy(), v.copy()
        later_k[..., i + 1 :, :] = later_v[..., i + 1 :, :] = 1e3
        out = sdpa(q, later_k, later_v, is_causal=True, **options)
        assert_same_bits(out[..., : i + 1, :], expected[..., : i + 1, :])
        if i < 5:
            assert not np.array_equal(out[..., 5, :], expected[..., 5, :])


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("G", [4, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout_p": 0.5, "rng": 1},
        {"softcap": 2.0},
        {"sinks": np.zeros(4)},
        {"window": (3, 2)},
        {"alibi_slopes": np.ones(4)},
        {"mask": np.ones((6, 6), bool)},
        {"mask": np.zeros((6, 6))},
        {"key_lengths": [6, 5]},
    ],
    ids="-".join,
)
def test_A8_no_option_looks_ahead(name, G, options):
    dtype = as_dtype(name)
    q, k, v = F((2, 4, 6, 8), 1, dtype), F((2, G, 6, 8), 0.7, dtype), F((2, G, 6, 5), 0.3, dtype)

    def call(k, v):
        weights = attention_weights(q, k, causal=True, **options)
        return weights, *attention(q, k, v, causal=True, return_lse=True, **options)

    expected = call(k, v)
    for i in range(6):
        later_k, later_v = k.copy(), v.copy()
        later_k[:, :, i + 1 :] = later_v[:, :, i + 1 :] = 1e3
        for a, b in zip(call(later_k, later_v), expected, strict=True):
            assert_same_bits(a[:, :, : i + 1], b[:, :, : i + 1])


HIDING = [
    {"mask": np.arange(100) < 70},
    {"mask": np.where(np.arange(100) < 70, 0.0, -INF)},
    {"mask": np.where(np.arange(100) < 70, 1.0, -INF).astype(np.float16)[None]},
    {"key_lengths": [70, 70]},
    {"causal": True},
    {"window": (5, 10)},
    {"window": (-1, 3), "softcap": 2.0, "alibi_slopes": [0.1, 0.2], "sinks": [1.0, 0.0]},
    {"key_lengths": [70, 3], "causal": "bottom-right", "dropout_p": 0.3, "rng": 5},
    {"key_lengths": [70, 0], "query_lengths": [3, 9]},
]


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("options", HIDING, ids=str)
def test_A9_what_hidden_keys_hold_does_not_matter(options, name, junk):
    dtype = as_dtype(name)
    q, k, v = (
        F((2, 2, 50, 8), 1, dtype),
        F((2, 2, 100, 8), 0.7, dtype),
        F((2, 2, 100, 5), 0.3, dtype),
    )
    results = []
    for fill in (0, junk):
        k[:, :, 70:] = v[:, :, 70:] = fill
        results.append(attention(q, k, v, return_lse=True, **options))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    assert np.isfinite(results[1][0].astype(float)).all()


def test_A11_scores_of_half_types_do_not_overflow():
    q, k = np.full((1, 1, 1, 64), 300, np.float16), np.full((1, 1, 2, 64), 300, np.float16)
    v = np.array([1, 3], np.float16).reshape(1, 1, 2, 1)
    assert sdpa(q, k, v).item() == 2
    k[:, :, 1] = 300.25
    out = sdpa(q, k, v)
    assert out.item() == 3
    assert out.dtype == np.float16
    large = np.full((1, 1, 4, 1), 60000, np.float16)
    assert sdpa(q[..., :1], Z(1, 1, 4, 1, dtype=np.float16), large).item() == 60000


def test_A11_scores_of_float32_are_not_scaled_beforehand():
    """Large scores that differ by one: their difference survives."""
    q, k = (
        np.full((1, 1, 1, 1), 1e3, np.float32),
        np.array([1e3, 1e3 + 1e-3], np.float32).reshape(1, 1, 2, 1),
    )
    gap = float((k[0, 0, 1, 0].astype(float) - k[0, 0, 0, 0].astype(float)) * 1e3)
    assert near(sdpa(q, k, R(2), scale=1.0), 1 / (1 + math.exp(-gap)), 0.02)
    assert near(sdpa(q, k, R(2), scale=1e-3), 1 / (1 + math.exp(-gap * 1e-3)), 1e-4)


def test_A14_the_cap_comes_before_the_mask():
    q, k, v = Z(1, 1, 1, 1), Z(1, 1, 2, 1), R(2)
    for mask in (np.array([T, F_]), np.array([0, -INF])):
        assert attention(q, k, v, mask=mask, softcap=1).item() == 0
        assert attention_weights(q, k, mask=mask, softcap=1).ravel().tolist() == [1, 0]
    assert attention(q, k, v, causal=True, softcap=1).item() == 0
    for off in (0, 0.0, None):
        assert attention(q, k, v, softcap=off).item() == 0.5
    # a bias is added after the cap, whole
    assert near(attention(q, k, v, mask=np.array([0.0, 5.0]), softcap=1), 1 / (1 + math.exp(-5)))


def test_A15_consecutive_query_heads_share_a_key_head():
    q, k = Z(1, 4, 1, 2), Z(1, 2, 1, 2)
    v = np.array([1, 2], np.float32).reshape(1, 2, 1, 1)
    assert sdpa(q, k, v, enable_gqa=True).ravel().tolist() == [1, 1, 2, 2]
    assert attention(q, k, v).ravel().tolist() == [1, 1, 2, 2]
    for call in (lambda *x: sdpa(*x, enable_gqa=True), attention):
        with pytest.raises(ValueError, match=r"3.*2"):
            call(Z(1, 3, 1, 2), k, v)
    with pytest.raises(ValueError, match=r"4.*2.*enable_gqa"):
        sdpa(q, k, v)
    assert sdpa(q, k[:, :1], v[:, :1]).ravel().tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("H, G", [(4, 0), (0, 2), (0, 0), (1, 0)])
def test_A15_no_heads(H, G):
    for call in (
        lambda *x: sdpa(*x, enable_gqa=True),
        attention,
        lambda q, k, v: attention_weights(q, k),
    ):
        try:
            assert call(Z(1, H, 1, 2), Z(1, G, 1, 2), Z(1, G, 1, 3)).size == 0
        except ValueError as refusal:
            assert G in (0, 2) and "key" in str(refusal)


def views(L, heads=3, width=8):
    """Query, key and value as they come out of real programs, by name; none of them contiguous."""
    B = 2
    rows = [F((B, L, heads, width), s) for s in (1, 0.7, 0.3)]
    fused = F((B, L, 3, heads, width))
    heads_first = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in rows]
    return {
        "a transposed": [x.transpose(0, 2, 1, 3) for x in rows],
        "b sliced": [fused[:, :, i].transpose(0, 2, 1, 3) for i in range(3)],
        "c Fortran": [np.asfortranarray(x) for x in heads_first],
        "d reversed columns": [x[..., ::-1] for x in heads_first],
        "d reversed rows": [x[:, :, ::-1] for x in heads_first],
        "e step 2": [F((B, heads, L, 2 * width), s)[..., ::2] for s in (1, 0.7, 0.3)],
        "row step 3": [F((B, heads, 3 * L, width), s)[:, :, ::3] for s in (1, 0.7, 0.3)],
        "one row": [np.broadcast_to(x[:, :, :1], x.shape) for x in heads_first],
        "one head": [np.broadcast_to(x[:, :1], x.shape) for x in heads_first],
    }


@pytest.mark.parametrize("L", [1, 7, 33, 100])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("view", views(1))
def test_A17_views_equal_contiguous_copies(view, dtype, L):
    given = [x if dtype == "float32" else x.astype(as_dtype(dtype), order="K") for x in views(L)[view]]
    copies = [np.ascontiguousarray(x) for x in given]
    mask = F((2, 3, L, L), 1.3) > -0.5
    masks = [
        mask,
        mask.swapaxes(2, 3).copy().swapaxes(2, 3),
        mask[..., ::-1].copy()[..., ::-1],
        np.asfortranarray(mask),
    ]
    expected = attention(*copies, mask=mask)
    for which in ([0], [1], [2], [0, 1, 2]):  # each alone, then all
        arrays = [given[i] if i in which else copies[i] for i in range(3)]
        for other in masks:
            out = np.asfortranarray(np.zeros_like(expected))
            assert_same_bits(attention(*arrays, mask=other), expected)
            assert_same_bits(attention(*arrays, mask=other, out=out), expected)
    for x, copy in zip(given, copies, strict=True):  # unchanged
        assert_same_bits(np.ascontiguousarray(x), copy)


def test_A17_one_key_for_all():
    q = F((1, 1, 33, 4))
    k, v = (np.broadcast_to(F((1, 1, 1, 4), s), (1, 1, 33, 4)) for s in (0.7, 0.3))
    out = sdpa(q, k, v)
    assert_close(out, np.broadcast_to(v[:, :, :1], out.shape), np.float32)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("L, S", [(5, 7), (5, 1), (0, 7), (5, 0), (1, 1)])
def test_A18_the_result_is_fresh(name, L, S):
    dtype = as_dtype(name)
    q, k, v = F((2, 2, L, 4), 1, dtype), F((2, 2, S, 4), 0.7, dtype), F((2, 2, S, 4), 0.3, dtype)
    for arrangement in SAME_NUMBERS:
        given = [arrange(x, arrangement) for x in (q, k, v)]
        for out in (
            sdpa(*given),
            attention(*given),
            attention(*(x.swapaxes(1, 2) for x in given), layout="BLHD"),
        ):
            assert out.flags.c_contiguous and out.flags.writeable and out.flags.owndata
            assert out.dtype == dtype and out.dtype.isnative
            assert not any(np.shares_memory(out, x) for x in given)


@pytest.mark.parametrize(
    "shape",
    [
        (5,),
        (1, 5),
        (4, 5),
        (1, 1, 1, 5),
        (2, 1, 1, 5),
        (2, 1, 4, 1),
        (1, 3, 4, 5),
        (2, 3, 4, 5),
        (3, 1, 1),
        (),
    ],
    ids=str,
)
def test_A19_masks_broadcast(shape):
    q, k, v = F((2, 3, 4, 2)), F((2, 3, 5, 2), 0.7), F((2, 3, 5, 3), 0.3)
    for mask in (F(shape, 1.3) > -0.5, F(shape, 1.3), np.array(T), np.array(0.5)):
        whole = np.broadcast_to(mask, (2, 3, 4, 5)).copy()
        expected = reference.attention(q, k, v, mask=whole)
        assert_close(sdpa(q, k, v, mask), expected, np.float32)
        assert_same_bits(sdpa(q, k, v, mask), sdpa(q, k, v, whole))
        assert_same_bits(attention(q, k, v, mask=mask), sdpa(q, k, v, whole))
        assert_same_bits(attention_weights(q, k, mask=mask), attention_weights(q, k, mask=whole))


def test_A19_three_axes_are_heads_queries_keys():
    v = np.broadcast_to(R(2), (2, 2, 2, 1))
    mask = np.array([[[T, F_]], [[F_, T]]])
    assert sdpa(Z(2, 2, 1, 1), Z(2, 2, 2, 1), v, mask)[..., 0, 0].tolist() == [[0, 1], [0, 1]]
    for shape in ((4, 6), (6,)):
        with pytest.raises(ValueError, match=rf"attn_mask.*{shape[-1]}"):
            sdpa(F((2, 3, 4, 2)), F((2, 3, 5, 2)), F((2, 3, 5, 2)), np.ones(shape, bool))


def test_A20_a_mask_per_member_reaches_all_its_heads():
    q, k, v = F((2, 2, 3, 4)), F((2, 2, 3, 4), 0.7), F((2, 2, 3, 4), 0.3)
    mask = np.ones((2, 1, 3, 3), bool)
    mask[1, :, :, 1:] = F_  # lengths 3 and 1
    out = sdpa(q, k, v, mask)
    assert near(out[1], np.broadcast_to(v[1, :, :1], (2, 3, 4)))
    q[1], k[1], v[1] = 7, 8, 9
    assert_same_bits(sdpa(q, k, v, mask)[0], out[0])
    with pytest.raises(ValueError, match="attn_mask"):  # (B * H, L, S) is ambiguous
        sdpa(q, k, v, np.ones((4, 3, 3), bool))


def test_A21_values_of_another_width_than_keys():
    out = sdpa(F((2, 3, 5, 8)), F((2, 3, 7, 8), 0.7), F((2, 3, 7, 3), 0.3))
    assert out.shape == (2, 3, 5, 3)
    assert near(out[0, 0, 0], [0.3524112, 0.3839862, 0.3812608])
    assert near(out[1, 2, 4], [0.1295431, -0.014069, -0.1564243])
    for E in (1, 2, 9, 64, 300):
        q, k, v = F((2, 3, 5, 8)), F((2, 3, 7, 8), 0.7), F((2, 3, 7, E), 0.3)
        assert_close(sdpa(q, k, v), reference.scaled_dot_product_attention(q, k, v), np.float32)


HEAD_SIZES = [
    1,
    2,
    3,
    5,
    7,
    15,
    17,
    31,
    33,
    48,
    63,
    65,
    80,
    96,
    112,
    127,
    192,
    255,
    257,
    512,
    576,
    1024,
]


@pytest.mark.parametrize("D", HEAD_SIZES)
def test_A22_head_sizes(D):
    for E in (D, 3, 1024 // D + 1):
        for dtype, tolerance in ((np.float32, 1e-5), (np.float64, 1e-12)):
            q, k, v = (
                F((1, 2, 5, D), 1, dtype),
                F((1, 2, 9, D), 0.7, dtype),
                F((1, 2, 9, E), 0.3, dtype),
            )
            assert error(sdpa(q, k, v), reference.scaled_dot_product_attention(q, k, v)) < tolerance


def test_A22_a_head_size_of_zero():
    q, k, v = Z(1, 1, 2, 0), Z(1, 1, 3, 0), R(3)
    for call in (sdpa, attention):
        with pytest.raises(ValueError, match="scale"):
            call(q, k, v)
        assert call(q, k, v, scale=1.0).ravel().tolist() == [1, 1]
        assert call(q, k, v, scale=0).ravel().tolist() == [1, 1]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "B, H, L, S, E",
    [
        (0, 2, 3, 4, 5),
        (2, 0, 3, 4, 5),
        (2, 2, 0, 4, 5),
        (2, 2, 3, 0, 5),
        (2, 2, 3, 4, 0),
        (0, 0, 0, 0, 0),
        (2, 2, 0, 0, 5),
    ],
)
def test_A23_axes_of_no_length(name, B, H, L, S, E):
    dtype = as_dtype(name)
    q, k, v = Z(B, H, L, 2, dtype=dtype), Z(B, H, S, 2, dtype=dtype), np.ones((B, H, S, E), dtype)
    calls = [
        lambda: sdpa(q, k, v),
        lambda: sdpa(q, k, v, is_causal=True),
        lambda: sdpa(q, k, v, enable_gqa=True),
        lambda: sdpa(q, k, v, np.ones((L, S), bool)),
        lambda: sdpa(q, k, v, np.ones((B, H, L, S), np.float32)),
        lambda: sdpa(q, k, v, dropout_p=0.5, rng=1),
        lambda: attention(q, k, v, causal="bottom-right"),
        lambda: attention(q, k, v, window=(0, 0)),
        lambda: attention(q, k, v, key_lengths=np.full(B, S)),
        lambda: attention(q, k, v, sinks=np.zeros(H), alibi_slopes=np.ones(H), softcap=1.0),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in calls:
            out = call()
            assert out.shape == (B, H, L, E)
            assert out.dtype == dtype
            if S == 0:
                assert not out.any()
        _, lse = attention(q, k, v, return_lse=True)
        assert lse.shape == (B, H, L)
        assert np.isneginf(lse).all() or S > 0
        assert attention_weights(q, k).shape == (B, H, L, S)


def test_A26_merging_parts_that_saw_nothing():
    nothing, never = Z(2, 3, 4), np.full((2, 3), -INF, np.float32)
    out, lse = F((2, 3, 4)), F((2, 3), 0.7)
    for parts, expected in (
        ([(nothing, never)] * 2, (nothing, never)),
        ([(nothing, never), (out, lse)], (out, lse)),
        ([(out, lse), (nothing, never)], (out, lse)),
        ([(nothing, never), (out, lse), (nothing, never)], (out, lse)),
        ([(np.full_like(out, NAN), never), (out, lse)], (out, lse)),
    ):
        for a, b in zip(merge_attention(*zip(*parts, strict=True)), expected, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("n", range(1, 9))
def test_A26_any_number_of_parts_equals_the_whole(n):
    q, k, v = F((1, 2, 5, 4)), F((1, 2, 40, 4), 0.7), F((1, 2, 40, 3), 0.3)
    mask = np.broadcast_to(np.arange(40) >= 25, (5, 40)).copy()  # the first parts see nothing
    mask[2] = F_
    parts = [
        attention(q, k[:, :, c], v[:, :, c], mask=mask[:, c], return_lse=True)
        for c in np.array_split(np.arange(40), n)
    ]
    merged, merged_lse = merge_attention(*zip(*parts, strict=True))
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    assert_close(merged, out, np.float32)
    assert_close(merged_lse, lse, np.float32, floor=1.0)
    assert not merged[0, :, 2].any() and np.isneginf(merged_lse[0, :, 2]).all()


@pytest.mark.parametrize("name", FLOATS)
def test_A28_weights_belong_to_the_output(name):
    dtype = as_dtype(name)
    q, k, v = F((2, 4, 5, 8), 1, dtype), F((2, 2, 7, 8), 0.7, dtype), F((2, 2, 7, 3), 0.3, dtype)
    mask = F((5, 7), 1.3) > -0.5
    mask[2] = F_
    before = attention(q, k, v, mask=mask)
    weights = attention_weights(q, k, mask=mask, dropout_p=0.5, rng=1)  # those before dropout
    assert weights.shape == (2, 4, 5, 7)
    assert near(weights.sum(-1), np.broadcast_to(np.where(np.arange(5) == 2, 0, 1), (2, 4, 5)), 1e-6)
    assert not weights[:, :, 2].any()
    out = weights @ v.astype(weights.dtype).repeat(2, 1)
    assert near(out, before.astype(float), ROUNDING[name])
    assert_same_bits(attention(q, k, v, mask=mask), before)


@pytest.mark.parametrize(
    "window, expected",
    [
        ((2, 0), [0, 0.5, 1, 2, 3, 4, 5, 6]),
        ((3, 0), [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]),
        ((1, 1), [0.5, 1, 2, 3, 4, 5, 6, 6.5]),
        ((0, 0), range(8)),
        ((0, 1), [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7]),
        ((-1, -1), [3.5] * 8),
        ((-1, 0), np.arange(8) / 2),
        ((0, -1), 3.5 + np.arange(8) / 2),
    ],
    ids=str,
)
def test_A29_windows_count_both_ends(window, expected):
    q = Z(1, 1, 8, 2)
    out = attention(q, q, R(8), window=window)
    assert_close(out.ravel(), np.array(expected, np.float32), np.float32)
    if min(window) >= 0:
        assert out.ravel().tolist() == list(expected)


def test_A29_windows_beside_causal():
    q, k, v = F((1, 2, 8, 2)), F((1, 2, 8, 2), 0.7), F((1, 2, 8, 3), 0.3)
    causal = attention(q, k, v, causal=True)
    for left in (7, 10**9, -1):
        assert_same_bits(attention(q, k, v, window=(left, 0)), causal)
    differ = (attention(q, k, v, window=(6, 0)) != causal).any((0, 1, 3))
    assert differ.tolist() == [F_] * 7 + [T]
    assert_same_bits(attention(q, k, v, window=(0, 0)), v)
    # L != S: from the top left, or shifted by S - L
    two, five = Z(1, 1, 2, 2), Z(1, 1, 5, 2)
    assert attention(two, five, R(5), window=(1, 1)).ravel().tolist() == [0.5, 1]
    assert attention(two, five, R(5), window=(1, 1), causal="bottom-right").ravel().tolist() == [
        2.5,
        3.5,
    ]


def test_A37_dropout_keeps_the_mean():
    v, q = np.ones((1, 1, 4, 1)), Z(1, 1, 10_000, 1, dtype=float)
    k = Z(1, 1, 4, 1, dtype=float)
    for call in (sdpa, attention):
        out = call(q, k, v, dropout_p=0.25, rng=1)
        quarters = out * 3
        assert np.allclose(quarters, quarters.round(), 0, 1e-12)
        assert set(quarters.round().ravel()) == {0, 1, 2, 3, 4}
        assert abs(out.mean() - 1) < 0.012


def test_A37_the_pattern_depends_on_the_seed_alone():
    q, v = Z(2, 3, 70, 4), np.eye(100, dtype=np.float32)[None, None].repeat(2, 0).repeat(3, 1)
    k = Z(2, 3, 100, 4)
    pattern = attention(q, k, v, dropout_p=0.3, rng=12345) != 0
    kept = reference.dropout_mask(12345, 0.3, np.arange(2), 3, np.arange(70), 100)
    assert_same_bits(pattern, kept)
    for n in (1, 2, 3):
        with fastmha.num_threads(n):
            for name in FLOATS:
                arrays = [x.astype(as_dtype(name)) for x in (q, k, v)]
                assert_same_bits(attention(*arrays, dropout_p=0.3, rng=12345) != 0, kept)
                assert_same_bits(sdpa(*arrays, dropout_p=0.3, rng=np.uint64(12345)) != 0, kept)
    late = attention(q, k, v, dropout_p=0.3, rng=12345, causal="bottom-right") != 0
    positions = np.arange(70) + 30
    assert_same_bits(
        late,
        reference.dropout_mask(12345, 0.3, [0, 1], 3, positions, 100)
        & (np.arange(100) <= positions[:, None]),
    )
    assert (attention(q, k, v, dropout_p=0.3, rng=12346) != 0).tolist() != pattern.tolist()


def test_A37_generators_and_fresh_seeds():
    q, k, v = F((1, 2, 9, 4)), F((1, 2, 9, 4), 0.7), F((1, 2, 9, 4), 0.3)
    rng, same = np.random.default_rng(3), np.random.default_rng(3)
    seed = int(same.integers(0, 2**64 - 1, dtype=np.uint64, endpoint=True))
    for call in (sdpa, attention):
        assert_same_bits(
            call(q, k, v, dropout_p=0.5, rng=np.random.default_rng(3)),
            call(q, k, v, dropout_p=0.5, rng=seed),
        )
    attention(q, k, v, dropout_p=0.5, rng=rng)
    assert rng.bit_generator.state == same.bit_generator.state  # one number was drawn
    attention(q, k, v, dropout_p=0.0, rng=rng)
    assert rng.bit_generator.state == same.bit_generator.state  # and none for nothing
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    fresh = {attention(q, k, v, dropout_p=0.5).tobytes() for _ in range(8)}
    assert len(fresh) > 1
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002


@pytest.mark.parametrize("name", FLOATS)
def test_A37_the_ends_of_the_range(name):
    q, k, v = (F((1, 2, 9, 4), s, as_dtype(name)) for s in (1, 0.7, 0.3))
    for call in (sdpa, attention):
        assert_same_bits(call(q, k, v, dropout_p=0.0), call(q, k, v))
        out = call(q, k, v, dropout_p=1.0)
        assert not out.any()
        for p in (-0.1, 1.1, NAN, INF):
            with pytest.raises(ValueError, match="dropout_p"):
                call(q, k, v, dropout_p=p)


def test_A38a_dtypes_of_masks():
    q, k, v = Z(1, 1, 1, 2), Z(1, 1, 3, 2), R(3)
    for dtype in (np.int64, np.int8, np.uint8):
        for call in (lambda m: sdpa(q, k, v, m), lambda m: attention(q, k, v, mask=m)):
            with pytest.raises(TypeError, match=r"mask.*bool.*astype"):
                call(np.array([1, 0, 0], dtype))
    half = [x.astype(np.float16) for x in (q, k, v)]
    for dtype in (np.float32, np.float64):
        mask = np.array([0, 1e-4, 70000], dtype)  # 70000 is no float16
        out = sdpa(*half, mask)
        assert out.dtype == np.float16
        assert out.item() == 2


def test_A38b_scalars_do_not_promote():
    q, k, v = F((2, 2, 3, 4)), F((2, 2, 5, 4), 0.7), F((2, 2, 5, 3), 0.3)
    expected = attention(q, k, v, scale=0.5, softcap=2.0)
    for scale, softcap in itertools.product(
        (0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), np.array(0.5)),
        (2, 2.0, np.float64(2), np.float32(2)),
    ):
        out = attention(q, k, v, scale=scale, softcap=softcap)
        assert out.dtype == np.float32
        assert_same_bits(out, expected)
    means = np.broadcast_to(v.mean(2, keepdims=True), (2, 2, 3, 3))
    for zero in (0, 0.0, np.float64(0)):
        assert near(sdpa(q, k, v, scale=zero), means)
    assert_same_bits(sdpa(q, k, v, scale=-0.3), sdpa(-q, k, v, scale=0.3))


def test_A38c_dtypes_are_not_mixed_and_float64_is_float64():
    q, k, v = F((1, 2, 5, 4)), F((1, 2, 9, 4), 0.7), F((1, 2, 9, 3), 0.3)
    for wrong in (k.astype(float), k.astype(np.float16), k.astype(int), k.astype(complex)):
        with pytest.raises(TypeError, match="key"):
            sdpa(q, wrong, v)
    arrays = [
        F(shape, s, float)
        for shape, s in (((1, 2, 300, 64), 1), ((1, 2, 500, 64), 0.7), ((1, 2, 500, 33), 0.3))
    ]
    for options in (
        {},
        {"causal": True},
        {"softcap": 1.0},
        {"sinks": [1.0, -1.0]},
        {"alibi_slopes": [0.1, 0.01]},
    ):
        got, expected = (f(*arrays, return_lse=True, **options) for f in (attention, reference.attention))
        for a, b in zip(got, expected, strict=True):
            assert error(a, b) < 1e-13


@pytest.mark.parametrize("S", [1024, 8192, 65536])
def test_A38c_errors_do_not_grow_with_the_number_of_keys(S):
    q, k, v = F((1, 1, 8, 16)), F((1, 1, S, 16), 0.7), F((1, 1, S, 16), 0.3)
    exact = reference.attention(*(x.astype(float) for x in (q, k, v)))
    assert np.abs(attention(q, k, v) - exact).max() < 3e-7 * np.abs(v).max()
    # and where all weights are equal, so that every one of them counts
    out = attention(Z(1, 1, 8, 16), k, v)
    assert np.abs(out - v.mean(2, dtype=float)).max() < 3e-7


def test_A38d_strides_and_products_beyond_31_bits():
    row = F((1, 1, 1, 4))
    q = np.broadcast_to(row, (3, 2, 2, 4))
    k, v = (np.broadcast_to(F((1, 1, 1, 4), s), (1, 1, 2**31 + 7, 4)) for s in (0.7, 0.3))
    out, lse = attention(q[:1, :1], k, v, return_lse=True, window=(3, 2))
    assert near(out, np.broadcast_to(v[:, :, :1], out.shape))
    out, lse = attention(q[:1, :1, :1], k, v, return_lse=True, window=(3, 0), causal="bottom-right")
    assert near(out, v[:, :, :1])
    assert near(lse, math.log(4) + float((row * k[:, :, :1]).sum() / 2), 1e-6)


def test_A38d_strides_beyond_31_bits():
    try:
        far = np.zeros((2, 1, 2, 2**29), np.float16)  # 4 GiB, of which next to nothing is touched
    except MemoryError:
        pytest.skip("no room for an array of 4 GiB")
    views = [far[..., i * 8 : i * 8 + 8] for i in range(3)]
    for i, view in enumerate(views):
        view[...] = F((2, 1, 2, 8), 0.3 + i, np.float16)
    assert views[0].strides[0] == 2**31
    assert_same_bits(sdpa(*views), sdpa(*(x.copy() for x in views)))
    out = far[..., 24:32]
    attention(*(x.copy() for x in views), out=out)
    assert_same_bits(out.copy(), sdpa(*views))


# --- C: run time ----------------------------------------------------------------------------------


def test_C8_subnormal_numbers_survive(run_python):
    code = """
import concurrent.futures, warnings
import numpy as np, fastmha
warnings.simplefilter("error")
def whole():
    assert np.finfo(np.float64).smallest_subnormal > 0
    assert np.float64(5e-324) * 1 != 0 and 5e-324 * 1 != 0
    assert (np.full(9, 5e-324) * np.ones(9) != 0).all()
    assert (np.full(9, 1e-45, np.float32) * np.float32(1) != 0).all()
    return True
x = np.ones((2, 4, 200, 32), np.float32)
whole()
fastmha.set_num_threads(3)
for _ in range(3):
    fastmha.attention(x, x, x, softcap=2.0)
    whole()
with concurrent.futures.ThreadPoolExecutor(3) as workers:
    assert all(workers.map(lambda _: fastmha.sdpa(x, x, x) is not None and whole(), range(9)))
print("well")
"""
    done = run_python(code)
    assert done.stdout.strip() == "well", done.stderr


def test_C16_read_only_arrays():
    q, k, v = F((2, 2, 5, 4)), F((2, 2, 7, 4), 0.7), F((2, 2, 7, 3), 0.3)
    mask, vector = F((5, 7)) > 0, np.array([0.5, 0.25])
    lengths, queries = np.array([7, 3]), np.array([5, 2])
    options = {
        "mask": mask,
        "sinks": vector,
        "alibi_slopes": vector,
        "key_lengths": lengths,
        "query_lengths": queries,
    }
    expected = attention(q, k, v, **options)
    frozen = {name: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape) for name, x in options.items()}
    arrays = [np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape) for x in (q, k, v)]
    assert not any(x.flags.writeable for x in (*arrays, *frozen.values()))
    assert_same_bits(attention(*arrays, **frozen), expected)
    out = np.empty_like(expected)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out"):
        attention(q, k, v, out=out)


@pytest.mark.parametrize("name", FLOATS)
def test_C17_byte_order_and_alignment(name):
    dtype = as_dtype(name)
    q, k, v = F((2, 5, 4), 1, dtype), F((2, 7, 4), 0.7, dtype), F((2, 7, 3), 0.3, dtype)
    expected = sdpa(q, k, v)
    for kind in ("byte-swapped", "unaligned"):
        assert_same_bits(sdpa(*(arrange(x, kind) for x in (q, k, v))), expected)
        assert_same_bits(sdpa(q, arrange(k, kind), v), expected)
    if name != "bfloat16":
        assert_same_bits(
            sdpa(q.astype(dtype.newbyteorder(">")), k.astype(dtype.newbyteorder("<")), v), expected
        )


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_C18_half_types(name):
    if name not in FLOATS:
        pytest.skip("needs ml_dtypes")
    dtype = as_dtype(name)
    q, k, v = F((2, 3, 5, 4), 1, dtype), F((2, 3, 7, 4), 0.7, dtype), F((2, 3, 7, 3), 0.3, dtype)
    expected = reference.scaled_dot_product_attention(q, k, v)
    assert_close(sdpa(q, k, v), expected, dtype)
    for kind in SAME_NUMBERS:
        assert_close(sdpa(*(arrange(x, kind) for x in (q, k, v))), expected, dtype)
    mask = F((5, 7), 1, dtype)
    assert_close(sdpa(q, k, v, mask), reference.scaled_dot_product_attention(q, k, v, mask), dtype)
    out = np.zeros((2, 3, 5, 3), dtype)
    assert_close(attention(q, k, v, out=out), expected, dtype)


def test_C18_every_half_number_goes_in_and_comes_out():
    """One key: the output is the value, whatever it is."""
    words = np.arange(2**16, dtype=np.uint16)
    for name in FLOATS[2:]:
        v = words.view(as_dtype(name)).reshape(1, 1, 1, -1)
        q = np.zeros((1, 1, 1, 1), v.dtype)
        out = attention(q, q, v)
        expected = np.where(words & 0x7FFF, words, 0).astype(np.uint16)  # -0 becomes 0
        assert_same_bits(out.ravel(), expected.view(v.dtype))


def test_C18_rounding_is_to_nearest_even():
    """The mean of neighbours lies halfway between two numbers of the half type."""
    for name in FLOATS[2:]:
        words = np.arange(0x0001, 0x7BFF if name == "float16" else 0x7F7F, dtype=np.uint16)
        pair = np.stack([words, words + np.uint16(1)]).view(as_dtype(name))
        v = pair.reshape(1, 1, 2, -1)
        q, k = np.zeros((1, 1, 1, 1), v.dtype), np.zeros((1, 1, 2, 1), v.dtype)
        normal = v.astype(np.float64).mean(2)
        keep = (normal.ravel() > 1e-37) & (normal.ravel() < 1e38)  # the range of float32 arithmetic
        expected = normal.astype(np.float32).astype(v.dtype).reshape(-1)
        assert_same_bits(attention(q, k, v).reshape(-1)[keep], expected[keep])


def test_C20_concurrent_callers():
    """Eight workers, a thousand calls each, of different shapes and data."""
    shapes = [(1, 1, 3, 4), (1, 2, 9, 8), (2, 1, 33, 5), (1, 4, 64, 16), (3, 2, 1, 7), (1, 1, 100, 3)]
    data = [[F(shape, s + i, np.float32) for s in (1, 0.7, 0.3)] for i, shape in enumerate(shapes)]
    expected = [sdpa(*arrays) for arrays in data]

    def work(worker):
        order = np.random.default_rng(worker).integers(0, len(data), 1000)
        return all(np.array_equal(sdpa(*data[i]), expected[i]) for i in order)

    with fastmha.num_threads(2), concurrent.futures.ThreadPoolExecutor(8) as workers:
        assert all(workers.map(work, range(8)))
