"""Prints a line for each of a fixed set of calls: its name and a hash of the result's bits.

Builds with fused multiply-add (AVX2, AVX-512, NEON) must print the same lines: run it on each, with
FASTMHA_ISA where a machine has several, and compare the outputs with `diff`. The inputs are exact
binary fractions, so that no mathematical library has a part in them. What NumPy computes for the
package is left out, for its bits depend on the processor: the sums of the sinks' gradient, the
products of the class's `backward`, the angles of `Rope`.
"""

import argparse
import hashlib
import sys

import numpy as np

import fastmha
from fastmha._execute import rotate

SEED = 20171


def fractions(shape, dtype, seed=SEED, bits=10):
    """Multiples of 1/512 between -2 and 2; bfloat16 rounds them, the same way everywhere."""
    rng = np.random.default_rng(seed)
    return (rng.integers(-(1 << bits), 1 << bits, shape) / 512.0).astype(dtype)


def digest(results):
    """A hash of arrays, NaNs of any payload being one."""
    total = hashlib.sha256()
    for x in results if isinstance(results, (tuple, list)) else [results]:
        if x is None:
            continue
        x = np.array(x, order="C")
        x[np.isnan(x)] = np.nan
        total.update(str((x.shape, x.dtype.name)).encode() + x.tobytes())
    return total.hexdigest()[:16]


def dtypes():
    yield from (np.dtype(name) for name in ("float64", "float32", "float16"))
    try:
        import ml_dtypes
    except ImportError:
        return
    yield np.dtype(ml_dtypes.bfloat16)


def qkv(dtype, B=2, H=4, G=2, L=70, S=203, D=40, E=23):
    shapes = (B, H, L, D), (B, G, S, D), (B, G, S, E)
    return [fractions(shape, dtype, SEED + n) for n, shape in enumerate(shapes)]


def attention_calls(dtype):
    q, k, v = qkv(dtype)
    B, H, L, S = 2, 4, 70, 203
    bias = fractions((H, L, S), np.float32, 7)
    bias[bias > 1.9] = -np.inf
    hidden = fractions((B, 1, L, S), np.float32, 8) > -1
    hidden[:, :, 3] = False
    huge = fractions((L, S), np.float64, 9) * 1e300
    unseen = [k.copy(), v.copy()]
    for x in unseen:
        x[:, :, ::7] = np.nan
    visible = np.arange(S) % 7 != 0
    options = {
        "plain": {},
        "causal": {"causal": True},
        "bottom-right": {"causal": "bottom-right"},
        "window": {"window": (11, 5)},
        "window-causal": {"window": (20, 0), "causal": "bottom-right"},
        "negative-scale": {"scale": -0.25},
        "large-scale": {"scale": 50.0},
        "softcap": {"softcap": 3.0},
        "softcap-small": {"softcap": 1e4},
        "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625]), "causal": "bottom-right"},
        "sinks": {"sinks": np.array([0.5, -1, 3, 40.0])},
        "lengths": {"key_lengths": [203, 77], "query_lengths": [70, 33], "causal": "bottom-right"},
        "bool-mask": {"mask": hidden},
        "float-mask": {"mask": bias},
        "huge-mask": {"mask": huge},
        "dropout": {"dropout_p": 0.3, "rng": 12345},
        "all": {
            "mask": bias, "causal": "bottom-right", "window": (90, 0), "softcap": 5.0,
            "alibi_slopes": np.ones(4), "sinks": np.zeros(4), "dropout_p": 0.1, "rng": 5,
        },
    }  # fmt: skip
    for name, chosen in options.items():
        yield name, lambda chosen=chosen: fastmha.attention(q, k, v, return_lse=True, **chosen)
    yield "unseen-nan", lambda: fastmha.attention(q, *unseen, mask=visible)
    yield "seen-nan", lambda: fastmha.attention(q, *unseen, causal=True)
    for name, chosen in list(options.items())[:-2]:
        chosen = {"rows": [0, 1, 69], "heads": [0, 3], **chosen}
        yield f"weights-{name}", lambda c=chosen: fastmha.attention_weights(q, k, **c)


def shape_calls(dtype):
    for L, S, D in [
        (1, 1, 1),
        (1, 500, 64),
        (3, 97, 5),
        (17, 96, 16),
        (64, 192, 64),
        (129, 65, 127),
    ]:
        q, k, v = qkv(dtype, L=L, S=S, D=D, E=D)
        yield f"shape-{L}-{S}-{D}", lambda a=(q, k, v): fastmha.attention(*a, return_lse=True)
    q, k, v = qkv(dtype, H=8, G=1, L=1, S=1000, D=64, E=64)
    yield "one-key-head", lambda: fastmha.attention(q, k, v, return_lse=True)
    x = fractions((5, 301), dtype, 4, bits=13)
    yield "softmax", lambda: fastmha.softmax(x)
    yield "softmax-first", lambda: fastmha.softmax(x, axis=0)


def decode_calls(dtype):
    """Few queries against long keys: few rows, keys across lanes, atoms dealt out to threads."""
    slopes, sinks = np.array([1, 0.5, 0.25, 0.125] * 2) / 64, np.array([0.5, -1, 3, 40.0] * 2)
    for G in (8, 2, 1):
        for L in (1, 2, 4):
            q, k, v = qkv(dtype, H=8, G=G, L=L, S=1003, D=64, E=48)
            for name, options in {
                "plain": {},
                "causal": {"causal": "bottom-right"},
                "window": {"window": (300, 0), "causal": "bottom-right"},
                "softcap": {"softcap": 3.0},
                "alibi": {"alibi_slopes": slopes, "causal": "bottom-right"},
                "sinks": {"sinks": sinks},
                "lengths": {"key_lengths": [1003, 401], "causal": "bottom-right"},
                "mask": {"mask": fractions((8, L, 1003), np.float32, 7)},
                "dropout": {"dropout_p": 0.3, "rng": 12345},
            }.items():
                for threads in (1, 3):

                    def decode(a=(q, k, v), options=options, threads=threads):
                        with fastmha.num_threads(threads):
                            return fastmha.attention(*a, return_lse=True, **options)

                    yield f"decode-{L}-of-8-over-{G}-{name}-threads-{threads}", decode


def merge_calls(dtype):
    q, k, v = qkv(dtype)

    def merged():
        halves = [slice(0, 96), slice(96, 203)]
        parts = [fastmha.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in halves]
        return fastmha.merge_attention(*zip(*parts, strict=True))

    yield "merge", merged


def varlen_calls(dtype):
    queries, keys = [0, 3, 3, 40, 70], [0, 97, 100, 102, 203]
    q, k, v = (x[0].swapaxes(0, 1) for x in qkv(dtype))
    grad = fractions((70, 4, 23), dtype, 30)
    for name, options in {
        "plain": {},
        "causal": {"causal": "bottom-right", "window": (50, 0), "softcap": 3.0},
    }.items():

        def packed(options=options):
            a = q, k, v
            out, lse = fastmha.attention_varlen(*a, queries, keys, return_lse=True, **options)
            back = fastmha.attention_varlen_backward(grad, *a, out, lse, queries, keys, **options)
            return [out, lse, *back]

        yield f"varlen-{name}", packed


def rotation_calls(dtype):
    """The kernel alone, with exact tables."""
    x = fractions((2, 4, 37, 40), dtype, 60)
    real = np.float64 if dtype == np.float64 else np.float32
    cos, sin = (fractions((2, 37, 15), real, n) / 2 for n in (61, 62))
    for interleaved in (True, False):
        yield f"rotation-{interleaved}", lambda pairs=interleaved: rotate(x, cos, sin, pairs)


def gradient_calls(dtype):
    q, k, v = qkv(dtype)
    grad = fractions((2, 4, 70, 23), dtype, 30)
    bias = fractions((4, 70, 203), np.float32, 7)
    for name, options in {
        "plain": {},
        "causal": {"causal": "bottom-right", "window": (90, 0)},
        "top-left": {"causal": True, "scale": -0.25},
        "softcap": {"softcap": 3.0, "sinks": np.zeros(4)},
        "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625]), "causal": True},
        "lengths": {"key_lengths": [203, 77], "query_lengths": [70, 33], "causal": "bottom-right"},
        "bool-mask": {"mask": bias > -1},
        "mask": {"mask": bias, "dropout_p": 0.2, "rng": 3},
        "broadcast-mask": {"mask": bias[:, :, :1]},
    }.items():
        for threads in (1, 3):

            def gradients(options=options, threads=threads):
                mask = options.get("mask")
                wanted = {"grad_mask": mask is not None and mask.dtype != bool}
                with fastmha.num_threads(threads):
                    out, lse = fastmha.attention(q, k, v, return_lse=True, **options)
                    return fastmha.attention_backward(grad, q, k, v, out, lse, **wanted, **options)

            yield f"gradients-{name}-threads-{threads}", gradients


def model_of(dtype, d_model=48, n_heads=4, n_kv_heads=2, **options):
    """An object of the class with exact weights and biases."""
    model = fastmha.MultiHeadAttention(d_model, n_heads, n_kv_heads=n_kv_heads, dtype=dtype, **options)
    for n, parameter in enumerate(model.parameters()):
        parameter[...] = fractions(parameter.shape, dtype, 40 + n) / 8
    return model


def class_calls(dtype):
    x, context = fractions((2, 37, 48), dtype, 50), fractions((2, 101, 48), dtype, 52)
    for name, options in {
        "class": {},
        "class-one-head-of-keys": {"n_kv_heads": 1, "bias": False},
        "class-window": {"window": (5, 0), "softcap": 3.0, "alibi": True},
    }.items():
        model = model_of(dtype, **options)
        yield name, lambda m=model: m.forward(x)
        yield f"{name}-causal", lambda m=model: m.forward(x, causal=True)
        yield f"{name}-attn", lambda m=model: (m.forward(x, causal=True), m.attn)
        yield f"{name}-context", lambda m=model: m.forward(x, context=context)
        for stored in STORED:

            def tokens(model=model, stored=stored):
                cache = fastmha.KVCache(2, len(model.Wk[0]) // model.d_k, model.d_k, dtype=stored)
                first = model.forward(x[:, :30], cache=cache)
                return [first, *(model.forward(x[:, n : n + 1], cache=cache) for n in range(30, 37))]

            yield f"{name}-token-by-token-{stored}", tokens
    wide = model_of(dtype, 320, 5, n_kv_heads=1)
    long = fractions((1, 150, 320), dtype, 53)
    yield "class-wide", lambda: wide.forward(long, causal=True)
    yield "class-wide-token", lambda: wide.forward(long[:, :1])


STORED = ["float64", "float32", "float16", "int8"]


def cache_calls(dtype):
    options = {
        "plain": {},
        "all": {
            "window": (150, 0), "softcap": 5.0, "alibi_slopes": np.ones(4), "sinks": np.zeros(4),
            "dropout_p": 0.1, "rng": 5,
        },
    }  # fmt: skip
    for stored in STORED:
        for L in (1, 5, 70):
            q, k, v = qkv(dtype, L=L)
            for name, chosen in options.items():

                def contiguous(a=(q, k, v), stored=stored, chosen=chosen):
                    q, k, v = a
                    cache = fastmha.KVCache(2, 2, 40, 23, dtype=stored)
                    cache.append(k[:, :, :100], v[:, :, :100])
                    cache.append(k[:, :, 100:], v[:, :, 100:], [103, 70])
                    return [*cache.attend(q, return_lse=True, **chosen), cache.weights(q)]

                def paged(a=(q, k, v), stored=stored, chosen=chosen):
                    q, k, v = a
                    cache = fastmha.PagedKVCache(40, 16, 2, 40, 23, dtype=stored)
                    first, second = cache.add_sequence(), cache.add_sequence()
                    cache.append([first], k[:1], v[:1])
                    cache.append([second], k[1:, :, :90], v[1:, :, :90])
                    fork = cache.fork(second)
                    cache.append([second, fork], k[:, :, 90:], v[:, :, 90:])
                    return cache.attend([first, second, fork], q[[0, 1, 0]], return_lse=True, **chosen)

                yield f"cache-{stored}-{L}-{name}", contiguous
                yield f"paged-{stored}-{L}-{name}", paged

        def ring(stored=stored):
            cache = fastmha.KVCache(2, 2, 40, 23, window=50, dtype=stored)
            q, k, v = qkv(dtype, L=203)
            found = []
            for start, end in [(0, 70), (70, 71), (71, 140), (140, 143), (143, 203)]:
                cut = np.s_[:, :, start:end]
                cache.append(k[cut], v[cut])
                found.append(cache.attend(q[cut]))
            return found

        yield f"ring-{stored}", ring


GROUPS = [
    attention_calls, shape_calls, decode_calls, merge_calls, varlen_calls, rotation_calls, gradient_calls,
    class_calls, cache_calls,
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", default="", help="calls whose name has this in it")
    chosen = parser.parse_args().only
    record = fastmha.show_config("dicts")
    print(f"{record['isa']}, fused: {record['fused']}", file=sys.stderr)
    for dtype in dtypes():
        for calls in GROUPS:
            for name, call in calls(dtype):
                if chosen in f"{dtype.name} {name}":
                    print(f"{dtype.name} {name} {digest(call())}")


if __name__ == "__main__":
    main()
