"""Which arrays the kernels take, and how anything else becomes one or is refused."""

import numpy as np

# What the kernels call an element type; the numbers are those of `_storage.h`.
BOOL, FLOAT64, FLOAT32, FLOAT16, BFLOAT16 = range(5)
DOUBLE, SINGLE = np.dtype(np.float64), np.dtype(np.float32)  # a dtype compares faster than a type
STORAGE = {
    np.dtype(np.bool_): BOOL,
    DOUBLE: FLOAT64,
    SINGLE: FLOAT32,
    np.dtype(np.float16): FLOAT16,
}
FLOATS = "float64, float32, float16 or bfloat16"


def storage(dtype):
    """The kernels' number for a dtype, None where they have none.

    bfloat16 is a dtype of the package ml_dtypes, which is known by name, never imported.
    """
    code = STORAGE.get(dtype)
    if code is None and dtype.name == "bfloat16" and dtype.itemsize == 2:
        code = STORAGE[dtype] = BFLOAT16
    return code


def as_array(x, name):
    """`x` as an ndarray of its own dtype, in native byte order and aligned: a copy only if need be."""
    if type(x) is not np.ndarray:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                f"{name}: expected a plain array, got a masked array; pass its data, and the inverse "
                "of its mask as a bool mask"
            )
        try:
            if not hasattr(x, "__array__") and hasattr(x, "__dlpack__"):
                x = np.from_dlpack(x)
            x = np.asarray(x)
        except Exception as error:  # whatever the object's own conversion raises
            raise TypeError(
                f"{name}: expected an array or what NumPy makes one of, got {type(x).__name__} ({error})"
            ) from error
    if not x.dtype.isnative or not x.flags.aligned:
        x = x.astype(x.dtype.newbyteorder("="), copy=True)
    return x


def float_array(x, name):
    """`x` as an array of a floating-point type that the kernels know."""
    x = as_array(x, name)
    if not storage(x.dtype):  # None, or BOOL, which is 0
        raise TypeError(
            f"{name}: expected {FLOATS}, got {x.dtype}; convert it with .astype(numpy.float32)"
        )
    return x


def mask_array(mask, name):
    """`mask` as a bool array, True = may attend, or a floating-point array, which is added."""
    mask = as_array(mask, name)
    if storage(mask.dtype) is None:
        raise TypeError(
            f"{name}: expected bool (True = may attend) or floats (added to the scores), got "
            f"{mask.dtype}; convert it with .astype(bool) or to a floating-point dtype"
        )
    return mask


def real_array(x, name):
    """`x` as an array of floats that the kernels know, or of integers."""
    x = as_array(x, name)
    if not storage(x.dtype) and x.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected real numbers, got {x.dtype}")
    return x


def computed_in(dtype):
    """The arithmetic type: float64 for float64, float32 for all others."""
    return DOUBLE if dtype == DOUBLE else SINGLE
