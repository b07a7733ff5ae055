"""A live display on a terminal: a progress bar, the last step's figures below it, events as lines above it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from rpft.console.text import Pace, clock, eval_text
from rpft.plan.bill import gib
from rpft.train.metrics import EvalRecord, StepRecord


class _BarAndFigures(Progress):
    """Progress bars with a text below them, which wraps where the terminal is narrow."""

    figures = Text()

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.figures:
            yield self.figures


class LiveReporter:
    """Rich progress; what is printed scrolls above the bar."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._progress = _BarAndFigures(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
            console=self._console,
        )
        self._progress.start()
        self._loading: TaskID | None = None
        self._steps: TaskID | None = None

    def say(self, text: str) -> None:
        # Soft wrap: a command in a message can be copied from the terminal in one piece.
        self._console.print(Text(clock(), style="dim"), text, markup=False, soft_wrap=True)

    def loading(self, done: int, total: int) -> None:
        if self._loading is None:
            self._loading = self._progress.add_task("loading", total=total, eta="")
        self._progress.update(self._loading, completed=done)

    def begin(self, first_step: int, num_steps: int) -> None:
        if self._loading is not None:
            self._progress.remove_task(self._loading)
        self._pace = Pace(num_steps)
        self._steps = self._progress.add_task("training", total=num_steps, completed=first_step - 1, eta="")

    def stepped(self, record: StepRecord) -> None:
        assert self._steps is not None
        worst = max(d["peak_bytes"] for d in record.devices)
        self._progress.figures = Text.assemble(
            (f"loss {record.loss:.4f}", "bold"),
            f"  lr {record.learning_rate:.1e}  norm {record.grad_norm:.2f}  {record.tokens_per_second:.0f} tok/s",
            f"  {gib(worst)}/worker  RAM {gib(record.host_rss_bytes)}",
            (f"  skipped {record.skipped_steps}" if record.skipped_steps else "", "red"),
        )
        self._progress.update(self._steps, completed=record.step, eta=f"ETA {self._pace.eta(record)}")

    def evaluated(self, record: EvalRecord) -> None:
        self.say(eval_text(record))

    def saved(self, path: Path) -> None:
        self.say(f"saved {path}")

    def close(self) -> None:
        """Leaves the last state of the display standing."""
        self._progress.stop()
