"""The plan of ``engine.plan``: what it says, and whether it is one for this model and recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpft.errors import UserError
from rpft.model.skeleton import Skeleton
from rpft.plan.plan import Plan, read_about, read_plan
from rpft.recipe.schema import Recipe


def made_for(skeleton: Skeleton) -> dict[str, Any]:
    """What a plan file says of the model that it is for."""
    config = skeleton.model.config.get_text_config()
    return {
        "model": type(skeleton.model).__name__,
        "blocks": skeleton.num_blocks,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }


def about_given(recipe: Recipe) -> dict[str, Any]:
    """What the file of ``engine.plan`` says of how its plan was made; nothing where there is none."""
    return {} if recipe.engine.plan is None else read_about(Path(recipe.engine.plan))


def given_plan(recipe: Recipe, skeleton: Skeleton, num_layers: int) -> Plan | None:
    """The plan; UserError where it is not one for this model, or contradicts the recipe."""
    path = recipe.engine.plan
    if path is None:
        return None
    plan, settings = read_plan(Path(path)), recipe.engine
    now, then = made_for(skeleton), about_given(recipe).get("made_for", {})
    differences = [f"{key} {then[key]}, not {now[key]}" for key in now if key in then and then[key] != now[key]]
    if differences:
        raise UserError(
            f"engine.plan {path} does not fit {recipe.model.path}: it was made for {'; '.join(differences)}."
            " Make it again with `rpft plan`"
        )
    try:
        plan.check(num_layers)
    except UserError as error:
        raise UserError(f"engine.plan {path} does not fit {recipe.model.path}: {error}") from None
    wanted = (("num_microbatches", settings.num_microbatches), ("recompute", settings.recompute))
    for key, value in wanted:
        # A plan by hand is an answer to these settings; one that was made followed others.
        if then and value not in (None, "auto", getattr(plan, key)):
            raise UserError(
                f"engine.plan {path} does not fit the recipe: its {key} is {getattr(plan, key)} and"
                f" engine.{key} is {value}. Leave engine.{key} out, or make the plan again"
            )
    accumulation = recipe.train.gradient_accumulation_steps
    if then and accumulation % plan.num_microbatches:
        raise UserError(
            f"engine.plan {path} does not fit the recipe: its rounds have {plan.num_microbatches} microbatches, "
            f"and a step {accumulation} (train.gradient_accumulation_steps). Make the plan again with `rpft plan`"
        )
    return plan
