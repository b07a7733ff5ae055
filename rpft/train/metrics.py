"""metrics.jsonl: a line a step or evaluation, whole after any crash, continued without gaps or doubles."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rpft import files

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepRecord:
    """One step; the names are the keys of its line. ``loss`` is the mean over the step's trained tokens."""

    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    trained_tokens: int
    tokens: int
    tokens_per_second: float
    step_seconds: float
    skipped_steps: int
    """Skipped so far, this one included."""
    host_rss_bytes: int
    devices: list[dict[str, Any]]
    """[{name, peak_bytes, allocation_retries}], one a worker; retries since the run began, see ``Device``."""
    optimizer_seconds: float = 0.0
    """From the arrival of the step's last gradient until all layers are updated."""
    router_aux_loss: float | None = None
    """Load-balancing loss of the routers, without its coefficient and no part of ``loss``; no key where None."""


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation; ``eval_loss`` is the mean over ``eval_tokens`` trained tokens."""

    step: int
    eval_loss: float
    eval_tokens: int


@dataclass(frozen=True)
class PlanRecord:
    """A smaller plan in mid-run; ``step`` is the last one that was finished before."""

    step: int
    out_of_memory: str
    """On which device, and at what."""
    plan: dict[str, Any]
    """The parts of the plan file that decide the run, and micro_batch_size, rows of a microbatch."""


@dataclass(frozen=True)
class RewindRecord:
    """A run that went back to ``step`` because of its loss; it will not learn from the steps ``passed_over``."""

    step: int
    rewound_from: int
    passed_over: list[int]


class MetricsFile:
    """Appends records to OUTPUT_DIR/metrics.jsonl. A line that a full disk does not take waits for the next."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS_FILE
        self._waiting: list[str] = []
        self._lock = threading.Lock()

    def keep_until(self, step: int) -> list[int]:
        """Drops what stands after ``step`` (a resumed run makes it again) and a last line that is not whole.

        Gives the steps up to ``step`` that have no line. There are some only where the file was touched, or the
        run began in another folder.
        """
        with self._lock:
            kept = [(text, line) for text, line in self._whole_lines() if line["step"] <= step]
            if self.path.exists() or self._waiting:
                files.write_whole(self.path, "".join(text + "\n" for text, _ in kept))
                self._waiting.clear()
        return sorted(set(range(1, step + 1)) - {line["step"] for _, line in kept if "loss" in line})

    def sync(self) -> None:
        """Returns when all lines so far are on the disk; OSError where it does not take them. Any thread's."""
        with self._lock:
            self._write_waiting()
            if self.path.exists():
                files.sync(self.path)

    def has_evaluation(self, step: int) -> bool:
        """Whether an evaluation at ``step`` is already in the file."""
        return any("eval_loss" in line and line["step"] == step for line in self.lines())

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) of every step that has one, in order."""
        return [(line["step"], line["loss"]) for line in self.lines() if line.get("loss") is not None]

    def lines(self) -> list[dict[str, Any]]:
        """Every whole line, those that wait for the disk included."""
        with self._lock:
            return [line for _, line in self._whole_lines()]

    def _whole_lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(text, content) of each line that is a whole JSON object, in the file or waiting."""
        written = self.path.read_text(encoding="utf-8", errors="replace") if self.path.is_file() else ""
        for text in [*written.split("\n"), *(line.rstrip("\n") for line in self._waiting)]:
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    yield text, line

    def append(self, record: StepRecord | EvalRecord | PlanRecord | RewindRecord) -> None:
        """Writes one line at once. A number that JSON lacks (a skipped step's loss) becomes null."""
        values = {key: _finite(value) for key, value in asdict(record).items()}
        if values.get("router_aux_loss", ...) is None:
            del values["router_aux_loss"]
        line = json.dumps(values, allow_nan=False)
        with self._lock:
            self._waiting.append(line + "\n")
            with suppress(OSError):  # it stays waiting, and ``sync`` will say what is wrong
                self._write_waiting()

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        with self.path.open("ab", buffering=0) as file:
            whole = file.tell()
            try:
                files.write(file, "".join(self._waiting).encode())
            except OSError:
                file.truncate(whole)
                raise
        self._waiting.clear()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
