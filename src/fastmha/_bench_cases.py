"""The case table of the benchmark, as data; how much work a case is, and its arrays."""

from __future__ import annotations

import fnmatch
import math
from typing import NamedTuple

import numpy as np

__all__ = [
    "CASES",
    "LENGTHS",
    "SEED",
    "Case",
    "Inputs",
    "Skipped",
    "array_dtype",
    "flops",
    "length_sweep",
    "lengths",
    "make_inputs",
    "select",
    "traffic",
    "visible",
]


class Case(NamedTuple):
    """What is computed; letters as everywhere in the package."""

    name: str
    B: int
    H: int
    G: int
    L: int
    S: int
    D: int
    E: int
    kind: str = "attention"  # or "layer": the class, with d_model = H*D
    dtype: str = "float32"
    causal: bool = False
    mask: str | None = None  # "bool" or "additive" (L, S), "padding" (B, 1, 1, S)
    window: tuple[int, int] | None = None
    dropout: float = 0.0
    layout: str = "BHLD"  # in memory; or "BLHD", "fused" (B, L, 3, H, D), "5-D" (B, 2, H/2, L, D)
    values: str = "normal"  # or "denormal": all weights but one a row are denormal numbers
    cold: bool = False  # keys and values come from memory; the limit is its bandwidth
    beside: str | None = None  # a case whose time is taken in the same run, for the ratio


def _case(name, B, H, L, D, *, G=None, S=None, E=None, **options):
    return Case(name, B, H, G or H, L, S or L, D, E or D, **options)


def _layer(name, B, L, H=8, D=64, **options):
    return Case(name, B, H, H, L, L, D, D, kind="layer", **options)


CASES = (
    _case("full-2048-d64", 1, 8, 2048, 64),
    _case("full-2048-d32", 1, 8, 2048, 32),
    _case("full-2048-d96", 1, 8, 2048, 96),
    _case("full-2048-d128", 1, 8, 2048, 128),
    _case("full-1024", 1, 8, 1024, 64),
    _case("full-1000", 1, 8, 1000, 64, beside="full-1024"),
    _case("full-64", 1, 8, 64, 64),
    _case("full-65", 1, 8, 65, 64, beside="full-64"),
    _case("full-1head-4096", 1, 1, 4096, 64),
    _case("causal-2048", 1, 8, 2048, 64, causal=True),
    _case("causal-512-h12", 1, 12, 512, 64, causal=True),
    _case("causal-512-g8", 1, 32, 512, 128, G=8, causal=True),
    _case("f64-full-1024", 1, 8, 1024, 64, dtype="float64"),
    _case("f64-causal-1024", 1, 8, 1024, 64, dtype="float64", causal=True),
    _case("bf16-full-1024", 1, 8, 1024, 64, dtype="bfloat16"),
    _case("f16-full-1024", 1, 8, 1024, 64, dtype="float16"),
    _case("mask-bool-1024", 1, 8, 1024, 64, mask="bool", beside="full-1024"),
    _case("mask-add-1024", 1, 8, 1024, 64, mask="additive", beside="full-1024"),
    # As many keys as the members of the next case see on the average.
    _case("full-512-on-320", 4, 8, 512, 64, S=320),
    _case("padding-512", 4, 8, 512, 64, mask="padding", beside="full-512-on-320"),
    _case("padding-512-d32", 4, 4, 512, 32, mask="padding"),
    _case("window-256-8192", 1, 4, 8192, 64, causal=True, window=(256, 0)),
    _case("dropout-1024", 1, 8, 1024, 64, dropout=0.1, beside="full-1024"),
    _case("denormal-1024", 1, 8, 1024, 64, values="denormal", beside="full-1024"),
    _case("views-blhd-2048", 1, 8, 2048, 64, layout="BLHD", beside="full-2048-d64"),
    _case("views-fused-2048", 1, 8, 2048, 64, layout="fused", beside="full-2048-d64"),
    _case("views-5d-2048", 1, 8, 2048, 64, layout="5-D", beside="full-2048-d64"),
    _case("odd-113-d72", 3, 5, 113, 72),
    _case("odd-197-vit", 8, 12, 197, 64),
    _case("odd-577-d80", 1, 16, 577, 80),
    _case("odd-1000-d40", 1, 8, 1000, 40),
    _case("odd-d192-e128", 1, 8, 1024, 192, E=128, causal=True),
    _case("short-64x12x16", 64, 12, 16, 64),
    _case("short-8x12x128", 8, 12, 128, 64),
    _case("short-8x4x16-d32", 8, 4, 16, 32),
    _case("tiny-1x12x10", 1, 12, 10, 64),
    _case("tiny-2x8x6", 2, 8, 6, 64),
    _case("tiny-1x8x32", 1, 8, 32, 64),
    _case("tiny-1x2x8-d16", 1, 2, 8, 16),
    _case("tiny-1x1x1-d16", 1, 1, 1, 16),
    _case("decode-32on32", 1, 32, 1, 128, S=4096, cold=True),
    _case("decode-32on8", 1, 32, 1, 128, G=8, S=4096, cold=True),
    _case("decode-32on8-f16", 1, 32, 1, 128, G=8, S=4096, dtype="float16", cold=True),
    _case("decode-32on8-bf16", 1, 32, 1, 128, G=8, S=4096, dtype="bfloat16", cold=True),
    _case("decode-32on1", 1, 32, 1, 128, G=1, S=8192, cold=True),
    _case("decode-1on1-32768", 1, 1, 1, 64, S=32768, cold=True),
    _layer("layer-4x512", 4, 512),
    _layer("layer-1x128", 1, 128),
    _layer("layer-one-token", 1, 1),
    _layer("layer-f64-4x512", 4, 512, dtype="float64", causal=True),
    _layer("layer-odd-3x113", 3, 113, H=5, D=40, causal=True),
)

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def length_sweep(lengths=LENGTHS):
    """Return the cases of throughput against length, full and causal."""
    return tuple(
        _case(f"{'causal' if causal else 'full'}-L{L}", 1, 8, L, 64, causal=causal)
        for causal in (False, True)
        for L in lengths
    )


def select(cases, patterns):
    """Return the cases whose names match any pattern, a shell pattern or a part of the name."""
    if not patterns:
        return tuple(cases)
    patterns = [p if any(c in p for c in "*?[") else f"*{p}*" for p in patterns]
    return tuple(c for c in cases if any(fnmatch.fnmatchcase(c.name, p) for p in patterns))


# How much work a case is ----------------------------------------------------------------------


def lengths(case):
    """Return the keys that each member has under a padding mask: S down to S/4 over the batch."""
    falling = [case.S - 3 * case.S * b // (4 * max(case.B - 1, 1)) for b in range(case.B)]
    return np.array(falling if case.mask == "padding" else [case.S] * case.B)


def visible(case, rows=None):
    """Return which keys the rows see by causality and window, (rows, S) of bool; None: all."""
    if not case.causal and case.window is None:
        return None
    left, right = case.window or (-1, -1)
    i = np.arange(case.L)[:, None] if rows is None else np.asarray(rows)[:, None]
    j = np.arange(case.S)
    seen = j <= i if case.causal else np.ones((len(i), case.S), bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


def flops(case):
    """Return the floating-point operations of the matrix products that the result needs.

    Keys hidden by causality, a window or padding do not count; those hidden by a dense mask do,
    since no order of computing can leave them out.
    """
    left, right = case.window or (-1, -1)
    i = np.arange(case.L)
    first = np.maximum(i - left, 0) if left >= 0 else np.zeros_like(i)
    last = i if case.causal else np.full_like(i, case.S)
    if right >= 0:
        last = np.minimum(last, i + right)
    pairs = sum(
        int(np.maximum(np.minimum(last, n - 1) - first + 1, 0).sum()) for n in lengths(case)
    )
    count = 2 * pairs * case.H * (case.D + case.E)
    if case.kind == "layer":
        count += 2 * case.B * case.L * _weights(case)
    return count


def traffic(case):
    """Return the bytes of all inputs and outputs, each read or written once."""
    if case.kind == "layer":
        numbers = _weights(case) + 2 * case.B * case.L * case.H * case.D
    else:
        numbers = case.B * (case.H * case.L + case.G * case.S) * (case.D + case.E)
    return numbers * (8 if case.dtype == "float64" else 2 if "16" in case.dtype else 4)


def _weights(case):
    """How many numbers the four matrices of a layer hold."""
    return 2 * case.H * case.D * (case.H + case.G) * case.D


# The arrays -----------------------------------------------------------------------------------


class Skipped(Exception):
    """Something that cannot or need not be measured, and why."""


class Inputs(NamedTuple):
    """The arrays of a case: (query, key, value), or (x,) of a layer; and the mask."""

    arrays: tuple
    mask: np.ndarray | None


SEED = 20  # of dropout


def make_inputs(case):
    """Return the arrays that all competitors get, as views in the case's layout.

    Raises
    ------
    Skipped
        Where the dtype needs a package that is not installed.
    """
    rng = np.random.default_rng(0)
    dtype = array_dtype(case.dtype)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    B, H, G, L, S, D, E = case[1:8]
    if case.kind == "layer":
        return Inputs((normal(B, L, H * D),), None)
    if case.layout == "BHLD":
        arrays = normal(B, H, L, D), normal(B, G, S, D), normal(B, G, S, E)
    elif case.layout == "BLHD":
        arrays = normal(B, L, H, D), normal(B, S, G, D), normal(B, S, G, E)
        arrays = tuple(x.swapaxes(1, 2) for x in arrays)
    elif case.layout == "fused":
        fused = normal(B, L, 3, H, D)
        arrays = tuple(fused[:, :, i].swapaxes(1, 2) for i in range(3))
    else:
        arrays = tuple(normal(B, 2, H // 2, L, D) for _ in range(3))
    if case.values == "denormal":
        # One key scores about 95 more than the others, and exp(-95) is denormal in float32.
        arrays[0][..., 0], arrays[1][..., 0] = 8, 0
        arrays[1][..., S // 2, 0] = 95 * math.sqrt(D) / 8
    mask = None
    if case.mask == "padding":
        mask = (np.arange(S) < lengths(case)[:, None])[:, None, None]
    elif case.mask == "bool":
        mask = rng.random((L, S)) < 0.9
    elif case.mask == "additive":
        mask = rng.standard_normal((L, S)).astype(dtype)
    return Inputs(arrays, mask)


def array_dtype(name):
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise Skipped("bfloat16 needs ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)
