"""The benchmark: its table, its counts, its competitors, and what it prints and writes."""

import io
import itertools
import json
import math
import sys

import numpy as np
import pytest

import fastmha
from fastmha import _bench_rivals, bench
from fastmha._bench_cases import (
    CASES,
    Case,
    Skipped,
    flops,
    length_sweep,
    lengths,
    make_inputs,
    select,
    traffic,
    visible,
)
from fastmha._terminal import PlainTerminal

# As short as measuring can be.
BRIEF = bench.Settings(
    rounds=2, least_rounds=1, budget=0.01, batch=1e-4, peak=1e-4, pause=0, cold_bytes=2**14
)


def tiny(case):
    """The same kind of case at sizes that take no time."""
    L, S = min(case.L, 9), min(case.S, 9 if case.S == case.L else 23)
    H = min(case.H, 4)
    return case._replace(
        B=min(case.B, 2),
        H=H,
        G=max(1, case.G * H // case.H),
        L=L,
        S=S,
        D=min(case.D, 8),
        E=min(case.E, 8 if case.E == case.D else 6),
        window=case.window and (3, 0),
        beside=None,
    )


def named(name):
    return next(case for case in CASES if case.name == name)


# The table


def test_names_are_unique_and_short():
    names = [case.name for case in (*CASES, *length_sweep())]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 17  # for tables of 80 columns


@pytest.mark.parametrize("case", [*CASES, *length_sweep()], ids=lambda case: case.name)
def test_every_case_is_well_formed(case):
    assert case.H % case.G == 0
    assert min(case[1:8]) >= 1
    assert flops(case) > 0
    assert traffic(case) > 0
    assert case.dtype in _bench_rivals.TOLERANCE
    assert case.kind in ("attention", "layer")
    assert case.mask in (None, "bool", "additive", "padding")
    assert case.layout in ("BHLD", "BLHD", "fused", "5-D")
    assert case.values in ("normal", "denormal")
    if case.kind == "layer":
        assert (case.S, case.E, case.mask) == (case.L, case.D, None)
    if case.layout in ("fused", "5-D"):
        assert (case.G, case.S, case.E) == (case.H, case.L, case.D)
    if case.beside:
        assert named(case.beside).beside is None
        assert named(case.beside).dtype == case.dtype


def test_table_has_odd_sizes_and_every_kind():
    def some(condition):
        return any(map(condition, CASES))

    assert some(lambda c: c.L % 2 and c.L > 64)
    assert some(lambda c: c.L == 113 and c.H % 2)
    assert some(lambda c: c.D % 16)
    assert some(lambda c: c.D != c.E)
    assert some(lambda c: c.G != c.H and c.L > 1)
    assert {c.dtype for c in CASES} == set(_bench_rivals.TOLERANCE)
    assert {c.mask for c in CASES} == {None, "bool", "additive", "padding"}
    assert {c.layout for c in CASES} == {"BHLD", "BLHD", "fused", "5-D"}
    assert {c.kind for c in CASES} == {"attention", "layer"}
    assert {32, 64, 96, 128} <= {c.D for c in CASES}
    assert some(lambda c: c.window) and some(lambda c: c.dropout) and some(lambda c: c.cold)


def test_select_takes_parts_and_patterns():
    assert select(CASES, ()) == CASES
    assert [c.name for c in select(CASES, ["full-6"])] == ["full-64", "full-65"]
    assert [c.name for c in select(CASES, ["layer-?x128"])] == ["layer-1x128"]
    assert select(CASES, ["no such case"]) == ()
    both = select(CASES, ["tiny", "full-6"])
    assert both == tuple(c for c in CASES if "tiny" in c.name or "full-6" in c.name)


def test_sweep_covers_both_kinds():
    sweep = bench.chosen_cases(sweep="length")
    assert len(sweep) == 2 * len(bench.chosen_cases(sweep="length", quick=True)) - 10
    assert {c.causal for c in sweep} == {False, True}


# The counts


def brute_force(case):
    """Count the operations one by one: a multiplication and an addition for each product."""
    count = 0
    left, right = case.window or (-1, -1)
    members = lengths(case)
    for b, _, i, j in itertools.product(*map(range, (case.B, case.H, case.L, case.S))):
        seen = j < members[b] and (j <= i or not case.causal)
        seen = seen and (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
        count += 2 * (case.D + case.E) * seen
    if case.kind == "layer":
        d_model = case.H * case.D
        for size in (case.H * case.D, case.G * case.D, case.G * case.D, d_model):
            count += case.B * case.L * 2 * d_model * size
    return count


SMALL = Case("small", B=3, H=4, G=2, L=7, S=11, D=5, E=3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"causal": True, "S": 4},
        {"window": (2, 0)},
        {"window": (0, 3)},
        {"window": (-1, 1)},
        {"window": (2, -1)},
        {"window": (1, 2), "causal": True},
        {"window": (100, 100)},
        {"mask": "padding"},
        {"mask": "padding", "causal": True},
        {"mask": "padding", "window": (1, 1), "L": 20},
        {"mask": "bool"},
        {"kind": "layer", "G": 4, "S": 7, "E": 5},
        {"kind": "layer", "S": 7, "E": 5, "causal": True},
        {"B": 1, "L": 1},
        {"B": 1, "L": 1, "S": 1, "mask": "padding"},
    ],
    ids=str,
)
def test_flops_equal_counting_one_by_one(changes):
    case = SMALL._replace(**changes)
    assert flops(case) == brute_force(case)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (2, 0), (0, 1), (-1, 2), (3, -1)])
def test_visible_is_what_the_formula_says(causal, window):
    case = SMALL._replace(causal=causal, window=window)
    left, right = window or (-1, -1)
    expected = [
        [
            (not causal or j <= i) and (left < 0 or i - j <= left) and (right < 0 or j - i <= right)
            for j in range(case.S)
        ]
        for i in range(case.L)
    ]
    seen = visible(case)
    if seen is None:
        assert np.all(expected)
    else:
        assert np.array_equal(seen, expected)
        assert np.array_equal(visible(case, [5, 1]), seen[[5, 1]])


def test_traffic_is_the_size_of_the_arrays():
    for case in map(tiny, CASES):
        if case.kind == "attention" and case.dtype != "bfloat16":
            q, k, v = make_inputs(case).arrays
            out = case.B * case.H * case.L * case.E * q.itemsize
            assert traffic(case) == q.nbytes + k.nbytes + v.nbytes + out


# The arrays


def test_layouts_are_views_of_one_shape():
    case = Case("layouts", B=2, H=4, G=4, L=5, S=5, D=3, E=3)
    for layout in ("BHLD", "BLHD", "fused"):
        arrays = make_inputs(case._replace(layout=layout)).arrays
        assert [x.shape for x in arrays] == [(2, 4, 5, 3)] * 3
    assert len({id(x.base) for x in arrays}) == 1
    five = make_inputs(case._replace(layout="5-D")).arrays
    assert [x.shape for x in five] == [(2, 2, 2, 5, 3)] * 3


def test_denormal_weights_are_denormal():
    q, k, _ = make_inputs(tiny(named("denormal-1024"))).arrays
    scores = (q @ k.swapaxes(-1, -2)).astype(float) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    others = np.sort(weights, axis=-1)[..., :-1]
    assert np.all(others < np.finfo(np.float32).tiny)
    assert np.median(others) > np.finfo(np.float32).smallest_subnormal


def test_bfloat16_without_ml_dtypes_is_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    case = tiny(named("bf16-full-1024"))
    with pytest.raises(Skipped, match="ml_dtypes"):
        make_inputs(case)
    records = list(bench.run_case(case, [1, 2], ["fastmha"], BRIEF))
    assert [record["threads"] for record in records] == [1, 2]
    assert all("ml_dtypes" in record["skipped"] for record in records)
    stream = io.StringIO()
    bench._show(PlainTerminal(stream), records)
    assert "Not measured: bfloat16 needs ml_dtypes (bf16-full-1024)" in stream.getvalue()


# The competitors


@pytest.mark.parametrize("G", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_textbook_equals_the_reference(G, causal):
    q, k, v = make_inputs(SMALL._replace(G=G, dtype="float64")).arrays
    mask = visible(SMALL._replace(causal=causal))
    expected = fastmha.reference.attention(q, k, v, causal=causal)
    np.testing.assert_allclose(_bench_rivals.textbook(q, k, v, mask), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["bool", "additive", "padding"])
def test_textbook_with_masks_equals_the_reference(kind):
    (q, k, v), mask = make_inputs(SMALL._replace(G=4, mask=kind, dtype="float64"))
    expected = fastmha.reference.attention(q, k, v, mask=mask)
    np.testing.assert_allclose(_bench_rivals.textbook(q, k, v, mask), expected, rtol=1e-12)


def test_textbook_drops_as_many_as_it_should():
    q = np.zeros((1, 1, 100, 1))
    out = _bench_rivals.textbook(q, q, np.ones_like(q), dropout=0.25, rng=np.random.default_rng(0))
    assert abs(out.mean() - 1) < 0.02
    assert out.std() > 0.01


def check_record(record, competitors):
    """A record has what the docstring of `run_case` promises, and JSON can hold it."""
    json.dumps(record, allow_nan=False)
    assert set(record["competitors"]) == set(competitors)
    for name in competitors:
        entry = record["competitors"][name]
        assert set(entry) == {"error", "rounds", "calls", "seconds", "ratio"}, entry
        assert 1 <= len(entry["rounds"]) <= BRIEF.rounds
        assert min(entry["rounds"]) <= entry["seconds"] <= max(entry["rounds"])
        assert entry["calls"] >= 1
    assert record["competitors"]["fastmha"]["ratio"] == 1
    if record["cold"]:
        assert record["read_bandwidth"] > 0
        assert record["limit_share"] > 0
    else:
        assert record["fma_peak"] > 0
        assert record["limit_share"] > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kind_of_case_runs(case):
    if case.dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    records = list(bench.run_case(tiny(case), [1, 2], ["fastmha", "numpy"], BRIEF))
    assert [record["threads"] for record in records] == [1, 2]
    for record in records:
        assert record["case"] == case.name
        check_record(record, ["fastmha", "numpy"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kind_of_case_runs_against_pytorch(case):
    pytest.importorskip("torch")
    if case.dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    (record,) = bench.run_case(tiny(case), [1], ["fastmha", "torch"], BRIEF)
    check_record(record, ["fastmha", "torch"])
    assert (record["competitors"]["torch"]["error"] is None) == bool(case.dropout)


def test_onnx_runtime_runs_where_it_can():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    for case in (named("full-2048-d64"), named("causal-2048")):
        (record,) = bench.run_case(tiny(case), [1], ["fastmha", "onnxruntime"], BRIEF)
        check_record(record, ["fastmha", "onnxruntime"])
    (record,) = bench.run_case(tiny(named("f64-full-1024")), [1], ["fastmha", "onnxruntime"], BRIEF)
    assert "float32" in record["competitors"]["onnxruntime"]["skipped"]


def test_missing_pytorch_is_a_reason_not_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (record,) = bench.run_case(tiny(CASES[0]), [1], ["fastmha", "torch"], BRIEF)
    assert record["competitors"]["torch"] == {"skipped": "PyTorch is not installed"}
    assert record["competitors"]["fastmha"]["seconds"] > 0


def test_numpy_is_left_out_where_it_would_take_too_long_or_too_much():
    long, wide = CASES[0]._replace(L=30000, S=3000), CASES[0]._replace(L=2**16, S=2**16)
    with pytest.raises(Skipped, match="more than about 3 s"):
        _bench_rivals.BUILDERS["numpy"](long, None, 1, seconds=3.0, memory=1e12)
    with pytest.raises(Skipped, match="more than 2 GB"):
        _bench_rivals.BUILDERS["numpy"](wide, None, 1)


def test_the_case_beside_is_timed_too():
    case = tiny(named("full-65"))._replace(beside="tiny-2x8x6")
    (record,) = bench.run_case(case, [1], ["fastmha"], BRIEF)
    check_record(record, ["fastmha", "beside"])
    stream = io.StringIO()
    bench._show(PlainTerminal(stream), [record])
    assert stream.getvalue().splitlines()[-1].split()[:3] == ["full-65", "1", "tiny-2x8x6"]


@pytest.mark.parametrize("wrong", [0.0, 1.001, math.nan])
def test_a_wrong_result_is_never_timed(monkeypatch, wrong):
    def broken(*args, right=fastmha.scaled_dot_product_attention, **options):
        return right(*args, **options) * np.float32(wrong)

    monkeypatch.setattr(fastmha, "scaled_dot_product_attention", broken)
    (record,) = bench.run_case(tiny(CASES[0]), [1], ["fastmha", "numpy"], BRIEF)
    assert "result differs" in record["competitors"]["fastmha"]["failed"]
    assert "seconds" not in record["competitors"]["numpy"]
    assert record["limit_share"] is None


def test_a_wrong_row_anywhere_among_the_compared_ones_is_seen(monkeypatch):
    def broken(*args, right=fastmha.scaled_dot_product_attention, **options):
        out = right(*args, **options)
        out[..., -1, 0] += 1e-3
        return out

    monkeypatch.setattr(fastmha, "scaled_dot_product_attention", broken)
    (record,) = bench.run_case(tiny(named("causal-2048")), [1], ["fastmha"], BRIEF)
    assert "result differs" in record["competitors"]["fastmha"]["failed"]


def test_threads_are_given_back():
    torch = sys.modules.get("torch")
    before = fastmha.get_num_threads(), torch and torch.get_num_threads()
    with bench._threads(3):
        assert fastmha.get_num_threads() == 3
    assert before == (fastmha.get_num_threads(), torch and torch.get_num_threads())


# The command


@pytest.fixture
def in_process(monkeypatch):
    """Have the measuring done here, briefly, at tiny sizes; return what was asked for."""
    requests = []

    def ask(request):
        requests.append(request)
        yield {"header": bench._header(BRIEF)}
        for fields in request["cases"]:
            case = tiny(Case(**fields))
            for record in bench.run_case(case, [1, 2], ["fastmha", "numpy"], BRIEF):
                yield {"record": record}

    monkeypatch.setattr(bench, "_ask", ask)
    return requests


def test_tables_and_json(in_process, tmp_path):
    stream, path = io.StringIO(), tmp_path / "figures.json"
    cases = bench.chosen_cases(["tiny-2x8x6", "decode-32on8"])
    code = bench.run_bench(
        cases,
        threads=[2, 1],
        repeat=7,
        json_file=str(path),
        use_torch=False,
        terminal=PlainTerminal(stream),
    )
    assert code == 0
    (request,) = in_process
    assert request["threads"] == [1, 2]
    assert request["competitors"] == ["fastmha", "numpy"]
    assert request["settings"]["rounds"] == 7
    data = json.loads(path.read_text())
    assert data["format"] == 1
    assert {"date", "machine", "versions", "isa", "environment", "settings"} < set(data)
    assert data["isa"] == fastmha.show_config(mode="dicts")["isa"]
    assert {"cpu", "cpus", "system"} == set(data["machine"])
    assert {"fastmha", "numpy", "python", "blas"} <= set(data["versions"])
    expected = [(case.name, n) for case in cases for n in (1, 2)]
    assert [(r["case"], r["threads"]) for r in data["results"]] == expected
    for record in data["results"]:
        check_record(record, ["fastmha", "numpy"])
    printed = stream.getvalue()
    assert "OPENBLAS_THREAD_TIMEOUT=4" in printed
    assert data["machine"]["cpu"] in printed
    assert "Bounded by computing" in printed
    assert "Bounded by memory" in printed
    assert max(map(len, printed.splitlines())) <= 200
    header = next(line for line in printed.splitlines() if "GFLOP/s" in line)
    assert header.split() == ["case", "thr", "time", "GFLOP/s", "peak", "NumPy", "1", "thr"]


def test_json_to_standard_output(in_process, capsys):
    assert bench.run_bench(bench.chosen_cases(["tiny-1x1"]), json_file="-") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["results"]
    assert "Bounded by computing" in err


def test_failures_are_shown_and_end_in_1(in_process, monkeypatch, capsys):
    def broken(*args, **options):
        raise RuntimeError("out of order")

    monkeypatch.setattr(fastmha, "scaled_dot_product_attention", broken)
    assert bench.run_bench(bench.chosen_cases(["tiny-1x1"])) == 1
    assert "FAILED: tiny-1x1x1-d16: RuntimeError: out of order" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [ChildProcessError("it ended with -9"), KeyboardInterrupt()])
def test_what_was_measured_before_an_early_end_is_kept(in_process, monkeypatch, tmp_path, ending):
    whole = bench._ask

    def half(request):
        yield from itertools.islice(whole(request), 2)
        raise ending

    monkeypatch.setattr(bench, "_ask", half)
    stream, path = io.StringIO(), tmp_path / "figures.json"
    options = {"json_file": str(path), "terminal": PlainTerminal(stream)}
    if isinstance(ending, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            bench.run_bench(bench.chosen_cases(["tiny"]), **options)
    else:
        assert bench.run_bench(bench.chosen_cases(["tiny"]), **options) == 1
        assert "FAILED: it ended with -9" in stream.getvalue()
    assert len(json.loads(path.read_text())["results"]) == 1
    assert "Bounded by computing" in stream.getvalue()


def test_list_shows_every_case_whole():
    stream = io.StringIO()
    bench.list_cases(CASES, stream)
    lines = stream.getvalue().splitlines()[2:]
    assert [line.split()[0] for line in lines] == [case.name for case in CASES]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (1e-3, "1.00 ms"), (4.56e-6, "4.56 us"), (120, "120 s")],
)
def test_times_are_written_with_three_digits(seconds, text):
    assert bench._time(seconds) == text


def test_cpu_model_is_known():
    assert bench.cpu_model()


# The picture


def test_picture_of_a_sweep(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    records = [
        record
        for case in bench.chosen_cases(["-L64", "-L128"], sweep="length")
        for record in bench.run_case(case, [1], ["fastmha", "numpy"], BRIEF)
    ]
    messages = [{"header": bench._header(BRIEF)}, *({"record": record} for record in records)]
    monkeypatch.setattr(bench, "_ask", lambda request: iter(messages))
    cases = bench.chosen_cases(["-L64", "-L128"], sweep="length")
    path = tmp_path / "sweep.png"
    options = {"plot_file": str(path), "terminal": PlainTerminal(io.StringIO())}
    assert bench.run_bench(cases, threads=[1], **options) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10000

    from fastmha.plotting import curves

    lines = curves({"results": records}, True, 1)
    assert {name: [x for x, _ in points] for name, points in lines.items()} == {
        "fastmha": [64, 128],
        "numpy": [64, 128],
        "limit": [64, 128],
    }
