"""What it takes the interpreter to issue a layer: processor time of a thread that runs layers of next to no work.

    python benchmarks/issuing.py [--lora 16] [--quantize nf4] [--kernels compile] [--calls 200] [--json FILE]
    python benchmarks/issuing.py --engine [--json FILE]

All workers' threads share one interpreter, so that this, times the workers, bounds how short a layer may be. The
layers are those of a Llama of hidden size 64 with 8 tokens on the CPU, in full or with adapters on every
projection; what is left of the work itself is in the figures. Each is the least of several turns of calls.

``--engine``: what the engine takes around the layers instead. A step of 32 blocks is queued for workers that only
take time (paused_device.py): processor time of the thread that queues it, over the tasks that the workers' streams
were given, the least of several steps. A task that does nothing, handed over and carried out: of the process.
The update of a small layer, in full, with LoRA r16 and with LoRA+: of the thread that makes it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from many_workers import Case
from many_workers import prepare as prepare_workers
from paused_device import Lengths
from random_job import DTYPE, Step, make_job, make_recipe, random_store
from record import machine, write_record

from rpft.engine.controller import Ticket, Update, WeightVersion
from rpft.engine.failure import Failure
from rpft.engine.losses import Losses
from rpft.engine.places import Places
from rpft.engine.streams import Delays, Event, Stream, happened
from rpft.model.device_batch import DeviceBatch
from rpft.model.functions import LayerFunctions
from rpft.model.host_store import HostStore
from rpft.optim.adamw import AdamW
from rpft.optim.host_optimizer import HostOptimizer
from rpft.optim.one_pass import prepare
from rpft.optim.schedule import Schedule
from rpft.plan.plan import Stage
from rpft.plan.sizes import region_starts
from rpft.train.bench import idle_machinery
from rpft.train.flight import Flight
from rpft.train.machinery import Machinery

_PRESET, _VOCABULARY, _HIDDEN, _TOKENS = "tiny-32", 512, 64, 8
_TURNS = 5
_CALLS = 30
"""Updates, of which the quickest counts."""
_FIXED = {
    "preset": _PRESET,
    "targets": "all-linear",
    "state": "fp32",
    "device": "cpu",
    "recompute": "layer",
    "vram_limit": 24,
    "ram_limit": None,
    "deterministic": False,
}
_BLOCK = 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains every weight")
    parser.add_argument("--quantize", choices=("none", "nf4", "int8", "fp8"), default="none")
    parser.add_argument("--kernels", choices=("eager", "trace", "compile"), default="compile")
    parser.add_argument("--calls", type=int, default=200, help="of a turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", action="store_true", help="what the engine takes around the layers")
    parser.set_defaults(**_FIXED)
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


def queueing(workers: int, microbatches: int) -> float:
    """Seconds a task to queue a step."""
    case = Case(workers, microbatches, "sync", Lengths(2e-3, 14e-3))
    prepared = prepare_workers(case, 0.1, 0.2)
    machinery = idle_machinery(prepared, random_store(prepared), Failure())
    batches = Flight(1, prepared.data.step(1)).host_batches()
    machinery.start()
    turns = []
    try:
        for step in range(1, 2 + _TURNS):  # the first finds what later ones know
            done, begun = _tasks(machinery), time.thread_time()
            machinery.engine.submit_step(step, batches)
            seconds = time.thread_time() - begun
            machinery.rest()
            machinery.optimizer.wait(step)
            turns.append(seconds / (_tasks(machinery) - done))
    finally:
        machinery.close()
    return min(turns[1:])


def _tasks(machinery: Machinery) -> int:
    return sum(stream.tasks_done for stream in machinery.engine.streams)


def handing_over(count: int) -> float:
    """Seconds of the process a task that does nothing."""
    failure = Failure()
    stream = Stream("a stream", failure, Delays(None))

    def hand_over() -> float:
        begun = time.process_time()
        for _ in range(count):
            stream.run(_nothing, "a task")
        stream.record(Event()).synchronize(failure)
        return (time.process_time() - begun) / count

    found = min(hand_over() for _ in range(_TURNS))
    stream.close()
    stream.join(5.0)
    return found


def _nothing() -> None: ...


def updating(rank: int, ratio: float) -> float:
    """Seconds of the optimizer's thread a block. Its norm is known, and so is its place in the host store."""
    step = Step(1, _TOKENS, 1, 0)
    given = argparse.Namespace(**(_FIXED | {"lora": rank, "quantize": "none", "kernels": "eager"}))
    job = make_job(make_recipe(given, step, "sync", 1, 0), step)
    store = HostStore(job.layouts, gradient_dtype=DTYPE)
    schedule = Schedule("constant", 1e-4, 10**6)
    algorithm = AdamW(weight_decay=0.01, fast_ratio=ratio)
    kernels = prepare(num_threads=1)
    optimizer = HostOptimizer(store, algorithm, schedule, 1.0, Failure(), Delays(None), kernels=kernels)
    layers, turns = len(store.layers), []
    for number in range(1, 2 + _CALLS):
        squares = torch.zeros(layers, dtype=torch.float64)
        read, written = ([Event() for _ in store.layers] for _ in range(2))
        ticket = Ticket(number, 100, [happened()] * layers, read, Losses(), squares)
        before = WeightVersion.of(0, [happened()] * layers)
        update = Update(ticket, before, WeightVersion.of(0, written), before)
        begun = time.thread_time()
        optimizer._apply(update)
        turns.append((time.thread_time() - begun) / job.skeleton.num_blocks)
    optimizer.close()
    optimizer.join(5.0)
    return min(turns[1:])


def engine_calls() -> dict[str, Callable[[], float]]:
    """Seconds, by what takes them."""
    return {
        "a step queued, 1 worker of 3 microbatches, a task": lambda: queueing(1, 3),
        "a step queued, 8 workers of 9 microbatches, a task": lambda: queueing(8, 9),
        "a task that does nothing": lambda: handing_over(10_000),
        "the update of a block": lambda: updating(0, 1.0),
        "the update of a block, LoRA": lambda: updating(16, 1.0),
        "the update of a block, LoRA+": lambda: updating(16, 16.0),
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
    if arguments.engine:
        case, found = "engine", engine_calls()
    else:
        timed = calls(arguments)
        found = {name: partial(least_seconds, call, arguments.calls) for name, call in timed.items()}
    for name, seconds in found.items():
        value = round(1e6 * seconds(), 1)
        print(f"| {name} | {value} |", flush=True)
        results.append({"case": case, "metric": name, "value": value, "unit": "us"})
    if arguments.json is not None:
        write_record(arguments.json, "issuing", machine(["CPU"]), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
