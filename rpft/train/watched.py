"""What a display may ask of a run at any time, from any thread, and what was last seen of one of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rpft.engine.device import Device
from rpft.engine.idle import Idle
from rpft.engine.streams import Stream
from rpft.engine.trace import HOST, PART, TASK, Trace
from rpft.plan.flops import model_flops
from rpft.train.prepare import Prepared


@dataclass(frozen=True)
class WorkerNow:
    """One worker at this moment."""

    name: str
    task: str
    """What its compute stream is at, "" where it has nothing to do."""
    used_bytes: int
    peak_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True)
class SeenWorker:
    """One worker in a step that was traced. Rates are in bytes a second, over the whole step."""

    name: str
    busy: float
    """Share of the step."""
    up_rate: float
    down_rate: float


@dataclass(frozen=True)
class SeenStep:
    """A step that was traced."""

    step: int
    seconds: float
    workers: list[SeenWorker]
    rows: list[tuple[str, list[tuple[str, float, float]]]]
    """(name, [(kind, first, last)]), a row a worker's compute and one for the optimizer; times are shares of the
    step, in order of start."""
    idle: list[Idle]


class Watched:
    """A run, for whoever watches it. A display that shows ``seen``, which costs a little, sets ``wants_steps``."""

    def __init__(self, prepared: Prepared, streams: Callable[[], Sequence[Stream]]) -> None:
        """``streams``: those of the engine, and of the optimizer, at any time."""
        self._streams = streams
        self._devices: Sequence[Device] = prepared.devices
        self._limit = prepared.target.vram_bytes
        self.num_workers = len(prepared.devices)
        self.ram_bytes = prepared.target.ram_bytes
        """What the run may take of it."""
        prediction = prepared.prediction()
        self.predicted_rate = None if prediction is None else prediction.tokens_per_second
        self.predicted_seconds = None if prediction is None else prediction.step_seconds
        """Of a step."""
        self.roof_rate = None if prediction is None else prediction.roof_tokens_per_second
        """Tokens a second of the same layers resident on every worker."""
        self.worker_word = "GPU" if prepared.target.page_locks else "worker"
        padded, _ = prepared.mean_step()
        self.flops_per_token = model_flops(prepared.layouts, prepared.skeleton, padded / prepared.rows)
        self.wants_steps = False
        self.seen: SeenStep | None = None
        """The last step that was traced."""

    def workers(self) -> list[WorkerNow]:
        """Each worker at this moment."""
        tasks = {stream.name: stream.task for stream in self._streams()}
        return [
            WorkerNow(d.name, tasks.get(f"{d.name} compute", ""), d.used_bytes(), d.peak_bytes(), self._limit)
            for d in self._devices
        ]

    def tasks_done(self) -> int:
        """Tasks that the engine's streams have carried out so far; counts again when it begins anew."""
        return sum(stream.tasks_done for stream in self._streams())


def seen_step(step: int, trace: Trace, idle: Sequence[Idle]) -> SeenStep:
    """What a display shows of ``trace``, which is cut to ``step``."""
    seconds = trace.end_seconds - trace.start_seconds
    workers, rows = [], []
    for account in idle:
        copies = [s for s in trace.spans if s.worker == account.worker and s.copied_bytes]
        up = sum(s.copied_bytes for s in copies if s.stream.endswith("up"))
        down = sum(s.copied_bytes for s in copies) - up
        busy = account.busy_seconds / seconds
        workers.append(SeenWorker(account.worker, busy, up / seconds, down / seconds))
        rows.append((account.worker, _blocks(trace, account.worker, "compute", TASK)))
    rows.append(("optimizer", _blocks(trace, HOST, "optimizer", PART)))
    return SeenStep(step, seconds, workers, rows, list(idle))


def _blocks(trace: Trace, worker: str, stream: str, nature: str) -> list[tuple[str, float, float]]:
    seconds = trace.end_seconds - trace.start_seconds
    return sorted(
        (
            (
                s.kind,
                (s.start_seconds - trace.start_seconds) / seconds,
                (s.end_seconds - trace.start_seconds) / seconds,
            )
            for s in trace.spans
            if (s.worker, s.stream, s.nature) == (worker, stream, nature)
        ),
        key=lambda block: block[1],
    )
