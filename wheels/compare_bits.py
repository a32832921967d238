"""Prints a line for each of a fixed set of calls: its name and a hash of the result's bits.

Builds with fused multiply-add (AVX2, AVX-512, NEON) must print the same lines: run it on each, with
FASTMHA_ISA where a machine has several, and compare the outputs with `diff`. The inputs are exact
binary fractions, so that no mathematical library has a part in them.
"""

import argparse
import hashlib
import sys

import numpy as np

import fastmha

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


def gradient_calls(dtype):
    q, k, v = qkv(dtype)
    grad = fractions((2, 4, 70, 23), dtype, 30)
    bias = fractions((4, 70, 203), np.float32, 7)
    for name, options in {
        "plain": {},
        "causal": {"causal": "bottom-right", "window": (90, 0)},
        "softcap": {"softcap": 3.0, "sinks": np.zeros(4)},
        "mask": {"mask": bias, "dropout_p": 0.2, "rng": 3},
    }.items():

        def gradients(options=options):
            out, lse = fastmha.attention(q, k, v, return_lse=True, **options)
            wanted = {"grad_mask": "mask" in options, "grad_sinks": "sinks" in options}
            return fastmha.attention_backward(grad, q, k, v, out, lse, **wanted, **options)

        yield f"gradients-{name}", gradients


def class_calls(dtype):
    model = fastmha.MultiHeadAttention(48, 4, n_kv_heads=2, dtype=dtype)
    for n, name in enumerate(("Wq", "Wk", "Wv", "Wo")):
        weight = getattr(model, name)
        weight[...] = fractions(weight.shape, dtype, 40 + n) / 8
    x = fractions((2, 37, 48), dtype, 50)
    yield "class", lambda: model.forward(x)
    yield "class-causal", lambda: model.forward(x, causal=True)
    yield "class-attn", lambda: (model.forward(x, causal=True), model.attn)

    def backward():
        model.forward(x, causal=True, training=True)
        return [model.backward(fractions(x.shape, dtype, 51)), *model.grads]

    yield "class-backward", backward


def cache_calls(dtype):
    for stored in (np.float32, np.float16, "int8"):

        def decode(stored=stored):
            cache = fastmha.KVCache(2, 2, 40, 23, dtype=stored)
            q, k, v = qkv(dtype, L=5)
            cache.append(k, v)
            return cache.attend(q)

        yield f"cache-{np.dtype(stored).name}", decode


GROUPS = [
    # what it needs of the package, the calls
    ("attention", attention_calls),
    ("attention", shape_calls),
    ("attention_backward", gradient_calls),
    ("MultiHeadAttention", class_calls),
    ("KVCache", cache_calls),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", default="", help="calls whose name has this in it")
    chosen = parser.parse_args().only
    record = fastmha.show_config("dicts")
    print(f"{record['isa']}, fused: {record['fused']}", file=sys.stderr)
    for dtype in dtypes():
        for needed, calls in GROUPS:
            if not hasattr(fastmha, needed):
                continue
            for name, call in calls(dtype):
                if chosen in f"{dtype.name} {name}":
                    print(f"{dtype.name} {name} {digest(call())}")


if __name__ == "__main__":
    main()
