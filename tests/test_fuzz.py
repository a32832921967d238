"""Ten thousand random combinations of all options against the oracle."""

import numpy as np
import pytest
from comparing import arithmetic, assert_attends, assert_close, assert_same_bits, native
from drawing import calls
from hypothesis import given, settings
from hypothesis import strategies as st

import fastmha
from fastmha import reference


@pytest.mark.slow
@given(calls(zeros=True, many=[False] * 19 + [True]), st.sampled_from([1, 2, 3, 8]))
@settings(max_examples=10_000)
def test_any_combination_of_options_equals_the_reference(call, n):
    with fastmha.num_threads(n):
        out, lse = fastmha.attention(*call[:3], return_lse=True, **call.options)
    assert_attends(out, lse, *call)


@pytest.mark.slow
@given(calls(zeros=True), st.data())
@settings(max_examples=2_000)
def test_any_weights_equal_the_reference(call, data):
    swapped = call.options.get("layout") == "BLHD"
    H, L = call.query.shape[2 if swapped else 1], call.query.shape[1 if swapped else 2]
    chosen = {}
    for name, n in (("heads", H), ("rows", L)):
        if n and data.draw(st.booleans()):
            chosen[name] = data.draw(st.lists(st.integers(-n, n - 1), max_size=5))
    weights = fastmha.attention_weights(*call[:2], **chosen, **call.options)
    q, k = native(call.query), native(call.key)
    expected = reference.attention_weights(q, k, **chosen, **call.options)
    dtype = arithmetic(q.dtype)
    assert_close(weights, expected, dtype, slack=0 if dtype == np.float64 else 3e-5)
    whole = fastmha.attention_weights(*call[:2], **call.options)
    heads, rows = (
        slice(None) if chosen.get(name) is None else np.array(chosen[name], int) for name in ("heads", "rows")
    )
    assert_same_bits(weights, whole[:, heads][:, :, rows])
