"""Which keys a query sees under each option, read off the weights that the package computes."""

import matplotlib.pyplot as plt
import numpy as np
from _drawing import save, squares

from fastmha import attention_weights

L, S = 4, 7
OPTIONS = {
    "causal=True": {"causal": True},
    'causal="bottom-right"': {"causal": "bottom-right"},
    "window=(1, 1)": {"window": (1, 1)},
    'causal="bottom-right", window=(2, 0)': {"causal": "bottom-right", "window": (2, 0)},
    "key_lengths=[5]": {"key_lengths": [5]},
    'key_lengths=[5], causal="bottom-right"': {"key_lengths": [5], "causal": "bottom-right"},
}


def draw(folder):
    q, k = np.zeros((1, 1, L, 2)), np.zeros((1, 1, S, 2))
    figure, axes = plt.subplots(2, 3, figsize=(10, 4), layout="constrained")
    for each, (title, options) in zip(axes.flat, OPTIONS.items(), strict=True):
        weights = attention_weights(q, k, **options)[0, 0]
        seen = np.where(weights > 0, weights, np.nan)
        squares(each, seen, title, rows=range(L), columns=range(S), color="weights")
    save(figure, folder, "visible-keys")
