"""What saving costs a run of real size, and whether one that was killed goes on as if it had not been.

    python benchmarks/checkpoints.py qwen3-1.7b [--steps 6] [--every 2] [--folder FOLDER] [--json FILE]
        [--update delayed] [--lora R] [--rows 8 --sequence 2048 --microbatches 2] [--copies GIB] [--disk GB/s]

Random weights, random tokens, deterministic kernels. Three processes, one after another: one trains to the end
without saving; one saves every few steps until it is killed in mid-step (kill -9) once a checkpoint is whole; one
goes on from there. Its last loss, and its masters and moments, must be those of the first. The disk of the folder
(by default that of temporary files) needs room for two checkpoints, each of 12 bytes a trained parameter.

What of a save is not written when its next update comes is copied: into as much RAM as the plan leaves free, or
into --copies of it. "Longer in all" is by how much the steps from the save to the kill took longer than as many of
the median before it, so that it also has what copying and writing cost the machine. --disk slows the writing down
to that rate, as on a slower disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from random_job import Step, gpu_names
from record import machine, write_record
from throughput import Model, Run, add_model_arguments

from rpft import files
from rpft.engine.slot import HostBatch
from rpft.model.host_layer import HostLayer
from rpft.optim.host_optimizer import UpdateResult
from rpft.plan.bill import gib
from rpft.train.bench import timed_steps
from rpft.train.checkpoint import CheckpointFolder, TrainState, read_state
from rpft.train.checkpoint_layers import restore
from rpft.train.flight import Flight
from rpft.train.saver import SaveReport

_LONG_INTERVAL_SECONDS = 1800
"""For which the share of a stall is given beside that of this run's interval."""
_DIGEST_THREADS = 8
_MANY_STEPS = 10**6
"""Of the run that is killed: as many as it takes until a checkpoint is whole."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=2, help="of a step, all in one round")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=2, help="steps between saves")
    parser.add_argument("--update", choices=["sync", "delayed"], default="sync")
    parser.add_argument("--copies", type=float, help="GiB of RAM for copies at most; default: what is free")
    parser.add_argument("--disk", type=float, help="GB/s that are written at most")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=["unbroken", "killed", "resumed"], help=argparse.SUPPRESS)
    parser.set_defaults(deterministic=True, kernels="eager")
    return parser.parse_args()


# -- a process that trains ---------------------------------------------------------------------------------


def tell(**event: Any) -> None:
    """A line for the process that looks on."""
    print(json.dumps(event), flush=True)


class Training:
    """The run of one process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        shape = arguments.rows, arguments.sequence, arguments.microbatches
        self.step = Step(*shape, _MANY_STEPS if arguments.part == "killed" else arguments.steps)
        self.model = Model(arguments, self.step)
        checkpoints = CheckpointFolder(arguments.folder, keep_last=1, keep_best=False)
        resumed_from = checkpoints.newest() if arguments.part == "resumed" else None
        self.before = 0 if resumed_from is None else read_state(resumed_from).step
        self.run = Run(self.model, self.step, arguments.update, arguments.workers[0], steps_before=self.before)
        self.saver = self.run.machinery.saver
        most = sys.maxsize if arguments.copies is None else int(arguments.copies * 2**30)
        self.copies_bytes = min(self.run.prepared.copies_bytes, most)
        if resumed_from is not None:
            restore(resumed_from, self.model.store, lagging=arguments.update == "delayed")
        self.run.start()

    def train(self) -> None:
        """All steps that are left."""
        steps = range(self.before + 1, self.step.timed + 1)
        # No more ahead than one: a step is armed when no later one is under way.
        timed_steps(self.run.machinery, steps, self._batches, self._ended, ahead=1)
        self.run.close()

    def _batches(self, step: int) -> list[HostBatch]:
        tell(submitted=step)
        return Flight(step, self.run.prepared.data.step(step)).host_batches()

    def _ended(self, result: UpdateResult, seconds: float) -> None:
        """Saves as ``rpft train`` does, where this process is to: the step that ended, or the one under way."""
        step = result.step
        tell(step=step, loss=result.loss_sum / (self.step.rows * (self.step.sequence - 1)), seconds=seconds)
        if self.arguments.part == "killed":
            if step == 1:
                self.saver.take_memory(self.copies_bytes, self.run.prepared.target.ram_reserve_bytes)
            if self.saver.armed_step == step:
                self.saver.start(TrainState(step, step, 0, 0, None, None, {"engine": {}}, {}))
            if (step + 1) % self.arguments.every == 0:
                self.saver.arm(step + 1)
            self._tell_of_saves(self.saver.take_reports())

    @staticmethod
    def _tell_of_saves(reports: list[SaveReport]) -> None:
        for report in reports:
            if report.error is not None:
                raise report.error
            tell(
                saved=report.step,
                bytes=report.num_bytes,
                took=report.seconds,
                stalled=report.stall_seconds,
                copied=report.copied_bytes,
            )


def digest(layers: list[HostLayer]) -> str:
    """SHA-256 of all masters and moments."""

    def of(layer: HostLayer) -> bytes:
        found = hashlib.sha256()
        for flat in (layer.master_values(), layer.exp_avg, layer.exp_avg_sq):
            found.update(flat.contiguous().view(torch.uint8).numpy().data)
        return found.digest()

    with ThreadPoolExecutor(_DIGEST_THREADS) as pool:
        return hashlib.sha256(b"".join(pool.map(of, layers))).hexdigest()


def slow_down(rate: float) -> None:
    """Writes no more than ``rate`` bytes a second from now on."""
    write = files.write

    def slowly(file: BinaryIO, data: bytes | memoryview) -> None:
        until = time.monotonic() + len(data) / rate
        write(file, data)
        time.sleep(max(0.0, until - time.monotonic()))

    files.write = slowly


def train_part(arguments: argparse.Namespace) -> int:
    """One of the three processes."""
    began = time.perf_counter()
    if arguments.disk is not None:
        slow_down(arguments.disk * 1e9)
    training = Training(arguments)
    tell(
        ready=time.perf_counter() - began,
        goes_on_after=training.before,
        devices=gpu_names(training.run.devices),
        copies=training.copies_bytes,
    )
    training.train()
    tell(digest=digest(training.model.store.layers))
    return 0


# -- the process that looks on -----------------------------------------------------------------------------


def events_of(arguments: argparse.Namespace, part: str, folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(process id, what it told) of one part, until it ends; exits where it ended badly without being killed."""
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--folder", str(folder)]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # deterministic products need it
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield process.pid, json.loads(line)
    if process.returncode not in (0, -signal.SIGKILL):
        sys.exit(f"the {part} run ended with {process.returncode}")


def look_on(arguments: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], list[str], bool]:
    """Runs the three parts; (results for the record, names of devices, whether what had to be equal was)."""
    told: dict[str, list[dict[str, Any]]] = {"unbroken": [], "killed": [], "resumed": []}
    for part, events in told.items():
        began = time.perf_counter()
        for process, event in events_of(arguments, part, folder):
            events.append(event)
            if part == "killed" and "submitted" in event and any("saved" in earlier for earlier in events):
                time.sleep(0.3 * statistics.median(seconds(events)))
                os.kill(process, signal.SIGKILL)
                break
        print(f"{part}: {time.perf_counter() - began:.0f} s in all, {len(seconds(events))} steps", flush=True)
    saves = [event for event in told["killed"] if "saved" in event]
    unbroken, resumed = told["unbroken"], told["resumed"]
    after = next(event["goes_on_after"] for event in resumed if "ready" in event)
    plain, saving = statistics.median(seconds(unbroken)[1:]), seconds(told["killed"])
    save = saves[0]
    interval = arguments.every * plain
    before, during = saving[1 : arguments.every], saving[arguments.every :]
    lost = sum(during) - len(during) * statistics.median(before)
    copies = next(event["copies"] for event in told["killed"] if "ready" in event)
    checks = {
        f"loss of step {arguments.steps}": (losses(unbroken)[-1], losses(resumed)[-1]),
        "digest of masters and moments": (unbroken[-1]["digest"][:16], resumed[-1]["digest"][:16]),
    }
    case = f"{arguments.preset} {f'LoRA r{arguments.lora}' if arguments.lora else 'full'}, {arguments.update}"
    figures = [
        ("step without saving, median", plain, "s"),
        ("longest step while saving", max(saving[1:]), "s"),
        ("checkpoint", save["bytes"] / 1e9, "GB"),
        ("time of a save", save["took"], "s"),
        ("rate of a save", save["bytes"] / save["took"] / 1e9, "GB/s"),
        ("room for copies", copies / 1e9, "GB"),
        ("written from copies", save["copied"] / 1e9, "GB"),
        ("training held up by a save", save["stalled"], "s"),
        (f"share of {arguments.every} steps", 100 * save["stalled"] / (interval + save["stalled"]), "%"),
        ("steps while saving, longer in all", lost, "s"),
        (f"share of {arguments.every} steps, longer in all", 100 * lost / (interval + lost), "%"),
        ("share of half an hour", 100 * save["stalled"] / _LONG_INTERVAL_SECONDS, "%"),
        ("ready again after the kill", next(event["ready"] for event in resumed if "ready" in event), "s"),
        ("steps done again", float(losses_known(told["killed"]) - after), "steps"),
        *((f"equal: {name}", float(a == b), "1 = yes") for name, (a, b) in checks.items()),
    ]
    print(f"{case}; a checkpoint takes {gib(save['bytes'])}; killed in step {told['killed'][-1]['submitted']}")
    for name, value, unit in figures:
        print(f"  {name:45} {value:10.3f} {unit}")
    for name, (a, b) in checks.items():
        print(f"  {name}: unbroken {a}, resumed after step {after} {b}: {'equal' if a == b else 'DIFFERENT'}")
    results = [{"case": case, "metric": m, "value": round(value, 4), "unit": unit} for m, value, unit in figures]
    names = next(event["devices"] for event in unbroken if "ready" in event)
    return results, names, all(a == b for a, b in checks.values())


def seconds(events: list[dict[str, Any]]) -> list[float]:
    return [event["seconds"] for event in events if "step" in event]


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if "step" in event]


def losses_known(events: list[dict[str, Any]]) -> int:
    """The last step whose loss a process told."""
    return max(event["step"] for event in events if "step" in event)


def main() -> int:
    arguments = parse()
    if arguments.part is not None:
        return train_part(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results, names, equal = look_on(arguments, Path(folder))
    if arguments.json is not None:
        write_record(arguments.json, "checkpoints", machine(names), results)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
