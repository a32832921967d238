"""Continue a sentence: a small trained decoder, a token at a time, on key/value caches.

The model is glassllm's, the one of `fastmha demo`: four layers, 4 query heads on 2 key/value heads,
rotary positions, trained on Lewis Carroll. Each layer's attention becomes a `MultiHeadAttention`, whose
cache keeps what earlier tokens have left; the embedding, the norms and the feed-forward layers are
called as they are. The tokens must be those of the package's own generation, and the logits of each
step those of its own forward pass over the whole text.

    python examples/generate_text.py "Alice opened the door and found"
"""

import argparse
import sys

import glassllm
import numpy as np
from _common import TextbookAttention, agree, print_speed, same
from rich.progress import track

from fastmha import MultiHeadAttention, Rope
from fastmha.demo import TEXT, load_model


class Decoder:
    """glassllm's model with an attention of one's choice."""

    def __init__(self, model, textbook=False):
        self.model, cfg = model, model.cfg
        self.attention = []
        for block in model.blocks:
            stored = block.attn
            rope = Rope(stored.d_k, interleaved=True, base=cfg.rope_base)
            layer = MultiHeadAttention(
                cfg.d_model, cfg.n_heads, n_kv_heads=cfg.n_kv_heads, bias=False, dtype=np.float32, rope=rope
            )
            layer.Wq, layer.Wk = stored.W_Q.data, stored.W_K.data
            layer.Wv, layer.Wo = stored.W_V.data, stored.W_O.data
            self.attention.append(TextbookAttention(layer) if textbook else layer)

    def start(self):
        """An empty cache for each layer."""
        return [layer.make_cache(batch=1) for layer in self.attention]

    def step(self, ids, caches):
        """Logits (vocabulary,) after the new tokens `ids`, which the caches take up."""
        with glassllm.no_grad():
            x = glassllm.Tensor(self.model.E.data[np.asarray(ids)][None])  # (1, new tokens, d_model)
            layers = zip(self.model.blocks, self.attention, caches, strict=True)
            for i, (block, attention, cache) in enumerate(layers):
                x = x + glassllm.Tensor(attention(block.norm1(x).data, cache=cache))
                x = x + block.ffn(block.norm2(x), i)
            return self.model.norm_f(x).data[0, -1] @ self.model.E.data.T

    def generate(self, ids, n_new, progress=lambda steps: steps):
        """The likeliest token, `n_new` times, and the logits (n_new, vocabulary) they were chosen by."""
        caches, pending, tokens, logits = self.start(), ids, [], []
        for _ in progress(range(n_new)):
            logits.append(self.step(pending, caches))
            pending = [int(np.argmax(logits[-1]))]
            tokens += pending
        return tokens, np.array(logits)


def check(model, ids, tokens, logits):
    """Whether tokens and logits are the package's own."""
    expected = [step.token for step in model.generate(ids, len(tokens), greedy=True)]
    with glassllm.no_grad():
        own = model.forward(ids + tokens[:-1]).data[0, len(ids) - 1 :]
    return same("tokens, against glassllm", tokens, expected) & agree(
        "logits, against glassllm", logits, own, 1e-5
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Continue a text with a small trained model.")
    parser.add_argument("text", nargs="?", default=TEXT)
    parser.add_argument("--tokens", type=int, help="how many to add: as many as the model can")
    parser.add_argument("--rounds", type=int, default=9, help="how often to time each attention")
    args = parser.parse_args(arguments)
    model, tokenizer = load_model()
    ids = tokenizer.encode(args.text)
    room = model.cfg.max_len - len(ids)
    n_new = room if args.tokens is None else args.tokens
    if not ids or not 0 < n_new <= room:
        parser.error(f"expected 1 to {model.cfg.max_len} tokens in all, got {len(ids)} and {n_new} new ones")

    decoder = Decoder(model)
    tokens, logits = decoder.generate(ids, n_new, lambda steps: track(steps, description="writing"))
    if not check(model, ids, tokens, logits):
        print("the text is not the model's own", file=sys.stderr)
        return 1
    print(args.text + "|" + tokenizer.decode(tokens))
    print_speed(lambda model: model.generate(ids, n_new), decoder, Decoder(model, textbook=True), args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
