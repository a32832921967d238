from collections.abc import Callable
from typing import Any, SupportsIndex, TypeAlias

from numpy.typing import NDArray

from .functional import _Array

_Trace: TypeAlias = Callable[[str, tuple[int, ...]], object]

def multi_head_attention(
    X: _Array, W_Q: _Array, W_K: _Array, W_V: _Array, W_O: _Array, h: SupportsIndex, *,
    trace: _Trace | None = None,
) -> NDArray[Any]: ...
def sdpa(Q: _Array, K: _Array, V: _Array, mask: _Array | None = None) -> NDArray[Any]: ...
def softmax(x: _Array, axis: SupportsIndex = -1) -> NDArray[Any]: ...
