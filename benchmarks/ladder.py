"""What each step gains: textbook NumPy, the fused kernels of each instruction set, all threads.

    python benchmarks/ladder.py            # a table in Markdown
    python benchmarks/ladder.py --rounds 9

An instruction set is chosen when fastmha is imported, so each rung runs in processes of its own. They take
turns, a round each, and medians are shown: times as fast as NumPy on one thread, and as the rung before.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

CASES = {  # title: (B, H, G, L, S, D, causal)
    "full, (1, 8, 1024, 64)": (1, 8, 8, 1024, 1024, 64, False),
    "causal, (1, 8, 1024, 64)": (1, 8, 8, 1024, 1024, 64, True),
    "decoding, 32 heads on 8, 4096 keys": (1, 32, 8, 1, 4096, 128, False),
}


def main(argv=None):
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description="What each step gains.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rung", nargs=2, metavar=("ISA", "THREADS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.rung:
        print(json.dumps(times(arguments.rung[0], int(arguments.rung[1]))))
        return 0
    import fastmha

    config = fastmha.show_config(mode="dicts")
    isas, most = config["isas"], config["num_threads"]
    rungs = {"NumPy, all scores in memory": ("numpy", 1)}
    rungs |= {f"fused, {isa}": (isa, 1) for isa in isas}
    if most > 1:
        rungs[f"{most} threads"] = (isas[-1], most)
    rounds = [{name: measured(*rung) for name, rung in rungs.items()} for _ in range(arguments.rounds)]
    print("| | " + " | ".join(CASES) + " |\n|---" + "|---" * len(CASES) + "|")
    before = first = None
    for name in rungs:
        now = [statistics.median(r[name][i] for r in rounds) for i in range(len(CASES))]
        first, before = first or now, before or now
        cells = (f"{a / c:.1f}x ({b / c:.1f}x)" for a, b, c in zip(first, before, now, strict=True))
        print(f"| {name} | " + " | ".join(cells) + " |")
        before = now
    return 0


def measured(isa, threads):
    """Seconds of each case on one rung, in a process of its own."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": str(threads), "FASTMHA_NUM_THREADS": str(threads)}
    if isa != "numpy":
        environment["FASTMHA_ISA"] = isa
    command = [sys.executable, __file__, "--rung", isa, str(threads)]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)


def times(isa, threads):
    """Seconds of each case: the least of some calls."""
    import numpy as np

    import fastmha
    from fastmha._bench_rivals import textbook

    random = np.random.default_rng(0)
    found = []
    for B, H, G, L, S, D, causal in CASES.values():
        q = random.standard_normal((B, H, L, D), np.float32)
        k, v = (random.standard_normal((B, G, S, D), np.float32) for _ in range(2))
        mask = np.tri(L, S, dtype=bool) if causal else None

        def call(q=q, k=k, v=v, mask=mask, causal=causal, group=H // G):
            if isa != "numpy":
                return fastmha.attention(q, k, v, causal=causal)
            return textbook(q, k.repeat(group, 1), v.repeat(group, 1), mask)

        fastmha.set_num_threads(threads)
        call()
        spent = []
        for _ in range(5):
            begin = time.perf_counter()
            call()
            spent.append(time.perf_counter() - begin)
        found.append(min(spent))
    return found


if __name__ == "__main__":
    sys.exit(main())
