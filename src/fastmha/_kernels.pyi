# Of every build: there are modules `_kernels_<isa>_<precision>`, none of this name.
from typing import Any

from numpy.typing import NDArray

vector_bytes: int
fused: bool

def attend(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], out: NDArray[Any], lse: NDArray[Any] | None,
    mask: NDArray[Any] | None, weights: NDArray[Any] | None, storages: tuple[int, ...],
    options: tuple[Any, ...], place: tuple[Any, ...] | None = None,
) -> None: ...
def attend_backward(
    grad: NDArray[Any], q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], out: NDArray[Any],
    lse: NDArray[Any], mask: NDArray[Any] | None, dq: NDArray[Any], dk: NDArray[Any], dv: NDArray[Any],
    dmask: NDArray[Any] | None, storages: tuple[int, ...], options: tuple[Any, ...], chunk: int,
) -> None: ...
def softmax(x: NDArray[Any], out: NDArray[Any], storage: int) -> None: ...
def store(
    x: NDArray[Any], x_storage: int, out: NDArray[Any], out_storage: int,
    scales: NDArray[Any] | None = None, first: NDArray[Any] | None = None,
    slots: NDArray[Any] | None = None,
) -> None: ...
def project(
    x: NDArray[Any], w: NDArray[Any], bias: NDArray[Any] | None, out: NDArray[Any], w_storage: int,
    out_storage: int,
) -> None: ...
def rotate(
    x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any], out: NDArray[Any], storage: int,
    interleaved: bool,
) -> None: ...
def fma_peak(seconds: float = 0.2) -> float: ...
