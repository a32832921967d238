"""What the caches share: stored rows, the checks of queries, and the kernels where the keys lie.

A `Held` says what a cache holds at the moment and where; `ask` makes a query to it a checked
`Problem`, and `answer` runs it.
"""

import operator
from typing import NamedTuple

import numpy as np

from ._checks import (
    BOUNDLESS,
    check_dropout,
    check_lengths,
    check_mask,
    check_offsets,
    check_per_head,
    check_scale,
    check_softcap,
    check_window,
)
from ._dispatch import double, single
from ._dtypes import DOUBLE, FLOATS, float_array, storage
from ._problem import Options, Problem
from .weights import float_dtype

INT8 = 5  # in `_storage.h`


class Held(NamedTuple):
    """Keys and values, and where they lie."""

    k: np.ndarray  # (B, G, slots, D), or (pages, G, page, D)
    v: np.ndarray  # (B, G, slots, E), or (pages, G, page, E)
    k_scales: np.ndarray | None  # (B, G, slots), or (pages, G, page)
    v_scales: np.ndarray | None
    lengths: np.ndarray  # (B,) int64, not shared with anybody
    most: int  # the largest of them
    alike: bool  # whether all are the same
    left: int = BOUNDLESS  # the most keys before its own that a query may see
    ring: int = 0  # key j lies in slot j % ring
    page: int = 0  # or in row j % page of the page table[member, j // page]
    table: np.ndarray | None = None  # (B, at least as many as are used) int64


# --- what is stored -------------------------------------------------------------------------------


def count(n, name, least=0):
    """A whole number of at least `least`."""
    if isinstance(n, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an integer, got a bool")
    try:
        n = operator.index(n)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {type(n).__name__}") from None
    if n < least:
        raise ValueError(f"{name}: expected at least {least}, got {n}")
    return n


def cache_dtype(dtype):
    """What rows may be stored in, as a dtype."""
    try:
        if dtype == "bfloat16" or np.dtype(dtype) != np.int8:
            return float_dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype: expected {FLOATS}, or 'int8', got {dtype!r}") from None
    return np.dtype(np.int8)


def code(dtype):
    """The kernels' number for what rows are stored in."""
    return INT8 if dtype == np.int8 else storage(dtype)


def new_rows(x, name, shape):
    """Keys or values to append; `shape` says what they must be, with None for any."""
    x = float_array(x, name)
    if len(x.shape) != len(shape) or any(
        want is not None and have != want for have, want in zip(x.shape, shape, strict=True)
    ):
        expected = ", ".join("n" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: expected shape ({expected}), got {x.shape}")
    return x


class Store(NamedTuple):
    """Rows, and where they are int8 a scale for each."""

    rows: np.ndarray  # (..., slots, width)
    scales: np.ndarray | None  # (..., slots)

    @property
    def nbytes(self):
        return self.rows.nbytes + (0 if self.scales is None else self.scales.nbytes)


def empty_store(shape, dtype):
    scales = np.empty(shape[:-1], np.float32) if dtype == np.int8 else None
    return Store(np.empty(shape, dtype), scales)


def put(store, index, x):
    """``store[index] = x``, both (B, G, n, width), in the store's element type."""
    rows, scales = store
    if x.dtype == rows.dtype:
        rows[index] = x
    else:
        scales = None if scales is None else scales[index]
        _converting(x, rows).store(x, storage(x.dtype), rows[index], code(rows.dtype), scales)


def scatter(store, first, slots, x):
    """``store[first[i], :, slots[i]] = x[i]`` for x (T, G, width)."""
    rows, scales = store
    codes = storage(x.dtype), code(rows.dtype)
    _converting(x, rows).store(x[:, :, None], codes[0], rows, codes[1], scales, first, slots)


def _converting(x, rows):
    """The kernels that convert x: those for float64 make what is too large infinite."""
    return double if DOUBLE in (x.dtype, rows.dtype) and rows.dtype != np.int8 else single


def move(source, index, target, place):
    """``target[place] = source[index]``, stores of one element type."""
    target.rows[place] = source.rows[index]
    if source.scales is not None:
        target.scales[place] = source.scales[index]


# --- what is asked --------------------------------------------------------------------------------


def check_query(q, held, axes):
    """q, whose axes are (B, H, L, D), (B, L, H, D) or (T, H, D), as (B, H, L, D) or (H, T, D)."""
    q = float_array(q, "q")
    B, G, D = len(held.lengths), held.k.shape[1], held.k.shape[3]
    if q.ndim == len(axes):
        H = q.shape[axes.index("H")]
        fits = H % G == 0 if G else H == 0
        if fits and q.shape[-1] == D and (axes[0] == "T" or q.shape[0] == B):
            return q if axes == "BHLD" else q.swapaxes(-3, -2)
    sizes = f"H a multiple of {G} and D = {D}" if G else f"H = 0 and D = {D}"
    if axes[0] == "B":
        sizes = f"B = {B}, {sizes}"
    raise ValueError(f"q: expected ({', '.join(axes)}) with {sizes}, got shape {q.shape}")


def check_packing(offsets, B, rows):
    """The offsets of B packed sequences."""
    found = check_offsets(offsets, "cu_seqlens", rows)
    if len(found) != B + 1:
        raise ValueError(f"cu_seqlens: expected {B + 1} offsets, got {len(found)}")
    return found


def ask(
    held,
    q,
    lengths=None,
    *,
    offsets=None,
    mask=None,
    window=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    rng=None,
    layout="BHLD",
):
    """A query to what is held, causal and aligned at the bottom right, as a checked `Problem`.

    With the `offsets` of a packed batch, q is (T, H, D), and in the problem (H, T, D).
    """
    if layout not in ("BHLD", "BLHD"):
        raise ValueError(f"layout: expected 'BHLD' or 'BLHD', got {layout!r}")
    q = check_query(q, held, layout if offsets is None else "THD")
    *lead, L, D = q.shape
    H = lead[-1]
    shift, shifts, asked, starts = held.most - L, None, None, None
    if offsets is not None:
        offsets = check_packing(offsets, len(held.lengths), L)
        asked, starts = np.diff(offsets), offsets[:-1]
        shifts = held.lengths - asked
    elif lengths is not None:
        asked = check_lengths(lengths, "lengths", lead[0], L)
        shifts = held.lengths - asked
    elif not held.alike:
        shifts = held.lengths - L
    if mask is not None:
        mask = check_mask(mask, "mask", tuple(lead), L, held.most)
    left = held.left
    if window is not None:
        left, _ = check_window(window, True)
        if left > held.left:
            raise ValueError(
                f"window: expected at most the {held.left} earlier keys that the cache keeps, got {window}"
            )
    seed = 0
    if dropout_p != 0 or rng is not None:
        dropout_p, seed = check_dropout(dropout_p, rng)
    options = Options(
        check_scale(scale, D),
        check_softcap(softcap),
        left,
        0,
        shift,
        shifts,
        None if alibi_slopes is None else check_per_head(alibi_slopes, "alibi_slopes", H),
        None if sinks is None else check_per_head(sinks, "sinks", H),
        None if held.alike and not held.page else held.lengths,
        asked,
        dropout_p,
        seed,
        starts,
    )
    return Problem(q, held.k, held.v, mask, tuple(lead), options)


# --- the answer -----------------------------------------------------------------------------------


def run(held, problem, out, lse=None, weights=None):
    """Runs the kernels: out (B, H, L, E); lse (B, H, L) and weights (B, H, L, S) if wanted."""
    q, k, v, mask, lead, options = problem
    if 0 in lead or not len(held.lengths):
        return
    if weights is not None:
        v = v[..., :0]
    codes = (
        storage(q.dtype),
        code(k.dtype),
        code(k.dtype),
        storage(q.dtype),
        0 if lse is None else storage(lse.dtype),
        0 if mask is None else storage(mask.dtype),
        0 if weights is None else storage(weights.dtype),
    )
    place = None
    if held.ring or held.page or held.k_scales is not None:
        place = (held.most, held.ring, held.page, held.table, held.k_scales, held.v_scales)
    # float64 is never computed in less, whichever of the two it is.
    kernels = double if DOUBLE in (q.dtype, k.dtype) else single
    kernels.attend(q, k, v, out, lse, mask, weights, codes, options, place)


def answer(held, problem, out, swapped, want_lse):
    """The output (B, H, L, E), or (B, L, H, E) if `swapped`; and the LSE (B, H, L), or None."""
    q = problem.q
    B, H, L, _ = q.shape
    if out is None:
        E = held.v.shape[3]
        out = np.empty((B, L, H, E) if swapped else (B, H, L, E), q.dtype)
    lse = np.empty((B, H, L), problem.lse_dtype) if want_lse else None
    run(held, problem, out.swapaxes(1, 2) if swapped else out, lse)
    return out, lse


def weigh(held, problem):
    """The probabilities (B, H, L, S)."""
    q = problem.q
    weights = np.zeros((*q.shape[:3], held.most), problem.lse_dtype)
    run(held, problem, np.empty((*q.shape[:3], 0), q.dtype), weights=weights)
    return weights
