"""The pictures: what is drawn, in the pixels of a buffer too."""

import itertools
import tracemalloc

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

import fastmha  # noqa: E402
from fastmha import plotting  # noqa: E402

TOKENS = ["The", "White", "Rabbit", "looked", "at", "$x$", "Queen", ",", "and", "said", "nothing", "."]
HIDDEN = np.round(np.array(to_rgb(plotting.HIDDEN)) * 255).astype(np.uint8)


@pytest.fixture(autouse=True)
def figures_closed():
    yield
    from matplotlib import pyplot

    pyplot.close("all")


def inputs(L, S=None, H=2, B=1, D=16, dtype=np.float32):
    rng = np.random.default_rng(L)
    return [rng.normal(size=(B, H, n, D)).astype(dtype) * 1.5 for n in (L, S or L)]


def pixels(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def cells(ax, n_rows, n_columns, picture=None):
    """The colour (n_rows, n_columns, 3) in the middle of each cell of a map."""
    picture = pixels(ax.figure) if picture is None else picture
    x, y = np.meshgrid(np.arange(n_columns), np.arange(n_rows))
    places = ax.transData.transform(np.column_stack([x.ravel(), y.ravel()]).astype(float))
    columns, rows = np.floor(places).astype(int).T
    return picture[len(picture) - 1 - rows, columns].reshape(n_rows, n_columns, 3)


def is_hidden(colours):
    return (colours == HIDDEN).all(axis=-1)


def map_of(ax):
    return ax.images[0].get_array()


def test_what_is_hidden_has_a_colour_of_its_own():
    q, k = inputs(12)
    q *= 30  # some weights that are seen are 0
    mask = np.ones((1, 1, 1, 12), bool)
    mask[..., :2] = False
    weights = fastmha.attention_weights(q, k, heads=1, causal=True, mask=mask)[0, 0]
    seen = np.tri(12, dtype=bool) & mask[0, 0]
    assert (weights[seen] == 0).any()
    ax = plotting.plot_attention(q, k, head=1, tokens=TOKENS, causal=True, mask=mask)
    assert np.array_equal(is_hidden(cells(ax, 12, 12)), ~seen)
    assert np.array_equal(map_of(ax).filled(0), np.where(seen, weights, 0))


def test_colours_are_those_of_the_weights():
    q, k = inputs(5)
    ax = plotting.plot_attention(q, k)
    weights = fastmha.attention_weights(q, k, heads=0)[0, 0]
    expected = plotting.COLOURS(weights / weights.max(), bytes=True)[..., :3]
    assert np.abs(cells(ax, 5, 5).astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    "options",
    [
        {"causal": "bottom-right", "window": (2, 0)},
        {"key_lengths": [4, 6], "query_lengths": [3, 5]},
        {"mask": np.where(np.arange(9) % 3, -1e30, -np.inf).astype(np.float32)},
        {"mask": np.arange(2 * 2 * 5 * 9).reshape(2, 2, 5, 9) % 4 > 0, "softcap": 3.0},
        {"alibi_slopes": [900.0, 0.1], "sinks": [800.0, 0.0]},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("member", [0, -1])
def test_visibility_follows_the_options(options, layout, member):
    q, k = inputs(5, 9, B=2)
    weights = fastmha.attention_weights(q, k, **options)[member, 1]
    if layout == "BLHD":
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    ax = plotting.plot_attention(
        q, k, head=1, member=member, layout=layout, ax=Figure().subplots(), **options
    )
    mask = np.ma.getmaskarray(map_of(ax))
    assert np.array_equal(map_of(ax).filled(0), weights)
    # What is hidden has no weight even where all scores are equal.
    plain = {name: x for name, x in options.items() if name not in ("sinks", "alibi_slopes")}
    if "mask" in plain and plain["mask"].dtype != bool:
        plain["mask"] = np.isfinite(plain["mask"])
    zeros = [np.zeros((2, 2, n, 1)) for n in (5, 9)]
    seen = fastmha.reference.attention_weights(*zeros, **plain)[member, 1] > 0
    assert np.array_equal(mask, ~seen)


def test_labels_are_whole_and_inside():
    q, k = inputs(12)
    ax = plotting.plot_attention(q, k, tokens=TOKENS, causal=True)
    picture = pixels(ax.figure)
    height, width = picture.shape[:2]
    assert (width, height) == tuple(ax.figure.bbox.size)
    for axis in (ax.xaxis, ax.yaxis):
        texts = axis.get_ticklabels()
        assert [text.get_text() for text in texts] == TOKENS
        boxes = [text.get_window_extent() for text in texts] + [axis.label.get_window_extent()]
        for box in boxes:
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
            left, right, low, high = map(int, (box.x0, box.x1 + 1, box.y0, box.y1 + 1))
            inside = picture[height - high : height - low, left:right]
            assert inside.min() < 200 and inside.max() == 255  # ink on paper
        ends = sorted((box.y0, box.y1) if axis is ax.yaxis else (box.x0, box.x1) for box in boxes[:-1])
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_the_same_picture_twice():
    q, k = inputs(12)
    first, again = (
        pixels(plotting.plot_attention(q, k, tokens=TOKENS, causal=True).figure) for _ in range(2)
    )
    assert first.shape == (560, 640, 3)
    assert np.array_equal(first, again)


def test_long_maps_are_pooled():
    L, step = 1000, 4
    q, k = inputs(L)
    weights = fastmha.attention_weights(q, k, heads=0, causal=True)[0, 0]
    ax = plotting.plot_attention(q, k, causal=True, ax=Figure(layout="constrained").subplots())
    blocks = weights.reshape(L // step, step, L // step, step).mean(axis=1).sum(axis=-1)
    assert np.allclose(map_of(ax).filled(0), blocks, rtol=1e-5)
    assert np.array_equal(np.ma.getmaskarray(map_of(ax)), ~np.tri(L // step, dtype=bool))
    assert np.allclose(map_of(ax).sum(axis=1), 1, rtol=1e-5)
    assert ax.figure.axes[1].get_ylabel() == "weight of 4 keys, mean of 4 queries"
    assert ax.get_xlim() == (-0.5, 999.5) and ax.get_ylim() == (999.5, -0.5)


@pytest.mark.parametrize("L", [257, 511, 3001])
def test_a_last_block_that_is_not_full(L, monkeypatch):
    monkeypatch.setattr(plotting, "ROOM", 1 << 14)
    q, k = inputs(L)
    ax = plotting.plot_attention(q, k, causal=True, ax=Figure().subplots())
    assert max(map_of(ax).shape) <= plotting.CELLS
    assert np.allclose(map_of(ax).sum(axis=1), 1, rtol=1e-5)
    assert len(cells(ax, 3, 3)) == 3 and ax.get_xlim() == (-0.5, L - 0.5)


def test_no_array_of_all_weights_is_made():
    q, k = inputs(4096, D=4)
    ax = Figure().subplots()
    tracemalloc.start()
    plotting.plot_attention(q, k, causal=True, ax=ax)
    plotting.plot_entropy(q, k, causal=True, heads=[0], ax=Figure().subplots())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096 * 4096 * 4 / 2


def test_chosen_rows():
    q, k = inputs(300)
    rows = [5, 100, -1]
    ax = plotting.plot_attention(q, k, rows=rows, tokens=[f"t{i}" for i in range(300)], causal=True)
    pixels(ax.figure)
    assert map_of(ax).shape == (3, 150)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["t5", "t100", "t299"]
    labels = [text.get_text() for text in ax.get_xticklabels()]
    assert labels == [f"t{i}" for i in range(0, 300, 5)]
    plain = plotting.plot_attention(q, k, rows=rows, causal=True)
    pixels(plain.figure)
    assert {text.get_text() for text in plain.get_yticklabels()} - {""} == {"5", "100", "299"}


def test_a_grid_of_heads():
    q, k = inputs(12, H=32)
    axes = plotting.plot_heads(q, k, tokens=TOKENS, causal=True)
    figure = axes[0].figure
    picture = pixels(figure)
    assert len(axes) == 32 and len(figure.axes) == 33
    assert [ax.get_title() for ax in axes] == [f"head {i}" for i in range(32)]
    weights = fastmha.attention_weights(q, k, causal=True)[0]
    for ax, expected in zip(axes, weights, strict=True):
        assert np.array_equal(map_of(ax).filled(0), expected)
        assert ax.images[0].norm.vmax == weights.max()
        assert np.array_equal(is_hidden(cells(ax, 12, 12, picture)), ~np.tri(12, dtype=bool))
    boxes = [ax.get_tightbbox() for ax in figure.axes]
    assert all(box.x0 >= 0 and box.y0 >= 0 for box in boxes)
    assert all(box.x1 <= picture.shape[1] and box.y1 <= picture.shape[0] for box in boxes)
    maps = [ax.get_window_extent() for ax in axes]
    assert not any(a.overlaps(b) for i, a in enumerate(maps) for b in maps[:i])


def test_a_grid_that_is_not_full():
    q, k = inputs(6, H=8)
    axes = plotting.plot_heads(q, k, heads=[7, 1, 2], columns=2)
    assert [ax.get_title() for ax in axes] == ["head 7", "head 1", "head 2"]
    assert len(axes[0].figure.axes) == 4


def test_weights_at_hand():
    layer = fastmha.MultiHeadAttention(32, 4)
    layer.forward(np.random.default_rng(0).normal(size=(1, 7, 32)), causal=True)
    ax = plotting.plot_weights(layer.attn[0, 2])
    assert np.array_equal(is_hidden(cells(ax, 7, 7)), ~np.tri(7, dtype=bool))
    everything = plotting.plot_weights(layer.attn[0, 2], visible=np.ones((7, 7), bool))
    assert not is_hidden(cells(everything, 7, 7)).any()
    with pytest.raises(ValueError, match=r"weights: expected 2 axes \(L, S\), got 4"):
        plotting.plot_weights(layer.attn)
    with pytest.raises(ValueError, match="visible: expected the shape of weights"):
        plotting.plot_weights(layer.attn[0, 0], visible=np.ones(7, bool))


@pytest.mark.parametrize("room", [1, 1 << 20])
def test_entropies(room, monkeypatch):
    monkeypatch.setattr(plotting, "ROOM", room)
    q, k = inputs(40, H=3, dtype=np.float64)
    q[:, 0] = 0
    options = {"causal": True, "sinks": [1.0, -1.0, 0.0], "query_lengths": [30]}
    ax = plotting.plot_entropy(q, k, ax=Figure().subplots(), **options)
    p = fastmha.reference.attention_weights(q, k, **{**options, "sinks": None})[0, :, :30]
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = -np.nansum(p * np.log2(p), axis=-1)
    heights = [bar.get_height() for bar in ax.patches]
    assert np.allclose(heights, expected.mean(axis=1))
    assert np.allclose(heights[0], np.log2(np.arange(1, 31)).mean())
    spread = np.array([path.vertices[:, 1] for path in ax.collections[0].get_paths()])
    assert np.allclose(spread, np.percentile(expected, (10, 90), axis=1).T)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0", "1", "2"]


def test_what_sees_nothing_has_no_entropy():
    q, k = inputs(4)
    ax = plotting.plot_entropy(q, k, mask=np.zeros((4, 4), bool), ax=Figure().subplots())
    assert [bar.get_height() for bar in ax.patches] == [0, 0]
    empty = plotting.plot_attention(q, k, mask=np.zeros((4, 4), bool))
    assert is_hidden(cells(empty, 4, 4)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ["a"]}, "tokens: expected 5 labels, got 1"),
        ({"key_tokens": ["a"]}, "key_tokens: expected 9 labels, got 1"),
        ({"head": 2}, "heads: expected indices from -2 to 1"),
        ({"member": 1}, "member: expected indices from -1 to 0"),
        ({"rows": [5]}, "rows: expected indices from -5 to 4"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        plotting.plot_attention(*inputs(5, 9), **options)


def test_mistakes_in_arrays_and_heads_are_named():
    q, k = inputs(5, 9)
    with pytest.raises(ValueError, match="key: expected 4 axes, got 3"):
        plotting.plot_attention(q, k[0])
    with pytest.raises(TypeError, match="integer"):
        plotting.plot_attention(q, k, head=[0, 1])
    for plot in (plotting.plot_heads, plotting.plot_entropy):
        with pytest.raises(ValueError, match="heads: expected at least one, got none"):
            plot(q, k, heads=[])


# --- throughput -------------------------------------------------------------------------------------


def record(L, causal, threads, **seconds):
    return {
        "L": L, "B": 1, "H": 8, "D": 64, "causal": causal, "threads": threads, "flops": 1e6 * L,
        "fma_peak": 5e10,
        "competitors": {name: {"seconds": value} for name, value in seconds.items()},
    }  # fmt: skip


def sweep():
    records = [
        record(L, causal, threads, fastmha=1e-3 * L / threads, numpy=1e-2)
        for L, causal, threads in itertools.product((128, 64), (False, True), (1, 2))
    ]
    records[0]["competitors"]["torch"] = {"skipped": "not installed"}
    return {
        "results": records, "versions": {"fastmha": "1", "numpy": "2"}, "isa": "avx2",
        "machine": {"cpu": "a processor"}, "date": "2026-11-30T00:00",
    }  # fmt: skip


@pytest.mark.parametrize(("threads", "rate"), [(None, 2.0), (1, 1.0)])
def test_throughput(threads, rate):
    axes = plotting.plot_throughput(sweep(), threads=threads)
    assert [ax.get_title(loc="left") for ax in axes] == ["full", "causal"]
    for ax in axes:
        lines = {line.get_label(): line for line in ax.lines}
        assert lines.keys() == {"fastmha", "NumPy", "limit"}
        assert lines["fastmha"].get_xydata().tolist() == [[64, rate], [128, rate]]
        assert set(lines["limit"].get_ydata()) == {50.0 * (threads or 2)}
    figure = axes[0].figure
    picture = pixels(figure)
    red = np.round(np.array(to_rgb(plotting.LINES["fastmha"][1])) * 255).astype(np.uint8)
    assert (picture == red).all(axis=-1).sum() > 100
    title = figure.get_suptitle()
    assert f"threads: {threads or 2}" in title and "fastmha 1, NumPy 2" in title
    legend = figure.legends[0].get_window_extent()
    assert legend.y0 >= 0 and legend.y1 <= axes[0].get_tightbbox().y0 + 1


@pytest.mark.parametrize(
    ("data", "threads", "message"),
    [([], None, "data: expected what"), ({}, None, "data: expected what"), (sweep(), 99, "threads: .* 99")],
)
def test_data_without_figures(data, threads, message):
    with pytest.raises(ValueError, match=message):
        plotting.plot_throughput(data, threads=threads)
