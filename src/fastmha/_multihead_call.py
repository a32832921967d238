"""What a call of the class asks: its arguments become one checked record.

All errors that can be known are raised here, before anything is computed or a cache is touched.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np

from . import _checks
from ._dtypes import as_array
from .rope import alibi_slopes
from .weights import real_array


class Asked(NamedTuple):
    """A checked call."""

    x: np.ndarray  # (B, L, d_model)
    source: np.ndarray  # (B, S, d_model), where keys and values come from: x itself, or the context
    lengths: np.ndarray | None  # (B,) int64
    positions: np.ndarray | None  # (L,) or (B, L), of the queries
    key_positions: np.ndarray | None
    options: dict  # of `attention`
    parameters: dict  # the eight, by name


def checked(
    layer, x, *, causal, context, mask, lengths, context_lengths, cache, positions, training, rng
):
    """The arguments of ``layer.forward`` as a record."""
    x = tokens(layer, x, "x")
    B, L, _ = x.shape
    if lengths is not None:
        lengths = _checks.check_lengths(lengths, "lengths", B, L)
    source, key_lengths = x, lengths
    if context is not None:
        source, key_lengths = check_context(layer, context, context_lengths, B)
    elif context_lengths is not None:
        raise ValueError("context_lengths: expected None without a context, got lengths")
    start = None if cache is None else check_cache(cache, context, training, B)
    positions = check_positions(layer, positions, B, L, start, context)
    key_positions = positions
    if layer.rope is not None and context is not None:
        key_positions = np.arange(source.shape[1])
    options = call_options(layer, causal, mask, training, rng)
    if cache is not None:
        check_cached_options(options, cache, start, lengths, (B, layer.n_heads), L)
    else:
        if key_lengths is not None:
            options["key_lengths"] = key_lengths
        if lengths is not None:
            options["query_lengths"] = lengths
    parameters = checked_parameters(layer)
    if training:  # the gradients need x as it is now, and 0 * NaN is not 0
        x = clear(x.copy(), lengths)
        source = x if context is None else clear(source.copy(), key_lengths)
    return Asked(x, source, lengths, positions, key_positions, options, parameters)


def tokens(layer, x, name):
    """x as a (B, L, d_model) array of the layer's dtype."""
    x = converted(x, name, layer.dtype)
    if x.ndim != 3 or x.shape[2] != layer.d_model:
        raise ValueError(
            f"{name}: expected shape (B, L, d_model) with d_model={layer.d_model}, got {x.shape}"
        )
    return x


def converted(x, name, dtype):
    if type(x) is np.ndarray and x.dtype == dtype:
        return x
    x = real_array(x, name)
    with np.errstate(all="ignore"):  # what dtype cannot hold is infinite there
        return x.astype(dtype, copy=False)


def clear(x, lengths):
    """(B, L, n) with zeros past each length, in place."""
    if lengths is not None:
        x[np.arange(x.shape[1]) >= lengths[:, None]] = 0
    return x


# A table, for every assignment to an attribute asks.
OTHER_SPELLINGS = {
    first + dash + last: ours
    for ours in ("Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo", "bo")
    for first, dash, last in itertools.product(
        (ours[0].lower(), ours[0].upper()), ("", "_"), (ours[1], ours[1].upper())
    )
    if first + dash + last != ours
}


def check_spelling(layer, name):
    """Refuses a weight by another class's name: taken in silence, it would change nothing."""
    ours = OTHER_SPELLINGS.get(name)
    if ours and not hasattr(type(layer), name):
        raise AttributeError(f"{name}: expected {ours}, as this class calls it")


def parameter_shapes(layer):
    """The shapes of the eight parameters, in their order."""
    d, kv = layer.d_model, layer.n_kv_heads * layer.d_k
    return {
        "Wq": (d, d),
        "bq": (d,),
        "Wk": (d, kv),
        "bk": (kv,),
        "Wv": (d, kv),
        "bv": (kv,),
        "Wo": (d, d),
        "bo": (d,),
    }


def checked_parameters(layer):
    """The eight parameters by name, of the layer's dtype: users may assign anything to them."""
    found = {}
    for name, shape in parameter_shapes(layer).items():
        x = getattr(layer, name)
        if x is not None or name[0] == "W":
            x = converted(x, name, layer.dtype)
            if x.shape != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {x.shape}")
        found[name] = x
    return found


def check_context(layer, context, context_lengths, B):
    context = tokens(layer, context, "context")
    if len(context) != B:
        raise ValueError(f"context: expected a batch of {B} like x, got {len(context)}")
    if context_lengths is not None:
        S = context.shape[1]
        context_lengths = _checks.check_lengths(context_lengths, "context_lengths", B, S)
    return context, context_lengths


def check_cache(cache, context, training, B):
    """Where the new tokens of each member begin, (B,)."""
    if not hasattr(cache, "attend"):
        raise TypeError(f"cache: expected a KVCache or None, got {type(cache).__name__}")
    if context is not None:
        raise ValueError("context: expected None with a cache, got a context")
    if training:
        raise ValueError("training: expected False with a cache, got True")
    start = np.array(cache.lengths)
    if start.shape != (B,):
        raise ValueError(f"cache: expected a batch of {B} like x, got {start.size}")
    return start


def check_positions(layer, positions, B, L, start, context):
    """Where the tokens of x stand, (L,) or (B, L), or None if nothing asks for it."""
    if positions is None:
        if layer.rope is None:
            return None
        if start is None:
            return np.arange(L)
        if B and (start == start[0]).all():
            return start[0] + np.arange(L)
        return start[:, None] + np.arange(L)
    positions = as_array(positions, "positions")
    if positions.dtype.kind not in "iu" and positions.size:
        raise TypeError(f"positions: expected integers, got {positions.dtype}")
    if positions.shape not in ((L,), (B, L)):
        raise ValueError(f"positions: expected shape ({L},) or ({B}, {L}), got {positions.shape}")
    if layer.alibi:
        # The kernels know keys by their place, and only differences of positions count.
        expected = positions[..., :1] * (context is None) + np.arange(L)
        if not np.array_equal(np.broadcast_to(expected, positions.shape), positions):
            raise ValueError(
                "positions: expected ones that rise by one with alibi=True (with a context: "
                f"0 ... L - 1), got {positions.tolist()}"
            )
    return positions.copy()


def call_options(layer, causal, mask, training, rng):
    """The options of `attention` that are not at their defaults: few, most of the time."""
    _checks.check_causal(causal)
    options = {}
    if not isinstance(causal, (bool, np.bool_)) or causal:
        options["causal"] = causal
    if mask is not None:
        options["mask"] = mask
    if layer.window is not None:
        options["window"] = layer.window
    if layer.softcap is not None:
        options["softcap"] = layer.softcap
    if layer.alibi:
        options["alibi_slopes"] = slopes(layer.n_heads)
    if training:
        p, seed = _checks.check_dropout(layer.dropout, rng)
        if p:  # one seed for the call and its gradients
            options.update(dropout_p=p, rng=seed)
    return options


def check_cached_options(options, cache, start, lengths, lead, L):
    """What the cache would complain of after it has taken the new tokens."""
    options.pop("causal", None)
    mask = options.get("mask")
    if mask is not None and getattr(cache, "window", None) is None:
        S = (start + (L if lengths is None else lengths)).max(initial=0)
        options["mask"] = _checks.check_mask(mask, "mask", lead, L, int(S))


@functools.lru_cache(maxsize=16)
def slopes(n_heads):
    found = alibi_slopes(n_heads)
    found.flags.writeable = False  # shared by all callers
    return found
