"""What this process has of the machine that it runs on: cores, and a place for what it would else make anew."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_folder(kind: str) -> Path:
    """Where things of one kind are kept for the next run; need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rpft" / kind
