"""A finished trace of streams: what each did and when, how much copying hid behind compute, files of it.

A task on a CUDA stream lasts from the moment that the stream could begin it to the end of its last kernel, so
that time in which its kernels had yet to be launched counts as busy.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rpft.errors import UserError

TASK, WAIT, PART = "task", "wait", "part"
"""The natures of a span: a task of a stream, standing still for events before one, a named part of one."""

INPUT, WEIGHTS, OPTIMIZER, GRADIENTS, BUFFER, COMPUTE, LINK, CHECKPOINT, DISK = (
    "input",
    "weights",
    "optimizer",
    "gradients",
    "buffer",
    "compute",
    "link",
    "checkpoint",
    "disk",
)
"""What a stream stands still for: an activation or its gradient, weights, the optimizer's turn with either, a sum
of gradients, memory that is still read, work of the compute stream, a link that is emulated, a save, frozen
weights that are read from the disk."""

HOST = "host"
"""The worker of streams that belong to none, such as the optimizer's."""


@dataclass(frozen=True)
class Span:
    """One stretch of a stream's time. Seconds since the trace began."""

    worker: str
    """Name of the device, or ``HOST``."""
    stream: str
    """Its purpose: compute, weights up, ..., optimizer."""
    nature: str
    """``TASK``, ``WAIT`` or ``PART``."""
    what: str
    start_seconds: float
    end_seconds: float
    issued_seconds: float
    """When the host began to issue it."""
    copied_bytes: int = 0
    """Above 0: a transfer between host and device, or disk."""
    cause: str = ""
    """Of a wait: what for."""

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds

    @property
    def kind(self) -> str:
        """What a picture colours it by: forward, fused, backward, loss, weights, activations, gradients, ..."""
        if self.stream == "compute":
            slot = re.search(r"\((\w+) stage", self.what)
            return slot.group(1) if slot else "compute"
        return "gradients" if self.what.endswith("gradients up") else self.stream.split()[0]


@dataclass(frozen=True)
class Overlap:
    """How one worker spent a trace. The three shares sum to 1."""

    worker: str
    copied_bytes: int
    transfer_seconds: float
    """Of all transfers, summed over streams."""
    hidden_seconds: float
    """The part of it during which the compute stream was busy."""
    compute_busy: float
    only_transfers: float
    """Share of the trace in which a transfer ran and compute did not."""
    idle: float
    """Share in which neither did."""

    @property
    def hidden(self) -> float:
        """Share of the transfer time that was hidden; 1 where nothing was transferred."""
        return self.hidden_seconds / self.transfer_seconds if self.transfer_seconds else 1.0


@dataclass(frozen=True)
class StreamUse:
    """What one stream did in a trace."""

    worker: str
    stream: str
    num_tasks: int
    busy_seconds: float
    """In its tasks; where parts of tasks were noted, in those."""
    waiting_seconds: float
    copied_bytes: int
    transfer_seconds: float


@dataclass(frozen=True)
class Trace:
    """A finished trace. Times are in seconds since it began."""

    rows: list[tuple[str, str]]
    """(worker, stream) of every stream traced."""
    spans: list[Span]
    start_seconds: float
    end_seconds: float

    def between(self, start_seconds: float, end_seconds: float) -> Trace:
        """The part between two times; a span that is cut keeps its bytes in proportion."""
        cut = []
        for s in self.spans:
            start, end = max(s.start_seconds, start_seconds), min(s.end_seconds, end_seconds)
            if start < end:
                part = round(s.copied_bytes * (end - start) / s.seconds)
                cut.append(replace(s, start_seconds=start, end_seconds=end, copied_bytes=part))
        return Trace(self.rows, cut, start_seconds, end_seconds)

    def step(self, step: int) -> Trace:
        """One period of training: from the end of the update before to the end of the update of ``step``."""
        ends = {}
        for s in self.spans:
            number = re.search(r"step (\d+)$", s.what)
            if s.stream == "optimizer" and s.nature == TASK and number:
                ends[int(number.group(1))] = s.end_seconds
        if not {step - 1, step} <= ends.keys():
            whole = [n for n in sorted(ends) if n - 1 in ends]
            raise UserError(f"the trace does not hold the whole of step {step}; it holds {whole or 'none'}")
        return self.between(ends[step - 1], ends[step])

    def overlap(self) -> list[Overlap]:
        """Of each worker that has a compute stream: how much of its transfer time compute hid."""
        window = self.end_seconds - self.start_seconds
        found = []
        for worker in dict.fromkeys(worker for worker, stream in self.rows if stream == "compute"):
            tasks = [s for s in self.spans if s.worker == worker and s.nature == TASK]
            compute = [s for s in tasks if s.stream == "compute"]
            transfers = [s for s in tasks if s.copied_bytes]
            busy, either = Cover(compute), Cover([*compute, *transfers])
            found.append(
                Overlap(
                    worker,
                    sum(s.copied_bytes for s in transfers),
                    sum(s.seconds for s in transfers),
                    sum(busy.within(s.start_seconds, s.end_seconds) for s in transfers),
                    busy.seconds / window,
                    (either.seconds - busy.seconds) / window,
                    max(0.0, 1.0 - either.seconds / window),
                )
            )
        return found

    def streams(self) -> list[StreamUse]:
        """Each stream's use, in the order of ``rows``."""
        of: dict[tuple[str, str], list[Span]] = {row: [] for row in self.rows}
        for s in self.spans:
            of[s.worker, s.stream].append(s)
        uses = []
        for (worker, stream), spans in of.items():
            tasks = [s for s in spans if s.nature == TASK]
            transfers = [s for s in tasks if s.copied_bytes]
            busy = Cover([s for s in spans if s.nature == PART] or tasks).seconds
            waiting = sum(s.seconds for s in spans if s.nature == WAIT)
            copied, seconds = sum(s.copied_bytes for s in transfers), sum(s.seconds for s in transfers)
            uses.append(StreamUse(worker, stream, len(tasks), busy, waiting, copied, seconds))
        return uses

    def write_chrome_trace(self, path: Path) -> None:
        """Writes JSON for Perfetto or chrome://tracing: a process a worker, a thread a stream, microseconds.

        Ends are rounded, not durations: of two spans of a thread that overlap, be it by a nanosecond, Perfetto
        drops one.
        """
        pids = {worker: pid for pid, worker in enumerate(dict.fromkeys(worker for worker, _ in self.rows), 1)}
        tids = {row: tid for tid, row in enumerate(self.rows, 1)}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": worker}}
            for worker, pid in pids.items()
        ]
        for (worker, stream), tid in tids.items():
            place = {"ph": "M", "pid": pids[worker], "tid": tid}
            events.append({**place, "name": "thread_name", "args": {"name": stream}})
            events.append({**place, "name": "thread_sort_index", "args": {"sort_index": tid}})
        events += [
            {
                "ph": "X",
                "pid": pids[s.worker],
                "tid": tids[s.worker, s.stream],
                "name": s.what,
                "cat": s.nature,
                "ts": round(s.start_seconds * 1e6, 3),
                "dur": round(round(s.end_seconds * 1e6, 3) - round(s.start_seconds * 1e6, 3), 3),
                "args": {
                    "bytes": s.copied_bytes,
                    "issued": round(s.issued_seconds * 1e6, 3),
                    **({"waits for": s.cause} if s.cause else {}),
                },
            }
            for s in self.spans
        ]
        whole = {"start_seconds": self.start_seconds, "end_seconds": self.end_seconds}
        content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": whole}
        path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")


def read_chrome_trace(path: Path) -> Trace:
    """Reads what ``Trace.write_chrome_trace`` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    workers: dict[int, str] = {}
    rows: dict[int, tuple[str, str]] = {}
    spans = []
    for event in content["traceEvents"]:
        name, args = event["name"], event["args"]
        if name == "process_name":
            workers[event["pid"]] = args["name"]
        elif name == "thread_name":
            rows[event["tid"]] = workers[event["pid"]], args["name"]
        elif event["ph"] == "X":
            start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            place = rows[event["tid"]]
            issued, cause = args["issued"] / 1e6, args.get("waits for", "")
            spans.append(Span(*place, event["cat"], name, start, end, issued, args["bytes"], cause))
    return Trace(list(rows.values()), spans, **content["otherData"])


class Cover:
    """The time that any of some spans covers."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._before: list[float] = []
        self.seconds = 0.0
        for s in sorted(spans, key=lambda s: s.start_seconds):
            if self._ends and s.start_seconds <= self._ends[-1]:
                self.seconds += max(0.0, s.end_seconds - self._ends[-1])
                self._ends[-1] = max(self._ends[-1], s.end_seconds)
            else:
                self._before.append(self.seconds)
                self._starts.append(s.start_seconds)
                self._ends.append(s.end_seconds)
                self.seconds += s.seconds

    def common(self, other: Cover) -> float:
        """Seconds that both cover."""
        return sum(other.within(start, end) for start, end in zip(self._starts, self._ends, strict=True))

    def within(self, start_seconds: float, end_seconds: float) -> float:
        """Covered seconds between two times."""
        return self._until(end_seconds) - self._until(start_seconds)

    def _until(self, at: float) -> float:
        i = bisect_right(self._starts, at) - 1
        if i < 0:
            return 0.0
        return self._before[i] + min(at, self._ends[i]) - self._starts[i]
