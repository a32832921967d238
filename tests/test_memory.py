"""No array of L x S anywhere: what a long call takes beyond its inputs and output."""

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no getrusage")

# Prints by how many megabytes the most memory that the process ever had grew in the call.
MEASURE = """
import resource, sys
import numpy as np, fastmha

def most():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    # Not ru_maxrss: on Linux a process inherits it from the one that started it.
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 2**10

def array(*shape):
    x = np.empty(shape, dtype)
    x[...] = rng.standard_normal((shape[1], 1, shape[3]))
    return x

L, H, dtype, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], eval(sys.argv[4])
rows = options.pop("rows", None)
fastmha.set_num_threads(2)
rng = np.random.default_rng(0)
q, k, v = (array(1, H, L, 64) for _ in range(3))
out = np.full_like(v, 1)
few = [x[:, :, :70] for x in (q, k, v)]
long = ("mask", "key_lengths", "query_lengths")
fastmha.attention(*few, **{name: x for name, x in options.items() if name not in long})
before = most()
if rows is None:
    kept = fastmha.attention(q, k, v, out=out, return_lse=True, **options)
else:
    kept = fastmha.attention_weights(q, k, rows=rows, **options)
print(most() - before)
"""

EVERYTHING = {
    "softcap": 20.0, "alibi_slopes": [0.1] * 16, "sinks": [0.5] * 16, "key_lengths": [8000],
    "query_lengths": [8100], "dropout_p": 0.1, "rng": 1, "window": (1000, 100),
}  # fmt: skip


def grown(run_python, options, L=8192, H=16, dtype="float32", code=MEASURE):
    done = run_python(code, L, H, dtype, options, timeout=300)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_the_measure_finds_an_array_that_is_made(run_python):
    code = MEASURE.replace("if rows is None:", "more = np.ones(100 * 2**17)\nif rows is None:")
    assert code != MEASURE
    assert 90 < grown(run_python, {}, 64, 1, code=code) < 110


@pytest.mark.parametrize(
    "options",
    [
        {"window": (256, 0)},
        {"window": (256, 0), "causal": True, "softcap": 20.0},
        {"window": (256, 256), "alibi_slopes": [0.1] * 16},
        {"window": (256, 256), "dropout_p": 0.1, "rng": 1},
        {"key_lengths": [500], "query_lengths": [8000]},
        EVERYTHING,
    ],
    ids="-".join,
)
def test_what_is_seen_in_part(run_python, options):
    assert grown(run_python, options) < 64


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_dtypes(run_python, dtype):
    heads = {"alibi_slopes": [0.1] * 4, "sinks": [0.5] * 4}
    assert grown(run_python, EVERYTHING | heads, H=4, dtype=dtype) < 16


def test_weights_of_chosen_rows(run_python):
    assert grown(run_python, {"rows": [5, 6, 8000]}, H=4) < 16


def test_padding_masks_are_not_expanded(run_python):
    code = MEASURE.replace("eval(sys.argv[4])", '{"mask": np.arange(4096) < 1000}')
    assert grown(run_python, {}, 4096, 4, code=code) < 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"softcap": 20.0},
        {"alibi_slopes": [0.1] * 16},
        {"dropout_p": 0.1, "rng": 1},
        {"key_lengths": [8000], "query_lengths": [8100]},
        {name: x for name, x in EVERYTHING.items() if name != "window"},
    ],
    ids=lambda options: "-".join(options) or "none",
)
def test_what_is_seen_whole(run_python, options):
    assert grown(run_python, options) < 64
