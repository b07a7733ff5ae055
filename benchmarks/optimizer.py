"""How fast the host optimizer updates parameters, by threads and format of moments, and torch's fused kernel.

    python benchmarks/optimizer.py --params 200 --threads 1,2,4 --json benchmarks/results/optimizer.json

bfloat16 gradients and working weights, masters in two halves; float32 moments, and of the one pass those of
fewer bytes, too. GB/s counts the bytes a parameter that one pass has to move, 26 with float32 moments, whatever
the way. Each figure is the median of its repetitions; the ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import machine, write_record
from torch.optim.adamw import adamw

from rpft.optim.one_pass import SPARE_CORES, CompiledPass, FusedPass, OnePass, prepare, scratch
from rpft.optim.threads import openmp_threads, thread_counts

BYTES_PER_PARAM = {"update": 26, "update, bf16": 18, "update, 8bit": 14, "square sum": 2}


def fused_with_copies(num_params: int) -> Callable[[], None]:
    """torch's fused kernel over whole tensors, with a float32 gradient and a rounding beside it."""
    wide, master, exp_avg, exp_avg_sq = (torch.ones(num_params) for _ in range(4))
    gradient, working = (torch.ones(num_params, dtype=torch.bfloat16) for _ in range(2))

    def run() -> None:
        adamw(
            [master],
            [wide.copy_(gradient)],
            [exp_avg],
            [exp_avg_sq],
            [],
            [torch.tensor(0.0)],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=1e-3,
            weight_decay=0.01,
            eps=1e-8,
            maximize=False,
        )
        working.copy_(master)

    return run


def ways(kernels: OnePass, num_params: int) -> dict[tuple[str, str], Callable[[], object]]:
    """What is measured, by (name, kind of work)."""
    gradient = torch.ones(num_params, dtype=torch.bfloat16)
    return {
        ("one pass", "update"): scratch(kernels, num_params),
        ("one pass, bf16 moments", "update, bf16"): scratch(CompiledPass("bf16"), num_params),
        ("one pass, 8bit moments", "update, 8bit"): scratch(CompiledPass("8bit"), num_params),
        ("fused in blocks (the fallback)", "update"): scratch(FusedPass(), num_params),
        ("fused + copies", "update"): fused_with_copies(num_params),
        ("square sum", "square sum"): lambda: kernels.square_sum([gradient]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--params", type=float, default=100, help="millions of parameters (16 bytes each, six times)"
    )
    parser.add_argument(
        "--threads", help="numbers of threads, as 1,2,4; default: those that rpft itself would try"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    num_params = int(arguments.params * 1e6)
    counts = (
        [int(count) for count in arguments.threads.split(",")] if arguments.threads else thread_counts(SPARE_CORES)
    )

    started = time.perf_counter()
    kernels = CompiledPass()
    compiling = time.perf_counter() - started
    started = time.perf_counter()
    chosen = prepare().num_threads
    choosing = time.perf_counter() - started
    where = machine(["CPU"])
    print(f"{where}\ncompiled or loaded in {compiling:.1f} s; {chosen} threads chosen in {choosing:.1f} s")

    work = ways(kernels, num_params)
    results = [
        {"case": "one pass", "metric": "compiling or loading", "value": round(compiling, 2), "unit": "s"},
        {"case": "one pass", "metric": "threads chosen", "value": chosen, "unit": ""},
    ]
    for count in counts:
        seconds: dict[tuple[str, str], list[float]] = {way: [] for way in work}
        for repeat in range(arguments.repeats + 1):
            for way, run in work.items():
                with openmp_threads(count):
                    started = time.perf_counter()
                    run()
                    if repeat > 0:  # the first touches memory and starts threads
                        seconds[way].append(time.perf_counter() - started)
        for (name, kind), taken in seconds.items():
            rate = num_params / statistics.median(taken) / 1e9
            bandwidth = rate * BYTES_PER_PARAM[kind]
            print(f"{count:3} threads  {name:31} {rate:6.2f} G params/s  {bandwidth:6.1f} GB/s", flush=True)
            results.append(
                {
                    "case": f"{name}, {count} threads",
                    "metric": "median",
                    "value": round(rate, 3),
                    "unit": "G params/s",
                }
            )
    if arguments.json is not None:
        write_record(arguments.json, "optimizer", where, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
