"""What is taken as an array: anything that says it is one, of any strides and byte order."""

import math

import numpy as np
import pytest
from comparing import assert_same_bits, native
from drawing import ARRANGEMENTS, FLOATS, SAME_NUMBERS, arrange, as_dtype

import fastmha
from fastmha import _dtypes, reference


class Speaks:
    """An object that has one of the two protocols, and nothing else of an array."""

    def __init__(self, x, protocol):
        if protocol == "__array__":
            self.__class__ = type("Speaks", (), {"__array__": lambda _, dtype=None, copy=None: x})
        else:
            methods = {name: getattr(x, name) for name in ("__dlpack__", "__dlpack_device__")}
            methods = {name: _unbound(method) for name, method in methods.items()}
            self.__class__ = type("Speaks", (), methods)


def _unbound(method):
    return lambda self, **options: method(**options)


class Labelled(np.ndarray):
    """A subclass as users have them, whose operators do something else."""

    def __mul__(self, other):
        raise AssertionError("a subclass's operators are not to be used")

    __matmul__ = __add__ = __getitem__ = __mul__


def three(name="float32", shape=(2, 3, 5, 4)):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(as_dtype(name)) for _ in range(3)]


def assert_taken(convert, name="float32", shape=(2, 3, 5, 4)):
    """Each of query, key and value alone, and all three, may be converted: same bits."""
    arrays = three(name, shape)
    expected = fastmha.scaled_dot_product_attention(*arrays)
    for which in ([0], [1], [2], [0, 1, 2]):
        given = [convert(x) if i in which else x for i, x in enumerate(arrays)]
        out = fastmha.scaled_dot_product_attention(*given)
        assert type(out) is np.ndarray
        assert_same_bits(out, expected)


# --- kinds of objects -----------------------------------------------------------------------------


def test_lists():
    arrays = three("float64")
    assert_taken(np.ndarray.tolist, "float64")
    mask = np.arange(5) < 3
    for given in (mask.tolist(), tuple(mask), [0.0, 0.0, 0.0, -math.inf, -math.inf]):
        assert_same_bits(fastmha.attention(*arrays, mask=given), fastmha.attention(*arrays, mask=mask))


def test_integers_in_lists_are_explained():
    with pytest.raises(TypeError, match=r"query.*int64|query.*int32"):
        fastmha.sdpa([[1, 2]], [[1, 2]], [[1, 2]])


@pytest.mark.parametrize("name", FLOATS)
def test_matrices(name):
    assert_taken(lambda x: x.view(np.matrix), name, (5, 4))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_arrays_mapped_from_files(tmp_path, name, mode):
    numbers = iter(range(99))

    def mapped(x):
        path = tmp_path / str(next(numbers))
        path.write_bytes(b"head" + x.tobytes())
        return np.memmap(path, x.dtype, mode, offset=4, shape=x.shape)

    assert_taken(mapped, name)


def test_subclasses():
    assert_taken(lambda x: x.view(Labelled))
    assert type(fastmha.softmax(three()[0].view(Labelled))) is np.ndarray


def test_record_arrays_are_refused():
    with pytest.raises(TypeError, match="key"):
        q, k, v = three()
        fastmha.sdpa(q, np.rec.fromarrays([k, k], names="a,b"), v)


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "sinks"])
def test_masked_arrays_are_explained(name):
    q, k, v = three()
    given = {"query": q, "key": k, "value": v, "mask": np.ones((5, 5), bool), "sinks": np.zeros(3)}
    given[name] = np.ma.array(given[name])
    with pytest.raises(TypeError, match=rf"^{name}: .*masked array.*mask"):
        fastmha.attention(**given)


@pytest.mark.parametrize("protocol", ["__array__", "__dlpack__"])
def test_objects_that_speak_a_protocol(protocol):
    for name in ("float64", "float32", "float16"):
        assert_taken(lambda x: Speaks(x, protocol), name)
    arrays = three()
    mask = np.arange(5) < 3
    options = {"mask": mask, "sinks": np.zeros(3), "key_lengths": np.array([4, 2])}
    given = {key: Speaks(x, protocol) for key, x in options.items()}
    assert_same_bits(fastmha.attention(*arrays, **given), fastmha.attention(*arrays, **options))
    assert_same_bits(fastmha.softmax(Speaks(arrays[0], protocol)), fastmha.softmax(arrays[0]))


@pytest.mark.parametrize("name", ["float64", "float32", "float16"])
def test_torch_tensors(torch, name):
    assert_taken(lambda x: torch.from_numpy(x), name)
    q, k, v = (torch.from_numpy(x).transpose(1, 2) for x in three(name))
    out = fastmha.attention(q, k, v, layout="BLHD", mask=torch.ones(5, 5, dtype=torch.bool).tril())
    expected = fastmha.attention(*three(name), causal=True)
    assert_same_bits(out.swapaxes(1, 2), expected)


def test_torch_tensors_that_numpy_cannot_read_are_explained(torch):
    q, k, v = three()
    for tensor in (torch.from_numpy(k).requires_grad_(), torch.from_numpy(k).to(torch.bfloat16)):
        with pytest.raises((TypeError, ValueError, RuntimeError, BufferError)):
            fastmha.sdpa(q, tensor, v)


def test_an_array_method_that_fails_is_heard():
    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise OSError("the disk is gone")

    with pytest.raises((TypeError, OSError), match="the disk is gone"):
        fastmha.sdpa(Broken(), *three()[1:])


@pytest.mark.parametrize("x", [np.float32(1), np.array(1, np.float32), 1.0], ids=repr)
def test_scalars_have_too_few_axes(x):
    for i, name in enumerate(("query", "key", "value")):
        arrays = three("float64" if x == 1.0 and isinstance(x, float) else "float32")
        arrays[i] = x
        with pytest.raises(ValueError, match=rf"^{name}: expected at least 2 axes, got 0"):
            fastmha.sdpa(*arrays)


# --- strides, byte order, alignment ---------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("arrangement", SAME_NUMBERS)
def test_arrays_of_any_strides(name, arrangement):
    assert_taken(lambda x: arrange(x, arrangement), name)


@pytest.mark.parametrize("name", ["bool", *FLOATS])
@pytest.mark.parametrize("arrangement", SAME_NUMBERS)
def test_masks_of_any_strides(name, arrangement):
    arrays = three()
    rng = np.random.default_rng(1)
    for shape in ((5,), (5, 5), (2, 1, 1, 5), (2, 3, 5, 5)):
        mask = rng.random(shape)
        mask = mask < 0.5 if name == "bool" else mask.astype(as_dtype(name))
        given = arrange(mask, arrangement)
        assert_same_bits(fastmha.attention(*arrays, mask=given), fastmha.attention(*arrays, mask=mask))


@pytest.mark.parametrize("arrangement", SAME_NUMBERS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "uint8"])
def test_vectors_of_any_strides(arrangement, dtype):
    arrays = three(shape=(4, 4, 5, 4))
    x = np.array([3, 0, 5, 1], dtype)
    given = arrange(x, arrangement)
    kinds = ["sinks", "alibi_slopes"]
    kinds += ["key_lengths", "query_lengths"] if x.dtype.kind in "iu" else []
    for name in kinds:
        expected = fastmha.attention(*arrays, **{name: x})
        assert_same_bits(fastmha.attention(*arrays, **{name: given}), expected)


def test_fields_of_packed_records():
    def packed(x):
        records = np.empty(x.shape, np.dtype([("flag", "u1"), ("x", x.dtype)]))
        records["x"] = x
        assert not records["x"].flags.aligned or x.itemsize == 1
        return records["x"]

    for name in ("float64", "float32", "float16"):
        assert_taken(packed, name)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_the_result_is_fresh(name, arrangement):
    arrays = [arrange(x, arrangement) for x in three(name)]
    for call in (fastmha.scaled_dot_product_attention, fastmha.attention, fastmha.sdpa):
        out = call(*arrays)
        assert out.flags.c_contiguous and out.flags.writeable and out.flags.aligned
        assert out.dtype == as_dtype(name) and out.dtype.isnative
        assert not any(np.shares_memory(out, x) for x in arrays)
    weights = fastmha.attention_weights(*arrays[:2])
    assert weights.flags.c_contiguous and weights.dtype.isnative


@pytest.mark.parametrize("name", FLOATS)
def test_byte_swapped_arrays_mix_with_native_ones_in_the_reference_too(name):
    q, k, v = three(name)
    expected = reference.attention(q, k, v)
    swapped = [arrange(x, "byte-swapped") for x in (q, k, v)]
    assert_same_bits(reference.attention(*swapped), expected)
    assert_same_bits(reference.attention(q, swapped[1], v), expected)


# --- the functions themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("name", [*FLOATS, "bool", "int32"])
def test_as_array_copies_only_if_need_be(arrangement, name):
    x = arrange(np.ones((3, 4), as_dtype(name)), arrangement)
    y = _dtypes.as_array(x, "x")
    assert y.dtype.isnative and y.flags.aligned
    assert np.shares_memory(x, y) == (x.dtype.isnative and x.flags.aligned)
    assert np.array_equal(native(x), y)
    assert x.shape == y.shape


def test_as_array_leaves_plain_arrays_alone():
    x = np.ones((3, 4))
    assert _dtypes.as_array(x, "x") is x
    assert _dtypes.as_array(x[::-2], "x").base is x


def test_storage_knows_the_dtypes_of_the_kernels():
    codes = [_dtypes.storage(np.dtype(name)) for name in ("bool", "float64", "float32", "float16")]
    assert codes == [0, 1, 2, 3]
    if "bfloat16" in FLOATS:
        assert _dtypes.storage(as_dtype("bfloat16")) == 4
    for other in (
        "int64",
        "uint8",
        "complex64",
        "O",
        "S2",
        "M8[s]",
        "f4,f4",
        "(2,)f4",
    ):
        other = np.dtype(other)
        assert _dtypes.storage(other) is None
    impostor = np.dtype({"names": ["bfloat16"], "formats": ["u2"]})
    assert _dtypes.storage(impostor) is None


def test_other_types_of_ml_dtypes_are_refused():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = three()
    for name in ("float8_e4m3fn", "int4", "float8_e5m2"):
        with pytest.raises(TypeError, match=rf"key.*{name}"):
            fastmha.sdpa(q, k.astype(getattr(ml_dtypes, name)), v)


def test_importing_loads_numpy_and_nothing_else(run_python):
    done = run_python(
        "import sys, numpy; before = set(sys.modules); import fastmha; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "files = {name for name in new if getattr(sys.modules[name], '__file__', None)}; "
        "print(files - set(sys.stdlib_module_names) - {'fastmha', 'numpy'})"
    )
    assert done.stdout.strip() == "set()", done.stderr


def test_half_types_need_no_ml_dtypes(run_python):
    done = run_python(
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import numpy as np, fastmha\n"
        "x = np.ones((2, 3), np.float16)\n"
        "print(fastmha.sdpa(x, x, x).dtype)\n"
    )
    assert done.stdout.strip() == "float16", done.stderr


@pytest.mark.parametrize("name", FLOATS)
def test_arithmetic(name):
    expected = np.float64 if name == "float64" else np.float32
    assert _dtypes.computed_in(as_dtype(name)) == expected
    q, k, v = three(name)
    out, lse = fastmha.attention(q, k, v, return_lse=True)
    assert (out.dtype, lse.dtype) == (as_dtype(name), expected)
    assert fastmha.attention_weights(q, k).dtype == expected
