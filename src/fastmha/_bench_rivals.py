"""The competitors of the benchmark: the same attention by fastmha, NumPy, PyTorch, ONNX Runtime.

Each is built for (case, inputs, threads) and gives a call, and a function that makes an array of
the call's result. What they should give is computed in float64.
"""

from __future__ import annotations

import math

import numpy as np

import fastmha
from fastmha._bench_cases import SEED, Skipped, array_dtype, visible

__all__ = ["BUILDERS", "TOLERANCE", "expected_rows", "textbook"]

# Relative to the largest value. The half types are rounded once at the end by those who compute in
# float32, but PyTorch rounds the weights too.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def expected_rows(case, inputs, n_rows=16):
    """Return some rows' numbers, and what they should hold, computed in float64."""
    arrays, mask = inputs
    rows = np.unique(np.linspace(0, case.L - 1, n_rows).astype(int))
    arrays = [x.astype(np.float64) for x in arrays]
    if case.kind == "layer":
        return rows, _textbook_layer(case, np.float64)(arrays[0], case.causal)[..., rows, :]
    q, k, v = arrays
    if case.dropout:
        # The pattern depends on the rows' positions, so here they must be the first ones.
        rows = np.arange(min(case.L, n_rows))
        q = q[..., rows, :]
        return rows, fastmha.reference.attention(q, k, v, dropout_p=case.dropout, rng=SEED)
    if mask is None:
        mask = visible(case, rows)
    elif mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return rows, textbook(q[..., rows, :], k, v, mask)


def _as_it_is(result):
    return result


def _fastmha_call(case, inputs, threads):
    if case.kind == "layer":
        layer = fastmha.MultiHeadAttention(case.H * case.D, case.H, dtype=array_dtype(case.dtype))
        return lambda: layer.forward(*inputs.arrays, case.causal), _as_it_is
    (q, k, v), mask = inputs
    if case.window:
        attention, options = fastmha.attention, {"causal": case.causal, "window": case.window}
        return lambda: attention(q, k, v, mask=mask, **options), _as_it_is
    sdpa, grouped = fastmha.scaled_dot_product_attention, case.G != case.H
    if mask is None and not case.dropout and not grouped:
        return lambda: sdpa(q, k, v, is_causal=case.causal), _as_it_is
    options = {"is_causal": case.causal, "enable_gqa": grouped}
    return lambda: sdpa(q, k, v, mask, case.dropout, rng=SEED, **options), _as_it_is


def textbook(q, k, v, mask=None, *, dropout=0.0, rng=None):
    """Attention as it is written in NumPy, with the scores of all queries and keys in memory.

    The mask is (L, S) where there are fewer key than query heads. Half types are computed in
    float32, for want of fast matrix products of their own.
    """
    dtype, (H, L, D), G = q.dtype, q.shape[-3:], k.shape[-3]
    if dtype.itemsize == 2:
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
    lead = q.shape[:-3]
    if G != H:
        q, k, v = q.reshape(*lead, G, H // G, L, D), k[..., None, :, :], v[..., None, :, :]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(D)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    if dropout:
        kept = rng.random(weights.shape, np.float32) >= dropout
        weights = np.where(kept, weights / (1 - dropout), 0)
    return (weights @ v).reshape(*lead, H, L, v.shape[-1]).astype(dtype, copy=False)


def _numpy_call(case, inputs, threads, seconds=math.inf, memory=2e9):
    scores = case.B * case.H * case.L * case.S
    size = 8 if case.dtype == "float64" else 4
    # Measured: some 20 ns a score of float32 for what comes between the products. Three arrays of
    # that size are alive at once.
    estimate = 5e-9 * size * scores + 2 * scores * (case.D + case.E) / 5e10
    if 3 * size * scores > memory:
        raise Skipped(f"would take more than {memory / 1e9:.0f} GB")
    if estimate > seconds:
        raise Skipped(f"would take more than about {seconds:g} s")
    if case.kind == "layer":
        layer = _textbook_layer(case, array_dtype(case.dtype))
        return lambda: layer(*inputs.arrays, case.causal), _as_it_is
    (q, k, v), mask = inputs
    mask = visible(case) if mask is None else mask
    options = {"dropout": case.dropout, "rng": np.random.default_rng(SEED)}
    return lambda: textbook(q, k, v, mask, **options), _as_it_is


def _textbook_layer(case, dtype):
    """The class from the textbook, or for float32 the same with nothing that makes it float64."""
    from fastmha.demo import TextbookAttention

    layer = TextbookAttention(case.H * case.D, case.H)
    if dtype == np.float64:
        return layer
    Wq, bq, Wk, bk, Wv, bv, Wo, bo = (
        getattr(layer, kind + name).astype(dtype) for name in "qkvo" for kind in "Wb"
    )

    def forward(x, causal):
        q, k, v = (layer._split_heads(x @ W + b) for W, b in ((Wq, bq), (Wk, bk), (Wv, bv)))
        mixed = textbook(q, k, v, np.tri(x.shape[1], dtype=bool) if causal else None)
        return mixed.swapaxes(1, 2).reshape(x.shape) @ Wo + bo

    return forward


def _torch_call(case, inputs, threads):
    try:
        import torch
    except ImportError:
        raise Skipped("PyTorch is not installed") from None

    def tensor(x):
        if x.dtype.name == "bfloat16":  # which only PyTorch's own view makes of NumPy's
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    def array(result):
        result = result[0] if isinstance(result, tuple) else result
        return (result.float() if result.itemsize == 2 else result).numpy()

    if case.kind == "layer":
        x = tensor(inputs.arrays[0])
        layer = _torch_layer(case, torch)
        options = {"need_weights": False}
        if case.causal:
            hidden = torch.ones(case.L, case.L, dtype=torch.bool).triu(1)
            options.update(attn_mask=hidden, is_causal=True)
        return lambda: layer(x, x, x, **options), array
    q, k, v = map(tensor, inputs.arrays)
    options = {"is_causal": case.causal, "dropout_p": case.dropout}
    if case.G != case.H:
        options["enable_gqa"] = True
    mask = inputs.mask
    if case.window:
        mask, options["is_causal"] = visible(case), False
    mask = None if mask is None else tensor(mask)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(q, k, v, attn_mask=mask, **options), array


def _torch_layer(case, torch):
    """PyTorch's layer with the weights of the textbook's."""
    from fastmha.demo import TextbookAttention

    source = TextbookAttention(case.H * case.D, case.H)
    dtype = getattr(torch, case.dtype)
    layer = torch.nn.MultiheadAttention(source.d_model, case.H, batch_first=True, dtype=dtype)
    stacked = np.concatenate([source.Wq.T, source.Wk.T, source.Wv.T])
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.from_numpy(stacked))
        layer.out_proj.weight.copy_(torch.from_numpy(source.Wo.T.copy()))
    return layer.eval()


def _onnxruntime_call(case, inputs, threads):
    if case.kind != "attention" or case.dtype != "float32" or case.G != case.H or case.D != case.E:
        raise Skipped("measured on plain float32 attention only")
    if case.mask or case.window or case.dropout or case.layout != "BHLD":
        raise Skipped("measured on plain float32 attention only")
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        raise Skipped("onnxruntime and onnx are not installed") from None

    def described(name, length, size):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, (case.B, length, size))

    node = helper.make_node(
        "MultiHeadAttention",
        ["q", "k", "v"],
        ["out"],
        domain="com.microsoft",
        num_heads=case.H,
        unidirectional=int(case.causal),
    )
    width = case.H * case.D
    graph = helper.make_graph(
        [node],
        "attention",
        [described(name, n, width) for name, n in (("q", case.L), ("k", case.S), ("v", case.S))],
        [described("out", case.L, width)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its waiting threads would spin for ever, at the cost of everybody else.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    # Heads side by side, the layout that it knows.
    feeds = {
        name: np.ascontiguousarray(x.swapaxes(1, 2)).reshape(case.B, -1, width)
        for name, x in zip("qkv", inputs.arrays, strict=True)
    }

    def array(result):
        return result[0].reshape(case.B, case.L, case.H, case.D).swapaxes(1, 2)

    return lambda: session.run(None, feeds), array


BUILDERS = {
    "fastmha": _fastmha_call,
    "numpy": _numpy_call,
    "torch": _torch_call,
    "onnxruntime": _onnxruntime_call,
}
