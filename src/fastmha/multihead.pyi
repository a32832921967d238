from collections.abc import Mapping, Sequence
from typing import Any, Self, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .cache import KVCache
from .functional import _Array, _Causal, _Real, _Seed, _Window
from .rope import Rope

__all__ = ["MultiHeadAttention"]

# What numpy.random.default_rng takes.
_WeightSeed: TypeAlias = (
    SupportsIndex | Sequence[int] | NDArray[np.integer[Any]] | np.random.SeedSequence
    | np.random.BitGenerator | np.random.Generator | None
)

class MultiHeadAttention:
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_k: int
    dtype: np.dtype[Any]
    dropout: _Real
    rope: Rope | None
    window: _Window | None
    softcap: _Real | None
    alibi: bool
    Wq: NDArray[Any]
    bq: NDArray[Any] | None
    Wk: NDArray[Any]
    bk: NDArray[Any] | None
    Wv: NDArray[Any]
    bv: NDArray[Any] | None
    Wo: NDArray[Any]
    bo: NDArray[Any] | None
    grads: list[NDArray[Any]]
    def __init__(
        self, d_model: SupportsIndex, n_heads: SupportsIndex, seed: _WeightSeed = 0, *,
        n_kv_heads: SupportsIndex | None = None, bias: bool = True, dtype: DTypeLike = ...,
        dropout: _Real = 0.0, rope: Rope | None = None, window: _Window | None = None,
        softcap: _Real | None = None, alibi: bool = False,
    ) -> None: ...
    def parameters(self) -> list[NDArray[Any]]: ...
    def forward(
        self, x: _Array, causal: _Causal = False, *, context: _Array | None = None,
        mask: _Array | None = None, lengths: _Array | None = None, context_lengths: _Array | None = None,
        cache: KVCache | None = None, positions: _Array | None = None, training: bool = False,
        rng: _Seed | None = None,
    ) -> NDArray[Any]: ...
    def __call__(
        self, x: _Array, causal: _Causal = False, *, context: _Array | None = None,
        mask: _Array | None = None, lengths: _Array | None = None, context_lengths: _Array | None = None,
        cache: KVCache | None = None, positions: _Array | None = None, training: bool = False,
        rng: _Seed | None = None,
    ) -> NDArray[Any]: ...
    @property
    def attn(self) -> NDArray[Any]: ...
    @attn.setter
    def attn(self, value: NDArray[Any]) -> None: ...
    def _split_heads(self, x: NDArray[Any]) -> NDArray[Any]: ...
    # An array; after a call with a context the pair (of x, of the context), hence Any.
    def backward(self, grad_out: _Array) -> NDArray[Any] | Any: ...
    def make_cache(self, batch: SupportsIndex, capacity: SupportsIndex | None = None) -> KVCache: ...
    @classmethod
    def from_torch(
        cls, state: Mapping[str, Any], n_heads: SupportsIndex, *, prefix: str = "",
        dtype: DTypeLike | None = None, strict: bool = True,
    ) -> Self: ...
    @classmethod
    def from_nanogpt(
        cls, state: Mapping[str, Any], n_heads: SupportsIndex, *, prefix: str = "",
        dtype: DTypeLike | None = None, strict: bool = True,
    ) -> Self: ...
    @classmethod
    def from_gpt2(
        cls, state: Mapping[str, Any], n_heads: SupportsIndex, *, prefix: str = "",
        dtype: DTypeLike | None = None, strict: bool = True,
    ) -> Self: ...
    @classmethod
    def from_bert(
        cls, state: Mapping[str, Any], n_heads: SupportsIndex, *, prefix: str = "",
        dtype: DTypeLike | None = None, strict: bool = True,
    ) -> Self: ...
    @classmethod
    def from_llama(
        cls, state: Mapping[str, Any], n_heads: SupportsIndex, n_kv_heads: SupportsIndex, *,
        prefix: str = "", rope: Rope | None = None, dtype: DTypeLike | None = None, strict: bool = True,
    ) -> Self: ...
    def to_torch(self) -> dict[str, NDArray[Any]]: ...
