"""The commands, as a user types them."""

import json
import os
import subprocess
import sys

import pytest

import fastmha
from fastmha import __main__ as cli


def run(*arguments, **environment):
    """Run a command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fastmha", *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        timeout=120,
    )


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"fastmha {fastmha.__version__}\n")


def test_no_command_shows_what_there_is():
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    for command in ("info", "bench", "demo"):
        assert command in done.stderr


def test_unknown_command():
    done = run("nonsense")
    assert done.returncode == 2
    assert "invalid choice: 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


def test_info_in_a_process_of_its_own():
    config = fastmha.show_config(mode="dicts")
    done = run("info", FASTMHA_NUM_THREADS="3", FASTMHA_ISA=config["isas"][0])
    assert (done.returncode, done.stderr) == (0, "")
    assert f"fastmha {config['version']}" in done.stdout
    assert config["compiler"] in done.stdout
    assert "3, from FASTMHA_NUM_THREADS=3" in done.stdout
    line = next(x for x in done.stdout.splitlines() if x.startswith(config["isas"][0]))
    assert "in use: FASTMHA_ISA asks for it" in line


def test_reader_that_stops_early_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-m", "fastmha", "bench", "--list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert b"Traceback" not in error
    assert b"BrokenPipe" not in error


def test_bench_measures_in_a_process_of_its_own():
    done = run(
        *("bench", "--case", "tiny-1x1x1-d16", "--threads", "1", "--quick", "--repeat", "1"),
        *("--no-torch", "--no-numpy", "--json", "-"),
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["environment"]["OPENBLAS_THREAD_TIMEOUT"] == "4"
    (record,) = data["results"]
    assert record["case"] == "tiny-1x1x1-d16"
    assert list(record["competitors"]) == ["fastmha"]
    assert record["competitors"]["fastmha"]["seconds"] > 0
    assert "tiny-1x1x1-d16" in done.stderr


# In this process


def test_info_names_the_kernels_in_use_and_the_source_of_threads(capsys, monkeypatch):
    for name in ("FASTMHA_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    lines = [line.split(maxsplit=1) for line in printed.splitlines() if "in use: " in line]
    assert [isa for isa, _ in lines] == [fastmha.show_config(mode="dicts")["isa"]]
    assert "CPUs this process may run on" in printed or "quota" in printed


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        ({"FASTMHA_NUM_THREADS": "5", "OMP_NUM_THREADS": "7"}, "from FASTMHA_NUM_THREADS=5"),
        ({"OMP_NUM_THREADS": "7,2"}, "from OMP_NUM_THREADS=7,2"),
        ({"FASTMHA_NUM_THREADS": "many", "OMP_NUM_THREADS": "7"}, "from OMP_NUM_THREADS=7"),
    ],
)
def test_source_of_the_number_of_threads(monkeypatch, variables, source):
    from fastmha import _threads

    for name in ("FASTMHA_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli._thread_source() == source
    assert source.partition("=")[2].startswith(str(_threads.default_num_threads()))


def test_quota_is_named(monkeypatch):
    from fastmha import _threads

    for name in ("FASTMHA_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_threads, "_usable_cpus", lambda: 8)
    monkeypatch.setattr(_threads, "_quota_cpus", lambda: 2)
    assert cli._thread_source() == "from the container's quota; the process may run on 8 CPUs"
    assert _threads.default_num_threads() == 2


def test_kernels_that_do_not_run_say_what_is_missing(monkeypatch):
    from fastmha import _build_config

    monkeypatch.setattr(_build_config, "ISAS", ["baseline", "avx2", "avx512"])
    monkeypatch.delenv("FASTMHA_ISA", raising=False)
    config = {"isa": "avx2", "isas": ["baseline", "avx2"]}
    fates = cli._kernels(config, {"avx2", "avx512f", "avx512bw", "avx512cd", "avx512dq"})
    assert fates == {
        "baseline": "runs here; FASTMHA_ISA=baseline chooses it",
        "avx2": "in use: the widest that runs here",
        "avx512": "does not run here: the processor has no avx512vl",
    }
    fates = cli._kernels(config, set())
    assert "or its operating system" in fates["avx512"]


def test_bench_list(capsys):
    assert cli.main(["bench", "--list", "--case", "full-6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["full-64", "full-65"]
    assert cli.main(["bench", "--list", "--sweep", "length"]) == 0
    assert "causal-L16384" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--case", "no such"], "--case: expected a part of a case's name"),
        (["bench", "--threads", "0"], "expected an integer of at least 1, got '0'"),
        (["bench", "--repeat", "x"], "expected an integer of at least 1, got 'x'"),
        (["bench", "--sweep", "width"], "invalid choice"),
        (["bench", "--json", os.path.join("no", "such", "folder", "x")], "--json: cannot write"),
        (["demo", "--lengths", "-1"], "expected an integer of at least 1"),
        (["info", "--more"], "unrecognized arguments"),
    ],
)
def test_arguments_that_cannot_serve(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert message in error
    assert out == ""


def test_bench_arguments_arrive(monkeypatch):
    from fastmha import bench

    seen = {}

    def run_bench(cases, **options):
        seen.update(options, cases=[case.name for case in cases])
        return 0

    monkeypatch.setattr(bench, "run_bench", run_bench)
    assert cli.main(["bench", "--case", "full-64", "full-65", "--threads", "1", "2"]) == 0
    assert (seen["cases"], seen["threads"]) == (["full-64", "full-65"], [1, 2])
    assert seen["use_numpy"] and seen["use_torch"] and not seen["use_onnxruntime"]
    assert cli.main(["bench", "--sweep", "length", "--quick", "--no-numpy", "--no-torch"]) == 0
    assert seen["use_onnxruntime"] and not seen["use_numpy"] and not seen["use_torch"]
    assert seen["quick"] and "full-L16384" not in seen["cases"]
    assert seen["plot_file"] is None


def test_bench_plot_means_a_sweep(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    from fastmha import bench

    seen = {}
    monkeypatch.setattr(bench, "run_bench", lambda cases, **options: seen.update(options, cases=cases))
    file = str(tmp_path / "sweep.svg")
    cli.main(["bench", "--plot", file])
    assert seen["plot_file"] == file and seen["use_onnxruntime"]
    assert seen["cases"] == bench.chosen_cases(sweep="length")


@pytest.mark.parametrize("command", ["bench", "demo"])
@pytest.mark.parametrize("file", [os.path.join("no", "such", "folder", "x.png"), "x.unknown"])
def test_pictures_that_cannot_be_written(command, file, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--plot", file])
    assert stop.value.code == 2
    assert f"--plot: cannot write {file}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_pictures_without_matplotlib(command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--plot", "x.png"])
    assert stop.value.code == 2
    assert "pip install 'fastmha[plot]'" in capsys.readouterr().err


def test_demo_arguments_arrive(monkeypatch):
    from fastmha import demo

    seen = {}
    monkeypatch.setattr(demo, "run_demo", lambda **options: seen.update(options))
    assert cli.main(["demo"]) == 0
    assert seen == {}
    line = ["demo", "--text", "a", "--tokens", "2", "--layer", "0", "--head", "1", "--lengths"]
    assert cli.main(line) == 0
    assert seen == {"text": "a", "n_new": 2, "layer": 0, "head": 1, "lengths": []}


def test_interrupt_ends_in_130(monkeypatch, capsys):
    from fastmha import demo

    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupted)
    assert cli.main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err
