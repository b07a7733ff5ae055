"""What this process has of the machine that it runs on: cores, and a place for what it would else make anew."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

CXX_NAMES = ("g++", "clang++")
"""C++ compilers, for ``find_compiler``."""


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cache_folder(kind: str) -> Path:
    """Where things of one kind are kept for the next run; need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rpft" / kind


def find_compiler(variable: str, names: Sequence[str]) -> list[str] | None:
    """A compiler's command: that of the environment's ``variable``, or if it is not set the first of ``names``.

    None where there is no such program.
    """
    own = shlex.split(os.environ.get(variable, ""))
    commands = [own] if own else [[name] for name in names]
    return next((words for words in commands if shutil.which(words[0])), None)
