"""run.log: everything that a run and its libraries say, so that the terminal keeps to what a person must know."""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import re
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

RUN_LOG = "run.log"

_OURS = "rpft"
_TELLING = re.compile(r"CUDA initialization|NVIDIA driver|CUDA capability|HIP initialization")
"""In warnings of libraries: what a person must know all the same."""


def _print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


class RunLog:
    """From entering to leaving, what is logged, warned of, or written to standard error goes to the log.

    Shown too are our own warnings and everybody's errors. Until ``open`` names its folder the log waits in a
    temporary file, since a run that is refused leaves nothing behind. Where standard error itself is taken, which
    is for terminals, a crash still says there where it was.
    """

    def __init__(self, take_stderr: bool) -> None:
        """``take_stderr``: also what libraries write to file descriptor 2; their lines bear no time."""
        self._takes_stderr = take_stderr
        self._taken: list[int] = []
        """File descriptors that lead to the log."""
        self._show: Callable[[str], None] = _print_warning
        self._lock = threading.RLock()  # a signal's handler may say something while its thread does
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> RunLog:
        self._file: Any = tempfile.TemporaryFile(buffering=0)
        root = logging.getLogger()
        self._handlers: list[logging.Handler] = [_ToLog(self.write), _ToScreen(self)]
        for handler in self._handlers:
            root.addHandler(handler)
            self._undo.append(lambda handler=handler: root.removeHandler(handler))
        level = root.level
        root.setLevel(logging.INFO)
        self._undo.append(lambda: root.setLevel(level))
        self.adopt()
        self._capture_warnings()
        if self._takes_stderr:
            self._take_stderr()
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._file.close()

    def open(self, folder: Path) -> None:
        """Has the log stand in ``folder``, behind what is there of earlier runs, from its beginning."""
        self.adopt()
        with self._lock, suppress(OSError):  # on a disk that takes nothing it stays where it is
            file = (folder / RUN_LOG).open("ab", buffering=0)
            self._file.seek(0)
            while block := self._file.read(1 << 16):
                file.write(block)
            self._file.close()
            self._file = file
            for descriptor in self._taken:
                os.dup2(file.fileno(), descriptor)

    def show_through(self, show: Callable[[str], None]) -> None:
        """From now on ``show`` is given what a person must know."""
        self._show = show

    def take_python_stderr(self) -> None:
        """From now on also what Python code writes to standard error goes to the log, progress bars among it."""
        if self._takes_stderr:
            sys.stderr = _LogStream(self.write)

    def take_stdout(self) -> TextIO:
        """From now on what C++ code and child processes write to standard output goes to the log.

        Gives the terminal, for a display, which alone may write to it. It is left open: a thread may still be
        writing to a terminal that was halted.
        """
        python = sys.stdout
        python.flush()
        descriptor = os.dup(1)
        terminal: TextIO = os.fdopen(os.dup(1), "w", encoding=python.encoding, errors=python.errors)
        self._lead_to_log(1)

        def undo() -> None:
            python.flush()
            os.dup2(descriptor, 1)
            os.close(descriptor)

        self._undo.append(undo)
        return terminal

    def adopt(self) -> None:
        """Takes over from the libraries imported so far that have a handler of their own for standard error."""
        for logger in list(logging.root.manager.loggerDict.values()):
            if not isinstance(logger, logging.Logger) or logger.propagate:
                continue
            for handler in list(logger.handlers):
                if type(handler) is logging.StreamHandler:
                    self._replace(logger, handler)

    def write(self, text: str) -> None:
        """One entry, with its time. A disk that does not take it is no reason to stop."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ")
        with self._lock, suppress(OSError, ValueError):
            self._file.write((stamp + text.rstrip("\n") + "\n").encode(errors="backslashreplace"))

    def show(self, text: str) -> None:
        with suppress(OSError):  # a terminal that is gone
            self._show(text)

    # -- taking --------------------------------------------------------------------------------------------

    def _replace(self, logger: logging.Logger, handler: logging.Handler) -> None:
        logger.removeHandler(handler)
        for own in self._handlers:
            logger.addHandler(own)

        def undo() -> None:
            for own in self._handlers:
                logger.removeHandler(own)
            logger.addHandler(handler)

        self._undo.append(undo)

    def _capture_warnings(self) -> None:
        before, log = warnings.showwarning, logging.getLogger("py.warnings")

        def note(
            message: Any, category: Any, filename: Any, lineno: Any, file: Any = None, line: Any = None
        ) -> None:
            if file is not None:
                before(message, category, filename, lineno, file, line)
            else:
                log.warning("%s:%s: %s: %s", filename, lineno, category.__name__, message)

        def undo() -> None:
            if warnings.showwarning is note:
                warnings.showwarning = before

        warnings.showwarning = note
        self._undo.append(undo)

    def _lead_to_log(self, descriptor: int) -> None:
        os.dup2(self._file.fileno(), descriptor)
        self._taken.append(descriptor)

    def _take_stderr(self) -> None:
        python = sys.stderr
        python.flush()
        descriptor = os.dup(2)
        terminal: TextIO = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        crashes = faulthandler.is_enabled()
        sys.stderr = terminal
        self._lead_to_log(2)
        faulthandler.enable(terminal)

        def undo() -> None:
            sys.stderr.flush()
            sys.stderr = python
            os.dup2(descriptor, 2)
            os.close(descriptor)
            faulthandler.disable()
            if crashes:
                faulthandler.enable(python)
            terminal.close()

        self._undo.append(undo)


class _ToLog(logging.Handler):
    """Everything, with the name of who says it."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))


class _ToScreen(logging.Handler):
    """What a person must know."""

    def __init__(self, log: RunLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.name.partition(".")[0] == _OURS:
            self._log.show(text)
        elif record.levelno >= logging.ERROR or _TELLING.search(text):
            self._log.show(f"{record.name}: {text}")


class _LogStream(io.TextIOBase):
    """Standard error of Python code, a line an entry. Of a progress bar the log has its last state."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write_line, self._rest, self._lock = write, "", threading.Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            self._rest = self._rest.rpartition("\r")[2] if len(self._rest) > 4096 else self._rest
        for line in lines:
            last = line.rstrip("\r").rpartition("\r")[2]
            if last.strip():
                self._write_line(last)
        return len(text)
