from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .functional import _Array, _Layout, _Real, _Seed, _Window

__all__ = ["PagedKVCache"]

class PagedKVCache:
    n_pages: int
    page_size: int
    n_kv_heads: int
    d_k: int
    d_v: int
    dtype: np.dtype[Any]
    generation: int
    def __init__(
        self, n_pages: SupportsIndex, page_size: SupportsIndex, n_kv_heads: SupportsIndex,
        d_k: SupportsIndex, d_v: SupportsIndex | None = None, *, dtype: DTypeLike = ...,
    ) -> None: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def add_sequence(self) -> int: ...
    def fork(self, seq: int) -> int: ...
    def free(self, seq: int) -> None: ...
    def length(self, seq: int) -> int: ...
    def append(
        self, seqs: Iterable[int], k: _Array, v: _Array, *, cu_seqlens: _Array | None = None
    ) -> None: ...
    @overload
    def attend(
        self, seqs: Iterable[int], q: _Array, *, cu_seqlens: _Array | None = None, mask: _Array | None = None,
        window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
        alibi_slopes: _Array | None = None, sinks: _Array | None = None, dropout_p: _Real = 0.0,
        rng: _Seed | None = None, layout: _Layout = "BHLD", return_lse: Literal[False] = False,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]: ...
    @overload
    def attend(
        self, seqs: Iterable[int], q: _Array, *, cu_seqlens: _Array | None = None, mask: _Array | None = None,
        window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
        alibi_slopes: _Array | None = None, sinks: _Array | None = None, dropout_p: _Real = 0.0,
        rng: _Seed | None = None, layout: _Layout = "BHLD", return_lse: Literal[True],
        out: NDArray[Any] | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...
    @overload
    def attend(
        self, seqs: Iterable[int], q: _Array, *, cu_seqlens: _Array | None = None, mask: _Array | None = None,
        window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
        alibi_slopes: _Array | None = None, sinks: _Array | None = None, dropout_p: _Real = 0.0,
        rng: _Seed | None = None, layout: _Layout = "BHLD", return_lse: bool = False,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
