"""What dividing by sqrt(d_k) does to the spread of the scores, and to the softmax of 64 of them."""

import numpy as np
from _drawing import BLUE, ORANGE, panels, save

from fastmha import softmax

SIZES = 2 ** np.arange(2, 11)


def draw(folder):
    rng = np.random.default_rng(0)
    spread, largest = {False: [], True: []}, {False: [], True: []}
    for d_k in SIZES:
        q, k = rng.normal(size=(2, 512, d_k))
        scores = q @ k[:64].T
        for scaled in (False, True):
            s = scores / np.sqrt(d_k) if scaled else scores
            spread[scaled].append(s.std())
            largest[scaled].append(softmax(s).max(axis=-1).mean())
    figure, axes = panels(1, 1, size=(8, 2.8))
    for each, values, title in (
        (axes[0], spread, "std(scores)"),
        (axes[1], largest, "mean(max(softmax(scores)))"),
    ):
        each.plot(SIZES, values[False], "o-", color=ORANGE, label="q · k")
        each.plot(SIZES, values[True], "o-", color=BLUE, label="q · k / √d_k")
        each.set_xscale("log", base=2)
        each.set_xlabel("d_k")
        each.set_title(title)
        each.legend(frameon=False)
    axes[0].set_yscale("log", base=2)
    axes[1].set_ylim(0, 1)
    save(figure, folder, "scaling")
