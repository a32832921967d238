from typing import Any, Literal, SupportsIndex, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .functional import _Array, _Layout, _Real, _Seed, _Window

__all__ = ["KVCache"]

class KVCache:
    batch: int
    n_kv_heads: int
    d_k: int
    d_v: int
    capacity: int | None
    window: int | None
    dtype: np.dtype[Any]
    generation: int
    def __init__(
        self, batch: SupportsIndex, n_kv_heads: SupportsIndex, d_k: SupportsIndex,
        d_v: SupportsIndex | None = None, *, capacity: SupportsIndex | None = None,
        window: SupportsIndex | None = None, dtype: DTypeLike = ...,
    ) -> None: ...
    @property
    def lengths(self) -> NDArray[np.int64]: ...
    @property
    def nbytes(self) -> int: ...
    def append(self, k: _Array, v: _Array, lengths: _Array | None = None) -> None: ...
    def truncate(self, n: _Array) -> None: ...
    def reset(self) -> None: ...
    @overload
    def attend(
        self, q: _Array, lengths: _Array | None = None, *, mask: _Array | None = None,
        window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
        alibi_slopes: _Array | None = None, sinks: _Array | None = None, dropout_p: _Real = 0.0,
        rng: _Seed | None = None, layout: _Layout = "BHLD", return_lse: Literal[False] = False,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]: ...
    @overload
    def attend(
        self, q: _Array, lengths: _Array | None = None, *, mask: _Array | None = None,
        window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
        alibi_slopes: _Array | None = None, sinks: _Array | None = None, dropout_p: _Real = 0.0,
        rng: _Seed | None = None, layout: _Layout = "BHLD", return_lse: Literal[True],
        out: NDArray[Any] | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...
    @overload
    def attend(
        self, q: _Array, lengths: _Array | None = None, *, mask: _Array | None = None,
        window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
        alibi_slopes: _Array | None = None, sinks: _Array | None = None, dropout_p: _Real = 0.0,
        rng: _Seed | None = None, layout: _Layout = "BHLD", return_lse: bool = False,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
    def weights(
        self, q: _Array, lengths: _Array | None = None, *, mask: _Array | None = None,
        window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
        alibi_slopes: _Array | None = None, sinks: _Array | None = None, dropout_p: _Real = 0.0,
        rng: _Seed | None = None, layout: _Layout = "BHLD",
    ) -> NDArray[Any]: ...
