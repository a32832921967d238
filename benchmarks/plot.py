"""Draw throughput against length from what ``fastmha bench --sweep length --json FILE`` wrote.

    python benchmarks/plot.py sweep.json -o sweep.png
    python benchmarks/plot.py --quick -o sweep.png    # measures first

One panel for full and one for causal attention, where only what is visible counts as work; one line
for each competitor, and the limit: the peak of fused multiply-adds that the same process measured,
times the number of threads. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

LINES = {  # title, colour, width
    "fastmha": ("fastmha", "#c1272d", 2.6),
    "torch": ("PyTorch", "#0067a5", 1.6),
    "onnxruntime": ("ONNX Runtime", "#5b7f3a", 1.6),
    "numpy": ("NumPy", "#7a7a7a", 1.6),
}


def main(argv=None):
    """Draw the picture; return the exit code."""
    parser = argparse.ArgumentParser(description="Draw throughput against length.")
    parser.add_argument("json", nargs="?", help="figures to draw; without it they are measured")
    parser.add_argument("-o", "--output", default="throughput.png", help="the picture to write")
    parser.add_argument("--threads", type=int, help="which number of threads; default: the largest")
    parser.add_argument("--quick", action="store_true", help="measure with fewer rounds")
    arguments = parser.parse_args(argv)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        parser.exit(1, "plot.py needs matplotlib: pip install matplotlib\n")
    try:
        data = load(arguments.json) if arguments.json else measure(arguments)
    except (OSError, ValueError) as error:
        parser.exit(1, f"plot.py: {arguments.json}: {error}\n")
    threads = arguments.threads or max((r["threads"] for r in data["results"]), default=0)
    panels = [(title, curves(data, causal, threads)) for title, causal in PANELS]
    if not any(lines for _, lines in panels):
        parser.exit(1, f"plot.py: no figures for {threads} threads\n")
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    draw(figure, data, panels, threads)
    figure.savefig(arguments.output, dpi=160)
    print(f"wrote {arguments.output}")
    return 0


PANELS = (("full", False), ("causal", True))


def load(path):
    """Read a file of figures."""
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    if not isinstance(data, dict) or "results" not in data:
        raise ValueError("expected what `fastmha bench --json` writes")
    return data


def measure(arguments):
    """Run the sweep and return its figures."""
    command = [sys.executable, "-m", "fastmha", "bench", "--sweep", "length", "--json", "-"]
    command += ["--quick"] if arguments.quick else []
    command += ["--threads", str(arguments.threads)] if arguments.threads else []
    finished = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8")
    if finished.returncode:
        sys.exit(finished.returncode)
    return json.loads(finished.stdout)


def curves(data, causal, threads):
    """Return {competitor: [(length, GFLOP/s), ...]}, "limit" among them."""
    lines = {}
    for record in sorted(data["results"], key=lambda record: record["L"]):
        if (record["causal"], record["threads"]) != (causal, threads):
            continue
        for name, entry in record.get("competitors", {}).items():
            if name in LINES and "seconds" in entry:
                rate = record["flops"] / entry["seconds"] / 1e9
                lines.setdefault(name, []).append((record["L"], rate))
        if record.get("fma_peak"):
            limit = record["fma_peak"] * threads / 1e9
            lines.setdefault("limit", []).append((record["L"], limit))
    return lines


def draw(figure, data, panels, threads):
    """Draw the panels side by side on one scale."""
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    # One machine has one limit; that it differs from case to case is noise.
    limits = [rate for _, lines in panels for _, rate in lines.pop("limit", [])]
    for axis, (title, lines) in zip(axes, panels, strict=True):
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("length")
        ticks = sorted({length for points in lines.values() for length, _ in points})
        axis.set_xticks(ticks, [str(length) for length in ticks])
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.spines[["top", "right"]].set_visible(False)
        if limits:
            limit = statistics.median(limits)
            axis.axhline(limit, label="limit", color="black", linestyle=(0, (4, 3)), linewidth=1)
        for name, (label, colour, width) in LINES.items():
            if name in lines:
                x, y = zip(*lines[name], strict=True)
                axis.plot(x, y, label=label, color=colour, linewidth=width, marker="o", ms=4)
    axes[0].set_ylabel("GFLOP/s")
    axes[0].set_ylim(bottom=0)
    handles = {}
    for axis in axes:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False
    )
    sizes, versions = data["results"][0], data["versions"]
    names = [f"{LINES[name][0]} {versions[name]}" for name in LINES if name in versions]
    figure.suptitle(
        f"float32, batch {sizes['B']}, {sizes['H']} heads of {sizes['D']}, threads: {threads}, "
        f"{data['isa']} kernels, {data['machine']['cpu']}, {data['date'][:10]}\n"
        + ", ".join(names),
        x=0.01,
        ha="left",
        fontsize=9,
    )


if __name__ == "__main__":
    sys.exit(main())
