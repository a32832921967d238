from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import ArrayLike, DTypeLike, NDArray

from ._terminal import PlainTerminal, RichTerminal

__all__ = [
    "TextbookAttention",
    "attention_map",
    "compare_at",
    "continue_text",
    "forward",
    "load_model",
    "run_demo",
    "save_map",
    "show_agreement",
    "show_map",
    "show_next",
    "show_timings",
]

# Models and tokenizers are those of glassllm, which need not be installed.
_Terminal: TypeAlias = PlainTerminal | RichTerminal

def run_demo(
    terminal: _Terminal | None = None, *, text: str = ..., n_new: int = 24, layer: int = 1, head: int = 0,
    lengths: Sequence[int] = ..., plot_file: str | None = None,
) -> None: ...
def load_model() -> tuple[Any, Any]: ...
def forward(
    model: Any, ids: ArrayLike, dtype: DTypeLike | None = None
) -> tuple[NDArray[Any], list[tuple[NDArray[Any], NDArray[Any]]]]: ...
def attention_map(q: NDArray[Any], k: NDArray[Any], head: int) -> NDArray[Any]: ...
def continue_text(model: Any, ids: Sequence[int], n_new: int) -> list[int]: ...
def show_agreement(terminal: _Terminal, model: Any, tokenizer: Any, ids: Sequence[int]) -> None: ...
def show_next(
    terminal: _Terminal, model: Any, tokenizer: Any, ids: Sequence[int], n_new: int, n_shown: int = 5
) -> None: ...
def show_map(
    terminal: _Terminal, model: Any, tokenizer: Any, ids: Sequence[int], layer: int, head: int
) -> None: ...
def save_map(
    file: str, model: Any, tokenizer: Any, ids: Sequence[int], layer: int, head: int
) -> None: ...

class TextbookAttention:
    d_model: int
    n_heads: int
    d_k: int
    Wq: NDArray[Any]
    bq: NDArray[Any]
    Wk: NDArray[Any]
    bk: NDArray[Any]
    Wv: NDArray[Any]
    bv: NDArray[Any]
    Wo: NDArray[Any]
    bo: NDArray[Any]
    attn: NDArray[Any]
    def __init__(self, d_model: int, n_heads: int, seed: int = 0) -> None: ...
    def _split_heads(self, x: NDArray[Any]) -> NDArray[Any]: ...
    def forward(self, x: NDArray[Any], causal: bool = False) -> NDArray[Any]: ...
    def __call__(self, x: NDArray[Any], causal: bool = False) -> NDArray[Any]: ...

class Comparison(NamedTuple):
    length: int
    textbook_ms: float
    fastmha_ms: float
    textbook_mb: float
    fastmha_mb: float
    difference: float

def show_timings(
    terminal: _Terminal, lengths: Sequence[int] = ..., *, d_model: int = 512, n_heads: int = 8,
    rounds: int = 5,
) -> None: ...
def compare_at(
    length: int, d_model: int, n_heads: int, rounds: int, advance: Callable[[], object] = ...
) -> Comparison: ...
