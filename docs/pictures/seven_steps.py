"""A picture for each of the seven steps, from the arrays that the page computes."""

import numpy as np
from _drawing import BLUE, GREEN, ORANGE, RED, frame, panels, save, shape_of, squares

from fastmha import MultiHeadAttention, softmax

WORDS = "the cat sat on the mat".split()
HEAD = 1
COLORS = (BLUE, ORANGE, GREEN, RED)  # of the heads
PAIRS = {"rows": WORDS, "columns": WORDS, "numbers": True}  # of a query and a key


def draw(folder):
    table = np.random.default_rng(1).normal(size=(5, 16))
    x = table[[0, 1, 2, 3, 0, 4]][None]
    layer = MultiHeadAttention(d_model=16, n_heads=4, seed=0)

    q, k, v = x @ layer.Wq + layer.bq, x @ layer.Wk + layer.bk, x @ layer.Wv + layer.bv
    _project(folder, x, q, k, v)
    Q, K, V = (layer._split_heads(each) for each in (q, k, v))
    _split(folder, q, Q)
    scores = Q @ K.swapaxes(-1, -2) / np.sqrt(layer.d_k)
    limit = np.abs(scores).max()
    _score(folder, Q, K, scores, limit)
    masked = np.where(np.tri(len(WORDS), dtype=bool), scores, -np.inf)
    _mask(folder, scores, masked, limit)
    weights = softmax(masked)
    _softmax(folder, masked, weights, limit)
    heads = weights @ V
    _sum(folder, weights, V, heads)
    merged = heads.swapaxes(1, 2).reshape(x.shape)
    _merge(folder, heads, merged, merged @ layer.Wo + layer.bo)


def _project(folder, x, q, k, v):
    figure, axes = panels(1, 1, 1, 1, size=(11, 1.9))
    squares(axes[0], x[0], shape_of("x", x), rows=WORDS)
    for each, symbol, array in zip(axes[1:], "qkv", (q, k, v), strict=True):
        squares(each, array[0], shape_of(f"{symbol} = x W{symbol} + b{symbol}", array))
    save(figure, folder, "step-1-project")


def _split(folder, q, Q):
    figure, axes = panels(4, 1.4, 1.4, 1.4, 1.4, size=(10, 1.9))
    limit = np.abs(q).max()
    squares(axes[0], q[0], shape_of("q", q), rows=WORDS, limit=limit)
    for h, color in enumerate(COLORS):
        frame(axes[0], 4 * h, 4 * h + 4, len(WORDS), color)
        squares(axes[h + 1], Q[0, h], shape_of(f"Q[:, {h}]", Q[:, h]), limit=limit)
        axes[h + 1].title.set_color(color)
    save(figure, folder, "step-2-split")


def _score(folder, Q, K, scores, limit):
    figure, axes = panels(1, 1.3, 1.5, size=(9, 2.6))
    Q, K, scores = Q[0, HEAD], K[0, HEAD].T, scores[0, HEAD]
    squares(axes[0], Q, shape_of(f"Q[0, {HEAD}]", Q), rows=WORDS)
    squares(axes[1], K, shape_of(f"K[0, {HEAD}].T", K), columns=WORDS)
    squares(axes[2], scores, shape_of(f"scores[0, {HEAD}] = Q K.T / √4 ", scores), limit=limit, **PAIRS)
    save(figure, folder, "step-3-scores")


def _mask(folder, scores, masked, limit):
    figure, axes = panels(1, 1, size=(7, 2.8))
    squares(axes[0], scores[0, HEAD], f"scores[0, {HEAD}]", limit=limit, **PAIRS)
    squares(axes[1], masked[0, HEAD], f"masked[0, {HEAD}]", limit=limit, **PAIRS)
    save(figure, folder, "step-4-mask")


def _softmax(folder, masked, weights, limit):
    figure, axes = panels(1, 1, size=(7, 2.8))
    squares(axes[0], masked[0, HEAD], f"masked[0, {HEAD}]", limit=limit, **PAIRS)
    squares(axes[1], weights[0, HEAD], f"weights[0, {HEAD}]    Σ = 1 →", color="weights", **PAIRS)
    save(figure, folder, "step-5-softmax")


def _sum(folder, weights, V, heads):
    figure, axes = panels(1.5, 1, 1, size=(9, 2.6))
    weights, V, heads = weights[0, HEAD], V[0, HEAD], heads[0, HEAD]
    limit = np.abs(V).max()
    squares(axes[0], weights, shape_of(f"weights[0, {HEAD}]", weights), color="weights", **PAIRS)
    squares(axes[1], V, shape_of(f"V[0, {HEAD}]", V), rows=WORDS, limit=limit)
    squares(axes[2], heads, shape_of(f"heads[0, {HEAD}]", heads), rows=WORDS, limit=limit)
    save(figure, folder, "step-6-sum")


def _merge(folder, heads, merged, out):
    figure, axes = panels(1.4, 1.4, 1.4, 1.4, 4, 4, size=(12, 1.9))
    limit = np.abs(heads).max()
    for h, color in enumerate(COLORS):
        squares(axes[h], heads[0, h], f"heads[0, {h}]", limit=limit, rows=() if h else WORDS)
        axes[h].title.set_color(color)
        frame(axes[4], 4 * h, 4 * h + 4, len(WORDS), color)
    squares(axes[4], merged[0], shape_of("merged", merged), limit=limit)
    squares(axes[5], out[0], shape_of("out = merged Wo + bo", out))
    save(figure, folder, "step-7-merge")
