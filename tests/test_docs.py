"""The documentation: its code runs, it names everything, its pictures can be drawn, it builds."""

import contextlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DOCS, PAGES, ROOT, blocks, peers, programs, run, runs_alone

import fastmha

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="not in a source tree")

LANGUAGES = {"python", "pycon", "console", "text", "{include}", "{toctree}", "{eval-rst}"}
PICTURES = DOCS / "pictures"


def name(path):
    return path.relative_to(ROOT).as_posix() if isinstance(path, Path) else path


# --- code -----------------------------------------------------------------------------------------


def test_pages_have_one_format():
    assert not list(DOCS.rglob("*.rst")), "pages are Markdown, whose code is run"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is(page):
    unknown = [block for block in blocks(page) if block.language not in LANGUAGES]
    assert not unknown
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)) == 2 * len(blocks(page))


@pytest.mark.parametrize("page", [p for p in PAGES if runs_alone(p)], ids=name)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(None):
        run(page)


BESIDE = """
import os, pathlib, sys
from pages import run
os.chdir(sys.argv[3])
run(pathlib.Path(sys.argv[1]), sys.argv[2])
"""


def installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it would be in
        return False


@pytest.mark.parametrize("page, peer", [(p, peer) for p in PAGES for peer in peers(p)], ids=name)
def test_code_of_a_page_runs_beside_its_peer(page, peer, tmp_path, run_python):
    """In a process of its own, since a peer brings threads that later forks would warn about."""
    missing = [module for module in peer.split(",") if not installed(module)]
    if missing:
        pytest.skip(f"needs {missing[0]}")
    result = run_python(BESIDE, page, peer, tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", sorted((DOCS / "zh").glob("*.md")), ids=name)
def test_a_translated_page_has_the_code_of_its_original(page):
    assert [(b.language, b.code) for b in programs(page)] == [
        (b.language, b.code) for b in programs(DOCS / page.name)
    ]


# --- the public names -----------------------------------------------------------------------------


def public():
    """Functions, classes, and what is public of these."""
    found = {}
    for each in fastmha.__all__:
        thing = getattr(fastmha, each)
        if not inspect.ismodule(thing):
            found[each] = thing
        if inspect.isclass(thing):
            members = [member for member in vars(thing) if not member.startswith("_")]
            found |= {f"{each}.{member}": getattr(thing, member) for member in members}
    return found


def test_api_pages_have_every_public_name():
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"^\.\. auto(?:function|class|module):: fastmha\.(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted([*fastmha.__all__, "plotting"])


PUBLIC = public()


@pytest.mark.parametrize("full_name", PUBLIC)
def test_docstrings_tell_arguments_and_errors_and_show_an_example(full_name):
    thing = PUBLIC[full_name]
    text = inspect.getdoc(thing)
    assert text
    if isinstance(thing, property):
        return  # its class's Attributes say the rest
    assert ">>> " in text
    if re.search(r"[Aa]ll else as for|[Pp]arameters, result and errors as for", text):
        return  # another docstring has them
    arguments = set(inspect.signature(thing).parameters) - {"self"}
    told = set(re.findall(r"\w+", text))
    assert arguments <= told or "options" in told
    if arguments:
        assert "Parameters\n---" in text
        assert "Raises\n---" in text


# --- pictures -------------------------------------------------------------------------------------


def test_pictures_are_those_that_pages_show():
    shown = {
        target.name
        for page in DOCS.rglob("*.md")
        for target in map(Path, re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")))
    }
    assert shown == {path.name for path in PICTURES.glob("*.svg")}


def test_every_picture_can_be_drawn_again(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("glassllm")
    command = [sys.executable, "-W", "error", PICTURES, tmp_path]
    subprocess.run(command, check=True, timeout=300)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in PICTURES.glob("*.svg")}


# --- the site -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    for needed in ("sphinx", "furo", "myst_parser", "numpydoc", "sphinx_copybutton"):
        pytest.importorskip(needed)
    command = [sys.executable, "-m", "sphinx", "-W", "-q", DOCS, tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "index.html").exists()
