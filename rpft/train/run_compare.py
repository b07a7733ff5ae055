"""Several runs side by side: names that tell them apart, the recipe keys in which they differ, final figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpft.errors import UserError
from rpft.train.run_report import RunReport, report_run

_OF_EVERY_RUN = {"output_dir", "train.resume_from_checkpoint"}
"""Keys that say nothing of what a run does."""


@dataclass(frozen=True)
class Comparison:
    """Runs by the names that they have on page and table, in the order given."""

    runs: dict[str, RunReport]
    differing: dict[str, list[Any]]
    """Dotted recipe key to its value in each run; None where the run has no such section."""

    @property
    def cautions(self) -> list[str]:
        """What keeps figures from being compared."""
        said = []
        totals = [run.totals for run in self.runs.values()]
        if len({total.eval_tokens for total in totals if total.eval_tokens is not None}) > 1:
            said.append(
                "the evaluations are over different numbers of tokens: their losses are not of the same rows"
            )
        machines = [run.about.get("machine") for run in self.runs.values()]
        kinds = [machine and _kind(machine) for machine in machines]
        if any(kind != kinds[0] for kind in kinds):
            said.append("the runs were on different machines, or it is not known of all: compare speeds with care")
        counts = [len(machine["workers"]) for machine in machines if machine]
        if len(set(counts)) > 1:
            said.append(f"the runs had {', '.join(map(str, counts))} workers: their speeds are not of as many")
        unfinished = [name for name, run in self.runs.items() if run.standing != "finished"]
        if unfinished:
            said.append(f"not finished: {', '.join(unfinished)}")
        return said

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "runs": [
                {"name": name, **{key: value for key, value in run.as_dict().items() if key != "recipe"}}
                for name, run in self.runs.items()
            ],
            "differing": self.differing,
            "cautions": self.cautions,
        }


def read_runs(paths: Sequence[Path], most: int) -> Comparison:
    """The runs in ``paths``, ``most`` at most, which is how many lines a picture can tell apart.

    UserError for fewer than two or too many, for one that is there twice, and as ``report_run``.
    """
    if not 2 <= len(paths) <= most:
        raise UserError(f"give 2 to {most} output directories of runs to compare; these are {len(paths)}")
    resolved = [path.resolve() for path in paths]
    for i, path in enumerate(resolved):
        if path in resolved[:i]:
            raise UserError(f"{paths[i]} is there twice: give each run once")
    reports = [report_run(path) for path in paths]
    return Comparison(dict(zip(_names(resolved), reports, strict=True)), _differing(reports))


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that are all different."""
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("no two paths are the same")


def _kind(machine: dict[str, Any]) -> dict[str, Any]:
    """A machine of an about.json, however many of its workers a run had."""
    return machine | {"workers": set(machine["workers"]), "worker_memory_bytes": None}


def _differing(reports: Sequence[RunReport]) -> dict[str, list[Any]]:
    flat = [dict(_leaves(report.run.recipe.model_dump(mode="json"))) for report in reports]
    keys = dict.fromkeys(key for each in flat for key in each)
    return {
        key: [each.get(key) for each in flat]
        for key in keys
        if key not in _OF_EVERY_RUN and len({json.dumps(each.get(key)) for each in flat}) > 1
    }


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner
