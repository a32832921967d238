"""The same causal mask after the softmax and before it: which rows still sum to 1."""

import numpy as np
from _drawing import panels, save, squares

from fastmha import softmax


def draw(folder):
    scores = np.random.default_rng(0).normal(size=(6, 6))
    visible = np.tri(6, dtype=bool)
    after = np.where(visible, softmax(scores), 0)
    before = softmax(np.where(visible, scores, -np.inf))
    figure, axes = panels(1, 1, size=(7, 2.9))
    for each, weights, title in (
        (axes[0], after, "where(visible, softmax(scores), 0)"),
        (axes[1], before, "softmax(where(visible, scores, -∞))"),
    ):
        sums = [f"Σ = {total:.2f}" for total in weights.sum(axis=-1)]
        squares(each, weights, title, rows=sums, color="weights", numbers=True)
    save(figure, folder, "masking")
