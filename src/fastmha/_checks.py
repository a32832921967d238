"""Arguments, one by one: each check returns what it stands for, or says what was expected.

Vectors that the kernels use as indices are copied first and checked then, so that no other thread can
change them in between.
"""

import math
import numbers
import operator
import secrets

import numpy as np

from ._dtypes import as_array, mask_array, real_array

BOUNDLESS = 1 << 60


def check_mask(mask, name, lead, L, S):
    """`mask` as an array that broadcasts to (*lead, L, S)."""
    mask = mask_array(mask, name)
    want = (*lead, L, S)
    if mask.ndim > len(want) or any(
        have not in (1, need) for have, need in zip(mask.shape[::-1], want[::-1], strict=False)
    ):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to (..., H, L, S) = {want}, got {mask.shape}"
        )
    return mask


def check_real(x, name):
    """A Python or NumPy real scalar as a float."""
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name}: expected a real number, got {type(x).__name__}")
    return float(x)


def check_scale(scale, D):
    if scale is None:
        if D == 0:
            raise ValueError("scale: expected a number where the head size D is 0, got None")
        return 1 / math.sqrt(D)
    scale = check_real(scale, "scale")
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return scale


def check_softcap(softcap):
    if softcap is None:
        return 0.0
    softcap = check_real(softcap, "softcap")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap: expected a finite number of at least 0, or None, got {softcap}")
    return softcap


def check_causal(causal):
    """Whether the mask is causal, and whether positions are aligned at the bottom right."""
    if isinstance(causal, str):
        if causal in ("top-left", "bottom-right"):
            return True, causal == "bottom-right"
    elif isinstance(causal, (bool, np.bool_)):
        return bool(causal), False
    else:
        raise TypeError(
            f"causal: expected a bool, 'top-left' or 'bottom-right', got {type(causal).__name__}"
            + ("; pass a mask as mask=" if hasattr(causal, "__array__") else "")
        )
    raise ValueError(f"causal: expected a bool, 'top-left' or 'bottom-right', got {causal!r}")


def check_window(window, causal):
    """(left, right) in keys, a causal mask included."""
    left = right = BOUNDLESS
    if window is not None:
        try:
            left, right = (operator.index(side) for side in window)
        except (TypeError, ValueError):
            raise TypeError(
                f"window: expected two integers (left, right), got {window!r}"
            ) from None
        if left < -1 or right < -1:
            raise ValueError(
                f"window: expected (left, right) of at least -1, which means unbounded, got {window}"
            )
        left, right = (BOUNDLESS if side == -1 else min(side, BOUNDLESS) for side in (left, right))
    return left, 0 if causal else right


def check_per_head(x, name, H):
    """One number a head, as a float64 vector of their own."""
    x = real_array(x, name)
    if x.shape != (H,):
        raise ValueError(f"{name}: expected shape (H,) = ({H},), got {x.shape}")
    return x.astype(np.float64)


def check_lengths(lengths, name, B, most):
    """One length a batch member, as an int64 vector of their own."""
    lengths = as_array(lengths, name)
    if lengths.dtype.kind not in "iu" and lengths.size:
        raise TypeError(f"{name}: expected integers, got {lengths.dtype}")
    if lengths.shape != (B,):
        raise ValueError(f"{name}: expected shape (B,) = ({B},), got {lengths.shape}")
    copy = lengths.astype(np.int64)
    if B and not (0 <= copy.min() and copy.max() <= most):
        raise ValueError(f"{name}: expected lengths from 0 to {most}, got {copy.tolist()}")
    return copy


def check_dropout(dropout_p, rng):
    """(dropout_p, seed): no random number is drawn where nothing is dropped."""
    if rng is None and type(dropout_p) is float and dropout_p == 0:
        return 0.0, 0
    p = check_real(dropout_p, "dropout_p")
    if not 0 <= p <= 1:
        raise ValueError(f"dropout_p: expected a probability from 0 to 1, got {p}")
    if rng is not None and not isinstance(rng, np.random.Generator):
        if isinstance(rng, (bool, np.bool_)):
            raise TypeError("rng: expected an int, a numpy.random.Generator or None, got a bool")
        try:
            rng = operator.index(rng)
        except TypeError:
            raise TypeError(
                f"rng: expected an int, a numpy.random.Generator or None, got {type(rng).__name__}"
            ) from None
        if not 0 <= rng < 1 << 64:
            raise ValueError(f"rng: expected a seed from 0 to 2**64 - 1, got {rng}")
    if p == 0:
        return 0.0, 0
    if rng is None:
        return p, secrets.randbits(64)
    if isinstance(rng, np.random.Generator):
        return p, int(rng.integers(0, (1 << 64) - 1, dtype=np.uint64, endpoint=True))
    return p, rng


def check_flag(flag, name):
    if not isinstance(flag, (bool, np.bool_)):
        raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}")


def check_out(out, problem, swapped, inputs):
    """`out` as it was given, if the result may be written to it."""
    shape = problem.out_shape
    if swapped:
        shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    if type(out) not in (np.ndarray, np.memmap):
        raise TypeError(f"out: expected a NumPy array, got {type(out).__name__}")
    if out.dtype != problem.q.dtype:
        raise TypeError(f"out: expected an array of {problem.q.dtype}, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"out: expected shape {shape}, got {out.shape}")
    if not (out.flags.writeable and out.flags.aligned and out.dtype.isnative):
        raise ValueError("out: expected a writable, aligned array in native byte order")
    # An input that was copied still counts, and so does what an object of another kind gave.
    for x in {id(x): x for x in (*inputs, problem.q, problem.k, problem.v, problem.mask)}.values():
        if isinstance(x, np.ndarray) and np.shares_memory(out, x):
            raise ValueError("out: expected memory of its own, got some that an input uses too")
    return out


def chosen(index, name, n):
    """Which of n an int, a slice or a sequence of ints picks, as a list; None for None."""
    if index is None:
        return None
    try:
        if not isinstance(index, slice):
            index = np.asarray(index)
            if index.dtype.kind == "O":
                index = np.vectorize(operator.index, otypes=[object])(index)
            elif index.size and index.dtype.kind not in "iub":
                raise TypeError(f"got {index.dtype}")
            if index.dtype.kind != "b":
                index = np.atleast_1d(np.asarray(np.clip(index, -n - 1, n)).astype(np.intp))
        picked = np.arange(n)[index]
    except IndexError as error:
        raise ValueError(f"{name}: expected indices from {-n} to {n - 1}: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name}: expected an int, a slice or a sequence of ints: {error}") from None
    if picked.ndim != 1:
        raise ValueError(f"{name}: expected an int, a slice or a sequence of ints, got {index.ndim} axes")
    return picked.tolist()


def check_axis(axis, ndim):
    try:
        axis = operator.index(axis)
    except TypeError:
        raise TypeError(f"axis: expected an int, got {type(axis).__name__}") from None
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis: expected one of the {ndim} axes of x, got {axis}")
    return axis


def check_offsets(offsets, name, rows):
    """Rising offsets from 0, as an int64 vector of their own."""
    offsets = as_array(offsets, name)
    if offsets.dtype not in (np.int32, np.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {offsets.dtype}")
    if offsets.ndim != 1 or not offsets.size:
        raise ValueError(f"{name}: expected shape (B + 1,), got {offsets.shape}")
    copy = offsets.astype(np.int64)
    if copy[0] != 0 or (np.diff(copy) < 0).any() or copy[-1] > rows:
        raise ValueError(f"{name}: expected offsets that rise from 0 to at most {rows}, got {copy.tolist()}")
    return copy
