"""What the live display shows of a run, as lines of text for any width; knows nothing of terminals."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import groupby

from rich.text import Text

from rpft.console.history import History, sparkline
from rpft.console.text import Pace, duration
from rpft.console.timeline import IDLE, LETTERS, NAMES, cells
from rpft.plan.bill import gib
from rpft.train.metrics import StepRecord
from rpft.train.watched import Watched, WorkerNow

_STYLES = {
    "forward": "black on #56b4e9",
    "fused": "black on #cc79a7",
    "backward": "white on #0072b2",
    "loss": "black on #9ad0c2",
    "optimizer": "black on #8f7fd6",
    "compute": "black on #a0a0a0",
}
_SHORTEST_BAR, _LONGEST_BAR = 6, 60
_FIRST_COLUMN = 11
_LONGEST_TIMELINE = 200
_SLOT = re.compile(r"slot (\d+) \((\w+) stage (\[[^]]*\])\)(?: microbatch (\d+))?")


class Board:
    """The state of a run as far as it was told; ``lines`` says it. ``now``: a monotonic clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._loading: tuple[int, int] | None = None
        self._record: StepRecord | None = None
        self._pace: Pace | None = None
        self._watched: Watched | None = None
        self._losses = History()
        self._saved: tuple[str, float] | None = None
        self._slots: dict[str, str] = {}
        """Worker to the last slot it was seen at."""
        self._tasks: tuple[int, int] = (0, 0)
        """(Done at the end of the last step, in that step)."""
        self._drawn: tuple[object, int, list[tuple[str, list[str]]]] = (None, 0, [])

    def loading(self, done: int, total: int) -> None:
        self._loading = done, total

    def begin(self, first_step: int, num_steps: int, watched: Watched | None) -> None:
        self._loading = None
        self._watched, self._begun, self._step = watched, self._now(), first_step - 1
        expected = None if watched is None else watched.predicted_seconds
        self._pace = Pace(num_steps, expected)
        self._count_tasks()

    def stepped(self, record: StepRecord) -> None:
        assert self._pace is not None
        self._pace.see(record)
        self._losses.add(record.loss)
        self._record, self._step = record, record.step
        self._count_tasks()

    def saved(self, name: str) -> None:
        self._saved = name, self._now()

    def _count_tasks(self) -> None:
        done = 0 if self._watched is None else self._watched.tasks_done()
        self._tasks = done, done - self._tasks[0]

    # -- lines ---------------------------------------------------------------------------------------------

    def lines(self, width: int, height: int, ascii_only: bool = False) -> list[Text]:
        """At most ``height`` lines for a terminal of ``width`` columns; what matters least is left out first."""
        if self._loading is not None:
            done, total = self._loading
            bar = _bar(done / total, width - 30, ascii_only)
            return [Text.assemble("loading weights ", bar, f" {done}/{total}")]
        if self._pace is None:
            return []
        parts = [self._progress(width, ascii_only)]
        if self._record is not None:
            parts += [self._learning(self._record, width, ascii_only), self._speed(self._record)]
            parts.append(self._memory(self._record))
        workers = self._workers()
        if workers and len(parts) + len(workers) <= height:
            parts += workers
            timeline = self._timeline(width)
            if len(parts) + len(timeline) <= height:
                parts += timeline
        return parts[:height]

    def _progress(self, width: int, ascii_only: bool) -> Text:
        pace = self._pace
        assert pace is not None
        share = self._step / pace.num_steps
        before, after = Text(f"step {self._step}/{pace.num_steps} ", style="bold"), Text(f" {share:.1%}")
        if self._record is None:
            after.append(f"  the first step takes longer: {duration(self._now() - self._begun)} so far")
        else:
            part = self._share_of_step()
            if part is not None and self._step < pace.num_steps:
                after.append(f"  next {part:.0%}")
            after.append(
                f"  {self._record.step_seconds:.3g} s a step  ETA {duration(pace.seconds_left(self._step))}"
            )
            if self._record.skipped_steps:
                after.append(f"  skipped {self._record.skipped_steps}", style="bold red")
        bar = _bar(share, width - len(before) - len(after), ascii_only)
        return Text.assemble(before, bar, after)

    def _share_of_step(self) -> float | None:
        done, usual = self._tasks
        if self._watched is None or usual <= 0:
            return None
        return max(0.0, min(0.99, (self._watched.tasks_done() - done) / usual))

    def _learning(self, record: StepRecord, width: int, ascii_only: bool) -> Text:
        figures = f"  lr {record.learning_rate:.1e}  grad norm {record.grad_norm:.2f}  epoch {record.epoch:.2f}"
        line = Text(f"loss {record.loss:.4f} ", style="bold")
        room = min(60, width - len(line) - len(figures))
        line.append(sparkline(self._losses.values, room, ascii_only), style="not bold cyan")
        return line.append(figures, style="not bold")

    def _speed(self, record: StepRecord) -> Text:
        assert self._pace is not None
        mean = self._pace.tokens_per_second
        line = Text(f"{record.tokens_per_second:.0f} tok/s")
        if mean is not None:
            line.append(f"  mean {mean:.0f}")
        watched = self._watched
        if watched is not None:
            rate = record.tokens_per_second if mean is None else mean
            if watched.predicted_rate is not None:
                line.append(f"  {rate / watched.predicted_rate:.0%} of predicted")
            if watched.roof_rate is not None:
                line.append(f"  {rate / watched.roof_rate:.0%} of roof")
            tflops = rate * watched.flops_per_token / watched.num_workers / 1e12
            line.append(f"  {tflops:.3g} TFLOP/s a {watched.worker_word}")
        return line

    def _memory(self, record: StepRecord) -> Text:
        if self._watched is None:
            line = Text(f"RAM {gib(record.host_rss_bytes)}")
            line.append(f"  {gib(max(d['peak_bytes'] for d in record.devices))}/worker")
        else:
            line = Text(f"RAM {record.host_rss_bytes / 2**30:.1f} of {self._watched.ram_bytes / 2**30:.1f} GiB")
        line.append(f"  optimizer {record.optimizer_seconds:.2g} s behind")
        if self._saved is not None:
            name, when = self._saved
            line.append(f"  saved {name} {_ago(self._now() - when)}")
        return line

    def _workers(self) -> list[Text]:
        if self._watched is None:
            return []
        heading = f"{'worker':{_FIRST_COLUMN}}{'busy':>5}  {'GiB now/peak/limit':>18}  {'GB/s up/down':>12}  slot"
        return [
            Text(heading, style="dim", no_wrap=True, overflow="crop"),
            *map(self._worker, self._watched.workers()),
        ]

    def _worker(self, worker: WorkerNow) -> Text:
        assert self._watched is not None
        seen = self._watched.seen
        figures = next((w for w in seen.workers if w.name == worker.name), None) if seen is not None else None
        busy, link = "-", "-"
        if figures is not None:
            busy, link = (
                f"{figures.busy:.0%}",
                f"{_short(figures.up_rate / 1e9)}/{_short(figures.down_rate / 1e9)}",
            )
        limit = "-" if worker.limit_bytes is None else _short(worker.limit_bytes / 2**30)
        memory = f"{_short(worker.used_bytes / 2**30)}/{_short(worker.peak_bytes / 2**30)}/{limit}"
        found = _SLOT.match(worker.task)
        if found is not None:
            number, kind, stage, microbatch = found.groups()
            self._slots[worker.name] = f"{number} {kind} {stage}"
            slot = self._slots[worker.name] + (f" mb {microbatch}" if microbatch else "")
        else:
            slot = self._slots.get(worker.name, "-") + " waits"
        row = f"{worker.name:{_FIRST_COLUMN}}{busy:>5}  {memory:>18}  {link:>12}  {slot}"
        return Text(row, no_wrap=True, overflow="crop")

    def _timeline(self, width: int) -> list[Text]:
        seen = None if self._watched is None else self._watched.seen
        if seen is None:
            return []
        room = max(10, min(_LONGEST_TIMELINE, width - _FIRST_COLUMN))
        if self._drawn[:2] != (seen, room):
            self._drawn = seen, room, cells(seen, room)
        rows = self._drawn[2]
        drawn = {kind for _, row in rows for kind in row}
        heading = Text(f"step {seen.step}, {seen.seconds:.3g} s: ", style="dim")
        for kind, name in NAMES.items():
            if kind in drawn:
                heading.append(LETTERS[kind], style=f"not dim {_STYLES[kind]}").append(f" {name}  ")
        lines = [heading.append(f"{IDLE} idle")]
        for name, row in rows:
            line = Text(f"{name:{_FIRST_COLUMN}}", no_wrap=True, overflow="crop")
            for kind, run in groupby(row):
                count = len(list(run))
                line.append((LETTERS[kind] if kind else IDLE) * count, style=_STYLES[kind] if kind else "dim")
            lines.append(line)
        return lines


def _bar(share: float, room: int, ascii_only: bool) -> Text:
    full, empty = ("#", "-") if ascii_only else ("━", "─")
    width = max(_SHORTEST_BAR, min(_LONGEST_BAR, room))
    count = round(max(0.0, min(1.0, share)) * width)
    return Text().append(full * count, style="green").append(empty * (width - count), style="dim")


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.2g}" if value >= 0.01 else "<.01"


def _ago(seconds: float) -> str:
    if seconds < 60:
        return "just now"
    return f"{seconds / 60:.0f} min ago" if seconds < 5400 else f"{seconds / 3600:.1f} h ago"
