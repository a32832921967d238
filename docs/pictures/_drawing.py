"""How all pictures look, and how arrays become coloured squares.

Labels are symbols, shapes and tokens, never sentences: pages of every language show the same pictures.
"""

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

plt.rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "fastmha",  # the same file from the same arrays
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "savefig.facecolor": "white",
    }
)
BLUE, ORANGE, GREEN, RED = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030"
HIDDEN = "#d9d9d9"


def panels(*widths, size):
    """A figure of panels side by side, so wide relative to one another."""
    figure, axes = plt.subplots(1, len(widths), figsize=size, layout="constrained", width_ratios=widths)
    return figure, np.atleast_1d(axes)


def save(figure, folder, name):
    """Write a figure as SVG, without the date, and forget it."""
    figure.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def shape_of(symbol, array):
    """A title: the symbol with its shape."""
    return f"{symbol} {tuple(array.shape)}"


def frame(axes, first, last, height, color):
    """Draw a frame around the columns first ... last - 1 of a matrix."""
    size = (last - first - 0.16, height - 0.1)
    axes.add_patch(Rectangle((first + 0.08, 0.05), *size, fill=False, edgecolor=color, linewidth=2))


def squares(axes, array, title, *, rows=(), columns=(), limit=None, color=None, numbers=False):
    """Draw a matrix: blue for weights from 0 to 1, or red and blue about 0; -inf is grey."""
    weights = color == "weights"
    limit = limit or (1 if weights else np.abs(array[np.isfinite(array)]).max())
    shown = np.ma.masked_invalid(array)
    axes.set_facecolor(HIDDEN)
    axes.pcolormesh(
        shown,
        cmap="Blues" if weights else "RdBu_r",
        vmin=0 if weights else -limit,
        vmax=limit,
        edgecolors="white",
        linewidth=0.6,
    )
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_title(title)
    axes.tick_params(length=0)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=60, ha="right")
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if numbers:
        for (i, j), x in np.ndenumerate(array):
            text = f"{x:.2f}" if np.isfinite(x) else "-∞"
            dark = np.isfinite(x) and abs(x) > 0.6 * limit
            place = {"ha": "center", "va": "center", "fontsize": 6}
            axes.text(j + 0.5, i + 0.5, text, color="white" if dark else "black", **place)
