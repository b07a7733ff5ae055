"""What a person sees of a run: plain lines, or a live display on a terminal."""

from __future__ import annotations

import os
import sys

from rpft.train.reporter import Reporter


def make_reporter(console: str, every_steps: int) -> Reporter:
    """The reporter of ``logging.console``; auto: a live display on a terminal, plain lines elsewhere and in CI."""
    if console == "auto":
        console = "rich" if sys.stdout.isatty() and not os.environ.get("CI") else "plain"
    if console == "rich":
        from rpft.console.live import LiveReporter

        return LiveReporter()
    from rpft.console.plain import PlainReporter

    return PlainReporter(every_steps)
