from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

# The functions have the signatures of the fast ones, which a test compares, so they have their types.
from .functional import (
    _Array,
    _Causal,
    _Real,
    _Seed,
    _Window,
    attention,
    attention_backward,
    attention_weights,
    merge_attention,
    scaled_dot_product_attention,
)
from .multihead import _WeightSeed
from .rope import alibi_slopes
from .textbook import multi_head_attention, sdpa, softmax
from .varlen import attention_varlen, attention_varlen_backward

__all__ = [
    "MultiHeadAttention",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_weights",
    "dropout_mask",
    "merge_attention",
    "multi_head_attention",
    "philox4x32",
    "scaled_dot_product_attention",
    "sdpa",
    "softmax",
]

class MultiHeadAttention:
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_k: int
    dtype: np.dtype[Any]
    dropout: _Real
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
    attn: NDArray[Any]
    grads: list[NDArray[Any]]
    def __init__(
        self, d_model: SupportsIndex, n_heads: SupportsIndex, seed: _WeightSeed = 0, *,
        n_kv_heads: SupportsIndex | None = None, bias: bool = True, dtype: DTypeLike = ...,
        dropout: _Real = 0.0, window: _Window | None = None, softcap: _Real | None = None,
        alibi: bool = False,
    ) -> None: ...
    def parameters(self) -> list[NDArray[Any]]: ...
    def forward(
        self, x: _Array, causal: _Causal = False, *, context: _Array | None = None,
        mask: _Array | None = None, lengths: _Array | None = None, context_lengths: _Array | None = None,
        training: bool = False, rng: _Seed | None = None,
    ) -> NDArray[Any]: ...
    def __call__(
        self, x: _Array, causal: _Causal = False, *, context: _Array | None = None,
        mask: _Array | None = None, lengths: _Array | None = None, context_lengths: _Array | None = None,
        training: bool = False, rng: _Seed | None = None,
    ) -> NDArray[Any]: ...
    def _split_heads(self, x: NDArray[Any]) -> NDArray[Any]: ...
    # An array; after a call with a context the pair (of x, of the context), hence Any.
    def backward(self, grad_out: _Array) -> NDArray[Any] | Any: ...

def dropout_mask(
    seed: int, p: float, members: ArrayLike, n_heads: int, positions: ArrayLike, n_keys: int
) -> NDArray[np.bool_]: ...
def philox4x32(
    counter: Sequence[ArrayLike], key: Sequence[int]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]: ...
