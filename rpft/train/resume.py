"""Going on with a run: what must be the same, what may differ, and which checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rpft.errors import UserError
from rpft.machine import versions
from rpft.recipe.schema import Recipe
from rpft.train.checkpoint import check_whole, read_state
from rpft.train.job import divide_rows
from rpft.train.metrics import MetricsFile
from rpft.train.output_dir import checkpoint_folder, result_folder
from rpft.train.prepare import Prepared

_OF_NO_INTEREST = {"output_dir", "train.resume_from_checkpoint"}


def run_identity(prepared: Prepared) -> dict[str, Any]:
    """What decides the numbers of a run; workers, plan and logging do not.

    Device and kernels decide roundings only, and a run may go on with others.
    """
    recipe, data = prepared.recipe, prepared.data
    return {
        "model": recipe.model.model_dump(mode="json"),
        "adapter": recipe.adapter.model_dump(mode="json") if recipe.adapter else None,
        "train": recipe.train.model_dump(mode="json", exclude={"eval_every", "resume_from_checkpoint"}),
        "optimizer": recipe.optimizer.model_dump(mode="json", exclude={"offload"}),
        "engine": {"host_gradients": str(prepared.gradient_dtype).removeprefix("torch.")},
        "data": {
            "items": len(data.items),
            "tokens": data.train.tokens,
            "trained_tokens": data.train.trained_tokens,
            "sha256": data.digest,
        },
        "num_steps": data.order.num_steps,
    }


def about_run(prepared: Prepared) -> dict[str, Any]:
    """What describes a run beyond its identity: the recipe as read, the plan, the versions."""
    return {
        "recipe": prepared.recipe.model_dump(mode="json"),
        "plan": prepared.plan.to_json(),
        "workers": [device.name for device in prepared.devices],
        "kernels": prepared.kernels.kind,
        "versions": versions(),
    }


def find_checkpoint(recipe: Recipe, wanted: bool | str) -> Path | None:
    """The checkpoint to resume from: ``True`` the newest whole one, a path that one, ``False`` none.

    Refused is a new run in a directory which holds one already, so that nothing is lost. To be called before
    ``prepare``, which takes minutes where layers are compiled and measured.
    """
    output_dir = Path(recipe.output_dir)
    if wanted is True:
        return checkpoint_folder(recipe).newest()
    if wanted:
        check_whole(Path(wanted))
        return Path(wanted)
    if MetricsFile(output_dir).path.exists():
        if not checkpoint_folder(recipe).all():
            raise UserError(
                f"output_dir {output_dir} already holds a run, and no checkpoint for --resume to go on from: give"
                " another output_dir"
            )
        raise UserError(
            f"output_dir {output_dir} already holds a run: give --resume to go on with it, or another output_dir"
        )
    result = result_folder(recipe)
    if result.exists():
        raise UserError(
            f"output_dir {output_dir} holds {result.name}/, which the result would replace: give another"
        )
    return None


def divided_as_before(recipe: Recipe, path: Path) -> Recipe:
    """``recipe``; where it leaves the rows of a microbatch open, with those of the run of checkpoint ``path``.

    Another choice would change roundings, and the resumed run would not be the unbroken one.
    """
    before = read_state(path).run.get("train", {}).get("micro_batch_size")
    in_step = recipe.train.gradient_accumulation_steps
    if recipe.train.micro_batch_size != "auto" or not isinstance(before, int) or in_step % before:
        return recipe
    return divide_rows(recipe, before)


def compare_runs(path: Path, prepared: Prepared, force: bool) -> list[str]:
    """Lines on what differs between the checkpoint ``path`` and the run as it is now.

    UserError naming every difference that changes the numbers, unless ``force``; such a run begins a history of
    its own, so that a checkpoint is not to have later ones beside it.
    """
    state = read_state(path)
    changes = list(_differences(state.run, run_identity(prepared)))
    if changes and not force:
        raise UserError(
            f"{path} is of another run than the recipe now describes: {'; '.join(changes)}. Change it back to go"
            " on with that run, or start this one in another output_dir; --force goes on all the same, and the"
            " result is then neither run's"
        )
    later = [p.name for p in checkpoint_folder(prepared.recipe).all() if p.name > path.name]
    if changes and later:
        raise UserError(
            f"--force with changed settings from {path}, and {', '.join(later)} of the run before lie beside it,"
            " newer: move them away, or give another output_dir"
        )
    lines = [f"going on with another run, as --force asks for: {change}" for change in changes]
    decided = {key for key, _ in _flat(state.run)}
    for change in _differences(state.about, about_run(prepared)):
        key = change.partition(" was ")[0].removeprefix("recipe.")
        if key == "plan":
            lines.append("goes on with another plan")
        elif key not in decided | _OF_NO_INTEREST:
            lines.append(f"goes on with a change that alters no result, but for roundings: {change}")
    return lines


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """For each dotted key that differs: KEY was A and is B."""
    old, new = dict(_flat(before)), dict(_flat(now))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"{key} was {old.get(key)} and is {new.get(key)}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
