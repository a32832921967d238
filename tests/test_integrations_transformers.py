"""Hugging Face transformers on fastmha: small models of random weights against "eager"."""

import copy
import inspect
import subprocess
import sys
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    # Both libraries meet deprecations of others, and of each other, while they are imported.
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", minversion="5.6")
    from fastmha.integrations import transformers as integration

masking = transformers.masking_utils
L = 37
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96,
    "vocab_size": 101,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 101}

# Architecture, and its configuration. A window of 8, where there is one, is far below the length.
MODELS = {
    "bert": ("BertModel", "BertConfig", SIZES),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        {**SIZES, "local_attention": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "cls_token_id": 1, "sep_token_id": 2},
    ),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 101},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "sliding_window": 8, "attn_logit_softcapping": 2.0},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**GROUPED, "sliding_window": 8, "num_local_experts": 4},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**GROUPED, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96},
    ),
    "t5": ("T5EncoderModel", "T5Config", T5),
}  # fmt: skip
GENERATING = [name for name in MODELS if MODELS[name][0].endswith(("CausalLM", "LMHeadModel"))]

# T5 takes its attention from the interface in later versions only, and says so in those before.
BIASED = "position_bias" in inspect.signature(integration.sdpa_attention_forward).parameters
SERVED = [name for name in MODELS if name != "t5" or BIASED]


@pytest.fixture(scope="module", autouse=True)
def registered():
    transformers.utils.logging.set_verbosity_error()
    integration.register()


def build(name, implementation, **changes):
    model, config, fields = MODELS[name]
    config = getattr(transformers, config)(**{**fields, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, model)._from_config(config, attn_implementation=implementation)
    # Random layers of the usual size mix next to nothing: attention must matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
    return model.eval()


def pair(name, **changes):
    return [build(name, implementation, **changes) for implementation in ("eager", "fastmha")]


def tokens(batch=3, length=L):
    return torch.from_numpy(np.random.default_rng(0).integers(3, 101, (batch, length)))


def padding(sides=("left", "right")):
    kept = torch.ones(3, L, dtype=torch.int64)
    if "right" in sides:
        kept[1, 20:] = 0
    if "left" in sides:
        kept[2, :9] = 0
    return kept


def close(ours, theirs, tolerance=1e-5):
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error <= tolerance


class Spy:
    """Stands for `fastmha.attention` and keeps the options of its calls."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.original = integration.fastmha.attention
        monkeypatch.setattr(integration.fastmha, "attention", self)

    def __call__(self, query, key, value, **options):
        self.calls.append({"query": query, "key": key, "value": value, **options})
        return self.original(query, key, value, **options)


@pytest.fixture
def spy(monkeypatch):
    return Spy(monkeypatch)


# --- models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("padded", [False, True])
def test_models_answer_as_with_eager(name, padded, spy):
    eager, fast = pair(name)
    kept = padding() if padded else None
    with torch.inference_mode():
        theirs, ours = (model(input_ids=tokens(), attention_mask=kept)[0] for model in (eager, fast))
    seen = kept.bool() if padded else ...
    close(ours[seen], theirs[seen])
    assert len(spy.calls) == 2  # layers
    # No mask was stored but those of chunks and biases, for which there are no words.
    stored = [call["mask"] for call in spy.calls if call["mask"] is not None]
    if name not in ("llama4", "t5"):
        assert all(mask.shape == (3, 1, 1, L) for mask in stored) and bool(stored) == padded


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_same_tokens_are_generated(name, cache):
    # 20 tokens behind 37: windows and chunks are left behind. The first prompt of a batch is padded.
    answers = [
        model.generate(
            tokens(),
            attention_mask=padding("left"),
            max_new_tokens=20,
            min_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
        )
        for model in pair(name)
    ]
    assert answers[0].shape == (3, L + 20)
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", GENERATING)
def test_a_prompt_in_parts_goes_on_from_the_cache(name):
    eager, fast = pair(name)
    ids = tokens()
    with torch.inference_mode():
        whole = eager(input_ids=ids).logits
        first = fast(input_ids=ids[:, :17], use_cache=True)
        # Version 5.24 has a new name for it.
        cache = "cache" if "cache" in inspect.signature(fast.forward).parameters else "past_key_values"
        rest = fast(input_ids=ids[:, 17:], **{cache: first[cache]}, use_cache=True)
    close(torch.cat([first.logits, rest.logits], 1), whole)


def test_encoder_decoders_and_cross_attention():
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))}  # fmt: skip
    config = transformers.BartConfig(vocab_size=101, d_model=64, **sizes)
    answers = []
    for implementation in ("eager", "fastmha"):
        torch.manual_seed(0)
        model = transformers.BartModel._from_config(
            copy.deepcopy(config), attn_implementation=implementation
        ).eval()
        with torch.inference_mode():
            inputs = {"attention_mask": padding(), "decoder_input_ids": tokens(3, 11)}
            answers.append(model(input_ids=tokens(), **inputs)[0])
    close(answers[1], answers[0])


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_four_axes_are_taken_as_they_are(kind, spy):
    eager, fast = pair("llama")
    allowed = torch.from_numpy(np.random.default_rng(1).random((3, 1, L, L)) < 0.6)
    allowed |= torch.eye(L, dtype=torch.bool)
    added = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        theirs = eager(input_ids=tokens(), attention_mask=added).logits
        ours = fast(input_ids=tokens(), attention_mask=allowed if kind == "bool" else added).logits
    close(ours, theirs)
    assert all(call["mask"].shape == (3, 1, L, L) and not call["causal"] for call in spy.calls)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_dtypes(dtype, spy):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    # The "eager" of Llama has a softmax in float32.
    models = [build("llama", name).to(getattr(torch, dtype)) for name in ("sdpa", "fastmha")]
    with torch.inference_mode():
        best = build("llama", "sdpa").double()(input_ids=tokens()).logits
        theirs, ours = (model(input_ids=tokens()).logits for model in models)
    assert spy.calls[0]["query"].dtype.name == dtype == str(ours.dtype).removeprefix("torch.")
    if dtype == "float64":
        close(ours, theirs, 1e-12)
    else:
        error, usual = ((x.double() - best).square().mean() for x in (ours, theirs))
        assert error < 2 * usual


def test_no_tensor_is_copied(spy):
    module = torch.nn.Module()
    q, k, v = (torch.randn(2, 9, heads, 8).transpose(1, 2) for heads in (4, 2, 2))
    out, weights = integration.attention(module, q, k, v, None, scaling=0.3)
    (call,) = spy.calls
    for x, array in ((q, call["query"]), (k, call["key"]), (v, call["value"])):
        assert array.ctypes.data == x.data_ptr() and array.strides == tuple(4 * n for n in x.stride())
    assert call["out"].ctypes.data == out.data_ptr()
    assert out.shape == (2, 9, 4, 8) and out.is_contiguous() and weights is None


# --- masks ------------------------------------------------------------------------------------------

FUNCTIONS = {
    "causal": masking.causal_mask_function,
    "bidirectional": masking.bidirectional_mask_function,
    "window": masking.sliding_window_causal_mask_function(4),
    "around": masking.sliding_window_bidirectional_mask_function(4),
    "chunks": masking.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
    "either": masking.or_masks(masking.causal_mask_function, masking.sliding_window_overlay(2)),
}


def mask_arguments(function, L, S, q_offset=0, kv_offset=0, kept=None):
    return {
        "batch_size": 2, "q_length": L, "kv_length": S, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[function], "attention_mask": kept,
    }  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "place",
    # L, S, q_offset, kv_offset: alone; behind a cache; a static cache; a ring; a ring just wrapped
    [(9, 9, 0, 0), (3, 9, 6, 0), (3, 16, 5, 0), (9, 16, 0, 0), (2, 5, 11, 8), (1, 9, 8, 0), (5, 3, 0, 0)],
)
@pytest.mark.parametrize("padded", [False, True])
def test_words_and_stored_mask_mean_the_same(function, place, padded):
    L, S, q_offset, kv_offset = place
    kept = None
    if padded:
        kept = torch.ones(2, max(q_offset + L, 7), dtype=torch.bool)
        kept[0, kv_offset + 1 : kv_offset + 3] = False
    arguments = mask_arguments(function, L, S, q_offset, kv_offset, kept)
    stored = masking.sdpa_mask(**arguments, allow_is_causal_skip=False)
    mask = integration.mask(**arguments)
    assert mask.shape == stored.shape
    rng = np.random.default_rng(3)
    q, k, v = (torch.from_numpy(rng.normal(size=(2, 2, n, 8))) for n in (L, S, S))
    module = torch.nn.Module()
    spoken = mask.words is not None
    ours = integration.attention(module, q, k, v, mask)[0]
    close(ours, integration.attention(module, q, k, v, stored)[0], 1e-12)
    # Asked for, the stored mask comes out.
    assert torch.equal(mask & True, stored)
    assert spoken == (function not in ("chunks", "either") and words_exist(function, place))


def words_exist(function, place):
    L, S, q_offset, kv_offset = place
    shift = q_offset - kv_offset
    if function in ("causal", "window"):
        return L + shift <= S
    return function == "bidirectional" or shift == 0


def test_a_mask_that_a_model_changes_is_the_changed_one():
    module = torch.nn.Module()
    q, k, v = (torch.randn(2, 2, 9, 8) for _ in range(3))
    kept = torch.ones(2, 9, dtype=torch.bool)
    kept[0, 5] = False
    mask = integration.mask(**mask_arguments("causal", 9, 9, kept=kept))
    mask[:, :, :, 0] = False
    kept[:, 0] = False
    stored = torch.ones(9, 9, dtype=torch.bool).tril() & kept[:, None, None]
    close(
        integration.attention(module, q, k, v, mask)[0],
        integration.attention(module, q, k, v, stored)[0],
    )


def test_models_with_an_attention_of_their_own_are_refused():
    config = transformers.BloomConfig(hidden_size=64, n_head=4, n_layer=1, vocab_size=101)
    model = transformers.BloomModel._from_config(config, attn_implementation="fastmha").eval()
    with pytest.raises(NotImplementedError, match="attention of its own"):
        model(input_ids=tokens())
    with pytest.raises(NotImplementedError, match="attention of its own"):
        torch.zeros(9, 5) + integration.mask(**mask_arguments("causal", 9, 9))[0, 0, :, :5]


# --- the function itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("causal_by", ["argument", "module", "default"])
def test_without_a_mask_causality_is_the_modules(causal_by):
    module = torch.nn.Module()
    options = {"is_causal": True} if causal_by == "argument" else {}
    if causal_by != "default":
        module.is_causal = causal_by == "module"
    q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 7, 7))
    below = torch.ones(3, 7, dtype=torch.bool).tril(4)
    causal = integration.attention(module, q, k, v, None, **options)[0]
    close(causal, integration.attention(module, q, k, v, below)[0])
    near = below & ~torch.ones(3, 7, dtype=torch.bool).tril(2)
    window = integration.attention(module, q, k, v, None, sliding_window=2, **options)[0]
    close(window, integration.attention(module, q, k, v, near)[0])
    everything = integration.attention(module, q, k, v, None, is_causal=False)[0]
    close(everything, integration.attention(module, q, k, v, torch.ones_like(below))[0])


@pytest.mark.parametrize("masked", ["no", "words", "bool", "float"])
def test_position_biases(masked):
    module = torch.nn.Module()
    q, k, v = (torch.randn(2, 2, 9, 8) for _ in range(3))
    bias = torch.randn(1, 2, 9, 9)
    kept = torch.ones(2, 9, dtype=torch.bool)
    kept[1, 6:] = False
    arguments = mask_arguments("bidirectional", 9, 9, kept=kept)
    stored = masking.sdpa_mask(**arguments)
    mask, seen = {
        "no": (None, torch.ones_like(stored).tril()),
        "words": (integration.mask(**arguments), stored),
        "bool": (stored, stored),
        "float": (torch.where(stored, 0.0, -torch.inf), stored),
    }[masked]
    ours = integration.attention(module, q, k, v, mask, position_bias=bias)[0]
    scores = (q @ k.mT / 8**0.5 + bias).masked_fill(~seen, -torch.inf)
    close(ours, (scores.softmax(-1) @ v).transpose(1, 2))


@pytest.mark.parametrize("name", SERVED)
def test_gradients(name):
    kept = padding()
    weight = None
    gradients = []
    for model in pair(name):
        out = model(input_ids=tokens(), attention_mask=kept)[0][kept.bool()]
        weight = torch.randn_like(out) if weight is None else weight
        (out * weight).mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    theirs, ours = gradients
    assert theirs.keys() == ours.keys()
    scale = max(gradient.abs().max() for gradient in theirs.values())
    for parameter in theirs:
        error = (ours[parameter] - theirs[parameter]).abs().max()
        # A bias of keys has no gradient but rounding errors.
        assert error <= 1e-4 * theirs[parameter].abs().max() + 1e-6 * scale, parameter


def test_dropout_follows_pytorchs_seed(spy):
    model = build("llama", "fastmha", attention_dropout=0.4).train()

    def answer(seed):
        torch.manual_seed(seed)
        return model(input_ids=tokens()).logits

    first, again, other = answer(1), answer(1), answer(2)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert all(call["dropout_p"] == 0.4 for call in spy.calls)
    assert len({call["rng"] for call in spy.calls[:2]}) == 2  # each layer has its own
    other.sum().backward()
    calls = len(spy.calls)
    model.eval()(input_ids=tokens())
    assert all("dropout_p" not in call for call in spy.calls[calls:])


def test_the_gradients_of_dropout_are_those_of_its_pattern():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def dropped(*tensors):
        torch.manual_seed(7)
        return integration.attention(torch.nn.Module(), *tensors, None, dropout=0.5)[0]

    assert torch.autograd.gradcheck(dropped, (q, k, v))


def test_bfloat16_gradients():
    pytest.importorskip("ml_dtypes")
    tensors = [torch.randn(1, 2, 5, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    for inputs in (tensors, exact):
        integration.attention(torch.nn.Module(), *inputs, None)[0].square().sum().backward()
    for x, y in zip(tensors, exact, strict=True):
        assert x.grad.dtype == torch.bfloat16
        close(x.grad.double(), y.grad, 0.03)


def test_what_is_not_for_fastmha_goes_to_sdpa(spy):
    module = torch.nn.Module()
    q, k, v = (torch.randn(2, 2, 9, 8) for _ in range(3))
    mask = integration.mask(**mask_arguments("window", 9, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = integration.attention(module, q, k, v.bfloat16(), mask)[0]
    assert not spy.calls
    close(mixed.float(), integration.attention(module, q, k, v, mask)[0], 0.02)
    elsewhere = [x.to("meta") for x in (q, k, v)]
    assert integration.attention(module, *elsewhere, None)[0].device.type == "meta"
    for option in ({"softcap": 3.0}, {"s_aux": torch.zeros(2)}):
        with pytest.raises(NotImplementedError, match="expected query, key and value on the CPU"):
            integration.attention(module, *elsewhere, None, **option)


@pytest.mark.parametrize("option", ["indices", "block_indices", "sinks"])
def test_options_that_fastmha_lacks_are_refused(option):
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(NotImplementedError, match=f"^{option}: Module needs"):
        integration.attention(torch.nn.Module(), q, q, q, None, **{option: torch.zeros(1)})
    assert integration.attention(torch.nn.Module(), q, q, q, None, **{option: None})[0] is not None


def test_compiled_models_leave_the_graph_for_it(spy):
    model = build("llama", "fastmha")
    with torch.inference_mode():
        expected = model(input_ids=tokens(), attention_mask=padding()).logits
        calls = len(spy.calls)
        compiled = torch.compile(model, backend="eager")(
            input_ids=tokens(), attention_mask=padding()
        ).logits
    close(compiled[padding().bool()], expected[padding().bool()])
    assert len(spy.calls) > calls


def test_nothing_else_imports_pytorch():
    code = (
        "import sys, fastmha.integrations\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
