"""A live display on a terminal: figures at its end, drawn anew and anew, and messages that scroll above them."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue

from rich.console import Console, ConsoleDimensions, ConsoleOptions, Group, RenderResult
from rich.control import Control
from rich.live import Live
from rich.text import Text

from rpft.console.board import Board
from rpft.console.text import clock, eval_text
from rpft.train.metrics import EvalRecord, StepRecord
from rpft.train.watched import Watched

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE = 0.5
_CLOSE_SECONDS = 5.0
_MOST_OF_THE_TIME = 0.002
"""The share of a core that drawing may take: after a frame there is a pause of so many times its length."""


class Terminal(Console):
    """A console whose size is that of the terminal it writes to, wherever the process's own streams lead."""

    @property
    def size(self) -> ConsoleDimensions:
        try:
            columns, lines = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            columns, lines = 0, 0
        return ConsoleDimensions(columns, lines) if columns and lines else super().size


class _Frame:
    """The board as Rich draws it, for the terminal's size at that moment."""

    def __init__(self, board: Board) -> None:
        self._board: Board | None = board

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines: list[Text] = []
        if self._board is not None:
            try:
                lines = self._board.lines(options.max_width, console.height - 1, options.ascii_only)
            except Exception:  # figures that cannot be drawn are no reason to lose the messages
                self._board = None
                logger.exception("the figures of the run can no longer be drawn")
        yield Group(*lines)


class LiveReporter:
    """Draws from a thread of its own, so that no slow terminal holds up the run; what is said scrolls above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._board = Board()
        self._error: OSError | None = None
        """What writing to the terminal gave in the drawing thread."""
        self.drawing_seconds = 0.0
        """That all frames so far took."""
        self._messages: SimpleQueue[tuple[Text | str, ...] | None] = SimpleQueue()
        """What is to be printed; None at the end. A handler of a signal may put something, too."""
        self._width = self._console.width
        self._live = self._put_up()
        self._thread = threading.Thread(target=self._draw_on, name="display", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        self._print(Text(clock(), style="dim"), text)

    def warn(self, text: str) -> None:
        self._print(Text(clock(), style="dim"), Text("warning:", style="bold yellow"), text)

    def loading(self, done: int, total: int) -> None:
        self._board.loading(done, total)

    def begin(self, first_step: int, num_steps: int, watched: Watched | None = None) -> None:
        if watched is not None:
            watched.wants_steps = True
        self._board.begin(first_step, num_steps, watched)

    def stepped(self, record: StepRecord) -> None:
        self._board.stepped(record)

    def evaluated(self, record: EvalRecord) -> None:
        self.say(eval_text(record))

    def saved(self, path: Path) -> None:
        self._board.saved(path.name)
        self.say(f"saved {path}")

    def close(self) -> None:
        """Leaves the last state of the display standing. A terminal that was halted is not waited for."""
        self._messages.put(None)
        self._thread.join(_CLOSE_SECONDS)
        self._raise_if_gone()

    def _print(self, *parts: Text | str) -> None:
        self._raise_if_gone()
        self._messages.put(parts)

    def _raise_if_gone(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the drawing thread, which alone writes to the terminal --------------------------------------------

    def _put_up(self) -> Live:
        live = Live(
            _Frame(self._board),
            console=self._console,
            auto_refresh=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        live.start()
        return live

    def _draw_on(self) -> None:
        try:
            self._draw_until_closed()
            self._live.refresh()
            self._live.stop()
        except OSError as error:  # the terminal is gone
            self._error = error

    def _draw_until_closed(self) -> None:
        next_frame = time.monotonic()
        while True:
            try:
                message = self._messages.get(timeout=max(0.0, next_frame - time.monotonic()))
            except Empty:
                begun = time.thread_time()
                self._draw()
                spent = time.thread_time() - begun
                self.drawing_seconds += spent
                next_frame = time.monotonic() + max(_SHORTEST_PAUSE, spent / _MOST_OF_THE_TIME)
                continue
            if message is None:
                return
            # Soft wrap: a command in a message can be copied from the terminal in one piece.
            self._console.print(*message, markup=False, soft_wrap=True)

    def _draw(self) -> None:
        width = self._console.width
        if width != self._width:
            # The terminal broke the lines that are there anew, or not: nobody can tell where they are.
            self._width = width
            self._live.stop()
            self._console.control(Control.clear(), Control.home())
            self._live = self._put_up()
        self._live.refresh()
