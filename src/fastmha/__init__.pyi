from . import reference
from ._dispatch import show_config
from ._threads import get_num_threads, num_threads, set_num_threads
from .cache import KVCache
from .functional import (
    attention,
    attention_backward,
    attention_weights,
    merge_attention,
    scaled_dot_product_attention,
)
from .multihead import MultiHeadAttention
from .paged import PagedKVCache
from .rope import Rope, alibi_slopes
from .textbook import multi_head_attention, sdpa, softmax
from .varlen import attention_varlen, attention_varlen_backward

__all__ = [
    "KVCache",
    "MultiHeadAttention",
    "PagedKVCache",
    "Rope",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_weights",
    "get_num_threads",
    "merge_attention",
    "multi_head_attention",
    "num_threads",
    "reference",
    "scaled_dot_product_attention",
    "sdpa",
    "set_num_threads",
    "show_config",
    "softmax",
]

__version__: str
