from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "CASES",
    "LENGTHS",
    "SEED",
    "Case",
    "Inputs",
    "Skipped",
    "array_dtype",
    "flops",
    "length_sweep",
    "lengths",
    "make_inputs",
    "select",
    "traffic",
    "visible",
]

class Case(NamedTuple):
    name: str
    B: int
    H: int
    G: int
    L: int
    S: int
    D: int
    E: int
    kind: str = "attention"
    dtype: str = "float32"
    causal: bool = False
    mask: str | None = None
    window: tuple[int, int] | None = None
    dropout: float = 0.0
    layout: str = "BHLD"
    values: str = "normal"
    cold: bool = False
    beside: str | None = None

class Skipped(Exception): ...

class Inputs(NamedTuple):
    arrays: tuple[NDArray[Any], ...]
    mask: NDArray[Any] | None

CASES: tuple[Case, ...]
LENGTHS: tuple[int, ...]
SEED: int

def length_sweep(lengths: Sequence[int] = ...) -> tuple[Case, ...]: ...
def select(cases: Sequence[Case], patterns: Sequence[str]) -> tuple[Case, ...]: ...
def lengths(case: Case) -> NDArray[np.integer[Any]]: ...
def visible(case: Case, rows: ArrayLike | None = None) -> NDArray[np.bool_] | None: ...
def flops(case: Case) -> int: ...
def traffic(case: Case) -> int: ...
def make_inputs(case: Case) -> Inputs: ...
def array_dtype(name: str) -> np.dtype[Any]: ...
