"""The stubs: a typed program passes the checker and runs, and they say what the modules hold."""

import importlib.util
import inspect
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastmha
from fastmha import _dispatch, reference

HERE = Path(__file__).parent
PACKAGE = Path(fastmha.__file__).parent
# Modules that cannot be imported without another library.
OPTIONAL = {"plotting": "matplotlib", "threadpoolctl": "threadpoolctl", "transformers": "transformers"}
EXAMPLE = HERE / "typing_example.py"

needs_processes = pytest.mark.skipif(
    sys.platform in ("emscripten", "wasi"), reason="no processes here"
)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """A folder with the stubs alone: checkers find no editable installs, and no modules without stubs
    that import what is not installed. The kernels' one stub has a copy for each build that runs here."""
    folder = tmp_path_factory.mktemp("stubs")
    package = folder / "fastmha"
    package.mkdir()
    for stub in [*PACKAGE.glob("*.pyi"), *PACKAGE.glob("*/*.pyi")]:
        library = OPTIONAL.get(stub.stem)
        if library is None or importlib.util.find_spec(library):
            (package / stub.relative_to(PACKAGE)).parent.mkdir(exist_ok=True)
            shutil.copy(stub, package / stub.relative_to(PACKAGE))
    for isa in _dispatch.isas:
        for precision in ("f32", "f64"):
            shutil.copy(package / "_kernels.pyi", package / f"_kernels_{isa}_{precision}.pyi")
    return folder


def run_module(folder, *arguments):
    result = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        env=os.environ | {"MYPYPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_public_module_has_a_stub():
    modules = [*PACKAGE.glob("*.py"), *PACKAGE.glob("integrations/*.py")]
    public = [path for path in modules if not path.stem.startswith("_")]
    without = [path.name for path in public if not path.with_suffix(".pyi").exists()]
    assert not without
    assert (PACKAGE / "__init__.pyi").exists()
    assert (PACKAGE / "py.typed").exists()


def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "tiny-1x1x1" in capsys.readouterr().out


@pytest.mark.slow
@needs_processes
def test_the_strict_checker_finds_nothing(stubs):
    pytest.importorskip("mypy")
    files = sorted((stubs / "fastmha").rglob("*.pyi"))
    options = ["--strict", "--config-file=", "--no-incremental", "--cache-dir", stubs / "cache"]
    run_module(stubs, "mypy", *options, EXAMPLE, *files)


@pytest.mark.slow
@needs_processes
def test_the_stubs_say_what_the_modules_hold(stubs):
    pytest.importorskip("mypy")
    allowed = HERE / "stubtest_allowlist.txt"
    options = ["--concise", "--allowlist", allowed, "--ignore-unused-allowlist"]
    run_module(stubs, "mypy.stubtest", "fastmha", *options)


def public_callables():
    for name in fastmha.__all__:
        thing = getattr(fastmha, name)
        if callable(thing):
            yield name, thing
        if inspect.isclass(thing):
            for method, function in inspect.getmembers(thing, callable):
                if not method.startswith("_"):
                    yield f"{name}.{method}", function


CALLABLES = dict(public_callables())


@pytest.mark.parametrize("name", CALLABLES)
def test_signatures_can_be_asked_for(name):
    assert not {"args", "kwargs"} & set(inspect.signature(CALLABLES[name]).parameters)


@pytest.mark.parametrize(
    "name", [name for name in reference.__all__ if inspect.isfunction(getattr(fastmha, name, None))]
)
def test_the_oracle_has_the_signatures_of_the_fast_functions(name):
    # Its stub takes its functions from theirs.
    fast, slow = (inspect.signature(getattr(module, name)) for module in (fastmha, reference))
    assert fast == slow
