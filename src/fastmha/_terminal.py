"""What the commands print: headings, lines, tables, shaded rows and a progress bar.

`open_terminal` gives one of two classes with the same methods. `RichTerminal` draws with the
`rich` library; `PlainTerminal` needs nothing and prints lines, and serves where rich is missing or
the stream cannot encode block characters.
"""

from __future__ import annotations

import sys
from bisect import bisect
from contextlib import contextmanager

__all__ = ["PlainTerminal", "RichTerminal", "open_terminal"]

# A weight's glyph: the first below 5 %, the last from 75 % on.
_BOUNDS = (0.05, 0.25, 0.5, 0.75)
_BLOCKS = "·░▒▓█"
_ASCII = ".:+*#"

# Colour stops (weight, red, green, blue) of the shades: navy, teal, yellow.
_STOPS = ((0.0, 28, 30, 60), (0.4, 32, 140, 140), (1.0, 253, 231, 80))


def open_terminal(file=None):
    """Return the best terminal for a stream.

    Parameters
    ----------
    file : text stream, optional
        Where to print; `sys.stdout` by default.

    Returns
    -------
    RichTerminal or PlainTerminal
        The first where rich can be imported and the stream can show block characters.

    Examples
    --------
    >>> import io
    >>> stream = io.StringIO()
    >>> open_terminal(stream).line("ready")
    >>> stream.getvalue()
    'ready\\n'
    """
    file = sys.stdout if file is None else file
    if not _can_show(file, _BLOCKS):
        return PlainTerminal(file)
    try:
        return RichTerminal(file)
    except ImportError:
        return PlainTerminal(file)


class PlainTerminal:
    """Lines of text and nothing else."""

    def __init__(self, file=None):
        self.file = sys.stdout if file is None else file
        self._glyphs = _BLOCKS if _can_show(self.file, _BLOCKS) else _ASCII

    def line(self, text=""):
        """Print one line."""
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        # Tokens hold any character; one that the stream cannot encode must not end the command.
        print(text.encode(encoding, "replace").decode(encoding), file=self.file, flush=True)

    def heading(self, text):
        """Print a heading, set off by a blank line."""
        self.line()
        self.line(text)
        self.line("-" * len(text))

    def table(self, columns, rows, *, left=0):
        """Print rows of strings under column names; the first `left` columns are flush left."""
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        for row in [columns, ["-" * width for width in widths], *rows]:
            cells = [
                cell.ljust(width) if i < left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            self.line("  ".join(cells).rstrip())

    def shades(self, label, weights, note=""):
        """Print one row of a map: a cell two columns wide per weight in 0..1, blank for None."""
        self.line(f"{label}{_glyph_cells(weights, self._glyphs)}  {note}".rstrip())

    def shade_legend(self, label=""):
        """Print what the shades mean."""
        self.line(label + _glyph_legend(self._glyphs))

    @contextmanager
    def progress(self, total):
        """Give a function to call as `advance(label)` after each of `total` steps."""
        width, done, shown = len(str(total)), 0, None

        def advance(label=""):
            nonlocal done, shown
            done += 1
            # One line per label, not per step: a log is no place for a bar.
            if label != shown:
                self.line(f"[{done:{width}}/{total}] {label}")
                shown = label

        yield advance


class RichTerminal:
    """Colours, boxes and a live progress bar, drawn by rich."""

    def __init__(self, file=None):
        from rich import console

        self._console = console.Console(file=file, highlight=False, markup=False, emoji=False)
        self._shaded = self._console.color_system in ("256", "truecolor")
        self._shaded = self._shaded and not self._console.no_color

    def line(self, text=""):
        """Print one line."""
        self._console.print(text, soft_wrap=True)

    def heading(self, text):
        """Print a heading, set off by a blank line."""
        self._console.print()
        self._console.print(text, style="bold cyan", soft_wrap=True)

    def table(self, columns, rows, *, left=0):
        """Print rows of strings under column names; the first `left` columns are flush left."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, header_style="bold")
        for i, name in enumerate(columns):
            table.add_column(Text(name), justify="left" if i < left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        self._console.print(table)

    def shades(self, label, weights, note=""):
        """Print one row of a map: a cell two columns wide per weight in 0..1, blank for None."""
        if self._shaded:
            cells = [("  ", "" if w is None else f"on {_colour(w)}") for w in weights]
        else:
            cells = [_glyph_cells(weights, _BLOCKS)]
        self._assemble(label, *cells, (f"  {note}", "dim"))

    def shade_legend(self, label=""):
        """Print what the shades mean."""
        if not self._shaded:
            self.line(label + _glyph_legend(_BLOCKS))
            return
        cells = [("  ", f"on {_colour(i / 20)}") for i in range(21)]
        self._assemble(label, "0 % ", *cells, " 100 %")

    @contextmanager
    def progress(self, total):
        """Give a function to call as `advance(label)` after each of `total` steps."""
        from rich import progress

        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.description}", markup=False),
        )
        with progress.Progress(*columns, console=self._console) as bar:
            task = bar.add_task("", total=total)
            yield lambda label="": bar.update(task, advance=1, description=label)

    def _assemble(self, *parts):
        from rich.text import Text

        self._console.print(Text.assemble(*parts), soft_wrap=True)


def _can_show(file, text):
    """Whether the stream's encoding has every character of `text`."""
    try:
        text.encode(getattr(file, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _glyph_cells(weights, glyphs):
    return "".join("  " if w is None else 2 * glyphs[bisect(_BOUNDS, w)] for w in weights)


def _glyph_legend(glyphs):
    parts = [f"{glyphs[0]} below {_BOUNDS[0]:.0%}"]
    parts += [f"{glyph} from {bound:.0%}" for glyph, bound in zip(glyphs[1:], _BOUNDS, strict=True)]
    return "   ".join(parts)


def _colour(weight):
    """Return the shade of a weight in 0..1 as rich writes colours."""
    i = min(bisect([stop[0] for stop in _STOPS], weight), len(_STOPS) - 1)
    (lower, *start), (upper, *end) = _STOPS[i - 1], _STOPS[i]
    share = (weight - lower) / (upper - lower)
    mixed = (round(a + share * (b - a)) for a, b in zip(start, end, strict=True))
    return "rgb({},{},{})".format(*mixed)
