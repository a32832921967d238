"""Weight dictionaries of other libraries: section 2 of the contract, case A38f."""

import numpy as np
import pytest

from fastmha import weights
from fastmha.multihead import MultiHeadAttention
from fastmha.rope import Rope

NAMES = ("Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo", "bo")


def close(actual, desired, tolerance=1e-12):
    assert np.shape(actual) == np.shape(desired)
    assert np.abs(actual - desired).max() <= tolerance * np.abs(desired).max()


def parts(d=8, kv=8, dtype=np.float64):
    """Wq, Wk, Wv, Wo for x @ W, and their biases."""
    rng = np.random.default_rng(d + kv)
    widths = (d, kv, kv, d)
    W = [rng.normal(size=(d, width)).astype(dtype) for width in widths]
    return W, [rng.normal(size=width).astype(dtype) for width in widths]


def torch_state(W, b):
    return {
        "in_proj_weight": np.concatenate([w.T for w in W[:3]]),
        "in_proj_bias": np.concatenate(b[:3]),
        "out_proj.weight": W[3].T,
        "out_proj.bias": b[3],
    }


def torch_state_in_parts(W, b):
    state = torch_state(W, b)
    del state["in_proj_weight"]
    return state | {f"{n}_proj_weight": w.T for n, w in zip("qkv", W, strict=False)}


def nanogpt_state(W, b):
    return {
        "c_attn.weight": np.concatenate([w.T for w in W[:3]]),
        "c_attn.bias": np.concatenate(b[:3]),
        "c_proj.weight": W[3].T,
        "c_proj.bias": b[3],
    }


def gpt2_state(W, b):
    return nanogpt_state(W, b) | {
        "c_attn.weight": np.concatenate(W[:3], axis=1),
        "c_proj.weight": W[3],
    }


def four_states(names, W, b):
    state = {f"{name}.weight": w.T for name, w in zip(names, W, strict=True)}
    return state | {f"{name}.bias": x for name, x in zip(names, b, strict=True)}


def bert_state(W, b):
    return four_states(("self.query", "self.key", "self.value", "output.dense"), W, b)


def llama_state(W, b):
    return four_states(("q_proj", "k_proj", "v_proj", "o_proj"), W, b)


FORMATS = {
    "torch": (torch_state, MultiHeadAttention.from_torch),
    "torch in parts": (torch_state_in_parts, MultiHeadAttention.from_torch),
    "nanogpt": (nanogpt_state, MultiHeadAttention.from_nanogpt),
    "gpt2": (gpt2_state, MultiHeadAttention.from_gpt2),
    "bert": (bert_state, MultiHeadAttention.from_bert),
    "llama": (
        llama_state,
        lambda state, n_heads, **options: MultiHeadAttention.from_llama(
            state, n_heads, options.pop("n_kv_heads", n_heads), **options
        ),
    ),
}
each_format = pytest.mark.parametrize("name", FORMATS)


# --- where each part goes


@each_format
def test_a38f_every_part_in_its_place(name):
    make, read = FORMATS[name]
    W, b = parts()
    layer = read(make(W, b), 2)
    expected = [x for pair in zip(W, b, strict=True) for x in pair]
    for n, x in zip(NAMES, expected, strict=True):
        assert np.array_equal(getattr(layer, n), x), n
    assert (layer.d_model, layer.n_heads, layer.n_kv_heads, layer.d_k) == (8, 2, 2, 4)
    assert layer.dtype == np.float64 and layer.dropout == 0 and layer.rope is None
    plain = MultiHeadAttention(8, 2)
    for n, x in zip(NAMES, expected, strict=True):
        setattr(plain, n, x)
    x = np.random.default_rng(0).normal(size=(2, 3, 8))
    assert np.array_equal(layer(x), plain(x))


def test_a38f_rows_of_in_proj_weight_are_q_k_v():
    state = {"in_proj_weight": np.array([[1.0], [3], [2]]), "out_proj.weight": np.array([[2.0]])}
    layer = MultiHeadAttention.from_torch(state, 1)
    close(layer(np.array([[[1.0], [2.0]]])).ravel(), np.array([7.8102965, 7.9901095]), 1e-7)
    whole = {"in_proj_weight": [[1], [3], [2]], "out_proj.weight": [[2]]}  # integers, in lists
    assert MultiHeadAttention.from_torch(whole, 1).dtype == np.float64


def test_a38f_gpt2_stores_in_by_out():
    state = {"c_attn.weight": np.zeros((2, 6)), "c_proj.weight": np.array([[0.0, 1], [0, 0]])}
    state["c_attn.weight"][:, 4:] = np.eye(2)  # v = x
    layer = MultiHeadAttention.from_gpt2(state, 1)
    close(layer(np.array([[[5.0, 7.0]]])), np.array([[[0.0, 5.0]]]))


def test_llama_with_fewer_key_value_heads():
    W, b = parts(8, 4)
    state = llama_state(W, b) | {"rotary_emb.inv_freq": np.ones(1)}
    layer = MultiHeadAttention.from_llama(state, 4, 2)
    assert layer.n_kv_heads == 2 and np.array_equal(layer.Wk, W[1])
    assert layer.rope is None  # no rotation by itself
    rope = Rope(2, interleaved=False)
    assert MultiHeadAttention.from_llama(state, 4, 2, rope=rope).rope is rope
    for heads in ((4, 4), (2, 2), (4, 1), (8, 2)):
        with pytest.raises(ValueError, match=r"k_proj\.weight"):
            MultiHeadAttention.from_llama(state, *heads)
    for heads in ((3, 1), (0, 1), (4, 0)):
        with pytest.raises(ValueError, match="heads"):
            MultiHeadAttention.from_llama(state, *heads)


# --- prefixes, what is missing, what is left over


@each_format
def test_prefix(name):
    make, read = FORMATS[name]
    W, b = parts()
    state = {f"h.0.attn.{key}": x for key, x in make(W, b).items()}
    state |= {"h.0.mlp.weight": np.ones(1), "h.1.attn.extra": np.ones(1), "wte": np.ones(2)}
    assert np.array_equal(read(state, 2, prefix="h.0.attn.").Wv, W[2])
    with pytest.raises(ValueError, match=r"^h\.1\.attn\..*expected this weight"):
        read(state, 2, prefix="h.1.attn.")


@each_format
def test_missing_weight_is_named(name):
    make, read = FORMATS[name]
    state = make(*parts())
    for key in [key for key in state if "bias" not in key]:
        rest = {other: x for other, x in state.items() if other != key}
        wanted = "in_proj_weight" if key == "q_proj_weight" else key
        for strict in (True, False):
            with pytest.raises(ValueError, match=wanted.replace(".", r"\.")):
                read(rest, 2, strict=strict)


@each_format
def test_wrong_shape_is_named(name):
    make, read = FORMATS[name]
    state = make(*parts())
    for key, x in state.items():
        for wrong in (x[:-1], x[None], x.reshape(-1), np.concatenate([x, x])):
            if wrong.shape != x.shape:
                with pytest.raises(ValueError, match=key.replace(".", r"\.") + ": expected shape"):
                    read(state | {key: wrong}, 2)


def test_a38f_the_other_orientation_of_a_fused_weight_is_refused():
    W, b = parts()
    with pytest.raises(ValueError, match=r"c_attn\.weight"):
        MultiHeadAttention.from_gpt2(nanogpt_state(W, b), 2)
    with pytest.raises(ValueError, match=r"c_attn\.weight"):
        MultiHeadAttention.from_nanogpt(gpt2_state(W, b), 2)


@each_format
def test_left_over_key_is_named(name):
    make, read = FORMATS[name]
    state = make(*parts())
    with pytest.raises(ValueError, match=r"rel_pos\.table"):
        read(state | {"rel_pos.table": np.ones(3)}, 2)
    with pytest.raises(ValueError, match=r"attn\.rel_pos"):
        prefixed = {f"attn.{key}": x for key, x in state.items()} | {"attn.rel_pos": np.ones(3)}
        read(prefixed, 2, prefix="attn.")
    layer = read(state | {"rel_pos.table": np.ones(3)}, 2, strict=False)
    assert np.array_equal(layer.Wq, read(state, 2).Wq)


@each_format
def test_what_real_checkpoints_carry_beside_is_no_error(name):
    make, read = FORMATS[name]
    beside = {
        "bias": np.tril(np.ones((1, 1, 4, 4), bool)),
        "masked_bias": np.float32(-1e4),
        "output.LayerNorm.weight": np.ones(8),
        "output.LayerNorm.bias": np.ones(8),
        "rotary_emb.inv_freq": np.ones(2),
    }
    assert read(make(*parts()) | beside, 2).d_model == 8


def test_a_fused_weight_beside_its_parts_is_left_over():
    W, b = parts()
    with pytest.raises(ValueError, match="k_proj_weight"):
        MultiHeadAttention.from_torch(torch_state(W, b) | torch_state_in_parts(W, b), 2)


@each_format
def test_missing_biases(name):
    make, read = FORMATS[name]
    W, b = parts()
    state = make(W, b)
    none = {key: x for key, x in state.items() if not key.endswith("bias")}
    layer = read(none, 2)
    assert layer.bq is None and layer.bo is None and len(layer.parameters()) == 4
    key = next(key for key in state if key.endswith("bias"))
    some = {other: x for other, x in state.items() if other != key}
    layer = read(some, 2)
    assert not layer.bq.any() and layer.bq.shape == (8,)
    assert np.array_equal(layer.bo, b[3]) and len(layer.parameters()) == 8


def test_what_is_no_dictionary():
    for state in ([], None, np.ones(3), "weights"):
        with pytest.raises(TypeError, match="state"):
            MultiHeadAttention.from_torch(state, 1)
    with pytest.raises(TypeError, match="prefix"):
        MultiHeadAttention.from_torch({}, 1, prefix=0)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="d_model"):
        MultiHeadAttention.from_torch(torch_state(*parts()), 3)


def test_archives_of_numpy_are_mappings(tmp_path):
    W, b = parts()
    np.savez(tmp_path / "weights.npz", **torch_state(W, b))
    with np.load(tmp_path / "weights.npz") as state:
        layer = MultiHeadAttention.from_torch(state, 2)
    assert np.array_equal(layer.Wo, W[3])


# --- dtypes


@each_format
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ">f8", "bfloat16"])
def test_dtype_is_kept_or_converted(name, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    make, read = FORMATS[name]
    W, b = parts()
    W, b = ([x.astype(dtype) for x in part] for part in (W, b))
    layer = read(make(W, b), 2)
    assert layer.dtype == np.dtype(dtype).newbyteorder("=")
    for x in layer.parameters():
        assert x.dtype == layer.dtype and x.dtype.isnative
        assert x.flags.c_contiguous and x.flags.writeable
    double = read(make(W, b), 2, dtype=np.float64)
    assert double.dtype == np.float64 and np.array_equal(double.Wk, W[1].astype(np.float64))


def test_dtypes_that_differ_are_promoted():
    W, b = parts(dtype=np.float16)
    single = [x.astype(np.float32) for x in b]
    assert MultiHeadAttention.from_torch(torch_state(W, single), 2).dtype == np.float32
    ml_dtypes = pytest.importorskip("ml_dtypes")
    brain = [x.astype(ml_dtypes.bfloat16) for x in b]
    assert MultiHeadAttention.from_torch(torch_state(W, brain), 2).dtype == np.float32


def test_wrong_dtypes():
    state = torch_state(*parts())
    for wrong in (np.complex128, bool, object):
        with pytest.raises(TypeError, match=r"out_proj\.weight"):
            bad = state["out_proj.weight"].astype(wrong)
            MultiHeadAttention.from_torch(state | {"out_proj.weight": bad}, 2)
    for wrong in (np.int32, np.complex64, "S3"):
        with pytest.raises(TypeError, match="dtype"):
            MultiHeadAttention.from_torch(state, 2, dtype=wrong)


@each_format
def test_weights_are_copies(name):
    make, read = FORMATS[name]
    state = make(*parts())
    layer = read(state, 2)
    for x in layer.parameters():
        assert not any(np.shares_memory(x, y) for y in state.values())
        x[...] = 0
    assert all(y.any() for y in state.values())


# --- PyTorch


def test_to_torch_is_the_inverse_of_from_torch():
    state = torch_state(*parts(dtype=np.float32))
    layer = MultiHeadAttention.from_torch(state, 2)
    back = layer.to_torch()
    assert back.keys() == state.keys()
    for key, x in back.items():
        assert x.dtype == np.float32 and np.array_equal(x, state[key])
        assert not any(np.shares_memory(x, y) for y in layer.parameters())
    bare = MultiHeadAttention(8, 2, bias=False)
    assert sorted(bare.to_torch()) == ["in_proj_weight", "out_proj.weight"]
    twin = MultiHeadAttention.from_torch(bare.to_torch(), 2)
    assert twin.bq is None and np.array_equal(twin.Wv, bare.Wv)
    bare.bo = np.arange(8.0)  # a bias alone
    assert not bare.to_torch()["in_proj_bias"].any()
    with pytest.raises(ValueError, match="n_kv_heads"):
        MultiHeadAttention(8, 2, n_kv_heads=1).to_torch()


def test_weights_functions_pair_up():
    W, b = parts()
    found = weights.from_torch(torch_state(W, b))
    assert found.Wq.shape == (8, 8)
    state = weights.to_torch(found)
    for key, x in torch_state(W, b).items():
        assert np.array_equal(state[key], x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_from_torch_computes_what_torch_computes(bias, causal):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(12, 3, bias=bias, batch_first=True, dtype=torch.float64)
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    ours = MultiHeadAttention.from_torch(theirs.state_dict(), 3)
    x, lengths = np.random.default_rng(0).normal(size=(3, 5, 12)), [5, 1, 3]
    keep = np.arange(5) < np.array(lengths)[:, None]
    hidden = torch.from_numpy(~np.tri(5, dtype=bool)) if causal else None
    tensor = torch.from_numpy(x)
    with torch.no_grad():
        expected, attn = theirs(
            tensor,
            tensor,
            tensor,
            key_padding_mask=torch.from_numpy(~keep),  # True = ignore, there
            attn_mask=hidden,
            average_attn_weights=False,
        )
    close(ours(x, causal, mask=keep[:, None, None]), expected.numpy())
    close(ours.attn, attn.numpy())
    out = ours(x, causal, lengths=lengths)
    close(out[keep], expected.numpy()[keep])
    assert not out[~keep].any()

    back = torch.nn.MultiheadAttention(12, 3, bias=bias, batch_first=True, dtype=torch.float64)
    back.load_state_dict({key: torch.from_numpy(y) for key, y in ours.to_torch().items()})
    for p, q in zip(theirs.parameters(), back.parameters(), strict=True):
        assert torch.equal(p, q)


def test_tensors_of_bfloat16_and_with_gradients():
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    theirs = torch.nn.MultiheadAttention(4, 2)
    state = dict(theirs.named_parameters())  # each requires a gradient
    assert MultiHeadAttention.from_torch(state, 2).dtype == np.float32
    state = theirs.to(torch.bfloat16).state_dict()
    layer = MultiHeadAttention.from_torch(state, 2)
    assert layer.dtype == ml_dtypes.bfloat16
    expected = state["in_proj_weight"][:4].float().numpy().T
    assert np.array_equal(layer.Wq.astype(np.float32), expected)
    assert MultiHeadAttention.from_torch(state, 2, dtype=np.float64).Wq.dtype == np.float64


def test_separate_projections_of_torch_need_the_width_of_the_model():
    torch = pytest.importorskip("torch")
    theirs = torch.nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
    with pytest.raises(ValueError, match="k_proj_weight"):
        MultiHeadAttention.from_torch(theirs.state_dict(), 2)
    theirs = torch.nn.MultiheadAttention(4, 2, add_bias_kv=True)
    with pytest.raises(ValueError, match="bias_k"):
        MultiHeadAttention.from_torch(theirs.state_dict(), 2)
