"""Packed batches: each sequence as in a call of its own, whatever lies beside it."""

import inspect
import itertools
import math
import threading
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from comparing import arithmetic, assert_same_bits, error, native, precision
from drawing import FLOATS, SAME_NUMBERS, Sizes, arrange, as_dtype, draw_options
from hypothesis import given, settings
from hypothesis import strategies as st

import fastmha
from fastmha import attention, attention_backward, attention_varlen, attention_varlen_backward, reference

OPTIONS = ("causal", "window", "scale", "softcap", "alibi_slopes", "sinks", "dropout")
LENGTHS = [1, 2, 5, 0, 16, 17, 33, 64, 65, 97]
WIDTHS = [1, 3, 8, 9, 16, 33]


def random(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Packed(NamedTuple):
    """Arguments of `attention_varlen`; no `cu_seqlens_k`: as `cu_seqlens_q`."""

    query: Any
    key: Any
    value: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    options: dict

    def spans(self):
        """The rows and the keys of each sequence, as slices."""
        queries = np.asarray(self.cu_seqlens_q).tolist()
        keys = queries if self.cu_seqlens_k is None else np.asarray(self.cu_seqlens_k).tolist()
        pairs = (itertools.pairwise(ends) for ends in (queries, keys))
        return [(slice(*rows), slice(*columns)) for rows, columns in zip(*pairs, strict=True)]

    def rest(self):
        """The rows and the keys of no sequence."""
        keys = self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k
        return slice(int(self.cu_seqlens_q[-1]), None), slice(int(keys[-1]), None)


def offsets(lengths, dtype=np.int64):
    return np.cumsum([0, *lengths]).astype(dtype)


def make_packed(pick, *, options=None, dtypes=FLOATS, arranged=True, lengths=LENGTHS):
    rng = np.random.default_rng(pick(range(2**32)))
    dtype = as_dtype(pick(dtypes))
    B, G, group = pick([2, 3, 5, 1, 0]), pick([1, 2]), pick([1, 2, 3])
    D, E = pick(WIDTHS), pick(WIDTHS)
    same = pick([False, True])
    queries = [pick(lengths) for _ in range(B)]
    keys = queries if same else [pick(lengths) for _ in range(B)]
    kinds = [pick([np.int64, np.int32]) for _ in range(2)]
    T, T_key = (sum(n) + pick([0, 1, 3]) for n in (queries, keys))
    if same:
        T_key = T
    n = Sizes(B, G * group, max(queries, default=0), max(keys, default=0))
    names = [name for name in OPTIONS if pick([False, True])] if options is None else options
    drawn = draw_options(pick, rng, n, names)
    arrays = []
    for shape in (T, n.H, D), (T_key, G, D), (T_key, G, E):
        x = rng.standard_normal(shape).astype(dtype)
        arrays.append(arrange(x, pick(SAME_NUMBERS)) if arranged else x)
    return Packed(
        *arrays, offsets(queries, kinds[0]), None if same else offsets(keys, kinds[1]), drawn
    )


@st.composite
def packed(draw, **kinds):
    return make_packed(lambda choices: draw(st.sampled_from(choices)), **kinds)


def seeded_packed(n, seed=0, **kinds):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        yield make_packed(lambda choices: choices[int(rng.integers(len(choices)))], **kinds)


def forward(call, module=fastmha, **changes):
    return module.attention_varlen(*call[:5], return_lse=True, **call.options, **changes)


def backward(call, grad, out, lse, module=fastmha):
    asked = {"grad_sinks": "sinks" in call.options}
    return module.attention_varlen_backward(grad, *call[:3], out, lse, *call[3:5], **asked, **call.options)


def gradient_like(out, seed=1):
    return random(*out.shape, dtype=out.dtype, seed=seed)


def gradients(call):
    out, lse = forward(call)
    return backward(call, gradient_like(out), out, lse)


def member(x, b, dropout):
    """A sequence as batch member b of others like it, which matters to the pattern of dropout alone."""
    return np.broadcast_to(x, (b + 1 if dropout else 1, *x.shape))


def own_calls(call):
    """(rows, keys, out (L, H, E), lse (H, L)) of a call of each sequence's own."""
    dropout = "dropout_p" in call.options
    for b, (rows, keys) in enumerate(call.spans()):
        q, k, v = (
            member(native(x)[span], b, dropout)
            for x, span in ((call.query, rows), (call.key, keys), (call.value, keys))
        )
        out, lse = attention(q, k, v, layout="BLHD", return_lse=True, **call.options)
        yield rows, keys, out[-1], lse[-1]


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


def assert_near(actual, expected, tolerance, largest=None):
    """Up to `tolerance` of the largest, and the rounding of the dtype."""
    assert actual.shape == expected.shape
    a, e = (x.astype(np.float64) for x in (actual, expected))
    assert np.isfinite(a).all()
    most = np.abs(e).max(initial=0) if largest is None else largest
    eps, least = precision(actual.dtype)
    assert np.abs(a - e).max(initial=0) <= max(tolerance, 2 * eps) * max(most, 1e-30) + 4 * least


# --- names: section 1 -----------------------------------------------------------------------------


def test_the_signatures_are_those_of_the_functions_for_whole_arrays():
    """But mask, lengths and layout."""
    gone = {"mask", "grad_mask", "key_lengths", "query_lengths", "layout"}
    for function, whole in ((attention_varlen, attention), (attention_varlen_backward, attention_backward)):
        expected = [p for name, p in inspect.signature(whole).parameters.items() if name not in gone]
        place = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in expected)
        found = list(inspect.signature(function).parameters.values())
        assert [p.name for p in found[place : place + 2]] == ["cu_seqlens_q", "cu_seqlens_k"]
        assert found[place].default is inspect.Parameter.empty
        assert found[place + 1].default is None
        assert found[:place] + found[place + 2 :] == expected
        assert getattr(fastmha, function.__name__) is function
        assert inspect.signature(function) == inspect.signature(getattr(reference, function.__name__))


def test_an_example():
    """Lengths 2 and 3, equal scores: the means of each sequence's values; a row too many."""
    q = k = np.zeros((6, 1, 2))
    v = np.arange(6.0).reshape(6, 1, 1)
    out, lse = attention_varlen(q, k, v, np.array([0, 2, 5]), return_lse=True)
    assert np.abs(out.ravel() - [0.5, 0.5, 3, 3, 3, 0]).max() < 1e-15
    assert out[5, 0, 0] == 0
    expected = [math.log(2)] * 2 + [math.log(3)] * 3
    assert lse.shape == (1, 6)
    assert np.abs(lse[0, :5] - expected).max() < 1e-15
    assert lse[0, 5] == -math.inf


# --- the same bits: section 4, rules 3.10 and 3.13 ------------------------------------------------


@given(packed())
@settings(max_examples=60)
def test_each_sequence_has_the_bits_of_a_call_of_its_own(call):
    out, lse = forward(call)
    T, H, E = *call.query.shape[:2], call.value.shape[2]
    assert out.shape == (T, H, E) and out.dtype == native(call.query).dtype
    assert lse.shape == (H, T) and lse.dtype == arithmetic(out.dtype)
    assert out.flags.c_contiguous and out.flags.writeable
    for rows, _, own, own_lse in own_calls(call):
        assert_same_bits(out[rows], own)
        assert_same_bits(lse[:, rows], own_lse)
    rest, _ = call.rest()
    assert not out[rest].any()
    assert np.isneginf(lse[:, rest]).all()
    assert_same_bits(attention_varlen(*call[:5], **call.options), out)


def padded(call, x, spans, n, junk):
    """(B, n, H, D), each member's rows in front, `junk` behind."""
    whole = np.full((len(spans), n, *x.shape[1:]), junk, native(x).dtype)
    for b, span in enumerate(spans):
        whole[b, : span.stop - span.start] = x[span]
    return whole


def padded_call(call, junk=math.nan):
    """(arrays, lengths, rows, keys) of the same as one padded batch."""
    rows, keys = [list(spans) for spans in zip(*call.spans(), strict=True)] or ([], [])
    lengths = [[span.stop - span.start for span in spans] for spans in (rows, keys)]
    L, S = (max(n, default=0) + 3 for n in lengths)
    arrays = [
        padded(call, x, spans, n, junk)
        for x, spans, n in ((call.query, rows, L), (call.key, keys, S), (call.value, keys, S))
    ]
    options = {
        "query_lengths": np.array(lengths[0], int),
        "key_lengths": np.array(lengths[1], int),
        "layout": "BLHD",
        **call.options,
    }
    return arrays, options, rows, keys


@given(packed())
@settings(max_examples=60)
def test_packed_equals_padded(call):
    """With key and query lengths, bottom-right alignment and dropout included."""
    out, lse = forward(call)
    if not call.spans():
        return
    arrays, options, rows, _ = padded_call(call)
    whole, whole_lse = attention(*arrays, return_lse=True, **options)
    for b, span in enumerate(rows):
        n = span.stop - span.start
        assert_same_bits(out[span], whole[b, :n])
        assert_same_bits(lse[:, span], whole_lse[b, :, :n])


@given(packed(arranged=False), st.sampled_from([math.nan, math.inf, -math.inf, 1e3]))
def test_what_lies_beside_a_sequence_does_not_matter(call, junk):
    """Neither other sequences nor the rows past the last offset."""
    out, lse = forward(call)
    spans = [*call.spans(), call.rest()]
    for rows, keys in spans[:-1]:
        others = []
        for x, span in ((call.query, rows), (call.key, keys), (call.value, keys)):
            other = np.full_like(x, junk)
            other[span] = x[span]
            others.append(other)
        found, found_lse = forward(Packed(*others, *call[3:]))
        assert_same_bits(found[rows], out[rows])
        assert_same_bits(found_lse[:, rows], lse[:, rows])
        assert not found[spans[-1][0]].any()


@given(packed(), st.sampled_from([2, 3, 8]))
def test_the_number_of_threads(call, n):
    with fastmha.num_threads(1):
        out, lse = forward(call)
        grad = gradient_like(out)
        found = backward(call, grad, out, lse)
    with fastmha.num_threads(n):
        assert_same(forward(call), (out, lse))
        assert_same(backward(call, grad, out, lse), found)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "queries, keys",
    [
        ([1] * 40, [0, 7, 300, 96] * 10),  # as in decoding
        ([1000, 1, 0, 3], [1000, 1, 0, 3]),  # one that is much longer than the others
        ([1, 2, 3], [3000, 5, 2000]),  # many keys to a row
        ([65] * 4, [129] * 4),
    ],
)
def test_sequences_of_very_different_lengths(name, queries, keys):
    dtype = as_dtype(name)
    q, k, v = (
        random(sum(n), h, 16, dtype=dtype, seed=i)
        for i, (n, h) in enumerate(((queries, 4), (keys, 2), (keys, 2)))
    )
    options = {"causal": "bottom-right", "sinks": random(4)}
    call = Packed(q, k, v, offsets(queries), offsets(keys), options)
    out, lse = forward(call)
    for rows, _, own, own_lse in own_calls(call):
        assert_same_bits(out[rows], own)
        assert_same_bits(lse[:, rows], own_lse)
    found = backward(call, gradient_like(out), out, lse)
    for n in (1, 2, 3):
        with fastmha.num_threads(n):
            assert_same(forward(call), (out, lse))
            assert_same(backward(call, gradient_like(out), out, lse), found)


@pytest.mark.parametrize("arrangement", SAME_NUMBERS)
def test_each_argument_of_any_strides(arrangement):
    lengths = [5, 0, 17, 9]
    q, k, v = (random(31, h, d, seed=d) for h, d in ((4, 8), (2, 8), (2, 5)))
    cu = offsets(lengths)
    out, lse = attention_varlen(q, k, v, cu, causal=True, return_lse=True)
    given = [gradient_like(out), q, k, v, out, lse, cu, cu]
    expected = attention_varlen_backward(*given, causal=True)
    for i, x in enumerate(given):
        changed = [*given[:i], arrange(x, arrangement), *given[i + 1 :]]
        assert_same(attention_varlen_backward(*changed, causal=True), expected)
        found = attention_varlen(*changed[1:4], *changed[6:], causal=True, return_lse=True)
        assert_same(found, (out, lse))


def test_slices_of_a_fused_buffer():
    """(T, q k v, H, D), as projections in one leave it."""
    buffer = random(20, 3, 2, 8, dtype=np.float32)
    cu = offsets([4, 9, 7])
    expected = attention_varlen(*(buffer[:, i].copy() for i in range(3)), cu)
    assert_same_bits(attention_varlen(*(buffer[:, i] for i in range(3)), cu), expected)


# --- the oracle -----------------------------------------------------------------------------------

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def exact(call):
    arrays = (native(x).astype(np.float64) for x in call[:3])
    options = dict(call.options)
    if "sinks" in options:
        options["sinks"] = options["sinks"].astype(np.float64)
    return Packed(*arrays, *call[3:5], options)


def moderated(call):
    """With moderate scores, which tolerances are for."""
    options = {name: x for name, x in call.options.items() if name not in ("scale", "alibi_slopes")}
    if "alibi_slopes" in call.options:
        options["alibi_slopes"] = call.options["alibi_slopes"] / 16
    if "sinks" in options:
        options["sinks"] = options["sinks"].clip(-4, 4)
    return call._replace(options=options)


def assert_attends(call):
    out, lse = forward(call)
    expected, expected_lse = forward(exact(call), reference)
    assert_near(out, expected, TOLERANCE[out.dtype.name])
    assert np.array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    assert error(lse, expected_lse, 1.0) <= (1e-12 if lse.dtype == np.float64 else 1e-5)


def assert_differentiates(call):
    out, lse = forward(call)
    grad = gradient_like(out)
    found = backward(call, grad, out, lse)
    plain = exact(call)
    expected = backward(plain, grad.astype(np.float64), *forward(plain, reference), module=reference)
    largest = max(np.abs(x).max(initial=0) for x in expected[:3])
    kinds = [out.dtype] * 3 + [lse.dtype] * (len(found) - 3)
    for x, y, kind in zip(found, expected, kinds, strict=True):
        assert x.dtype == kind and x.flags.c_contiguous and x.flags.writeable
        assert_near(x, y, 10 * TOLERANCE[out.dtype.name], max(largest, np.abs(y).max(initial=0)))


@given(packed())
@settings(max_examples=60)
def test_any_combination_of_options_equals_the_reference(call):
    assert_attends(moderated(call))


@given(packed())
@settings(max_examples=60)
def test_gradients_equal_the_reference(call):
    assert_differentiates(moderated(call))


@pytest.mark.slow
@given(packed(lengths=[*LENGTHS, 300, 1000]), st.sampled_from([1, 2, 3]))
@settings(max_examples=500)
def test_any_packed_batch_equals_the_reference(call, n):
    call = moderated(call)
    with fastmha.num_threads(n):
        assert_attends(call)
        assert_differentiates(call)


# --- gradients ------------------------------------------------------------------------------------


@given(packed(dtypes=["float64", "float32"]))
@settings(max_examples=60)
def test_gradients_equal_those_of_separate_calls(call):
    call = moderated(call)
    out, lse = forward(call)
    grad = gradient_like(out)
    found = backward(call, grad, out, lse)
    dropout = "dropout_p" in call.options
    expected = [np.zeros(x.shape, out.dtype) for x in call[:3]]
    dsinks = 0
    for b, (rows, keys) in enumerate(call.spans()):
        given = [
            member(native(x)[span], b, dropout)
            for x, span in ((call.query, rows), (call.key, keys), (call.value, keys))
        ]
        own, own_lse = attention(*given, layout="BLHD", return_lse=True, **call.options)
        g = np.zeros_like(own)
        g[-1] = grad[rows]
        asked = {"grad_sinks": "sinks" in call.options}
        own = attention_backward(g, *given, own, own_lse, layout="BLHD", **asked, **call.options)
        for x, y, span in zip(expected, own[:3], (rows, keys, keys), strict=True):
            x[span] = y[-1]
        dsinks = dsinks + own[-1] if asked["grad_sinks"] else 0
    tolerance = 1e-13 if out.dtype == np.float64 else 1e-5
    largest = max(np.abs(x).max(initial=0) for x in expected)
    for x, y in zip(found[:3], expected, strict=True):
        assert_near(x, y, tolerance, largest)
    if "sinks" in call.options and call.spans():
        assert_near(found[3], np.asarray(dsinks), tolerance, max(largest, np.abs(dsinks).max(initial=0)))


@given(packed(), st.sampled_from([math.nan, math.inf]))
def test_rows_past_the_last_offset_have_no_gradient_and_hold_anything(call, junk):
    out, lse = forward(call)
    grad = gradient_like(out)
    expected = backward(call, grad, out, lse)
    rows, keys = call.rest()
    arrays = [native(x).copy() for x in call[:3]]
    for x, span in zip((*arrays, grad), (rows, keys, keys, rows), strict=True):
        x[span] = junk
    poisoned = Packed(*arrays, *call[3:])
    assert_same(forward(poisoned), (out, lse))
    found = backward(poisoned, grad, out, lse)
    assert_same(found, expected)
    for x, span in zip(found, (rows, keys, keys), strict=False):
        assert not x[span].any()


def test_one_sequence_of_nan_hurts_no_other():
    lengths = [9, 40, 0, 7]
    q, k, v = (random(56, h, 8, seed=h) for h in (4, 2, 2))
    call = Packed(q, k, v, offsets(lengths), None, {"causal": True})
    clean = gradients(call)
    for x in call[:3]:
        poisoned = x.copy()
        poisoned[9:49] = math.nan
        arrays = [poisoned if y is x else y for y in call[:3]]
        for found, y in zip(gradients(call._replace(query=arrays[0], key=arrays[1], value=arrays[2])), clean,
                            strict=True):  # fmt: skip
            assert_same_bits(found[:9], y[:9])
            assert_same_bits(found[49:], y[49:])


@pytest.mark.parametrize("causal", [False, True, "bottom-right"])
def test_packed_gradients_equal_padded_ones(causal):
    queries, keys = [3, 0, 17, 64], [5, 9, 0, 40]
    q, k, v = (random(sum(n), 2, 8, seed=i) for i, n in enumerate((queries, keys, keys)))
    call = Packed(q, k, v, offsets(queries), offsets(keys), {"causal": causal, "dropout_p": 0.3, "rng": 4})
    out, lse = forward(call)
    grad = gradient_like(out)
    found = backward(call, grad, out, lse)
    arrays, options, rows, columns = padded_call(call)
    whole, whole_lse = attention(*arrays, return_lse=True, **options)
    wide = padded(call, grad, rows, whole.shape[1], math.nan)
    expected = attention_backward(wide, *arrays, whole, whole_lse, **options)
    for x, y, spans in zip(found, expected, (rows, columns, columns), strict=True):
        for b, span in enumerate(spans):
            n = span.stop - span.start
            assert np.abs(x[span] - y[b, :n]).max(initial=0) <= 1e-13 * np.abs(x).max()
            assert not y[b, n:].any()


def test_memory_is_written_before_it_is_read():
    """What the results are put into holds NaN beforehand."""

    def poisoned_empty(shape, *arguments, _empty=np.empty, **options):
        x = _empty(shape, *arguments, **options)
        if x.dtype.kind not in "biuSUOMm":
            x[...] = np.nan
        return x

    for call in seeded_packed(60, seed=2):
        out, lse = forward(call)
        grad = gradient_like(out)
        expected = backward(call, grad, out, lse)
        with mock.patch.object(np, "empty", poisoned_empty):
            assert np.isnan(np.empty(3)).all()
            found = forward(call), backward(call, grad, out, lse)
        assert_same(found[0], (out, lse))
        assert_same(found[1], expected)


def test_inputs_are_left_alone():
    for call in seeded_packed(30, seed=3):
        out, lse = forward(call)
        grad = gradient_like(out)
        given = [x for x in (*call[:5], grad, out, lse) if x is not None]
        before = [x.tobytes() for x in given]
        results = (*forward(call), *backward(call, grad, out, lse))
        assert [x.tobytes() for x in given] == before
        for x in results:
            assert not any(np.shares_memory(x, y) for y in given)


# --- heads, members, sizes ------------------------------------------------------------------------


@pytest.mark.parametrize("H, G", [(4, 2), (6, 1), (3, 3), (8, 2)])
def test_grouped_heads(H, G):
    """Rule 3.9: as repeated ones; their gradients are sums."""
    cu = offsets([9, 0, 30, 1])
    q, k, v = random(40, H, 8), random(40, G, 8, seed=1), random(40, G, 6, seed=2)
    call = Packed(q, k, v, cu, None, {"causal": True})
    repeated = Packed(q, k.repeat(H // G, 1), v.repeat(H // G, 1), cu, None, {"causal": True})
    assert_same(forward(call), forward(repeated))
    found, expected = gradients(call), gradients(repeated)
    assert_same_bits(found[0], expected[0])
    for x, y in zip(found[1:], expected[1:], strict=True):
        y = y.reshape(40, G, H // G, y.shape[2]).sum(2)
        assert np.abs(x - y).max() <= 1e-13 * np.abs(y).max()


def test_which_heads_share():
    q, k = np.zeros((3, 4, 2)), np.zeros((3, 2, 2))
    v = np.broadcast_to(np.array([1.0, 2.0])[:, None], (3, 2, 1))
    assert attention_varlen(q, k, v, [0, 1, 3])[..., 0].tolist() == [[1, 1, 2, 2]] * 3


@pytest.mark.parametrize("name", FLOATS)
def test_dropout_counts_sequences_as_members(name):
    """Rule 3.13, empty ones included; equal scores: each output is the share of what is kept."""
    dtype, p, seed = as_dtype(name), 0.5, 12345
    queries, keys = [3, 0, 5, 40], [7, 4, 0, 130]
    q, k, v = np.zeros((48, 2, 1), dtype), np.zeros((141, 2, 1), dtype), np.ones((141, 2, 1), dtype)
    for causal in (False, "bottom-right"):
        options = {"dropout_p": p, "rng": seed, "causal": causal}
        call = Packed(q, k, v, offsets(queries), offsets(keys), options)
        out, _ = forward(call)
        for b, (rows, _) in enumerate(call.spans()):
            L, S = queries[b], keys[b]
            if not L or not S:
                assert not out[rows].any()
                continue
            place = np.arange(L) + (S - L if causal else 0)
            kept = reference.dropout_mask(seed, p, [b], 2, place, S)[0]
            seen = np.arange(S) <= place[:, None] if causal else np.ones((L, S), bool)
            expected = (kept & seen).sum(-1) / seen.sum(-1) / (1 - p)
            tolerance = max(4 * precision(dtype)[0], 1e-6 if dtype != np.float64 else 1e-14)
            assert np.abs(out[rows, :, 0].astype(np.float64) - expected.T).max() <= tolerance


def test_a_seed_is_needed_for_the_way_back_alone():
    call = Packed(*(random(9, 2, 4, seed=n) for n in range(3)), offsets([4, 5]), None, {"dropout_p": 0.5})
    out, lse = forward(call)
    other, _ = forward(call)
    assert not np.array_equal(out, other)
    with pytest.raises(ValueError, match=r"^rng: expected"):
        attention_varlen_backward(out, *call[:3], out, lse, call.cu_seqlens_q, dropout_p=0.5)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("options", [{}, {"causal": "bottom-right"}, {"sinks": True}])
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_but_empty_sequences(name, kind, options, extra, lengths):
    dtype = as_dtype(name)
    if "sinks" in options:
        options = {"sinks": np.zeros(4), "dropout_p": 0.5, "rng": 1}
    cu = offsets(lengths, kind)
    q, k, v = np.ones((extra, 4, 5), dtype), np.ones((extra, 2, 5), dtype), np.ones((extra, 2, 6), dtype)
    call = Packed(q, k, v, cu, None, options)
    out, lse = forward(call)
    assert out.shape == (extra, 4, 6) and out.dtype == dtype and not out.any()
    assert lse.shape == (4, extra) and lse.dtype == arithmetic(dtype) and np.isneginf(lse).all()
    found = gradients(call)
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape, (4,)][: len(found)]
    assert not any(x.any() for x in found)


@pytest.mark.parametrize("none", ["H", "D", "E", "keys", "queries"])
def test_sizes_of_zero(none):
    n = {"H": 4, "D": 3, "E": 5, "keys": 1, "queries": 1} | {none: 0}
    queries, keys = [2 * n["queries"], 3 * n["queries"]], [4 * n["keys"], n["keys"]]
    q = np.ones((sum(queries), n["H"], n["D"]))
    k, v = (np.ones((sum(keys), n["H"] // 2, n[width])) for width in "DE")
    options = {"scale": 1.0, "sinks": np.zeros(n["H"]), "causal": "bottom-right"}
    call = Packed(q, k, v, offsets(queries), offsets(keys), options)
    out, lse = forward(call)
    assert out.shape == (sum(queries), n["H"], n["E"])
    assert lse.shape == (n["H"], sum(queries))
    found = gradients(call)
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape, (n["H"],)]
    if none == "D":
        assert out.any()
    else:
        assert not out.any() and not any(x.any() for x in found)
    if none == "keys":
        assert np.isneginf(lse).all()


def test_keys_of_their_own_lengths():
    """Cross attention: T' is not T, and alignment is per sequence."""
    q, k, v = np.zeros((3, 1, 1)), np.zeros((8, 1, 1)), np.arange(8.0).reshape(8, 1, 1)
    arguments = q, k, v, [0, 2, 3], [0, 5, 8]
    assert attention_varlen(*arguments).ravel().tolist() == [2, 2, 6]
    assert attention_varlen(*arguments, causal=True).ravel().tolist() == [0, 0.5, 5]
    bottom = {"causal": "bottom-right"}
    assert attention_varlen(*arguments, **bottom).ravel().tolist() == [1.5, 2, 6]
    assert attention_varlen(*arguments, **bottom, window=(1, 0)).ravel().tolist() == [2.5, 3.5, 6.5]


# --- out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "arrangement",
    ["contiguous", "transposed", "Fortran", "fused", "every other", "every other row", "reversed"],
)
def test_out_of_any_strides(name, arrangement):
    q, k, v = (random(30, 3, 5, dtype=as_dtype(name), seed=n) for n in range(3))
    cu = offsets([4, 0, 20])
    expected = attention_varlen(q, k, v, cu)
    assert not expected[24:].any()
    out = arrange(np.ones_like(expected), arrangement)
    base = out if out.base is None else out.base
    assert attention_varlen(q, k, v, cu, out=out) is out
    assert_same_bits(out, expected)
    # and nothing beside it was written to
    assert (~np.isfinite(base.astype(np.float64))).sum() == base.size - out.size
    out[...] = 7
    found, _ = attention_varlen(q, k, v, cu, out=out, return_lse=True)
    assert found is out
    assert_same_bits(out, expected)


def test_wrong_out():
    q, k, v = (random(9, 2, 4, seed=n) for n in range(3))
    cu = offsets([4, 5])
    read_only = np.zeros((9, 2, 4))
    read_only.flags.writeable = False
    for out, kind in (
        (np.zeros((2, 9, 4)), ValueError),
        (np.zeros((9, 2, 5)), ValueError),
        (np.zeros((9, 2, 4), np.float32), TypeError),
        (np.zeros((9, 2, 4)).tolist(), TypeError),
        (read_only, ValueError),
        (q, ValueError),
        (k[::-1], ValueError),
    ):
        with pytest.raises(kind, match=r"^out: expected"):
            attention_varlen(q, k, v, cu, out=out)


# --- offsets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int32, np.int64, ">i4", "<i8", ">i8", list])
def test_offsets_of_either_size(kind):
    q, k, v = (random(9, 2, 4, seed=n) for n in range(3))
    cu = [0, 4, 4, 9] if kind is list else np.array([0, 4, 4, 9], kind)
    expected = attention_varlen(q, k, v, np.array([0, 4, 4, 9]), np.array([0, 4, 4, 9]))
    assert_same_bits(attention_varlen(q, k, v, cu), expected)
    assert_same_bits(attention_varlen(q, k, v, cu, np.array([0, 4, 4, 9], np.int32)), expected)


def test_offsets_that_may_not_be_written_to():
    q, k, v = (random(9, 2, 4, seed=n) for n in range(3))
    cu = offsets([4, 5])
    expected = attention_varlen(q, k, v, cu)
    cu.flags.writeable = False
    assert_same_bits(attention_varlen(q, k, v, cu, cu), expected)
    strided = np.repeat(cu, 2)[::2]
    assert_same_bits(attention_varlen(q, k, v, strided, strided), expected)


WRONG_OFFSETS = [
    (np.array([0.0, 4, 9]), TypeError, "float64"),
    (np.array([0, 4, 9], np.float32), TypeError, "float32"),
    (np.array([0, 4, 9], np.uint32), TypeError, "uint32"),
    (np.array([0, 4, 9], np.uint64), TypeError, "uint64"),
    (np.array([0, 4, 9], np.int16), TypeError, "int16"),
    (np.array([0, 4, 9], np.int8), TypeError, "int8"),
    (np.array([False, True, True]), TypeError, "bool"),
    (np.array([0, 4, 9], complex), TypeError, "complex"),
    (np.array([0, 4, 9], object), TypeError, "object"),
    (np.ma.array([0, 4, 9]), TypeError, "masked"),
    ("offsets", TypeError, ""),
    ([], TypeError, ""),
    (np.array([], int), ValueError, "(0,)"),
    (np.array([[0, 4, 9]]), ValueError, "(1, 3)"),
    (np.array(0), ValueError, "()"),
    (np.array([1, 4, 9]), ValueError, "[1, 4, 9]"),
    (np.array([-1, 4, 9]), ValueError, "[-1, 4, 9]"),
    (np.array([0, 5, 4]), ValueError, "[0, 5, 4]"),
    (np.array([0, 5, 4, 9]), ValueError, "[0, 5, 4, 9]"),
    (np.array([0, 4, 10]), ValueError, "[0, 4, 10]"),
    (np.array([0, 10, 9]), ValueError, "[0, 10, 9]"),
    (np.array([0, -4, 9]), ValueError, "[0, -4, 9]"),
    (np.array([0, 2**31 - 1], np.int32), ValueError, "2147483647"),
    (np.array([0, -(2**31), 9], np.int32), ValueError, "-2147483648"),
    (np.array([0, 2**63 - 1]), ValueError, "9223372036854775807"),
    (np.array([0, 2**63 - 1, -(2**63), 9]), ValueError, "9223372036854775807"),
    (np.array([-(2**63), 9]), ValueError, "-9223372036854775808"),
]


@pytest.mark.parametrize("wrong, kind, word", WRONG_OFFSETS, ids=lambda x: repr(x)[:30])
def test_wrong_offsets(wrong, kind, word):
    q, k, v = (random(9, 2, 4, seed=n) for n in range(3))
    good = np.zeros(np.shape(wrong)[0] if np.ndim(wrong) == 1 and np.size(wrong) else 3, int)
    out, lse = np.zeros_like(q), np.zeros((2, 9))
    for name, pair in (("cu_seqlens_q", (wrong, good)), ("cu_seqlens_k", (good, wrong))):
        for call in (
            lambda pair=pair: attention_varlen(q, k, v, *pair),
            lambda pair=pair: attention_varlen_backward(out, q, k, v, out, lse, *pair),
        ):
            with pytest.raises(kind, match=rf"^{name}: expected") as caught:
                call()
            assert word in str(caught.value).partition("got")[2] or not word
    with pytest.raises(kind, match=r"^cu_seqlens_q: expected"):
        attention_varlen(q, k, v, wrong)


def test_offsets_that_do_not_belong_together():
    q, k, v = random(9, 2, 4), random(5, 2, 4), random(5, 2, 4)
    for cu_k in ([0, 5], [0, 1, 2, 5]):
        with pytest.raises(ValueError, match=r"^cu_seqlens_k: expected 3 offsets, got"):
            attention_varlen(q, k, v, [0, 4, 9], cu_k)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: expected .* 5, got \[0, 4, 9\]"):
        attention_varlen(q, k, v, [0, 4, 9], [0, 4, 9])
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: expected .* 5, got \[0, 4, 9\]"):
        attention_varlen(q, k, v, [0, 4, 9])
    assert attention_varlen(q, k, v, [0, 2, 5]).shape == q.shape


class Shifting:
    """Becomes other offsets each time that it is asked."""

    def __init__(self):
        self.calls = 0

    def __array__(self, dtype=None, copy=None):
        self.calls += 1
        return np.array([0, 3 + self.calls, 9])


def test_offsets_are_looked_at_once():
    q, k, v = (random(9, 2, 4, seed=n) for n in range(3))
    expected = attention_varlen(q, k, v, [0, 4, 9])
    assert_same_bits(attention_varlen(q, k, v, Shifting()), expected)
    out, lse = attention_varlen(q, k, v, [0, 4, 9], return_lse=True)
    expected = attention_varlen_backward(out, q, k, v, out, lse, [0, 4, 9])
    assert_same(attention_varlen_backward(out, q, k, v, out, lse, Shifting()), expected)


def test_offsets_may_be_changed_by_another_thread():
    """Section 7: a call takes them as they are at one moment, and checks what it has taken."""
    q, k, v = (random(400, 2, 8, seed=n) for n in range(3))
    states = np.array([[0, 100, 400], [0, 300, 400], [0, 10**9, 400], [0, 2**62, 2**62]])
    expected = [attention_varlen(q, k, v, x, x, causal=True, return_lse=True) for x in states[:2]]
    assert not np.array_equal(expected[0][0], expected[1][0])
    gradient = [attention_varlen_backward(q, q, k, v, *expected[0], x, x, causal=True) for x in states[:2]]
    cu, done = states[0].copy(), threading.Event()

    def change():
        while not done.is_set():
            for x in states:
                cu[:] = x

    thread = threading.Thread(target=change)
    thread.start()
    try:
        taken = refused = 0
        for _ in range(300):
            try:
                found = attention_varlen(q, k, v, cu, causal=True, return_lse=True)
                back = attention_varlen_backward(q, q, k, v, *expected[0], cu, causal=True)
            except ValueError as caught:
                assert str(caught).startswith("cu_seqlens_q: expected")
                refused += 1
                continue
            taken += 1
            assert any(np.array_equal(found[0], x[0]) for x in expected)
            assert any(np.array_equal(back[2], x[2]) for x in gradient)
    finally:
        done.set()
        thread.join()
    assert taken + refused == 300


# --- errors: section 7 ----------------------------------------------------------------------------


def right(**changes):
    """A right call of `attention_varlen_backward`, with some arguments changed."""
    q, k, v = random(9, 4, 5), random(7, 2, 5), random(7, 2, 6)
    given = {"grad_out": random(9, 4, 6), "query": q, "key": k, "value": v, "out": random(9, 4, 6),
             "lse": random(4, 9), "cu_seqlens_q": [0, 9], "cu_seqlens_k": [0, 7]}  # fmt: skip
    return given | changes


WRONG = [
    ({"query": random(1, 9, 4, 5)}, ValueError, "query", "4 (shape"),
    ({"query": random(9, 5)}, ValueError, "query", "3"),
    ({"query": random(9, 4, 6)}, ValueError, "key", "6"),
    ({"query": random(9, 3, 5)}, ValueError, "key", "3"),
    ({"query": random(9, 4, 5, dtype=np.float32)}, TypeError, "query, key, value", "float32"),
    ({"query": np.ones((9, 4, 5), int)}, TypeError, "query", "int"),
    ({"key": random(7, 5)}, ValueError, "key", "3"),
    ({"key": random(7, 0, 5)}, ValueError, "key", ""),
    ({"value": random(7, 1, 6)}, ValueError, "value", "2"),
    ({"value": random(8, 2, 6)}, ValueError, "value", "7"),
    ({"value": None}, TypeError, "value", ""),
    ({"causal": "left"}, ValueError, "causal", "left"),
    ({"window": (0, -2)}, ValueError, "window", "-2"),
    ({"scale": math.inf}, ValueError, "scale", "inf"),
    ({"softcap": -1}, ValueError, "softcap", "-1"),
    ({"alibi_slopes": [1.0]}, ValueError, "alibi_slopes", "(4,)"),
    ({"sinks": np.ones(2)}, ValueError, "sinks", "(4,)"),
    ({"dropout_p": 2, "rng": 1}, ValueError, "dropout_p", "2"),
]
WRONG_BACK = [
    ({"grad_out": random(9, 4, 5)}, ValueError, "grad_out", "(9, 4, 6)"),
    ({"grad_out": random(4, 9, 6)}, ValueError, "grad_out", "(9, 4, 6)"),
    ({"grad_out": random(9, 4, 6, dtype=np.float32)}, TypeError, "grad_out", "float64"),
    ({"out": random(1, 9, 4, 6)}, ValueError, "out", "(9, 4, 6)"),
    ({"out": random(9, 4, 6, dtype=np.float16)}, TypeError, "out", "float64"),
    ({"lse": random(9, 4)}, ValueError, "lse", "(4, 9)"),
    ({"lse": random(4, 9, dtype=np.float32)}, TypeError, "lse", "float64"),
    ({"grad_sinks": True}, ValueError, "grad_sinks", "sinks"),
    ({"dropout_p": 0.5}, ValueError, "rng", "seed"),
    ({"dropout_p": 0.5, "rng": 2**64}, ValueError, "rng", ""),
]


def refused(call, kind, name, word, given):
    with pytest.raises(kind) as caught:
        call(**given)
    subject, colon, rest = str(caught.value).partition(":")
    assert colon and subject.startswith(name) and "expected" in rest
    assert word in rest


@pytest.mark.parametrize("changes, kind, name, word", WRONG, ids=lambda x: "")
def test_errors_name_the_argument(changes, kind, name, word):
    given = right(**changes)
    refused(attention_varlen_backward, kind, name, word, given)
    given = {key: x for key, x in given.items() if key not in ("grad_out", "out", "lse")}
    refused(attention_varlen, kind, name, word, given)


@pytest.mark.parametrize("changes, kind, name, word", WRONG_BACK, ids=lambda x: "")
def test_errors_of_the_way_back_name_the_argument(changes, kind, name, word):
    refused(attention_varlen_backward, kind, name, word, right(**changes))


@pytest.mark.parametrize("name", ["mask", "key_lengths", "query_lengths", "layout", "grad_mask"])
def test_options_that_are_not_there(name):
    q = random(9, 2, 4)
    with pytest.raises(TypeError, match=name):
        attention_varlen(q, q, q, [0, 9], **{name: None})
    with pytest.raises(TypeError, match=name):
        attention_varlen_backward(q, q, q, q, q, random(2, 9), [0, 9], **{name: None})
