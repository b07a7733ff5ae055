"""Signals: a first one asks for a save at the next step boundary, a second one ends the run at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; what a machine that shuts down or a batch system sends; a terminal that was closed."""


class Interrupted(BaseException):
    """The user asked to stop; the run is saved at ``checkpoint``, after ``step``."""

    def __init__(self, signal_number: int, step: int, checkpoint: Path) -> None:
        super().__init__(f"stopped after step {step}, saved in {checkpoint}")
        self.signal_number = signal_number


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal came; nothing was saved since the last checkpoint."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("interrupted")
        self.signal_number = signal_number


class Interrupts:
    """Whether, and by which signal, a run was asked to stop."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.asked: int | None = None
        """The number of the first signal that came."""
        self._ours: list[signal.Signals] = []
        """Signals that the run may take."""

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Signals are for the run while inside; only in the main thread, elsewhere none can be caught."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        # Who starts a run with nohup wants it to outlive the terminal. None is a handler of a program around
        # Python, which Python cannot put back: the signal stays that program's.
        self._ours = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
        for number in self._ours:
            signal.signal(number, self._ask)
        try:
            yield
        finally:
            for number in self._ours:
                signal.signal(number, before[number])

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = number
        for n in self._ours:
            # A terminal that is closed often sends SIGHUP twice, itself and through the shell: that is no haste.
            signal.signal(n, signal.SIG_IGN if n == signal.SIGHUP else self._leave)
        with suppress(RuntimeError):  # printing is not reentrant, and the signal may have come inside of it
            self._say("stopping after this step, to save; once more to stop at once without saving")

    def _leave(self, number: int, frame: Any) -> None:
        for n in self._ours:
            signal.signal(n, signal.SIG_IGN)  # closing takes seconds, and a third signal would cut it short
        raise StoppedAtOnce(number)
