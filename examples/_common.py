"""What the examples share: the attention of textbooks, two pieces of every transformer, checks and timing."""

import importlib.util
import math
import time
from pathlib import Path

import numpy as np
from rich.progress import track
from scipy.special import erf


class TextbookAttention:
    """Multi-head attention as textbooks write it, on the weights of a `fastmha.MultiHeadAttention`."""

    def __init__(self, layer):
        self.layer = layer

    def make_cache(self, batch):
        """Keys and values so far: (batch, G, tokens, d_k) each, none yet."""
        empty = np.empty((batch, self.layer.n_kv_heads, 0, self.layer.d_k), self.layer.dtype)
        return [empty, empty]

    def __call__(self, x, *, lengths=None, cache=None):
        """(B, L, d_model) -> the same; causal with a cache. Results past a length mean nothing."""
        layer, (B, L, d_model) = self.layer, x.shape
        q = layer._split_heads(_dense(x, layer.Wq, layer.bq))  # (B, H, L, d_k)
        k = layer._split_heads(_dense(x, layer.Wk, layer.bk))
        v = layer._split_heads(_dense(x, layer.Wv, layer.bv))
        start = 0 if cache is None else cache[0].shape[2]
        positions = np.arange(start, start + L)
        if layer.rope is not None:
            q, k = layer.rope(q, positions), layer.rope(k, positions)
        visible = None if lengths is None else in_use(lengths, L)
        if cache is not None:
            k, v = (np.concatenate(pair, axis=2) for pair in zip(cache, (k, v), strict=True))
            cache[:] = k, v
            visible = positions[:, None] >= np.arange(k.shape[2])
        if layer.n_kv_heads < layer.n_heads:
            k, v = (np.repeat(a, layer.n_heads // layer.n_kv_heads, axis=1) for a in (k, v))
        mixed = textbook_weights(q, k, visible) @ v
        return _dense(mixed.transpose(0, 2, 1, 3).reshape(B, L, d_model), layer.Wo, layer.bo)


def textbook_weights(q, k, visible=None):
    """softmax(q k^T / sqrt(d_k)) of (B, H, L, d_k) and (B, H, S, d_k): all of (B, H, L, S) at once."""
    scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def in_use(lengths, n_keys):
    """Which keys are no padding, as a mask (B, 1, 1, n_keys)."""
    return np.arange(n_keys) < lengths[:, None, None, None]


def _dense(x, W, b):
    return x @ W if b is None else x @ W + b


def layer_norm(x, gamma, beta, eps):
    """Layer normalisation over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    return centred / deviation * gamma + beta


def gelu(x):
    """x times the normal distribution's cumulative probability at x."""
    return x * (1 + erf(x / math.sqrt(2))) / 2


def package_folder(name):
    """Where a package lies, without importing it: of some only the files are needed."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise SystemExit(f"{name} is not installed: pip install 'fastmha[examples]'")
    return Path(spec.submodule_search_locations[0])


def agree(what, actual, expected, tolerance):
    """Print how far two arrays are apart, and return whether that is near enough."""
    difference = float(np.abs(actual - expected).max() / np.abs(expected).max())
    near = difference <= tolerance  # not so with a NaN
    print(
        f"{'ok' if near else 'WRONG'}: {what}: differs by {difference:.1e} of the largest value, "
        f"{tolerance:.0e} allowed"
    )
    return near


def same(what, actual, expected):
    """The same for things that are equal or are not."""
    equal = actual == expected
    print(f"ok: {what}: equal" if equal else f"WRONG: {what}: {actual!r}, expected {expected!r}")
    return equal


def print_speed(run, ours, textbook, rounds):
    """Time `run(model)` of two models in turn, so that what disturbs one disturbs both; print the ratios."""
    times = []  # of each round: (seconds, seconds in the attention) of both
    for model in (ours, textbook):
        model.attention = [_Stopwatch(layer) for layer in model.attention]
    for _ in track(range(rounds), description="timing both"):
        times.append([_time(run, model) for model in (ours, textbook)])
    milliseconds = 1e3 * np.median(times, axis=0)
    for what, (fast, slow) in zip(("whole model", "attention layers"), milliseconds.T, strict=True):
        print(f"{what}: fastmha {fast:.0f} ms, textbook {slow:.0f} ms: {slow / fast:.2f}x as fast")


def _time(run, model):
    for layer in model.attention:
        layer.seconds = 0.0
    start = time.perf_counter()
    run(model)
    return time.perf_counter() - start, sum(layer.seconds for layer in model.attention)


class _Stopwatch:
    """An attention that adds up the time its calls take."""

    def __init__(self, layer):
        self.layer, self.make_cache = layer, layer.make_cache

    def __call__(self, *args, **options):
        start = time.perf_counter()
        result = self.layer(*args, **options)
        self.seconds += time.perf_counter() - start
        return result
