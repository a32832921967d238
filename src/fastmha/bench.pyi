from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TextIO

from ._bench_cases import Case
from ._terminal import PlainTerminal, RichTerminal

__all__ = [
    "QUICK",
    "SETTINGS",
    "Settings",
    "chosen_cases",
    "cpu_model",
    "list_cases",
    "run_bench",
    "run_case",
    "versions",
]

class Settings(NamedTuple):
    rounds: int = 9
    least_rounds: int = 3
    budget: float = 4.0
    batch: float = 0.03
    peak: float = 0.02
    pause: float = 0.02
    numpy_limit: float = 3.0
    cold_bytes: int = ...

SETTINGS: Settings
QUICK: Settings

def run_case(
    case: Case, thread_counts: Sequence[int], competitors: Sequence[str], settings: Settings = ...
) -> Iterator[dict[str, Any]]: ...
def cpu_model() -> str: ...
def versions(packages: Sequence[str] = ...) -> dict[str, str]: ...
def chosen_cases(
    patterns: Sequence[str] = (), *, sweep: Literal["length"] | None = None, quick: bool = False
) -> tuple[Case, ...]: ...
def run_bench(
    cases: Sequence[Case], *, threads: Sequence[int] | None = None, quick: bool = False,
    repeat: int | None = None, json_file: str | None = None, plot_file: str | None = None,
    use_numpy: bool = True, use_torch: bool = True, use_onnxruntime: bool = False,
    terminal: PlainTerminal | RichTerminal | None = None,
) -> int: ...
def list_cases(cases: Sequence[Case], file: TextIO | None = None) -> None: ...
