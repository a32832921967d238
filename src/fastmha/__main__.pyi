from collections.abc import Sequence

__all__ = ["main"]

def main(argv: Sequence[str] | None = None) -> int: ...
