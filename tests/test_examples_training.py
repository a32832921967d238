"""examples/train_tiny_lm.py: its gradients are right, it learns, and it says so when it does not."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from fastmha import reference

PATH = Path(__file__).parents[1] / "examples" / "train_tiny_lm.py"
pytestmark = pytest.mark.skipif(not PATH.exists(), reason="examples/ is not here")


@pytest.fixture
def example():
    pytest.importorskip("pydoc_data.topics")
    spec = importlib.util.spec_from_file_location("train_tiny_lm", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worst_gradient(example, **options):
    """The largest error of a derivative along a random direction, one for each parameter, relative to
    the derivative: central differences in float64."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 11, (3, 6))
    sizes = {"n_tokens": 11, "length": 7, "d_model": 8, "n_heads": 2, "dtype": np.float64}
    model = example.LanguageModel(**sizes, **options)
    for p in model.parameters():
        p += 0.1 * rng.standard_normal(p.shape)  # no gain stays at 1, no bias at 0

    def loss():
        return example.cross_entropy(model.forward(ids[:, :-1]), ids[:, 1:])

    model.backward(loss()[1])
    grads, worst, step = model.grads, 0, 1e-5
    for p, g in zip(model.parameters(), grads, strict=True):
        assert p.shape == g.shape
        direction = rng.standard_normal(p.shape)
        p += step * direction
        above = loss()[0]
        p -= 2 * step * direction
        below = loss()[0]
        p += step * direction
        expected, actual = (above - below) / (2 * step), (g * direction).sum()
        # The keys' biases shift all scores of a row alike: their derivative is 0.
        worst = max(worst, abs(actual - expected) / max(abs(expected), 1e-3))
    return worst


def test_the_gradient_of_every_parameter_is_that_of_differences(example):
    assert worst_gradient(example) < 1e-6
    assert worst_gradient(example, attention=reference.MultiHeadAttention, n_blocks=1) < 1e-6


LAYERS = ["Dense", "LayerNorm", "FeedForward", "Causal", "Residual"]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_wrong_gradient_differs(example, monkeypatch, layer):
    kind = getattr(example, layer)
    right = kind.backward
    monkeypatch.setattr(kind, "backward", lambda self, g: 1.01 * right(self, g))
    assert worst_gradient(example) > 1e-3


def small_run(example):
    training, held_out = example.load_text()
    model = example.LanguageModel(length=32, d_model=32)
    losses, checks, seconds = example.train(model, training, held_out, 60)
    assert len(losses) == len(seconds) == 60
    assert [step for step, _ in checks] == list(range(0, 61, 3))
    return losses, [loss for _, loss in checks]


def test_the_loss_falls_and_the_run_repeats(example):
    losses, checks = small_run(example)
    assert 4.5 < checks[0] < 6  # the logarithm of the alphabet's size is 4.6
    assert max(checks[-1], losses[-1]) < 3.1  # counted letters give 3.3
    assert small_run(example) == (losses, checks)


def test_both_classes_train_alike(example, monkeypatch):
    monkeypatch.setattr(example, "BATCH", 2)
    fast, plain, apart = example.compare_speed(example.load_text()[0], 3)
    assert min(fast, plain) > 0
    assert apart < example.SAME


def run(example, *arguments):
    return example.main(["--steps", "5", "--target", "4.5", "--compare", "0", *arguments])


def test_the_command(example, capsys, monkeypatch):
    assert run(example) == 0
    text = capsys.readouterr().out
    for heading in ("Before", "After", "time a step"):
        assert heading in text
    assert text.count("\n" + example.PROMPT) == 2  # a sample before, a sample after


def test_a_model_that_does_not_learn_fails(example, monkeypatch):
    right = example.cross_entropy

    def wrong(logits, targets):
        loss, g = right(logits, targets)
        return loss, -g

    monkeypatch.setattr(example, "cross_entropy", wrong)
    assert run(example) == 1


def test_classes_that_differ_fail(example, monkeypatch):
    monkeypatch.setattr(example, "compare_speed", lambda *_: (1.0, 2.0, 2 * example.SAME))
    assert run(example, "--compare", "1") == 1


def test_the_curve(example, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    assert example.draw_curve(path, [3.0, 2.0, 1.0], [(0, 3.1), (3, 1.1)])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_curve(example, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "loss.png"
    assert run(example, "--curve", str(path)) == 0
    assert "no curve" in capsys.readouterr().out
    assert not path.exists()
