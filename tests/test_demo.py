"""The demo: the model's logits, the map, the textbook class, and printing with and without rich."""

import io
import re
import sys

import numpy as np
import pytest

import fastmha
from fastmha import _terminal, demo

SENTENCE = "The Queen said to Alice, and the White Rabbit said to the Queen"


@pytest.fixture(scope="module")
def trained():
    """(model, tokenizer, token numbers of SENTENCE)."""
    pytest.importorskip("glassllm")
    model, tokenizer = demo.load_model()
    return model, tokenizer, tokenizer.encode(SENTENCE)


@pytest.fixture
def no_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)


def own_logits(model, ids):
    import glassllm

    with glassllm.no_grad():
        return model.forward(ids).data[0]


def own_weights(model, ids, layer, head):
    import glassllm

    tracer = glassllm.Tracer()
    with glassllm.no_grad():
        model.forward(ids, trace=tracer)
    return tracer.get("attn.softmax", layer=layer, head=head).value


# The model


@pytest.mark.parametrize("dtype", [None, np.float64, np.float32])
@pytest.mark.parametrize("length", [1, 2, None])
def test_logits_equal_the_models_own(trained, dtype, length):
    model, _, ids = trained
    logits, heads = demo.forward(model, ids[:length], dtype)
    expected = own_logits(model, ids[:length])
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= demo.LOGIT_TOLERANCE * np.abs(expected).max()
    assert len(heads) == model.cfg.n_layers


def test_continuation_equals_the_models_own(trained):
    model, _, ids = trained
    expected = [step.token for step in model.generate(ids, 6, greedy=True)]
    assert demo.continue_text(model, ids, 6) == expected
    assert demo.continue_text(model, ids, 0) == []


def test_continuation_goes_past_the_models_length(trained):
    model, _, ids = trained
    full = (ids * 20)[: model.cfg.max_len]
    assert len(demo.continue_text(model, full, 2)) == 2


@pytest.mark.parametrize("head", range(4))
def test_map_is_causal_and_equals_the_models_own(trained, head):
    model, _, ids = trained
    _, heads = demo.forward(model, ids)
    weights = demo.attention_map(*heads[1], head)
    assert weights.shape == (len(ids), len(ids))
    assert np.all(np.triu(weights, 1) == 0)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(weights, own_weights(model, ids, 1, head), atol=1e-5)


def test_wrong_attention_is_reported(trained, monkeypatch):
    model, tokenizer, ids = trained

    def zeros(query, *args, **kwargs):
        return np.zeros_like(query)

    monkeypatch.setattr(fastmha, "scaled_dot_product_attention", zeros)
    with pytest.raises(SystemExit, match="logits: expected within"):
        demo.show_agreement(_terminal.PlainTerminal(io.StringIO()), model, tokenizer, ids)


# What is shown


def test_drawn_map_has_a_row_per_token_and_blanks_above_the_diagonal(trained):
    model, tokenizer, ids = trained
    stream = io.StringIO()
    demo.show_map(_terminal.PlainTerminal(stream), model, tokenizer, ids, layer=1, head=0)
    labels = demo._labels(tokenizer, ids)
    margin = max(map(len, labels)) + 1
    rows = stream.getvalue().splitlines()[-1 - len(ids) : -1]
    for i, (label, row) in enumerate(zip(labels, rows, strict=True)):
        assert row[:margin].strip() == label
        cells = row[margin : margin + 2 * len(ids)]
        assert set(cells[: 2 * i + 2]) <= set(_terminal._BLOCKS)
        assert cells[2 * i + 2 :].strip() == ""
        assert row[margin + 2 * len(ids) :].split()[0] in labels[: i + 1]


def test_drawn_map_stops_where_it_would_grow_too_wide(trained):
    model, tokenizer, ids = trained
    stream = io.StringIO()
    demo.show_map(_terminal.PlainTerminal(stream), model, tokenizer, ids * 3, layer=0, head=3)
    assert max(map(len, stream.getvalue().splitlines())) <= 90


def test_labels_show_white_space(trained):
    _, tokenizer, _ = trained
    ids = tokenizer.encode("a  b\nAlice")
    labels = demo._labels(tokenizer, ids)
    assert all(label.strip() for label in labels)
    assert "\\n" in labels


@pytest.mark.parametrize("rich_installed", [True, False])
def test_whole_demo(trained, monkeypatch, rich_installed):
    if rich_installed:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    stream = io.StringIO()
    terminal = _terminal.open_terminal(stream)
    assert isinstance(terminal, _terminal.RichTerminal) == rich_installed
    demo.run_demo(terminal, text=SENTENCE, n_new=2, lengths=(16, 33))
    printed = stream.getvalue()
    assert "attention in float32: logits differ" in printed
    assert "layer 1, head 0" in printed
    assert "textbook ms" in printed
    assert re.search(r"^ +33 +\d", printed, re.MULTILINE)
    assert "Outputs equal" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": ""}, "text: expected 1 to 128 tokens, got 0"),
        ({"text": "Alice " * 300}, "text: expected 1 to 128 tokens"),
        ({"layer": 4}, "layer and head: expected"),
        ({"head": -1}, "layer and head: expected"),
    ],
)
def test_arguments_that_cannot_serve(trained, arguments, message):
    with pytest.raises(SystemExit, match=message):
        demo.run_demo(_terminal.PlainTerminal(io.StringIO()), lengths=(), **arguments)


def test_picture_of_the_map(trained, tmp_path):
    pytest.importorskip("matplotlib")
    path, stream = tmp_path / "map.png", io.StringIO()
    demo.run_demo(
        _terminal.PlainTerminal(stream), text="The Queen said", lengths=(), plot_file=str(path)
    )
    assert f"wrote {path}" in stream.getvalue()
    from matplotlib.image import imread

    picture = imread(path)[..., :3]
    assert picture.shape == (896, 1024, 3)
    from fastmha.plotting import HIDDEN

    grey = np.array([int(HIDDEN[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    hidden = (np.abs(picture - grey) < 1e-3).all(axis=-1)
    # The upper triangle: more at the right than at the left, more at the top than at the bottom.
    rows, columns = hidden.nonzero()
    assert hidden.mean() > 0.15
    assert hidden[: rows.mean().astype(int)].sum() > hidden[rows.mean().astype(int) :].sum()
    assert columns.mean() > rows.mean()


def test_missing_model_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "glassllm", None)
    with pytest.raises(SystemExit, match=r"pip install 'fastmha\[demo\]'"):
        demo.run_demo(_terminal.PlainTerminal(io.StringIO()))


# The textbook class


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "d_model", "n_heads"), [(1, 8, 1), (7, 24, 3), (50, 64, 4)])
def test_textbook_class_equals_the_drop_in(length, d_model, n_heads, causal):
    textbook = demo.TextbookAttention(d_model, n_heads, seed=3)
    ours = fastmha.MultiHeadAttention(d_model, n_heads, seed=3)
    for name in ("Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo", "bo"):
        assert np.array_equal(getattr(textbook, name), getattr(ours, name)), name
    x = np.random.default_rng(length).standard_normal((2, length, d_model))
    expected, output = textbook(x, causal=causal), ours(x, causal=causal)
    assert output.shape == x.shape
    assert np.abs(output - expected).max() <= demo.CLASS_TOLERANCE * np.abs(expected).max()


def test_comparison_counts_memory_and_steps():
    steps = []
    result = demo.compare_at(64, 32, 4, rounds=2, advance=lambda: steps.append(1))
    assert len(steps) == 3
    # The textbook holds scores and weights, (4, 64, 64) float64 each, at the same time.
    assert result.textbook_mb >= 2 * 4 * 64 * 64 * 8 / 1e6
    assert result.fastmha_mb > 0
    assert min(result.textbook_ms, result.fastmha_ms) > 0


def test_comparison_reports_different_outputs(monkeypatch):
    class Wrong(demo.TextbookAttention):
        def __call__(self, x, causal=False):
            return self.forward(x, causal) * (1 + 1e-11)

    monkeypatch.setattr(fastmha, "MultiHeadAttention", Wrong)
    with pytest.raises(SystemExit, match="outputs at length 9: expected within 1e-12"):
        demo.compare_at(9, 8, 2, rounds=1)


# The terminal


def test_plain_lines_where_rich_is_missing(no_rich):
    stream = io.StringIO()
    terminal = _terminal.open_terminal(stream)
    terminal.heading("Title")
    terminal.table(["name", "ms"], [["a", "1.0"], ["long name", "12.0"]], left=1)
    with terminal.progress(3) as advance:
        for label in ("one", "one", "two"):
            advance(label)
    assert stream.getvalue().splitlines() == [
        "",
        "Title",
        "-----",
        "name         ms",
        "---------  ----",
        "a           1.0",
        "long name  12.0",
        "[1/3] one",
        "[3/3] two",
    ]


def test_table_without_rows(no_rich):
    stream = io.StringIO()
    _terminal.open_terminal(stream).table(["name", "ms"], [])
    assert stream.getvalue().splitlines() == ["name  ms", "----  --"]


def test_shades(no_rich):
    stream = io.StringIO()
    terminal = _terminal.open_terminal(stream)
    terminal.shades("x ", [0.0, 0.05, 0.3, 0.5, 1.0, None], "note")
    assert stream.getvalue() == "x ··░░▒▒▓▓██    note\n"


def test_stream_that_cannot_encode_blocks_gets_ascii():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    terminal = _terminal.open_terminal(stream)
    terminal.shades("x ", [0.0, 1.0])
    terminal.line("“Curiouser”")
    stream.flush()
    assert raw.getvalue().decode("ascii").splitlines() == ["x ..##", "?Curiouser?"]


def test_rich_terminal_draws_the_same_content():
    pytest.importorskip("rich")
    stream = io.StringIO()
    terminal = _terminal.open_terminal(stream)
    assert isinstance(terminal, _terminal.RichTerminal)
    terminal.heading("Title [bold]")
    terminal.table(["name", "ms"], [["[red]", "1.0"]], left=1)
    terminal.shades("x ", [0.0, 1.0, None], "note")
    printed = stream.getvalue()
    assert "Title [bold]" in printed
    assert "[red]" in printed
    assert "x ··██    note" in printed


def test_rich_terminal_colours_where_colours_are(monkeypatch):
    pytest.importorskip("rich")
    for name, value in {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    terminal = _terminal.open_terminal(stream)
    terminal.shades("x ", [0.0, 1.0])
    terminal.shade_legend()
    assert "48;2;28;30;60" in stream.getvalue()
    assert "48;2;253;231;80" in stream.getvalue()


@pytest.mark.parametrize("weight", np.linspace(0, 1, 11))
def test_every_weight_has_a_colour(weight):
    red, green, blue = map(int, _terminal._colour(weight)[4:-1].split(","))
    assert all(0 <= value <= 255 for value in (red, green, blue))
