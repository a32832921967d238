from typing import Any, Literal, overload

from numpy.typing import NDArray

from .functional import _Array, _Causal, _Real, _Seed, _Window

@overload
def attention_varlen(
    query: _Array, key: _Array, value: _Array, cu_seqlens_q: _Array, cu_seqlens_k: _Array | None = None, *,
    causal: _Causal = False, window: _Window | None = None, scale: _Real | None = None,
    softcap: _Real | None = None, alibi_slopes: _Array | None = None, sinks: _Array | None = None,
    dropout_p: _Real = 0.0, rng: _Seed | None = None, return_lse: Literal[False] = False,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]: ...
@overload
def attention_varlen(
    query: _Array, key: _Array, value: _Array, cu_seqlens_q: _Array, cu_seqlens_k: _Array | None = None, *,
    causal: _Causal = False, window: _Window | None = None, scale: _Real | None = None,
    softcap: _Real | None = None, alibi_slopes: _Array | None = None, sinks: _Array | None = None,
    dropout_p: _Real = 0.0, rng: _Seed | None = None, return_lse: Literal[True],
    out: NDArray[Any] | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def attention_varlen(
    query: _Array, key: _Array, value: _Array, cu_seqlens_q: _Array, cu_seqlens_k: _Array | None = None, *,
    causal: _Causal = False, window: _Window | None = None, scale: _Real | None = None,
    softcap: _Real | None = None, alibi_slopes: _Array | None = None, sinks: _Array | None = None,
    dropout_p: _Real = 0.0, rng: _Seed | None = None, return_lse: bool = False,
    out: NDArray[Any] | None = None,
) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def attention_varlen_backward(
    grad_out: _Array, query: _Array, key: _Array, value: _Array, out: _Array, lse: _Array,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None = None, *, causal: _Causal = False,
    window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
    alibi_slopes: _Array | None = None, sinks: _Array | None = None, dropout_p: _Real = 0.0,
    rng: _Seed | None = None, grad_sinks: Literal[False] = False,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def attention_varlen_backward(
    grad_out: _Array, query: _Array, key: _Array, value: _Array, out: _Array, lse: _Array,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None = None, *, causal: _Causal = False,
    window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
    alibi_slopes: _Array | None = None, sinks: _Array | None = None, dropout_p: _Real = 0.0,
    rng: _Seed | None = None, grad_sinks: Literal[True],
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]: ...
@overload
def attention_varlen_backward(
    grad_out: _Array, query: _Array, key: _Array, value: _Array, out: _Array, lse: _Array,
    cu_seqlens_q: _Array, cu_seqlens_k: _Array | None = None, *, causal: _Causal = False,
    window: _Window | None = None, scale: _Real | None = None, softcap: _Real | None = None,
    alibi_slopes: _Array | None = None, sinks: _Array | None = None, dropout_p: _Real = 0.0,
    rng: _Seed | None = None, grad_sinks: bool = False,
) -> tuple[NDArray[Any], ...]: ...
