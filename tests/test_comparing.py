"""The comparisons fail when they should: what they are to find is put in by hand."""

import math

import numpy as np
import pytest
from comparing import (
    assert_attends,
    assert_close,
    assert_no_negative_zero,
    assert_same_bits,
    error,
    native,
    plain_attention,
)
from drawing import FLOATS, as_dtype, seeded_calls

from fastmha import reference


def fails(check, *arguments, **options):
    with pytest.raises(AssertionError):
        check(*arguments, **options)


def numbers(name, seed=0):
    return np.random.default_rng(seed).standard_normal((3, 5)).astype(as_dtype(name))


def test_error_is_relative_to_the_largest_value_or_the_floor():
    assert error([1.0, 4.0], [1.0, 4.0]) == 0
    assert error([1.0, 4.5], [1.0, 4.0]) == 0.125
    assert error([0.0, 0.25], [0.0, 0.0], floor=1.0) == 0.25
    assert error([math.nan, 1.5], [1.0, 1.0]) == 0.5
    assert error([math.inf], [1.0]) == 0  # special values are compared elsewhere
    assert error([1e308], [-1e308]) > 1
    assert error(np.zeros(0), np.zeros(0)) == 0


def test_float64_is_close_up_to_1e_12_of_the_largest_value():
    x = np.array([1e-3, 2.0, 100.0])
    assert_close(x + np.array([0.9e-10, 0, 0]), x, np.float64)
    fails(assert_close, x + np.array([1.1e-10, 0, 0]), x, np.float64)
    third = np.array([1 / 3])
    fails(assert_close, third.astype(np.float32).astype(np.float64), third, np.float64)


@pytest.mark.parametrize("name", [name for name in FLOATS if name != "float64"])
def test_lower_precisions_are_close_up_to_a_few_roundings(name):
    x = np.abs(numbers(name)) + as_dtype(name).type(1)
    y = x.copy()
    word = y.view(f"u{y.itemsize}")
    word[0, 0] += 1
    assert_close(y, x, x.dtype)
    word[0, 0] += 40
    fails(assert_close, y, x, x.dtype)


def test_twice_the_error_of_the_plain_computation_is_allowed():
    x = np.ones(4, np.float32)
    plain = x + np.float32(1e-4)
    assert_close(x - np.float32(1.9e-4), x, np.float32, plain)
    fails(assert_close, x - np.float32(2.1e-4), x, np.float32, plain)
    fails(assert_close, x - np.float32(1.9e-4), x, np.float32)
    assert_close(x - np.float32(1.9e-4), x, np.float32, slack=2e-4)
    # but never in float64
    fails(assert_close, np.ones(4) + 1e-6, np.ones(4), np.float64, np.ones(4) + 1e-3)


@pytest.mark.parametrize("name", FLOATS)
def test_close_arrays_have_the_same_dtype_shape_and_special_values(name):
    x = numbers(name)
    assert_close(x, x, x.dtype)
    fails(assert_close, x, x, np.float64 if name != "float64" else np.float32)
    fails(assert_close, x.tolist(), x, x.dtype)
    fails(assert_close, x[None], x, x.dtype)
    fails(assert_close, x[:1], x, x.dtype)
    for special in (math.nan, math.inf, -math.inf):
        y = x.copy()
        y[1, 2] = special
        assert_close(y, y, x.dtype)
        fails(assert_close, y, x, x.dtype)
        fails(assert_close, x, y, x.dtype)
        z = y.copy()
        z[1, 2] = 0 if math.isnan(special) else -special
        fails(assert_close, z, y, x.dtype)
    assert_close(np.zeros((2, 0), x.dtype), np.zeros((2, 0)), x.dtype)


def test_zeros_are_close_to_zeros_alone():
    zeros = np.zeros(3)
    assert_close(zeros, zeros, np.float64)
    fails(assert_close, zeros + 1e-200, zeros, np.float64)
    assert_close(zeros.astype(np.float32) + np.float32(1e-45), zeros, np.float32)  # flushed


@pytest.mark.parametrize("name", FLOATS)
def test_same_bits(name):
    x = numbers(name)
    assert_same_bits(x, x.T.copy().T)
    for change in (0.0, -0.0):
        y, z = x.copy(), x.copy()
        y[0, 0], z[0, 0] = change, -change
        fails(assert_same_bits, y, z)
        assert_same_bits(y, y)
    y = x.copy()
    y.view(f"u{y.itemsize}")[2, 4] ^= 1
    fails(assert_same_bits, y, x)
    fails(assert_same_bits, x[:2], x)
    fails(assert_same_bits, x.astype(np.float64 if name != "float64" else np.float32), x)
    y[...] = math.nan
    z = -y
    assert_same_bits(z, y)
    fails(assert_same_bits, z, x)
    fails(assert_same_bits, np.array([True]), np.array([False]))


def test_negative_zeros_are_found():
    assert_no_negative_zero(np.array([-1.0, 0.0, math.nan]))
    fails(assert_no_negative_zero, np.array([-1.0, -0.0]))


def test_the_plain_computation_is_the_reference_in_float64():
    for call in seeded_calls(100, dtypes=["float64"], lengths=[1, 2, 7, 17], widths=[1, 3, 8], zeros=True):
        q, k, v = (native(x) for x in call[:3])
        expected = reference.attention(q, k, v, return_lse=True, **call.options)
        out, lse, _ = plain_attention(*call[:3], **call.options)
        assert_close(out, expected[0], np.float64)
        assert_close(lse, expected[1], np.float64, floor=1.0)


def test_the_plain_computation_has_an_error_at_lower_precision():
    call = next(seeded_calls(1, options=(), dtypes=["float32"], lengths=[33], widths=[33]))
    exact = reference.attention(*(x.astype(np.float64) for x in call[:3]))
    out, _, size = plain_attention(*call[:3])
    assert 1e-9 < error(out, exact) < 1e-5
    assert 1 < size < 100


@pytest.mark.parametrize("name", FLOATS)
def test_a_wrong_call_is_found(name):
    kinds = {"dtypes": [name], "lengths": [17], "widths": [8], "arranged": False}
    call = next(seeded_calls(1, options=("mask", "softcap"), **kinds))
    out, lse = reference.attention(*call[:3], return_lse=True, **call.options)
    assert_attends(out, lse, *call)
    assert_attends(out, None, *call)
    worse = 1 + (1e-11 if name == "float64" else 1e-4 if name == "float32" else 0.02)
    fails(assert_attends, (out * worse).astype(out.dtype), lse, *call)
    fails(assert_attends, out, lse * min(worse, 1.001) + lse.dtype.type(1e-5), *call)
    fails(assert_attends, out.astype(np.float32 if name != "float32" else np.float64), lse, *call)
    fails(assert_attends, out, lse.astype(np.float16), *call)
    fails(assert_attends, out, lse, *call[:3], {"mask": call.options["mask"]})
    fails(assert_attends, out, lse, *call[:3], {"softcap": call.options["softcap"]})
