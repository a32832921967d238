"""The benchmark: one table of cases, all competitors in turn in one process, medians.

A case says what is computed. Each competitor computes it on the same arrays; its result is compared
with a float64 computation first, since the time of a wrong result means nothing. Then competitors
alternate, round by round, with the machine's own limits (fused multiply-adds, reading memory) among
them, so that what disturbs one disturbs all.

`run_bench` starts a process of its own for that, because NumPy must be loaded with
``OPENBLAS_THREAD_TIMEOUT=4``: OpenBLAS's idle threads otherwise spin for tens of milliseconds after
each matrix product and take the cores from whoever comes next. That process reads a request as JSON
and answers with one JSON record a line.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import timeit
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fastmha
from fastmha import _dispatch
from fastmha._bench_cases import (
    CASES,
    LENGTHS,
    Case,
    Inputs,
    Skipped,
    flops,
    length_sweep,
    make_inputs,
    select,
    traffic,
)
from fastmha._bench_rivals import BUILDERS, TOLERANCE, expected_rows
from fastmha._terminal import PlainTerminal, open_terminal

__all__ = [
    "QUICK",
    "SETTINGS",
    "Settings",
    "chosen_cases",
    "cpu_model",
    "list_cases",
    "run_bench",
    "run_case",
    "versions",
]

_TITLES = {"numpy": "NumPy", "torch": "PyTorch", "onnxruntime": "ORT"}


# Measuring ------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """How long and how often to measure; times in seconds."""

    rounds: int = 9
    least_rounds: int = 3  # of a competitor that uses up its budget before
    budget: float = 4.0  # for one competitor in one case
    batch: float = 0.03  # calls are timed in batches of at least that
    peak: float = 0.02  # for the peak of multiply-adds, each round
    pause: float = 0.02  # before each batch, for the threads of the one before to fall asleep
    numpy_limit: float = 3.0  # NumPy is left out where one call would take longer
    cold_bytes: int = 2**28  # of keys and values that pass by before the first come again


SETTINGS = Settings()
QUICK = Settings(rounds=3, least_rounds=2, budget=0.5, batch=0.01, numpy_limit=0.5)


def run_case(case, thread_counts, competitors, settings=SETTINGS):
    """Measure one case; yield a record, ready for JSON, for each number of threads.

    Parameters
    ----------
    case : Case
    thread_counts : sequence of int
    competitors : sequence of {"fastmha", "numpy", "torch", "onnxruntime"}
    settings : Settings, optional

    Yields
    ------
    dict
        The case's fields under their names and the case's name under ``case``; ``threads``;
        ``flops`` and ``bytes``, see `flops` and `traffic`; ``skipped``, a reason, or
        ``fma_peak``, FLOP/s of one thread, ``read_bandwidth``, bytes/s of all threads, either of
        them None where not measured; ``limit_share`` of fastmha; and ``competitors``: for each
        either ``skipped`` or ``failed`` with a reason, or ``seconds``, the median of ``rounds``,
        ``calls`` in a batch, ``error``, the largest difference relative to the largest value (None:
        not comparable), and ``ratio``, its time divided by fastmha's. The competitor ``beside`` is
        fastmha on the case of that name.
    """
    fields = case._asdict()
    about = {"case": fields.pop("name"), **fields, "flops": flops(case), "bytes": traffic(case)}
    try:
        inputs = make_inputs(case)
    except Skipped as reason:
        yield from ({**about, "threads": n, "skipped": str(reason)} for n in thread_counts)
        return
    if "torch" in competitors:
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401 (`_threads` sets its threads, once it is loaded)
    expected = expected_rows(case, inputs)
    copies = _copies(case, inputs, settings.cold_bytes)
    beside = next((other for other in CASES if other.name == case.beside), None)
    for n in thread_counts:
        with _threads(n):
            entries, calls = {}, {}
            for name in competitors:
                try:
                    call, error = _checked_call(name, case, copies, n, settings, expected)
                except (Skipped, NotImplementedError) as reason:
                    entries[name] = {"skipped": str(reason) or "not implemented"}
                except Exception as error:
                    entries[name] = {"failed": f"{type(error).__name__}: {error}"}
                else:
                    entries[name], calls[name] = {"error": error}, call
            if "fastmha" in calls and beside:
                calls["beside"] = BUILDERS["fastmha"](beside, make_inputs(beside), n)[0]
                entries["beside"] = {"error": None}
            measured = _alternate(calls, case, n, settings) if "fastmha" in calls else {}
        record = {**about, "threads": n, "competitors": entries}
        yield _summed_up(record, measured)


def _copies(case, inputs, cold_bytes):
    """Return equal inputs, enough of them that a turn through all empties the caches if need be."""
    n = 1 + math.ceil(cold_bytes / traffic(case)) if case.cold else 1
    more = (Inputs(tuple(x.copy() for x in inputs.arrays), inputs.mask) for _ in range(n - 1))
    return [inputs, *more]


def _checked_call(name, case, copies, threads, settings, expected):
    """Return a call that gives the expected rows, and how far from them it is."""
    limit = {"seconds": settings.numpy_limit} if name == "numpy" else {}
    call, array = BUILDERS[name](case, copies[0], threads, **limit)
    rows, values = expected
    error = None
    if name == "fastmha" or not case.dropout:  # everybody drops others
        result = np.asarray(array(call()))[..., rows, :].astype(np.float64)
        error = float(np.abs(result - values).max() / np.abs(values).max())
        if not error <= TOLERANCE[case.dtype]:  # NaN fails too
            raise ArithmeticError(
                f"result differs by {error:.1e} of the largest value, "
                f"expected at most {TOLERANCE[case.dtype]:.0e}"
            )
    if len(copies) > 1:
        turn = itertools.cycle([BUILDERS[name](case, copy, threads)[0] for copy in copies])
        return lambda: next(turn)(), error
    return call, error


def _alternate(calls, case, threads, settings):
    """Time all calls in turn; return {name: {"rounds", "calls"}} and the limits' own rounds."""
    plans = {}
    for name, call in calls.items():
        timer = timeit.Timer(call)
        once = max(timer.timeit(1), 1e-9)
        number = max(1, math.ceil(settings.batch / once))
        rounds = int(settings.budget / (once * (number + 1)))
        rounds = min(max(rounds, settings.least_rounds), settings.rounds)
        plans[name] = (timer, number, rounds, once)
    measured = {name: {"rounds": [], "calls": plan[1]} for name, plan in plans.items()}
    peaks, bandwidths = [], []
    kernels = _dispatch.double if case.dtype == "float64" else _dispatch.single
    peak = getattr(kernels, "fma_peak", None)
    memory = np.ones(settings.cold_bytes // 4, np.float32) if case.cold else None
    names = list(plans)
    for i in range(settings.rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            timer, number, rounds, once = plans[name]
            if i >= rounds:
                continue
            if threads > 1:
                time.sleep(settings.pause)
            if once < 0.5:
                # Wakes the threads, and brings back what the others drove out of the caches.
                timer.timeit(max(1, number // 10))
            measured[name]["rounds"].append(timer.timeit(number) / number)
        if peak:
            peaks.append(peak(settings.peak))
        if case.cold:
            # NumPy's dot product of one array with itself reads it once and computes little.
            dot = timeit.Timer(lambda: np.dot(memory, memory))
            dot.timeit(1)
            bandwidths.append(memory.nbytes / dot.timeit(1))
    return {**measured, "fma_peak": peaks, "read_bandwidth": bandwidths}


def _summed_up(record, measured):
    """Put medians, shares and ratios into a record."""
    for name, entry in record["competitors"].items():
        if name in measured:
            entry |= measured[name]
            entry["seconds"] = statistics.median(entry["rounds"])
    for limit in ("fma_peak", "read_bandwidth"):
        record[limit] = statistics.median(measured[limit]) if measured.get(limit) else None
    record["limit_share"] = None
    ours = record["competitors"].get("fastmha", {}).get("seconds")
    if ours:
        if record["read_bandwidth"]:
            record["limit_share"] = record["bytes"] / ours / record["read_bandwidth"]
        elif record["fma_peak"] and not record["cold"]:
            record["limit_share"] = record["flops"] / ours / record["fma_peak"] / record["threads"]
        for entry in record["competitors"].values():
            if "seconds" in entry:
                entry["ratio"] = entry["seconds"] / ours
    return record


@contextlib.contextmanager
def _threads(n):
    """Give all competitors `n` threads; NumPy only with threadpoolctl, else see `_ask`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(fastmha.num_threads(n))
        if importlib.util.find_spec("threadpoolctl"):
            from threadpoolctl import threadpool_limits

            stack.enter_context(threadpool_limits(n, user_api="blas"))
        torch = sys.modules.get("torch")
        if torch:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(n)
            stack.enter_context(torch.inference_mode())
        yield


# The process that measures, and the one that asks it ------------------------------------------


def cpu_model():
    """Return the processor's name, as well as the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return platform.processor() or platform.machine()


def versions(packages=("torch", "onnxruntime", "ml_dtypes", "threadpoolctl")):
    """Return the versions of Python, NumPy and its BLAS, fastmha, and of packages if installed."""
    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    found = {
        "fastmha": fastmha.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
    }
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _header(settings):
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_model(),
            "cpus": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": versions(),
        "isa": fastmha.show_config(mode="dicts")["isa"],
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "settings": settings._asdict(),
    }


_ENVIRONMENT = {"OPENBLAS_THREAD_TIMEOUT": "4"}
_THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "OMP_NUM_THREADS",
)


def _serve():
    """Read a request from standard input, write the header and the records to standard output."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed must not come between

    def answer(message):
        print(json.dumps(message), file=answers, flush=True)

    request = json.load(sys.stdin)
    settings = Settings(**request["settings"])
    answer({"header": _header(settings)})
    for fields in request["cases"]:
        case = Case(**fields)
        case = case._replace(window=case.window and tuple(case.window))
        for record in run_case(case, request["threads"], request["competitors"], settings):
            answer({"record": record})


def _ask(request):
    """Yield the messages of processes that measure, one for each way to set NumPy's threads."""
    in_one = importlib.util.find_spec("threadpoolctl") or len(request["threads"]) == 1
    for counts in [request["threads"]] if in_one else [[n] for n in request["threads"]]:
        environment = {**os.environ, **_ENVIRONMENT}
        if len(counts) == 1:
            environment.update(dict.fromkeys(_THREAD_VARIABLES, str(counts[0])))
        with subprocess.Popen(
            [sys.executable, "-m", "fastmha.bench"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            encoding="utf-8",
        ) as process:
            try:
                json.dump({**request, "threads": counts}, process.stdin)
                process.stdin.close()
                for line in process.stdout:
                    yield json.loads(line)
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            raise ChildProcessError(f"the measuring process ended with {process.returncode}")


def chosen_cases(patterns=(), *, sweep=None, quick=False):
    """Return the cases to measure, see `select`: of the table, or of throughput against length."""
    if sweep is None:
        return select(CASES, patterns)
    return select(length_sweep(LENGTHS[:7] if quick else LENGTHS), patterns)


def run_bench(
    cases,
    *,
    threads=None,
    quick=False,
    repeat=None,
    json_file=None,
    plot_file=None,
    use_numpy=True,
    use_torch=True,
    use_onnxruntime=False,
    terminal=None,
):
    """Measure cases in a process of its own and print the results as tables.

    Parameters
    ----------
    cases : sequence of Case
        See `chosen_cases`.
    threads : sequence of int, optional
        Default: 1, and what `fastmha.get_num_threads` says.
    quick : bool, optional
        Fewer rounds, shorter ones, and NumPy only where it is fast.
    repeat : int, optional
        Number of rounds.
    json_file : str, optional
        Where to write all figures; "-": standard output, and the tables to standard error.
    plot_file : str, optional
        Where to draw them, if they are throughput against length.
    use_numpy, use_torch, use_onnxruntime : bool, optional
        Whether they compete, where they are installed.
    terminal : PlainTerminal or RichTerminal, optional
        Where to print.

    Returns
    -------
    int
        0; or 1 if fastmha gave a wrong result or an error, or the measuring process did.

    Raises
    ------
    KeyboardInterrupt
        After what has been measured was printed and written.
    """
    terminal = terminal or _terminal(sys.stderr if json_file == "-" else sys.stdout)
    settings = QUICK if quick else SETTINGS
    if repeat:
        least = min(repeat, settings.least_rounds)
        settings = settings._replace(rounds=repeat, least_rounds=least)
    wanted = {"numpy": use_numpy, "torch": use_torch, "onnxruntime": use_onnxruntime}
    request = {
        "cases": [case._asdict() for case in cases],
        "threads": sorted(set(threads or (1, fastmha.get_num_threads()))),
        "competitors": ["fastmha", *(name for name, use in wanted.items() if use)],
        "settings": settings._asdict(),
    }
    header, records, ending = _collect(terminal, request)
    if json_file:
        text = json.dumps({**header, "results": records}, indent=1)
        if json_file == "-":
            print(text)
        else:
            Path(json_file).write_text(text + "\n", encoding="utf-8")
    _show(terminal, records)
    if plot_file and records:
        from fastmha import plotting

        data = {**header, "results": records}
        plotting.save(plot_file, (11, 4.4), lambda figure: plotting.plot_throughput(data, figure=figure))
    failures = [f"{record['case']}: {_failure(record)}" for record in records if _failure(record)]
    failures += [str(ending)] if isinstance(ending, ChildProcessError) else []
    for failure in failures:
        terminal.line(f"FAILED: {failure}")
    if isinstance(ending, KeyboardInterrupt):
        raise ending
    return 1 if failures else 0


def _terminal(file):
    """A person gets colours and a moving bar, a log gets lines that are never cut."""
    return open_terminal(file) if file.isatty() else PlainTerminal(file)


def _collect(terminal, request):
    """Have a request measured; return the header, the records in order, and what ended it early."""
    header, records, ending = {}, [], None
    messages = _ask(request)
    try:
        header = next(messages)["header"]
        _show_header(terminal, header)
        with terminal.progress(len(request["cases"]) * len(request["threads"])) as advance:
            for record in (message["record"] for message in messages if "record" in message):
                records.append(record)
                advance(f"{record['case']}, threads: {record['threads']}")
    except (ChildProcessError, KeyboardInterrupt) as error:
        ending = error
    order = [case["name"] for case in request["cases"]]
    records.sort(key=lambda record: (order.index(record["case"]), record["threads"]))
    return header, records, ending


def _failure(record):
    return record.get("competitors", {}).get("fastmha", {}).get("failed")


# What is shown --------------------------------------------------------------------------------


def list_cases(cases, file=None):
    """Print cases without measuring them."""
    rows = [
        [case.name, _shape(case), case.dtype, _particulars(case), _amount(case)] for case in cases
    ]
    columns = ["case", "shape", "dtype", "particulars", "work"]
    PlainTerminal(file).table(columns, rows, left=4)


def _shape(case):
    sizes = f"B{case.B} H{case.H} L{case.L} D{case.D}"
    for letter, usual in (("G", case.H), ("S", case.L), ("E", case.D)):
        if getattr(case, letter) != usual:
            sizes += f" {letter}{getattr(case, letter)}"
    return sizes


def _particulars(case):
    words = [case.kind] if case.kind != "attention" else []
    words += ["causal"] * case.causal
    words += [f"{case.mask} mask"] if case.mask else []
    words += [f"window {case.window}"] if case.window else []
    words += [f"dropout {case.dropout}"] if case.dropout else []
    words += [f"{case.layout} in memory"] if case.layout != "BHLD" else []
    words += [f"{case.values} weights"] if case.values != "normal" else []
    words += ["from memory"] * case.cold
    return ", ".join(words)


def _amount(case):
    if case.cold:
        return f"{_digits(traffic(case) / 1e6)} MB"
    count = flops(case)
    unit, scale = (
        ("GFLOP", 1e9) if count >= 1e8 else ("MFLOP", 1e6) if count >= 1e5 else ("FLOP", 1)
    )
    return f"{_digits(count / scale)} {unit}"


def _show_header(terminal, header):
    machine, found = header["machine"], dict(header["versions"])
    terminal.heading(f"fastmha {found.pop('fastmha')}, {header['isa']} kernels")
    terminal.line(f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['system']}")
    names = ", ".join(f"{name} {version}" for name, version in found.items())
    terminal.line(f"{header['date']}, {names}")
    terminal.line(
        "Measured in a process of its own with OPENBLAS_THREAD_TIMEOUT=4, so that NumPy's idle "
        "threads sleep"
    )
    terminal.line("instead of taking the cores from whoever comes next.")


def _show(terminal, records):
    """Print the tables: what computing bounds, what memory bounds, and ratios of cases."""
    measured = [record for record in records if _seconds(record, "fastmha")]
    rivals = [name for name in _TITLES if any(_seconds(record, name) for record in records)]
    alone = {r["case"]: _seconds(r, "fastmha") for r in measured if r["threads"] == 1}
    several = bool(alone) and any(record["threads"] > 1 for record in measured)
    for cold, bound, rate, limit in (
        (False, "computing", "GFLOP/s", "peak"),
        (True, "memory", "GB/s", "read"),
    ):
        rows = []
        for record in measured:
            if record["cold"] != cold:
                continue
            ours = _seconds(record, "fastmha")
            amount = record["bytes" if cold else "flops"] / ours / 1e9
            row = [record["case"], str(record["threads"]), _time(ours), _digits(amount)]
            row.append(f"{record['limit_share']:.0%}" if record["limit_share"] else "-")
            row += [_ratio(_seconds(record, name), ours) for name in rivals]
            if several:
                row.append(_ratio(record["threads"] > 1 and alone.get(record["case"]), ours))
            rows.append(row)
        if rows:
            columns = ["case", "thr", "time", rate, limit, *(_TITLES[name] for name in rivals)]
            terminal.heading(f"Bounded by {bound}")
            terminal.table(columns + ["1 thr"] * several, rows, left=1)
    terminal.line("thr: threads. peak: share of the fused multiply-adds, and read: of the memory")
    terminal.line(
        "bandwidth, that so many threads reached in between. NumPy, PyTorch, ...: how many"
    )
    terminal.line("times as fast as they fastmha is; 1 thr: as itself with one thread.")
    _show_pairs(terminal, measured)
    _show_reasons(terminal, records)


def _show_pairs(terminal, records):
    """Print the ratios to the cases that were measured beside."""
    rows = [
        [
            record["case"],
            str(record["threads"]),
            record["beside"],
            f"{_seconds(record, 'fastmha') / _seconds(record, 'beside'):.2f}",
        ]
        for record in records
        if _seconds(record, "beside")
    ]
    if rows:
        terminal.heading("Time, divided by another case's in the same run")
        terminal.table(["case", "thr", "divided by", "ratio"], rows, left=1)


def _show_reasons(terminal, records):
    """Print once each why something was not measured."""
    reasons = {}
    for record in records:
        entries = {"": record} if "skipped" in record else record["competitors"]
        for name, entry in entries.items():
            reason = entry.get("skipped") or (name != "fastmha" and entry.get("failed"))
            if reason:
                reason = f"{_TITLES.get(name, name)} {reason}".strip()
                reasons.setdefault(reason, {})[record["case"]] = None
    for reason, where in ((reason, list(where)) for reason, where in reasons.items()):
        shown = ", ".join(where[:4]) + (f" and {len(where) - 4} more" if len(where) > 4 else "")
        terminal.line(f"Not measured: {reason} ({shown})")


def _seconds(record, name):
    return record.get("competitors", {}).get(name, {}).get("seconds")


def _time(seconds):
    unit, scale = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{_digits(seconds * scale)} {unit}"


def _digits(number):
    """Write three digits, or as many as stand before the point, and two behind it at most."""
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def _ratio(theirs, ours):
    return f"{_digits(theirs / ours)}x" if theirs and ours else "-"


if __name__ == "__main__":
    try:
        _serve()
    except KeyboardInterrupt:
        sys.exit(130)
