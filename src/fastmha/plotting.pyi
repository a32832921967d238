from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

from numpy.typing import ArrayLike, NDArray

from .functional import _Array, _Chosen

__all__ = ["plot_attention", "plot_entropy", "plot_heads", "plot_throughput", "plot_weights"]

# Axes and figures are those of matplotlib, which need not be installed.
_Axes: TypeAlias = Any
_Figure: TypeAlias = Any

def plot_attention(
    query: _Array, key: _Array, *, head: SupportsIndex = 0, member: SupportsIndex = 0,
    rows: _Chosen | None = None, tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None, ax: _Axes | None = None, **options: Any,
) -> _Axes: ...
def plot_heads(
    query: _Array, key: _Array, *, heads: _Chosen | None = None, member: SupportsIndex = 0,
    rows: _Chosen | None = None, tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None, columns: int | None = None, **options: Any,
) -> NDArray[Any]: ...
def plot_weights(
    weights: ArrayLike, *, visible: ArrayLike | None = None, tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None, ax: _Axes | None = None,
) -> _Axes: ...
def plot_entropy(
    query: _Array, key: _Array, *, heads: _Chosen | None = None, member: SupportsIndex = 0,
    rows: _Chosen | None = None, ax: _Axes | None = None, **options: Any,
) -> _Axes: ...
def plot_throughput(
    data: dict[str, Any], *, threads: int | None = None, figure: _Figure | None = None
) -> NDArray[Any]: ...
