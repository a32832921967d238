"""The pages of the documentation as programs: the Python blocks of a page, run in one namespace.

A block whose fence says ``needs=NAME`` belongs to a library that may not be installed (or to several, with
commas between): it runs only when that one is asked for.
"""

import doctest
import io
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md", *sorted(DOCS.rglob("*.md"))]

FENCE = re.compile(r"^(`{3,})([^`\n]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int  # of its first line of code, from 0
    language: str  # "python", "pycon" or another
    needs: str | None
    code: str


def blocks(page):
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match[2].strip().partition(" ")
        needs = rest.removeprefix("needs=") if rest.startswith("needs=") else None
        found.append(Block(text.count("\n", 0, match.start(3)), language, needs, match[3]))
    return found


def programs(page):
    """Those that are Python."""
    return [block for block in blocks(page) if block.language in ("python", "pycon")]


def runs_alone(page):
    """Whether there is Python that needs no library beside."""
    return any(block.needs is None for block in programs(page))


def peers(page):
    """The libraries that blocks of the page belong to."""
    return sorted({block.needs for block in programs(page) if block.needs})


def run(page, peer=None):
    """Run a page's Python from top to bottom; with a peer, its blocks too."""
    names = {"__name__": "__main__"}
    for block in programs(page):
        if block.needs not in (None, peer):
            continue
        if block.language == "python":
            # So many empty lines that a traceback tells the line of the page.
            exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(block.code, names, page.name, str(page), block.line)
        test.globs = names  # what one block defines, the next one has
        report = io.StringIO()
        if doctest.DocTestRunner(verbose=False).run(test, out=report.write, clear_globs=False).failed:
            raise AssertionError(report.getvalue())
