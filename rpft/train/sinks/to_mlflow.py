"""Figures for MLflow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rpft.errors import UserError
from rpft.recipe.schema import Recipe
from rpft.train.sinks import keep_id, known_id, settings_of

_LONGEST_VALUE = 500
"""Characters of a parameter that every MLflow server takes."""


class ToMlflow:
    """One run there, through a client of its own, which leaves the process's active run alone."""

    name = "MLflow"

    def __init__(self, client: Any, metric: Any, run_id: str) -> None:
        self._client, self._metric, self._run_id = client, metric, run_id

    def begin(self, first_step: int) -> None:
        """Nothing is hidden there: the later figure of a step counts."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        # A name may hold letters, digits, "_", "-", ".", " " and "/".
        metrics = [self._metric(name.replace(":", "_"), value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")


def make(recipe: Recipe) -> ToMlflow:
    """Begins a run there, or goes on with that of the output directory; UserError where it cannot be reached."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    settings = recipe.logging.mlflow
    assert settings.experiment is not None
    try:
        client = MlflowClient(tracking_uri=settings.tracking_uri)
        run_id = known_id(recipe, "mlflow")
        if run_id is None:
            found = client.get_experiment_by_name(settings.experiment)
            experiment = client.create_experiment(settings.experiment) if found is None else found.experiment_id
            run_id = client.create_run(
                experiment, run_name=settings.name or Path(recipe.output_dir).name
            ).info.run_id
            params = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in settings_of(recipe).items()]
            for start in range(0, len(params), 100):  # of one call the server takes no more
                client.log_batch(run_id, params=params[start : start + 100])
            keep_id(recipe, "mlflow", run_id)
        else:
            client.update_run(run_id, status="RUNNING")
    except Exception as error:
        raise UserError(
            f"logging.mlflow: no run could be begun: {error}. Look at logging.mlflow.tracking_uri, or take"
            " logging.mlflow.experiment out"
        ) from error
    return ToMlflow(client, Metric, run_id)
