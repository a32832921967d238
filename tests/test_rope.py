"""Rotary embedding and ALiBi's slopes: section 5 of the contract, cases A30, A32 and A34."""

import copy
import math
import pickle
import threading

import numpy as np
import pytest

from fastmha import reference
from fastmha.rope import Rope, alibi_slopes


def as_dtype(name):
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


def plain_rotation(x, positions, interleaved, frequencies):
    """One row at a time, in Python floats: x (L, D), positions (L,)."""
    y = x.astype(np.float64)
    half = len(frequencies)
    for row, p in enumerate(positions):
        for i, f in enumerate(frequencies):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            a, b = float(x[row, first]), float(x[row, second])
            c, s = math.cos(p * f), math.sin(p * f)
            y[row, first], y[row, second] = a * c - b * s, b * c + a * s
    return y


def frequencies(rope, length=2):
    """The angles per position of a call with this length, from what position 1 does to (1, 0)."""
    x = np.zeros((2, rope.dim))
    x[:, slice(0, None, 2) if rope.interleaved else slice(0, rope.dim // 2)] = 1
    y = rope(x, [1, length - 1])[0]
    pairs = y.reshape(-1, 2) if rope.interleaved else y.reshape(2, -1).T
    return np.arctan2(pairs[:, 1], pairs[:, 0])


# --- the rotation


def test_a32_pairing():
    x = np.array([[1.0, 0, 0, 0]])
    halves = Rope(4, interleaved=False)(x, [1])
    interleaved = Rope(4, interleaved=True)(x, [1])
    np.testing.assert_allclose(halves, [[0.5403023, 0, 0.8414710, 0]], atol=1e-7)
    np.testing.assert_allclose(interleaved, [[0.5403023, 0.8414710, 0, 0]], atol=1e-7)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("base", [10000.0, 500000])
def test_section_5_rotation_by_position_times_frequency(interleaved, base):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 5, 10))
    positions = [0, 1, 7, -3, 1000]
    y = Rope(6, interleaved=interleaved, base=base)(x, positions)
    f = [base ** (-2 * i / 6) for i in range(3)]
    for b in range(2):
        for h in range(3):
            expected = plain_rotation(x[b, h], positions, interleaved, f)
            np.testing.assert_allclose(y[b, h], expected, atol=1e-12)
    assert np.array_equal(y[..., 6:], x[..., 6:])  # partial rotation
    assert np.array_equal(y[:, :, 0], x[:, :, 0])  # position 0


def test_a32_permuted_weights_convert_one_pairing_into_the_other():
    rng = np.random.default_rng(1)
    x, W = rng.normal(size=(7, 12)), rng.normal(size=(12, 8))
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # where halves look for the pairs of interleaved
    interleaved = Rope(8, interleaved=True)(x @ W, range(7))
    halves = Rope(8, interleaved=False)(x @ W[:, order], range(7))
    np.testing.assert_allclose(halves, interleaved[:, order], atol=1e-14)


def test_section_5_scores_depend_on_differences_of_positions():
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(2, 1, 16))
    rope = Rope(16, interleaved=False)
    near = rope(q, [5]) @ rope(k, [2]).T
    far = rope(q, [5 + 999]) @ rope(k, [2 + 999]).T
    np.testing.assert_allclose(near, far, atol=1e-11)


def test_section_5_interleaved_is_said_out_loud():
    with pytest.raises(TypeError, match="interleaved"):
        Rope(4)
    with pytest.raises(TypeError, match="interleaved"):
        Rope(4, interleaved="no")
    with pytest.raises(TypeError):
        Rope(4, True)


@pytest.mark.parametrize("dim", [3, 0, -2])
def test_section_5_odd_dim(dim):
    with pytest.raises(ValueError, match="dim"):
        Rope(dim, interleaved=True)


def test_constructor_errors():
    for dim in (4.0, True, None):
        with pytest.raises(TypeError, match="dim"):
            Rope(dim, interleaved=True)
    for base in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="base"):
            Rope(4, interleaved=True, base=base)
    with pytest.raises(TypeError, match="base"):
        Rope(4, interleaved=True, base="10000")


# --- positions


@pytest.mark.parametrize("interleaved", [False, True])
def test_section_5_positions_per_member(interleaved):
    x = np.random.default_rng(3).normal(size=(2, 3, 4, 8))
    rope = Rope(8, interleaved=interleaved)
    positions = np.array([[0, 1, 2, 3], [7, 8, -9, 10]])
    y = rope(x, positions)
    for b in range(2):
        assert np.array_equal(y[b], rope(x[b], positions[b]))
    assert np.array_equal(rope(x, positions[1:]), rope(x, positions[1]))  # (1, L) serves all
    assert np.array_equal(rope(x[:, 0], positions), y[:, 0])  # (B, L, D)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint64, list, range])
def test_section_5_integers_of_any_kind(kind):
    x = np.random.default_rng(4).normal(size=(1, 3, 4))
    rope = Rope(4, interleaved=True)
    if kind is list:
        positions = [1, 2, 3]
    else:
        positions = range(1, 4) if kind is range else np.arange(1, 4, dtype=kind)
    assert np.array_equal(rope(x, positions), rope(x, np.arange(1, 4)))


@pytest.mark.parametrize("positions", [[0.0, 1.0], [True, False], ["0", "1"], [0j, 1j]])
def test_section_5_only_integer_positions(positions):
    with pytest.raises(TypeError, match="positions"):
        Rope(2, interleaved=True)(np.zeros((2, 2)), positions)


@pytest.mark.parametrize("positions", [[0], [0, 1, 2], 0, [[0, 1]] * 3, [[0], [1]], [[[0, 1]]]])
def test_positions_of_wrong_shape(positions):
    with pytest.raises(ValueError, match="positions"):
        Rope(2, interleaved=True)(np.zeros((2, 2, 2)), positions)
    with pytest.raises(ValueError, match="positions"):
        Rope(2, interleaved=True)(np.zeros((2, 2)), [[0, 1]])


def test_rows_of_wrong_shape_or_dtype():
    rope = Rope(4, interleaved=True)
    for shape in ((4,), (2, 3), (1, 2, 2)):
        with pytest.raises(ValueError, match="x: expected"):
            rope(np.zeros(shape), [0, 1])
    for x in (np.zeros((1, 4), int), np.zeros((1, 4), complex), np.ma.zeros((1, 4))):
        with pytest.raises(TypeError, match="x: expected"):
            rope(x, [0])


# --- dtypes and precision


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_a34_angles_are_float64_whatever_the_dtype(name):
    dtype = as_dtype(name)
    y = Rope(2, interleaved=True)(np.array([[1, 0]], dtype), [15962])
    assert y.dtype == dtype
    exact = np.array([[math.cos(15962), math.sin(15962)]])
    np.testing.assert_allclose(exact, [[-0.9080159, 0.4189357]], atol=1e-7)
    if name == "float64":
        np.testing.assert_allclose(y, exact, rtol=1e-15)
    else:
        assert np.array_equal(y, exact.astype(np.float32).astype(dtype))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_a34_far_positions(name):
    dtype, p = as_dtype(name), 2**24 + 1  # which float32 cannot tell from 2**24
    y = Rope(2, interleaved=True)(np.array([[1, 0]], dtype), [p])
    exact = np.array([[math.cos(p), math.sin(p)]], np.float32)
    assert np.array_equal(y, exact.astype(dtype))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_half_types_are_rounded_once(name):
    dtype = as_dtype(name)
    x = np.random.default_rng(5).normal(size=(2, 50, 64)).astype(dtype)
    rope = Rope(64, interleaved=False)
    exact = rope(x.astype(np.float64), range(50))
    if name == "float32":
        np.testing.assert_allclose(rope(x, range(50)), exact, atol=1e-6)
    else:
        single = rope(x.astype(np.float32), range(50))
        assert np.array_equal(rope(x, range(50)), single.astype(dtype))


def test_any_strides_and_a_fresh_result():
    base = np.random.default_rng(6).normal(size=(2, 5, 3, 16)).astype(np.float32)
    rope = Rope(8, interleaved=True)
    contiguous = np.ascontiguousarray(base.swapaxes(1, 2)[..., ::2])
    expected = rope(contiguous, range(5))
    kept = base.copy()
    base.flags.writeable = False
    y = rope(base.swapaxes(1, 2)[..., ::2], range(5))
    assert np.array_equal(y, expected) and np.array_equal(base, kept)
    assert y.flags.c_contiguous and y.flags.writeable and not np.shares_memory(y, base)
    swapped = contiguous.astype(">f4")
    assert np.array_equal(rope(swapped, range(5)), expected)
    assert rope(swapped, range(5)).dtype.isnative


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (0, 4)])
def test_zero_sizes(shape):
    rope = Rope(4, interleaved=False)
    assert rope(np.zeros(shape), range(shape[-2])).shape == shape
    if shape[-2] == 0:
        assert rope(np.zeros(shape), []).shape == shape


def test_not_finite_rows_warn_of_nothing():
    x = np.array([[np.inf, 1.0], [np.nan, 1.0], [1.0, 2.0]])
    y = Rope(2, interleaved=True)(x, [1, 2, 3])
    assert not np.isfinite(y[:2]).any() and np.isfinite(y[2]).all()


def test_section_4_a_step_has_the_bits_of_its_row():
    x = np.random.default_rng(7).normal(size=(2, 3, 9, 8)).astype(np.float32)
    rope = Rope(8, interleaved=False, scaling={"type": "linear", "factor": 3})
    whole = rope(x, range(9))
    for p in range(9):
        assert np.array_equal(rope(x[:, :, p : p + 1], [p]), whole[:, :, p : p + 1])
        assert np.array_equal(rope(x[:, :, p : p + 1], [[p], [p]]), whole[:, :, p : p + 1])


# --- the way back


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("factor", [None, 1.5])
def test_inverse_and_gradient(interleaved, factor):
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": factor,
    }
    rope = Rope(6, interleaved=interleaved, scaling=scaling if factor else None)
    rng = np.random.default_rng(8)
    x, g = rng.normal(size=(2, 2, 3, 5, 8))
    positions = rng.integers(-50, 50, size=(2, 5))
    y = rope(x, positions)
    np.testing.assert_allclose(rope.inverse(y, positions), x, atol=1e-13)
    # the gradient is the transpose: <g, R x> = <R' g, x>
    assert math.isclose((g * y).sum(), (rope.backward(g, positions) * x).sum(), rel_tol=1e-12)
    if not factor:
        assert np.array_equal(rope.inverse(g, positions), rope.backward(g, positions))
        np.testing.assert_allclose(rope(x, -positions), rope.inverse(x, positions), atol=1e-14)


# --- scaling

# Angles per position that the published code (huggingface/transformers 5.24, run in float64)
# computes: record, base, dim, length of the call, angles, attention factor.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 2048}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
PUBLISHED = [
    ({"rope_type": "linear", "factor": 4.0}, 1e4, 8, 2, [0.25, 0.025, 0.0025, 0.00025], 1.0),
    (DYNAMIC, 1e4, 8, 100, [1, 0.1, 0.01, 0.001], 1.0),
    (DYNAMIC, 1e4, 8, 5000, [1, 0.0528726030759, 0.00279551215602, 0.000147806004619], 1.0),
    (
        LLAMA3,
        5e5,
        16,
        2,
        [
            1,
            0.193922744749,
            0.0376060309309,
            0.00729266473722,
            0.000524846160993,
            3.42810219595e-05,
            6.64786987118e-06,
            1.28917317215e-06,
        ],
        1.0,
    ),
    (
        YARN,
        1e4,
        16,
        2,
        [
            1,
            0.316227766017,
            0.1,
            0.0256935059889,
            0.00625,
            0.00138349647632,
            0.00025,
            7.90569415042e-05,
        ],
        1.138629436111989,
    ),
    (
        {**YARN, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        1.5e5,
        16,
        2,
        [
            1,
            0.225418000203,
            0.0508132748155,
            0.00679495948973,
            0.000456483919223,
            1.81883366817e-05,
            4.0999784818e-06,
            9.24208950243e-07,
        ],
        1.3465735902799727,
    ),
    (
        {**YARN, "factor": 40, "beta_fast": 32, "beta_slow": 1}
        | {"mscale": 1.0, "mscale_all_dim": 0.707},
        1e4,
        16,
        2,
        [
            1,
            0.316227766017,
            0.1,
            0.023914724805,
            0.005125,
            0.00084986212117,
            2.5e-05,
            7.90569415042e-06,
        ],
        1.0857263992561355,
    ),
    (
        {**YARN, "factor": 40.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25},
        1e4,
        16,
        2,
        [
            1,
            0.316227766017,
            0.1,
            0.0316227766017,
            0.00675,
            0.00110679718106,
            2.5e-05,
            7.90569415042e-06,
        ],
        1.25,
    ),
    (
        {**YARN, "factor": 2.0, "original_max_position_embeddings": 7},
        1e4,
        4,
        2,
        [1, 0.005],
        1.0693147180559945,
    ),
]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("scaling", "base", "dim", "length", "expected", "factor"), PUBLISHED)
def test_section_5_published_scalings(scaling, base, dim, length, expected, factor, interleaved):
    rope = Rope(dim, interleaved=interleaved, base=base, scaling=scaling)
    np.testing.assert_allclose(frequencies(rope, length), expected, rtol=1e-10)
    assert math.isclose(rope.attention_factor, factor, rel_tol=1e-14)
    x = np.ones((1, dim + 2))
    y = rope(x, [0])
    np.testing.assert_allclose(y[0, :dim], factor, rtol=1e-14)
    assert y[0, dim:].tolist() == [1, 1]


def test_section_5_dynamic_scaling_goes_by_the_largest_position_plus_one():
    rope = Rope(8, interleaved=False, scaling=DYNAMIC)
    plain = Rope(8, interleaved=False)
    x = np.random.default_rng(9).normal(size=(2, 1, 8))
    assert np.array_equal(rope(x, [2047]), plain(x, [2047]))
    assert not np.array_equal(rope(x, [2048]), plain(x, [2048]))
    # the largest of the whole call, all members together
    longer = rope(x, [[5], [9000]])
    assert not np.array_equal(longer[0], plain(x[0], [5]))
    assert np.array_equal(rope(x, [5]), plain(x, [5]))
    assert frequencies(Rope(2, interleaved=True, scaling=DYNAMIC), 9000).tolist() == [1]


def test_section_5_yarn_with_a_factor_of_one_changes_nothing():
    rope = Rope(8, interleaved=True, scaling={**YARN, "factor": 1.0})
    np.testing.assert_allclose(
        frequencies(rope), frequencies(Rope(8, interleaved=True)), rtol=1e-14
    )
    assert rope.attention_factor == 1


def test_records_as_they_are_published():
    plain = frequencies(Rope(8, interleaved=False))
    for scaling in (None, {}, {"rope_type": "default"}, {"rope_type": "default", "type": "yarn"}):
        assert np.array_equal(frequencies(Rope(8, interleaved=False, scaling=scaling)), plain)
    for extra in (
        {"type": "linear"},
        {"rope_type": "linear", "type": "yarn"},
        {"type": "linear", "rope_theta": 10000, "partial_rotary_factor": 0.5},
        {"type": "linear", "finetuned": True, "original_max_position_embeddings": 4096},
    ):
        rope = Rope(8, interleaved=False, scaling={"factor": 2.0, **extra})
        np.testing.assert_allclose(frequencies(rope), plain / 2, rtol=1e-14)


def test_records_are_copied():
    record = dict(YARN)
    rope = Rope(8, interleaved=True, scaling=record)
    record["factor"] = 99.0
    assert rope.scaling == YARN
    assert np.array_equal(frequencies(rope), frequencies(Rope(8, interleaved=True, scaling=YARN)))


@pytest.mark.parametrize(
    ("scaling", "error", "match"),
    [
        ("linear", TypeError, "scaling"),
        ({"factor": 2.0}, ValueError, "rope_type"),
        ({"rope_type": "longrope", "factor": 2.0}, ValueError, "'longrope'"),
        ({"rope_type": "linear"}, ValueError, "'factor'"),
        ({"rope_type": "linear", "factor": None}, ValueError, "'factor'"),
        ({"rope_type": "linear", "factor": 0.0}, ValueError, "'factor'"),
        ({"rope_type": "linear", "factor": math.nan}, ValueError, "'factor'"),
        ({"rope_type": "linear", "factor": "2"}, TypeError, "'factor'"),
        ({"rope_type": "linear", "factor": 2.0, "facter": 3}, ValueError, "'facter'"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, ValueError, "rope_theta"),
        ({"rope_type": "dynamic", "factor": 2.0}, ValueError, "original_max_position_embeddings"),
        ({**LLAMA3, "high_freq_factor": 1.0}, ValueError, "high_freq_factor"),
        ({**YARN, "beta_fast": -1}, ValueError, "beta_fast"),
    ],
)
def test_wrong_records(scaling, error, match):
    with pytest.raises(error, match=match):
        Rope(8, interleaved=True, scaling=scaling)


# --- objects


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_c19_pickle(protocol):
    rope = Rope(8, interleaved=True, base=500.0, scaling=LLAMA3)
    x = np.ones((2, 8))
    before = rope(x, [3, 4])
    twin = pickle.loads(pickle.dumps(rope, protocol))
    assert "_tables" not in vars(twin)
    assert np.array_equal(twin(x, [3, 4]), before)
    assert repr(twin) == repr(rope)


def test_c19_deepcopy_and_repr():
    rope = Rope(8, interleaved=True, scaling=YARN)
    twin = copy.deepcopy(rope)
    assert twin.scaling is not rope.scaling
    assert np.array_equal(twin(np.ones((1, 8)), [7]), rope(np.ones((1, 8)), [7]))
    assert eval(repr(rope)).scaling == YARN


def test_query_and_key_share_the_tables_of_a_step():
    rope = Rope(8, interleaved=False)
    rope(np.ones((2, 5, 8)), np.arange(5))
    tables = rope._tables
    rope(np.ones((1, 5, 8)), np.arange(5))
    assert rope._tables is tables
    rope(np.ones((1, 5, 8), np.float32), np.arange(5))
    assert rope._tables is not tables


def test_threads_share_an_object():
    rope = Rope(16, interleaved=True)
    x = np.random.default_rng(10).normal(size=(1, 1, 16))
    expected = [Rope(16, interleaved=True)(x, [p]) for p in range(8)]
    wrong = []

    def work(first):
        for step in range(200):
            p = (first + step) % 8
            if not np.array_equal(rope(x, [p]), expected[p]):
                wrong.append(p)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- ALiBi


def test_a30_slopes_of_the_published_code():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    expected = [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    np.testing.assert_allclose(alibi_slopes(12), expected, rtol=1e-15)
    assert alibi_slopes(1).tolist() == [2.0**-8]
    for n in (*range(1, 40), 112):
        slopes = alibi_slopes(n)
        assert slopes.dtype == np.float64 and slopes.shape == (n,)
        np.testing.assert_allclose(slopes, reference.alibi_slopes(n), rtol=1e-15)


def test_alibi_slopes_errors():
    for n in (0, -1):
        with pytest.raises(ValueError, match="n_heads"):
            alibi_slopes(n)
    for n in (8.0, "8", None, True):
        with pytest.raises(TypeError, match="n_heads"):
            alibi_slopes(n)
