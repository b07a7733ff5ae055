"""A run's next smaller plan, for a worker whose memory did not do: smaller by its stages, then by its rows."""

from __future__ import annotations

from dataclasses import replace

from rpft.plan.bill import gib, make_bill
from rpft.plan.costs import scaled
from rpft.plan.plan import Plan
from rpft.plan.rates import ASSUMED_RATES
from rpft.plan.smaller import smaller_plan
from rpft.train.planned import AnyPlanned, Planned


def smaller(planned: AnyPlanned) -> AnyPlanned | None:
    """``planned`` for a worker whose memory did not do: see plan/smaller.py. None where nothing is smaller."""
    target = planned.target
    plan = smaller_plan(
        planned.plan,
        planned.layouts,
        planned.skeleton,
        target.workload(planned, planned.profiles),
        target.num_workers,
        target.ram_bytes,
        ASSUMED_RATES if planned.profiles is None else planned.rates,
        target.speeds,
    )
    if plan is None and planned.rows > 1:
        planned = _with_half_the_rows(planned)
        plan = planned.plan
    if plan is None:
        return None
    work = target.workload(planned, planned.profiles)
    return replace(planned, plan=plan, given=None, bill=make_bill(plan, planned.layouts, work))


def what_is_smaller(before: Planned, now: Planned) -> str:
    """How the plan of ``now`` takes less of a worker's memory than that of ``before``, for people."""
    old, new = before.plan, now.plan

    def most_layers(plan: Plan) -> int:
        return max(len(stage.layers) for stage in plan.forward + plan.backward)

    layers = most_layers(old), most_layers(new)
    changes = [
        ("nothing is kept beside inputs", old.keep_bytes_per_token > new.keep_bytes_per_token),
        ("no frozen weights stay on the workers", len(old.resident) > len(new.resident)),
        (f"recompute by {new.recompute}", old.recompute != new.recompute),
        (f"at most {layers[1]} layers a stage, not {layers[0]}", layers[0] > layers[1]),
        (f"microbatches of {now.rows} rows, not {before.rows}", before.rows > now.rows),
    ]
    found = [text for text, changed in changes if changed] or ["other stages"]
    return f"{', '.join(found)}: {gib(now.bill.device)} a worker by the bill, not {gib(before.bill.device)}"


def _with_half_the_rows(planned: AnyPlanned) -> AnyPlanned:
    """``planned`` with microbatches of half the rows and as many more of them, in as many rounds; no new bill."""
    recipe, rows = planned.recipe, planned.rows // 2

    def count(microbatches: int) -> int:
        return -(-microbatches * planned.rows // rows)

    accumulation = count(recipe.train.gradient_accumulation_steps)
    profiles, share = planned.profiles, rows / planned.rows
    return replace(
        planned,
        recipe=recipe.with_values("train", micro_batch_size=rows, gradient_accumulation_steps=accumulation),
        data=replace(planned.data, micro_batch_size=rows),
        num_microbatches=count(planned.num_microbatches),
        profile=None,
        profiles=None if profiles is None else [scaled(profile, share) for profile in profiles],
        plan=replace(planned.plan, num_microbatches=count(planned.plan.num_microbatches)),
    )
