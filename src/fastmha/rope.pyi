from collections.abc import Mapping
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from .functional import _Array, _Real

__all__ = ["Rope", "alibi_slopes"]

class Rope:
    dim: int
    interleaved: bool
    base: float
    scaling: dict[str, Any] | None
    attention_factor: float
    def __init__(
        self, dim: SupportsIndex, *, interleaved: bool | np.bool_, base: _Real = 10000.0,
        scaling: Mapping[str, Any] | None = None,
    ) -> None: ...
    def __call__(self, x: _Array, positions: _Array) -> NDArray[Any]: ...
    def inverse(self, x: _Array, positions: _Array) -> NDArray[Any]: ...
    def backward(self, grad: _Array, positions: _Array) -> NDArray[Any]: ...

def alibi_slopes(n_heads: SupportsIndex) -> NDArray[np.float64]: ...
