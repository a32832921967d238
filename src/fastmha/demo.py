"""The demo: a trained model on fastmha's attention, then the drop-in class against the textbook.

The model is glassllm's: four layers with 4 query heads on 2 key/value heads, trained on Lewis
Carroll and written in NumPy to be read. `forward` below is its forward pass with one line changed:
`scaled_dot_product_attention` stands where scores, mask, softmax and weighted sum stood.
"""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from typing import NamedTuple

import numpy as np

import fastmha
from fastmha._terminal import open_terminal

__all__ = [
    "TextbookAttention",
    "attention_map",
    "compare_at",
    "continue_text",
    "forward",
    "load_model",
    "run_demo",
    "save_map",
    "show_agreement",
    "show_map",
    "show_next",
    "show_timings",
]

TEXT = "The White Rabbit looked at the Queen, and the Queen said to Alice"
LENGTHS = (64, 128, 256, 512, 1024, 2048)
MAP_TOKENS = 24  # two columns a token and the labels: 80 columns

LOGIT_TOLERANCE = 1e-5  # both relative to the largest value
CLASS_TOLERANCE = 1e-12


def run_demo(
    terminal=None, *, text=TEXT, n_new=24, layer=1, head=0, lengths=LENGTHS, plot_file=None
):
    """Run the whole demo.

    Parameters
    ----------
    terminal : PlainTerminal or RichTerminal, optional
        Where to print; the best one for standard output by default.
    text : str, optional
        The sentence that the model reads.
    n_new : int, optional
        How many tokens to continue it by.
    layer, head : int, optional
        The attention map to draw, counted from 0. The default is a head that looks back one token.
    lengths : sequence of int, optional
        Sequence lengths to time the drop-in class at; none: no timing.
    plot_file : str, optional
        Where to draw the attention map of the whole sentence too; needs matplotlib.

    Raises
    ------
    SystemExit
        Where a result is not the expected one, glassllm is missing, or an argument cannot serve.
    """
    terminal = open_terminal() if terminal is None else terminal
    model, tokenizer = load_model()
    ids = _encode(model, tokenizer, text)
    if not (0 <= layer < model.cfg.n_layers and 0 <= head < model.cfg.n_heads):
        raise SystemExit(
            f"layer and head: expected 0..{model.cfg.n_layers - 1} and 0..{model.cfg.n_heads - 1}, "
            f"got {layer} and {head}"
        )
    show_agreement(terminal, model, tokenizer, ids)
    show_next(terminal, model, tokenizer, ids, n_new)
    show_map(terminal, model, tokenizer, ids, layer, head)
    if plot_file is not None:
        save_map(plot_file, model, tokenizer, ids, layer, head)
        terminal.line(f"wrote {plot_file}")
    if len(lengths):
        show_timings(terminal, lengths)


# The model ------------------------------------------------------------------------------------


def load_model():
    """Return glassllm's English model and its tokenizer."""
    try:
        import glassllm
    except ImportError:
        raise SystemExit(
            "The demo needs the package glassllm, a small trained model: "
            "pip install 'fastmha[demo]'"
        ) from None
    return glassllm.load_pretrained("en")


def forward(model, ids, dtype=None):
    """Run tokens through all layers of a glassllm model, with fastmha's attention.

    Parameters
    ----------
    model : glassllm.GlassLM
        The model. Its embedding, norms and feed-forward layers are called as they are.
    ids : sequence of int
        L tokens.
    dtype : numpy dtype, optional
        In what to compute the attention; as it comes by default.

    Returns
    -------
    logits : ndarray, (L, vocabulary)
        For each position, a score for every token that may come next.
    heads : list of (q, k)
        Of each layer, the rotated queries (1, H, L, D) and keys (1, G, L, D).
    """
    import glassllm

    heads = []
    with glassllm.no_grad():
        x = glassllm.Tensor(model.E.data[np.asarray(ids)][None])  # (1, L, d_model)
        for layer, block in enumerate(model.blocks):
            q, k, v = _project(block.attn, block.norm1(x).data, dtype)
            mixed = fastmha.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + glassllm.Tensor(_join_heads(mixed) @ block.attn.W_O.data)
            x = x + block.ffn(block.norm2(x), layer)
            heads.append((q, k))
        return model.norm_f(x).data[0] @ model.E.data.T, heads


def attention_map(q, k, head):
    """Return the causal weights (L, L) of one query head.

    Parameters
    ----------
    q, k : ndarray, (1, H, L, D) and (1, G, L, D)
        Queries and keys of one layer.
    head : int
        The query head, below H.
    """
    group = head // (q.shape[1] // k.shape[1])
    scores = q[0, head] @ k[0, group].T / math.sqrt(q.shape[-1])
    visible = np.tri(*scores.shape, dtype=bool)
    return fastmha.softmax(np.where(visible, scores, -np.inf))


def continue_text(model, ids, n_new):
    """Return the `n_new` tokens that follow, the most likely one at each step."""
    ids = list(ids)
    for _ in range(n_new):
        logits, _ = forward(model, ids[-model.cfg.max_len :])
        ids.append(int(np.argmax(logits[-1])))
    return ids[len(ids) - n_new :]


def _encode(model, tokenizer, text):
    ids = tokenizer.encode(text)
    if not 0 < len(ids) <= model.cfg.max_len:
        raise SystemExit(f"text: expected 1 to {model.cfg.max_len} tokens, got {len(ids)}")
    return ids


def _project(attn, x, dtype):
    """Return queries (1, H, L, D), keys and values (1, G, L, D), the first two rotated."""
    length = x.shape[1]

    def split(weight, n_heads):
        return (x @ weight.data).reshape(1, length, n_heads, attn.d_k).transpose(0, 2, 1, 3)

    q = _rotate(split(attn.W_Q, attn.n_heads), attn.cos[:length], attn.sin[:length])
    k = _rotate(split(attn.W_K, attn.n_kv_heads), attn.cos[:length], attn.sin[:length])
    v = split(attn.W_V, attn.n_kv_heads)
    return tuple(a if dtype is None else a.astype(dtype) for a in (q, k, v))


def _rotate(x, cos, sin):
    """Turn each pair (2i, 2i+1) of the last axis by its position's angle; cos, sin: (L, D/2)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape)


def _join_heads(x):
    """Lay the heads side by side: (1, H, L, D) to (1, L, H*D)."""
    return x.transpose(0, 2, 1, 3).reshape(1, x.shape[2], -1)


# What is shown of it --------------------------------------------------------------------------


def show_agreement(terminal, model, tokenizer, ids):
    """Print how far the logits are from the model's own, or raise SystemExit if too far."""
    import glassllm

    cfg = model.cfg
    terminal.heading("A trained model on fastmha's attention")
    terminal.line(
        f"glassllm {glassllm.__version__}: {cfg.n_layers} layers, {cfg.n_heads} query heads on "
        f"{cfg.n_kv_heads} key/value heads, rotary positions"
    )
    terminal.line(f"{len(ids)} tokens: " + "|".join(_labels(tokenizer, ids)))
    with glassllm.no_grad():
        expected = model.forward(ids).data[0]
    for dtype in (np.float64, np.float32):
        logits, _ = forward(model, ids, dtype)
        difference = _relative_difference(logits, expected)
        terminal.line(
            f"attention in {np.dtype(dtype).name}: logits differ from the model's own "
            f"by at most {difference:.1e} of the largest"
        )
        # Not ">": a NaN must fail too.
        if not difference <= LOGIT_TOLERANCE:
            raise SystemExit(
                f"logits: expected within {LOGIT_TOLERANCE:.0e} of the model's own, "
                f"got {difference:.1e}"
            )


def show_next(terminal, model, tokenizer, ids, n_new, n_shown=5):
    """Print the likeliest next tokens and a continuation of the text."""
    logits, _ = forward(model, ids)
    probabilities = fastmha.softmax(logits[-1])
    best = np.argsort(-probabilities, kind="stable")[:n_shown]
    terminal.heading("What comes next")
    terminal.table(
        ["token", "probability"],
        [
            [label, f"{probabilities[token]:.1%}"]
            for label, token in zip(_labels(tokenizer, best), best, strict=True)
        ],
        left=1,
    )
    text = tokenizer.decode(list(ids)) + tokenizer.decode(continue_text(model, ids, n_new))
    terminal.line("likeliest token by token: " + " ".join(text.split()))


def show_map(terminal, model, tokenizer, ids, layer, head):
    """Draw one head's attention map: a row per query, a column per key."""
    ids = ids[:MAP_TOKENS]
    _, heads = forward(model, ids)
    weights = attention_map(*heads[layer], head)
    labels = _labels(tokenizer, ids)
    margin = max(map(len, labels)) + 1
    terminal.heading(f"Where layer {layer}, head {head} looks (both counted from 0)")
    for letters in _upright(labels):
        terminal.line((" " * margin + letters).rstrip())
    for i, (label, row) in enumerate(zip(labels, weights, strict=True)):
        seen, hidden = row[: i + 1].tolist(), [None] * (len(ids) - i - 1)
        strongest = int(np.argmax(row))
        note = f"{labels[strongest]} {row[strongest]:.0%}"
        terminal.shades(label.rjust(margin - 1) + " ", seen + hidden, note)
    terminal.shade_legend(" " * margin)


def save_map(file, model, tokenizer, ids, layer, head):
    """Draw the same as a picture, of all tokens."""
    from fastmha.plotting import plot_attention, save

    _, heads = forward(model, ids)
    title = f"layer {layer}, head {head}"

    def fill(figure):
        ax = figure.subplots()
        labels = _labels(tokenizer, ids)
        plot_attention(*heads[layer], head=head, causal=True, tokens=labels, ax=ax).set_title(title)

    save(file, (6.4, 5.6), fill)


def _labels(tokenizer, ids, longest=9):
    """Return tokens as they can stand in one line, white space made visible."""
    words = [tokenizer.decode([int(i)]).replace("\n", "\\n") for i in ids]
    return [(word.strip() or "_" * len(word) or "?")[:longest] for word in words]


def _upright(labels):
    """Return lines that spell each label downwards, two columns each, ending in the last line."""
    height = max(map(len, labels))
    columns = [label.rjust(height) for label in labels]
    return ["".join(letter + " " for letter in letters) for letters in zip(*columns, strict=True)]


# The drop-in class ----------------------------------------------------------------------------


class TextbookAttention:
    """The NumPy class that courses teach, which `fastmha.MultiHeadAttention` replaces."""

    def __init__(self, d_model, n_heads, seed=0):
        if d_model % n_heads:
            raise ValueError(f"d_model {d_model} is not divisible by n_heads {n_heads}")
        rng, shape = np.random.default_rng(seed), (d_model, d_model)
        self.d_model, self.n_heads, self.d_k = d_model, n_heads, d_model // n_heads
        self.Wq, self.Wk, self.Wv, self.Wo = (
            rng.normal(0.0, 1.0 / np.sqrt(d_model), shape) for _ in range(4)
        )
        self.bq, self.bk, self.bv, self.bo = (np.zeros(d_model) for _ in range(4))

    def _split_heads(self, x):
        B, L, _ = x.shape
        return x.reshape(B, L, self.n_heads, self.d_k).transpose(0, 2, 1, 3)

    def forward(self, x, causal=False):
        q = self._split_heads(x @ self.Wq + self.bq)
        k = self._split_heads(x @ self.Wk + self.bk)
        v = self._split_heads(x @ self.Wv + self.bv)
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(self.d_k)
        if causal:
            scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        self.attn = weights / weights.sum(axis=-1, keepdims=True)
        return (self.attn @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ self.Wo + self.bo

    __call__ = forward


class Comparison(NamedTuple):
    """Textbook and fastmha at one length."""

    length: int
    textbook_ms: float
    fastmha_ms: float
    textbook_mb: float
    fastmha_mb: float
    difference: float  # of the outputs, relative to the largest


def show_timings(terminal, lengths=LENGTHS, *, d_model=512, n_heads=8, rounds=5):
    """Time the drop-in class against the textbook class, with a progress bar and a table."""
    terminal.heading("The drop-in class against the textbook's")
    terminal.line(
        f"float64, causal, batch 1, d_model {d_model}, {n_heads} heads, "
        f"threads: {fastmha.get_num_threads()}"
    )
    with terminal.progress(len(lengths) * (rounds + 1)) as advance:
        results = [
            compare_at(length, d_model, n_heads, rounds, lambda n=length: advance(f"length {n}"))
            for length in lengths
        ]
    terminal.table(
        ["length", "textbook ms", "fastmha ms", "ratio", "textbook MB", "fastmha MB"],
        [_cells(result) for result in results],
    )
    largest = max(result.difference for result in results)
    terminal.line(f"Outputs equal: they differ by at most {largest:.1e} of the largest.")
    terminal.line("Times are medians of alternating calls, MB what a call allocates at its peak.")


def compare_at(length, d_model, n_heads, rounds, advance=lambda: None):
    """Measure both classes at one length; raise SystemExit where their outputs differ.

    Parameters
    ----------
    length, d_model, n_heads : int
        The input is (1, length, d_model).
    rounds : int
        How often to time each, the two in turn.
    advance : callable, optional
        Called `rounds + 1` times, as the work goes on.

    Returns
    -------
    Comparison
        Median times, peak memory and the largest relative difference.
    """
    x = np.random.default_rng(length).standard_normal((1, length, d_model))
    textbook = TextbookAttention(d_model, n_heads)
    ours = fastmha.MultiHeadAttention(d_model, n_heads)
    expected, textbook_bytes = _peak_memory(lambda: textbook(x, causal=True))
    output, our_bytes = _peak_memory(lambda: ours(x, causal=True))
    difference = _relative_difference(output, expected)
    if not difference <= CLASS_TOLERANCE:
        raise SystemExit(
            f"outputs at length {length}: expected within {CLASS_TOLERANCE:.0e} of the textbook's, "
            f"got {difference:.1e}"
        )
    advance()
    textbook_times, our_times = [], []
    for _ in range(rounds):
        textbook_times += _time_calls(lambda: textbook(x, causal=True))
        our_times += _time_calls(lambda: ours(x, causal=True))
        advance()
    return Comparison(
        length,
        statistics.median(textbook_times),
        statistics.median(our_times),
        textbook_bytes / 1e6,
        our_bytes / 1e6,
        difference,
    )


def _cells(result):
    return [
        f"{result.length}",
        f"{result.textbook_ms:.2f}",
        f"{result.fastmha_ms:.2f}",
        f"{result.textbook_ms / result.fastmha_ms:.1f}x",
        f"{result.textbook_mb:.1f}",
        f"{result.fastmha_mb:.1f}",
    ]


def _time_calls(call, *, pause=0.05, at_least=0.02):
    """Time a few calls in a row, in ms each, as many as fill `at_least` seconds."""
    # The BLAS under NumPy keeps its idle workers spinning for some tens of milliseconds after a
    # matrix product. The pause lets them go to sleep, so that neither class pays for the other's.
    time.sleep(pause)
    times = []
    while sum(times) < 1e3 * at_least:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _peak_memory(call):
    """Return the result of a call, and the bytes it held at its peak beyond those held before."""
    already_tracing = tracemalloc.is_tracing()
    if not already_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        result = call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not already_tracing:
            tracemalloc.stop()
    return result, peak - before


def _relative_difference(actual, expected):
    """Return the largest difference, relative to the largest expected value."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
