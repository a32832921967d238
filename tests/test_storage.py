"""How elements are converted: vectors of them as one at a time, and both as NumPy does it."""

import importlib

import numpy as np
import pytest
from comparing import assert_same_bits
from drawing import FLOATS, as_dtype

from fastmha._cached import code
from fastmha._dispatch import isas

BUILDS = [f"{isa}_{precision}" for isa in isas for precision in ("f32", "f64")]
HALVES = [name for name in FLOATS if name not in ("float64", "float32")]


def stored(build, x, dtype, one_at_a_time=False):
    """x (n,) as the kernels convert it: rows of one element are left to the scalar code."""
    kernels = importlib.import_module(f"fastmha._kernels_{build}")
    out = np.empty(x.shape, dtype)
    shape = (1, 1, -1, 1) if one_at_a_time else (1, 1, 1, -1)
    kernels.store(x.reshape(shape), code(x.dtype), out.reshape(shape), code(out.dtype))
    return out


def real(build):
    return np.float64 if build.endswith("f64") else np.float32


def all_of(dtype):
    return np.arange(2**16, dtype=np.uint16).view(dtype)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", HALVES)
def test_every_half_becomes_the_same_real(name, build):
    x = all_of(as_dtype(name))
    with np.errstate(invalid="ignore"):
        expected = x.astype(real(build))
    for one_at_a_time in (False, True):
        assert_same_bits(stored(build, x, real(build), one_at_a_time), expected)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", HALVES)
def test_reals_round_to_the_nearest_half_and_ties_to_even(name, build):
    with np.errstate(over="ignore", invalid="ignore"):  # ARM says so of signalling NaNs that are widened
        halves = all_of(as_dtype(name)).astype(np.float32)
        halves = np.unique(halves[np.isfinite(halves)])
        ties = np.concatenate([(halves[1:] + halves[:-1]) / 2, [65520, -65520, 3.4e38, -3.4e38]])
        x = np.concatenate([halves, ties, np.nextafter(ties, np.float32(np.inf)),
                            np.nextafter(ties, np.float32(-np.inf))])  # fmt: skip
        x = np.append(x, [np.inf, -np.inf, np.nan, -0.0, 1e-45, -1e-45]).astype(np.float32)
        x = np.append(x, np.random.default_rng(0).integers(0, 2**32, 10**5, np.uint32).view(np.float32))
        expected, x = x.astype(as_dtype(name)), x.astype(real(build))
    for one_at_a_time in (False, True):
        assert_same_bits(stored(build, x, as_dtype(name), one_at_a_time), expected)


@pytest.mark.parametrize("build", BUILDS)
def test_int8_and_the_other_float(build):
    x = np.arange(-128, 128).astype(np.int8)
    assert_same_bits(stored(build, x, real(build)), x.astype(real(build)))
    y = np.array([0.1, -0.0, 1e39, -1e39, np.inf, np.nan, 1e-300] * 7)
    if build.endswith("f64"):  # what is too large is infinite
        with np.errstate(over="ignore", under="ignore"):
            assert_same_bits(stored(build, y, np.float32), y.astype(np.float32))
        z = np.array([0.1, -0.0, 3e38, np.inf, np.nan] * 7, np.float32)
        assert_same_bits(stored(build, z, np.float64), z.astype(np.float64))
    else:  # what is too large is as large as can be
        most = np.finfo(np.float32).max
        with np.errstate(over="ignore", under="ignore"):
            expected = np.where(np.isfinite(y), np.clip(y, -most, most), y).astype(np.float32)
        assert_same_bits(stored(build, y, np.float32), expected)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("n", [0, 1, 3, 8, 17, 64, 65])
def test_rows_of_int8(build, n):
    kernels = importlib.import_module(f"fastmha._kernels_{build}")
    x = np.random.default_rng(1).standard_normal((3, 2, 5, n)).astype(np.float32)
    rows, scales = np.empty(x.shape, np.int8), np.empty(x.shape[:-1], np.float32)
    kernels.store(x, code(x.dtype), rows, code(rows.dtype), scales)
    assert_same_bits(scales, np.abs(x).max(-1, initial=0) / np.float32(127))
    ratio = x / np.where(scales > 0, scales, 1)[..., None]
    assert (np.abs(rows - ratio) <= 0.5001).all() and (np.abs(rows).max(-1, initial=0) == 127 * (n > 0)).all()


def test_places_outside_are_refused():
    kernels = importlib.import_module(f"fastmha._kernels_{BUILDS[0]}")
    x, out = np.zeros((2, 1, 1, 3), np.float32), np.zeros((4, 1, 5, 3), np.float32)
    for first, slots in (([0, 4], [0, 0]), ([-1, 0], [0, 0]), ([0, 0], [0, 5]), ([0, 0], [-1, 0])):
        with pytest.raises(ValueError, match="places"):
            kernels.store(x, 2, out, 2, None, np.array(first), np.array(slots))
    with pytest.raises(ValueError):
        kernels.store(x, 2, out, 2)
    with pytest.raises(ValueError):
        kernels.store(x, 2, out[:2], 2, None, np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert not out.any()
