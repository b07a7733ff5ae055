"""about.json: what a run is, as it stood when it last began: machine, versions, workers, steps, data."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from rpft import files
from rpft.data.report import SourceReport
from rpft.machine import counted, machine_of
from rpft.plan.bill import gib
from rpft.train.prepare import Prepared
from rpft.train.resume import about_run
from rpft.train.run_folder import ABOUT_FILE

_OF_ROWS = ("path", "format", "rows", "trained_rows", "tokens", "trained_tokens", "dropped", "cut", "trimmed")


def write_about(prepared: Prepared, told: list[str]) -> None:
    """Leaves it in the output directory; ``told``: what the run says of itself when it begins."""
    data, run = prepared.data, about_run(prepared)
    held = data.eval if prepared.recipe.data.eval else None  # rows held out of the training rows are among those
    memory = [device.memory_bytes() for device in prepared.devices]
    about = {
        "begun": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": {
            **machine_of([device.torch_device for device in prepared.devices]),
            "ram_bytes": psutil.virtual_memory().total,
            "worker_memory_bytes": memory,
        },
        "versions": run["versions"],
        "workers": run["workers"],
        "kernels": run["kernels"],
        "num_steps": data.order.num_steps,
        "data": {
            "train": [_of_rows(report) for report in data.train.reports],
            "eval": [_of_rows(report) for report in held.reports] if held else [],
            "notes": list(data.notes),
        },
        "told": told,
    }
    files.write_whole(Path(prepared.recipe.output_dir) / ABOUT_FILE, json.dumps(about, indent=1) + "\n")


def machine_facts(about: dict[str, Any]) -> list[tuple[str, str]]:
    """The machine of an about.json for people: (what, which)."""
    machine = about["machine"]
    names, sizes = machine["workers"], [size for size in machine["worker_memory_bytes"] if size is not None]
    facts = [("workers", ", ".join(counted(names)))]
    if sizes:
        facts.append(("memory a run may take of each", gib(min(sizes))))
    facts.append(("processor", f"{machine['processor']}, {machine['cores']} cores"))
    facts.append(("RAM", gib(machine["ram_bytes"])))
    if machine["cuda"]:
        facts.append(("CUDA", machine["cuda"]))
    return facts


def _of_rows(report: SourceReport) -> dict[str, Any]:
    return {name: value for name, value in asdict(report).items() if name in _OF_ROWS}
