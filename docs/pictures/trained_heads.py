"""Attention of a trained model: the four heads of a layer of glassllm's, on a sentence of the demo."""

import matplotlib.pyplot as plt
import numpy as np
from _drawing import save

from fastmha import attention_weights
from fastmha.demo import TEXT, forward, load_model

LAYER = 1


def draw(folder):
    model, tokenizer = load_model()
    ids = tokenizer.encode(TEXT)
    tokens = [tokenizer.decode([i]).strip() for i in ids]
    _, heads = forward(model, ids)
    q, k = heads[LAYER]
    weights = attention_weights(q, k, causal=True)[0]
    figure, axes = plt.subplots(2, 2, figsize=(8, 8), layout="constrained")
    for h, each in enumerate(axes.flat):
        shown = np.where(np.tri(len(ids), dtype=bool), weights[h], np.nan)
        each.imshow(shown, cmap="Blues", vmin=0, vmax=1)
        each.set_title(f"layer {LAYER}, head {h}")
        each.tick_params(length=0)
        each.set_xticks(range(len(ids)), tokens, rotation=90, fontsize=7)
        each.set_yticks(range(len(ids)), tokens, fontsize=7)
    save(figure, folder, "trained-heads")
