"""What a run's output directory says of the run: where it stands, its steps, totals, events, what it left."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rpft.errors import UserError
from rpft.train.checkpoint import fault
from rpft.train.layer_norms import LayerNormsFile
from rpft.train.metrics import StepRecord
from rpft.train.planned import PLAN_FILE
from rpft.train.run_folder import ABOUT_FILE, RunFolder, open_run, read_json
from rpft.train.run_lock import holder
from rpft.train.samples import Sample, read_samples
from rpft.train.tracing import TRACES_FOLDER

Standing = Literal["finished", "running", "stopped"]

_STEP_KEYS = [each.name for each in fields(StepRecord) if each.default is MISSING]
_ABOUT_KEYS = "begun", "machine", "versions", "kernels", "data"
_PLAN_KEYS = (
    "forward",
    "backward",
    "num_microbatches",
    "micro_batch_size",
    "rounds",
    "recompute",
    "memory",
    "predicted",
)
_IDLE_KEYS = "step", "workers"

_LAST_STEPS = 20
"""Steps whose median is the loss at the end: a single one is noise."""


@dataclass(frozen=True)
class Totals:
    """A run in figures; losses are means over trained tokens, None where there is none that is finite."""

    steps: int
    """The last one that is on record."""
    num_steps: int | None
    """All that the run is to have; None where nothing says it."""
    epochs: float
    tokens: int
    trained_tokens: int
    training_seconds: float
    """Sum over all steps; evaluations and the time before the first step are not in it."""
    tokens_per_second: float | None
    """Mean over all steps but the first, which compiles; None with fewer than two."""
    first_loss: float | None
    last_loss: float | None
    late_loss: float | None
    """Median of the last 20 steps, or of as many as there are."""
    last_eval_loss: float | None
    best_eval_loss: float | None
    best_eval_step: int | None
    eval_tokens: int | None
    skipped_steps: int
    peak_worker_bytes: int | None
    """Of the worker that took most."""
    peak_host_bytes: int | None


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint; ``fault`` says why it is not whole by its sizes, checksums are not read."""

    name: str
    num_bytes: int
    fault: str | None


@dataclass(frozen=True)
class TracedSteps:
    """A trace in the output directory."""

    name: str
    picture: Path
    idle: list[dict[str, Any]]
    """A step each: {step, workers: [{worker, window_seconds, busy_seconds, idle_seconds: {cause: seconds}}]}."""
    causes: dict[str, str]


@dataclass(frozen=True)
class RunReport:
    """All of it. Lines of metrics.jsonl are dicts as they stand there."""

    run: RunFolder
    standing: Standing
    holder: str | None
    """The process that a running one is."""
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    plan_changes: list[dict[str, Any]]
    rewinds: list[dict[str, Any]]
    about: dict[str, Any]
    """about.json; empty for a run of an rpft that did not write it."""
    plan: dict[str, Any]
    checkpoints: list[SavedCheckpoint]
    result_bytes: int | None
    """None until there is a result."""
    traces: list[TracedSteps]
    totals: Totals
    samples: list[Sample]
    """Those that the model has answered."""
    layer_norms: list[dict[str, Any]]
    """Lines of layer_norms.jsonl, {step, norms}; norms of layers of which no one is known are null."""

    @property
    def name(self) -> str:
        return self.run.path.absolute().name

    @property
    def skipped(self) -> list[int]:
        """Steps whose loss or gradient was not finite, or that were passed over: no update was made of them."""
        return [line["step"] for line in self.steps if line["loss"] is None or line["grad_norm"] is None]

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to go on from that is whole by its sizes."""
        return any(each.fault is None for each in self.checkpoints)

    @property
    def predicted(self) -> float | None:
        """Tokens a second, by the plan."""
        told = self.plan.get("predicted")
        return told["tokens_per_second"] if told else None

    @property
    def roof(self) -> float | None:
        """Tokens a second of the same layers resident, by the plan; None of plans from before it said so."""
        told = self.plan.get("predicted")
        return told.get("roof_tokens_per_second") if told else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; steps are counted and summed, each stands in metrics.jsonl."""
        return {
            "run": str(self.run.path),
            "state": self.standing,
            "process": self.holder,
            "totals": asdict(self.totals),
            "evaluations": self.evaluations,
            "skipped": self.skipped,
            "rewinds": self.rewinds,
            "plan_changes": self.plan_changes,
            "checkpoints": [asdict(each) for each in self.checkpoints],
            "result": None if self.result_bytes is None else str(self.run.result),
            "traces": [str(trace.picture) for trace in self.traces],
            "samples": [asdict(each) for each in self.samples],
            "about": self.about,
            "plan": self.plan,
            "recipe": self.run.recipe.model_dump(mode="json"),
        }


def report_run(path: Path) -> RunReport:
    """The run in ``path``, whether it is finished, running or stopped.

    UserError where there is none, or where no step of it is on record.
    """
    run = open_run(path)
    running = holder(path)
    lines = run.metrics()
    steps = [line for line in lines if "loss" in line]
    for line in steps:
        _check_keys(run.metrics_path, line, _STEP_KEYS, f"step {line['step']}: ")
    if not steps:
        what = (
            f"the run that writes it ({running}) has not finished one" if running else "the run never got so far"
        )
        raise UserError(
            f"{path}: no step is on record in {run.metrics_path.name}: {what}. Try again after its first step;"
            " run.log there says how far it is"
        )
    evaluations = [line for line in lines if line.get("eval_loss") is not None]
    about, plan = read_json(path / ABOUT_FILE), read_json(path / PLAN_FILE)
    _check_keys(path / ABOUT_FILE, about, _ABOUT_KEYS)
    _check_keys(path / PLAN_FILE, plan, _PLAN_KEYS)
    result_bytes = _size(run.result) if run.result.is_dir() else None
    return RunReport(
        run=run,
        standing="running" if running else "finished" if result_bytes is not None else "stopped",
        holder=running,
        steps=steps,
        evaluations=evaluations,
        plan_changes=[line for line in lines if "plan" in line],
        rewinds=[line for line in lines if "rewound_from" in line],
        about=about,
        plan=plan,
        checkpoints=[SavedCheckpoint(p.name, _size(p), fault(p, deep=False)) for p in run.checkpoints.all()],
        result_bytes=result_bytes,
        traces=_traces(path / TRACES_FOLDER),
        totals=_totals(steps, evaluations, about),
        samples=[sample for sample in read_samples(path) if sample.answered],
        layer_norms=LayerNormsFile(path).lines(),
    )


def _check_keys(path: Path, content: dict[str, Any], keys: Sequence[str], where: str = "") -> None:
    """UserError where a file that is there lacks what a run writes into it."""
    missing = [key for key in keys if key not in content]
    if content and missing:
        raise UserError(
            f"{path}: {where}{', '.join(missing)} missing: the file is not as a run leaves it, or of another rpft;"
            " put it back, or move it away"
        )


def _totals(
    steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], about: dict[str, Any]
) -> Totals:
    losses = [line["loss"] for line in steps if line["loss"] is not None]
    later = steps[1:]
    seconds = sum(line["step_seconds"] for line in later)
    best = min(evaluations, key=lambda line: line["eval_loss"], default=None)
    last = evaluations[-1] if evaluations else None
    peaks = [device["peak_bytes"] for line in steps for device in line["devices"]]
    return Totals(
        steps=steps[-1]["step"],
        num_steps=about.get("num_steps"),
        epochs=steps[-1]["epoch"],
        tokens=sum(line["tokens"] for line in steps),
        trained_tokens=sum(line["trained_tokens"] for line in steps),
        training_seconds=sum(line["step_seconds"] for line in steps),
        tokens_per_second=sum(line["tokens"] for line in later) / seconds if seconds else None,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        late_loss=statistics.median(losses[-_LAST_STEPS:]) if losses else None,
        last_eval_loss=last["eval_loss"] if last else None,
        best_eval_loss=best["eval_loss"] if best else None,
        best_eval_step=best["step"] if best else None,
        eval_tokens=last["eval_tokens"] if last else None,
        skipped_steps=steps[-1]["skipped_steps"],
        peak_worker_bytes=max(peaks, default=None),
        peak_host_bytes=max(line["host_rss_bytes"] for line in steps),
    )


def _size(folder: Path) -> int:
    """Bytes of the files in it; those that a running run takes away meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _traces(folder: Path) -> list[TracedSteps]:
    """In the order of their steps."""
    found = []
    for picture in sorted(folder.glob("step-*.svg"), key=lambda path: _first_step(path.stem)):
        path = picture.with_suffix(".idle.json")
        told = read_json(path)
        for step in told.get("steps", []):
            _check_keys(path, {"": None, **step}, _IDLE_KEYS)
        found.append(TracedSteps(picture.stem, picture, told.get("steps", []), told.get("causes", {})))
    return found


def _first_step(name: str) -> int:
    number = name.split("-")[1]
    return int(number) if number.isdigit() else 0
