"""Writes a benchmark's figures as JSON, with what is needed to repeat them."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rpft.host import available_cores, processor
from rpft.machine import counted, versions

ROOT = Path(__file__).resolve().parents[1]


def machine(devices: list[str]) -> str:
    """``devices`` (names of the GPUs, or the CPU pool), processors and software, in one line."""
    software = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"{' + '.join(counted(devices))}; {processor()}, {available_cores()} cores; {software}"


def commit() -> str:
    """The commit of the checkout, with -dirty where files differ from it; unknown without git or a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def write_record(path: Path, name: str, machine: str, results: list[dict[str, Any]], **more: Any) -> None:
    """``results``: [{case, metric, value, unit}]; ``more`` goes beside them, or replaces what is found out."""
    record = {
        "name": name,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine,
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        **more,
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
