"""A run that goes on with another plan: what its files, and the person who watches, are told of it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

from rpft.plan.bill import gib
from rpft.plan.plan import Plan
from rpft.train.checkpoint import TrainState
from rpft.train.metrics import MetricsFile, PlanRecord
from rpft.train.prepare import Prepared
from rpft.train.reporter import Reporter
from rpft.train.smaller import what_is_smaller


def with_plan_of(state: TrainState, now: Prepared) -> TrainState:
    """``state`` of a run that has the plan of ``now`` from the next step on, as its plan file says then, too."""
    with suppress(OSError):  # metrics.jsonl and checkpoints have the plan too
        now.write_plan_file()
    return replace(state, about={**state.about, "plan": now.plan.to_json()})


def note_smaller(
    metrics: MetricsFile, reporter: Reporter, done: int, error: BaseException, before: Prepared, now: Prepared
) -> None:
    """That ``error``, a device without memory, undid the step after ``done``, and how ``now`` takes less."""
    said = str(error).splitlines()[0]
    plan = {**json.loads(now.plan.to_json()), "micro_batch_size": now.rows}
    metrics.append(PlanRecord(done, said, plan))
    reporter.say(
        f"{said}. Step {done + 1} is undone and done again with a smaller plan:"
        f" {what_is_smaller(before, now)}; engine.vram_limit below {gib(before.bill.device)} plans so from the"
        " start"
    )


def note_faster(reporter: Reporter, step: int, before: Plan, now: Prepared) -> None:
    """That after ``step`` the plan of ``now`` takes the place of ``before``, and what that should save."""
    share = 100 * (1 - now.full_step_seconds / replace(now, plan=before).full_step_seconds)
    reporter.say(
        f"step {step}: by the times of the first steps another plan is {share:.0f}% faster: the"
        f" run goes on with it: forward {' '.join(map(str, now.plan.forward)) or '-'}; backward"
        f" {' '.join(map(str, now.plan.backward))}; recompute by {now.plan.recompute} (no number changes)"
    )
