"""Why workers stood still: the time in which a worker computed nothing, by what its compute stream waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rpft.engine.trace import DISK, GRADIENTS, HOST, INPUT, OPTIMIZER, TASK, WAIT, WEIGHTS, Cover, Span, Trace

INPUT_COPY, LAUNCH, NO_WORK = "input copy", "launch", "no work"

CAUSES = {
    INPUT: "an activation, or its gradient, that another slot had yet to give",
    INPUT_COPY: "such a one on its way over the link to this worker",
    WEIGHTS: "weights on their way over the link",
    DISK: "frozen weights that the disk had yet to give, or the optimizer while it waited for it",
    OPTIMIZER: "the optimizer: weights that it had yet to write, or gradients that it had yet to read",
    GRADIENTS: "gradients on their way: no room for the next sum, or the sum of the round before",
    LAUNCH: "nothing: the host had yet to give it the next task",
    NO_WORK: "nothing: there was no further task in the trace",
}
"""What a worker can stand still for, with what that means."""

_BEHIND = {
    # What compute waits for: the stream that brings it.
    INPUT: "activations up",
    WEIGHTS: "weights up",
    GRADIENTS: "gradients down",
}


@dataclass(frozen=True)
class Idle:
    """How one worker spent a window."""

    worker: str
    window_seconds: float
    busy_seconds: float
    """Computing, or standing still inside a task for kernels that had yet to be launched."""
    seconds: dict[str, float]
    """By cause, in the order of ``CAUSES``. With ``busy_seconds`` they sum to the window."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "worker": self.worker,
            "window_seconds": self.window_seconds,
            "busy_seconds": self.busy_seconds,
            "idle_seconds": self.seconds,
        }


def idle_by_cause(trace: Trace) -> list[Idle]:
    """One account a worker, over the whole of ``trace``."""
    found = []
    held = [s for s in trace.spans if s.worker == HOST and s.nature == WAIT and s.cause == DISK]
    for worker in dict.fromkeys(worker for worker, stream in trace.rows if stream == "compute"):
        of: dict[str, list[Span]] = {}
        for span in trace.spans:
            if span.worker == worker:
                of.setdefault(span.stream, []).extend(_cut(span, held))
        found.append(_account(trace, worker, of))
    return found


def _cut(span: Span, held: Sequence[Span]) -> list[Span]:
    """``span``; a wait for the optimizer in parts, those for the disk in which the optimizer was ``held`` up."""
    if span.nature != WAIT or span.cause != OPTIMIZER:
        return [span]
    parts, at = [], span.start_seconds
    for disk in held:  # in order, and none is in another
        start, end = max(disk.start_seconds, at), min(disk.end_seconds, span.end_seconds)
        if start < end:
            parts.append(replace(span, start_seconds=at, end_seconds=start))
            parts.append(replace(span, start_seconds=start, end_seconds=end, cause=DISK))
            at = end
    return [*parts, replace(span, start_seconds=at)]


def _account(trace: Trace, worker: str, of: dict[str, list[Span]]) -> Idle:
    spans = of.get("compute", [])
    busy = Cover(s for s in spans if s.nature == TASK)
    seconds = dict.fromkeys(CAUSES, 0.0)
    waits = [s for s in spans if s.nature == WAIT]
    for cause in dict.fromkeys(s.cause for s in waits):
        own = Cover(s for s in waits if s.cause == cause)
        for part, time in _divided(cause, own, of).items():
            seconds[part] += time
    either = Cover(s for s in spans if s.nature in (TASK, WAIT))
    rest = trace.end_seconds - trace.start_seconds - either.seconds
    last = max((s.end_seconds for s in spans), default=trace.start_seconds)
    seconds[NO_WORK] = max(0.0, trace.end_seconds - last)
    seconds[LAUNCH] += max(0.0, rest - seconds[NO_WORK])
    return Idle(worker, trace.end_seconds - trace.start_seconds, busy.seconds, seconds)


def _divided(cause: str, own: Cover, of: dict[str, list[Span]]) -> dict[str, float]:
    """The seconds of waits for ``cause``, by what the stream that brings it was at meanwhile."""
    total = own.seconds
    if cause not in _BEHIND:
        return {cause if cause in CAUSES else LAUNCH: total}
    bringing = of.get(_BEHIND[cause], [])
    optimizer, disk = (
        own.common(Cover(s for s in bringing if s.nature == WAIT and s.cause == behind))
        for behind in (OPTIMIZER, DISK)
    )
    copying = own.common(Cover(s for s in bringing if s.nature == TASK)) if cause == INPUT else 0.0
    parts = {OPTIMIZER: optimizer, DISK: disk, cause: total - optimizer - disk - copying}
    return {**parts, INPUT_COPY: copying} if cause == INPUT else parts


def idle_table(accounts: Sequence[Idle]) -> list[str]:
    """Lines of text: a row a worker, shares of the window; causes that nobody waited for are left out."""
    shown = [cause for cause in CAUSES if any(a.seconds[cause] >= 0.0005 * a.window_seconds for a in accounts)]
    width = max(len("worker"), *(len(a.worker) for a in accounts)) if accounts else 0
    columns = ["busy", *shown]
    lines = [f"{'worker':{width}}" + "".join(f"  {name:>{max(6, len(name))}}" for name in columns)]
    for account in accounts:
        values = [account.busy_seconds, *(account.seconds[cause] for cause in shown)]
        lines.append(
            f"{account.worker:{width}}"
            + "".join(
                f"  {value / account.window_seconds:{max(6, len(name))}.1%}"
                for name, value in zip(columns, values, strict=True)
            )
        )
    return lines
