from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .functional import _Array

__all__ = ["from_bert", "from_gpt2", "from_llama", "from_nanogpt", "from_torch", "to_torch"]

class Weights(NamedTuple):
    Wq: NDArray[Any]
    bq: NDArray[Any] | None
    Wk: NDArray[Any]
    bk: NDArray[Any] | None
    Wv: NDArray[Any]
    bv: NDArray[Any] | None
    Wo: NDArray[Any]
    bo: NDArray[Any] | None

# A state's values are arrays, or tensors of a library that need not be installed.
def from_torch(
    state: Mapping[str, Any], *, prefix: str = "", dtype: DTypeLike | None = None, strict: bool = True
) -> Weights: ...
def from_nanogpt(
    state: Mapping[str, Any], *, prefix: str = "", dtype: DTypeLike | None = None, strict: bool = True
) -> Weights: ...
def from_gpt2(
    state: Mapping[str, Any], *, prefix: str = "", dtype: DTypeLike | None = None, strict: bool = True
) -> Weights: ...
def from_bert(
    state: Mapping[str, Any], *, prefix: str = "", dtype: DTypeLike | None = None, strict: bool = True
) -> Weights: ...
def from_llama(
    state: Mapping[str, Any], n_heads: int, n_kv_heads: int, *, prefix: str = "",
    dtype: DTypeLike | None = None, strict: bool = True,
) -> Weights: ...
def to_torch(weights: Weights) -> dict[str, NDArray[Any]]: ...
def real_array(x: _Array, name: str) -> NDArray[Any]: ...
def float_dtype(dtype: DTypeLike) -> np.dtype[Any]: ...
