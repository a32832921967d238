"""What all tests share: hypothesis's settings, the number of threads, subprocesses."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

try:
    import hypothesis
except ImportError:  # test_minimal.py does without
    hypothesis = None
else:
    hypothesis.settings.register_profile(
        "ci",
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=int(os.environ.get("FASTMHA_TEST_EXAMPLES", "50")),  # fewer under emulation
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("ci")


@pytest.fixture(scope="session")
def patience():
    """How many times as long as elsewhere a test waits: under emulation and sanitizers all is slow."""
    return float(os.environ.get("FASTMHA_TEST_PATIENCE", "1"))


@pytest.fixture(autouse=True)
def threads_as_before():
    """The number of threads is one for the process: a test that sets it leaves no trace."""
    import fastmha

    with fastmha.num_threads(fastmha.get_num_threads()):
        yield


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def start_python():
    """start_python(code, *arguments, **environment): a process of its own, the modules of this
    folder at hand; a variable that is None is unset."""

    def start(code, *arguments, **environment):
        folder = str(pathlib.Path(__file__).parent)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={name: text for name, text in environment.items() if text is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


def end(process):
    """Ends it with all that it has started: they hold on to its output."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


@pytest.fixture(scope="session")
def run_python(start_python, patience):
    """The same, waiting for its end, at most `timeout` seconds or longer by `patience`: the completed
    process."""

    def run(code, *arguments, timeout=60, **environment):
        timeout *= patience
        process = start_python(code, *arguments, **environment)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end(process)
            out, err = process.communicate()
            pytest.fail(f"still running after {timeout} s\n{out}\n{err}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run
