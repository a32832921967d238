"""The node cases that ONNX publishes for its operator `Attention`, answered by `fastmha.attention`."""

import copy
import importlib

import numpy as np
import pytest
from comparing import assert_close

import fastmha

onnx = pytest.importorskip("onnx", minversion="1.23")  # before, the cases of causal calls were wrong

# Cases that are not run, and why. All others are: one that asks for something unknown fails.
SKIPPED = {
    "test_attention_local_window_with_past": "its last queries stand where `attention` has no key any more",
}

INPUTS = "Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"
OUTPUTS = "Y", "present_key", "present_value", "qk_matmul_output"
ATTRIBUTES = {
    "is_causal": 0,
    "kv_num_heads": 0,
    "left_window_size": -1,
    "q_num_heads": 0,
    "qk_matmul_output_mode": 0,
    "right_window_size": -1,
    "scale": None,
    "softcap": None,
    "softmax_precision": None,  # all published values are met by what fastmha computes in
}


def published():
    """All cases of one node by name; the others say them again in other operators."""
    from onnx.backend.test.case import node

    # Only the operator's own module is loaded: all of them take long, and warn.
    importlib.import_module(f"{node.__name__}.attention")
    cases = {case.name: case for case in node._NodeTestCases}
    return {name: case for name, case in cases.items() if is_attention(case)}


def is_attention(case):
    return [node.op_type for node in case.model.graph.node] == ["Attention"]


CASES = published()
RUN = [name for name in CASES if name not in SKIPPED]


def named(names, given, arrays):
    """The arrays of a node by the operator's own names; those left out have the empty name."""
    arrays = iter(arrays)
    return {name: next(arrays) for name, place in zip(names, given, strict=False) if place}


def read(case):
    """Inputs, outputs and attributes of a case that is one node, all of them known."""
    (node,) = case.model.graph.node
    ((inputs, outputs),) = case.data_sets
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert set(attributes) <= set(ATTRIBUTES), "an attribute that this test does not know"
    assert len(node.input) <= len(INPUTS) and len(node.output) <= len(OUTPUTS)
    inputs, outputs = named(INPUTS, node.input, inputs), named(OUTPUTS, node.output, outputs)
    return inputs, outputs, {**ATTRIBUTES, **attributes}


def split(x, heads):
    """(B, L, heads * D) -> (B, heads, L, D); an array of four axes stays as it is."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def as_call(inputs, attributes):
    """Arguments of `fastmha.attention`: query, key, value, options."""
    q = split(inputs["Q"], attributes["q_num_heads"])
    k, v = (split(inputs[name], attributes["kv_num_heads"]) for name in "KV")
    B, L = q.shape[0], q.shape[2]
    held, past = inputs.get("nonpad_kv_seqlen"), 0
    if "past_key" in inputs:
        past = inputs["past_key"].shape[2]
        k, v = np.concatenate([inputs["past_key"], k], 2), np.concatenate([inputs["past_value"], v], 2)
    window = attributes["left_window_size"], attributes["right_window_size"]
    options = {"scale": attributes["scale"], "softcap": attributes["softcap"], "window": window}
    if past and attributes["is_causal"]:
        # The first query follows what was there before; keys after the last query are hidden.
        held = np.full(B, past + L)
    if held is not None:
        options["key_lengths"] = held
    if attributes["is_causal"]:
        options["causal"] = "top-left" if held is None else "bottom-right"
    else:
        assert window == (-1, -1) or not (past or held is not None), "a window on a cache, without causal"
    if "attn_mask" in inputs:
        mask = inputs["attn_mask"]
        missing = k.shape[2] - mask.shape[-1]
        hidden = False if mask.dtype == bool else -np.inf
        options["mask"] = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=hidden)
    return q, k, v, options


def scores(q, k, v, options):
    """The scores that the softmax sees: ``log(weight) + lse``."""
    _, lse = fastmha.attention(q, k, v, return_lse=True, **options)
    with np.errstate(divide="ignore"):
        return np.log(fastmha.attention_weights(q, k, **options)) + lse[..., None]


# Which options have had their effect at each mode of qk_matmul_output.
STAGES = {
    0: ("scale",),
    1: ("scale", "softcap"),
    2: ("scale", "softcap", "mask", "causal", "window", "key_lengths"),
}


def matmul_output(q, k, v, options, mode):
    if mode == 3:
        return fastmha.attention_weights(q, k, **options).astype(q.dtype)
    return scores(q, k, v, {name: x for name, x in options.items() if name in STAGES[mode]})


@pytest.mark.parametrize("name", RUN)
def test_published_case(name):
    case = CASES[name]
    inputs, outputs, attributes = read(case)
    q, k, v, options = as_call(inputs, attributes)
    out = fastmha.attention(q, k, v, **options)
    if inputs["Q"].ndim == 3:
        out = out.swapaxes(1, 2).reshape(*inputs["Q"].shape[:2], -1)
    expected = outputs.pop("Y")
    assert_close(out, expected, expected.dtype)
    if "qk_matmul_output" in outputs:
        expected = outputs.pop("qk_matmul_output")
        actual = matmul_output(q, k, v, options, attributes["qk_matmul_output_mode"])
        assert_close(actual, expected, expected.dtype)
    for name, x in (("present_key", k), ("present_value", v)):
        if name in outputs:
            assert np.array_equal(x, outputs.pop(name))
    assert not outputs, "results that are not compared"


def test_all_cases_are_found():
    assert len(CASES) >= 93, "fewer than ONNX 1.23 has"
    assert set(SKIPPED) <= set(CASES), "listed, and not there"


def test_a_case_with_an_unknown_attribute_fails():
    case = copy.deepcopy(CASES["test_attention_4d"])
    case.model.graph.node[0].attribute.append(onnx.helper.make_attribute("transposed", 1))
    with pytest.raises(AssertionError, match="does not know"):
        read(case)
