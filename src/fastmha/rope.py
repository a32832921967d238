"""Positions: rotary embedding (RoPE) with its published scalings, and the slopes of ALiBi."""

import math
import numbers
import operator

import numpy as np

from ._dtypes import computed_in, float_array
from ._execute import rotate

__all__ = ["Rope", "alibi_slopes"]


class Rope:
    """Rotary position embedding: pairs of dimensions turn by an angle that grows with the position.

    Pair i of a row at position p turns by ``p * f[i]`` with ``f[i] = base ** (-2 * i / dim)``:
    ``(a, b) -> (a cos - b sin, b cos + a sin)``. The scalar product of two rotated rows then
    depends on the difference of their positions alone.

    Parameters
    ----------
    dim : int
        How many dimensions to rotate, even; those from `dim` on are left alone.
    interleaved : bool
        Which dimensions form pair i: True (2i, 2i+1), as in RoFormer, GPT-J and Meta's Llama
        checkpoints; False (i, i + dim/2), as in GPT-NeoX and the Hugging Face checkpoints. Weights
        trained with one of them give good first tokens and then nonsense with the other, so there
        is no default.
    base : float
        The longest wavelength over 2 pi, almost; ``rope_theta`` of the published configurations.
    scaling : dict or None
        How to go beyond the trained length, as ``rope_scaling`` or ``rope_parameters`` of a
        published Hugging Face configuration says it. ``rope_type`` (or ``type``) is one of

        ``"default"``
            no scaling.
        ``"linear"``
            f / `factor`.
        ``"dynamic"``
            NTK-aware: with N the larger of the call's length (its largest position plus one) and of
            `original_max_position_embeddings` n, base becomes
            ``base * (factor * N / n - (factor - 1)) ** (dim / (dim - 2))``. Since f changes as the
            text grows, keys rotated earlier and kept in a cache keep the f of their time.
        ``"llama3"``
            f where the wavelength w = 2 pi / f is shorter than n / `high_freq_factor`, f / `factor`
            where it is longer than n / `low_freq_factor`, and
            ``(1 - s) * f / factor + s * f`` between them, with
            ``s = (n / w - low_freq_factor) / (high_freq_factor - low_freq_factor)``.
        ``"yarn"``
            ``(1 - r[i]) * f[i] + r[i] * f[i] / factor``, where r rises from 0 to 1 between the
            pairs that turn `beta_fast` (32) times and `beta_slow` (1) times within n, rounded
            outwards unless `truncate` is False. Rotated rows are also multiplied by
            `attention_factor`, by default ``m(1)``, or ``m(mscale) / m(mscale_all_dim)`` where both
            are given and not 0, with ``m(c) = 0.1 * c * log(factor) + 1`` (1 for a factor up to 1).

        Names that another type uses are passed over, as are ``finetuned`` and
        ``partial_rotary_factor``; ``rope_theta`` must be `base`.

    Attributes
    ----------
    dim, interleaved, base, scaling
        As given.
    attention_factor : float
        What rotated rows are multiplied by: YaRN's factor, else 1.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind, `dim` is odd, or the record lacks a number, has a wrong
        one, or a name that is not known.

    Notes
    -----
    Angles are computed in float64 whatever the dtype of the rows; the rotation itself in float64
    for float64, else in float32. Objects pickle, and may be shared by threads and by the layers of
    a model, which then compute the sines and cosines of a step once.

    References
    ----------
    Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021). Chen et al.,
    "Extending context window of large language models via positional interpolation" (2023): linear.
    bloc97 and emozilla (2023): dynamic NTK. Llama team, "The Llama 3 herd of models" (2024). Peng
    et al., "YaRN: efficient context window extension of large language models" (2023). The
    parameters are those of "Utilities for rotary embedding" in the documentation of Hugging Face
    transformers.

    Examples
    --------
    >>> import numpy as np
    >>> import fastmha
    >>> x = np.array([[1.0, 0, 0, 0]])  # (L, D)
    >>> fastmha.Rope(4, interleaved=True)(x, [1]).round(4)
    array([[0.5403, 0.8415, 0.    , 0.    ]])
    >>> fastmha.Rope(4, interleaved=False)(x, [1]).round(4)
    array([[0.5403, 0.    , 0.8415, 0.    ]])
    """

    _tables = None  # (what they are for, cosines, sines) of the last call: replaced, never changed

    def __init__(self, dim, *, interleaved, base=10000.0, scaling=None):
        self.dim = _whole(dim, "dim")
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"dim: expected an even number of at least 2, got {dim}")
        if not isinstance(interleaved, (bool, np.bool_)):
            raise TypeError(f"interleaved: expected a bool, got {type(interleaved).__name__}")
        self.interleaved = bool(interleaved)
        self.base = _positive(base, "base")
        self.scaling = None if scaling is None else dict(_record(scaling))
        kind, given = _read_scaling(self.scaling or {}, self.base)
        self.attention_factor = _attention_factor(given) if kind == "yarn" else 1.0
        self._kind, self._numbers = kind, given
        self._frequencies = _frequencies(kind, self.dim, self.base, given, 0)

    def __call__(self, x, positions):
        """Rotate the rows of x.

        Parameters
        ----------
        x : (..., L, D) float64, float32, float16 or bfloat16, D at least `dim`
        positions : (L,) or (B, L) integers, B the first axis of x; negative ones turn backwards

        Returns
        -------
        ndarray
            Fresh, of x's shape and dtype.

        Raises
        ------
        TypeError
            If x is of another dtype, or the positions are no integers.
        ValueError
            If the shapes do not fit.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> rope = fastmha.Rope(2, interleaved=False)
        >>> x = np.ones((2, 1, 2, 2))  # (B, H, L, D)
        >>> rope(x, [[0, 1], [7, 8]])[:, 0, 0].round(4)
        array([[1.    , 1.    ],
               [0.0969, 1.4109]])
        """
        x, cos, sin = self._prepare(x, positions)
        return rotate(x, cos, sin, self.interleaved)

    def inverse(self, x, positions):
        """Undo the rotation: ``rope.inverse(rope(x, positions), positions)`` is x, rounded.

        Parameters, result and errors as for calling the object; not for dynamic scaling with other
        largest positions.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> rope = fastmha.Rope(2, interleaved=False)
        >>> rope.inverse(rope(np.array([[3.0, 4.0]]), [5]), [5]).round(12)
        array([[3., 4.]])
        """
        x, cos, sin = self._prepare(x, positions)
        square = self.attention_factor**2  # the tables hold the factor once
        return rotate(x, cos / square, -sin / square, self.interleaved)

    def backward(self, grad, positions):
        """The gradient of x, from that of ``rope(x, positions)``.

        The map is linear, and this is its transpose: rotation by minus the angle, times
        `attention_factor`. Where that is 1 the map is orthogonal, and this is `inverse`.
        Parameters, result and errors as for calling the object.

        Examples
        --------
        >>> import numpy as np
        >>> import fastmha
        >>> rope = fastmha.Rope(2, interleaved=False)
        >>> rope.backward(np.array([[1.0, 0.0]]), [1]).round(4)
        array([[ 0.5403, -0.8415]])
        """
        grad, cos, sin = self._prepare(grad, positions)
        return rotate(grad, cos, -sin, self.interleaved)

    def __repr__(self):
        return (
            f"Rope({self.dim}, interleaved={self.interleaved}, base={self.base}, "
            f"scaling={self.scaling})"
        )

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_tables"}

    def _prepare(self, x, positions):
        """x as an array, and the cosines and sines (B or 1, L, dim/2) of its positions."""
        x = float_array(x, "x")
        if x.ndim < 2 or x.shape[-1] < self.dim:
            raise ValueError(f"x: expected (..., L, D) with D >= dim={self.dim}, got {x.shape}")
        p = np.asarray(positions)
        if p.dtype.kind not in "iu" and p.size:
            raise TypeError(f"positions: expected integers, got {p.dtype}")
        L = x.shape[-2]
        if p.shape != (L,) and (x.ndim < 3 or p.shape not in ((len(x), L), (1, L))):
            wanted = f"({L},)" if x.ndim < 3 else f"({L},) or ({len(x)}, {L})"
            raise ValueError(f"positions: expected shape {wanted}, got {p.shape}")
        cos, sin = self._cos_sin(p if p.ndim == 2 else p[None], computed_in(x.dtype))
        return x, cos, sin

    def _cos_sin(self, p, dtype):
        """Tables (..., dim/2) for positions p, attention factor included.

        Query and key of a call, and all layers that share the object, ask for the same ones.
        """
        wanted = (dtype, p.dtype, p.shape, p.tobytes())
        tables = self._tables  # read once: another thread may replace it
        if tables is None or tables[0] != wanted:
            f = self._frequencies
            if self._kind == "dynamic" and p.size:
                f = _frequencies("dynamic", self.dim, self.base, self._numbers, int(p.max()) + 1)
            angles = p[..., None].astype(np.float64) * f
            cos, sin = np.cos(angles), np.sin(angles)
            if self.attention_factor != 1:
                cos, sin = cos * self.attention_factor, sin * self.attention_factor
            tables = (wanted, cos.astype(dtype, copy=False), sin.astype(dtype, copy=False))
            self._tables = tables
        return tables[1:]


# --- scaling --------------------------------------------------------------------------------------

# What a record must have, beside its type.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")}
_PASSED_OVER = {"rope_type", "type", "rope_theta", "truncate", "finetuned", "partial_rotary_factor"}
_KNOWN = _PASSED_OVER.union(*_NEEDED.values(), *_OPTIONAL.values())


def _record(scaling):
    if not (hasattr(scaling, "keys") and hasattr(scaling, "__getitem__")):
        raise TypeError(f"scaling: expected a dict or None, got {type(scaling).__name__}")
    return scaling


def _read_scaling(scaling, base):
    """The type of scaling and its numbers, all checked."""
    kind = scaling.get("rope_type", scaling.get("type", None if scaling else "default"))
    if kind not in _NEEDED:
        raise ValueError(
            f"scaling: expected a rope_type of {', '.join(map(repr, _NEEDED))}, got {kind!r}"
        )
    unknown = sorted(set(scaling) - _KNOWN)
    if unknown:
        raise ValueError(f"scaling: expected names of rope_type {kind!r}, got {unknown[0]!r}")
    if scaling.get("rope_theta", base) != base:
        raise ValueError(
            f"base: expected the record's rope_theta {scaling['rope_theta']}, got {base}"
        )
    found = {}
    for name in _NEEDED[kind]:
        if scaling.get(name) is None:
            raise ValueError(f"scaling: expected {name!r} for rope_type {kind!r}, got none")
        found[name] = _positive(scaling[name], f"scaling[{name!r}]")
    for name in _OPTIONAL.get(kind, ()):
        if scaling.get(name):  # None and 0 stand for the default there
            found[name] = _positive(scaling[name], f"scaling[{name!r}]")
    if kind == "llama3" and found["high_freq_factor"] <= found["low_freq_factor"]:
        raise ValueError(
            f"scaling['high_freq_factor']: expected more than low_freq_factor "
            f"{found['low_freq_factor']}, got {found['high_freq_factor']}"
        )
    if kind == "yarn":
        if base <= 1:
            raise ValueError(f"base: expected more than 1 for rope_type 'yarn', got {base}")
        found["truncate"] = bool(scaling.get("truncate", True))
    return kind, found


def _frequencies(kind, dim, base, given, length):
    """Angles per position (dim/2,), float64; see `Rope` for the formulas."""
    if kind == "dynamic" and dim > 2:  # the one pair of dim 2 turns by 1, whatever the base
        factor, trained = given["factor"], given["original_max_position_embeddings"]
        stretch = factor * max(length, trained) / trained - (factor - 1)
        base = base * stretch ** (dim / (dim - 2))
    f = 1.0 / base ** (np.arange(0, dim, 2) / dim)
    if kind == "linear":
        return f / given["factor"]
    if kind == "llama3":
        return _llama3(f, **given)
    if kind == "yarn":
        r = _yarn_ramp(dim, base, given)
        return (1 - r) * f + r * (f / given["factor"])
    return f


def _llama3(f, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings):
    turns = f * original_max_position_embeddings / (2 * math.pi)  # within the trained length
    s = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    s = np.clip(s, 0, 1)  # 0: long wavelengths, 1: short ones
    return (1 - s) * (f / factor) + s * f


def _yarn_ramp(dim, base, given):
    """0 for pairs that turn often within the trained length, 1 for those that hardly do."""
    trained = given["original_max_position_embeddings"]

    def pair_that_turns(times):
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

    low = pair_that_turns(given.get("beta_fast", 32.0))
    high = pair_that_turns(given.get("beta_slow", 1.0))
    if given["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as published: a step in place of a ramp
    return np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)


def _attention_factor(given):
    if "attention_factor" in given:
        return given["attention_factor"]

    def m(c):
        return 0.1 * c * math.log(given["factor"]) + 1 if given["factor"] > 1 else 1.0

    if "mscale" in given and "mscale_all_dim" in given:
        return m(given["mscale"]) / m(given["mscale_all_dim"])
    return m(1.0)


# --- ALiBi ----------------------------------------------------------------------------------------


def alibi_slopes(n_heads):
    """The slopes of ALiBi, one a head, as in the authors' published code.

    Head i of a power of two n has the slope ``2 ** (-8 * (i + 1) / n)``. Other numbers take the
    slopes of the next lower power of two, and then every other slope of the next higher one: not
    the paper's formula, but what models were trained with.

    Parameters
    ----------
    n_heads : int
        At least 1.

    Returns
    -------
    ndarray
        (n_heads,) float64, for `alibi_slopes` of `attention`.

    Raises
    ------
    TypeError, ValueError
        If `n_heads` is no integer, or less than 1.

    References
    ----------
    Press, Smith, Lewis, "Train short, test long: attention with linear biases enables input length
    extrapolation" (2022), and its code, ``get_slopes`` in ofirpress/attention_with_linear_biases.

    Examples
    --------
    >>> import fastmha
    >>> fastmha.alibi_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    n_heads = _whole(n_heads, "n_heads")
    if n_heads < 1:
        raise ValueError(f"n_heads: expected at least 1, got {n_heads}")
    n = 1 << (n_heads.bit_length() - 1)
    exponents = np.arange(1, n + 1) * (8 / n)
    between = np.arange(1, 2 * n, 2)[: n_heads - n] * (4 / n)
    return 2.0 ** -np.concatenate([exponents, between])


# --- arguments ------------------------------------------------------------------------------------


def _whole(n, name):
    if isinstance(n, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an integer, got a bool")
    try:
        return operator.index(n)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {type(n).__name__}") from None


def _positive(x, name):
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name}: expected a real number, got {type(x).__name__}")
    if not 0 < x < math.inf:
        raise ValueError(f"{name}: expected a positive, finite number, got {x}")
    return float(x)
