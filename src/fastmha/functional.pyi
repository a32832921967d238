from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

class _SupportsDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# What the arguments of the whole package may be.
_Array: TypeAlias = ArrayLike | _SupportsDLPack
_Causal: TypeAlias = bool | np.bool_ | Literal["top-left", "bottom-right"]
_Chosen: TypeAlias = SupportsIndex | slice | Sequence[SupportsIndex] | NDArray[np.integer[Any]]
_Layout: TypeAlias = Literal["BHLD", "BLHD"]
_Real: TypeAlias = float | np.floating[Any] | np.integer[Any]
_Seed: TypeAlias = SupportsIndex | np.random.Generator
_Window: TypeAlias = tuple[SupportsIndex, SupportsIndex]

def scaled_dot_product_attention(
    query: _Array, key: _Array, value: _Array, attn_mask: _Array | None = None, dropout_p: _Real = 0.0,
    is_causal: bool | np.bool_ = False, scale: _Real | None = None, enable_gqa: bool | np.bool_ = False,
    *, rng: _Seed | None = None,
) -> NDArray[Any]: ...
@overload
def attention(
    query: _Array, key: _Array, value: _Array, *, mask: _Array | None = None, causal: _Causal = False,
    window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
    alibi_slopes: _Array | None = None, sinks: _Array | None = None, key_lengths: _Array | None = None,
    query_lengths: _Array | None = None, dropout_p: _Real = 0.0, rng: _Seed | None = None,
    layout: _Layout = "BHLD", return_lse: Literal[False] = False, out: NDArray[Any] | None = None,
) -> NDArray[Any]: ...
@overload
def attention(
    query: _Array, key: _Array, value: _Array, *, mask: _Array | None = None, causal: _Causal = False,
    window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
    alibi_slopes: _Array | None = None, sinks: _Array | None = None, key_lengths: _Array | None = None,
    query_lengths: _Array | None = None, dropout_p: _Real = 0.0, rng: _Seed | None = None,
    layout: _Layout = "BHLD", return_lse: Literal[True], out: NDArray[Any] | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def attention(
    query: _Array, key: _Array, value: _Array, *, mask: _Array | None = None, causal: _Causal = False,
    window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
    alibi_slopes: _Array | None = None, sinks: _Array | None = None, key_lengths: _Array | None = None,
    query_lengths: _Array | None = None, dropout_p: _Real = 0.0, rng: _Seed | None = None,
    layout: _Layout = "BHLD", return_lse: bool = False, out: NDArray[Any] | None = None,
) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def attention_backward(
    grad_out: _Array, query: _Array, key: _Array, value: _Array, out: _Array, lse: _Array, *,
    mask: _Array | None = None, causal: _Causal = False, window: _Window | None = None,
    scale: _Real | None = None, softcap: _Real | None = None, alibi_slopes: _Array | None = None,
    sinks: _Array | None = None, key_lengths: _Array | None = None, query_lengths: _Array | None = None,
    dropout_p: _Real = 0.0, rng: _Seed | None = None, layout: _Layout = "BHLD",
    grad_mask: Literal[False] = False, grad_sinks: Literal[False] = False,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def attention_backward(
    grad_out: _Array, query: _Array, key: _Array, value: _Array, out: _Array, lse: _Array, *,
    mask: _Array | None = None, causal: _Causal = False, window: _Window | None = None,
    scale: _Real | None = None, softcap: _Real | None = None, alibi_slopes: _Array | None = None,
    sinks: _Array | None = None, key_lengths: _Array | None = None, query_lengths: _Array | None = None,
    dropout_p: _Real = 0.0, rng: _Seed | None = None, layout: _Layout = "BHLD",
    grad_mask: Literal[True], grad_sinks: Literal[False] = False,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def attention_backward(
    grad_out: _Array, query: _Array, key: _Array, value: _Array, out: _Array, lse: _Array, *,
    mask: _Array | None = None, causal: _Causal = False, window: _Window | None = None,
    scale: _Real | None = None, softcap: _Real | None = None, alibi_slopes: _Array | None = None,
    sinks: _Array | None = None, key_lengths: _Array | None = None, query_lengths: _Array | None = None,
    dropout_p: _Real = 0.0, rng: _Seed | None = None, layout: _Layout = "BHLD",
    grad_mask: Literal[False] = False, grad_sinks: Literal[True],
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def attention_backward(
    grad_out: _Array, query: _Array, key: _Array, value: _Array, out: _Array, lse: _Array, *,
    mask: _Array | None = None, causal: _Causal = False, window: _Window | None = None,
    scale: _Real | None = None, softcap: _Real | None = None, alibi_slopes: _Array | None = None,
    sinks: _Array | None = None, key_lengths: _Array | None = None, query_lengths: _Array | None = None,
    dropout_p: _Real = 0.0, rng: _Seed | None = None, layout: _Layout = "BHLD",
    grad_mask: Literal[True], grad_sinks: Literal[True],
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def attention_backward(
    grad_out: _Array, query: _Array, key: _Array, value: _Array, out: _Array, lse: _Array, *,
    mask: _Array | None = None, causal: _Causal = False, window: _Window | None = None,
    scale: _Real | None = None, softcap: _Real | None = None, alibi_slopes: _Array | None = None,
    sinks: _Array | None = None, key_lengths: _Array | None = None, query_lengths: _Array | None = None,
    dropout_p: _Real = 0.0, rng: _Seed | None = None, layout: _Layout = "BHLD",
    grad_mask: bool = False, grad_sinks: bool = False,
) -> tuple[NDArray[Any], ...]: ...
def attention_weights(
    query: _Array, key: _Array, *, heads: _Chosen | None = None, rows: _Chosen | None = None,
    mask: _Array | None = None, causal: _Causal = False, window: _Window | None = None,
    scale: _Real | None = None, softcap: _Real | None = None, alibi_slopes: _Array | None = None,
    sinks: _Array | None = None, key_lengths: _Array | None = None, query_lengths: _Array | None = None,
    dropout_p: _Real = 0.0, rng: _Seed | None = None, layout: _Layout = "BHLD",
) -> NDArray[Any]: ...
def merge_attention(
    outs: Iterable[_Array], lses: Iterable[_Array]
) -> tuple[NDArray[Any], NDArray[Any]]: ...
