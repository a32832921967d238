"""The project's rules, kept as tests: what may import what, what is public, what is installed, how
long a file may be. They read the source tree, and skip where there is none."""

import ast
import doctest
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import fastmha

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "fastmha"
pytestmark = pytest.mark.skipif(not SOURCES.is_dir(), reason="not in a source tree")

# A module imports modules of the layers above its own line only. A file that may not exist yet, or
# that a build makes, has its place here all the same.
LAYERS = [
    {"_build_config", "_cpu", "_team", "_dtypes", "_terminal"},
    {"_checks", "_reference_arguments", "_reference_formulas"},
    {"_kernels", "_problem", "_threads", "reference", "weights"},
    {"_dispatch", "_mask"},
    {"_plan"},
    {"_execute"},
    {"functional", "rope", "varlen"},
    {"_multihead_backward", "_multihead_call", "_cached", "textbook"},
    {"cache", "paged"},
    {"multihead", "plotting", "dask_array"},
    {"__init__"},
    {"integrations", "_bench_cases", "demo"},
    {"_bench_rivals"},
    {"bench"},
    {"__main__"},
]
LAYER = {module: number for number, layer in enumerate(LAYERS) for module in layer}

# The oracle shares no code with what it checks.
ORACLE = {"reference", "_reference_arguments", "_reference_formulas"}

# Lines. The oracle says everything that the package does once more, and may be longer.
LIMITS = {".py": 600, ".pyx": 1200, ".pxd": 1200, ".h": 500, "meson.build": 110, "reference.py": 750}

MODULES = sorted(path.stem for path in SOURCES.glob("*.py"))
# By the name of the folder, which has one layer and a module for each other library.
MODULES += sorted(f"integrations.{path.stem}" for path in SOURCES.glob("integrations/[!_]*.py"))
PUBLIC = [module for module in MODULES if not module.startswith("_")]
SURFACE = fastmha.__all__


def tree(module):
    path = SOURCES / f"{module.replace('.', '/')}.py"
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(module):
    """The package's own modules that a module imports, inside functions too."""
    names = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "fastmha" + ("." + node.module if node.module else "")
            base = base if node.level else node.module
            paths = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in paths:
            package, _, rest = path.partition(".")
            if package == "fastmha":
                first = rest.partition(".")[0]
                first = "_kernels" if first.startswith("_kernels_") else first
                names.add(first if first in LAYER and first != "__init__" else "__init__")
    return names


def test_the_import_reader_reads_all_spellings(monkeypatch):
    code = """
import fastmha
import numpy
import fastmha.rope
from . import reference, nothing
from ._dtypes import storage
from fastmha import functional
def f():
    from fastmha.weights import from_torch
"""
    monkeypatch.setattr(sys.modules[__name__], "tree", lambda module: ast.parse(code))
    expected = {"__init__", "rope", "reference", "_dtypes", "functional", "weights"}
    assert imported("any") == expected


def test_no_module_has_two_layers():
    assert sum(len(layer) for layer in LAYERS) == len(LAYER)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_the_layers(module):
    place = module.partition(".")[0]
    assert place in LAYER, f"{module}.py: give it a place in LAYERS"
    up = {name for name in imported(module) if LAYER[name] >= LAYER[place]}
    assert not up, f"{module} imports {up}, which are not below it"


@pytest.mark.parametrize("module", sorted(ORACLE & set(MODULES)))
def test_the_oracle_shares_no_code_with_the_kernels(module):
    assert imported(module) <= ORACLE


def assigned(module, name):
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            return ast.literal_eval(node.value)
    return None


def load(module):
    """The module, unless what it is for is not installed."""
    try:
        return importlib.import_module(f"fastmha.{module}")
    except ModuleNotFoundError as error:
        if error.name.startswith("fastmha"):
            raise
        pytest.skip(f"needs {error.name}")


@pytest.mark.parametrize("module", PUBLIC)
def test_all_is_sorted(module):
    names = assigned(module, "__all__")
    if names is None:
        pytest.skip(f"{module} has no __all__: what is public of it, the package says")
    assert names == sorted(names)
    defined = {node.name for node in tree(module).body if hasattr(node, "name")}
    assert set(names) <= defined | set(vars(load(module)))


def test_all_of_the_package_is_sorted_and_complete():
    assert sorted(SURFACE) == SURFACE
    bound = {name for name in vars(fastmha) if not name.startswith("_")}
    modules = {name for name in bound if inspect.ismodule(getattr(fastmha, name))}
    assert bound - modules <= set(SURFACE)
    assert not [name for name in SURFACE if not hasattr(fastmha, name)]


@pytest.mark.parametrize("name", SURFACE)
def test_every_public_name_has_a_docstring_with_an_example(name):
    thing = getattr(fastmha, name)
    assert inspect.getdoc(thing)
    if not inspect.ismodule(thing):
        assert ">>> " in inspect.getdoc(thing)


@pytest.mark.parametrize("name", SURFACE)
def test_every_public_name_pickles_as_itself(name):
    thing = getattr(fastmha, name)
    if not inspect.ismodule(thing):
        assert pickle.loads(pickle.dumps(thing)) is thing


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ("__main__", "__init__")])
def test_examples_in_docstrings_run(module):
    assert doctest.testmod(load(module)).failed == 0


def test_examples_of_the_package_run():
    assert doctest.testmod(fastmha).failed == 0


def test_meson_installs_every_file():
    text = (SOURCES / "meson.build").read_text(encoding="utf-8")
    named = set(re.findall(r"'([\w./]+)'", text))
    present = {path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.*")}
    present = {name for name in present if name.endswith((".py", ".pyi", ".typed"))}
    assert not present - named, "not named in src/fastmha/meson.build"
    missing = {name for name in named if name.endswith((".py", ".pyi")) and name not in present}
    assert missing <= {"_build_config.py"}, "named in src/fastmha/meson.build, and not there"


def test_compiled_modules_have_stubs():
    if not (SOURCES / "py.typed").exists():
        pytest.skip("not typed yet")
    text = (SOURCES / "meson.build").read_text(encoding="utf-8")
    for source in SOURCES.glob("*.pyx"):
        assert source.name in text
        assert source.with_suffix(".pyi").exists() or source.stem == "_kernels"
    assert list(SOURCES.glob("_kernels*.pyi"))


def test_every_build_of_the_kernels_is_in_an_import_statement():
    """What packs programs into one file sees no module that a string names."""
    text = (SOURCES / "meson.build").read_text(encoding="utf-8")
    isas = set(re.findall(r"'(\w+)': \[", text.partition("precisions =")[0]))
    assert {"baseline", "neon"} < isas
    statements = [node for node in ast.walk(tree("_dispatch")) if isinstance(node, ast.ImportFrom)]
    named = {alias.name for node in statements for alias in node.names}
    assert {f"_kernels_{isa}_{real}" for isa in isas for real in ("f32", "f64")} <= named


def test_the_version_is_the_same_everywhere():
    meson = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text(encoding="utf-8"))[1]
    assert fastmha.__version__ == meson
    assert version("fastmha") == meson
    assert fastmha.show_config(mode="dicts")["version"] == meson
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[?([\d.]+)", changes, re.MULTILINE)[1] == meson


SIZED = [path for path in SOURCES.rglob("*") if {path.name, path.suffix} & set(LIMITS)]


@pytest.mark.parametrize("path", [*SIZED, ROOT / "meson.build"], ids=lambda path: path.name)
def test_no_file_is_too_long(path):
    limit = LIMITS.get(path.name) or LIMITS[path.suffix]
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= limit, f"{path.name}: {lines} lines; split it by what it does"


@pytest.mark.parametrize("module", MODULES)
def test_no_assert_stands_for_an_error(module):
    lines = [node.lineno for node in ast.walk(tree(module)) if isinstance(node, ast.Assert)]
    assert not lines, f"{module}.py asserts in lines {lines}; raise an error instead"


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.p[xy]*")), ids=lambda path: path.name)
def test_compiled_code_has_no_fast_mathematics(path):
    text = path.read_text(encoding="utf-8") + (SOURCES / "meson.build").read_text(encoding="utf-8")
    assert not re.search(r"fast-?math|Ofast|march=native", text)


LOADED = """
import sys
import numpy, importlib.metadata
before = set(sys.modules)
import fastmha
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names) - {"fastmha", "numpy"}))
print(*sorted(name for name in set(sys.modules) - before if name.startswith("fastmha.")))
"""


def test_import_loads_numpy_and_the_standard_library_alone():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADED], capture_output=True, text=True, check=True
    )
    foreign, own = (line.split() for line in (result.stdout + "\n\n").splitlines()[:2])
    # Compiled modules register two of Cython's, and an editable install its loader.
    assert not [name for name in foreign if not name.startswith(("cython", "_cython", "_fastmha"))]
    # Commands and drawings are loaded when asked for, and no kernels but those in use.
    assert not {"fastmha.bench", "fastmha.demo", "fastmha.plotting", "fastmha.__main__"} & set(own)
    assert len([name for name in own if "_kernels_" in name]) == 2
