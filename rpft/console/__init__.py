"""What a person sees of a run: plain lines, or a live display on a terminal."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from rpft.train.reporter import Reporter

_DUMB = ("dumb", "unknown")
"""Terminals whose cursor cannot be moved."""


def choose_console(console: str) -> str:
    """What ``logging.console`` comes to; auto: rich on a terminal that can do it, plain elsewhere and in CI."""
    if console != "auto":
        return console
    plain = os.environ.get("CI") or os.environ.get("TERM", "").lower() in _DUMB
    return "rich" if sys.stdout.isatty() and not plain else "plain"


def make_reporter(console: str, every_steps: int, terminal: TextIO | None = None) -> Reporter:
    """The reporter of ``logging.console``: a live display, on ``terminal`` or standard output, or plain lines."""
    if choose_console(console) == "rich":
        from rpft.console.live import LiveReporter, Terminal

        return LiveReporter(Terminal(file=terminal, highlight=False))
    from rpft.console.plain import PlainReporter

    return PlainReporter(every_steps)
