"""Train a small character language model from nothing: fastmha's attention, NumPy for the rest.

    python examples/train_tiny_lm.py
    python examples/train_tiny_lm.py --steps 1000 --curve loss.png

It reads the language reference that every Python carries for ``help()``. Two pre-norm blocks; the
attention in them is `fastmha.MultiHeadAttention`, forward and backward, and every other layer is
written here in its manner: ``forward``, ``backward``, ``parameters()`` and ``grads``. Every tenth
paragraph is held out, and the exit code is 1 unless the loss on those falls below ``--target``. In
the end a few steps are timed against the same model on `fastmha.reference`, the package in plain NumPy.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pydoc_data.topics import topics

import numpy as np

import fastmha
from fastmha import reference
from fastmha._terminal import open_terminal

# Nats a character, on text the model has not seen. Counted letters give 3.3 there, counted pairs 2.5.
TARGET = 1.9
SAME = 1e-9  # how far losses may be apart in float64
STEPS = 500
REPORTS = 20  # how often the loss on held-out text is taken
BATCH, LENGTH = 32, 128
D_MODEL, N_HEADS, N_BLOCKS = 64, 4, 2
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
PLACE = {character: i for i, character in enumerate(ALPHABET)}
N_TOKENS = len(ALPHABET)
PROMPT = "The "


# --- layers: forward keeps what backward needs; grads lie as parameters() ---------------------------


class Dense:
    """``x W + b``."""

    def __init__(self, n_in, n_out, rng, dtype):
        self.W = rng.normal(0, 1 / math.sqrt(n_in), (n_in, n_out)).astype(dtype)
        self.b = np.zeros(n_out, dtype)

    def parameters(self):
        return [self.W, self.b]

    def forward(self, x):  # (..., n_in)
        self.x = x
        return x @ self.W + self.b

    def backward(self, g):  # (..., n_out)
        rows = g.reshape(-1, g.shape[-1])
        self.grads = [self.x.reshape(len(rows), -1).T @ rows, rows.sum(0)]
        return g @ self.W.T


class LayerNorm:
    """Each token to mean 0 and variance 1, then a gain and a shift."""

    def __init__(self, n, dtype):
        self.gain, self.shift = np.ones(n, dtype), np.zeros(n, dtype)

    def parameters(self):
        return [self.gain, self.shift]

    def forward(self, x):  # (B, L, n)
        x = x - x.mean(-1, keepdims=True)
        self.scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        self.normal = x * self.scale
        return self.normal * self.gain + self.shift

    def backward(self, g):
        self.grads = [(g * self.normal).sum((0, 1)), g.sum((0, 1))]
        g = g * self.gain
        along = self.normal * (g * self.normal).mean(-1, keepdims=True)
        return self.scale * (g - g.mean(-1, keepdims=True) - along)


class FeedForward:
    """A hidden layer four times as wide, with GELU in its form with tanh."""

    SLOPE, CUBE = math.sqrt(2 / math.pi), 0.044715

    def __init__(self, n, rng, dtype):
        self.wide, self.narrow = Dense(n, 4 * n, rng, dtype), Dense(4 * n, n, rng, dtype)

    def parameters(self):
        return self.wide.parameters() + self.narrow.parameters()

    def forward(self, x):
        self.h = h = self.wide.forward(x)
        self.t = np.tanh(self.SLOPE * (h + self.CUBE * h * h * h))
        return self.narrow.forward(0.5 * h * (1 + self.t))

    def backward(self, g):
        h, t = self.h, self.t
        slope = self.SLOPE * (1 + 3 * self.CUBE * h * h)
        g = self.narrow.backward(g) * 0.5 * (1 + t + h * (1 - t * t) * slope)
        g = self.wide.backward(g)
        self.grads = self.wide.grads + self.narrow.grads
        return g


class Causal:
    """An attention class, told to look back only and to keep what its backward needs."""

    def __init__(self, attention):
        self.attention = attention

    def parameters(self):
        return self.attention.parameters()

    def forward(self, x):
        return self.attention.forward(x, causal=True, training=True)

    def backward(self, g):
        g = self.attention.backward(g)
        self.grads = self.attention.grads
        return g


class Residual:
    """``x + layer(norm(x))``."""

    def __init__(self, layer, n, dtype):
        self.norm, self.layer = LayerNorm(n, dtype), layer

    def parameters(self):
        return self.norm.parameters() + self.layer.parameters()

    def forward(self, x):
        return x + self.layer.forward(self.norm.forward(x))

    def backward(self, g):
        g = g + self.norm.backward(self.layer.backward(g))
        self.grads = self.norm.grads + self.layer.grads
        return g


class Embedding:
    """What a token is, plus where it stands."""

    def __init__(self, n_tokens, length, n, rng, dtype):
        self.tokens = rng.normal(0, 1, (n_tokens, n)).astype(dtype)
        # Sinusoids to begin with: a head finds its way to a neighbour much sooner than from noise.
        angles = np.arange(length)[:, None] / 10000 ** (np.arange(0, n, 2) / n)
        self.places = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(dtype)

    def parameters(self):
        return [self.tokens, self.places]

    def forward(self, ids):  # (B, L)
        self.ids = ids
        return self.tokens[ids] + self.places[: ids.shape[1]]

    def backward(self, g):
        # A product with ones and zeros: much faster than numpy.add.at.
        of_token = np.equal.outer(np.arange(len(self.tokens)), self.ids.ravel()).astype(g.dtype)
        places = np.zeros_like(self.places)
        places[: g.shape[1]] = g.sum(0)
        self.grads = [of_token @ g.reshape(-1, g.shape[-1]), places]


class LanguageModel:
    """From characters (B, L) to the logits of what follows each, (B, L, alphabet)."""

    def __init__(
        self, attention=fastmha.MultiHeadAttention, *, n_tokens=N_TOKENS, length=LENGTH,
        d_model=D_MODEL, n_heads=N_HEADS, n_blocks=N_BLOCKS, dtype=np.float32, seed=0,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        self.length = length
        self.layers = [Embedding(n_tokens, length, d_model, rng, dtype)]
        for _ in range(n_blocks):
            attend = Causal(attention(d_model, n_heads, seed=rng, dtype=dtype))
            self.layers += [
                Residual(layer, d_model, dtype) for layer in (attend, FeedForward(d_model, rng, dtype))
            ]
        self.layers += [LayerNorm(d_model, dtype), Dense(d_model, n_tokens, rng, dtype)]

    def parameters(self):
        return [x for layer in self.layers for x in layer.parameters()]

    @property
    def grads(self):
        return [g for layer in self.layers for g in layer.grads]

    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, g):
        for layer in reversed(self.layers):
            g = layer.backward(g)


def cross_entropy(logits, targets):
    """The mean of -log softmax(logits)[target], and its gradient with respect to the logits."""
    logits = logits - logits.max(-1, keepdims=True)
    p = np.exp(logits)
    total = p.sum(-1, keepdims=True)
    target = targets[..., None]
    loss = (np.log(total) - np.take_along_axis(logits, target, -1)).mean()
    g = p / total
    np.put_along_axis(g, target, np.take_along_axis(g, target, -1) - 1, -1)
    return float(loss), g / targets.size


class Adam:
    """Kingma and Ba, "Adam" (2015); changes the parameters in place."""

    def __init__(self, parameters, decay=(0.9, 0.99)):
        self.parameters, self.decay, self.t = parameters, decay, 0
        self.first, self.second = ([np.zeros_like(p) for p in parameters] for _ in range(2))

    def step(self, grads, rate):
        self.t += 1
        a, b = self.decay
        rate *= math.sqrt(1 - b**self.t) / (1 - a**self.t)
        for p, g, m, v in zip(self.parameters, grads, self.first, self.second, strict=True):
            m += (1 - a) * (g - m)
            v += (1 - b) * (g * g - v)
            p -= rate * m / (np.sqrt(v) + 1e-8)


# --- text and training ------------------------------------------------------------------------------


def load_text():
    """(training, held out): the topics of ``help()`` as places in ALPHABET."""
    # Topics repeat one another: of equal paragraphs one stays, so that none is on both sides.
    paragraphs = list(dict.fromkeys("\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")))
    held_out = paragraphs[::10]
    del paragraphs[::10]
    return encode("\n\n".join(paragraphs)), encode("\n\n".join(held_out))


def encode(text):
    """Places in ALPHABET; other characters are passed over."""
    return np.array([PLACE[character] for character in text if character in PLACE])


def windows(ids, n, length, rng):
    """n pieces of the text from random places, and the same one character later: (n, length) each."""
    start = rng.integers(0, len(ids) - length, (n, 1))
    return ids[start + np.arange(length)], ids[start + np.arange(1, length + 1)]


def learning_rate(step, steps, peak=1.2e-2):
    """A short rise, then half a cosine down to nothing."""
    rise = max(1, steps // 20)
    if step < rise:
        return peak * (step + 1) / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))


def train_step(model, optimiser, batch, rate):
    """The loss before the step."""
    loss, g = cross_entropy(model.forward(batch[0]), batch[1])
    model.backward(g)
    optimiser.step(model.grads, rate)
    return loss


def train(model, training, held_out, steps, *, seed=0, told=lambda label: None):
    """Losses of all steps; (step, held-out loss) now and then; seconds of all steps."""
    rng = np.random.default_rng(seed)
    optimiser = Adam(model.parameters())
    unseen = windows(held_out, 32, model.length, rng)
    losses, checks, seconds = [], [], []

    def check():
        checks.append((len(losses), cross_entropy(model.forward(unseen[0]), unseen[1])[0]))

    check()
    for step in range(steps):
        batch = windows(training, BATCH, model.length, rng)
        start = time.perf_counter()
        losses.append(train_step(model, optimiser, batch, learning_rate(step, steps)))
        seconds.append(time.perf_counter() - start)
        if (step + 1) % max(1, steps // REPORTS) == 0 or step + 1 == steps:
            check()
        told(f"loss on held-out text {checks[-1][1]:.3f}")
    return losses, checks, seconds


def sample(model, prompt=PROMPT, n=200, seed=0):
    """The prompt, continued by n characters drawn from the model's probabilities."""
    rng = np.random.default_rng(seed)
    ids = encode(prompt).tolist()
    for _ in range(n):
        logits = model.forward(np.array([ids[-model.length :]]))[0, -1]
        ids.append(int(rng.choice(N_TOKENS, p=fastmha.softmax(logits.astype(np.float64)))))
    return "".join(ALPHABET[i] for i in ids)


def compare_speed(training, steps, seed=0):
    """Seconds a step with fastmha and with its NumPy twin, taking turns; and how far their losses are apart.

    In float64, which is what the twin computes in.
    """
    classes = fastmha.MultiHeadAttention, reference.MultiHeadAttention
    models = [LanguageModel(attention, dtype=np.float64, seed=seed) for attention in classes]
    optimisers = [Adam(model.parameters()) for model in models]
    rng = np.random.default_rng(seed)
    seconds, losses = np.empty((2, 2, steps))
    for step in range(steps):
        batch = windows(training, BATCH, LENGTH, rng)
        for i, (model, optimiser) in enumerate(zip(models, optimisers, strict=True)):
            start = time.perf_counter()
            losses[i, step] = train_step(model, optimiser, batch, learning_rate(step, steps))
            seconds[i, step] = time.perf_counter() - start
    return *np.median(seconds, axis=1), np.abs(losses[0] - losses[1]).max()


def draw_curve(path, losses, checks):
    """The loss against the step, as a picture; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats a character)")
    axes.plot(losses, color="#0067a5", alpha=0.4, linewidth=1, label="training batches")
    axes.plot(*zip(*checks, strict=True), color="#c1272d", linewidth=2.2, label="held-out text")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return True


def main(argv=None):
    """Train, and return the exit code."""
    parser = argparse.ArgumentParser(description="Train a small character language model.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--target", type=float, default=TARGET, help="what the loss must fall below")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and samples")
    parser.add_argument("--curve", metavar="PNG", help="where to draw the loss (needs matplotlib)")
    parser.add_argument("--compare", type=int, default=10, metavar="N", help="steps to time; 0: none")
    asked = parser.parse_args(argv)

    terminal = open_terminal()
    training, held_out = load_text()
    model = LanguageModel(seed=asked.seed)
    size = sum(p.size for p in model.parameters())
    terminal.line(f"{len(training):,} characters to learn from, {len(held_out):,} held out; {size:,} weights")
    terminal.heading("Before")
    terminal.line(sample(model, seed=asked.seed))
    terminal.heading("Training")
    with terminal.progress(asked.steps) as told:
        losses, checks, seconds = train(model, training, held_out, asked.steps, seed=asked.seed, told=told)
    terminal.heading("After")
    terminal.line(sample(model, seed=asked.seed))

    terminal.heading("Result")
    first, last = checks[0][1], checks[-1][1]
    terminal.line(f"loss on held-out text: {first:.3f} -> {last:.3f}, expected below {asked.target}")
    terminal.line(f"time a step: {1e3 * np.median(seconds):.0f} ms")
    agree = True
    if asked.compare:
        fast, plain, apart = compare_speed(training, asked.compare, asked.seed)
        agree = apart < SAME
        terminal.line(
            f"in float64: {1e3 * fast:.0f} ms; with fastmha.reference, the same class in plain NumPy, "
            f"{1e3 * plain:.0f} ms: {plain / fast:.1f}x, losses {apart:.0e} apart"
        )
    if asked.curve:
        drawn = draw_curve(asked.curve, losses, checks)
        terminal.line(f"wrote {asked.curve}" if drawn else "no curve: matplotlib is not installed")
    return 0 if last < asked.target and agree else 1


if __name__ == "__main__":
    sys.exit(main())
