"""What holds whatever the numbers: permuted keys, split keys, repeated heads, constant values."""

import numpy as np
import pytest
from comparing import assert_attends, assert_close, assert_same_bits, native, precision
from drawing import FLOATS, LENGTHS, OPTIONS, as_dtype, calls, seeded_calls
from hypothesis import given
from hypothesis import strategies as st

import fastmha

MODERATE = LENGTHS[: LENGTHS.index(129)]


def plain(call):
    """Arrays (B, H, L, D) that can be written to, the key's batch that of the query."""
    q, k, v = (native(x).copy() for x in call[:3])
    k, v = (np.broadcast_to(x, (len(q), *x.shape[1:])).copy() for x in (k, v))
    return q, k, v


@given(calls(options=("mask", "scale", "softcap", "sinks"), lengths=MODERATE), st.integers(0, 99))
def test_keys_in_any_order(call, seed):
    q, k, v = plain(call)
    order = np.random.default_rng(seed).permutation(k.shape[2])
    mask = native(call.options["mask"])
    if mask.ndim and mask.shape[-1] > 1:
        mask = mask[..., order]
    options = call.options | {"mask": mask}
    permuted = q, k[:, :, order], v[:, :, order]
    # All that changes is the order of the sums: the permuted call is as near to its oracle.
    assert_attends(*fastmha.attention(q, k, v, return_lse=True, **call.options), q, k, v, call.options)
    assert_attends(*fastmha.attention(*permuted, return_lse=True, **options), *permuted, options)
    if q.dtype == np.float64:
        a = fastmha.attention(q, k, v, **call.options)
        assert_close(fastmha.attention(*permuted, **options), a, np.float64)


@given(calls(options=("mask", "scale", "softcap", "layout"), lengths=MODERATE), st.data())
def test_split_anywhere_and_merged(call, data):
    swapped = "layout" in call.options
    axis = 1 if swapped else 2
    S = call.key.shape[axis]
    cuts = sorted(data.draw(st.lists(st.integers(0, S), max_size=4)))
    mask = call.options["mask"]
    if mask.dtype != bool:  # beside -1e38 an LSE has no digits left for the number of keys
        mask = np.where(np.isfinite(mask) & (mask < -100), mask.dtype.type(-100), mask)
    call = call._replace(options=call.options | {"mask": mask})
    outs, lses = [], []
    for begin, end in zip([0, *cuts], [*cuts, S], strict=True):
        part = [x[:, begin:end] if swapped else x[:, :, begin:end] for x in call[1:3]]
        mask = call.options["mask"]
        if mask.ndim and mask.shape[-1] > 1:
            mask = mask[..., begin:end]
        options = call.options | {"mask": mask}
        out, lse = fastmha.attention(call.query, *part, return_lse=True, **options)
        outs.append(out.swapaxes(1, 2) if swapped else out)
        lses.append(lse)
    out, lse = fastmha.merge_attention(outs, lses)
    out = np.ascontiguousarray(out.swapaxes(1, 2)) if swapped else out
    if call.query.dtype.itemsize > 2:
        assert_attends(out, lse, *call)
    else:  # each part was rounded to a half type
        expected, expected_lse = fastmha.attention(*call[:3], return_lse=True, **call.options)
        largest = np.abs(native(call.value).astype(float)).max()
        epsilon, _ = precision(out.dtype)
        assert np.abs(out.astype(float) - expected.astype(float)).max() <= 2 * epsilon * largest
        seen = np.isfinite(expected_lse)
        assert np.array_equal(np.isfinite(lse), seen)
        assert np.allclose(lse[seen], expected_lse[seen], 1e-5, 1e-5)


@given(calls(lengths=MODERATE))
def test_grouped_heads_are_repeated_heads(call):
    axis = 2 if "layout" in call.options else 1
    group = call.query.shape[axis] // call.key.shape[axis]
    expected = fastmha.attention(*call[:3], **call.options)
    k, v = (x.repeat(group, axis) for x in call[1:3])
    assert_same_bits(fastmha.attention(call.query, k, v, **call.options), expected)
    if not set(call.options) - {"mask", "scale"}:
        sdpa = fastmha.scaled_dot_product_attention
        options = {"attn_mask" if name == "mask" else name: x for name, x in call.options.items()}
        assert_same_bits(sdpa(*call[:3], enable_gqa=True, **options), expected)
        assert_same_bits(sdpa(call.query, k, v, **options), expected)


@given(st.data())
def test_a_window_wider_than_the_keys_is_none(data):
    names = [name for name in OPTIONS if name != "window"]
    chosen = data.draw(st.sets(st.sampled_from(names)))
    call = data.draw(calls(options=[name for name in names if name in chosen], lengths=MODERATE))
    expected = fastmha.attention(*call[:3], **call.options)
    far = sum(x.shape[1] + x.shape[2] for x in call[:2])
    for window in ((far, far), (-1, -1), (far, -1), (-1, far), (2**63, 2**63)):
        assert_same_bits(fastmha.attention(*call[:3], window=window, **call.options), expected)


@given(calls(lengths=MODERATE))
def test_constant_values(call):
    """Where nothing is dropped and there is no sink, the mean of equal rows is that row."""
    options = {name: x for name, x in call.options.items() if name not in ("dropout_p", "rng", "sinks")}
    row = native(call.value)[:, :1, :1]
    value = np.broadcast_to(row, call.value.shape)
    out, lse = fastmha.attention(*call[:2], value, return_lse=True, **options)
    out = out.swapaxes(1, 2) if "layout" in options else out
    B, H, L, E = out.shape
    expected = np.broadcast_to(row if row.shape[0] == B else row.repeat(B, 0), (B, H, L, E))
    seen = np.isfinite(lse)
    assert not out[~seen].any()
    if seen.any():
        assert_close(out[seen], expected[seen], out.dtype, slack=1e-5 if out.dtype != np.float64 else 0)


@given(calls(lengths=MODERATE))
def test_values_of_one_give_the_row_sums_of_the_weights(call):
    options = {name: x for name, x in call.options.items() if name not in ("dropout_p", "rng")}
    out = fastmha.attention(*call[:2], np.ones_like(native(call.value)), **options)
    out = out.swapaxes(1, 2) if "layout" in options else out
    sums = fastmha.attention_weights(*call[:2], **options).sum(-1, dtype=np.float64)
    assert np.allclose(
        out.astype(float), sums[..., None], rtol=0, atol=max(1e-6, 2 * precision(out.dtype)[0])
    )


@pytest.mark.parametrize("name", FLOATS)
def test_a_scale_of_zero_gives_the_mean(name):
    for call in seeded_calls(10, options=(), dtypes=[name], lengths=MODERATE):
        q, k, v = plain(call)
        out, lse = fastmha.attention(q, k, v, scale=0, return_lse=True)
        group = q.shape[1] // k.shape[1]
        mean = v.astype(np.float64).mean(2, keepdims=True).repeat(group, 1)
        expected = np.broadcast_to(mean, out.shape).astype(out.dtype)
        assert_close(out, expected, out.dtype, slack=0 if name == "float64" else 1e-5)
        assert_close(lse, np.full(lse.shape, np.log(k.shape[2])), lse.dtype, floor=1.0)


@given(
    calls(options=("layout",), dtypes=["float64"], lengths=MODERATE),
    st.sampled_from([-300.0, -1.0, 5.0, 300.0]),
)
def test_a_shift_of_all_scores_shifts_the_lse_alone(call, shift):
    out, lse = fastmha.attention(*call[:3], return_lse=True, **call.options)
    mask = np.array(shift)
    moved, moved_lse = fastmha.attention(*call[:3], return_lse=True, mask=mask, **call.options)
    assert_close(moved, out, np.float64, floor=1.0)
    assert_close(moved_lse, lse + shift, np.float64, floor=1.0)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("shift", [-1000, -7, 3, 4096])
def test_softmax_does_not_feel_a_shift(name, shift):
    x = np.random.default_rng(0).integers(-8, 9, (7, 130)) / 2  # sums are exact in all dtypes
    if name in ("float16", "bfloat16"):
        shift = int(np.clip(shift, -8, 8))
    expected = fastmha.softmax(x.astype(as_dtype(name)))
    assert_same_bits(fastmha.softmax((x + shift).astype(as_dtype(name))), expected)


@pytest.mark.parametrize("name", FLOATS)
def test_softmax_is_attention_over_unit_vectors(name):
    x = np.random.default_rng(0).standard_normal((9, 50)).astype(as_dtype(name))
    one = np.zeros((50, 50), x.dtype)
    np.fill_diagonal(one, 1)
    out = fastmha.scaled_dot_product_attention(x, one, one, scale=1.0)
    assert_close(out, fastmha.softmax(x).astype(float), x.dtype, slack=1e-6)


@given(calls(options=("causal", "mask"), lengths=MODERATE, dtypes=["float64", "float32"]))
def test_the_output_is_linear_in_the_values(call):
    q, k, v = plain(call)
    first, second = (fastmha.attention(q, k, x, **call.options) for x in (v, v * v.dtype.type(4)))
    assert_same_bits(second, first * v.dtype.type(4))


@given(calls(lengths=MODERATE))
def test_scaling_the_query_by_a_power_of_two_is_scaling_the_scale(call):
    q, k, v = plain(call)
    options = {name: x for name, x in call.options.items() if name != "layout"}
    if "layout" in call.options:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scale = np.float64(options.pop("scale", 0.5))
    expected = fastmha.attention(q, k, v, scale=scale, **options)
    double = (q * q.dtype.type(2)).astype(q.dtype)
    assert_same_bits(fastmha.attention(double, k, v, scale=scale / 2, **options), expected)
    assert_same_bits(fastmha.attention((-q).astype(q.dtype), k, v, scale=-scale, **options), expected)


@given(calls(lengths=MODERATE, widths=[1, 3, 8, 17]))
def test_heads_of_zeros_beside_the_others_change_nothing(call):
    """More columns of zeros in query and key, and of anything in the values."""
    scale = call.options.get("scale", 0.3)
    options = call.options | {"scale": scale}
    out = fastmha.attention(*call[:3], **options)
    wider = [np.concatenate([native(x), np.zeros_like(native(x))], -1) for x in call[:3]]
    assert_same_bits(fastmha.attention(*wider, **options)[..., : out.shape[-1]], out)
