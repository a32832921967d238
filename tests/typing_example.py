"""A program that uses every public name: `mypy --strict` must find nothing in it, and it must run."""

from __future__ import annotations

import io
from typing import Any, Literal, assert_type

import numpy as np
from numpy.typing import NDArray

import fastmha
from fastmha import __main__ as commands
from fastmha import bench, demo, reference, rope, textbook, varlen, weights

Array = NDArray[Any]


class Exported:
    """What is no array and knows DLPack alone."""

    def __init__(self, x: NDArray[np.float64]) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> object:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()


def tell(step: str, shape: tuple[int, ...]) -> None:
    assert step and shape


def functions(x: NDArray[np.float64]) -> None:
    assert_type(fastmha.scaled_dot_product_attention(x, x, x, is_causal=True, scale=np.float32(1)), Array)
    assert_type(fastmha.scaled_dot_product_attention(x, x, x, None, 0.5, rng=np.random.default_rng(0)), Array)
    assert_type(fastmha.sdpa([[1.0, 2.0]], [[3.0, 4.0]], [[5.0]], [[True]]), Array)
    assert_type(fastmha.sdpa(Exported(x), Exported(x), Exported(x)), Array)
    assert_type(fastmha.softmax(x, axis=0), Array)
    eye = np.eye(4)
    assert_type(fastmha.multi_head_attention(eye, eye, eye, eye, eye, h=2, trace=tell), Array)
    assert_type(fastmha.attention_weights(x, x, heads=[0], rows=slice(1, 3), causal="bottom-right"), Array)
    assert_type(fastmha.attention_weights(x, x, heads=np.arange(1), rows=-1, layout="BLHD"), Array)


def options(x: NDArray[np.float64], asked: bool, layout: Literal["BHLD", "BLHD"]) -> None:
    mask = np.zeros((5, 5))
    out, lse = fastmha.attention(
        x, x, x, mask=mask, causal="top-left", window=(2, 0), scale=0.5, softcap=30,
        alibi_slopes=fastmha.alibi_slopes(2), sinks=[0.0, 1.0], key_lengths=[5], query_lengths=[4],
        dropout_p=0.1, rng=1, layout="BHLD", return_lse=True,
    )
    assert_type(out, Array)
    assert_type(lse, Array)
    assert_type(fastmha.attention(x, x, x, layout=layout, out=np.empty_like(x)), Array)
    assert_type(fastmha.attention(x, x, x, return_lse=asked), Array | tuple[Array, Array])
    assert_type(fastmha.merge_attention([out, out], [lse, lse]), tuple[Array, Array])
    assert_type(fastmha.merge_attention(np.stack([out]), np.stack([lse])), tuple[Array, Array])


def gradients(x: NDArray[np.float64], asked: bool) -> None:
    mask, sinks = np.zeros((5, 5)), np.zeros(2)
    out, lse = fastmha.attention(x, x, x, mask=mask, sinks=sinks, return_lse=True)
    backward = fastmha.attention_backward
    three = backward(out, x, x, x, out, lse, mask=mask, sinks=sinks)
    assert_type(three, tuple[Array, Array, Array])
    four = backward(out, x, x, x, out, lse, mask=mask, sinks=sinks, grad_mask=True)
    assert_type(four, tuple[Array, Array, Array, Array])
    four = backward(out, x, x, x, out, lse, mask=mask, sinks=sinks, grad_sinks=True)
    assert_type(four, tuple[Array, Array, Array, Array])
    five = backward(out, x, x, x, out, lse, mask=mask, sinks=sinks, grad_mask=True, grad_sinks=True)
    assert_type(five, tuple[Array, Array, Array, Array, Array])
    some = backward(out, x, x, x, out, lse, mask=mask, sinks=sinks, grad_mask=asked)
    assert_type(some, tuple[Array, ...])
    assert (len(three), len(some)) == (3, 4)


def packed(x: NDArray[np.float64], asked: bool) -> None:
    tokens, offsets, sinks = x[0].swapaxes(0, 1), np.array([0, 2, 5]), np.zeros(2)
    assert_type(fastmha.attention_varlen(tokens, tokens, tokens, offsets), Array)
    out, lse = fastmha.attention_varlen(
        tokens, tokens, tokens, offsets, offsets, causal=True, sinks=sinks, return_lse=True
    )
    assert_type(varlen.attention_varlen(tokens, tokens, tokens, offsets, out=out.copy()), Array)
    backward = fastmha.attention_varlen_backward
    arguments = (out, tokens, tokens, tokens, out, lse, offsets)
    assert_type(backward(*arguments, sinks=sinks, causal=True), tuple[Array, Array, Array])
    four = backward(*arguments, sinks=sinks, causal=True, grad_sinks=True)
    assert_type(four, tuple[Array, Array, Array, Array])
    assert_type(backward(*arguments, sinks=sinks, causal=True, grad_sinks=asked), tuple[Array, ...])


def layers() -> None:
    turn = fastmha.Rope(4, interleaved=False, base=500_000, scaling={"type": "linear", "factor": 2.0})
    layer = fastmha.MultiHeadAttention(
        8, 2, seed=1, n_kv_heads=1, bias=True, dtype="float32", dropout=0.1, rope=turn, window=(3, 0),
        softcap=20.0, alibi=True,
    )
    x = np.ones((1, 3, 8), np.int64)
    assert_type(layer(x, causal=True, mask=np.ones((3, 3), np.bool_), lengths=[2]), Array)
    assert_type(layer.forward(x, context=x, context_lengths=[2], training=True, rng=2), Array)
    grad_x, grad_context = layer.backward(x)
    assert grad_x.shape == grad_context.shape == x.shape
    assert_type(layer.attn, Array)
    assert_type(layer.grads, list[Array])
    assert_type(layer.parameters(), list[Array])
    assert_type(layer.Wq, Array)
    assert_type(layer.bq, Array | None)
    assert_type(layer.d_model + layer.n_heads + layer.n_kv_heads + layer.d_k, int)
    assert_type(layer.dtype, np.dtype[Any])
    layer.Wq = layer.Wq * 2

    class Own(fastmha.MultiHeadAttention):
        def _split_heads(self, x: Array) -> Array:
            return super()._split_heads(x)

    state = fastmha.MultiHeadAttention(8, 2).to_torch()
    assert_type(state, dict[str, Array])
    assert_type(Own.from_torch(state, 2, dtype=np.float32), Own)
    fused = {"c_attn.weight": np.ones((24, 8)), "c_proj.weight": np.eye(8)}
    assert_type(Own.from_nanogpt(fused, 2), Own)
    assert_type(Own.from_gpt2({**fused, "c_attn.weight": np.ones((8, 24))}, 2, strict=False), Own)
    names = ("self.query", "self.key", "self.value", "output.dense")
    assert_type(Own.from_bert({f"a.{name}.weight": np.eye(8) for name in names}, 2, prefix="a."), Own)
    llama = {f"{name}_proj.weight": np.eye(8) for name in "qkvo"}
    assert_type(Own.from_llama(llama, 2, 2, rope=turn), Own)
    found = weights.from_torch(state)
    assert_type(found, weights.Weights)
    assert_type(found.bq, Array | None)
    assert_type(weights.to_torch(found), dict[str, Array])
    assert_type(weights.from_llama(llama, 2, 2).Wq, Array)


def caches(asked: bool) -> None:
    layer = fastmha.MultiHeadAttention(8, 2, n_kv_heads=1)
    held = layer.make_cache(1, capacity=9)
    assert_type(held, fastmha.KVCache)
    assert_type(layer(np.ones((1, 3, 8)), cache=held, positions=[0, 1, 2]), Array)
    held.truncate(2)
    held.truncate([1])
    assert_type(held.lengths, NDArray[np.int64])
    held.reset()
    held = fastmha.KVCache(1, 2, 4, 3, window=5, dtype="int8")
    q = np.ones((1, 4, 2, 4))
    held.append(q[:, :2], q[:, :2, :, :3], lengths=[2])
    assert_type(held.attend(q), Array)
    assert_type(held.attend(q, [1], sinks=np.zeros(4), return_lse=True), tuple[Array, Array])
    assert_type(held.attend(q, return_lse=asked), Array | tuple[Array, Array])
    assert_type(held.weights(q, scale=2), Array)
    assert_type(held.nbytes + held.generation, int)

    paged = fastmha.PagedKVCache(8, 2, 2, 4, dtype=np.float16)
    first = paged.add_sequence()
    paged.append([first], q[:, :2], q[:, :2])
    second = paged.fork(first)
    packed = q[0].swapaxes(0, 1)
    paged.append((second,), packed[:, :2], packed[:, :2], cu_seqlens=np.array([0, 2]))
    assert_type(paged.attend([second], q), Array)
    assert_type(paged.attend([first], packed, cu_seqlens=[0, 2], return_lse=True), tuple[Array, Array])
    assert_type(paged.attend([first], q, return_lse=asked), Array | tuple[Array, Array])
    assert_type(paged.length(second) + paged.free_pages + paged.nbytes, int)
    paged.free(first)


def positions(x: NDArray[np.float64]) -> None:
    turn = rope.Rope(4, interleaved=True)
    turned = turn(x, [0, 1, 2, 3, 4])
    assert_type(turned, Array)
    assert_type(turn.inverse(turned, np.arange(5)), Array)
    assert_type(turn.backward(turned, range(5)), Array)
    assert_type(turn.scaling, dict[str, Any] | None)
    assert_type(rope.alibi_slopes(3), NDArray[np.float64])


def threads_and_build() -> None:
    before = fastmha.get_num_threads()
    assert_type(before, int)
    fastmha.set_num_threads(before)
    with fastmha.num_threads(1) as nothing:
        assert_type(nothing, None)
    config = fastmha.show_config(mode="dicts")
    assert_type(config, dict[str, Any])
    assert_type(config["version"] == fastmha.__version__, Any)


def slow_twin(x: NDArray[np.float64]) -> None:
    out, lse = reference.attention(x, x, x, return_lse=True)
    assert_type(reference.attention_backward(out, x, x, x, out, lse), tuple[Array, Array, Array])
    assert_type(reference.softmax([1.0, 2.0]), Array)
    layer = reference.MultiHeadAttention(8, 2, alibi=True)
    assert_type(layer(np.ones((1, 3, 8))), Array)
    assert_type(layer.attn, Array)
    assert_type(reference.dropout_mask(0, 0.5, [0], 1, range(2), 8), NDArray[np.bool_])
    assert_type(reference.philox4x32((0, 0, 0, 0), (0, 0))[0], NDArray[np.uint64])
    assert_type(textbook.softmax(x), Array)


def measuring() -> None:
    assert_type(bench.SETTINGS.rounds + bench.QUICK.rounds, int)
    cases = bench.chosen_cases(["tiny"], quick=True)
    bench.list_cases(cases, io.StringIO())
    assert_type(cases[0].name, str)
    assert_type(bench.versions()["numpy"], str)
    assert_type(bench.cpu_model(), str)
    textbook = demo.TextbookAttention(8, 2)
    assert_type(textbook(np.ones((1, 3, 8)), causal=True), Array)
    assert_type(demo.attention_map(np.ones((1, 2, 3, 4)), np.ones((1, 1, 3, 4)), 1), Array)
    comparison = demo.compare_at(4, 8, 2, rounds=1)
    assert_type(comparison.fastmha_ms, float)


def command() -> int:
    return commands.main(["bench", "--list", "--case", "tiny-1x1x1"])


def refused(x: NDArray[np.float64]) -> None:
    """Never called: the checker must find a mistake in each line."""
    fastmha.sdpa(x, x)  # type: ignore[call-arg]
    fastmha.sdpa(x, x, object())  # type: ignore[arg-type]
    fastmha.attention(x, x, x, causal="left")  # type: ignore[call-overload]
    fastmha.attention(x, x, x, layout="LBHD")  # type: ignore[call-overload]
    fastmha.attention(x, x, x, x)  # type: ignore[call-overload]
    fastmha.show_config(mode="json")  # type: ignore[call-overload]
    fastmha.Rope(4)  # type: ignore[call-arg]
    fastmha.MultiHeadAttention(8, 2, n_heads_kv=1)  # type: ignore[call-arg]


def main() -> None:
    x = np.random.default_rng(0).normal(size=(1, 2, 5, 4))
    functions(x)
    options(x, asked=True, layout="BLHD")
    gradients(x, asked=True)
    packed(x, asked=False)
    layers()
    caches(asked=True)
    positions(x)
    threads_and_build()
    slow_twin(x)
    measuring()
    assert_type(command(), int)


if __name__ == "__main__":
    main()
