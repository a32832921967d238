"""Which atom went where: reaction mapping read off the attention of one head.

rxnmapper's model, an ALBERT of 12 layers of 8 heads that share their weights, has learned from reactions
alone that an atom of a product looks at the same atom among the reactants. The package reads the map off
head 5 of layer 10, both counted from 0; PyTorch computes the weights of all heads of all layers for it.
Here `MultiHeadAttention` runs the layers below, and `attention_weights` computes that head. All else is
the package's own, and its maps and confidences are what the result must equal. It needs PyTorch itself,
to read its weights among other things: pip install 'fastmha[example-reactions]'.

    python examples/reaction_mapping.py "CC(=O)O.OCC>>CC(=O)OCC"
"""

import argparse
import sys
import warnings

import numpy as np
import torch
from _common import TextbookAttention, agree, gelu, in_use, layer_norm, print_speed, same, textbook_weights

from fastmha import MultiHeadAttention, attention_weights

with warnings.catch_warnings():  # it finds its files by a module that setuptools is about to drop
    warnings.simplefilter("ignore", UserWarning)
    from rxnmapper import RXNMapper

REACTIONS = [
    "CC(=O)O.OCC>>CC(=O)OCC",  # Fischer's esterification
    "C=CC=C.C=CC(=O)OC>>COC(=O)C1CCC=CC1",  # Diels and Alder's cycloaddition
    "OB(O)c1ccccc1.Brc1ccc(C#N)cc1>>N#Cc1ccc(-c2ccccc2)cc1",  # Suzuki's coupling
    "CC(=O)OC(C)=O.Nc1ccc(O)cc1>>CC(=O)Nc1ccc(O)cc1",  # paracetamol
    "CC(=O)OC(C)=O.O=C(O)c1ccccc1O>>CC(=O)Oc1ccccc1C(=O)O",  # aspirin
    "O=Cc1ccccc1.CC(C)=O>>CC(=O)C=Cc1ccccc1",  # aldol condensation
    "C1CCNCC1.O=[N+]([O-])c1ccc(F)cc1>>O=[N+]([O-])c1ccc(N2CCCCC2)cc1",  # aromatic substitution
    "CC(C)(C)OC(=O)NCC(=O)O.NCc1ccccc1>>CC(C)(C)OC(=O)NCC(=O)NCc1ccccc1",  # amide coupling
]


class Mapper(RXNMapper):
    """rxnmapper, with an attention of one's choice."""

    def __init__(self, textbook=False):
        super().__init__()
        self.config = self.model.config
        self.w = {name: x.numpy() for name, x in self.model.state_dict().items()}
        prefix = "encoder.albert_layer_groups.0.albert_layers.0."
        self.shared = {name.removeprefix(prefix): x for name, x in self.w.items() if name.startswith(prefix)}
        state = {  # BERT's attention under other names
            f"{theirs}.{part}": self.shared[f"attention.{ours}.{part}"]
            for ours, theirs in (
                ("query", "self.query"),
                ("key", "self.key"),
                ("value", "self.value"),
                ("dense", "output.dense"),
            )
            for part in ("weight", "bias")
        }
        layer = self.layer = MultiHeadAttention.from_bert(state, self.config.num_attention_heads)
        self.attention = [TextbookAttention(layer) if textbook else layer]
        self.weights = _textbook_head if textbook else attention_weights

    def convert_batch_to_attns(self, rxn_smiles_list, force_layer=None, force_head=None):
        """The one method replaced: of each reaction, the weights (L, L) of the chosen head."""
        [last] = self.layers if force_layer is None else [force_layer]
        head = self.head if force_head is None else force_head
        encoded = self.tokenizer.batch_encode_plus(rxn_smiles_list, padding=True, return_tensors="np")
        ids, lengths = encoded["input_ids"], encoded["attention_mask"].sum(axis=1)
        x = self.w["embeddings.word_embeddings.weight"][ids]
        x = x + self.w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = x + self.w["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, self.w, "embeddings.LayerNorm")
        x = _dense(x, self.w, "encoder.embedding_hidden_mapping_in")
        for _ in range(last):
            [attention] = self.attention
            x = self._norm(x + attention(x, lengths=lengths), self.shared, "attention.LayerNorm")
            hidden = _dense(gelu(_dense(x, self.shared, "ffn")), self.shared, "ffn_output")
            x = self._norm(x + hidden, self.shared, "full_layer_layer_norm")
        q = self.layer._split_heads(x @ self.layer.Wq + self.layer.bq)
        k = self.layer._split_heads(x @ self.layer.Wk + self.layer.bk)
        weights = self.weights(q, k, heads=[head], key_lengths=lengths)[:, 0]
        return [torch.from_numpy(w[:n, :n].copy()) for w, n in zip(weights, lengths, strict=True)]

    def _norm(self, x, w, name):
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], self.config.layer_norm_eps)


def _dense(x, w, name):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _textbook_head(q, k, *, heads, key_lengths):
    return textbook_weights(q, k, in_use(key_lengths, k.shape[2]))[:, heads]


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Map the atoms of reactions.")
    parser.add_argument("reactions", nargs="*", default=REACTIONS, help="as SMILES: reactants>>product")
    parser.add_argument("--rounds", type=int, default=5, help="how often to time each attention")
    args = parser.parse_args(arguments)

    mapper = Mapper()
    found = mapper.get_attention_guided_atom_maps(args.reactions, detailed_output=True)
    own = RXNMapper().get_attention_guided_atom_maps(args.reactions, detailed_output=True)
    good = same("maps, against rxnmapper", *([x["mapped_rxn"] for x in maps] for maps in (found, own)))
    for name, what in (("tokensxtokens_attns", "attention"), ("pxr_confidences", "confidences")):
        values = (np.concatenate([np.ravel(x[name]) for x in maps]) for maps in (found, own))
        good &= agree(f"{what}, against rxnmapper", *values, 1e-4)
    if not good:
        print("the maps are not the package's own", file=sys.stderr)
        return 1
    for result in found:
        print(f"{result['confidence']:.3f}  {result['mapped_rxn']}")
    textbook = Mapper(textbook=True)
    print_speed(lambda model: model.convert_batch_to_attns(args.reactions), mapper, textbook, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
