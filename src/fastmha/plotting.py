"""Pictures, with matplotlib (extra ``plot``): attention maps, entropies, throughput against length.

Cells that may not be seen have a colour of their own, which no weight has, however small. Long maps are
pooled: a cell then holds the weight that its queries give to its keys, a mean over the queries and a
sum over the keys, and the colours tell small weights apart. The weights are computed a few rows at a
time; no L x S array is made.
"""

import math
import operator
import statistics

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ._checks import chosen
from .functional import attention_weights

__all__ = ["plot_attention", "plot_entropy", "plot_heads", "plot_throughput", "plot_weights"]

HIDDEN = "#dedede"
COLOURS = colormaps["viridis"].with_extremes(bad=HIDDEN)
CELLS = 256  # along an axis, at most, before a map is pooled
LABELS = 64  # along an axis, at most, before some are left out
ROOM = 1 << 20  # weights computed at a time
SIZE = (6.4, 5.6)

# Title, colour and width of a competitor's line.
LINES = {
    "fastmha": ("fastmha", "#c1272d", 2.6),
    "torch": ("PyTorch", "#0067a5", 1.6),
    "onnxruntime": ("ONNX Runtime", "#5b7f3a", 1.6),
    "numpy": ("NumPy", "#7a7a7a", 1.6),
}


def plot_attention(
    query, key, *, head=0, member=0, rows=None, tokens=None, key_tokens=None, ax=None, **options
):
    """Draw where one head looks: a row for each query, a column for each key.

    Parameters
    ----------
    query, key : (B, H, L, D) and (B or 1, G, S, D) arrays
        As `fastmha.attention` takes them.
    head, member : int
        Which query head, of which member of the batch.
    rows : int, slice or sequence of int, optional
        Which queries; None: all.
    tokens : sequence of str, optional
        Labels of the L queries.
    key_tokens : sequence of str, optional
        Labels of the S keys; `tokens` by default, where L is S.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a figure of pyplot's by default.
    **options
        Those of `fastmha.attention_weights`: masks, causality, scale and so on.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    TypeError, ValueError
        As `fastmha.attention_weights`; ValueError for a wrong number of labels.

    Examples
    --------
    >>> import numpy as np
    >>> from matplotlib.figure import Figure
    >>> from fastmha.plotting import plot_attention
    >>> q = k = np.random.default_rng(0).normal(size=(1, 2, 6, 8))
    >>> ax = Figure(layout="constrained").subplots()
    >>> plot_attention(q, k, tokens=list("abcdef"), causal=True, ax=ax).get_xlabel()
    'key'
    """
    call = Call(query, key, member, rows, options)
    tokens, key_tokens = labels(tokens, key_tokens, call.L, call.S)
    (head,) = call.chosen(operator.index(head))
    weights = call.map(head)
    ax = new_axes(1, 1, SIZE)[0, 0] if ax is None else ax
    scale(draw(ax, weights, call.rows, call.S, tokens, key_tokens), ax, len(call.rows), call.S)
    return ax


def plot_heads(
    query, key, *, heads=None, member=0, rows=None, tokens=None, key_tokens=None, columns=None, **options
):
    """Draw the maps of several heads in a grid, on one scale of colours.

    Parameters
    ----------
    query, key, member, rows, tokens, key_tokens, **options
        As in `plot_attention`. Labels are drawn along the edges of the grid.
    heads : int, slice or sequence of int, optional
        Which heads; None: all.
    columns : int, optional
        Of the grid; up to 8 by default.

    Returns
    -------
    array of matplotlib.axes.Axes
        One for each head, in a new figure of pyplot's.

    Raises
    ------
    TypeError, ValueError
        As `plot_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from matplotlib import pyplot
    >>> from fastmha.plotting import plot_heads
    >>> q = k = np.random.default_rng(0).normal(size=(1, 6, 5, 8))
    >>> axes = plot_heads(q, k, heads=[0, 3], causal=True)
    >>> [ax.get_title() for ax in axes]
    ['head 0', 'head 3']
    >>> pyplot.close(axes[0].figure)
    """
    call = Call(query, key, member, rows, options)
    tokens, key_tokens = labels(tokens, key_tokens, call.L, call.S)
    heads = call.chosen(heads)
    maps = [call.map(head) for head in heads]
    norm = colour_norm(max(map(top, maps), default=1), call.S)
    columns = min(columns or min(8, math.ceil(math.sqrt(2 * len(heads)))), len(heads))
    n_rows = math.ceil(len(heads) / columns)
    grid = new_axes(n_rows, columns, (1.6 * columns + 1.6, 1.7 * n_rows + 0.9)).ravel()
    axes = grid[: len(heads)]
    for ax in grid[len(heads) :]:
        ax.remove()
    for i, (ax, head, weights) in enumerate(zip(axes, heads, maps, strict=True)):
        image = draw(ax, weights, call.rows, call.S, tokens, key_tokens, norm, LABELS // 4)
        ax.set_title(f"head {head}", fontsize=8, pad=3)
        ax.set(xlabel="", ylabel="")
        ax.tick_params(labelleft=i % columns == 0, labelbottom=i + columns >= len(heads))
    figure = axes[0].figure
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    scale(image, list(axes), len(call.rows), call.S)
    return axes


def plot_weights(weights, *, visible=None, tokens=None, key_tokens=None, ax=None):
    """Draw a map of weights that are at hand, such as ``layer.attn[0, head]``.

    Parameters
    ----------
    weights : (L, S) array
    visible : (L, S) array of bool, optional
        What may be seen; where the weights are not 0, by default.
    tokens, key_tokens, ax
        As in `plot_attention`.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ValueError
        For shapes and numbers of labels that do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from matplotlib.figure import Figure
    >>> from fastmha.plotting import plot_weights
    >>> weights = np.tri(4) / np.arange(1, 5)[:, None]
    >>> plot_weights(weights, ax=Figure().subplots()).get_ylabel()
    'query'
    """
    weights = np.asarray(weights)
    if weights.ndim != 2:
        raise ValueError(f"weights: expected 2 axes (L, S), got {weights.ndim} (shape {weights.shape})")
    visible = weights != 0 if visible is None else np.asarray(visible, bool)
    if visible.shape != weights.shape:
        raise ValueError(f"visible: expected the shape of weights {weights.shape}, got {visible.shape}")
    L, S = weights.shape
    tokens, key_tokens = labels(tokens, key_tokens, L, S)
    weights = pooled(weights, visible, step(L), step(S))
    ax = new_axes(1, 1, SIZE)[0, 0] if ax is None else ax
    scale(draw(ax, weights, range(L), S, tokens, key_tokens), ax, L, S)
    return ax


def plot_entropy(query, key, *, heads=None, member=0, rows=None, ax=None, **options):
    """Draw how widely each head looks: the entropy of its weights, in bits.

    A bar is the mean over the queries, a line reaches from the 10th to the 90th percentile. A head that
    sees n keys alike has log2(n) bits, one that sees a single key has 0. Queries that see nothing do
    not count.

    Parameters
    ----------
    query, key, member, rows, ax, **options
        As in `plot_attention`.
    heads : int, slice or sequence of int, optional
        Which heads; None: all.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    TypeError, ValueError
        As `fastmha.attention_weights`.

    Examples
    --------
    >>> import numpy as np
    >>> from matplotlib.figure import Figure
    >>> from fastmha.plotting import plot_entropy
    >>> q = k = np.zeros((1, 2, 8, 4))
    >>> ax = plot_entropy(q, k, ax=Figure().subplots())
    >>> [float(bar.get_height()) for bar in ax.patches]
    [3.0, 3.0]
    """
    call = Call(query, key, member, rows, options)
    heads = call.chosen(heads)
    parts = [call.entropies(head) for head in heads]
    ax = new_axes(1, 1, (max(3.2, 0.28 * len(heads) + 1.6), 3.2))[0, 0] if ax is None else ax
    means = [part.mean() if part.size else 0.0 for part in parts]
    places = np.arange(len(heads))
    ax.bar(places, means, color="#31688e", width=0.8)
    spread = [np.percentile(part, (10, 90)) if part.size else (0.0, 0.0) for part in parts]
    ax.vlines(places, *zip(*spread, strict=True), color="#222222", linewidth=1.2)
    ax.set_xticks(places, [str(head) for head in heads])
    ax.set(xlabel="head", ylabel="entropy in bits", ylim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_throughput(data, *, threads=None, figure=None):
    """Draw throughput against length, as ``fastmha bench --sweep length --json FILE`` measured it.

    One panel is for full and one for causal attention, of which only what is visible counts as work. The
    limit is the peak of fused multiply-adds that the same process measured, times the number of threads.

    Parameters
    ----------
    data : dict
        What the file holds.
    threads : int, optional
        Which number of threads; the largest by default.
    figure : matplotlib.figure.Figure, optional
        Where to draw; a new one of pyplot's by default.

    Returns
    -------
    array of matplotlib.axes.Axes

    Raises
    ------
    ValueError
        For data of something else, or without figures for so many threads.

    Examples
    --------
    >>> import json
    >>> from fastmha.plotting import plot_throughput
    >>> with open("sweep.json") as file:  # doctest: +SKIP
    ...     axes = plot_throughput(json.load(file))
    """
    if not isinstance(data, dict) or "results" not in data:
        raise ValueError("data: expected what `fastmha bench --json` writes")
    threads = threads or max((record["threads"] for record in data["results"]), default=0)
    panels = {"full": curves(data, False, threads), "causal": curves(data, True, threads)}
    if not any(panels.values()):
        raise ValueError(f"threads: expected a number that was measured, got {threads}")
    if figure is None:
        from matplotlib import pyplot

        figure = pyplot.figure(figsize=(11, 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    # One machine has one limit; that it differs from case to case is noise.
    limits = [rate for lines in panels.values() for _, rate in lines.pop("limit", [])]
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        ax.set_title(title, loc="left", fontsize=11)
        ax.set_xscale("log", base=2)
        ax.set_xlabel("length")
        ticks = sorted({length for points in lines.values() for length, _ in points})
        ax.set_xticks(ticks, [str(length) for length in ticks])
        ax.grid(axis="y", color="#dddddd", linewidth=0.7)
        ax.spines[["top", "right"]].set_visible(False)
        if limits:
            limit = statistics.median(limits)
            ax.axhline(limit, label="limit", color="black", linestyle=(0, (4, 3)), linewidth=1)
        for name, (label, colour, width) in LINES.items():
            if name in lines:
                x, y = zip(*lines[name], strict=True)
                ax.plot(x, y, label=label, color=colour, linewidth=width, marker="o", ms=4)
    axes[0].set_ylabel("GFLOP/s")
    axes[0].set_ylim(bottom=0)
    handles = {}
    for ax in axes:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    sizes, versions = data["results"][0], data["versions"]
    names = [f"{LINES[name][0]} {versions[name]}" for name in LINES if name in versions]
    figure.suptitle(
        f"float32, batch {sizes['B']}, {sizes['H']} heads of {sizes['D']}, threads: {threads}, "
        f"{data['isa']} kernels, {data['machine']['cpu']}, {data['date'][:10]}\n" + ", ".join(names),
        x=0.01,
        ha="left",
        fontsize=9,
    )
    return axes


def curves(data, causal, threads):
    """{competitor: [(length, GFLOP/s), ...]}, "limit" among them."""
    lines = {}
    for record in sorted(data["results"], key=lambda record: record["L"]):
        if (record["causal"], record["threads"]) != (causal, threads):
            continue
        for name, entry in record.get("competitors", {}).items():
            if name in LINES and "seconds" in entry:
                rate = record["flops"] / entry["seconds"] / 1e9
                lines.setdefault(name, []).append((record["L"], rate))
        if record.get("fma_peak"):
            limit = record["fma_peak"] * threads / 1e9
            lines.setdefault("limit", []).append((record["L"], limit))
    return lines


# --- weights, a few rows at a time ------------------------------------------------------------------


class Call:
    """One member's queries and keys, with the options that they are asked with."""

    def __init__(self, query, key, member, rows, options):
        self.query, self.key, self.options = np.asarray(query), np.asarray(key), dict(options)
        for x, name in ((self.query, "query"), (self.key, "key")):
            if x.ndim != 4:
                raise ValueError(f"{name}: expected 4 axes, got {x.ndim} (shape {x.shape})")
        heads, self.queries = (1, 2) if options.get("layout", "BHLD") == "BHLD" else (2, 1)
        self.H, self.L = self.query.shape[heads], self.query.shape[self.queries]
        self.S = self.key.shape[self.queries]
        rows = chosen(rows, "rows", self.L)
        self.rows = list(range(self.L)) if rows is None else rows
        (member,) = chosen(member, "member", len(self.query))
        for name in ("key_lengths", "query_lengths"):
            if self.options.get(name) is not None:
                self.options[name] = np.asarray(self.options[name])[[member]]
        mask = self.options.get("mask")
        if mask is not None:
            mask = np.asarray(mask)
            self.options["mask"] = mask[[member]] if mask.ndim == 4 and len(mask) > 1 else mask
        self.query = self.query[member : member + 1]
        self.key = self.key if len(self.key) == 1 else self.key[member : member + 1]

    def chosen(self, heads):
        heads = chosen(heads, "heads", self.H)
        if heads == []:
            raise ValueError("heads: expected at least one, got none")
        return list(range(self.H)) if heads is None else heads

    def weights(self, head, height=1):
        """Yield the weights (rows, S) of one head, some multiple of `height` rows at a time."""
        return self._chunks(self.query, self.key, self.options, head, height)

    def visible(self, head, height=1):
        """Yield likewise what may be seen: weights of equal scores, without what only adds to them."""
        options = {k: v for k, v in self.options.items() if k not in ("alibi_slopes", "sinks", "softcap")}
        mask = options.get("mask")
        if mask is not None and mask.dtype != bool:
            options["mask"] = mask != -np.inf
        zeros = (np.broadcast_to(np.float32(0), (*x.shape[:3], 1)) for x in (self.query, self.key))
        for weights in self._chunks(*zeros, options, head, height):
            yield weights > 0

    def _chunks(self, query, key, options, head, height):
        n = max(1, ROOM // max(1, self.S * height)) * height
        for i in range(0, len(self.rows), n):
            rows = self.rows[i : i + n]
            yield attention_weights(query, key, heads=[head], rows=rows, **options)[0, 0]

    def map(self, head):
        """The map of one head, pooled if it is long; masked where nothing may be seen."""
        height, width = step(len(self.rows)), step(self.S)
        parts = [
            pooled(weights, visible, height, width)
            for weights, visible in zip(
                self.weights(head, height), self.visible(head, height), strict=True
            )
        ]
        return np.ma.concatenate(parts) if parts else np.ma.empty((0, self.S))

    def entropies(self, head):
        """The entropy in bits of each query that sees anything."""
        parts = []
        for weights in self.weights(head):
            total = weights.sum(axis=1, dtype=np.float64)
            p = weights[total > 0] / total[total > 0, None]  # sinks keep a part of the weight
            parts.append(-(p * np.log2(p, out=np.zeros_like(p), where=p > 0)).sum(axis=1))
        return np.concatenate(parts) if parts else np.empty(0)


def step(n):
    """How many queries or keys share a cell."""
    return max(1, math.ceil(n / CELLS))


def pooled(weights, visible, height, width):
    """Means over `height` rows of sums over `width` keys, masked where no weight of a cell is visible."""
    rows, columns = np.arange(0, weights.shape[0], height), np.arange(0, weights.shape[1], width)
    sums = np.add.reduceat(np.add.reduceat(weights, columns, axis=1), rows, axis=0)
    seen = np.logical_or.reduceat(np.logical_or.reduceat(visible, columns, axis=1), rows, axis=0)
    heights = np.diff([*rows, weights.shape[0]])
    return np.ma.masked_array(sums / heights[:, None], ~seen)


# --- drawing, and writing to files ------------------------------------------------------------------


def save(path, size, fill):
    """Write a figure that `fill` draws in, which pyplot knows nothing of."""
    figure = Figure(figsize=size, layout="constrained")
    fill(figure)
    figure.savefig(path, dpi=160)


def new_axes(n_rows, n_columns, size):
    from matplotlib import pyplot

    _, axes = pyplot.subplots(n_rows, n_columns, figsize=size, layout="constrained", squeeze=False)
    return axes


def labels(tokens, key_tokens, L, S):
    """Labels of queries and keys, as many as there are of them, or None."""
    if key_tokens is None and L == S:
        key_tokens = tokens
    for given, name, n in ((tokens, "tokens", L), (key_tokens, "key_tokens", S)):
        if given is not None and len(given) != n:
            raise ValueError(f"{name}: expected {n} labels, got {len(given)}")
    return tokens, key_tokens


def draw(ax, weights, rows, S, tokens, key_tokens, norm=None, most=LABELS):
    """Draw a map; `rows` are the queries that its rows stand for, `most` labels stand on an axis."""
    height, width = step(len(rows)), step(S)
    image = ax.imshow(
        weights,
        cmap=COLOURS,
        norm=norm or colour_norm(top(weights), S),
        extent=(-0.5, weights.shape[1] * width - 0.5, weights.shape[0] * height - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
    )
    ax.set(xlim=(-0.5, S - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel="key", ylabel="query")
    name(ax.xaxis, range(S), key_tokens, most)
    name(ax.yaxis, rows, tokens, most)
    ax.tick_params(length=2, labelsize=8)
    return image


def name(axis, items, tokens, most):
    """Write labels, or else numbers, at an axis along which `items` stand."""
    if tokens is None:
        axis.set_major_locator(MaxNLocator(min(8, most), integer=True))
        axis.set_major_formatter(
            FuncFormatter(lambda x, _: str(items[round(x)]) if 0 <= round(x) < len(items) else "")
        )
        return
    places = range(0, len(items), max(1, math.ceil(len(items) / most)))
    axis.set_ticks(places, [str(tokens[items[i]]) for i in places])
    for label in axis.get_ticklabels():
        label.set_parse_math(False)  # a dollar is a dollar
        if axis.axis_name == "x":
            label.set_rotation(90)


def top(weights):
    """The largest weight, 1 where there is none."""
    largest = weights.max() if weights.size else None
    return float(largest) if largest else 1.0


def colour_norm(most, S):
    """Of pooled maps the first rows, which see few keys, would leave no colours for all others."""
    return PowerNorm(1 if step(S) == 1 else 0.5, 0, most)


def scale(image, axes, n_rows, S):
    """A scale of colours beside the axes."""
    colours = image.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    colours.ax.tick_params(labelsize=8, length=2)
    height, width = step(n_rows), step(S)
    text = "weight" if width == 1 else f"weight of {width} keys"
    colours.set_label(text if height == 1 else f"{text}, mean of {height} queries", fontsize=9)
