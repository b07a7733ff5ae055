"""Where figures of a run go beside metrics.jsonl: one thread brings them there and never holds up the run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rpft import files
from rpft.errors import UserError
from rpft.recipe.schema import Recipe
from rpft.train.metrics import EvalRecord, StepRecord

logger = logging.getLogger(__name__)

_MOST_WAITING = 10_000
_CLOSE_SECONDS = 15.0
"""How long the end of a run waits for figures that are still on their way."""

IDS_FILE = "followed.json"
"""In the output directory: under which ids other services know the run, so that one that goes on goes on there."""


class Sink(Protocol):
    """One service. All methods but the constructor are called from one thread, and may raise what they like."""

    name: str

    def begin(self, first_step: int) -> None:
        """Steps from ``first_step`` on follow; what is there of them is of a run that went back."""
        ...

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Figures of a step or evaluation; those that are not finite are left out."""
        ...

    def close(self, failed: bool) -> None:
        """The end; ``failed``: of a run that a fault ended."""
        ...


@dataclass(frozen=True)
class _Kind:
    """A service that a recipe can ask for."""

    key: str
    module: str
    package: str | None
    """To be installed, and imported by this name; None where nothing is needed."""
    wanted: Callable[[Recipe], object]


_KINDS = [
    _Kind("logging.tensorboard", "to_tensorboard", "tensorboard", lambda recipe: recipe.logging.tensorboard),
    _Kind("logging.wandb", "to_wandb", "wandb", lambda recipe: recipe.logging.wandb.project),
    _Kind("logging.mlflow", "to_mlflow", "mlflow", lambda recipe: recipe.logging.mlflow.experiment),
    _Kind("logging.prometheus_port", "to_prometheus", None, lambda recipe: recipe.logging.prometheus_port),
]


def missing_packages() -> dict[str, str]:
    """Key of a service to its package, of those that are not installed; imports nothing."""
    wanted = {kind.key: kind.package for kind in _KINDS if kind.package is not None}
    return {key: package for key, package in wanted.items() if importlib.util.find_spec(package) is None}


def refuse_without_packages(recipe: Recipe) -> None:
    """UserError where a service is asked for whose package is not installed."""
    missing = missing_packages()
    for kind in _KINDS:
        if kind.key in missing and kind.wanted(recipe):
            raise UserError(
                f"{kind.key} needs the package {kind.package}, which is not installed: `pip install"
                f" {kind.package}`, or take the key out of the recipe"
            )


def open_sinks(recipe: Recipe) -> Sinks:
    """Those that ``recipe`` asks for, ready; UserError where one cannot be reached."""
    opened: list[Sink] = []
    for kind in _KINDS:
        if not kind.wanted(recipe):
            continue
        try:
            opened.append(importlib.import_module(f"rpft.train.sinks.{kind.module}").make(recipe))
        except Exception as error:
            for sink in opened:
                sink.close(failed=True)
            if isinstance(error, UserError):
                raise
            raise UserError(f"{kind.key}: {type(error).__name__}: {error}") from error
    return Sinks(opened)


class Sinks:
    """Passes figures on. A sink that fails is left out from then on, which is said once."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = list(sinks)
        self._waiting: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(_MOST_WAITING)
        self._full = self._closed = self._failed = False
        self._thread = threading.Thread(target=self._work, name="sinks", daemon=True)
        if sinks:
            self._thread.start()

    def begin(self, first_step: int) -> None:
        self._put(lambda sink: sink.begin(first_step))

    def stepped(self, record: StepRecord) -> None:
        self._put(lambda sink: sink.log(record.step, figures_of(record)))

    def evaluated(self, record: EvalRecord) -> None:
        figures = finite({"eval_loss": record.eval_loss})
        self._put(lambda sink: sink.log(record.step, figures))

    def close(self, at_once: bool = False, failed: bool = False) -> None:
        """Waits a while for what is on its way, or ``at_once`` not at all, and ends the thread.

        ``failed``: a fault ended the run, and services are told so.
        """
        if self._closed:
            return
        self._closed, self._failed = True, failed
        if self._thread.is_alive():
            self._put(None)
            self._thread.join(0.0 if at_once else _CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.warning("figures are still on their way to %s; not waited for", self._names())

    def _names(self) -> str:
        return ", ".join(sink.name for sink in self._sinks)

    def _put(self, task: Callable[[Sink], None] | None) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._waiting.put_nowait(task)
        except queue.Full:
            if not self._full:
                self._full = True
                logger.warning("%s takes no figures; some are left out there", self._names())

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            self._each(task)
        self._each(lambda sink: sink.close(self._failed))

    def _each(self, task: Callable[[Sink], None]) -> None:
        self._sinks = [sink for sink in self._sinks if _done(task, sink)]


def _done(task: Callable[[Sink], None], sink: Sink) -> bool:
    """Whether ``sink`` did ``task``; says so where not."""
    try:
        task(sink)
    except Exception as error:
        logger.warning(
            "%s failed: %s: %s. No more figures go there; the run goes on, and metrics.jsonl has them all",
            sink.name,
            type(error).__name__,
            error,
        )
        return False
    return True


def figures_of(record: StepRecord) -> dict[str, float]:
    """The figures of a step, by name; of a worker's memory as "peak_bytes/NAME"."""
    names = [
        "epoch",
        "loss",
        "learning_rate",
        "grad_norm",
        "trained_tokens",
        "tokens",
        "tokens_per_second",
        "step_seconds",
        "optimizer_seconds",
        "skipped_steps",
        "host_rss_bytes",
    ]
    if record.router_aux_loss is not None:
        names.append("router_aux_loss")
    figures = {name: float(getattr(record, name)) for name in names}
    return finite(figures | {f"peak_bytes/{d['name']}": float(d["peak_bytes"]) for d in record.devices})


def finite(figures: dict[str, float]) -> dict[str, float]:
    """Without those that are not: a skipped step has no loss."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The keys of a recipe, dotted, for services that show a run's settings."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, part in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), part)
        else:
            flat[prefix] = value if isinstance(value, (int, float, str, bool, type(None))) else str(value)

    add("", recipe.model_dump())
    return flat


def known_id(recipe: Recipe, service: str) -> str | None:
    """Under which id ``service`` knows the run of this output directory."""
    try:
        return json.loads((Path(recipe.output_dir) / IDS_FILE).read_text(encoding="utf-8")).get(service)
    except (OSError, ValueError, AttributeError):
        return None


def keep_id(recipe: Recipe, service: str, identity: str) -> None:
    """Remembers the id for a run that goes on."""
    path = Path(recipe.output_dir) / IDS_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    files.write_whole(path, json.dumps({**known, service: identity}) + "\n")
