"""Gradients: against differences, the oracle and PyTorch; where nothing is seen; threads; memory."""

import itertools
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from comparing import arithmetic, assert_same_bits, native, precision
from drawing import (
    FLOATS,
    LENGTHS,
    OPTIONS,
    SAME_NUMBERS,
    SHORT,
    Call,
    arrange,
    as_dtype,
    calls,
    mask_shapes,
    seeded_calls,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import fastmha
from fastmha import _plan, attention, attention_backward, attention_weights, reference

MODERATE = [n for n in LENGTHS if n < 100]
SHORTER = [n for n in LENGTHS if n < 40]


def random(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def by_head(x, layout="BHLD"):
    """`x` as (B, H, L, D)."""
    return x.swapaxes(1, 2) if layout == "BLHD" else x


def wanted(options):
    """What else a backward call with these options can be asked for."""
    mask = options.get("mask")
    return {
        "grad_mask": mask is not None and mask.dtype != bool,
        "grad_sinks": options.get("sinks") is not None,
    }


def leaves(call):
    """What there are gradients of."""
    asked = wanted(call.options)
    return [*call[:3], *(call.options[name] for name in ("mask", "sinks") if asked[f"grad_{name}"])]


def forward(call):
    return attention(*call[:3], return_lse=True, **call.options)


def gradient_like(out, seed=1):
    return random(*out.shape, dtype=out.dtype, seed=seed)


def backward(call, grad, out, lse, **changes):
    options = {**call.options, **changes}
    return attention_backward(grad, *call[:3], out, lse, **wanted(options), **options)


def gradients(call, seed=1, **changes):
    """All gradients of a call, for a gradient of the output drawn by `seed`."""
    call = call._replace(options={**call.options, **changes})
    out, lse = forward(call)
    return backward(call, gradient_like(out, seed), out, lse)


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


def moderated(call):
    """The same without biases that swallow the scores: how well those of a whole row do is a test of
    its own."""
    mask = call.options.get("mask")
    if mask is None or mask.dtype == bool:
        return call
    bounded = np.where(np.isneginf(mask), mask, np.maximum(mask, mask.dtype.type(-30)))
    return call._replace(options={**call.options, "mask": bounded.astype(mask.dtype)})


def few_heads(n, seed=0, **kinds):
    """Calls whose keys are dealt out in chunks."""
    rng = np.random.default_rng(seed)
    for call in seeded_calls(n, seed=seed, many=[True], **kinds):
        S = int(rng.choice([800, 1537, 2305]))
        axis = 1 if call.options.get("layout") == "BLHD" else 2
        k, v = (x.take(range(S), axis, mode="wrap") for x in call[1:3])
        o = dict(call.options)
        if "mask" in o:
            mask = o["mask"]
            per_key = mask.ndim > 0 and mask.shape[-1] > 1
            o["mask"] = mask.take(range(S), -1, mode="wrap") if per_key else mask
        if "key_lengths" in o:
            o["key_lengths"] = np.minimum(o["key_lengths"], S)
        assert _plan.backward_chunk(1, S) < S
        yield moderated(Call(call.query, k, v, o))


# --- the oracle -----------------------------------------------------------------------------------


def sum_to(x, shape):
    """`x`, summed over the axes along which an array of this shape was broadcast."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(axis for axis, n in enumerate(shape) if n == 1), keepdims=True)


def positions(B, L, S, causal=False, key_lengths=None, query_lengths=None):
    """Where the queries stand, (B, L)."""
    i = np.broadcast_to(np.arange(L), (B, L))
    if causal != "bottom-right":
        return i
    held = np.full(B, S) if key_lengths is None else np.asarray(key_lengths).astype(int)
    asked = np.full(B, L) if query_lengths is None else np.asarray(query_lengths).astype(int)
    return i + (held - asked)[:, None]


def kept(call, sizes):
    """The factors of dropout, (B, H, L, S)."""
    o = call.options
    B, H, L, S = sizes
    p = o.get("dropout_p", 0)
    if p in (0, 1):
        return np.full(sizes, 1.0 - p)
    place = positions(B, L, S, o.get("causal"), o.get("key_lengths"), o.get("query_lengths"))
    return reference.dropout_mask(o["rng"], p, np.arange(B), H, place, S) / (1 - p)


def exact(call):
    """The same in float64, native byte order and heads before rows."""
    layout = call.options.get("layout", "BHLD")
    arrays = [by_head(native(x).astype(np.float64), layout) for x in call[:3]]
    options = {name: x for name, x in call.options.items() if name != "layout"}
    for name in ("mask", "sinks"):
        if options.get(name) is not None and np.asarray(options[name]).dtype != bool:
            options[name] = native(options[name]).astype(np.float64)
    return Call(*arrays, options)


def bounds(grad, call, dtype):
    """How far each element of each gradient may be from the exact one: one rounding of all the terms
    that it is the sum of, times the roundings that a score has behind it, and where the output was
    stored in less than it was computed in, the rounding of the output.

    `grad` and the call are exact, the gradients were computed in the arithmetic of `dtype`.
    """
    q, k, v, o = call
    (B, H, L, D), (G, S) = q.shape, k.shape[1:3]
    group = H // G if G else 1
    all_k, all_v = (np.broadcast_to(x, (B, *x.shape[1:])).repeat(group, 1) for x in (k, v))
    unit = precision(arithmetic(dtype))[0]
    options = {name: x for name, x in o.items() if name not in ("dropout_p", "rng")}
    _, lse = reference.attention(q, k, v[..., :0], return_lse=True, **options)
    weights = reference.attention_weights(q, k, **options)
    lse = np.where(np.isneginf(lse), 0, lse)[..., None]
    sinks = -np.inf if o.get("sinks") is None else o["sinks"][:, None, None]
    total = np.logaddexp(lse, sinks)

    scale = abs(D**-0.5 if o.get("scale") is None else o["scale"])
    score = scale * np.abs(q) @ np.abs(all_k).swapaxes(-1, -2)
    if o.get("alibi_slopes") is not None:
        place = positions(B, L, S, o.get("causal"), o.get("key_lengths"), o.get("query_lengths"))
        distance = np.abs(place[:, None, :, None] - np.arange(S))
        score = score + np.asarray(o["alibi_slopes"], float)[:, None, None] * distance
    has_bias = wanted(o)["grad_mask"]
    if has_bias:
        score = score + np.abs(np.where(np.isneginf(o["mask"]), 0, o["mask"]))
    roundings = 4 + score + (weights * score).sum(-1, keepdims=True) + np.abs(total)
    if o.get("softcap"):
        roundings = roundings + 2 * score / o["softcap"]

    dropped = kept(call, (B, H, L, S))
    terms = np.abs(grad) @ np.abs(all_v).swapaxes(-1, -2) * dropped
    delta = (weights * terms).sum(-1, keepdims=True)
    stored = 0
    if dtype.itemsize == 2:
        eps, least = precision(dtype)
        stored = eps * delta + least * np.abs(grad).sum(-1, keepdims=True)
    ds = weights * (unit * roundings * (terms + delta) + stored)
    dk, dv = ds * scale, unit * roundings * weights * dropped
    dk, dv = (x.swapaxes(-1, -2) @ np.abs(y) for x, y in ((dk, q), (dv, grad)))
    dk, dv = (x.reshape(B, G, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    found = [scale * ds @ np.abs(all_k), sum_to(dk, k.shape), sum_to(dv, v.shape)]
    if has_bias:
        found.append(sum_to(ds, o["mask"].shape))
    if o.get("sinks") is not None:
        most = roundings.max(-1, keepdims=True, initial=0) + np.abs(lse) + np.abs(sinks)
        weight = np.exp(sinks - total) * (weights.sum(-1, keepdims=True) > 0)
        found.append((weight * (unit * most * delta + stored)).sum((0, 2, 3)))
    return found


def assert_gradients(found, grad, call):
    """Each element of each gradient is that of the oracle, up to a few roundings of its terms."""
    layout = call.options.get("layout", "BHLD")
    dtype = native(call.query).dtype
    plain = exact(call)
    grad = by_head(native(grad).astype(np.float64), layout)
    asked = wanted(plain.options)
    out, lse = reference.attention(*plain[:3], return_lse=True, **plain.options)
    expected = reference.attention_backward(grad, *plain[:3], out, lse, **asked, **plain.options)
    kinds = {"dq": dtype, "dk": dtype, "dv": dtype}
    if asked["grad_mask"]:
        kinds["dmask"] = native(call.options["mask"]).dtype
    if asked["grad_sinks"]:
        kinds["dsinks"] = arithmetic(dtype)
    factor = 4 if dtype == np.float64 else 2  # the oracle rounds too
    lost = 1e6 * precision(arithmetic(dtype))[1]  # exponentials that underflow
    for (name, kind), x, y, bound in zip(
        kinds.items(), found, expected, bounds(grad, plain, dtype), strict=True
    ):
        assert type(x) is np.ndarray and x.flags.c_contiguous and x.flags.writeable, name
        assert x.dtype == kind, name
        x = by_head(x, layout) if name in ("dq", "dk", "dv") else x
        assert x.shape == y.shape, name
        eps, least = precision(kind)
        most = factor * (bound + eps * np.abs(y)) + max(least, lost)
        wrong = ~(np.abs(x.astype(np.float64) - y) <= most)
        assert not wrong.any(), (
            f"{name}: {wrong.sum()} of {wrong.size}, first at {np.argwhere(wrong)[0]}: "
            f"{x[wrong][0]}, expected {y[wrong][0]} to within {most[wrong][0]:.2g}"
        )


def assert_differentiates(call, seed=1, arrangement="contiguous"):
    out, lse = forward(call)
    grad = arrange(gradient_like(out, seed), arrangement)
    assert_gradients(backward(call, grad, out, lse), grad, call)


@given(calls(lengths=MODERATE, zeros=True), st.sampled_from(SAME_NUMBERS))
@settings(max_examples=60)
def test_random_combinations_of_options_equal_the_reference(call, arrangement):
    assert_differentiates(moderated(call), arrangement=arrangement)


@pytest.mark.parametrize("pair", [*itertools.combinations(OPTIONS, 2)], ids="-".join)
def test_every_pair_of_options_equals_the_reference(pair):
    for n, name in enumerate(FLOATS):
        kinds = {"lengths": SHORT, "dtypes": [name], "options": pair}
        for call in seeded_calls(2, seed=n, **kinds):
            assert_differentiates(moderated(call))


@pytest.mark.slow
@given(calls(zeros=True, many=[False] * 19 + [True]), st.sampled_from([1, 2, 3, 8]))
@settings(max_examples=1000)
def test_any_combination_of_options_equals_the_reference(call, n):
    with fastmha.num_threads(n):
        assert_differentiates(moderated(call))


@pytest.mark.parametrize("seed", range(3))
def test_few_heads_and_many_keys_equal_the_reference(seed):
    for n, call in enumerate(few_heads(5, seed)):
        with fastmha.num_threads(1 + n % 3):
            assert_differentiates(call)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("D, E", [(1, 1024), (1024, 1), (255, 257), (576, 512)])
def test_widths_equal_the_reference(name, D, E):
    shapes = (1, 2, 5, D), (1, 2, 9, D), (1, 2, 9, E)
    q, k, v = (random(*shape, dtype=as_dtype(name), seed=n) for n, shape in enumerate(shapes))
    assert_differentiates(Call(q, k, v, {"causal": "bottom-right"}))


# --- differences ----------------------------------------------------------------------------------

# What each option is tried with, beside queries (2, 4, 3, 3), keys (2, 2, 4, 3), values (2, 2, 4, 2).
TRIED = {
    "bool mask": {"mask": random(2, 1, 3, 4, seed=3) > -0.5},
    "float mask": {"mask": np.where(random(4, 3, 4) > 1, -np.inf, random(4, 3, 4, seed=2))},
    "padding mask": {"mask": random(2, 1, 1, 4, seed=5)},
    "causal": {"causal": True},
    "bottom-right": {"causal": "bottom-right"},
    "window": {"window": (1, 1)},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 0.8},
    "alibi_slopes": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0.0])},
    "sinks": {"sinks": random(4, seed=4)},
    "key_lengths": {"key_lengths": [4, 2]},
    "query_lengths": {"query_lengths": [2, 3]},
    "dropout": {"dropout_p": 0.4, "rng": 5},
    "layout": {"layout": "BLHD"},
}
COMBINED = [(), *((name,) for name in TRIED)]
COMBINED += [pair for pair in itertools.combinations(TRIED, 2) if not TRIED[pair[0]].keys() & TRIED[pair[1]]]


def differences(f, x, step=1e-6):
    """Central differences of a scalar function; x is changed in place, and back."""
    grad = np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        kept = x[i]
        if np.isfinite(kept):
            x[i] = kept + step
            above = f()
            x[i] = kept - step
            grad[i] = (above - f()) / (2 * step)
            x[i] = kept
    return grad


@pytest.mark.parametrize("names", COMBINED, ids=lambda names: "-".join(names) or "none")
def test_gradients_equal_differences(names):
    options = {name: x for each in names for name, x in TRIED[each].items()}
    layout = options.get("layout", "BHLD")
    shapes = (2, 4, 3, 3), (2, 2, 4, 3), (2, 2, 4, 2)
    arrays = [np.ascontiguousarray(by_head(random(*shape, seed=n), layout)) for n, shape in enumerate(shapes)]
    for name in ("mask", "sinks"):
        if name in options:
            options[name] = options[name].copy()
    call = Call(*arrays, options)
    out, lse = forward(call)
    weight = gradient_like(out)
    found = backward(call, weight, out, lse)
    for x, grad in zip(leaves(call), found, strict=True):
        numeric = differences(lambda: (attention(*arrays, **options) * weight).sum(), x)
        assert grad.shape == x.shape
        assert np.abs(grad - numeric).max() <= 1e-7 * max(np.abs(numeric).max(), 0.01)


@given(calls(dtypes=["float64"], lengths=MODERATE))
def test_the_slope_in_a_random_direction(call):
    """Of all arguments at once, at sizes where single differences would take long."""
    call = moderated(call)
    options = dict(call.options)
    varied = [native(x).astype(np.float64) for x in leaves(call)]
    rng = np.random.default_rng(0)
    direction = [rng.standard_normal(x.shape) for x in varied]

    def moved(step):
        q, k, v, *others = (x + step * y for x, y in zip(varied, direction, strict=True))
        for name in ("mask", "sinks"):
            if wanted(options)[f"grad_{name}"]:
                options[name] = others.pop(0)
        return Call(q, k, v, options)

    out, lse = forward(moved(0))
    weight = gradient_like(out)
    found = backward(moved(0), weight, out, lse)
    step = 1e-6
    above, below = ((attention(*moved(s)[:3], **options) * weight).sum() for s in (step, -step))
    slope = sum((x * y).sum() for x, y in zip(found, direction, strict=True))
    size = sum(np.abs(x * y).sum() for x, y in zip(found, direction, strict=True))
    assert abs((above - below) / (2 * step) - slope) <= 1e-7 * max(size, 0.1)


# --- PyTorch --------------------------------------------------------------------------------------


def torch_attention(torch, call, tensors):
    """The formulas of every option, for PyTorch to differentiate with respect to the `tensors`: the
    call's leaves, in float64."""
    q, k, v, *others = tensors
    o = call.options
    layout = o.get("layout", "BHLD")
    q, k, v = (by_head(x, layout) for x in (q, k, v))
    (B, H, L, D), (G, S) = q.shape, k.shape[1:3]
    k, v = (x.expand(B, -1, -1, -1).repeat_interleave(H // G, 1) for x in (k, v))
    scores = q @ k.mT * float(D**-0.5 if o.get("scale") is None else o["scale"])
    if o.get("softcap"):
        scores = o["softcap"] * torch.tanh(scores / o["softcap"])
    i, j = torch.arange(L)[:, None], torch.arange(S)
    held, asked = (
        torch.from_numpy(np.asarray(o.get(name, [n] * B)).astype(np.int64))[:, None, None, None]
        for name, n in (("key_lengths", S), ("query_lengths", L))
    )
    p = i + (held - asked if o.get("causal") == "bottom-right" else 0)
    if "alibi_slopes" in o:
        scores = scores - torch.from_numpy(o["alibi_slopes"].astype(float))[:, None, None] * (p - j).abs()
    seen = (j < held) & (i < asked)
    if "mask" in o:
        if o["mask"].dtype == bool:
            seen = seen & torch.from_numpy(o["mask"].copy())
        else:
            bias = others.pop(0)
            seen = seen & (bias != -math.inf)
            scores = scores + torch.where(bias == -math.inf, 0.0, bias)
    if o.get("causal"):
        seen = seen & (j <= p)
    left, right = o.get("window", (-1, -1))
    seen = seen & ((left < 0) | (j >= p - left)) & ((right < 0) | (j <= p + right))
    scores = torch.where(seen, scores, -1e300)
    if "sinks" in o:
        sink = others.pop(0)[:, None, None].expand(B, H, L, 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.where(seen, scores.softmax(-1)[..., :S], 0.0)
    weights = weights * torch.from_numpy(kept(call, (B, H, L, S)))
    return by_head(weights @ v, layout)


def assert_equals_autograd(torch, call, tolerance):
    tensors = [torch.from_numpy(x.astype(np.float64)).requires_grad_() for x in leaves(call)]
    expected_out = torch_attention(torch, call, tensors)
    out, lse = forward(call)
    grad = gradient_like(out)
    expected_out.backward(torch.from_numpy(grad.astype(np.float64)))
    found = backward(call, grad, out, lse)
    expected = [np.zeros(x.shape) if x.grad is None else x.grad.numpy() for x in tensors]
    largest = max(np.abs(x).max() for x in expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        rounded = precision(x.dtype)[0]
        assert np.abs(x.astype(np.float64) - y).max() <= max(tolerance, rounded) * largest


@given(calls(dtypes=["float64"], lengths=SHORTER, arranged=False))
def test_every_option_equals_autograd(torch, call):
    assert_equals_autograd(torch, moderated(call), 1e-10)


@given(calls(dtypes=["float32"], lengths=SHORTER, arranged=False))
def test_every_option_equals_autograd_in_float32(torch, call):
    options = {name: x for name, x in call.options.items() if name != "scale"}
    assert_equals_autograd(torch, moderated(call._replace(options=options)), 1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-10), (np.float32, 1e-5)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": random(2, 1, 33, 33)}], ids="-".join)
def test_equals_autograd_of_pytorchs_own_function(torch, dtype, tolerance, options):
    shapes = (2, 3, 33, 16), (2, 3, 33, 16), (2, 3, 33, 16)
    call = Call(*(random(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)), options)
    out, lse = forward(call)
    grad = gradient_like(out)
    found = attention_backward(grad, *call[:3], out, lse, **options)
    tensors = [torch.from_numpy(x).requires_grad_() for x in call[:3]]
    mask = torch.from_numpy(options["mask"].astype(dtype)) if "mask" in options else None
    torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=mask, is_causal="causal" in options
    ).backward(torch.from_numpy(grad))
    for x, y in zip(found, tensors, strict=True):
        assert np.abs(x - y.grad.numpy()).max() <= tolerance * np.abs(y.grad.numpy()).max()


# --- what is not seen: rules 3.6, 3.7 and 3.10 ----------------------------------------------------


def visible(call):
    """Which keys each row sees, (B, H, L, S): from the oracle's weights of equal scores."""
    plain = exact(call)
    names = ("mask", "causal", "window", "key_lengths", "query_lengths")
    options = {name: plain.options[name] for name in names if name in plain.options}
    if "mask" in options and options["mask"].dtype != bool:
        options["mask"] = options["mask"] != -np.inf
    q, k = (np.zeros((*x.shape[:3], 1)) for x in plain[:2])
    return reference.attention_weights(q, k, **options, scale=1.0) > 0


def seen_keys(seen, key):
    """Which rows of `key`, heads first, some row sees."""
    B, H, _, S = seen.shape
    G = key.shape[1]
    keys = seen.any(2).reshape(B, G, H // G if G else 1, S).any(2)
    return keys.any(0, keepdims=True) if len(key) == 1 else keys


def filled(x, layout, places, junk):
    """A copy of `x` that holds `junk` in some of its rows."""
    x = native(x).copy()
    by_head(x, layout)[places] = junk
    return x


@given(
    calls(lengths=MODERATE, zeros=True),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.booleans(),
)
@settings(max_examples=60)
def test_what_is_hidden_has_no_gradient_and_holds_anything(call, junk, hide):
    """Rows that see nothing and keys that nobody sees are poisoned."""
    call = moderated(call)
    layout = call.options.get("layout", "BHLD")
    if hide:  # some more rows
        B, L = len(call.query), by_head(call.query, layout).shape[2]
        lengths = np.random.default_rng(0).integers(0, L + 1, B)
        call = call._replace(options={**call.options, "query_lengths": lengths})
    seen = visible(call)
    rows = ~seen.any(-1)
    keys = ~seen_keys(seen, by_head(call.key, layout))

    def holding(junk):
        places = (rows, keys, keys)
        arrays = [filled(x, layout, place, junk) for x, place in zip(call[:3], places, strict=True)]
        return Call(*arrays, call.options)

    out, lse = forward(holding(junk))
    grad = gradient_like(out)
    found = backward(holding(junk), filled(grad, layout, rows, junk), out, lse)
    assert_gradients(found, filled(grad, layout, rows, 0), holding(0))
    for x, places in zip(found[:3], (rows, keys, keys), strict=True):
        assert not by_head(x, layout)[places].any()
    if wanted(call.options)["grad_mask"]:
        dmask = np.broadcast_to(found[3], seen.shape)
        nobody = np.broadcast_to(sum_to(seen.astype(int), found[3].shape) == 0, seen.shape)
        assert not dmask[nobody].any()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kind", ["bool", "float", "lengths", "window"])
@pytest.mark.parametrize("H, L", [(2, 3), (4, 3), (4, 1)])
def test_A1_rows_that_see_nothing_have_zero_gradients(name, kind, H, L):
    """Also in decoding and with grouped heads."""
    dtype = as_dtype(name)
    q, k, v = (random(1, n, m, 4, dtype=dtype, seed=n + m) for n, m in ((H, L), (2, 3), (2, 3)))
    row = L // 2
    if kind == "lengths":
        options, rows = {"query_lengths": [row]}, np.arange(row, L)
    elif kind == "window":  # past the last key
        q = np.concatenate([q, random(1, H, 9, 4, dtype=dtype, seed=9)], 2)
        options, rows = {"window": (1, 1)}, np.arange(4, q.shape[2])
    else:
        mask = np.ones((L, 3), bool)
        mask[row] = False
        options = {"mask": mask if kind == "bool" else np.where(mask, 0, -np.inf).astype(np.float32)}
        rows = np.array([row])
    q[:, :, rows] = np.nan
    call = Call(q, k, v, options)
    out, lse = forward(call)
    assert not out[:, :, rows].any() and np.isneginf(lse[:, :, rows]).all()
    grad = gradient_like(out)
    grad[:, :, rows] = np.nan
    found = backward(call, grad, out, lse)
    assert all(np.isfinite(x.astype(np.float64)).all() for x in found)
    assert not found[0][:, :, rows].any()
    q[:, :, rows] = grad[:, :, rows] = 0
    assert_gradients(found, grad, Call(q, k, v, options))
    if L == len(rows):
        assert not any(x.any() for x in found)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("where", ["query", "grad_out"])
@pytest.mark.parametrize("S", [40, 2000])
@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.5, "rng": 3}], ids=["all", "dropped"])
def test_a_row_of_nan_touches_the_keys_that_it_sees(name, where, S, dropout):
    """And those that dropout takes from it: 0 * NaN is NaN."""
    dtype = as_dtype(name)
    q, k, v = (random(1, 2, n, 5, dtype=dtype, seed=n) for n in (40, S, S))
    q[:, 1] = 0  # another head
    mask = np.tri(40, S, dtype=bool)
    mask[:, 39:] = True
    mask[7, 20:] = False
    call = Call(q, k, v, {"mask": mask} | dropout)
    out, lse = forward(call)
    grad = gradient_like(out)
    without = mask.copy()
    without[7] = False
    others = Call(q, k, v, {"mask": without} | dropout)
    expected = backward(others, grad, *forward(others))
    (q if where == "query" else grad)[:, 0, 7] = np.nan
    out, lse = forward(call)
    found = [x.astype(np.float64) for x in backward(call, grad, out, lse)]
    dq, dk, dv = (np.isnan(x) for x in found)
    assert dq[0, 0, 7].all() and dq.sum() == 5
    assert dk[0, 0, :8].all() and dk.sum() == 8 * 5
    assert dv[0, 0, :8].all() and dv.sum() == 8 * 5
    for x, y, hurt in zip(found, expected, (dq, dk, dv), strict=True):
        y = y.astype(np.float64)
        y[0, 1] = x[0, 1]  # the other head keeps its row 7
        assert np.abs(x - y)[~hurt].max() <= 8 * precision(dtype)[0] * np.abs(y).max()


@given(
    calls(lengths=MODERATE, options=("mask", "causal", "window", "layout"), dtypes=["float64", "float32"]),
    st.data(),
)
def test_what_is_not_finite_goes_where_the_formulas_take_it(call, data):
    """One row, or one number, is poisoned: NaN comes out where the oracle says, and nowhere else."""
    call = moderated(call)
    arrays = [native(x).copy() for x in call[:3]]
    out, _ = forward(call)
    grad = gradient_like(out)
    x = data.draw(st.sampled_from([*arrays, grad]))
    places = [data.draw(st.integers(0, n - 1)) for n in by_head(x, "BLHD").shape]
    whole = data.draw(st.booleans())
    by_head(x, "BLHD")[tuple(places[:3] if whole else places)] = math.nan
    call = Call(*arrays, call.options)
    out, lse = forward(call)
    found = backward(call, grad, out, lse)
    expected = reference.attention_backward(
        grad, *arrays, out, lse, **wanted(call.options), **call.options
    )
    for x, y in zip(found, expected, strict=True):
        tolerance = max(1e-11 if grad.dtype == np.float64 else 1e-4, precision(y.dtype)[0])
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert np.array_equal(np.isnan(x), np.isnan(y))
        x, y = x[~np.isnan(x)], y[~np.isnan(y)]
        assert np.abs(x - y).max(initial=0) <= tolerance * np.abs(y).max(initial=1)


# --- scores of any finite size: rule 3.8 ----------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("bias", [-100, -1e4, -1e9, 1e9, -1e18, "least"])
def test_a_row_whose_every_key_has_the_same_bias(name, bias):
    """It cancels out, however large: in the sum with it, the scores are lost, or nothing is."""
    dtype = as_dtype(name)
    kind = arithmetic(dtype).type
    bias = float(np.finfo(kind).min) if bias == "least" else bias
    tolerance = 1e-9 if kind == np.float64 else max(1e-4, 2 * precision(dtype)[0])
    q, k, v = (random(1, 2, n, 4, dtype=dtype, seed=n) for n in (5, 6, 6))
    q, k = np.round(q).astype(dtype), np.round(k).astype(dtype)  # scores are whole numbers
    mask = np.zeros((5, 6), kind)
    mask[2] = bias
    options = {"mask": mask, "scale": 1.0}
    scores = q.astype(kind) @ k.astype(kind).swapaxes(-1, -2)
    with np.errstate(over="ignore"):
        sums = np.maximum(scores + mask, np.finfo(kind).min)
    equal = (sums - sums.max(-1, keepdims=True)).astype(kind)  # the same softmax, with nothing lost
    call = Call(q, k, v, options)
    out, lse = forward(call)
    grad = gradient_like(out)
    dq, dk, dv, dmask = backward(call, grad, out, lse)
    q0, grad0 = np.zeros_like(q), grad
    plain = Call(q0, k, v, {"mask": equal, "scale": 1.0})
    plain_out, plain_lse = forward(plain)
    *_, dv0, ds = backward(plain, grad0, plain_out, plain_lse)
    ds = ds.astype(np.float64)
    expected = [ds @ k.astype(np.float64), ds.swapaxes(-1, -2) @ q.astype(np.float64), dv0, ds.sum((0, 1))]
    for x, y in zip((dq, dk, dv, dmask), expected, strict=True):
        y = y.astype(np.float64)
        assert np.abs(x.astype(np.float64) - y).max() <= tolerance * np.abs(y).max()


@pytest.mark.parametrize("name", ["float64", "float32"])
@pytest.mark.parametrize("score", [-100, 500, 1e3, 1e6, 1e8, 1e18, -1e18])
def test_equal_scores_are_a_mean_however_large(name, score):
    dtype = as_dtype(name)
    tolerance = 1e-9 if dtype == np.float64 else 1e-4
    q, k, v = np.full((1, 1, 2, 1), score), np.ones((1, 1, 5, 1)), random(1, 1, 5, 3)
    call = Call(*(x.astype(dtype) for x in (q, k, v)), {"scale": 1.0})
    out, lse = forward(call)
    grad = gradient_like(out)
    dv = backward(call, grad, out, lse)[2]
    expected = np.broadcast_to(grad.sum(2, keepdims=True) / 5, v.shape)
    assert np.abs(dv - expected).max() <= tolerance * np.abs(expected).max()


# --- sizes of zero: rule 3.15, case A23 -----------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("none", ["B", "H", "L", "S", "D", "E"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom-right"},
        {"window": (1, 1), "softcap": 1.0},
        {"dropout_p": 0.5, "rng": 1},
        {"mask": bool},
        {"mask": np.float32},
        {"lengths": True},
        {"sinks": True},
        {"layout": "BLHD"},
        {"one": True},
    ],
    ids=str,
)
def test_A23_sizes_of_zero(name, none, options):
    n = {"B": 2, "H": 4, "L": 3, "S": 5, "D": 2, "E": 3} | {none: 0}
    B, H, L, S, D, E = n.values()
    dtype, options = as_dtype(name), {**options, "scale": 1.0}
    kv_batch = 1 if options.pop("one", False) else B
    shapes = (B, H, L, D), (kv_batch, H // 2, S, D), (kv_batch, H // 2, S, E)
    if "mask" in options:
        options["mask"] = np.ones((B, 1, L, S), options["mask"])
    if options.pop("lengths", False):
        options |= {"key_lengths": np.full(B, min(S, 3)), "query_lengths": np.full(B, L)}
    if options.pop("sinks", False):
        options |= {"sinks": np.zeros(H), "alibi_slopes": np.zeros(H)}
    call = Call(*(by_head(np.ones(shape, dtype), options.get("layout")) for shape in shapes), options)
    out, lse = forward(call)
    found = backward(call, np.ones_like(out), out, lse)
    for x, y in zip(found, leaves(call), strict=True):
        assert x.shape == y.shape
        assert x.dtype == (arithmetic(dtype) if y is options.get("sinks") else y.dtype)
    if none != "D":
        assert not any(x.any() for x in found)
    elif "dropout_p" not in options:
        assert np.abs(found[2].astype(np.float64)).sum() > 0


# --- keys and values for many: rule 3.9, case A15 -------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("batches", [(1, 1), (1, 3), (3, 1)])
def test_a_batch_that_serves_all_members_gets_the_sum(name, layout, batches):
    dtype = as_dtype(name)
    shapes = (3, 4, 9, 5), (batches[0], 2, 70, 5), (batches[1], 2, 70, 7)
    arrays = [by_head(random(*shape, dtype=dtype, seed=n), layout) for n, shape in enumerate(shapes)]
    call = Call(*arrays, {"layout": layout, "causal": "bottom-right", "sinks": random(4)})
    assert_differentiates(call)
    if dtype == np.float64:
        found = gradients(call)
        repeated = [np.broadcast_to(x, (3, *x.shape[1:])) for x in call[1:3]]
        each = gradients(call._replace(key=repeated[0], value=repeated[1]))
        assert_same_bits(found[0], each[0])
        for x, y in zip(found[1:3], each[1:3], strict=True):
            y = y if len(x) == 3 else y.sum(0, keepdims=True)
            assert np.abs(x - y).max() <= 1e-13 * np.abs(y).max()


@pytest.mark.parametrize("H, G", [(4, 2), (6, 1), (8, 1), (6, 3)])
def test_A15_heads_that_share_keys_get_the_sum(H, G):
    """Consecutive heads, as on the way there."""
    q, k, v = (random(2, n, m, 6, seed=n + m) for n, m in ((H, 9), (G, 40), (G, 40)))
    dq, dk, dv = gradients(Call(q, k, v, {"causal": True}))
    repeated = (x.repeat(H // G, 1) for x in (k, v))
    dq2, dk2, dv2 = gradients(Call(q, *repeated, {"causal": True}))
    assert_same_bits(dq, dq2)
    for x, y in ((dk, dk2), (dv, dv2)):
        y = y.reshape(2, G, H // G, 40, 6).sum(2)
        assert np.abs(x - y).max() <= 1e-13 * np.abs(y).max()


def test_A15_which_heads_share():
    """Zero scores: each value's gradient is the sum of those of the heads that see it."""
    q, k, v = np.zeros((1, 4, 1, 2)), np.zeros((1, 2, 1, 2)), np.zeros((1, 2, 1, 1))
    call = Call(q, k, v, {})
    out, lse = forward(call)
    grad = np.array([1.0, 10, 100, 1000]).reshape(1, 4, 1, 1)
    assert backward(call, grad, out, lse)[2].ravel().tolist() == [11, 1100]


# --- masks and sinks ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("n", range(16))
def test_masks_of_every_shape_have_gradients(kind, n):
    """In their own shape and dtype, whatever that of the query."""
    sizes = (2, 6, 9, 40)
    B, H, L, S = sizes
    shape = mask_shapes(*sizes)[n]
    for m, name in enumerate(FLOATS):
        mask = np.asarray(random(*shape, seed=m))
        mask = np.where(np.abs(mask) > 1.5, -np.inf, mask).astype(as_dtype(kind))
        arrays = (random(B, h, i, 5, dtype=as_dtype(name), seed=i) for h, i in ((H, L), (2, S), (2, S)))
        call = Call(*arrays, {"mask": mask, "softcap": 2.0, "window": (30, 30)})
        dmask = gradients(call)[3]
        assert dmask.shape == shape and dmask.dtype == mask.dtype
        assert_differentiates(call)


def test_the_shapes_of_masks_are_all_there():
    assert len(mask_shapes(2, 6, 9, 40)) == 16


@given(calls(options=("mask", "layout"), lengths=SHORT), st.sampled_from(SAME_NUMBERS))
def test_masks_of_any_strides_have_gradients(call, arrangement):
    call = moderated(call)
    if not wanted(call.options)["grad_mask"]:
        return
    mask = native(call.options["mask"])
    plain = gradients(call, mask=mask.copy())
    found = gradients(call, mask=arrange(mask, arrangement))
    assert_same(found, plain)


def test_only_what_is_asked_for_is_returned():
    q, k, v = random(1, 2, 3, 4), random(1, 2, 5, 4), random(1, 2, 5, 6)
    options = {"mask": random(3, 5), "sinks": random(2)}
    out, lse = attention(q, k, v, return_lse=True, **options)
    every = attention_backward(out, q, k, v, out, lse, grad_mask=True, grad_sinks=True, **options)
    assert [x.shape for x in every] == [q.shape, k.shape, v.shape, (3, 5), (2,)]
    for asked, places in (
        ({}, [0, 1, 2]),
        ({"grad_mask": True}, [0, 1, 2, 3]),
        ({"grad_sinks": True}, [0, 1, 2, 4]),
    ):
        found = attention_backward(out, q, k, v, out, lse, **asked, **options)
        assert type(found) is tuple
        assert_same(found, [every[i] for i in places])


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("sink", [-np.inf, -1e4, -200.0, 0.0, 50.0, 1e4])
def test_sinks_of_any_size(name, sink):
    dtype = as_dtype(name)
    q, k, v = (random(2, 3, n, 8, dtype=dtype, seed=n) for n in (9, 20, 20))
    plain = Call(q, k, v, {})
    found = gradients(plain, sinks=np.full(3, sink))
    assert found[3].dtype == arithmetic(dtype)
    if sink <= -200:  # the sink takes nothing, or next to nothing
        assert float(np.abs(found[3]).max()) < 1e-80
        assert_same(found[:3], gradients(plain))
    elif sink == 1e4:  # or all
        assert not any(x.any() for x in found)
    else:
        assert_differentiates(plain._replace(options={"sinks": np.full(3, sink)}))


# --- parts and weights: cases A26 and A28 ---------------------------------------------------------


@pytest.mark.parametrize("name", ["float64", "float32"])
@pytest.mark.parametrize("parts", range(1, 6))
def test_A26_gradients_of_parts_of_the_keys_add_up(name, parts):
    """With the output and the LSE of the whole, keys and values that are held apart have the
    gradients of the whole; parts that nobody sees have none."""
    q, k, v = (random(1, 2, n, 8, dtype=as_dtype(name), seed=n) for n in (30, 101, 103))
    v = v[:, :, :101]
    mask = np.arange(101) >= 101 // parts  # hides the first part whole, if there are more
    mask = mask if parts > 1 else np.ones(101, bool)
    call = Call(q, k, v, {"mask": mask})
    cuts = [101 * n // parts for n in range(parts + 1)]
    pieces = [slice(*ends) for ends in itertools.pairwise(cuts)]
    merged = [
        attention(q, k[:, :, piece], v[:, :, piece], mask=mask[piece], return_lse=True) for piece in pieces
    ]
    out, lse = fastmha.merge_attention(*zip(*merged, strict=True))
    grad = gradient_like(out)
    whole = backward(call, grad, *forward(call))
    dq = 0
    for piece in pieces:
        part = Call(q, k[:, :, piece], v[:, :, piece], {"mask": mask[piece]})
        found = backward(part, grad, out, lse)
        if not mask[piece].any():
            assert not any(x.any() for x in found)
        dq = dq + found[0]
        for x, y in zip(found[1:], whole[1:], strict=True):
            assert np.abs(x - y[:, :, piece]).max() <= 40 * precision(x.dtype)[0] * np.abs(y).max()
    assert np.abs(dq - whole[0]).max() <= 40 * precision(dq.dtype)[0] * np.abs(whole[0]).max()


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_A28_values_get_the_weights_times_the_gradient(name):
    q, k, v = (random(2, 3, n, 8, dtype=as_dtype(name), seed=n) for n in (9, 40, 41))
    options = {"causal": "bottom-right", "softcap": 3.0, "sinks": random(3), "window": (20, -1)}
    call = Call(q, k, v[:, :, :40], options)
    out, lse = forward(call)
    grad = gradient_like(out)
    weights = attention_weights(q, k, **options)
    expected = weights.swapaxes(-1, -2) @ grad
    dv = backward(call, grad, out, lse)[2]
    assert np.abs(dv - expected).max() <= 8 * precision(dv.dtype)[0] * np.abs(expected).max()


# --- dropout: rule 3.13, case A37 -----------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("causal", [False, "bottom-right"])
def test_A37_the_pattern_is_that_of_the_way_there(name, causal):
    """dV = mask^T dO / (1 - p) where the weights are 1/n, and nothing is scaled by p."""
    dtype, p, seed = as_dtype(name), 0.25, 77
    B, H, L, S = 2, 3, 70, 130
    q, k, v = (np.zeros((B, n, m, 2), dtype) for n, m in ((H, L), (H, S), (H, S)))
    options = {"causal": causal, "dropout_p": p, "rng": seed}
    out, lse = attention(q, k, v, return_lse=True, **options)
    grad = np.ones_like(out)
    dv = attention_backward(grad, q, k, v, out, lse, **options)[2].astype(np.float64)
    place = np.arange(L) + (S - L if causal else 0)
    pattern = reference.dropout_mask(seed, p, np.arange(B), H, place, S)
    seen = np.arange(S) <= place[:, None] if causal else np.ones((L, S), bool)
    weights = np.where(seen, 1 / seen.sum(-1, keepdims=True), 0)
    expected = (pattern * weights / (1 - p)).sum(-2)[..., None]
    tolerance = max(precision(dtype)[0], 1e-6 if dtype != np.float64 else 1e-13)
    assert np.abs(dv - expected).max() <= tolerance * expected.max()
    # and the one that made the output
    ones = attention(q, k, np.ones_like(v), **options).astype(np.float64)
    assert np.abs(ones[..., 0] - (pattern * weights / (1 - p)).sum(-1)).max() <= 2 * tolerance


@pytest.mark.parametrize("name", FLOATS)
def test_A37_everything_dropped(name):
    q, k, v = (random(2, 3, n, 8, dtype=as_dtype(name), seed=n) for n in (9, 40, 40))
    options = {"dropout_p": 1.0, "rng": 3, "mask": random(40), "sinks": random(3)}
    found = gradients(Call(q, k, v, options))
    assert len(found) == 5
    assert not any(x.any() for x in found)


def test_A37_nothing_dropped():
    """p = 0 is no dropout, needs no seed and draws from no generator."""
    call = Call(*(random(2, 3, n, 8, seed=n) for n in (9, 40, 40)), {})
    rng = np.random.default_rng(3)
    before = rng.bit_generator.state
    assert_same(gradients(call, dropout_p=0.0, rng=rng), gradients(call))
    assert_same(gradients(call, dropout_p=0.0, rng=None), gradients(call))
    assert rng.bit_generator.state == before


def test_A37_seeds():
    """The same seed, the same gradients; a generator stands for the seed it gives."""
    call = Call(*(random(2, 3, n, 8, seed=n) for n in (9, 40, 40)), {"dropout_p": 0.3})
    first, again, other = (gradients(call, rng=seed) for seed in (8, 8, 9))
    assert_same(first, again)
    assert not np.array_equal(first[2], other[2])
    seed = int(np.random.default_rng(5).integers(2**64 - 1, dtype=np.uint64, endpoint=True))
    out, lse = attention(*call[:3], return_lse=True, dropout_p=0.3, rng=np.random.default_rng(5))
    drawn = attention_backward(
        gradient_like(out), *call[:3], out, lse, dropout_p=0.3, rng=np.random.default_rng(5)
    )
    assert_same(drawn, gradients(call, rng=seed))


# --- the same bits: section 4 ---------------------------------------------------------------------


def assert_same_bits_for_any_threads(call, counts=(2, 3)):
    with fastmha.num_threads(1):
        out, lse = forward(call)
        grad = gradient_like(out)
        expected = backward(call, grad, out, lse)
    for n in counts:
        with fastmha.num_threads(n):
            assert_same(backward(call, grad, out, lse), expected)


@given(calls(lengths=MODERATE))
def test_the_number_of_threads(call):
    assert_same_bits_for_any_threads(call)


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_the_number_of_threads_where_there_is_work_for_them(name):
    kinds = {"lengths": [193], "widths": [64], "dtypes": [name], "arranged": False}
    for call in seeded_calls(6, seed=5, **kinds):
        assert_same_bits_for_any_threads(call, (2, 3, 5))


@pytest.mark.parametrize("seed", range(4))
def test_the_number_of_threads_where_keys_are_dealt_out(seed):
    for call in few_heads(4, seed):
        assert_same_bits_for_any_threads(call, (2, 3, 8))


@given(calls(lengths=MODERATE, zeros=True))
def test_the_layout(call):
    layout = call.options.get("layout", "BHLD")
    other = "BHLD" if layout == "BLHD" else "BLHD"
    out, lse = forward(call)
    grad = gradient_like(out)
    expected = backward(call, grad, out, lse)
    swapped = Call(*(x.swapaxes(1, 2) for x in call[:3]), call.options)
    found = backward(swapped, grad.swapaxes(1, 2), out.swapaxes(1, 2), lse, layout=other)
    for x, y in zip(found[:3], expected[:3], strict=True):
        assert x.flags.c_contiguous
        assert_same_bits(x.swapaxes(1, 2), y)
    assert_same(found[3:], expected[3:])


@given(calls(lengths=MODERATE, arranged=False), st.data())
def test_strides(call, data):
    out, lse = forward(call)
    grad = gradient_like(out)
    expected = backward(call, grad, out, lse)
    anyhow = st.sampled_from(SAME_NUMBERS)
    arrays = [arrange(x, data.draw(anyhow)) for x in call[:3]]
    results = [arrange(x, data.draw(anyhow)) for x in (grad, out, lse)]
    assert_same(backward(Call(*arrays, call.options), *results), expected)


@pytest.mark.parametrize("arrangement", SAME_NUMBERS)
@pytest.mark.parametrize("name", FLOATS)
def test_each_argument_of_any_strides(name, arrangement):
    arrays = [random(2, 3, n, 9, dtype=as_dtype(name), seed=n) for n in (17, 40, 41)]
    call = Call(arrays[0], arrays[1], arrays[2][:, :, :40].copy(), {"causal": True})
    out, lse = forward(call)
    given = [gradient_like(out), *call[:3], out, lse]
    expected = attention_backward(*given, causal=True)
    for i, x in enumerate(given):
        changed = [*given[:i], arrange(x, arrangement), *given[i + 1 :]]
        assert_same(attention_backward(*changed, causal=True), expected)


def test_keys_that_are_repeated_by_their_strides():
    q, k, v = random(1, 2, 9, 4), random(1, 1, 1, 4), random(1, 1, 1, 3)
    k, v = (np.broadcast_to(x, (1, 2, 33, x.shape[3])) for x in (k, v))
    call = Call(q, k, v, {})
    assert_same(gradients(call), gradients(call._replace(key=k.copy(), value=v.copy())))


def poisoned_empty(shape, *arguments, _empty=np.empty, **options):
    x = _empty(shape, *arguments, **options)
    if x.dtype.kind not in "biuSUOMm":
        x[...] = np.nan
    return x


def test_memory_is_written_before_it_is_read():
    """What the results are put into holds NaN beforehand."""
    chosen = [*few_heads(12, 7), *seeded_calls(60, seed=3, lengths=MODERATE, zeros=True)]
    for call in chosen:
        if call.query.size == 0:
            call.options.pop("sinks", None)
        out, lse = forward(call)
        grad = gradient_like(out)
        expected = backward(call, grad, out, lse)
        with mock.patch.object(np, "empty", poisoned_empty):
            assert np.isnan(np.empty(3)).all()
            found = backward(call, grad, out, lse)
        assert_same(found, expected)


def test_a_call_does_not_feel_the_one_before():
    """Kernels keep their scratch memory."""
    for call in seeded_calls(30, seed=4, lengths=MODERATE, arranged=False):
        expected = gradients(call)
        poisoned = Call(*(np.full_like(x, np.nan) for x in call[:3]), call.options)
        gradients(poisoned)
        assert_same(gradients(call), expected)


def test_inputs_are_left_alone():
    for call in seeded_calls(30, seed=8, lengths=SHORT):
        out, lse = forward(call)
        grad = gradient_like(out)
        given = {**call.arrays, "grad": grad, "out": out, "lse": lse}
        before = {name: x.copy() for name, x in given.items()}
        found = backward(call, grad, out, lse)
        for name, x in given.items():
            assert_same_bits(native(x), native(before[name])) if x.dtype.kind not in "iu" else None
            assert np.array_equal(x, before[name]) or x.dtype.kind not in "iu"
            assert not any(np.shares_memory(x, y) for y in found)
        for x, y in itertools.combinations(found, 2):
            assert not np.shares_memory(x, y)


def test_read_only_arguments():
    call = Call(*(random(1, 2, n, 8, seed=n) for n in (9, 40, 40)), {"mask": random(40), "sinks": random(2)})
    out, lse = forward(call)
    grad = gradient_like(out)
    expected = backward(call, grad, out, lse)
    for x in (*call.arrays.values(), grad, out, lse):
        x.flags.writeable = False
    found = backward(call, grad, out, lse)
    assert_same(found, expected)
    assert all(x.flags.writeable for x in found)


def test_lists_are_taken_as_arrays():
    call = Call(*(random(1, 2, n, 3, seed=n) for n in (4, 5, 5)), {"mask": random(5), "sinks": random(2)})
    out, lse = forward(call)
    grad = gradient_like(out)
    expected = backward(call, grad, out, lse)
    options = {name: x.tolist() for name, x in call.options.items()}
    found = attention_backward(
        *(x.tolist() for x in (grad, *call[:3], out, lse)), grad_mask=True, grad_sinks=True, **options
    )
    assert_same(found, expected)


def test_C20_concurrent_callers():
    work = [call for call in seeded_calls(24, seed=11, lengths=MODERATE)]
    expected = [gradients(call) for call in work]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for found, wanted_ in zip(pool.map(gradients, work), expected, strict=True):
                assert_same(found, wanted_)


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [0, 1, 2, 3, 8, 15, 16, 17, 1000])
@pytest.mark.parametrize("keys", [0, 1, 95, 96, 97, 767, 768, 769, 5000, 12289, 10**6])
def test_chunks_of_keys(heads, keys):
    chunk = _plan.backward_chunk(heads, keys)
    assert chunk > 0 and chunk % _plan.ATOM == 0
    chunks = -(-keys // chunk)
    assert chunks * max(heads, 1) <= 2 * 16 or chunks <= 1  # memory for the parts of dq
    if heads >= 16:
        assert chunk >= keys
    with fastmha.num_threads(7):
        assert _plan.backward_chunk(heads, keys) == chunk


# --- memory ---------------------------------------------------------------------------------------

# Prints by how many megabytes the most memory that the process ever had grew in a forward and a
# backward call, the gradients taken off.
MEASURE = """
import sys
import numpy as np, fastmha

def most():
    if sys.platform == "darwin":
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 2**10

L, H, dtype, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], eval(sys.argv[4])
fastmha.set_num_threads(2)
rng = np.random.default_rng(0)
q, k, v, grad = (np.empty((1, H, L, 64), dtype) for _ in range(4))
for x in (q, k, v, grad):
    x[...] = rng.standard_normal((H, 1, 64))
out = np.full_like(v, 1)
lse = np.full((1, H, L), 1, "float64" if dtype == "float64" else "float32")
asked = {"grad_sinks": "sinks" in options, "grad_mask": "mask" in options}
few = [x[:, :, :70] for x in (grad, q, k, v, out, lse)]
plain = {name: x for name, x in options.items() if not name.endswith("lengths")}
fastmha.attention(*few[1:4], **plain)
fastmha.attention_backward(*few, **asked, **plain)
before = most()
_, lse = fastmha.attention(q, k, v, out=out, return_lse=True, **options)
found = fastmha.attention_backward(grad, q, k, v, out, lse, **asked, **options)
print(most() - before - sum(x.nbytes for x in found) / 2**20)
"""
EVERYTHING = {
    "softcap": 20.0, "alibi_slopes": [0.1] * 16, "sinks": [0.5] * 16, "key_lengths": [8000],
    "query_lengths": [8100], "dropout_p": 0.1, "rng": 1, "causal": "bottom-right",
}  # fmt: skip

needs_measure = pytest.mark.skipif(sys.platform == "win32", reason="has no such measure")


def grown(run_python, options, L=8192, H=16, dtype="float32", code=MEASURE):
    done = run_python(code, L, H, dtype, options, timeout=600)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@needs_measure
def test_the_measure_finds_an_array_that_is_made(run_python):
    code = MEASURE.replace("print(", "more = np.ones(100 * 2**17)\nprint(")
    assert code != MEASURE
    assert 90 < grown(run_python, {}, 64, 1, code=code) < 110


@needs_measure
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_of_a_window(run_python, dtype):
    assert grown(run_python, {"window": (64, 0)}, dtype=dtype) < 96


@needs_measure
def test_memory_where_keys_are_dealt_out(run_python):
    """An L x S array would take 256 MB."""
    assert grown(run_python, {"window": (64, 0), "sinks": [0.0]}, H=1) < 64


@needs_measure
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, EVERYTHING], ids=lambda options: "-".join(options) or "none"
)
def test_memory(run_python, options):
    assert grown(run_python, options) < 96


# --- errors: section 7 ----------------------------------------------------------------------------


def right(**changes):
    """A right call of `attention_backward`, with some arguments changed."""
    q, k, v = random(2, 4, 3, 5), random(2, 2, 7, 5), random(2, 2, 7, 6)
    options = {name: x for name, x in changes.items() if name in ("mask", "sinks")}
    out, lse = attention(q, k, v, return_lse=True, **options)
    given = {"grad_out": random(*out.shape), "query": q, "key": k, "value": v, "out": out, "lse": lse}
    return given | changes


WRONG = [
    ({"grad_out": random(2, 4, 3, 5)}, ValueError, "grad_out", "(2, 4, 3, 6)"),
    ({"grad_out": random(4, 3, 6)}, ValueError, "grad_out", "(2, 4, 3, 6)"),
    ({"grad_out": random(2, 3, 4, 6)}, ValueError, "grad_out", "(2, 4, 3, 6)"),
    ({"grad_out": random(1, 4, 3, 6)}, ValueError, "grad_out", "(2, 4, 3, 6)"),
    ({"grad_out": random(2, 4, 3, 6, dtype=np.float32)}, TypeError, "grad_out", "float64"),
    ({"grad_out": np.ones((2, 4, 3, 6), int)}, TypeError, "grad_out", "int"),
    ({"grad_out": np.ones((2, 4, 3, 6), complex)}, TypeError, "grad_out", "complex"),
    ({"grad_out": np.ma.ones((2, 4, 3, 6))}, TypeError, "grad_out", "masked"),
    ({"grad_out": None}, TypeError, "grad_out", ""),
    ({"out": random(2, 4, 3, 5)}, ValueError, "out", "(2, 4, 3, 6)"),
    ({"out": random(2, 4, 3, 6, dtype=np.float16)}, TypeError, "out", "float64"),
    ({"out": None}, TypeError, "out", ""),
    ({"lse": random(2, 4, 3, 1)}, ValueError, "lse", "(2, 4, 3)"),
    ({"lse": random(2, 3, 4)}, ValueError, "lse", "(2, 4, 3)"),
    ({"lse": random(2, 4, 3, dtype=np.float32)}, TypeError, "lse", "float64"),
    ({"lse": np.zeros((2, 4, 3), int)}, TypeError, "lse", "int"),
    ({"lse": None}, TypeError, "lse", ""),
    ({"query": random(2, 3, 3, 5)}, ValueError, "key", ""),
    ({"query": random(2, 4, 3, 5, dtype=np.float32)}, TypeError, "query, key, value", "float32"),
    ({"value": random(2, 2, 6, 6)}, ValueError, "value", "7"),
    ({"grad_mask": True}, ValueError, "grad_mask", "mask"),
    ({"grad_mask": True, "mask": np.ones(7, bool)}, ValueError, "grad_mask", "bool"),
    ({"grad_sinks": True}, ValueError, "grad_sinks", "sinks"),
    ({"dropout_p": 0.5}, ValueError, "rng", "seed"),
    ({"dropout_p": 1.0, "rng": None}, ValueError, "rng", "seed"),
    ({"dropout_p": 0.5, "rng": -1}, ValueError, "rng", ""),
    ({"dropout_p": 0.5, "rng": "seed"}, TypeError, "rng", ""),
    ({"dropout_p": 1.5, "rng": 1}, ValueError, "dropout_p", "1.5"),
    ({"layout": "BLHD"}, ValueError, "", ""),
    ({"layout": "LBHD"}, ValueError, "layout", "LBHD"),
    ({"causal": "middle"}, ValueError, "causal", "middle"),
    ({"window": (-2, 0)}, ValueError, "window", "-2"),
    ({"key_lengths": [8, 1]}, ValueError, "key_lengths", "8"),
    ({"query_lengths": [1]}, ValueError, "query_lengths", "(2,)"),
    ({"scale": math.nan}, ValueError, "scale", "nan"),
    ({"softcap": -1.0}, ValueError, "softcap", "-1"),
    ({"alibi_slopes": [0.5]}, ValueError, "alibi_slopes", "(4,)"),
]


@pytest.mark.parametrize(
    "changes, kind, name, word", WRONG, ids=lambda x: "-".join(x) if type(x) is dict else ""
)
def test_errors_name_the_argument(changes, kind, name, word):
    given = right(**changes)
    before = {key: x.copy() for key, x in given.items() if isinstance(x, np.ndarray)}
    with pytest.raises(kind) as caught:
        attention_backward(**given)
    subject, colon, rest = str(caught.value).partition(":")
    assert colon and subject.startswith(name) and "expected" in rest
    assert word in rest
    for key, x in before.items():
        assert np.array_equal(given[key], x)


@pytest.mark.parametrize("name", ["mask", "sinks"])
def test_masks_and_sinks_are_checked_as_on_the_way_there(name):
    for wrong, kind in ((np.ones((3, 8)), ValueError), (np.ones(7, int), TypeError), ("text", TypeError)):
        wrong = wrong if name == "mask" or kind is ValueError else "text"
        given = right()
        with pytest.raises(kind, match=f"^{name}: expected"):
            attention_backward(**given, **{name: wrong})


def test_half_types_have_an_lse_in_float32():
    q, k, v = (random(1, 2, n, 4, dtype=np.float16) for n in (3, 5, 5))
    out, lse = attention(q, k, v, return_lse=True)
    assert lse.dtype == np.float32
    for wrong in (np.float16, np.float64):
        with pytest.raises(TypeError, match=r"^lse: expected float32"):
            attention_backward(out, q, k, v, out, lse.astype(wrong))


def test_options_are_named():
    given = right()
    with pytest.raises(TypeError):
        attention_backward(*given.values(), None)
