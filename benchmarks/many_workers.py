"""What the engine itself takes with many workers, on a machine that has none: layers and transfers only take time.

    python benchmarks/many_workers.py [--forward 20,5,2] [--workers 1,2,4,8] [--extra 0,1] [--update sync,delayed]
        [--operations 0] [--upload 0.1] [--optimizer 0.2] [--head 7] [--steps 8] [--trace FOLDER] [--json FILE]

Planner, controller, workers' threads, events and optimizer are those of a run on GPUs; the devices are those of
paused_device.py. Each case is planned from the lengths of its layers and then run, M = workers + --extra. Measured
are a step, how long workers stood still by the engine's own trace, processor time by kind of thread, and how late
a thread wakes up that wants the interpreter once in a millisecond, beside one of another process, which needs none
of it. A prediction is of the long run: the first step, which fills the pipeline, is not counted.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from paused_device import Lengths, PausedDevice, PausedFunctions, PausedPass
from random_job import Step, make_job, make_recipe, random_store
from record import machine, write_record
from throughput import numbers

from rpft.engine.engine import Engine
from rpft.engine.failure import Failure
from rpft.engine.idle import idle_by_cause, idle_table
from rpft.engine.streams import Stream
from rpft.engine.trace import Trace
from rpft.engine.tracer import Tracer
from rpft.model.functions import LayerFunctions
from rpft.plan.predict import Prediction
from rpft.plan.profile import LayerProfile
from rpft.plan.profile_file import Beside, KindProfile, Profile
from rpft.train.bench import idle_machinery, timed_steps
from rpft.train.flight import Flight
from rpft.train.job import Job
from rpft.train.machinery import Machinery
from rpft.train.measuring import Workbench
from rpft.train.prepare import Prepared, plan_here

_SEQUENCE = 64
_PROBE_SECONDS = 1e-3
_WARM_STEPS = 3
_TRACED_STEPS = 3

_PROBE = f"""
import sys, threading, time
late = []
def look():
    while True:
        begun = time.perf_counter()
        time.sleep({_PROBE_SECONDS})
        late.append(time.perf_counter() - begun - {_PROBE_SECONDS})
threading.Thread(target=look, daemon=True).start()
sys.stdin.read()
print(sum(late) / len(late))
"""


@dataclass(frozen=True)
class Case:
    """One run."""

    workers: int
    microbatches: int
    update: str
    lengths: Lengths

    def __str__(self) -> str:
        issue = f", {self.lengths.operations} operations to issue one" if self.lengths.operations else ""
        return (
            f"{self.workers} worker(s), M = {self.microbatches}, {self.update},"
            f" forward {self.lengths.forward * 1e3:g} ms{issue}"
        )


@dataclass(frozen=True)
class Found:
    """What one run took."""

    workers: int
    step_seconds: float
    prediction: Prediction
    bubble: float
    """Share of the workers' time in which they did not compute, by the trace."""
    traced_seconds: float
    """Of a step while it was traced."""
    slots: int
    """Of a step."""
    tasks: int
    """Of the workers' streams, a step."""
    cpu_seconds: dict[str, float]
    """Of a step, by kind of thread."""
    late: float
    """How late a thread of this process woke up on average, in seconds."""
    late_elsewhere: float
    """The same of another process."""

    @property
    def at_once(self) -> float:
        """Workers that would do the same if they never stood still.

        One alone is no measure: with memory for everything it would recompute nothing.
        """
        busy = self.prediction.step_seconds * (1 - self.prediction.bubble)
        return self.workers * busy / self.step_seconds

    @property
    def longer(self) -> float:
        """By how much a step was longer than predicted, as a share."""
        return self.step_seconds / self.prediction.step_seconds - 1


def make_profile(job: Job, lengths: Lengths, link: float, updates: float) -> Profile:
    """What ``rpft profile`` would have found of the paused devices. ``updates``: parameters a second."""
    last = len(job.layouts) - 1
    kinds = [
        ("embedding", (0,), LayerProfile(0.0, 0.0, 0, 0)),
        ("block", tuple(range(1, last)), LayerProfile(lengths.forward, 3 * lengths.forward, 0, 0)),
        ("head", (last,), LayerProfile(lengths.head / 3, lengths.head, 0, 0)),
    ]
    return Profile(
        {"sequence": _SEQUENCE, "state": "fp32"},
        tuple(KindProfile(name, layers, 0, 0, 0, measured) for name, layers, measured in kinds),
        ((link, link),),
        (),
        updates,
        Beside(updates, link, link),  # neither takes anything from the other
    )


def prepare(case: Case, upload: float, optimizer: float) -> Prepared:
    """Plans ``case`` as ``rpft train`` does. ``upload``, ``optimizer``: see --upload and --optimizer."""
    step = Step(case.microbatches, _SEQUENCE, case.microbatches, 0)
    recipe = make_recipe(_arguments(), step, case.update, case.workers, 0)
    job = make_job(recipe, step)
    link = job.layouts[1].region_bytes / (upload * case.microbatches * case.lengths.forward)
    devices = [PausedDevice(number, link) for number in range(case.workers)]
    blocks, trained = job.skeleton.num_blocks, sum(layout.num_trained for layout in job.layouts)
    even = case.microbatches * (4 * blocks * case.lengths.forward + case.lengths.head) / case.workers
    updates = trained / (optimizer * even)
    size = job.skeleton.model.config.get_text_config().hidden_size
    functions = [PausedFunctions(d, blocks, size, job.dtype, case.lengths) for d in devices]
    bench = Workbench(job, [*devices], cast("list[LayerFunctions]", functions), PausedPass(updates))
    return plan_here(bench, make_profile(job, case.lengths, link, updates))


def _arguments() -> argparse.Namespace:
    return argparse.Namespace(
        preset="tiny-32",
        lora=0,
        targets="all-linear",
        quantize="none",
        state="fp32",
        device="cpu",
        vram_limit=24.0,
        ram_limit=None,
        kernels="eager",
        recompute="layer",
        deterministic=False,
    )


class Meter:
    """Processor time by kind of thread, and how late threads wake up, from ``start`` to ``stop``."""

    def __init__(self, machinery: Machinery) -> None:
        self._clocks = {"controller": time.pthread_getcpuclockid(threading.get_ident())}
        self._kinds = {"controller": "controller"}
        for stream in machinery.streams():
            ident = stream.thread_id
            assert ident is not None
            self._clocks[stream.name] = time.pthread_getcpuclockid(ident)
            self._kinds[stream.name] = stream.name.partition(" ")[2] or stream.name
        self._late: list[float] = []
        self._over = threading.Event()
        self._probe = threading.Thread(target=self._look, daemon=True)
        self._elsewhere = subprocess.Popen(
            [sys.executable, "-c", _PROBE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _look(self) -> None:
        while not self._over.is_set():
            begun = time.perf_counter()
            time.sleep(_PROBE_SECONDS)
            self._late.append(time.perf_counter() - begun - _PROBE_SECONDS)

    def start(self) -> None:
        self._begun, self._process = self._read(), time.process_time()
        self._probe.start()

    def stop(self) -> tuple[dict[str, float], float, float]:
        """(processor seconds by kind of thread, mean lateness here, mean lateness in another process)."""
        self._over.set()
        self._probe.join()
        whole = time.process_time() - self._process
        spent: dict[str, float] = defaultdict(float)
        for name, seconds in self._read().items():
            spent[self._kinds[name]] += seconds - self._begun[name]
        spent["others"] = whole - sum(spent.values())
        elsewhere, _ = self._elsewhere.communicate("")
        return dict(spent), statistics.mean(self._late), float(elsewhere)

    def _read(self) -> dict[str, float]:
        return {name: time.clock_gettime(clock) for name, clock in self._clocks.items()}


def run(case: Case, upload: float, optimizer: float, steps: int) -> tuple[Found, Trace]:
    """Warms up, times ``steps``, traces a few more."""
    prepared = prepare(case, upload, optimizer)
    prediction = prepared.prediction()
    assert prediction is not None
    failure = Failure()
    machinery = idle_machinery(prepared, random_store(prepared), failure)
    batches = Flight(1, prepared.data.step(1)).host_batches()
    machinery.start()
    try:
        timed_steps(machinery, range(1, 1 + _WARM_STEPS), lambda step: batches)
        Engine.settle()
        meter, first = Meter(machinery), 1 + _WARM_STEPS
        done = _tasks(machinery.engine.streams)
        meter.start()
        seconds = timed_steps(machinery, range(first, first + 1 + steps), lambda step: batches)
        spent, late, elsewhere = meter.stop()
        done = _tasks(machinery.engine.streams) - done
        trace = _traced(machinery, first + 1 + steps, batches)
    finally:
        machinery.close()
    accounts = idle_by_cause(trace)
    busy = sum(account.busy_seconds for account in accounts)
    found = Found(
        case.workers,
        statistics.mean(seconds[1:]),
        prediction,
        1 - busy / sum(account.window_seconds for account in accounts),
        (trace.end_seconds - trace.start_seconds) / _TRACED_STEPS,
        prepared.plan.num_slots,
        round(done / (1 + steps)),
        {kind: value / (1 + steps) for kind, value in spent.items()},
        late,
        elsewhere,
    )
    return found, trace


def _tasks(streams: Sequence[Stream]) -> int:
    return sum(stream.tasks_done for stream in streams)


def _traced(machinery: Machinery, first: int, batches: Sequence[Any]) -> Trace:
    """Whole steps in the middle of some."""
    tracer = Tracer(machinery.streams())
    tracer.start()
    timed_steps(machinery, range(first, first + _TRACED_STEPS + 2), lambda step: batches)
    trace = tracer.stop()
    ends = trace.step(first + 1).start_seconds, trace.step(first + _TRACED_STEPS).end_seconds
    return trace.between(*ends)


def figures(case: Case, found: Found, load: float) -> list[dict[str, Any]]:
    """The figures of a case for the record."""
    values = [
        ("seconds a step, measured", found.step_seconds, "s"),
        ("seconds a step, predicted", found.prediction.step_seconds, "s"),
        ("measured over predicted, seconds a step", 100 * found.longer, "%"),
        ("seconds a step, traced", found.traced_seconds, "s"),
        ("workers idle, measured", 100 * found.bubble, "%"),
        ("workers idle, predicted", 100 * found.prediction.bubble, "%"),
        ("workers that would do as much if never idle", found.at_once, ""),
        ("slots a step", found.slots, ""),
        ("tasks of the workers' streams a step", found.tasks, ""),
        *((f"processor time a step, {kind}", value, "s") for kind, value in found.cpu_seconds.items()),
        ("a thread wakes up late by", 1e3 * found.late, "ms"),
        ("a thread of another process wakes up late by", 1e3 * found.late_elsewhere, "ms"),
        ("load average before", load, "processes"),
    ]
    return [
        {"case": str(case), "metric": name, "value": round(value, 5), "unit": unit} for name, value, unit in values
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward", type=_reals, default=[20.0, 5.0, 2.0], help="of a block, in ms a microbatch")
    parser.add_argument(
        "--head", type=float, default=7.0, help="forward, loss and backward, in forwards of a block"
    )
    parser.add_argument("--workers", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--extra", type=numbers, default=[0, 1], help="microbatches beside one a worker")
    parser.add_argument("--update", type=lambda text: text.split(","), default=["sync", "delayed"])
    parser.add_argument(
        "--operations", type=numbers, default=[0], help="of torch, that issue a forward; see Lengths"
    )
    parser.add_argument(
        "--upload", type=float, default=0.1, help="of a block's weights, in forwards of all microbatches"
    )
    parser.add_argument("--optimizer", type=float, default=0.2, help="of an even step, that the update takes")
    parser.add_argument("--steps", type=int, default=8, help="timed, beside the one that fills the pipeline")
    parser.add_argument("--idle", action="store_true", help="print what workers stood still for")
    parser.add_argument("--trace", type=Path, help="folder for a Chrome trace of each case")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _reals(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main() -> int:
    arguments = parse()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    print(
        "| case | step, ms | predicted | | idle | predicted | at once | slots | µs of CPU a task | cores"
        " | late, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    grid = product(arguments.operations, arguments.forward, arguments.update, arguments.extra, arguments.workers)
    for operations, forward, update, extra, workers in grid:
        lengths = Lengths(forward / 1e3, arguments.head * forward / 1e3, operations)
        case = Case(workers, workers + extra, update, lengths)
        load = os.getloadavg()[0]
        found, trace = run(case, arguments.upload, arguments.optimizer, arguments.steps)
        cpu = sum(found.cpu_seconds.values())
        print(
            f"| {case} | {found.step_seconds * 1e3:.1f} | {found.prediction.step_seconds * 1e3:.1f} |"
            f" {found.longer:+.1%} |"
            f" {found.bubble:.1%} | {found.prediction.bubble:.1%} | {found.at_once:.2f} | {found.slots} |"
            f" {cpu / found.tasks * 1e6:.0f} | {cpu / found.step_seconds:.2f} |"
            f" {found.late * 1e3:.2f} ({found.late_elsewhere * 1e3:.2f}) |",
            flush=True,
        )
        if arguments.idle:
            print("\n".join(idle_table(idle_by_cause(trace))), flush=True)
            print({kind: f"{value * 1e3:.1f} ms" for kind, value in found.cpu_seconds.items()}, flush=True)
        if arguments.trace is not None:
            arguments.trace.mkdir(parents=True, exist_ok=True)
            name = f"{workers}_{case.microbatches}_{update}_{forward:g}ms_{operations}.json"
            trace.write_chrome_trace(arguments.trace / name)
        results += figures(case, found, load)
        if arguments.json is not None:
            write_record(arguments.json, "many_workers", machine(["worker of pauses"] * workers), results)
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
