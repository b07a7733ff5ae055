"""A live display on a terminal: a progress bar with the last step's figures, events as lines above it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from rpft.console.text import Pace, clock, eval_text
from rpft.plan.bill import gib
from rpft.train.metrics import EvalRecord, StepRecord


class LiveReporter:
    """Rich progress; what is printed scrolls above the bar."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
        )
        self._progress.start()
        self._loading: TaskID | None = None
        self._steps: TaskID | None = None

    def say(self, text: str) -> None:
        self._console.print(Text(clock(), style="dim"), text, markup=False)

    def loading(self, done: int, total: int) -> None:
        if self._loading is None:
            self._loading = self._progress.add_task("loading", total=total, figures="")
        self._progress.update(self._loading, completed=done)

    def begin(self, first_step: int, num_steps: int) -> None:
        if self._loading is not None:
            self._progress.remove_task(self._loading)
        self._pace = Pace(num_steps)
        self._steps = self._progress.add_task("training", total=num_steps, completed=first_step - 1, figures="")

    def stepped(self, record: StepRecord) -> None:
        assert self._steps is not None
        worst = max(d["peak_bytes"] for d in record.devices)
        skipped = f"  [red]skipped {record.skipped_steps}[/red]" if record.skipped_steps else ""
        figures = (
            f"[bold]loss {record.loss:.4f}[/bold]  lr {record.learning_rate:.1e}  norm {record.grad_norm:.2f}"
            f"  {record.tokens_per_second:.0f} tok/s  {gib(worst)}/worker  RAM {gib(record.host_rss_bytes)}"
            f"  ETA {self._pace.eta(record)}{skipped}"
        )
        self._progress.update(self._steps, completed=record.step, figures=figures)

    def evaluated(self, record: EvalRecord) -> None:
        self.say(eval_text(record))

    def saved(self, path: Path) -> None:
        self.say(f"saved {path}")

    def close(self) -> None:
        """Leaves the last state of the display standing."""
        self._progress.stop()
