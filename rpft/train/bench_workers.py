"""A recipe's run measured on different numbers of workers, each in a process of its own, so that none leaves
memory, threads or compiled layers to the next."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import rpft
from rpft import files
from rpft.errors import UserError
from rpft.host import available_cores
from rpft.plan.bill import gib
from rpft.recipe.schema import Recipe
from rpft.train.bench import WINDOWS, Measured, measure
from rpft.train.prepare import Prepared, prepare
from rpft.train.weights import load_weights

_BUSY = 0.2
"""Processes that want to run, a core, before a bench begins, from which on it says that others work here."""

SetUp = Callable[[Recipe], None]
"""Process-wide settings, before any tensor exists."""


@dataclass(frozen=True)
class Failed:
    """A number of workers that could not be measured."""

    workers: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"workers": self.workers, "failed": self.reason}


def bench(
    recipe: Recipe, workers: Sequence[int], num_steps: int, set_up: SetUp, say: Callable[[str], None]
) -> list[Measured | Failed]:
    """One result a number of workers; a number that does not work is a result with its reason."""
    results: list[Measured | Failed] = []
    for count in workers:
        say(f"{count} worker(s)")
        context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
        with ProcessPoolExecutor(1, context, initializer=set_up, initargs=(recipe,)) as process:
            try:
                results.append(process.submit(bench_here, recipe, count, num_steps).result())
            except BrokenProcessPool:
                results.append(Failed(count, "its process was ended, as the system does where RAM runs out"))
    return results


def bench_here(recipe: Recipe, workers: int, num_steps: int) -> Measured | Failed:
    """The result for ``workers``, measured in this process."""
    try:
        prepared = prepare(recipe.with_values("engine", workers=workers), _say, measured=True)
        with _place_for_frozen(prepared) as folder:
            return measure(prepared, load_weights(prepared, Path(folder), lambda done, total: None), num_steps)
    except UserError as error:
        return Failed(workers, str(error))
    except Exception as error:  # the other numbers of workers are worth having all the same
        return Failed(workers, f"{type(error).__name__}: {error}")


def _place_for_frozen(prepared: Prepared) -> AbstractContextManager[str]:
    """A folder on the disk of the run, gone again in the end, where the plan has frozen weights on the disk."""
    output_dir = Path(prepared.recipe.output_dir)
    if not prepared.on_disk:
        return nullcontext(str(output_dir))
    return TemporaryDirectory(prefix=".rpft-bench-", dir=files.existing_folder(output_dir))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def default_workers(recipe: Recipe) -> list[int]:
    """1, 2, 4 and so on up to all workers of the recipe."""
    on_cuda = recipe.engine.device != "cpu" and torch.cuda.is_available()
    most = recipe.engine.workers or (torch.cuda.device_count() if on_cuda else 2)
    return sorted({*(1 << n for n in range(most.bit_length()) if 1 << n <= most), most})


def load_average() -> float | None:
    """Processes that wanted to run in the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def not_quiet(load: float | None) -> str | None:
    """What a person should know of a machine that is busy with something else; None where it is not."""
    if load is None or load < _BUSY * available_cores():
        return None
    return (
        f"others work on this machine: {load:.1f} processes wanted to run in the last minute, on"
        f" {available_cores()} cores; figures are lower and less certain than on a quiet one"
    )


def as_json(about: dict[str, Any], results: Sequence[Measured | Failed]) -> str:
    """``results`` for programs. ``about``: what else the text says of how they came about."""
    machine = {
        "cores": available_cores(),
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rpft": rpft.__version__,
    }
    told = {"version": 1, **about, "windows": WINDOWS, "machine": machine}
    return json.dumps({**told, "results": [result.as_dict() for result in results]}, indent=1)


def table(results: Sequence[Measured | Failed]) -> list[list[str]]:
    """Rows of text: a row a figure, a column a number of workers; the first row is the heading."""
    measured = [result for result in results if isinstance(result, Measured)]
    rows: list[tuple[str, Callable[[Measured], str]]] = [
        ("tokens/s, drained", lambda m: f"{m.tokens_per_second:,.0f} ({_spread(m.windows)})"),
        ("tokens/s, long run", lambda m: f"{m.steady_tokens_per_second:,.0f} ({_spread(m.steady)})"),
        ("predicted", lambda m: f"{m.predicted_tokens_per_second:,.0f} ({m.error:+.1%})"),
        ("seconds a step", lambda m: f"{m.step_seconds:.3g}"),
        ("workers idle", lambda m: f"{m.bubble:.1%}"),
        ("predicted", lambda m: f"{m.predicted_bubble:.1%}"),
        ("idle for", _causes),
        ("transfers hidden", lambda m: "-" if m.hidden is None else f"{m.hidden:.1%}"),
        ("VRAM, peak of bill", lambda m: f"{gib(m.vram_peak_bytes)} of {gib(m.vram_bill_bytes)}"),
        ("RAM of bill", lambda m: f"{gib(m.ram_bytes)} of {gib(m.ram_bill_bytes)}"),
        ("limited by", lambda m: m.limited_by),
    ]
    heading = ["", *(f"{m.workers} worker{'s' if m.workers > 1 else ''}" for m in measured)]
    return [heading, *([name, *map(tell, measured)] for name, tell in rows)]


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):,.0f} to {max(values):,.0f}"


def _causes(m: Measured) -> str:
    """The causes that took a hundredth of the time or more, the longest first."""
    found = sorted(((share, cause) for cause, share in m.idle.items() if share >= 0.01), reverse=True)
    return "\n".join(f"{cause} {share:.1%}" for share, cause in found) or "-"
