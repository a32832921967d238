"""The most memory that a call takes beyond its inputs, against the length: measured, not computed."""

import tracemalloc

import numpy as np
from _drawing import BLUE, ORANGE, panels, save

from fastmha import reference, scaled_dot_product_attention

LENGTHS = 2 ** np.arange(6, 12)


def draw(folder):
    rng = np.random.default_rng(0)
    peaks = {plain_attention: [], scaled_dot_product_attention: []}
    for length in LENGTHS:
        q = rng.normal(size=(1, 2, length, 64)).astype(np.float32)
        expected = reference.scaled_dot_product_attention(q, q, q)
        for compute, values in peaks.items():
            tracemalloc.start()
            out = compute(q, q, q)
            values.append(tracemalloc.get_traced_memory()[1] / 2**20)
            tracemalloc.stop()
            np.testing.assert_allclose(out, expected, atol=1e-5)
    figure, (axes,) = panels(1, size=(5.5, 3))
    plain, fused = peaks.values()
    axes.plot(LENGTHS, plain, "o-", color=ORANGE, label="softmax(q @ k.T / √d_k) @ v")
    axes.plot(LENGTHS, fused, "o-", color=BLUE, label="scaled_dot_product_attention")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xlabel("L = S   (B = 1, H = 2, D = 64, float32)")
    axes.set_ylabel("MB")
    axes.legend(frameon=False)
    save(figure, folder, "fused")


def plain_attention(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(q.shape[-1]))
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ v
