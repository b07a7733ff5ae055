"""What the live console costs a run: steps with and without it in turn, and the processor time of its thread.

    python benchmarks/console.py MODEL_FOLDER [--steps 240] [--block 20] [--rows 4] [--sequence 128] [--workers 2]
                                 [--device cpu]

Trains every weight of the model on random tokens on the CPU pool or on GPUs, through the training loop, and
draws on a terminal that nobody looks at: blocks of steps with the live display, with the steps that it has
traced, and blocks without any. Prints by how much the median step of a block with it was longer than that of its
neighbours without, which takes a quiet machine, and the share of a core that drawing and tracing took, which
bounds it; --json FILE writes them.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from record import machine, write_record
from rich.console import Console

from rpft.console.live import LiveReporter
from rpft.engine.tracer import Recorder
from rpft.machine import device_names
from rpft.recipe.schema import Recipe
from rpft.recipe.sections.checkpoint import Checkpoint
from rpft.recipe.sections.data import Data
from rpft.recipe.sections.engine import Engine
from rpft.recipe.sections.model import Model
from rpft.recipe.sections.train import Train
from rpft.train.loop import Trainer
from rpft.train.metrics import EvalRecord, StepRecord
from rpft.train.prepare import prepare
from rpft.train.tracing import StepTracing
from rpft.train.watched import Watched

_WIDTH = 100
_IDS = 256
"""Token ids that every model has."""


class InTurns:
    """A reporter that has the live display for every other block of steps."""

    def __init__(self, block: int) -> None:
        master, slave = pty.openpty()
        threading.Thread(target=self._drain, args=(master,), daemon=True).start()
        self._terminal = os.fdopen(slave, "w")
        self._block, self._live = block, None
        self.blocks: list[tuple[bool, list[float]]] = []
        self.drawing_seconds = self.shown_seconds = 0.0

    @staticmethod
    def _drain(master: int) -> None:
        with suppress(OSError):  # the other end is closed
            while os.read(master, 1 << 16):
                pass

    def begin(self, first_step: int, num_steps: int, watched: Watched | None = None) -> None:
        assert watched is not None
        self._num_steps, self._watched = num_steps, watched
        self._next_block(first_step)

    def _next_block(self, step: int) -> None:
        shown = bool(self.blocks) and not self.blocks[-1][0]
        if self._live is not None:
            self._live.close()
            self.drawing_seconds += self._live.drawing_seconds
            self.shown_seconds += time.perf_counter() - self._since
            self._live, self._watched.wants_steps = None, False
        if shown:
            console = Console(file=self._terminal, force_terminal=True, width=_WIDTH, height=40, highlight=False)
            self._live, self._since = LiveReporter(console), time.perf_counter()
            self._live.begin(step, self._num_steps, self._watched)
        self.blocks.append((shown, []))

    def stepped(self, record: StepRecord) -> None:
        self.blocks[-1][1].append(record.step_seconds)
        if self._live is not None:
            self._live.stepped(record)
        if record.step % self._block == 0:
            print(f"step {record.step}", flush=True)
            self._next_block(record.step + 1)

    def close(self) -> None:
        if self._live is not None:
            self._live.close()

    def say(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def loading(self, done: int, total: int) -> None: ...

    def evaluated(self, record: EvalRecord) -> None: ...

    def saved(self, path: Path) -> None: ...

    def slower(self) -> list[float]:
        """Of each block with the display: its median step over that of the blocks beside it, less 1."""
        medians = [(shown, statistics.median(seconds)) for shown, seconds in self.blocks if len(seconds) > 2]
        found = []
        for i in range(1, len(medians) - 1):
            (_, before), (shown, own), (_, after) = medians[i - 1 : i + 2]
            if shown:
                found.append(2 * own / (before + after) - 1)
        return found


def make_recipe(arguments: argparse.Namespace, folder: Path) -> Recipe:
    draw = random.Random(0)
    rows = [{"input_ids": [draw.randrange(_IDS) for _ in range(arguments.sequence)]} for _ in range(32)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Recipe.model_validate(
        {
            "model": Model(path=str(arguments.model), dtype="float32"),
            "data": Data.model_validate(
                {
                    "train": [{"path": str(data), "format": "tokens"}],
                    "max_seq_len": arguments.sequence,
                    "train_on": "all",
                }
            ),
            "train": Train(gradient_accumulation_steps=arguments.rows, max_steps=arguments.steps),
            "engine": Engine(device=arguments.device, workers=arguments.workers, cpu_threads=1),
            "checkpoint": Checkpoint(),
            "output_dir": str(folder / "out"),
        }
    )


def traced_seconds(counted: list[int]) -> list[float]:
    """Has the processor time that the main thread spends on traces, and the notes of each, written down."""
    spent: list[float] = []
    passed = StepTracing.passed

    def timed(tracing: StepTracing, step: int) -> None:
        begun, recorders = time.thread_time(), [s.recorder for s in tracing._streams() if s.recorder is not None]
        passed(tracing, step)
        spent.append(time.thread_time() - begun)
        if recorders:
            counted.append(sum(len(recorder.notes) for recorder in recorders))

    StepTracing.passed = timed  # type: ignore[method-assign]
    return spent


def note_seconds(count: int = 20_000) -> float:
    """What noting one task takes its stream."""
    recorder = Recorder(time.perf_counter)
    begun = time.thread_time()
    for _ in range(count):
        recorder.wait_begins("weights")
        recorder.carry_out(lambda: None, "task", 0)
    return (time.thread_time() - begun) / len(recorder.notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--block", type=int, default=20, help="steps with, and without, the display in turn")
    parser.add_argument("--rows", type=int, default=4, help="microbatches of one row a step")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared = prepare(make_recipe(arguments, folder))
        (folder / "out").mkdir()
        reporter, notes = InTurns(arguments.block), []
        on_traces = traced_seconds(notes)
        Trainer(prepared, reporter).run(None)
        reporter.close()
    slower, share = reporter.slower(), reporter.drawing_seconds / reporter.shown_seconds
    tracing = (sum(on_traces) + sum(notes) * note_seconds()) / reporter.shown_seconds
    step = statistics.median(s for _, seconds in reporter.blocks for s in seconds)
    where = machine(device_names([device.torch_device for device in prepared.devices][:1]))
    print(f"{where}; {arguments.workers} workers, steps of {step:.3g} s, {len(slower)} blocks with the display")
    median = statistics.median(slower)
    print(f"with the live display a step takes {median:+.2%} (median; {min(slower):+.2%} to {max(slower):+.2%})")
    print(f"drawing takes {share:.3%} of a core, tracing {len(notes)} steps {tracing:.3%}")
    if arguments.json is not None:
        results = [
            {
                "case": "live console",
                "metric": "longer step, median of blocks",
                "value": round(median, 5),
                "unit": "",
            },
            {"case": "live console", "metric": "share of a core, drawing", "value": round(share, 6), "unit": ""},
            {"case": "live console", "metric": "share of a core, tracing", "value": round(tracing, 6), "unit": ""},
        ]
        write_record(arguments.json, "console", where, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
