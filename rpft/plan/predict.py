"""What a step under a plan should take, and what limits it: the step is played again with one thing made free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rpft.plan.plan import Plan
from rpft.plan.rates import AT_ONCE, Rates
from rpft.plan.simulate import step_seconds
from rpft.plan.step_shape import StepShape


@dataclass(frozen=True)
class Prediction:
    """A step in the long run."""

    step_seconds: float
    tokens_per_second: float
    """Without padding, as metrics.jsonl counts them."""
    saved_seconds: dict[str, float]
    """How much shorter a step would be were compute, link, optimizer, fill and drain, or memory no limit; and the
    disk, where moments lie on it."""
    bubble: float
    """Share of the workers' time in which they do not compute."""
    roof_tokens_per_second: float
    """What the same layers would do resident on every worker: see ``roof_seconds``. Without padding."""

    @property
    def limited_by(self) -> str:
        """That of ``saved_seconds`` which would save most."""
        return max(self.saved_seconds, key=lambda name: self.saved_seconds[name])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step_seconds,
            "limited_by": self.limited_by,
            "saved_seconds": self.saved_seconds,
            "bubble_percent": 100 * self.bubble,
            "roof_tokens_per_second": self.roof_tokens_per_second,
        }


def predict(plan: Plan, shape: StepShape, rates: Rates, tokens: float) -> Prediction:
    """Plays a step of ``tokens`` real tokens under ``plan``.

    Compute, link, optimizer and disk are made free one at a time, the rest as it is. Fill and drain is what
    workers wait for one another: the step with links and optimizer free, less the work of all slots spread evenly.
    """
    seconds = step_seconds(plan, shape, rates)
    apart = replace(rates, memory=math.inf, copies_beside=1.0)
    nothing = dict.fromkeys(("forward", "backward", "recompute", "spared", "fused"), 0.0)
    idle = replace(shape, loads=[replace(load, **nothing) for load in shape.loads])
    computed, even = step_seconds(plan, shape, AT_ONCE), even_seconds(plan, shape)
    saved = {
        "compute": seconds - step_seconds(plan, idle, rates),
        "link": seconds - step_seconds(plan, shape, replace(apart, up=math.inf, down=math.inf, switch_share=0.0)),
        "optimizer": seconds - step_seconds(plan, shape, replace(apart, update=math.inf)),
        "fill-drain": computed - even,
    }
    if rates.moments < math.inf:
        saved["disk"] = seconds - step_seconds(plan, shape, replace(rates, moments=math.inf))
    least = {name: max(0.0, value) for name, value in saved.items()}
    bubble = max(0.0, 1 - even / seconds)
    return Prediction(seconds, tokens / seconds, least, bubble, tokens / roof_seconds(plan, shape))


def roof_seconds(plan: Plan, shape: StepShape) -> float:
    """What the microbatches of a step take if the whole model lies on every worker and nothing else takes time.

    Every layer runs forward, then recompute and backward, but the head, whose one pass is all of it: no transfer,
    no optimizer, no wait. A plan spares the forwards of its fused stage, and what it keeps, so it may do better.
    """
    forward = sum(load.forward for load in shape.loads[:-1])
    backward = sum(load.backward + load.recompute for load in shape.loads)
    speed = sum(shape.speeds) if shape.speeds is not None else shape.num_workers
    return shape.rounds * plan.num_microbatches * (forward + backward) / speed


def even_seconds(plan: Plan, shape: StepShape) -> float:
    """What a step takes if nothing but compute takes time and all workers are busy until its end."""
    loads = shape.loads

    def work(stages: Sequence[Any], backward: bool) -> float:
        layers = [loads[layer] for stage in stages for layer in stage.layers]
        return sum(load.backward + load.recompute if backward else load.forward for load in layers)

    microbatch = work(plan.forward, False) + work(plan.backward, True)
    microbatch += sum(loads[layer].fused for layer in plan.fused.layers)
    slots = plan.num_slots * shape.slot_seconds
    speed = sum(shape.speeds) if shape.speeds is not None else shape.num_workers
    return shape.rounds * (plan.num_microbatches * microbatch / speed + slots / shape.num_workers)
