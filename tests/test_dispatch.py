"""Every build of the kernels that runs here gives the right numbers, and can be forced."""

import json

import numpy as np
import pytest
from comparing import assert_attends, assert_close
from drawing import seeded_calls

import fastmha
from fastmha import _dispatch, reference

CONFIG = fastmha.show_config(mode="dicts")
BATTERY = {"n": 100, "seed": 7, "zeros": True}

# Results of the battery, as bytes for those dtypes that files do not know.
CALCULATE = """
import sys, numpy as np, fastmha, drawing
results = {}
for i, call in enumerate(drawing.seeded_calls(**eval(sys.argv[2]))):
    out, lse = fastmha.attention(*call[:3], return_lse=True, **call.options)
    results[f"out{i}"], results[f"lse{i}"] = out.view(f"u{out.itemsize}"), lse
x = np.linspace(-30, 0, 3 * 1500).reshape(3, 1500)
results["softmax32"], results["softmax64"] = fastmha.softmax(x.astype("f4")), fastmha.softmax(x)
np.savez(sys.argv[1], isa=fastmha.show_config("dicts")["isa"], **results)
"""


@pytest.mark.parametrize("isa", CONFIG["isas"])
def test_every_build_equals_the_reference(isa, run_python, tmp_path):
    path = tmp_path / "results.npz"
    done = run_python(CALCULATE, path, BATTERY, FASTMHA_ISA=isa)
    assert done.returncode == 0, done.stderr
    results = np.load(path)
    assert results["isa"] == isa
    for i, call in enumerate(seeded_calls(**BATTERY)):
        dtype = call.query.dtype.newbyteorder("=")
        assert_attends(results[f"out{i}"].view(dtype), results[f"lse{i}"], *call)
    x = np.linspace(-30, 0, 3 * 1500).reshape(3, 1500)
    assert_close(results["softmax64"], reference.softmax(x), np.float64)
    assert_close(results["softmax32"], reference.softmax(x), np.float32, slack=2e-6)


def isa_of(run_python, **environment):
    done = run_python("import fastmha; print(fastmha.show_config('dicts')['isa'])", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_unset_and_empty_choose_the_best(run_python):
    best = CONFIG["isas"][-1]
    assert isa_of(run_python, FASTMHA_ISA=None) == best
    assert isa_of(run_python, FASTMHA_ISA="") == best


@pytest.mark.parametrize("wrong", ["mmx", " ", "AVX2", "baseline ", "avx512_f32", "../evil"])
def test_an_unknown_build_is_an_import_error_that_lists_them(run_python, wrong):
    done = run_python("import fastmha", FASTMHA_ISA=wrong)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: FASTMHA_ISA: expected one of ")
    assert ", ".join(CONFIG["isas"]) in last
    assert repr(wrong) in last


def test_a_build_that_does_not_run_here_is_not_chosen(run_python):
    for isa in {"baseline", "avx2", "avx512", "neon"} - set(CONFIG["isas"]):
        done = run_python("import fastmha", FASTMHA_ISA=isa)
        assert done.returncode == 1
        assert "ImportError: FASTMHA_ISA" in done.stderr


def test_no_build_that_runs_here_is_an_import_error(run_python):
    done = run_python(
        "import importlib, fastmha._build_config, fastmha._cpu, fastmha._dispatch\n"
        "fastmha._build_config.ISAS = ['avx512']\n"
        "fastmha._cpu.level = lambda: 1\n"
        "try: importlib.reload(fastmha._dispatch)\n"
        "except ImportError as error: print(error)\n",
        FASTMHA_ISA=None,
    )
    assert "avx512" in done.stdout, done.stderr
    assert "none of which this machine runs" in done.stdout


def test_show_config_as_a_record():
    assert set(CONFIG) >= {"version", "isa", "isas", "num_threads", "compiler"}
    assert CONFIG["version"] == fastmha.__version__
    assert CONFIG["isa"] in CONFIG["isas"]
    plainest_first = ["baseline", "neon", "avx2", "avx512"]
    assert CONFIG["isas"] == sorted(CONFIG["isas"], key=plainest_first.index)
    assert CONFIG["num_threads"] == fastmha.get_num_threads()
    assert CONFIG["vector_bytes"] in (4, 8, 16, 32, 64)
    assert CONFIG["fused"] == (CONFIG["isa"] != "baseline")
    assert CONFIG["numpy"] == np.__version__
    with fastmha.num_threads(3):
        assert fastmha.show_config(mode="dicts")["num_threads"] == 3


def test_the_record_is_a_copy():
    fastmha.show_config(mode="dicts")["isas"].append("mmx")
    assert fastmha.show_config(mode="dicts") == CONFIG


def test_show_config_printed(capsys):
    assert fastmha.show_config() is None
    printed = capsys.readouterr()
    assert json.loads(printed.out) == CONFIG
    assert printed.err == ""
    assert fastmha.show_config("stdout") is None
    assert capsys.readouterr().out == printed.out


@pytest.mark.parametrize("mode", ["dict", "", None, 3])
def test_show_config_knows_two_modes(mode):
    with pytest.raises(ValueError, match=r"^mode: expected 'stdout' or 'dicts', got"):
        fastmha.show_config(mode)


def test_single_precision_serves_all_but_float64():
    assert _dispatch.kernels(np.dtype(np.float64)) is _dispatch.double
    for dtype in (np.float32, np.float16):
        assert _dispatch.kernels(np.dtype(dtype)) is _dispatch.single
