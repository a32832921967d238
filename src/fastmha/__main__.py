"""The commands: ``fastmha`` or ``python -m fastmha``, with ``info``, ``bench`` or ``demo``."""

from __future__ import annotations

import argparse
import os
import sys

import fastmha

__all__ = ["main"]

# The features that an instruction set's kernels need, as Linux writes them.
_NEEDS = {
    "avx2": ("avx2", "fma", "f16c", "bmi1", "bmi2"),
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "neon": ("asimd",),
}
# Others worth knowing when figures are compared.
_NOTED = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile", "asimdhp", "bf16", "sve", "sve2")


def main(argv=None):
    """Run a command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; those of the process by default.

    Returns
    -------
    int
        The exit code: 0, 1 after a failure, 130 after Ctrl-C. Arguments that cannot serve end in
        ``SystemExit(2)``.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("\nfastmha: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python must not fail again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser():
    parser = argparse.ArgumentParser(
        prog="fastmha", description="Multi-head attention for the CPU, on NumPy arrays."
    )
    parser.add_argument("--version", action="version", version=f"fastmha {fastmha.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")

    def command(name, about):
        return commands.add_parser(name, help=about, description=about.capitalize() + ".")

    info = command("info", "show the build, the processor, and what was chosen")
    info.set_defaults(run=_info, parser=info)

    bench = command("bench", "measure against the machine's limits, NumPy and PyTorch")
    bench.set_defaults(run=_bench, parser=bench)
    add = bench.add_argument
    add("--list", action="store_true", help="show the cases and measure nothing")
    add(
        "--case",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN",
        help="only cases whose name contains this, or matches it as a shell pattern",
    )
    add(
        "--threads",
        nargs="+",
        type=_count,
        metavar="N",
        help="numbers of threads (default: 1 and as many as fastmha uses)",
    )
    add("--quick", action="store_true", help="fewer and shorter rounds")
    add("--repeat", type=_count, metavar="N", help="number of rounds, of which medians are shown")
    add("--sweep", choices=["length"], help="measure throughput against length instead")
    add("--json", metavar="FILE", help="write all figures there too; -: to standard output")
    add("--plot", metavar="FILE", help="draw throughput against length there; means --sweep length")
    add("--no-numpy", action="store_true", help="leave NumPy out")
    add("--no-torch", action="store_true", help="leave PyTorch out")

    demo = command("demo", "run a trained model on fastmha, and time the class")
    demo.set_defaults(run=_demo, parser=demo)
    add = demo.add_argument
    add("--text", help="what the model reads")
    add("--tokens", type=_count, metavar="N", help="how many tokens to continue it by")
    add("--layer", type=int, help="the layer of the attention map, from 0")
    add("--head", type=int, help="its head, from 0")
    add("--plot", metavar="FILE", help="draw the attention map there too")
    add(
        "--lengths",
        nargs="*",
        type=_count,
        metavar="L",
        help="lengths to time the drop-in class at; none given: no timing",
    )
    return parser


def _count(text):
    try:
        n = int(text)
    except ValueError:
        n = 0
    if n < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return n


# The commands ---------------------------------------------------------------------------------


def _bench(arguments):
    from fastmha import bench

    sweep = arguments.sweep or ("length" if arguments.plot else None)
    cases = bench.chosen_cases(arguments.case, sweep=sweep, quick=arguments.quick)
    if not cases:
        arguments.parser.error(
            f"--case: expected a part of a case's name, got {', '.join(arguments.case)}; "
            "--list shows all names"
        )
    if arguments.list:
        bench.list_cases(cases)
        return 0
    if arguments.json not in (None, "-"):
        try:  # now, not when everything has been measured
            open(arguments.json, "a").close()
        except OSError as error:
            arguments.parser.error(f"--json: cannot write {arguments.json}: {error.strerror}")
    _check_plot(arguments)
    return bench.run_bench(
        cases,
        threads=arguments.threads,
        quick=arguments.quick,
        repeat=arguments.repeat,
        json_file=arguments.json,
        plot_file=arguments.plot,
        use_numpy=not arguments.no_numpy,
        use_torch=not arguments.no_torch,
        use_onnxruntime=sweep is not None,
    )


def _demo(arguments):
    from fastmha.demo import run_demo

    _check_plot(arguments)
    names = {
        "text": arguments.text,
        "n_new": arguments.tokens,
        "layer": arguments.layer,
        "head": arguments.head,
        "lengths": arguments.lengths,
        "plot_file": arguments.plot,
    }
    run_demo(**{name: value for name, value in names.items() if value is not None})
    return 0


def _check_plot(arguments):
    """Complain about a picture that cannot be written before everything is computed."""
    if arguments.plot is None:
        return
    try:
        from matplotlib.figure import Figure

        Figure().savefig(arguments.plot)
    except ImportError:
        arguments.parser.error("--plot: needs matplotlib: pip install 'fastmha[plot]'")
    except (OSError, ValueError) as error:
        arguments.parser.error(f"--plot: cannot write {arguments.plot}: {error}")


def _info(arguments):
    from fastmha._terminal import open_terminal
    from fastmha.bench import cpu_model, versions

    config = fastmha.show_config(mode="dicts")
    terminal = open_terminal()
    terminal.heading(f"fastmha {config['version']}")
    _pairs(
        terminal,
        {
            "compiler": f"{config['compiler']}, Cython {config['cython']}, for {config['host']}",
            "options": config["c_args"],
            "vectors": f"{config['vector_bytes']} bytes, multiply-adds "
            + ("fused" if config["fused"] else "not fused: other last bits than fused builds"),
        },
    )
    terminal.heading("Processor")
    features = _features()
    wanted = [name for names in _NEEDS.values() for name in names] + list(_NOTED)
    found = [name for name in wanted if name in features] or ["not told by this system"]
    _pairs(terminal, {"model": cpu_model(), "features": " ".join(found)})
    terminal.heading("Kernels")
    _pairs(terminal, _kernels(config, features))
    terminal.heading("Threads")
    _pairs(terminal, {"number": f"{config['num_threads']}, {_thread_source()}"})
    terminal.heading("Beside it")
    _pairs(terminal, {k: v for k, v in versions().items() if k != "fastmha"})
    return 0


def _pairs(terminal, pairs):
    width = max(map(len, pairs))
    for name, value in pairs.items():
        terminal.line(f"{name:<{width}}  {value}")


def _features():
    """The processor's features as Linux lists them; elsewhere none."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return set()
    return {
        word
        for name, _, value in lines
        if name.strip() in ("flags", "Features")
        for word in value.split()
    }


def _kernels(config, features):
    """What became of each instruction set that this fastmha has kernels for, and why."""
    from fastmha import _build_config

    fates = {}
    for isa in _build_config.ISAS:
        if isa == config["isa"]:
            forced = os.environ.get("FASTMHA_ISA")
            fates[isa] = "in use: " + (
                "FASTMHA_ISA asks for it" if forced else "the widest that runs here"
            )
        elif isa in config["isas"]:
            fates[isa] = f"runs here; FASTMHA_ISA={isa} chooses it"
        else:
            missing = [name for name in _NEEDS.get(isa, ()) if name not in features]
            fates[isa] = "does not run here: " + (
                f"the processor has no {', '.join(missing)}"
                if features and missing
                else "the processor or its operating system lacks what it needs"
            )
    return fates


def _thread_source():
    """Where the number of threads comes from; the order is that of `_threads`."""
    from fastmha import _threads

    for variable in ("FASTMHA_NUM_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(variable, "")
        first = text.split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return f"from {variable}={text}"
    cpus, quota = _threads._usable_cpus(), _threads._quota_cpus()
    if quota and quota < cpus:
        return f"from the container's quota; the process may run on {cpus} CPUs"
    return f"as many as the CPUs this process may run on (the machine has {os.cpu_count()})"


if __name__ == "__main__":
    sys.exit(main())
