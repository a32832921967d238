"""Every mistake is an error that names the argument, what was expected and what came."""

import math
import re
import types

import numpy as np
import pytest
from comparing import assert_same_bits
from drawing import FLOATS, as_dtype

import fastmha
from fastmha import _problem

B, H, G, L, S, D, E = 2, 4, 2, 3, 5, 4, 6


# The float beyond float64, where the platform has one.
WIDE = np.dtype(np.longdouble)
WIDE = WIDE if WIDE.itemsize > 8 else np.dtype(np.complex128)


class Anything:
    """An object that is no number, no array, and says nothing else either."""

    def __repr__(self):
        return "Anything()"


def random(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def arguments(**changes):
    """A right call of `attention`, with some arguments changed."""
    right = {"query": random(B, H, L, D), "key": random(B, G, S, D), "value": random(B, G, S, E)}
    return right | changes


def refused(call, kind, name, *words, **arguments):
    """`call` raises `kind`, with `name` in front and the `words` in its text; no input changes."""
    arrays = {key: x for key, x in arguments.items() if isinstance(x, np.ndarray)}
    before = {key: x.copy() for key, x in arrays.items()}
    with pytest.raises(kind) as caught:
        call(**arguments)
    text = str(caught.value)
    subject, colon, rest = text.partition(":")
    assert colon and re.search(rf"\b{re.escape(name)}", subject), text
    assert "expected" in rest, text
    for word in words:
        assert str(word) in rest, f"{word!r} is not in {text!r}"
    for key, x in arrays.items():
        if x.dtype != object:
            assert x.tobytes() == before[key].tobytes()


# --- query, key and value -------------------------------------------------------------------------

TORCH = {
    "query": "query",
    "key": "key",
    "value": "value",
    "mask": "attn_mask",
    "causal": "is_causal",
}
FUNCTIONS = {
    "attention": fastmha.attention,
    "scaled_dot_product_attention": lambda **given: fastmha.scaled_dot_product_attention(
        **{TORCH.get(name, name): x for name, x in given.items()}, enable_gqa=True
    ),
    "sdpa": lambda query, key, value: fastmha.sdpa(query, key, value),
    "attention_weights": lambda value=None, **given: fastmha.attention_weights(**given),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "wrong, came",
    [
        (None, "object"),
        ("text", "U4"),
        (Anything(), "object"),
        (3, "int"),
        ({}, "object"),
        (random(B, G, S, D) > 0, "bool"),
        (random(B, G, S, D).astype(np.int32), "int32"),
        (random(B, G, S, D).astype(np.uint8), "uint8"),
        (random(B, G, S, D).astype(np.complex64), "complex64"),
        (random(B, G, S, D).astype(WIDE), WIDE.name),
        (random(B, G, S, D).astype(object), "object"),
        (np.zeros((B, G, S, D), "datetime64[s]"), "datetime64"),
        (np.zeros((B, G, S, D), "S3"), "S3"),
        (np.zeros((B, G, S, D), [("x", "f4")]), "x"),
        (np.ma.masked_array(random(B, G, S, D)), "masked array"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_arrays_of_the_wrong_kind(function, wrong, came):
    names = ["query", "key"] if function == "attention_weights" else ["query", "key", "value"]
    for name in names:
        refused(FUNCTIONS[function], TypeError, name, came, **arguments(**{name: wrong}))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("name", ["query", "key"])
@pytest.mark.parametrize("dtype", [name for name in FLOATS if name != "float32"])
def test_arrays_of_different_dtypes(function, name, dtype):
    given = arguments()
    given[name] = given[name].astype(as_dtype(dtype))
    words = ("float32", dtype, "astype")
    if function is not FUNCTIONS["attention_weights"]:
        refused(function, TypeError, name, *words, **given)
    else:
        refused(function, TypeError, name, dtype, "float32", **given)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("shape", [(), (4,), (S, D), (G, S, D), (1, B, G, S, D)], ids=str)
def test_attention_takes_four_axes(name, shape):
    refused(fastmha.attention, ValueError, name, 4, shape, **arguments(**{name: random(*shape)}))


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_scaled_dot_product_attention_takes_two_axes_at_least(name, shape):
    function = fastmha.scaled_dot_product_attention
    refused(function, ValueError, name, "at least 2", shape, **arguments(**{name: random(*shape)}))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_sizes_that_do_not_fit(function):
    def call(**given):
        value = None if function is FUNCTIONS["sdpa"] else given.pop("value", None)
        return function(**given) if value is None else function(**given, value=value)

    refused(call, ValueError, "key", D, D + 1, **arguments(key=random(B, G, S, D + 1)))
    refused(call, ValueError, "key", D, 0, **arguments(key=random(B, G, S, 0)))
    if function is not FUNCTIONS["attention_weights"]:
        refused(call, ValueError, "value", S, S + 1, **arguments(value=random(B, G, S + 1, E)))
        refused(call, ValueError, "value", S, 1, **arguments(value=random(B, G, 1, E)))


@pytest.mark.parametrize("function", [fastmha.attention, FUNCTIONS["scaled_dot_product_attention"]])
@pytest.mark.parametrize("heads", [3, 8, 5])
def test_head_counts_that_do_not_divide(function, heads):
    given = arguments(key=random(B, heads, S, D), value=random(B, heads, S, E))
    refused(function, ValueError, "key", H, heads, **given)


@pytest.mark.parametrize("function", [fastmha.attention, FUNCTIONS["scaled_dot_product_attention"]])
def test_no_heads(function):
    given = arguments(key=random(B, 0, S, D), value=random(B, 0, S, E))
    refused(function, ValueError, "key", H, 0, **given)
    none = arguments(query=random(B, 0, L, D), key=random(B, 0, S, D), value=random(B, 0, S, E))
    assert function(**none).shape == (B, 0, L, E)
    empty = arguments(query=random(B, 0, L, D))
    try:
        assert function(**empty).shape == (B, 0, L, E)
    except ValueError as error:
        assert "key" in str(error)


def test_value_has_the_heads_of_key():
    refused(fastmha.attention, ValueError, "value", G, 4, **arguments(value=random(B, 4, S, E)))
    refused(fastmha.attention, ValueError, "value", G, 1, **arguments(value=random(B, 1, S, E)))


@pytest.mark.parametrize("name, width", [("key", D), ("value", E)])
def test_batches_that_do_not_fit(name, width):
    for batch in (3, 0):
        given = arguments(**{name: random(batch, G, S, width)})
        refused(fastmha.attention, ValueError, name, B, batch, **given)
        with pytest.raises(ValueError, match=r"key|value"):
            fastmha.scaled_dot_product_attention(**given, enable_gqa=True)


def test_grouped_heads_need_the_flag():
    function = fastmha.scaled_dot_product_attention
    refused(function, ValueError, "key", H, G, "enable_gqa", **arguments())
    one = arguments(key=random(B, 1, S, D), value=random(B, 1, S, E))
    assert function(**one).shape == (B, H, L, E)


def test_leading_axes_that_do_not_broadcast():
    function = fastmha.scaled_dot_product_attention
    given = arguments(query=random(2, H, L, D), key=random(3, H, S, D), value=random(2, H, S, E))
    refused(function, ValueError, "key", (2, H), (3, H), **given)
    given = arguments(key=random(3, 2, 1, S, D), query=random(2, 1, L, D), value=random(4, 1, 1, S, E))
    refused(function, ValueError, "key", (3, 2, 1), **given)


# --- masks ----------------------------------------------------------------------------------------

MASKED = [
    ("attention", "mask"),
    ("attention_weights", "mask"),
    ("scaled_dot_product_attention", "attn_mask"),
]


@pytest.mark.parametrize("function, name", MASKED)
@pytest.mark.parametrize(
    "shape",
    [
        (S + 1,),
        (0,),
        (L, S + 1),
        (L + 1, S),
        (S, L),
        (3, L, S),
        (G, L, S),
        (3, 1, 1, S),
        (1, B, H, L, S),
        (1, 1, 1, 1, 1),
    ],
    ids=str,
)
def test_masks_that_do_not_broadcast(function, name, shape):
    for mask in (np.ones(shape, bool), np.ones(shape, np.float32)):
        refused(FUNCTIONS[function], ValueError, name, (B, H, L, S), shape, **arguments(mask=mask))


@pytest.mark.parametrize("function, name", MASKED)
@pytest.mark.parametrize("dtype", ["int64", "uint8", "int8", "complex64", WIDE, "O", "U1", "M8[s]"])
def test_masks_of_the_wrong_dtype(function, name, dtype):
    mask = np.ones((L, S)).astype(int).astype(dtype)
    refused(FUNCTIONS[function], TypeError, name, "bool", mask.dtype, ".astype", **arguments(mask=mask))


@pytest.mark.parametrize("function, name", MASKED)
def test_masks_that_are_no_arrays(function, name):
    refused(FUNCTIONS[function], TypeError, name, **arguments(mask="causal"))
    refused(FUNCTIONS[function], TypeError, name, **arguments(mask=Anything()))
    refused(FUNCTIONS[function], TypeError, name, **arguments(mask=1))
    refused(
        FUNCTIONS[function],
        TypeError,
        name,
        "masked array",
        **arguments(mask=np.ma.ones((L, S), bool)),
    )
    refused(
        FUNCTIONS[function],
        (TypeError, ValueError),
        name,
        **arguments(mask=[[True], [True, False]]),
    )


def test_ragged_lists():
    refused(
        fastmha.attention,
        (TypeError, ValueError),
        "query",
        **arguments(query=[[[[1.0], [1.0, 2.0]]]]),
    )
    refused(fastmha.softmax, (TypeError, ValueError), "x", x=[[1.0], [1.0, 2.0]])


def test_a_mask_and_is_causal():
    function = fastmha.scaled_dot_product_attention
    for mask in (np.ones((L, S), bool), np.zeros((L, S), np.float32), np.array(True)):
        with pytest.raises(ValueError, match=r"^attn_mask.*is_causal"):
            function(**arguments(), attn_mask=mask, is_causal=True, enable_gqa=True)
    assert function(**arguments(), attn_mask=np.array(True), is_causal=False, enable_gqa=True).any()


# --- options --------------------------------------------------------------------------------------

NO_NUMBERS = ["1", Anything(), [1.0], np.ones(2), 1j, True, np.bool_(True), {}]
INTEGERS = "integers"
OPTIONS = [
    *[("scale", x, TypeError, type(x).__name__) for x in NO_NUMBERS],
    ("scale", math.nan, ValueError, "nan"),
    ("scale", math.inf, ValueError, "inf"),
    ("scale", np.float32(-math.inf), ValueError, "-inf"),
    *[("softcap", x, TypeError, type(x).__name__) for x in NO_NUMBERS],
    ("softcap", -1, ValueError, "-1"),
    ("softcap", -1e-300, ValueError, "-1e-300"),
    ("softcap", math.nan, ValueError, "nan"),
    ("softcap", math.inf, ValueError, "inf"),
    *[("dropout_p", x, TypeError, type(x).__name__) for x in [*NO_NUMBERS, None]],
    ("dropout_p", -0.1, ValueError, "-0.1"),
    ("dropout_p", 1.1, ValueError, "1.1"),
    ("dropout_p", math.nan, ValueError, "nan"),
    ("dropout_p", math.inf, ValueError, "inf"),
    *[("rng", x, TypeError, "") for x in ("1", 1.0, Anything(), True, [1])],
    ("rng", np.random.RandomState(0), TypeError, "RandomState"),
    ("rng", -1, ValueError, "-1"),
    ("rng", 2**64, ValueError, 2**64),
    ("causal", 1, TypeError, "int"),
    ("causal", None, TypeError, "NoneType"),
    ("causal", np.array([True]), TypeError, "ndarray"),
    ("causal", "top", ValueError, "'top'"),
    ("causal", "", ValueError, "''"),
    ("causal", "Bottom-Right", ValueError, "'Bottom-Right'"),
    ("window", 3, TypeError, "3"),
    ("window", "ab", TypeError, "'ab'"),
    ("window", (1.0, 0), TypeError, "1.0"),
    ("window", (None, 0), TypeError, "None"),
    ("window", (1,), (TypeError, ValueError), "(1,)"),
    ("window", (1, 2, 3), (TypeError, ValueError), "(1, 2, 3)"),
    ("window", (), (TypeError, ValueError), "()"),
    ("window", (-2, 0), ValueError, "-2"),
    ("window", (0, -2), ValueError, "-2"),
    ("window", (-(10**30), 0), ValueError, 10**30),
    ("layout", "LBHD", ValueError, "'LBHD'"),
    ("layout", "bhld", ValueError, "'bhld'"),
    ("layout", "", ValueError, "''"),
    ("layout", None, (TypeError, ValueError), "None"),
    ("layout", 4, (TypeError, ValueError), "4"),
    ("layout", ["BHLD", "BLHD"], (TypeError, ValueError), ""),
    ("layout", np.array(["BHLD", "BHLD"]), (TypeError, ValueError), ""),
    *[
        (name, x, kind, word)
        for name in ("sinks", "alibi_slopes")
        for x, kind, word in [
            (1.0, ValueError, "()"),
            (np.ones(H + 1), ValueError, (H + 1,)),
            (np.ones(1), ValueError, (1,)),
            (np.ones(G), ValueError, (G,)),
            (np.ones((H, 1)), ValueError, (H, 1)),
            (np.ones((B, H)), ValueError, (B, H)),
            (np.ones(0), ValueError, (0,)),
            (np.ones(H, bool), TypeError, "bool"),
            (np.ones(H, complex), TypeError, "complex"),
            (np.ones(H).astype(object), TypeError, "object"),
            (["a"] * H, TypeError, "U1"),
            (np.ma.ones(H), TypeError, "masked array"),
            ({}, TypeError, "object"),
        ]
    ],
    *[
        (name, x, kind, word)
        for name, most in (("key_lengths", S), ("query_lengths", L))
        for x, kind, word in [
            (3, ValueError, "()"),
            ([1] * (B + 1), ValueError, (B + 1,)),
            ([1], ValueError, (1,)),
            ([[1], [1]], ValueError, (B, 1)),
            ([1.0, 1.0], TypeError, "float64"),
            ([True, False], TypeError, "bool"),
            (["1", "2"], TypeError, "U1"),
            ([None, 1], TypeError, "object"),
            (np.ma.array([1, 1]), TypeError, "masked array"),
            (np.array([1, 1], "m8[s]"), TypeError, "timedelta"),
            ([0, -1], ValueError, -1),
            ([most + 1, 0], ValueError, most + 1),
            (np.array([2**63 - 1, 0]), ValueError, 2**63 - 1),
            (np.array([2**64 - 1, 0], np.uint64), ValueError, ""),
            (np.array([-(2**63), 0]), ValueError, 2**63),
        ]
    ],
]  # fmt: skip


@pytest.mark.parametrize(
    "name, wrong, kind, word", OPTIONS, ids=lambda x: str(x)[:20] if isinstance(x, str) else ""
)
def test_wrong_options(name, wrong, kind, word):
    functions = ["attention", "attention_weights"]
    if name in ("scale", "dropout_p", "rng"):
        functions.append("scaled_dot_product_attention")
    for function in functions:
        given = arguments(**{name: wrong})
        refused(FUNCTIONS[function], kind, name, word, **given)
        if name == "rng":  # it is checked whether or not it is used
            refused(FUNCTIONS[function], kind, name, word, **given | {"dropout_p": 0.5})


@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
@pytest.mark.parametrize("wrong", [1, "no", None, np.ones(2, bool), 0.5], ids=str)
def test_flags_are_bools(name, wrong):
    function = fastmha.scaled_dot_product_attention
    heads = arguments(key=random(B, H, S, D), value=random(B, H, S, E))
    refused(function, TypeError, name, type(wrong).__name__, **heads | {name: wrong})


@pytest.mark.parametrize("name", ["attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"])
def test_an_array_in_the_wrong_place_is_explained(name):
    """As where the order of PyTorch's arguments was not remembered."""
    function = fastmha.scaled_dot_product_attention
    heads = arguments(key=random(B, H, S, D), value=random(B, H, S, E))
    refused(function, (TypeError, ValueError), name, **heads | {name: random(7, 9)})


def test_a_head_size_of_zero_needs_a_scale():
    given = arguments(query=random(B, H, L, 0), key=random(B, G, S, 0))
    for function in (fastmha.attention, FUNCTIONS["scaled_dot_product_attention"]):
        refused(function, ValueError, "scale", "None", **given)
        assert function(**given, scale=1.0).shape == (B, H, L, E)


def test_what_is_nearly_wrong_is_right():
    options = [
        {"scale": np.array(0.5)}, {"scale": 1}, {"scale": np.int8(2)}, {"scale": np.float16(0.5)},
        {"softcap": np.float32(3)}, {"softcap": 0}, {"softcap": None}, {"window": [1, 0]},
        {"window": np.array([1, 0])}, {"window": (np.int8(3), 2**100)}, {"causal": np.True_},
        {"dropout_p": 1, "rng": np.uint64(2**64 - 1)}, {"dropout_p": np.float32(0), "rng": 0},
        {"sinks": [1] * H, "alibi_slopes": tuple(range(H))}, {"sinks": np.ones(H, np.float16)},
        {"key_lengths": [S, 0], "query_lengths": (L, 0)}, {"key_lengths": np.array([1, 2], ">i2")},
        {"sinks": [-math.inf] * H},
    ]  # fmt: skip
    for option in options:
        out = fastmha.attention(**arguments(**option))
        assert out.dtype == np.float32
        assert np.isfinite(out).all(), option


# --- out ------------------------------------------------------------------------------------------


def read_only(x):
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    "out, kind, word",
    [
        (np.empty((B, H, L, E)), TypeError, "float64"),
        (np.empty((B, H, L, E), np.float16), TypeError, "float16"),
        (np.empty((B, H, L, E), np.int32), TypeError, "int32"),
        (np.empty((B, H, L, E), "O"), TypeError, "object"),
        ([[0.0]], TypeError, "list"),
        ("out", TypeError, "str"),
        (np.ma.empty((B, H, L, E), np.float32), TypeError, "MaskedArray"),
        (np.empty((B, H, L, D), np.float32), ValueError, (B, H, L, D)),
        (np.empty((B, L, H, E), np.float32), ValueError, (B, L, H, E)),
        (np.empty((H, L, E), np.float32), ValueError, (H, L, E)),
        (np.empty((1, B, H, L, E), np.float32), ValueError, (1, B, H, L, E)),
        (np.empty(B * H * L * E, np.float32), ValueError, (B * H * L * E,)),
        (read_only(np.empty((B, H, L, E), np.float32)), ValueError, "writ"),
        (np.broadcast_to(np.float32(0), (B, H, L, E)), ValueError, "writ"),
    ],
    ids=lambda x: str(x) if isinstance(x, (str, tuple)) else "",
)
def test_wrong_out(out, kind, word):
    refused(fastmha.attention, kind, "out", word, **arguments(out=out))


def test_out_in_another_byte_order_or_unaligned():
    swapped = np.empty((B, H, L, E), np.dtype(np.float32).newbyteorder("S"))
    refused(fastmha.attention, (TypeError, ValueError), "out", **arguments(out=swapped))
    buffer = np.zeros(B * H * L * E * 4 + 1, np.uint8)
    unaligned = buffer[1:].view(np.float32).reshape(B, H, L, E)
    refused(fastmha.attention, ValueError, "out", "align", **arguments(out=unaligned))
    assert not buffer.any()


@pytest.mark.parametrize("name", ["query", "key", "value", "mask"])
def test_out_shares_no_memory_with_an_input(name):
    square = {key: random(2, 3, 4, 4) for key in ("query", "key", "value", "mask")}
    refused(fastmha.attention, ValueError, "out", **square | {"out": square[name]})
    refused(fastmha.attention, ValueError, "out", **square | {"out": square[name][::-1, :, ::-1]})
    refused(fastmha.attention, ValueError, "out", **square | {"out": square[name].swapaxes(2, 3)})
    out = np.zeros((2, 3, 4, 4), np.float32)
    view = np.lib.stride_tricks.as_strided(out, (2, 3, 4, 4), (0, 0, 0, 4), writeable=False)
    refused(fastmha.attention, ValueError, "out", **square | {name: view, "out": out})


def test_out_shares_no_memory_with_what_only_speaks_dlpack():
    square = {key: random(2, 3, 4, 4) for key in ("query", "key", "value")}
    x = square["query"]
    foreign = types.SimpleNamespace(__dlpack__=x.__dlpack__, __dlpack_device__=x.__dlpack_device__)
    refused(fastmha.attention, ValueError, "out", **square | {"query": foreign, "out": x})


def test_out_shares_no_memory_with_a_torch_tensor(torch):
    square = {key: random(2, 3, 4, 4) for key in ("query", "key", "value")}
    tensor = torch.from_numpy(square["key"])
    refused(fastmha.attention, ValueError, "out", **square | {"out": square["key"], "key": tensor})


def test_out_may_be_mapped_from_a_file(tmp_path):
    expected = fastmha.attention(**arguments())
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=expected.shape)
    try:
        assert fastmha.attention(**arguments(), out=out) is out
        assert_same_bits(np.asarray(out), expected)
    except TypeError as error:  # if it is refused, then with a reason
        assert "memmap" in str(error)


def test_errors_come_before_anything_is_written():
    out = np.full((B, H, L, E), 7, np.float32)
    for name, wrong, _, _ in OPTIONS:
        option = {name: wrong} | ({"dropout_p": 0.5} if name == "rng" else {})
        with pytest.raises((TypeError, ValueError)):
            fastmha.attention(**arguments(out=out) | option)
    assert (out == 7).all()


# --- heads and rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("name, n", [("heads", H), ("rows", L)])
def test_heads_and_rows_that_are_not_there(name, n):
    q, k = arguments()["query"], arguments()["key"]
    for wrong in (n, -n - 1, [0, n], np.array([n]), 10**30):
        with pytest.raises((IndexError, ValueError), match=name):
            fastmha.attention_weights(q, k, **{name: wrong})


@pytest.mark.parametrize("name", ["heads", "rows"])
@pytest.mark.parametrize("wrong", ["0", 0.0, [0.5], Anything(), np.zeros((1, 1), int), [[0]]], ids=str)
def test_heads_and_rows_of_the_wrong_kind(name, wrong):
    q, k = arguments()["query"], arguments()["key"]
    with pytest.raises((TypeError, ValueError), match=name):
        fastmha.attention_weights(q, k, **{name: wrong})


# --- the other functions --------------------------------------------------------------------------


def test_merge_attention_refuses_what_does_not_fit():
    merge = fastmha.merge_attention
    out, lse = random(2, 3, 4), random(2, 3)
    refused(merge, ValueError, "lses", 2, 1, outs=[out, out], lses=[lse])
    refused(merge, ValueError, "lses", 0, outs=[], lses=[])
    refused(
        merge,
        ValueError,
        "outs[1]",
        (2, 3, 4),
        (2, 3, 5),
        outs=[out, random(2, 3, 5)],
        lses=[lse, lse],
    )
    refused(merge, ValueError, "lses[1]", (2, 3), (2, 4), outs=[out, out], lses=[lse, random(2, 4)])
    refused(merge, ValueError, "lses[0]", (2, 3), (2, 3, 1), outs=[out], lses=[lse[..., None]])
    refused(merge, ValueError, "outs[0]", outs=[np.float32(1)], lses=[np.float32(1)])
    refused(
        merge,
        TypeError,
        "outs[1]",
        "float32",
        "float64",
        outs=[out, out.astype(float)],
        lses=[lse, lse],
    )
    refused(merge, TypeError, "outs[0]", "int64", outs=[out.astype(int)], lses=[lse])
    refused(merge, TypeError, "lses[0]", "bool", outs=[out], lses=[lse > 0])
    refused(merge, TypeError, "outs[0]", "masked array", outs=[np.ma.array(out)], lses=[lse])
    refused(merge, TypeError, "outs", outs=3, lses=[lse])
    refused(merge, TypeError, "lses", outs=[out], lses=None)


def test_softmax_refuses_what_is_not_real():
    for wrong, word in (
        ("text", "U4"),
        (None, "object"),
        (random(3) > 0, "bool"),
        (random(3).astype(complex), "complex"),
        (random(3).astype(WIDE), WIDE.name),
        (np.ma.array(random(3)), "masked array"),
        (np.zeros(3, "M8[s]"), "datetime64"),
        (np.zeros(3, "m8[s]"), "timedelta64"),
    ):
        refused(fastmha.softmax, TypeError, "x", word, x=wrong)


def test_softmax_refuses_axes_that_are_not_there():
    for x, axis in (
        (random(3), 1),
        (random(3), -2),
        (random(2, 3), 2),
        (np.float32(1), 0),
        (np.float32(1), -1),
        (random(3), 10**30),
    ):
        refused(fastmha.softmax, ValueError, "axis", axis, x=x, axis=axis)
    for axis in (None, 0.0, "0", (0,), [0, 1]):
        refused(fastmha.softmax, TypeError, "axis", type(axis).__name__, x=random(2, 3), axis=axis)


def five(**changes):
    right = {
        "X": random(5, 8),
        "W_Q": random(8, 6),
        "W_K": random(8, 6),
        "W_V": random(8, 4),
        "W_O": random(4, 7),
        "h": 2,
    }
    return right | changes


@pytest.mark.parametrize(
    "change, kind, name, words",
    [
        ({"X": random(8)}, ValueError, "X", ["2 or 3 axes", (8,)]),
        ({"X": random(1, 2, 5, 8)}, ValueError, "X", ["2 or 3 axes", (1, 2, 5, 8)]),
        ({"X": random(5, 9)}, ValueError, "W_Q", [9, (8, 6)]),
        ({"W_Q": random(8)}, ValueError, "W_Q", [2, (8,)]),
        ({"W_O": random(1, 4, 7)}, ValueError, "W_O", [2, (1, 4, 7)]),
        ({"W_Q": random(9, 6)}, ValueError, "W_Q", [8, (9, 6)]),
        ({"W_K": random(7, 6)}, ValueError, "W_K", [8, (7, 6)]),
        ({"W_V": random(7, 4)}, ValueError, "W_V", [8, (7, 4)]),
        ({"W_K": random(8, 4)}, ValueError, "W_K", [(8, 6), (8, 4)]),
        ({"W_O": random(5, 7)}, ValueError, "W_O", [4, (5, 7)]),
        ({"W_V": random(8, 5)}, ValueError, "W_V", [2, (8, 5)]),
        ({"h": 4}, ValueError, "W_Q", [4, (8, 6)]),
        ({"h": 0}, ValueError, "h", [0]),
        ({"h": -2}, ValueError, "h", [-2]),
        ({"h": 2.0}, TypeError, "h", ["float"]),
        ({"h": "2"}, TypeError, "h", ["str"]),
        ({"h": None}, TypeError, "h", ["NoneType"]),
        *[({name: "text"}, TypeError, name, ["U4"]) for name in ("X", "W_Q", "W_K", "W_V", "W_O")],
        *[({name: None}, TypeError, name, ["object"]) for name in ("X", "W_Q", "W_K", "W_V")],
        ({"X": random(5, 8) > 0}, TypeError, "X", ["bool"]),
        ({"W_V": random(8, 4).astype(complex)}, TypeError, "W_V", ["complex"]),
        ({"W_O": np.ma.array(random(4, 7))}, TypeError, "W_O", ["masked array"]),
        ({"trace": 3}, TypeError, "trace", ["int"]),
    ],
)  # fmt: skip
def test_multi_head_attention_refuses_what_does_not_fit(change, kind, name, words):
    refused(fastmha.multi_head_attention, kind, name, *words, **five(**change))


def test_nothing_crashes_on_any_mixture_of_wrong_arguments():
    """Random arguments, right and wrong: a result or an error of the two kinds, nothing else."""
    rng = np.random.default_rng(0)
    junk = [
        None,
        0,
        -1,
        2.5,
        "x",
        True,
        [],
        [1, 2],
        np.ones(3),
        np.zeros((2, 2), int),
        math.nan,
        Anything(),
        2**70,
    ]
    names = [
        "mask", "causal", "window", "scale", "softcap", "alibi_slopes", "sinks", "key_lengths",
        "query_lengths", "dropout_p", "rng", "layout", "return_lse", "out",
    ]  # fmt: skip
    right = 0
    for _ in range(2000):
        shapes = [tuple(rng.choice([0, 1, 2, 3, 4], rng.choice([4, 4, 4, 3, 5]))) for _ in range(3)]
        if rng.random() < 0.7:
            shapes = [(B, H, L, D), (B, G, S, D), (B, G, S, E)]
        arrays = [random(*shape) for shape in shapes]
        chosen = rng.choice(names, rng.integers(0, 3), replace=False)
        options = {str(name): junk[rng.integers(len(junk))] for name in chosen}
        try:
            fastmha.attention(*arrays, **options)
            right += 1
        except (TypeError, ValueError) as error:
            assert "ambiguous" not in str(error), options
    assert right > 100


def outcome(function, *arguments):
    """What a call comes to: a record, its arrays as they lie, or an error."""
    try:
        problem = function(*arguments)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    arrays = [(x.__array_interface__, x.strides, x.dtype) for x in problem[:3]]
    return type(problem), arrays, problem[3:]


def test_what_is_remembered_of_plain_calls_is_what_checks_say():
    rng = np.random.default_rng(0)
    dtypes = [np.float32] * 20 + [np.float64, np.int32, np.bool_]
    right = 0
    for _ in range(1000):
        shapes = [tuple(rng.choice([0, 1, 2, 3, 4], rng.choice([4, 4, 4, 3, 5]))) for _ in range(3)]
        if rng.random() < 0.5:
            shapes = [(B, H, L, D), (B, G, S, D), (B, G, S, E)]
        arrays = [np.zeros(shape, dtypes[rng.integers(len(dtypes))]) for shape in shapes]
        flags = [True, False, 1, 0.0, None, np.True_, "top-left"]
        causal, gqa = (flags[rng.choice(7, p=[0.3, 0.4, *[0.06] * 5])] for _ in range(2))
        layout = ["BHLD", "BHLD", "BLHD", "LHD", None][rng.integers(5)]
        options = *(None,) * 7, 0.0, None
        full = *arrays, None, causal, *options, layout
        wanted = outcome(_problem.checked_full, *arrays, causal, layout)
        torch_wanted = outcome(_problem.checked_torch, *arrays, causal, gqa)
        for _ in range(2):  # the second time from memory
            assert outcome(_problem.full_problem, *full) == wanted
            assert (
                outcome(_problem.torch_problem, *arrays, None, 0.0, causal, None, gqa) == torch_wanted
            )
        right += wanted[0] is _problem.Problem
    assert right > 100


def test_the_checks_need_no_kernels():
    """The record can be looked at: what was asked, with defaults filled in."""
    problem = _problem.torch_problem(random(L, 4), random(S, 4), random(S, 2), is_causal=True)
    assert problem.lead == ()
    assert problem.out_shape == (L, 2)
    assert problem.options.scale == 0.5
    assert problem.options.right == 0
    assert problem.options.left > 2**40
