"""Whole calls of `attention`, drawn by hypothesis or by a seed: sizes, dtypes, strides, options.

Everything is a choice from a finite list: `pick(choices)` returns one of them, and the simplest
come first, for hypothesis shrinks towards them.
"""

import importlib.util
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

# Odd, prime, and one off the sizes of tiles.
LENGTHS = [
    1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193,
]  # fmt: skip
WIDTHS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97]
SHORT = [n for n in LENGTHS if n <= 17]
MANY = [900, 6143, 6145, 13001]  # keys, where few rows are shared out among threads
OPTIONS = (
    "mask", "causal", "window", "scale", "softcap", "alibi_slopes", "sinks", "key_lengths",
    "query_lengths", "dropout", "layout",
)  # fmt: skip
FLOATS = ["float64", "float32", "float16"]
if importlib.util.find_spec("ml_dtypes"):
    FLOATS.append("bfloat16")


class Call(NamedTuple):
    """Arguments of `fastmha.attention`."""

    query: Any
    key: Any
    value: Any
    options: dict

    @property
    def arrays(self):
        """All arrays of the call, by name."""
        found = {"query": self.query, "key": self.key, "value": self.value, **self.options}
        return {name: x for name, x in found.items() if isinstance(x, np.ndarray)}


def as_dtype(name):
    if name == "bfloat16":
        from ml_dtypes import bfloat16

        return np.dtype(bfloat16)
    return np.dtype(name)


# --- strides --------------------------------------------------------------------------------------


def _junk(shape, dtype):
    """What lies between the elements of a view: not to be read."""
    integer = dtype.kind in "iu"
    junk = True if dtype.kind == "b" else np.iinfo(dtype).max if integer else np.nan
    return np.full(shape, junk, dtype)


def _transposed(x):
    axes = (-2, -3) if x.ndim > 2 else (0, -1)
    return np.ascontiguousarray(x.swapaxes(*axes)).swapaxes(*axes)


def _fused(x):
    buffer = _junk((*x.shape[:-1], 3, x.shape[-1]), x.dtype)
    buffer[..., 1, :] = x
    return buffer[..., 1, :]


def _every_other(x):
    buffer = _junk((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    buffer[..., ::2] = x
    return buffer[..., ::2]


def _every_other_row(x):
    buffer = _junk((2 * x.shape[0], *x.shape[1:]), x.dtype)
    buffer[1::2] = x
    return buffer[1::2]


def _reversed_rows(x):
    axis = max(0, x.ndim - 2)
    return np.flip(np.flip(x, axis).copy(), axis)


def _unaligned(x):
    buffer = np.empty(x.nbytes + 1, np.uint8)
    view = buffer[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def _swapped(x):
    return x.astype(x.dtype.newbyteorder("S"))


def _read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def _repeated_rows(x):
    axis = max(0, x.ndim - 2)
    return np.broadcast_to(x.take([0] if x.shape[axis] else [], axis), x.shape)


# Each takes an array of one axis or more and returns one of the same shape and dtype, and the same
# numbers save for the last.
ARRANGEMENTS = {
    "contiguous": np.copy,
    "transposed": _transposed,
    "Fortran": np.asfortranarray,
    "fused": _fused,
    "every other": _every_other,
    "every other row": _every_other_row,
    "reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "reversed rows": _reversed_rows,
    "unaligned": _unaligned,
    "byte-swapped": _swapped,
    "read-only": _read_only,
    "repeated rows": _repeated_rows,
}
SAME_NUMBERS = [name for name in ARRANGEMENTS if name != "repeated rows"]


def arrange(x, name):
    return ARRANGEMENTS[name](x) if x.ndim else x


# --- options --------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    B: int
    H: int
    L: int
    S: int


def mask_shapes(B, H, L, S):
    """Every way to broadcast to (B, H, L, S) that is in use."""
    return [
        (S,), (L, S), (B, 1, 1, S), (B, H, L, S), (1, S), (L, 1), (1,), (), (H, 1, 1), (H, 1, S),
        (H, L, S), (1, 1, 1, S), (1, H, L, S), (B, 1, L, 1), (B, 1, L, S), (B, H, 1, 1),
    ]  # fmt: skip


def draw_mask(pick, rng, n, arranged=True):
    shape = pick(mask_shapes(*n))
    kind = pick(["bool", "float32", "float64", "float16", *FLOATS[3:]])
    share = pick([0.5, 0.9, 0.1, 1.0, 0.0])
    if kind == "bool":
        mask = rng.random(shape) < share
    else:
        mask = rng.standard_normal(shape)
        # A very large finite bias is not an infinite one.
        least = -np.inf if pick([True, False]) or kind in FLOATS[2:] else np.finfo(kind).min
        mask = np.where(rng.random(shape) < share, mask, least).astype(as_dtype(kind))
    mask = np.asarray(mask)
    return arrange(mask, pick(list(ARRANGEMENTS))) if arranged else mask


def draw_options(pick, rng, n, names, arranged=True):
    drawn = {}
    sides = [-1, 0, 1, 2, 7, 16, 31, 64, 97, 10**9]
    for name in names:
        if name == "mask":
            drawn["mask"] = draw_mask(pick, rng, n, arranged)
        elif name == "causal":
            drawn["causal"] = pick([True, "bottom-right", "top-left"])
        elif name == "window":
            drawn["window"] = (pick(sides), pick(sides))
        elif name == "scale":
            drawn["scale"] = pick([1.0, 0, -0.3, 0.02, np.float64(0.5), np.float32(0.25)])
        elif name == "softcap":
            drawn["softcap"] = pick([1.0, 30.0, 0.3, np.float64(5), 0])
        elif name == "alibi_slopes":
            drawn["alibi_slopes"] = rng.random(n.H).astype(pick(["float64", "float32"]))
        elif name == "sinks":
            sinks = pick([1, 20]) * rng.standard_normal(n.H)
            drawn["sinks"] = sinks.astype(pick(["float64", "float32"]))
        elif name == "key_lengths":
            drawn["key_lengths"] = rng.integers(0, n.S + 1, n.B).astype(pick(["int64", "int32"]))
        elif name == "query_lengths":
            drawn["query_lengths"] = rng.integers(0, n.L + 1, n.B).astype(pick(["int64", "uint8"]))
        elif name == "dropout":
            drawn["dropout_p"] = pick([0.5, 0.1, 0.9, 1.0])
            drawn["rng"] = pick([0, 1, 2**32 - 1, 2**32, 2**64 - 1, 0x123456789ABCDEF])
        elif name == "layout":
            drawn["layout"] = "BLHD"
    return drawn


# --- calls ----------------------------------------------------------------------------------------


def make_call(
    pick,
    *,
    options=None,
    dtypes=FLOATS,
    lengths=LENGTHS,
    widths=WIDTHS,
    arranged=True,
    zeros=False,
    many=(False,),
):
    """One call, with the `options` named, or any of them (None).

    `zeros`: a size may be 0. `many`: chosen from whether there are few rows and many keys.
    """
    rng = np.random.default_rng(pick(range(2**32)))
    dtype = as_dtype(pick(dtypes))
    B, G, group = pick([1, 2, 3]), pick([1, 2, 3]), pick([1, 2, 3, 8])
    L, S, D, E = pick(lengths), pick(lengths), pick(widths), pick(widths)
    kv_batch = pick([B, 1])
    if pick(many):
        B = G = kv_batch = 1
        L, S, D, E = min(L, 33), pick(MANY), pick([16, 33, 64]), pick([16, 9, 64])
    if zeros:
        none = pick(["", "", "B", "G", "L", "S", "E"])
        sizes = zip("BGLSE", (B, G, L, S, E), strict=True)
        B, G, L, S, E = (0 if name == none else n for name, n in sizes)
        kv_batch = min(kv_batch, max(B, 1))
    n = Sizes(B, G * group, L, S)
    names = [name for name in OPTIONS if pick([False, True])] if options is None else options
    drawn = draw_options(pick, rng, n, names, arranged)
    size = pick([1, 4])  # of queries, and so of scores
    arrays = []
    for shape in (B, n.H, L, D), (kv_batch, G, S, D), (kv_batch, G, S, E):
        x = rng.standard_normal(shape).astype(dtype)
        x = x.swapaxes(1, 2) if drawn.get("layout") == "BLHD" else x
        x = (x * size).astype(dtype) if not arrays else x
        arrays.append(arrange(x, pick(list(ARRANGEMENTS))) if arranged else np.ascontiguousarray(x))
    return Call(*arrays, drawn)


@st.composite
def calls(draw, **kinds):
    return make_call(lambda choices: draw(st.sampled_from(choices)), **kinds)


def seeded_calls(n, seed=0, **kinds):
    """n calls, the same everywhere."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        yield make_call(lambda choices: choices[int(rng.integers(len(choices)))], **kinds)
