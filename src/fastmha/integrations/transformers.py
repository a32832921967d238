"""fastmha as an attention implementation of Hugging Face transformers, 5.6 or later.

After `register()`, every model that takes its attention from transformers' `AttentionInterface` runs
on fastmha where it is loaded, or set, with ``attn_implementation="fastmha"``.

No tensor is copied: the kernels read the memory of query, key and value through their strides and
write the output in the layout that the model goes on with. Causal masks, windows and padding reach
them as what they are: a mask of transformers becomes a `Mask`, which has its shape and no L x S array.
"""

import functools
import inspect
import math
import sys

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import fastmha

__all__ = ["register"]

if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
    raise ImportError("fastmha.integrations.transformers needs transformers 5.6 or later")

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def register():
    """Make ``attn_implementation="fastmha"`` known to transformers.

    Models compute with it what they do with "eager", but for queries whose every key is hidden, which
    get zeros here. That includes grouped heads, caches of all kinds, masks, windows, softcaps, sinks,
    position biases, gradients, and dropout, whose seeds come from PyTorch's generator. Attention
    weights cannot be had. The threads are those of `fastmha.set_num_threads`. bfloat16 needs the
    package ml_dtypes, and `torch.compile` leaves its graph for the attention.

    Tensors on other devices than the CPU, and a query, key and value of different dtypes, as autocast
    may make them, go to transformers' own "sdpa".

    Raises
    ------
    NotImplementedError
        By models: for attention that is sparse by indices, and sinks that differ between queries; for
        sinks and softcaps where "sdpa" would have to take them; and by models with an attention of
        their own, which do not ask transformers for one.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from fastmha.integrations.transformers import register
    >>> register()
    >>> config = BertConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, vocab_size=99,
    ...                     intermediate_size=64, attn_implementation="fastmha")
    >>> with torch.inference_mode():
    ...     BertModel(config).eval()(torch.arange(12)[None]).last_hidden_state.shape
    torch.Size([1, 12, 64])
    """
    AttentionInterface.register("fastmha", attention)
    AttentionMaskInterface.register("fastmha", mask)


# --- masks ------------------------------------------------------------------------------------------


class Mask(torch.Tensor):
    """A bool mask (B, 1, L, S) that is said in words instead of stored.

    `attention` reads the words. Whatever else is done with it is done with the stored mask, which is
    made then, and from then on stands for it: a model may change it in place. Only added it is never,
    nor is a part of it: a model that does so has an attention of its own, in which True would be 1.
    """

    @staticmethod
    def __new__(cls, shape, store, words):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool)
        self.words = words  # as `visible` returns them; None: the stored mask alone says it
        self.store = functools.cache(store)
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            raise NotImplementedError(
                "this model has an attention of its own, which fastmha cannot replace; load it with "
                'attn_implementation="eager"'
            )
        arguments, options = tree_map_only(cls, Mask.stored, (arguments, options or {}))
        result = function(*arguments, **options)
        if isinstance(result, torch.Tensor) and result.dtype == torch.bool:
            return Mask(result.shape, lambda: result, None)
        return result

    def stored(self):
        """The mask as an ordinary tensor."""
        self.words = None
        return self.store()


def mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=masking_utils.causal_mask_function,
    attention_mask=None,
    device="cpu",
    **others,
):
    """What transformers calls once a forward pass, with the arguments of `sdpa_mask`. The `Mask` has
    words for causality, a window, padding, and several of these together."""

    def store():
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            **{**others, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )

    if torch.compiler.is_compiling() or torch.device(device).type != "cpu":
        return store()
    shift = int(q_offset) - kv_offset  # query i stands where key i + shift does
    words = words_for(window_of(mask_function), shift, q_length, kv_length)
    if words and attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        padding = padding[:, None, None, kv_offset : kv_offset + words["n_keys"]]
        words["mask"] = None if padding.all() else padding
    return Mask((batch_size, 1, q_length, kv_length), store, words)


def words_for(window, shift, L, S):
    """What `visible` returns for a window and no padding; None where there are no words for it."""
    if window is None:
        return None
    causal = window[1] == 0
    # Keys behind the last query are the empty places of a static cache.
    n_keys = L + shift if causal else S
    if n_keys > S or (shift and not causal and window != (ALL, ALL)):
        return None
    return {"mask": None, "causal": "bottom-right" if causal else False, "window": window, "n_keys": n_keys}


ALL = sys.maxsize
SLIDING = masking_utils.sliding_window_overlay(1).__code__
AROUND = masking_utils.sliding_window_bidirectional_overlay(1).__code__
EVERY = masking_utils.and_masks().__code__


def window_of(function):
    """How many keys before and after a query a mask function of transformers shows; None where it is
    of another kind."""
    if function is masking_utils.bidirectional_mask_function:
        return ALL, ALL
    if function is masking_utils.causal_mask_function:
        return ALL, 0
    code = getattr(function, "__code__", None)
    if code not in (SLIDING, AROUND, EVERY):
        return None
    held = inspect.getclosurevars(function).nonlocals
    if code is EVERY:
        windows = [window_of(part) for part in held["mask_functions"]]
        return None if None in windows else tuple(map(min, zip(*windows, strict=True)))
    width = held["sliding_window"]
    return (width - 1, ALL) if code is SLIDING else (width, width)


# --- attention --------------------------------------------------------------------------------------


@torch.compiler.disable
def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    position_bias=None,
    softcap=None,
    s_aux=None,
    **others,
):
    """What the models call: query (B, H, L, D), key (B, G, S, D) and value (B, G, S, E) to the output
    (B, L, H, E). There are no weights to go with it."""
    for name in ("indices", "block_indices", "sinks"):
        if others.get(name) is not None:
            raise NotImplementedError(
                f"{name}: {type(module).__name__} needs an attention that fastmha does not have; "
                'load it with attn_implementation="eager"'
            )
    if query.device.type != "cpu" or not query.dtype == key.dtype == value.dtype in DTYPES:
        if softcap is not None or s_aux is not None:
            raise NotImplementedError(
                "softcap, s_aux: expected query, key and value on the CPU and of one dtype, got "
                f"{query.device}, {query.dtype}, {key.dtype} and {value.dtype}; "
                'load the model with attn_implementation="eager"'
            )
        if isinstance(attention_mask, Mask):
            attention_mask = attention_mask.stored()
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
            **others,
        )
    options = visible(module, attention_mask, is_causal, others.get("sliding_window"), key.shape[2])
    allowed, n_keys = options.pop("mask"), options.pop("n_keys")
    if position_bias is not None:
        allowed = biased(position_bias[..., :n_keys], allowed)
    options |= {"scale": None if scaling is None else float(scaling), "softcap": softcap}
    if dropout:
        options |= {"dropout_p": dropout, "rng": int(torch.randint(2**63 - 1, ()))}
    tensors = query, key[:, :, :n_keys], value[:, :, :n_keys], allowed, s_aux
    # `apply` alone takes twice as long as a short call.
    learning = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return Attention.apply(*tensors, options) if learning else attend(*tensors, options)[0], None


def visible(module, attention_mask, is_causal, sliding_window, n_keys):
    """The options of `fastmha.attention` that say what may be seen, and of how many keys."""
    if isinstance(attention_mask, Mask):
        if attention_mask.words is not None:
            return dict(attention_mask.words)
        attention_mask = attention_mask.stored()
    words = {"mask": attention_mask, "causal": False, "window": None, "n_keys": n_keys}
    # A mask that is given says everything.
    if attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        words["causal"] = "bottom-right"
        if sliding_window is not None:
            words["window"] = (sliding_window - 1, 0)
    return words


def biased(bias, allowed):
    """A position bias and a mask in one, to be added to the scores."""
    if allowed is None:
        return bias
    if allowed.dtype == torch.bool:
        return torch.where(allowed, bias, -math.inf)
    return bias + allowed


def attend(query, key, value, mask, sinks, options):
    """The output (B, L, H, E) as a tensor, and the log-sum-exp as an array."""
    B, H, L, _ = query.shape
    out = torch.empty(B, L, H, value.shape[-1], dtype=query.dtype)
    _, lse = fastmha.attention(
        *map(array, (query, key, value)),
        mask=array(mask),
        sinks=array(sinks),
        return_lse=True,
        out=array(out).swapaxes(1, 2),
        **options,
    )
    return out, lse


class Attention(torch.autograd.Function):
    """`attend` with gradients."""

    @staticmethod
    def forward(ctx, query, key, value, mask, sinks, options):
        out, lse = attend(query, key, value, mask, sinks, options)
        ctx.save_for_backward(query, key, value, mask, sinks, out)
        ctx.lse, ctx.options = lse, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        query, key, value, mask, sinks, out = ctx.saved_tensors
        _, _, _, want_mask, want_sinks, _ = ctx.needs_input_grad
        gradients = fastmha.attention_backward(
            array(grad_out).swapaxes(1, 2),
            *map(array, (query, key, value)),
            array(out).swapaxes(1, 2),
            ctx.lse,
            mask=array(mask),
            sinks=array(sinks),
            grad_mask=want_mask,
            grad_sinks=want_sinks,
            **ctx.options,
        )
        gradients = [tensor(gradient) for gradient in gradients]
        dsinks = gradients.pop().to(sinks.dtype) if want_sinks else None
        dmask = gradients.pop() if want_mask else None
        return (*gradients, dmask, dsinks, None)


def array(x):
    """A tensor's memory as an array."""
    if x is None:
        return None
    x = x.detach()
    if x.dtype == torch.bfloat16:
        from ml_dtypes import bfloat16

        return x.view(torch.int16).numpy().view(bfloat16)
    return x.numpy()


def tensor(x):
    """An array's memory as a tensor."""
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
