"""Runs Python in a process of its own, with a time limit and a log, and says in one line why it failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_GRACE_SECONDS = 20
"""For what is ended to end what it has started in sessions of their own, as torchrun does."""


def run_python(
    words: Sequence[str], log: Path, seconds: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> tuple[int | None, list[str]]:
    """Runs Python with ``words``, its output added to ``log``; ``env`` goes on top of this process's.

    Gives (exit code, lines of output), or None for the code when it took longer than ``seconds`` and was ended,
    with every process that it had started; so it is when this process is ended by SIGTERM.
    """
    with _ending_on_sigterm(), log.open("a+", encoding="utf-8", errors="replace") as file:
        file.write(f"$ python {' '.join(words)}\n")
        file.flush()
        start = file.tell()
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # also when this call itself is interrupted
                _end(process)
        file.seek(start)
        return code, [line for line in file.read().splitlines() if line.strip()]


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Has SIGTERM end this process by way of its ``finally`` clauses."""
    if threading.current_thread() is not threading.main_thread():  # no other may say what signals do
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_NAMES_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b")
"""Above what torchrun says of a child that failed stands what the child said."""


def reason(lines: Sequence[str]) -> str:
    """The line that says the most: the last one that names an error, else the last."""
    named = [line for line in lines if _NAMES_ERROR.match(line) and "ChildFailedError" not in line]
    return (named or lines or ["no output"])[-1].strip()[:200]
