"""The short forms of textbooks against the oracle, and against what they stand for."""

import inspect
import math

import numpy as np
import pytest
from comparing import arithmetic, assert_close, assert_same_bits, error, native
from drawing import ARRANGEMENTS, FLOATS, LENGTHS, SHORT, arrange, as_dtype
from hypothesis import given
from hypothesis import strategies as st

import fastmha
from fastmha import reference


def random(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# --- sdpa -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
def test_the_short_form(name):
    q, k, v = (random(*shape, dtype=as_dtype(name)) for shape in ((2, 9, 4), (2, 7, 4), (2, 7, 3)))
    mask = random(9, 7) > 0
    for given_mask in (None, mask, random(9, 7), mask[0]):
        expected = fastmha.scaled_dot_product_attention(q, k, v, given_mask)
        assert_same_bits(fastmha.sdpa(q, k, v, given_mask), expected)
        assert_same_bits(fastmha.sdpa(q[0], k[0], v[0], mask=given_mask), expected[0])
    assert list(inspect.signature(fastmha.sdpa).parameters) == ["Q", "K", "V", "mask"]


# --- softmax --------------------------------------------------------------------------------------


def assert_softmax(x, axis=-1):
    expected = reference.softmax(native(x), axis)
    dtype = expected.dtype
    rows = np.ascontiguousarray(np.moveaxis(native(x), axis, -1)).astype(arithmetic(dtype))
    plain = np.exp(rows - rows.max(-1, keepdims=True, initial=-np.inf))
    plain = np.moveaxis(plain / plain.sum(-1, keepdims=True), -1, axis).astype(dtype)
    slack = 4 * np.finfo(dtype).eps if dtype == np.float32 else 0.0
    assert_close(fastmha.softmax(x, axis), expected, dtype, plain, slack=slack)


@pytest.mark.parametrize("name", [*FLOATS, "int64", "uint8", "int16"])
@pytest.mark.parametrize(
    "shape",
    [(1,), (5,), (3, 5), (17, 33), (2, 3, 4, 5), (0,), (3, 0), (0, 3), (1, 1, 1, 1, 1, 1, 7)],
    ids=str,
)
def test_softmax_along_every_axis(name, shape):
    x = 3 * random(*shape)
    x = (abs(x) if name == "uint8" else x).astype(as_dtype(name))  # a cast of -1 would be the processor's
    for axis in range(-x.ndim, x.ndim):
        assert_softmax(x, axis)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 1023, 1024, 1025, 2048, 5000])
def test_softmax_of_long_rows(name, n):
    x = (5 * random(9, n)).astype(as_dtype(name))
    assert_softmax(x)
    assert_softmax(np.asfortranarray(x), 1)
    assert_softmax(x.T, 0)
    assert_softmax(x[0])


@given(st.data())
def test_softmax_of_any_strides(data):
    pick = lambda choices: data.draw(st.sampled_from(choices))  # noqa: E731
    shape = (pick(SHORT), pick(SHORT), pick(LENGTHS))[pick([0, 1, 2]) :]
    x = random(*shape, seed=pick(range(99))).astype(as_dtype(pick(FLOATS)))
    x = arrange(x, pick(list(ARRANGEMENTS)))
    before = x.copy()
    assert_softmax(x, pick(range(-x.ndim, x.ndim)))
    assert_same_bits(native(x), native(before))
    result = fastmha.softmax(x)
    assert result.flags.c_contiguous and result.flags.writeable and result.dtype.isnative


@pytest.mark.parametrize("name", FLOATS)
def test_softmax_of_what_is_not_finite(name):
    nan, inf = math.nan, math.inf
    x = np.array(
        [[1, nan, 2], [inf, 1, 2], [-inf, 1, 1], [-inf, -inf, -inf], [inf, -inf, inf], [0, 0, 0]]
    ).astype(as_dtype(name))
    expected = np.array([[nan] * 3, [nan] * 3, [0, 0.5, 0.5], [0] * 3, [nan] * 3, [1 / 3] * 3])
    expected[1] = expected[4] = np.nan
    assert_close(fastmha.softmax(x)[[0, 2, 3, 5]], expected[[0, 2, 3, 5]].astype(x.dtype), x.dtype)
    assert np.isnan(fastmha.softmax(x)[[1, 4]].astype(float)).any(-1).all()  # inf - inf
    assert_close(
        fastmha.softmax(x.T.copy(), 0)[:, [0, 2, 3, 5]],
        expected[[0, 2, 3, 5]].T.astype(x.dtype),
        x.dtype,
    )


@pytest.mark.parametrize("name, least", [("float64", -700), ("float32", -80)])
def test_softmax_is_accurate_far_from_the_maximum(name, least):
    x = np.linspace(least, 0, 321).astype(name)
    expected = np.exp(x.astype(np.longdouble))
    expected /= expected.sum()
    worst = np.abs(fastmha.softmax(x) / expected - 1).max()
    assert worst < 8 * np.finfo(name).eps
    assert fastmha.softmax(np.array([0, -1e4, -1e30], name)).tolist() == [1, 0, 0]
    assert fastmha.softmax(np.array([1e30, 1e30], name)).tolist() == [0.5, 0.5]


def test_softmax_of_many_axes():
    assert_softmax(random(*(1,) * 30, 5), 30)
    assert_softmax(random(*(1,) * 63, 5), -1)


# --- multi_head_attention -------------------------------------------------------------------------


def five_arrays(dtype, B=None, L=7, d_model=12, h=3, d_k=5, d_v=2, d_out=6):
    X = random(*([] if B is None else [B]), L, d_model)
    W_Q, W_K, W_V, W_O = (
        random(*shape, seed=i)
        for i, shape in enumerate([(d_model, h * d_k)] * 2 + [(d_model, h * d_v), (h * d_v, d_out)])
    )
    return [x.astype(dtype) for x in (X, W_Q, W_K, W_V, W_O)]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("B", [None, 1, 3])
def test_five_steps_equal_the_reference(name, B):
    dtype = as_dtype(name)
    arrays = five_arrays(dtype, B)
    out = fastmha.multi_head_attention(*arrays, 3)
    expected = reference.multi_head_attention(*arrays, 3)
    assert out.dtype == dtype
    assert out.shape == ((7, 6) if B is None else (B, 7, 6))
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-2, "bfloat16": 0.2}[name]
    assert error(out, expected) < tolerance


@pytest.mark.parametrize("B", [None, 2])
def test_five_steps_are_traced(B):
    told, expected = [], []
    arrays = five_arrays(np.float64, B)
    out = fastmha.multi_head_attention(
        *arrays, 3, trace=lambda step, shape: told.append((step, tuple(shape)))
    )
    lead = () if B is None else (B,)
    assert told == [
        ("project", (*lead, 7, 15)), ("split", (*lead, 3, 7, 5)), *[("attend", (*lead, 7, 2))] * 3,
        ("concat", (*lead, 7, 6)), ("output", (*lead, 7, 6)),
    ]  # fmt: skip
    reference.multi_head_attention(
        *arrays, 3, trace=lambda step, shape: expected.append((step, tuple(shape)))
    )
    assert told == expected
    assert_same_bits(out, fastmha.multi_head_attention(*arrays, h=3))


def test_five_steps_are_the_textbooks():
    X, W_Q, W_K, W_V, W_O = five_arrays(np.float64)
    heads = []
    for i in range(3):
        q, k, v = (X @ W[:, i * n : (i + 1) * n] for W, n in ((W_Q, 5), (W_K, 5), (W_V, 2)))
        scores = q @ k.T / math.sqrt(5)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v)
    expected = np.concatenate(heads, -1) @ W_O
    assert error(fastmha.multi_head_attention(X, W_Q, W_K, W_V, W_O, 3), expected) < 1e-12


@pytest.mark.parametrize("B, L", [(None, 0), (0, 3), (2, 0), (None, 1)])
def test_five_steps_of_few_rows(B, L):
    arrays = five_arrays(np.float32, B, L)
    out = fastmha.multi_head_attention(*arrays, 3)
    assert out.shape == (*arrays[0].shape[:-1], 6)
    assert out.dtype == np.float32


def test_five_steps_of_integers_and_lists():
    arrays = [x.astype(int) for x in five_arrays(np.float64)]
    expected = fastmha.multi_head_attention(*(x.astype(float) for x in arrays), 3)
    assert_same_bits(fastmha.multi_head_attention(*arrays, 3), expected)
    assert_same_bits(fastmha.multi_head_attention(*(x.tolist() for x in arrays), 3), expected)
    mixed = [arrays[0].astype(np.float32), *arrays[1:]]
    assert fastmha.multi_head_attention(*mixed, 3).dtype == np.float64
