from types import ModuleType
from typing import Any, Literal, overload

import numpy as np

from . import _kernels

isas: list[str]
isa: str
single = _kernels
double = _kernels

def kernels(dtype: np.dtype[Any]) -> ModuleType: ...
@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
