"""What every wheel must pass: needs NumPy and pytest alone, and a few seconds.

The results are compared with the formula written out in NumPy, for each instruction set that the
machine runs, in a process of its own, since the choice is made at import.
"""

import os
import subprocess
import sys

import numpy as np
import pytest

import fastmha

DTYPES = ["float64", "float32", "float16"]
# Relative to the largest output, which is about 1.
TOLERANCE = {"float64": 1e-14, "float32": 2e-6, "float16": 1e-3}
SHAPES = [(1, 1, 1), (2, 3, 7), (5, 130, 8), (67, 200, 33), (1, 300, 64)]


def plain_attention(q, k, v, causal=False):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores[..., ~np.tri(*scores.shape[-2:], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)


def inputs(L, S, D, dtype):
    rng = np.random.default_rng(L + S + D)
    return [rng.normal(size=(2, 3, n, D)).astype(dtype) for n in (L, S, S)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention_is_the_formula(dtype, shape, causal):
    q, k, v = inputs(*shape, dtype)
    out = fastmha.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert out.dtype == dtype
    assert out.shape == q.shape
    np.testing.assert_allclose(
        out.astype(np.float64), plain_attention(q, k, v, causal), rtol=0, atol=TOLERANCE[dtype]
    )


def test_version_and_build_record():
    record = fastmha.show_config(mode="dicts")
    assert record["version"] == fastmha.__version__
    assert record["isa"] == record["isas"][-1] or os.environ.get("FASTMHA_ISA") == record["isa"]
    assert record["num_threads"] == fastmha.get_num_threads() >= 1


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


needs_processes = pytest.mark.skipif(sys.platform in ("emscripten", "wasi"), reason="no processes here")

FORCED = """
import os, sys
import fastmha
assert fastmha.show_config(mode="dicts")["isa"] == os.environ["FASTMHA_ISA"]
sys.path.insert(0, {folder!r})
import test_minimal
for dtype in test_minimal.DTYPES:
    for shape in test_minimal.SHAPES:
        for causal in (False, True):
            test_minimal.test_attention_is_the_formula(dtype, shape, causal)
"""


@needs_processes
@pytest.mark.parametrize("isa", fastmha.show_config(mode="dicts")["isas"])
def test_every_instruction_set(isa):
    folder = os.path.dirname(os.path.abspath(__file__))
    result = run(FORCED.format(folder=folder), FASTMHA_ISA=isa)
    assert result.returncode == 0, result.stderr


@needs_processes
def test_an_unknown_instruction_set_is_an_import_error():
    result = run("import fastmha", FASTMHA_ISA="abacus")
    assert result.returncode == 1
    assert "ImportError" in result.stderr
    for isa in fastmha.show_config(mode="dicts")["isas"]:
        assert isa in result.stderr


@needs_processes
def test_an_empty_choice_is_no_choice():
    result = run("import fastmha", FASTMHA_ISA="")
    assert result.returncode == 0, result.stderr


def test_any_number_of_threads_gives_the_same_bits():
    q, k, v = inputs(150, 300, 16, "float32")
    with fastmha.num_threads(1):
        alone = fastmha.scaled_dot_product_attention(q, k, v)
    for n in (2, 3, 8):
        with fastmha.num_threads(n):
            assert np.array_equal(fastmha.scaled_dot_product_attention(q, k, v), alone)


def test_causality_is_exact():
    q, k, v = inputs(100, 100, 16, "float64")
    before = fastmha.scaled_dot_product_attention(q, k, v, is_causal=True)
    k[..., 60:, :] = np.nan
    v[..., 60:, :] = np.inf
    after = fastmha.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert np.array_equal(before[..., :60, :], after[..., :60, :])


def test_a_row_that_sees_nothing_is_zero():
    q, k, v = inputs(3, 5, 4, "float32")
    mask = np.ones((3, 5), bool)
    mask[1] = False
    out = fastmha.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not out[..., 1, :].any()
    assert np.isfinite(out).all()


def test_wrong_arguments_are_errors():
    q, k, v = inputs(3, 5, 4, "float32")
    with pytest.raises(TypeError, match="query"):
        fastmha.scaled_dot_product_attention(q.astype(int), k, v)
    with pytest.raises(ValueError, match="value"):
        fastmha.scaled_dot_product_attention(q, k, v[..., :4, :])


@pytest.mark.skipif(not hasattr(fastmha, "MultiHeadAttention"), reason="not part of it yet")
def test_the_class():
    model = fastmha.MultiHeadAttention(32, 4, seed=1)
    x = np.random.default_rng(0).normal(size=(2, 9, 32))
    q, k, v = ((x @ getattr(model, "W" + name)).reshape(2, 9, 4, 8).swapaxes(1, 2) for name in "qkv")
    heads = plain_attention(q, k, v, causal=True)
    expected = heads.swapaxes(1, 2).reshape(2, 9, 32) @ model.Wo
    out = model(x, causal=True)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    assert model.attn.shape == (2, 4, 9, 9)
    assert sum(p.size for p in model.parameters()) == 4 * 32**2 + 4 * 32
