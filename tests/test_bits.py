"""Section 4 of the contract: a row's bits depend on its query, the keys it sees, the options."""

import math

import numpy as np
import pytest
from comparing import assert_no_negative_zero, assert_same_bits, native
from drawing import (
    FLOATS,
    LENGTHS,
    OPTIONS,
    SAME_NUMBERS,
    Call,
    arrange,
    as_dtype,
    calls,
    seeded_calls,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import fastmha
from fastmha import reference

MODERATE = LENGTHS[: LENGTHS.index(129)]
NARROW = [1, 3, 5, 8, 9, 16, 17, 33]


def attend(call, **changes):
    """(out, lse), both by batch member, head and row."""
    options = call.options | changes
    out, lse = fastmha.attention(*call[:3], return_lse=True, **options)
    return (out.swapaxes(1, 2) if options.get("layout") == "BLHD" else out), lse


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


def whole(call):
    """The same call with heads before rows, its mask expanded, arrays that can be written to."""
    swapped = call.options.get("layout") == "BLHD"
    q, k, v = (native(x).swapaxes(1, 2) if swapped else native(x) for x in call[:3])
    options = {name: x for name, x in call.options.items() if name != "layout"}
    sizes = (*q.shape[:3], k.shape[2])
    if "mask" in options:
        options["mask"] = np.broadcast_to(native(options["mask"]), sizes).copy()
    k, v = (np.broadcast_to(x, (len(q), *x.shape[1:])) for x in (k, v))
    return Call(q.copy(), k.copy(), v.copy(), options), sizes


def visible(call, sizes):
    """Which keys each row sees, (B, H, L, S): from the oracle's weights of equal scores."""
    options = {"scale": 1.0}
    for name in ("mask", "causal", "window", "key_lengths", "query_lengths"):
        if name in call.options:
            options[name] = call.options[name]
    mask = options.get("mask")
    if mask is not None and mask.dtype != bool:
        options["mask"] = mask != -np.inf
    B, H, L, S = sizes
    zeros = np.zeros((B, H, L, 1)), np.zeros((B, H, S, 1))
    return reference.attention_weights(*zeros, **options) > 0


# --- threads, strides, layouts --------------------------------------------------------------------


@given(calls(zeros=True))
def test_the_number_of_threads(call):
    with fastmha.num_threads(1):
        expected = attend(call)
    for n in (2, 3):
        with fastmha.num_threads(n):
            assert_same(attend(call), expected)


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_the_number_of_threads_where_there_is_work_for_them(name):
    kinds = {"lengths": [193], "widths": [64], "dtypes": [name], "arranged": False}
    for call in seeded_calls(12, seed=5, **kinds):
        with fastmha.num_threads(1):
            expected = attend(call)
            weights = fastmha.attention_weights(*call[:2], **call.options)
        for n in (2, 3, 5):
            with fastmha.num_threads(n):
                assert_same(attend(call), expected)
                assert_same_bits(fastmha.attention_weights(*call[:2], **call.options), weights)


@given(calls(many=[True], widths=NARROW))
@settings(max_examples=20)
def test_few_rows_whose_keys_are_shared_out(call):
    with fastmha.num_threads(1):
        expected = attend(call)
        weights = fastmha.attention_weights(*call[:2], **call.options)
    for n in (2, 3, 8):
        with fastmha.num_threads(n):
            assert_same(attend(call), expected)
            assert_same_bits(fastmha.attention_weights(*call[:2], **call.options), weights)


def test_the_number_of_threads_of_softmax():
    x = np.random.default_rng(0).standard_normal((300, 700)).astype(np.float32)
    with fastmha.num_threads(1):
        expected = fastmha.softmax(x)
    for n in (2, 3):
        with fastmha.num_threads(n):
            assert_same_bits(fastmha.softmax(x), expected)


@given(calls(lengths=MODERATE, arranged=False), st.data())
def test_strides(call, data):
    expected = attend(call)
    mask = call.options.get("mask")
    q, k, v = (arrange(x, data.draw(st.sampled_from(SAME_NUMBERS))) for x in call[:3])
    options = dict(call.options)
    if mask is not None:
        options["mask"] = arrange(mask, data.draw(st.sampled_from(SAME_NUMBERS)))
    assert_same(attend(Call(q, k, v, options)), expected)


@given(calls(lengths=MODERATE, zeros=True))
def test_the_layout(call):
    expected = attend(call)
    other = "BHLD" if call.options.get("layout") == "BLHD" else "BLHD"
    swapped = Call(*(x.swapaxes(1, 2) for x in call[:3]), call.options)
    assert_same(attend(swapped, layout=other), expected)


@given(calls(lengths=MODERATE))
def test_a_mask_expanded(call):
    expanded, _ = whole(call)
    assert_same(attend(expanded), attend(call))


@pytest.mark.parametrize("width", range(1, 40))
def test_the_width_of_the_values(width):
    """Each column on its own."""
    rng = np.random.default_rng(width)
    for dtype in (np.float32, np.float64):
        q, k, v = (
            rng.standard_normal((1, 1, n, m)).astype(dtype) for n, m in ((9, 5), (100, 5), (100, width))
        )
        out = fastmha.attention(q, k, v)
        columns = [fastmha.attention(q, k, v[..., e : e + 1]) for e in range(width)]
        assert_same_bits(np.concatenate(columns, -1), out)


# --- neighbours -----------------------------------------------------------------------------------


@given(calls(lengths=MODERATE), st.data())
def test_other_rows_heads_and_members(call, data):
    call, (B, H, L, _) = whole(call)
    expected, expected_lse = attend(call)
    b, h, i = (data.draw(st.integers(0, n - 1)) for n in (B, H, L))
    junk = data.draw(st.sampled_from([0.0, 1e3, math.nan, math.inf]))
    query = np.full_like(call.query, junk)
    query[b, h, i] = call.query[b, h, i]
    key, value = np.full_like(call.key, junk), np.full_like(call.value, junk)
    g = h // (H // call.key.shape[1])
    key[b, g], value[b, g] = call.key[b, g], call.value[b, g]
    options = dict(call.options)
    if "mask" in options:  # other rows see other keys
        options["mask"] = np.zeros_like(options["mask"])
        options["mask"][b, h, i] = call.options["mask"][b, h, i]
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = np.full(H, 0.125)
            options[name][h] = call.options[name][h]
    for name, most in (("key_lengths", call.key.shape[2]), ("query_lengths", L)):
        if name in options:
            options[name] = np.full(B, most // 2)
            options[name][b] = call.options[name][b]
    out, lse = attend(Call(query, key, value, options))
    assert_same_bits(out[b, h, i], expected[b, h, i])
    assert_same_bits(lse[b, h, i], expected_lse[b, h, i])


@given(calls(options=(), lengths=MODERATE))
def test_heads_and_members_alone(call):
    call, (B, H, _, _) = whole(call)
    expected, _ = attend(call)
    group = H // call.key.shape[1]
    for b in range(B):
        for h in range(H):
            g = h // group
            alone = Call(
                call.query[b : b + 1, h : h + 1],
                call.key[b : b + 1, g : g + 1],
                call.value[b : b + 1, g : g + 1],
                {},
            )
            assert_same_bits(attend(alone)[0][0, 0], expected[b, h])


def test_grouped_heads_equal_repeated_ones():
    for call in seeded_calls(20, lengths=MODERATE, arranged=False):
        axis = 2 if call.options.get("layout") == "BLHD" else 1
        group = call.query.shape[axis] // call.key.shape[axis]
        repeated = Call(
            call.query, call.key.repeat(group, axis), call.value.repeat(group, axis), call.options
        )
        assert_same(attend(repeated), attend(call))


# --- lengths --------------------------------------------------------------------------------------

# Each of them may go with a query that comes later: what it means does not depend on L.
BESIDE = ("window", "scale", "softcap", "alibi_slopes", "sinks", "dropout", "mask", "layout")


def some_of(*names):
    return st.sets(st.sampled_from(names)).map(lambda chosen: tuple(n for n in names if n in chosen))


def full_causal(data, dtypes=FLOATS):
    names = data.draw(some_of(*BESIDE))
    call = data.draw(calls(options=names, lengths=MODERATE, widths=NARROW, dtypes=dtypes))
    call, sizes = whole(call)
    # Batch members and heads are counters of the dropout, rows are not.
    query = np.resize(call.query, (*sizes[:2], sizes[3], call.query.shape[3])).astype(call.query.dtype)
    options = dict(call.options)
    if "mask" in options:
        options["mask"] = np.resize(options["mask"], (*sizes[:2], sizes[3], sizes[3]))
    return Call(query, call.key, call.value, options)


def chunk(call, begin, end):
    """Rows begin to end of the full causal call, as a cache asks for them."""
    options = call.options | {"causal": "bottom-right"}
    if "mask" in options:
        options["mask"] = options["mask"][:, :, begin:end, :end]
    return Call(call.query[:, :, begin:end], call.key[:, :, :end], call.value[:, :, :end], options)


@given(st.data())
def test_a_query_on_its_own_equals_its_row(data):
    call = full_causal(data)
    expected, expected_lse = attend(call, causal=True)
    for i in {0, data.draw(st.integers(0, expected.shape[2] - 1)), expected.shape[2] - 1}:
        out, lse = attend(chunk(call, i, i + 1))
        assert_same_bits(out[:, :, 0], expected[:, :, i])
        assert_same_bits(lse[:, :, 0], expected_lse[:, :, i])


@given(st.data())
def test_chunks_equal_the_whole(data):
    call = full_causal(data)
    out, lse = attend(call, causal=True)
    begin = 0
    while begin < out.shape[2]:
        end = min(out.shape[2], begin + data.draw(st.sampled_from([*range(2, 10), 31, 65])))
        part, part_lse = attend(chunk(call, begin, end))
        assert_same_bits(part, out[:, :, begin:end])
        assert_same_bits(part_lse, lse[:, :, begin:end])
        begin = end


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_row_of_a_long_causal_call_on_its_own(dtype):
    call = next(seeded_calls(1, options=(), lengths=[193], widths=[17], dtypes=[dtype], arranged=False))
    call, (_, _, L, _) = whole(call)
    expected, _ = attend(call, causal=True)
    for i in range(L):
        assert_same_bits(attend(chunk(call, i, i + 1))[0][:, :, 0], expected[:, :, i])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_last_rows_after_many_keys(dtype):
    """As in decoding: heads in groups, few rows, and threads that share out the keys."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 8, 7000, 33)).astype(as_dtype(dtype))
    k, v = (rng.standard_normal((1, 2, 7000, n)).astype(as_dtype(dtype)) for n in (33, 16))
    rows = slice(6960, None)
    options = {"causal": "bottom-right", "sinks": rng.random(8), "dropout_p": 0.2, "rng": 3}
    expected = fastmha.attention(q[:, :, rows], k, v, **options)
    for n in (1, 2, 8):
        fastmha.set_num_threads(n)
        for i in (6960, 6977, 6999):
            alone = slice(i, i + 1)
            out = fastmha.attention(q[:, :, alone], k[:, :, : i + 1], v[:, :, : i + 1], **options)
            assert_same_bits(out[:, :, 0], expected[:, :, i - 6960])


@given(calls(lengths=MODERATE), st.data())
def test_padding_at_the_end(call, data):
    """Key and query lengths equal arrays cut to them, member by member."""
    call, (B, H, L, S) = whole(call)
    options = call.options
    keys = options.pop("key_lengths", np.random.default_rng(S).integers(0, S + 1, B)).astype(int)
    queries = options.pop("query_lengths", np.random.default_rng(L).integers(0, L + 1, B)).astype(int)
    out, lse = attend(call, key_lengths=keys, query_lengths=queries)
    for b, (n, m) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
        cut = dict(options)
        if "mask" in cut:
            cut["mask"] = cut["mask"][b : b + 1, :, :n, :m]
        if "dropout_p" in cut and b:  # the pattern of another member: ask for it by its place
            alone = [np.zeros((b + 1, *x.shape[1:]), x.dtype) for x in call[:3]]
            for x, y in zip(alone, call[:3], strict=True):
                x[b] = y[b]
            if "mask" in cut:
                cut["mask"] = np.broadcast_to(cut["mask"], (b + 1, H, n, m))
        else:
            alone = [x[b : b + 1] for x in call[:3]]
        q, k, v = alone
        expected, expected_lse = attend(Call(q[:, :, :n], k[:, :, :m], v[:, :, :m], cut))
        assert_same_bits(out[b, :, :n], expected[-1])
        assert_same_bits(lse[b, :, :n], expected_lse[-1])
        assert not out[b, :, n:].any()
        assert np.isneginf(lse[b, :, n:]).all()


# --- the same visible keys, said in other words ---------------------------------------------------


@given(st.data())
def test_a_window_that_hides_just_what_causal_hides(data):
    names = [n for n in OPTIONS if n not in ("causal", "window", "key_lengths", "query_lengths")]
    call = data.draw(calls(options=data.draw(some_of(*names)), lengths=MODERATE))
    L = call.query.shape[1 if call.options.get("layout") == "BLHD" else 2]
    expected = attend(call, causal=True)
    for left in (-1, L - 1, L, 10**9, 2**62, 2**70):
        assert_same(attend(call, window=(left, 0)), expected)
        assert_same(attend(call, window=(left, 0), causal=True), expected)
        assert_same(attend(call, window=(left, 5), causal="top-left"), expected)
    bottom = attend(call, causal="bottom-right")
    assert_same(attend(call, causal="bottom-right", window=(10**9, 0)), bottom)


@given(calls(lengths=MODERATE))
def test_a_bool_mask_that_says_the_same(call):
    """Causal, window and lengths as a mask, and the other way round nothing at all."""
    call, sizes = whole(call)
    options = dict(call.options)
    bottom = options.get("causal") == "bottom-right"
    if bottom and ("alibi_slopes" in options or "dropout_p" in options):
        return  # their positions are those of the alignment
    expected = attend(call)
    mask = visible(call, sizes)
    if "mask" in options and options["mask"].dtype != bool:
        mask = np.where(mask, options["mask"], -np.inf).astype(options["mask"].dtype)
    for name in ("causal", "window", "key_lengths", "query_lengths"):
        options.pop(name, None)
    options["mask"] = mask
    assert_same(attend(Call(*call[:3], options)), expected)


@given(calls(lengths=MODERATE))
def test_a_float_mask_of_zeros_and_minus_infinities_hides_like_a_bool_mask(call):
    call, sizes = whole(call)
    rng = np.random.default_rng(0)
    mask = rng.random(sizes) < 0.6
    options = {name: x for name, x in call.options.items() if name != "mask"}
    expected = attend(Call(*call[:3], options), mask=mask)
    for dtype in (np.float64, np.float32, np.float16):
        bias = np.where(mask, 0, -np.inf).astype(dtype)
        out, lse = attend(Call(*call[:3], options), mask=bias)
        hidden = np.isneginf(expected[1])
        assert np.array_equal(np.isneginf(lse), hidden)
        assert not out[hidden].any()


def test_options_that_are_off():
    for call in seeded_calls(10, options=(), lengths=MODERATE):
        expected = attend(call)
        for off in (
            {"softcap": 0}, {"softcap": None}, {"window": (-1, -1)}, {"window": None},
            {"dropout_p": 0.0, "rng": 5}, {"mask": np.array(True)}, {"causal": False},
            {"sinks": [-math.inf] * call.query.shape[1]},
        ):  # fmt: skip
            assert_same(attend(call, **off), expected)
        B, L, S = len(call.query), call.query.shape[2], call.key.shape[2]
        assert_same(attend(call, key_lengths=[S] * B, query_lengths=[L] * B), expected)


# --- what hidden keys hold ------------------------------------------------------------------------


@given(
    calls(lengths=MODERATE, zeros=True, many=[False] * 9 + [True]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.sampled_from([1, 3]),
)
@settings(max_examples=70)
def test_hidden_keys_hold_anything(call, junk, n):
    """Keys that no row of their head sees are poisoned; the rows get the bits of zeros there."""
    fastmha.set_num_threads(n)
    call, sizes = whole(call)
    B, H, _, S = sizes
    G = call.key.shape[1]
    seen = visible(call, sizes).any(2).reshape(B, G, H // G if G else 1, S).any(2)
    results = []
    for fill in (0.0, junk):
        key, value = call.key.copy(), call.value.copy()
        key[~seen] = value[~seen] = fill
        results.append(attend(Call(call.query, key, value, call.options)))
        weights = fastmha.attention_weights(call.query, key, **call.options)
        results[-1] = (*results[-1], weights)
    assert_same(results[1], results[0])
    assert np.isfinite(results[1][0].astype(np.float64)).all()


@given(calls(lengths=MODERATE, options=("mask", "causal", "window")), st.data())
def test_a_key_hidden_from_some_rows_only(call, data):
    """One key is poisoned: the rows that see it become NaN, the others keep their bits."""
    call, sizes = whole(call)
    junk = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    where = data.draw(st.sampled_from(["key", "value", "both"]))
    j = data.draw(st.integers(0, sizes[3] - 1))
    key, value = call.key.copy(), call.value.copy()
    if where != "value":
        key[:, :, j] = math.nan
    if where != "key":
        value[:, :, j] = junk
    expected, _ = attend(call)
    out, _ = attend(Call(call.query, key, value, call.options))
    sees = visible(call, sizes)[..., j]
    assert_same_bits(out[~sees], expected[~sees])
    if where != "value" or math.isnan(junk):
        assert np.isnan(out[sees].astype(np.float64)).all()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"mask": np.zeros(3)}, {"scale": -1.0}], ids=str)
def test_scores_of_infinity(name, options):
    """+inf makes its row NaN, for inf - inf is; -inf weighs nothing."""
    dtype = as_dtype(name)
    q, v = np.ones((1, 1, 4, 1), dtype), np.array([1, 2, 4], dtype).reshape(1, 1, 3, 1)
    q[0, 0, 1] = -1
    q[0, 0, 2] = 0
    k = np.array([math.inf, 0, 0], dtype).reshape(1, 1, 3, 1)
    out = fastmha.attention(q, k, v, **options)
    expected = reference.attention(q, k, v, **options)
    assert_same_bits(np.isnan(out.astype(float)), np.isnan(expected.astype(float)))
    seen = ~np.isnan(expected.astype(float))
    assert np.allclose(out[seen].astype(float), expected[seen].astype(float), 1e-2)
    if "softcap" not in options:  # which makes them finite
        up, down = (1, 0) if "scale" in options else (0, 1)
        assert np.isnan(out[0, 0, up].astype(float)).all()
        assert out[0, 0, down].item() == 3


@pytest.mark.parametrize("name", FLOATS)
def test_a_nan_in_one_column_of_the_values_stays_there(name):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, n, 9)).astype(as_dtype(name)) for n in (70, 200, 200))
    bad = v.copy()
    bad[0, 1, 150, 4] = math.nan
    for options in (
        {},
        {"causal": True},
        {"window": (30, 90)},
        {"mask": rng.random((70, 200)) < 0.5},
    ):
        sees = visible(Call(q, k, v, options), (2, 2, 70, 200))[0, 1, :, 150]
        expected, out = (fastmha.attention(q, k, x, **options) for x in (v, bad))
        nan = np.zeros(out.shape, bool)
        nan[0, 1, sees, 4] = True
        assert np.array_equal(np.isnan(out.astype(np.float64)), nan)
        assert_same_bits(out[~nan], expected[~nan])


# --- signs and builds -----------------------------------------------------------------------------


@given(calls(zeros=True), st.sampled_from([0.0, -0.0, -1e-300]))
def test_no_zero_is_negative(call, least):
    call, _ = whole(call)
    value = np.where(call.value > 0, least, call.value * 0).astype(call.value.dtype)
    value = np.where(value == 0, np.copysign(value, -1), value).astype(value.dtype)  # all of them -0
    out, lse = attend(Call(call.query, call.key, value, call.options))
    if value.dtype != np.float64 or least != -1e-300:
        assert_no_negative_zero(out.astype(np.float64))
    assert_no_negative_zero(lse)
    weights = fastmha.attention_weights(call.query, call.key, **call.options)
    assert_no_negative_zero(weights)


DIGEST = """
import sys, hashlib, numpy as np, fastmha, drawing
for call in drawing.seeded_calls(400, seed=11, zeros=True):
    out, lse = fastmha.attention(*call[:3], return_lse=True, **call.options)
    weights = fastmha.attention_weights(*call[:2], **call.options)
    print(*(hashlib.sha256(x.tobytes()).hexdigest() for x in (out, lse, weights)))
x = np.linspace(-30, 0, 3 * 1500).reshape(3, 1500)
for dtype in ("f8", "f4", "f2"):
    print(hashlib.sha256(fastmha.softmax(x.astype(dtype)).tobytes()).hexdigest())
"""


def test_the_builds_that_fuse_products_and_sums(run_python):
    builds = [isa for isa in fastmha.show_config("dicts")["isas"] if isa != "baseline"]
    if len(builds) < 2:
        pytest.skip("fewer than two of them run here")
    first, *others = (run_python(DIGEST, FASTMHA_ISA=isa, timeout=120).stdout.splitlines() for isa in builds)
    assert len(first) == 403
    for other in others:
        assert other == first
