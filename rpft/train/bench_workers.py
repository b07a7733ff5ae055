"""A recipe's run measured on different numbers of workers, each in a process of its own, so that none leaves
memory, threads or compiled layers to the next."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpft import files
from rpft.errors import UserError
from rpft.host import available_cores
from rpft.peers import PEERS
from rpft.recipe.schema import Recipe
from rpft.train.bench import Measured, compared_losses, full_steps, measure
from rpft.train.bench_peers import PeerFailed, PeerOutcome, cannot_share, do_work, hand_over
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


@dataclass(frozen=True)
class Comparison:
    """What a run is to be compared with."""

    peers: Sequence[str]
    folder: Path
    """For their work and their logs."""
    losses: int
    """First steps whose losses are compared."""


def bench(
    recipe: Recipe,
    workers: Sequence[int],
    num_steps: int,
    set_up: SetUp,
    say: Callable[[str], None],
    comparison: Comparison | None = None,
) -> tuple[list[Measured | Failed], list[PeerOutcome]]:
    """One result a number of workers, and one of each peer; what does not work is one with its reason."""
    results: list[Measured | Failed] = []
    peers: list[PeerOutcome] = []
    refused = None if comparison is None else cannot_share(recipe)
    for count in workers:
        say(f"{count} worker(s)")
        arguments: tuple[Any, ...] = (recipe, count, num_steps)
        work = Path()
        if comparison is not None and refused is None:
            work = comparison.folder / f"{count}_workers"
            work.mkdir(parents=True, exist_ok=True)
            arguments += (work, comparison.losses)
        context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
        with ProcessPoolExecutor(1, context, initializer=set_up, initargs=(recipe,)) as process:
            try:
                results.append(process.submit(bench_here, *arguments).result())
            except BrokenProcessPool:
                results.append(Failed(count, "its process was ended, as the system does where RAM runs out"))
        for peer in () if comparison is None else comparison.peers:
            on = min(count, PEERS[peer].most_workers or count)
            if any((done.peer, done.workers) == (peer, on) for done in peers):
                continue  # what it has few workers for is the same with more
            if refused is not None:
                peers.append(PeerFailed(peer, on, refused))
                continue
            say(f"{on} worker(s): {peer}")
            peers.append(do_work(peer, work, on))
    return results, peers


def bench_here(
    recipe: Recipe, workers: int, num_steps: int, work: Path | None = None, num_losses: int = 0
) -> Measured | Failed:
    """The result for ``workers``, measured in this process.

    ``work``: a folder that gets the work for peers; then the losses of ``num_losses`` steps are in the result.
    """
    try:
        prepared = prepare(recipe.with_values("engine", workers=workers), _say, measured=True)
        with _place_for_frozen(prepared) as folder:
            store = load_weights(prepared, folder, lambda done, total: None)
            losses: list[float] = []
            if work is not None:
                compared = list(dict.fromkeys(full_steps(prepared, num_losses)))
                hand_over(prepared, store, work, compared, num_steps)
                losses = compared_losses(prepared, store, compared)
            return measure(prepared, store, num_steps, losses=losses)
    except UserError as error:
        return Failed(workers, str(error))
    except Exception as error:  # the other numbers of workers are worth having all the same
        return Failed(workers, f"{type(error).__name__}: {error}")


def _place_for_frozen(prepared: Prepared) -> AbstractContextManager[Path]:
    """A folder on the disk of the run, gone again in the end, where the plan has frozen weights on the disk."""
    output_dir = Path(prepared.recipe.output_dir)
    if not prepared.on_disk:
        return nullcontext(output_dir)
    return files.scratch_folder(files.existing_folder(output_dir), ".rpft-bench-")


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
