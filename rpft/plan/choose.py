"""Chooses the plan of a run: the balanced one that fits, recomputing by stage where that fits, else by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton
from rpft.plan.bill import ModelShape, Workload, make_bill
from rpft.plan.costs import layer_costs
from rpft.plan.partition import balanced_plan
from rpft.plan.plan import Plan


def model_shape(config: Any, itemsize: int) -> ModelShape:
    """What of a transformers ``config`` the bill needs; ``itemsize``: bytes of a working weight."""
    text = config.get_text_config()
    hidden = text.hidden_size
    intermediate = getattr(text, "intermediate_size", None) or 4 * hidden
    return ModelShape(hidden, intermediate, text.vocab_size, itemsize)


def choose_plan(
    layouts: list[LayerLayout],
    skeleton: Skeleton,
    work: Workload,
    num_workers: int,
    num_microbatches: int,
    recompute: str,
    vram_bytes: int | None,
) -> Plan:
    """A plan for ``work`` on ``num_workers`` with ``vram_bytes`` each (None: no limit); ``recompute`` may be auto.

    Where none fits, the one with the smallest stages, whose bill says by how much.
    """
    costs = layer_costs(layouts, skeleton)
    rounds = -(-work.accumulation // num_microbatches)
    grains: Sequence[str] = ("stage", "layer") if recompute == "auto" else (recompute,)

    def fits(plan: Plan) -> bool:
        return vram_bytes is None or make_bill(plan, layouts, work).device <= vram_bytes

    for grain in grains:
        plan = balanced_plan(costs, num_workers, num_microbatches, rounds, grain, fits)
        if plan is not None:
            return plan
    plan = balanced_plan(costs, num_workers, num_microbatches, rounds, grains[-1], _has_smallest_stages)
    assert plan is not None
    return plan


def _has_smallest_stages(plan: Plan) -> bool:
    """One block a stage; the embedding may share the lowest one."""
    return all(len(stage.layers) <= 2 for stage in plan.backward)
