"""What it takes the interpreter to issue a layer: processor time of a thread that runs layers of next to no work.

    python benchmarks/issuing.py [--lora 16] [--quantize nf4] [--kernels compile] [--calls 200] [--json FILE]

All workers' threads share one interpreter, so that this, times the workers, bounds how short a layer may be. The
layers are those of a Llama of hidden size 64 with 8 tokens on the CPU, in full or with adapters on every
projection; what is left of the work itself is in the figures. Each is the least of several turns of calls.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from random_job import DTYPE, Step, make_job, make_recipe
from record import machine, write_record

from rpft.engine.places import Places
from rpft.model.device_batch import DeviceBatch
from rpft.model.functions import LayerFunctions
from rpft.plan.plan import Stage
from rpft.plan.sizes import region_starts

_PRESET, _VOCABULARY, _HIDDEN, _TOKENS = "tiny-32", 512, 64, 8
_TURNS = 5
_BLOCK = 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains every weight")
    parser.add_argument("--quantize", choices=("none", "nf4", "int8", "fp8"), default="none")
    parser.add_argument("--kernels", choices=("eager", "trace", "compile"), default="compile")
    parser.add_argument("--calls", type=int, default=200, help="of a turn")
    parser.add_argument("--json", type=Path)
    fixed = {"preset": _PRESET, "targets": "all-linear", "state": "fp32", "device": "cpu", "recompute": "layer"}
    parser.set_defaults(**fixed, vram_limit=24, ram_limit=None, deterministic=False)
    return parser.parse_args()


def calls(arguments: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    step = Step(1, _TOKENS, 1, 0)
    job = make_job(make_recipe(arguments, step, "sync", 1, 0), step)
    functions = LayerFunctions(job.skeleton, torch.device("cpu"), DTYPE, arguments.kernels)
    stage = Stage(0, _BLOCK)
    ends = [region_starts(job.layouts, Stage(0, last))[last] for last in (_BLOCK, _BLOCK + 1)]
    buffer = torch.zeros(ends[1][0], dtype=torch.uint8)
    flat = torch.zeros(ends[1][1])
    found = Places(job.layouts, {})
    weights, sums = found.weights(stage, buffer), found.sums(stage, flat)
    ids = torch.randint(0, _VOCABULARY, (1, _TOKENS))
    batch = DeviceBatch(ids, None, torch.arange(_TOKENS), ids.flatten())
    hidden, grad = (torch.randn(1, _TOKENS, _HIDDEN, dtype=DTYPE) for _ in range(2))

    def backward() -> None:
        _, kept = functions.keep(
            _BLOCK, hidden, weights[_BLOCK], batch, None, frozenset(sums[_BLOCK]), True, with_output=False
        )
        kept.backward(grad, sums[_BLOCK])

    return {
        "embedding": lambda: functions.forward(0, None, weights[0], batch, None),
        "forward of a block": lambda: functions.forward(_BLOCK, hidden, weights[_BLOCK], batch, None),
        "recompute and backward of a block": backward,
        "tensors of two layers found": lambda: (found.weights(stage, buffer), found.sums(stage, flat)),
        "dropout on": lambda: functions.train(True),
    }


def least_seconds(call: Callable[[], object], count: int) -> float:
    """Processor seconds of the thread a call."""
    call()
    turns = []
    for _ in range(_TURNS):
        begun = time.thread_time()
        for _ in range(count):
            call()
        turns.append((time.thread_time() - begun) / count)
    return min(turns)


def main() -> int:
    arguments = parse()
    torch.set_num_threads(1)
    trained = f"LoRA r{arguments.lora}" if arguments.lora else "full"
    case = f"{trained}, {arguments.quantize}, {arguments.kernels}"
    results = []
    print("| call | microseconds |\n|---|---|")
    for name, call in calls(arguments).items():
        value = round(1e6 * least_seconds(call, arguments.calls), 1)
        print(f"| {name} | {value} |", flush=True)
        results.append({"case": case, "metric": name, "value": value, "unit": "us"})
    if arguments.json is not None:
        write_record(arguments.json, "issuing", machine(["CPU"]), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
