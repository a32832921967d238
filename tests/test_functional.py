"""The functions against PyTorch, against its formulas written out, and against the oracle."""

import inspect
import itertools
import math
import re

import numpy as np
import pytest
from comparing import arithmetic, assert_attends, assert_close, assert_same_bits, error, native
from drawing import (
    FLOATS,
    LENGTHS,
    OPTIONS,
    SHORT,
    WIDTHS,
    arrange,
    as_dtype,
    calls,
    draw_mask,
    mask_shapes,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import fastmha
from fastmha import reference
from fastmha import scaled_dot_product_attention as sdpa

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@pytest.fixture(scope="module")
def torch_sdpa(torch):
    """PyTorch's function on NumPy arrays."""

    def call(q, k, v, attn_mask=None, **options):
        arrays = [None if x is None else torch.from_numpy(native(x).copy()) for x in (q, k, v, attn_mask)]
        with torch.no_grad():
            out = torch.nn.functional.scaled_dot_product_attention(*arrays, **options)
        return out.numpy()

    return call


def random(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def assert_within(actual, expected, tolerance):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert np.isfinite(expected).all()
    assert error(actual, expected) <= tolerance


# --- scaled_dot_product_attention against PyTorch -------------------------------------------------


@given(st.data())
def test_equals_pytorch(torch_sdpa, data):
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    call = data.draw(calls(options=(), dtypes=[dtype]))
    q, k, v = call[:3]
    k, v = (np.broadcast_to(x, (len(q), *x.shape[1:])) for x in (k, v))
    options = {"enable_gqa": q.shape[1] != k.shape[1]}
    kind = data.draw(st.sampled_from(["", "causal", "mask", "bias"]))
    if kind == "causal":
        options["is_causal"] = True
    if kind in ("mask", "bias"):
        sizes = (*q.shape[:3], k.shape[2])
        rng = np.random.default_rng(data.draw(st.sampled_from(range(99))))
        shape = data.draw(st.sampled_from([s for s in mask_shapes(*sizes) if len(s) > 1]))
        mask = rng.random(shape) < 0.7
        mask[..., 0] = True  # PyTorch's rows that see nothing are its own affair
        mask = mask if kind == "mask" else np.where(mask, rng.standard_normal(shape), -np.inf).astype(dtype)
        options["attn_mask"] = arrange(mask, data.draw(st.sampled_from(["contiguous", "transposed"])))
    if data.draw(st.booleans()):
        options["scale"] = 0.3
    expected = torch_sdpa(q, k, v, **options)
    assert_within(sdpa(q, k, v, **options), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (2, 1, 2, 3)])
def test_two_to_six_axes_equal_pytorch(torch_sdpa, lead, dtype):
    q, k, v = (random(*lead, n, m, dtype=dtype) for n, m in ((17, 8), (33, 8), (33, 5)))
    for options in ({}, {"is_causal": True}, {"attn_mask": random(17, 33) > -1}):
        assert_within(sdpa(q, k, v, **options), torch_sdpa(q, k, v, **options), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "leads",
    [
        [(2, 3), (1, 3), (2, 1)],
        [(2, 3), (3,), (1, 1)],
        [(2, 3), (), ()],
        [(3,), (2, 3), (2, 3)],
        [(1, 1), (2, 3), (2, 3)],
        [(4, 1, 3), (2, 1), (4, 2, 3)],
        [(), (2, 3), (3,)],
        [(2, 1), (2, 3), (1, 3)],
    ],
)
def test_leading_axes_broadcast_as_in_pytorch(torch_sdpa, leads):
    q, k, v = (
        random(*lead, *shape, seed=i)
        for i, (lead, shape) in enumerate(zip(leads, [(9, 4), (7, 4), (7, 3)], strict=True))
    )
    assert_within(sdpa(q, k, v), torch_sdpa(q, k, v), 1e-12)
    assert_within(reference.scaled_dot_product_attention(q, k, v), torch_sdpa(q, k, v), 1e-12)
    assert_within(sdpa(q, k, v, is_causal=True), torch_sdpa(q, k, v, is_causal=True), 1e-12)


@pytest.mark.parametrize(
    "H, G, G_value", [(4, 2, 2), (6, 3, 3), (6, 1, 1), (4, 4, 4), (4, 2, 4), (6, 2, 3), (1, 1, 1)]
)
def test_grouped_heads_equal_pytorch(torch_sdpa, H, G, G_value):
    q, k, v = random(2, H, 9, 4), random(2, G, 7, 4), random(2, G_value, 7, 3)
    for options in ({}, {"is_causal": True}, {"attn_mask": random(2, H, 9, 7)}):
        expected = torch_sdpa(q, k, v, enable_gqa=True, **options)
        assert_within(sdpa(q, k, v, enable_gqa=True, **options), expected, 1e-12)
    # three axes: the first of them is heads
    assert_within(
        sdpa(q[0], k[0], v[0], enable_gqa=True),
        torch_sdpa(q[:1], k[:1], v[:1], enable_gqa=True)[0],
        1e-12,
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_long_rows_equal_pytorch(torch_sdpa, is_causal):
    q, k, v = (random(1, 2, 700, 64, dtype=np.float32, seed=seed) for seed in range(3))
    assert_within(sdpa(q, k, v, is_causal=is_causal), torch_sdpa(q, k, v, is_causal=is_causal), 1e-5)


@pytest.mark.parametrize("scale", [None, 0.0, 0.5, -0.5, 3])
def test_scale_equals_pytorch(torch_sdpa, scale):
    q, k, v = random(2, 9, 4), random(2, 7, 4), random(2, 7, 3)
    assert_within(sdpa(q, k, v, scale=scale), torch_sdpa(q, k, v, scale=scale), 1e-12)


def test_the_signature_is_pytorchs():
    parameters = inspect.signature(sdpa).parameters
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert list(parameters) == [*names, "rng"]
    assert [p.default for p in parameters.values()][3:] == [None, 0.0, False, None, False, None]
    assert all(parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for name in names)


# --- scaled_dot_product_attention against the oracle ----------------------------------------------


@given(st.data())
def test_sdpa_equals_the_reference(data):
    call = data.draw(calls(options=(), lengths=SHORT, zeros=True))
    q, k, v = call[:3]
    pick = lambda choices: data.draw(st.sampled_from(choices))  # noqa: E731
    options = {"enable_gqa": q.shape[1] != k.shape[1]}
    kind = pick(["", "causal", "mask"])
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "mask":
        n = (*q.shape[:3], k.shape[2])
        options["attn_mask"] = draw_mask(pick, np.random.default_rng(pick(range(99))), n)
    if pick([False, True]):
        options |= {"dropout_p": 0.4, "rng": 2**63 + 5}
    q, k, v = (native(x) for x in (q, k, v))
    expected = reference.scaled_dot_product_attention(q, k, v, **options)
    slack = 2e-5 if q.dtype != np.float64 else 0  # how much it really is, `attention` shows below
    assert_close(sdpa(*call[:3], **options), expected, q.dtype, slack=slack)


# --- attention: every option, in pairs, together --------------------------------------------------


def assert_equals_reference(call):
    before = {name: x.copy() for name, x in call.arrays.items()}
    out, lse = fastmha.attention(*call[:3], return_lse=True, **call.options)
    assert_attends(out, lse, *call)
    assert out.flags.c_contiguous and out.flags.writeable and out.dtype.isnative and out.flags.owndata
    for name, x in call.arrays.items():
        assert_same_bits(native(x), native(before[name])) if x.dtype.kind != "i" else None
        assert not np.shares_memory(out, x)


@pytest.mark.parametrize("option", OPTIONS)
@given(data=st.data())
@settings(max_examples=20)
def test_every_option_alone_equals_the_reference(option, data):
    assert_equals_reference(data.draw(calls(options=(option,))))


@pytest.mark.parametrize("pair", list(itertools.combinations(OPTIONS, 2)), ids="-".join)
@given(data=st.data())
@settings(max_examples=6)
def test_every_pair_of_options_equals_the_reference(pair, data):
    assert_equals_reference(data.draw(calls(options=pair, lengths=LENGTHS[:-6], widths=WIDTHS[:12])))


@given(calls(zeros=True))
@settings(max_examples=150)
def test_random_combinations_of_options_equal_the_reference(call):
    assert_equals_reference(call)


@given(calls(many=[True]), st.sampled_from([1, 3, 8]))
@settings(max_examples=12)
def test_few_rows_and_many_keys_equal_the_reference(call, n):
    fastmha.set_num_threads(n)
    assert_equals_reference(call)
    assert_weights(call)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "L, S, D, E",
    [
        (1, 1, 1, 1),
        (1, 300, 64, 64),
        (64, 96, 6, 6),
        (65, 97, 7, 5),
        (130, 200, 128, 1),
        (3, 5, 257, 300),
    ],
)
def test_sizes_equal_the_reference(name, L, S, D, E):
    q, k, v = (
        random(1, 2, *shape, dtype=as_dtype(name), seed=i) for i, shape in enumerate([(L, D), (S, D), (S, E)])
    )
    assert_attends(*fastmha.attention(q, k, v, return_lse=True), q, k, v, {})


@pytest.mark.parametrize("name", [name for name in FLOATS if name != "float64"])
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1e-300},
        {"scale": -1e-300},
        {"softcap": 1e39},
        {"softcap": 1e-300},
        {"sinks": [1e39, -1e39]},
        {"alibi_slopes": [1e39, 1e300]},
    ],
    ids=str,
)
def test_numbers_beyond_the_range_of_float32(name, options):
    q, k, v = (random(1, 2, *shape, dtype=as_dtype(name)) for shape in ((5, 4), (9, 4), (9, 3)))
    out, lse = fastmha.attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = reference.attention(q, k, v, return_lse=True, **options)
    assert_close(out, expected, q.dtype, slack=1e-5)
    if "alibi_slopes" not in options:
        assert_close(lse, expected_lse, np.float32, floor=1.0, slack=1e-5)


def torch_formula(
    torch,
    q,
    k,
    v,
    *,
    mask=None,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    key_lengths=None,
    query_lengths=None,
    dropout_p=0.0,
    rng=None,
    layout="BHLD",
):
    """The formulas of every option but dropout, in PyTorch's float64; output and LSE."""
    q, k, v = (torch.from_numpy(native(x).astype(np.float64)) for x in (q, k, v))
    if layout == "BLHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    (B, H, L, D), (G, S) = q.shape, k.shape[1:3]
    k, v = (x.expand(B, -1, -1, -1).repeat_interleave(H // G, 1) for x in (k, v))
    scores = q @ k.mT * (D**-0.5 if scale is None else float(scale))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(L)[:, None], torch.arange(S)
    held = torch.full((B,), S) if key_lengths is None else torch.from_numpy(key_lengths.astype(int))
    asked = torch.full((B,), L) if query_lengths is None else torch.from_numpy(query_lengths.astype(int))
    held, asked = held[:, None, None, None], asked[:, None, None, None]
    p = i + (held - asked if causal == "bottom-right" else 0)
    if alibi_slopes is not None:
        scores = scores - torch.from_numpy(alibi_slopes.astype(float))[:, None, None] * (p - j).abs()
    hidden = (j >= held) | (i >= asked)
    if mask is not None and mask.dtype != bool:
        scores = scores + torch.from_numpy(native(mask).astype(float))
    elif mask is not None:
        hidden = hidden | ~torch.from_numpy(mask.copy())
    if causal:
        hidden = hidden | (j > p)
    left, right = window or (-1, -1)
    hidden = hidden | (left >= 0) & (j < p - left) | (right >= 0) & (j > p + right)
    scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        sink = torch.from_numpy(sinks.astype(float))[:, None, None].expand(B, H, L, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = weights.nan_to_num(0.0) @ v
    return (out.transpose(1, 2) if layout == "BLHD" else out).numpy(), lse.numpy()


@given(calls(dtypes=["float64"], lengths=LENGTHS[:15]))
def test_options_equal_pytorchs_formulas(torch, call):
    options = {name: x for name, x in call.options.items() if name not in ("dropout_p", "rng")}
    mask = options.get("mask")
    if mask is not None and np.finfo(np.float64).min in mask.astype(np.float64):
        options["mask"] = np.maximum(mask, mask.dtype.type(-100))
    expected, expected_lse = torch_formula(torch, *call[:3], **options)
    out, lse = fastmha.attention(*call[:3], return_lse=True, **options)
    assert_close(out, expected, np.float64)
    assert_close(lse, expected_lse, np.float64, floor=1.0)


@given(calls(lengths=SHORT, zeros=True))
def test_the_layouts_and_out_give_the_same(call):
    options = {name: x for name, x in call.options.items() if name != "layout"}
    swapped = "layout" in call.options
    arrays = [x.swapaxes(1, 2) if swapped else x for x in call[:3]]
    plain, lse = fastmha.attention(*arrays, return_lse=True, **options)
    other, other_lse = fastmha.attention(
        *(x.swapaxes(1, 2) for x in arrays), return_lse=True, layout="BLHD", **options
    )
    assert_same_bits(other.swapaxes(1, 2), plain)
    assert_same_bits(other_lse, lse)
    assert other.flags.c_contiguous
    out = np.full_like(plain, np.nan)
    assert fastmha.attention(*arrays, out=out, **options) is out
    assert_same_bits(out, plain)


@pytest.mark.parametrize(
    "name",
    [
        "contiguous",
        "transposed",
        "Fortran",
        "fused",
        "every other",
        "every other row",
        "reversed",
        "reversed rows",
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_out_of_any_strides(name, dtype):
    q, k, v = (random(3, 2, n, 5, dtype=as_dtype(dtype)) for n in (9, 7, 7))
    expected = fastmha.attention(q, k, v, causal=True)
    out = arrange(np.zeros_like(expected), name)
    base = out if out.base is None else out.base
    assert fastmha.attention(q, k, v, causal=True, out=out) is out
    assert_same_bits(out, expected)
    # and nothing beside it was written to
    assert (~np.isfinite(base.astype(np.float64))).sum() == base.size - out.size


def test_out_may_lie_between_the_inputs():
    buffer = random(2, 9, 4, 3, 5, dtype=np.float32)  # (B, L, q k v out, H, D)
    q, k, v, out = (buffer[:, :, i] for i in range(4))
    expected = fastmha.attention(q.copy(), k.copy(), v.copy(), layout="BLHD")
    assert fastmha.attention(q, k, v, layout="BLHD", out=out) is out
    assert_same_bits(out, expected)


@pytest.mark.parametrize("E", [1, 3, 8, 9, 64])
def test_values_of_another_width(E):
    q, k, v = random(1, 2, 9, 8), random(1, 2, 7, 8), random(1, 2, 7, E)
    out = fastmha.attention(q, k, v)
    assert out.shape == (1, 2, 9, E)
    assert_same_bits(out[..., :1], fastmha.attention(q, k, v[..., :1]))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("none", ["B", "H", "L", "S", "E", "D"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "bottom-right"},
        {"window": (1, 1)},
        {"dropout_p": 0.5, "rng": 1},
        {"softcap": 1.0},
        {"mask": "bool"},
        {"mask": "float"},
        {"lengths": True},
        {"sinks": True},
        {"layout": "BLHD"},
    ],
    ids=str,
)
def test_sizes_of_zero(name, none, options):
    n = {"B": 2, "H": 4, "L": 3, "S": 5, "D": 2, "E": 3} | {none: 0}
    B, H, L, S, D, E = n.values()
    dtype = as_dtype(name)
    q, k, v = (
        np.ones((B, H, L, D), dtype),
        np.ones((B, H // 2, S, D), dtype),
        np.ones((B, H // 2, S, E), dtype),
    )
    options = {**options, "scale": 1.0}
    if "mask" in options:
        options["mask"] = np.ones((B, 1, L, S), bool if options["mask"] == "bool" else np.float32)
    if options.pop("lengths", False):
        options |= {"key_lengths": np.full(B, min(S, 3)), "query_lengths": np.full(B, L)}
    if options.pop("sinks", False):
        options |= {"sinks": np.zeros(H), "alibi_slopes": np.zeros(H)}
    swapped = options.get("layout") == "BLHD"
    out, lse = fastmha.attention(
        *(x.swapaxes(1, 2) if swapped else x for x in (q, k, v)), return_lse=True, **options
    )
    assert out.shape == ((B, L, H, E) if swapped else (B, H, L, E))
    assert out.dtype == dtype
    assert lse.shape == (B, H, L)
    assert lse.dtype == arithmetic(dtype)
    if none == "S":
        assert not out.any() and np.isneginf(lse).all()
    elif none == "D" and "dropout_p" not in options and "sinks" not in options:
        assert (out[:, :, -1:] == 1).all()
    weights = fastmha.attention_weights(*(x.swapaxes(1, 2) if swapped else x for x in (q, k)), **options)
    assert weights.shape == (B, H, L, S)


# --- attention_weights ----------------------------------------------------------------------------


def assert_weights(call, **chosen):
    query, key = (native(x) for x in call[:2])
    weights = fastmha.attention_weights(query, key, **chosen, **call.options)
    expected = reference.attention_weights(query, key, **chosen, **call.options)
    dtype = arithmetic(query.dtype)
    assert_close(weights, expected, dtype, slack=2e-5 if dtype == np.float32 else 0)
    assert weights.flags.c_contiguous and weights.flags.writeable
    return weights


@given(calls(lengths=LENGTHS[:20], zeros=True))
def test_weights_equal_the_reference(call):
    weights = assert_weights(call)
    assert (weights >= 0).all()
    sums = weights.sum(-1, dtype=np.float64)
    if "sinks" in call.options:
        assert (sums < 1 + 1e-5).all()
    else:
        assert (np.isclose(sums, 1, atol=1e-5) | (sums == 0)).all()


@given(calls(options=("mask", "causal", "layout"), dtypes=["float64"], lengths=[9, 16, 65]), st.data())
def test_weights_times_values_are_the_output(call, data):
    out = fastmha.attention(*call[:3], **call.options).swapaxes(1, 2)
    weights = fastmha.attention_weights(*call[:2], **call.options)
    v = native(call.value).swapaxes(1, 2)
    v = v.repeat(weights.shape[1] // v.shape[1], axis=1)
    assert_close(np.ascontiguousarray(weights @ v), out, np.float64)


CHOICES = [
    {"heads": 0}, {"heads": -1}, {"heads": [2, 0]}, {"heads": np.array([1])}, {"heads": []},
    {"heads": slice(1, None)}, {"rows": 0}, {"rows": -1}, {"rows": [5, 6, 7, 2, 2]},
    {"rows": range(3, 9)}, {"rows": slice(None, None, 3)}, {"rows": slice(None, None, -1)},
    {"rows": np.array([], int)}, {"heads": [1, 1], "rows": [0, 8]},
    {"heads": np.int64(2), "rows": np.uint8(3)}, {"heads": None, "rows": None},
]  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@given(call=calls(lengths=[9, 64], widths=[3]))
@settings(max_examples=10)
def test_weights_of_chosen_heads_and_rows(choice, call):
    swapped = call.options.get("layout") == "BLHD"
    H = call.query.shape[2 if swapped else 1]
    if H < 3 and "heads" in choice:
        choice = choice | {"heads": 0}
    weights = assert_weights(call, **choice)
    whole = fastmha.attention_weights(*call[:2], **call.options)
    heads, rows = (
        np.atleast_1d(np.arange(n)[slice(None) if choice.get(name) is None else choice[name]])
        for name, n in (("heads", H), ("rows", whole.shape[2]))
    )
    assert_same_bits(weights, whole[:, heads][:, :, rows])


def test_weights_are_those_before_dropout():
    q, k = random(1, 2, 5, 4), random(1, 2, 7, 4)
    plain = fastmha.attention_weights(q, k)
    for p in (0.0, 0.5, 1.0):
        assert_same_bits(fastmha.attention_weights(q, k, dropout_p=p, rng=3), plain)


# --- merge_attention ------------------------------------------------------------------------------


@given(calls(options=(), lengths=LENGTHS[:15]))
def test_merged_halves_equal_the_reference(call):
    q, k, v = (native(x) for x in call[:3])
    S = k.shape[2]
    parts = [
        fastmha.attention(q, k[:, :, a], v[:, :, a], return_lse=True)
        for a in (slice(S // 3), slice(S // 3, S))
    ]
    outs, lses = zip(*parts, strict=True)
    merged, merged_lse = fastmha.merge_attention(outs, lses)
    expected, expected_lse = reference.merge_attention(outs, lses)
    assert_close(merged, expected, q.dtype)
    assert_close(merged_lse, expected_lse, lses[0].dtype, floor=1.0)
    assert_attends(merged, merged_lse, q, k, v, {})


def test_merging_one_part_changes_nothing():
    out, lse = random(2, 3, 4), random(2, 3)
    merged, merged_lse = fastmha.merge_attention([out], [lse])
    assert_same_bits(merged, out)
    assert_same_bits(merged_lse, lse)
    assert not np.shares_memory(merged, out)


@pytest.mark.parametrize("name", FLOATS)
def test_merged_dtypes(name):
    dtype = as_dtype(name)
    lse = random(3, dtype=arithmetic(dtype))
    merged, merged_lse = fastmha.merge_attention([random(3, 4, dtype=dtype)] * 2, [lse] * 2)
    assert merged.dtype == dtype
    assert merged_lse.dtype == arithmetic(dtype)
    assert_close(merged_lse, lse.astype(float) + math.log(2), arithmetic(dtype), floor=1.0)


def test_merging_takes_anything_that_can_be_gone_through():
    outs, lses = random(4, 3, 5), random(4, 3)
    expected = fastmha.merge_attention(list(outs), list(lses))
    for other in (
        (outs, lses),
        (iter(outs), iter(lses)),
        (tuple(outs), lses.tolist()),
        (outs.tolist(), lses),
    ):
        for a, b in zip(fastmha.merge_attention(*other), expected, strict=True):
            assert_same_bits(a, b)


# --- the docstring of attention, whose examples test_codebase.py runs -------------------------------


def explained(function):
    """For each name in the headings between a docstring's examples: heading and examples."""
    examples = inspect.getdoc(function).partition("Examples\n--------\n")[2]
    found, names = {}, []
    for paragraph in examples.split("\n\n"):
        if not paragraph.startswith(">>>"):
            names = re.findall(r"(?<!`)`(\w+)`(?!`)", paragraph)
        for name in names:
            found[name] = found.get(name, "") + paragraph + "\n"
    return found


PARAMETERS = inspect.signature(fastmha.attention).parameters.values()


@pytest.mark.parametrize("name", [p.name for p in PARAMETERS if p.kind is p.KEYWORD_ONLY])
def test_every_option_has_a_formula_and_its_numpy(name):
    text = explained(fastmha.attention)[name]
    assert re.search(r"``.+``", text), "no formula"
    assert re.search(rf"^>>> .*\b{name}=.*", text, re.MULTILINE), "no call with it"
    assert text.endswith("\nTrue\n"), "not compared with NumPy"


@pytest.mark.parametrize(
    "name", ["mask", "causal", "window", "key_lengths", "query_lengths", "dropout_p", "rng"]
)
def test_what_hides_keys_is_drawn(name):
    picture = r"(?:^[1.](?: [1.]){4}$\n){3}"  # three queries, five keys
    assert re.search(picture, explained(fastmha.attention)[name], re.MULTILINE)


def test_both_alignments_are_drawn():
    text = explained(fastmha.attention)["causal"]
    assert "causal=True" in text and 'causal="bottom-right"' in text
    assert "1 . . . .\n" in text and "1 1 1 . .\n1 1 1 1 .\n1 1 1 1 1\n" in text
