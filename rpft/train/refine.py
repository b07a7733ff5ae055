"""The first steps of a run, timed, and the plan that they ask for: what was measured apart is measured at work.

A layer alone on a device is not a layer beside copies, other workers and the optimizer, and where nothing was
measured the plan came from the shapes of weights. So one step is traced, and where another plan would be faster by
more than it costs to change, the run goes on with that one. No number depends on it: rounds and microbatches stay,
and compiled layers, whose roundings differ between their graphs, keep the graphs that they run as.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rpft.engine.streams import Stream
from rpft.engine.trace import PART, TASK, Trace
from rpft.engine.tracer import Tracer, being_traced
from rpft.plan.bill import Billing
from rpft.plan.choose import step_shape
from rpft.plan.costs import layer_costs, measured_costs, scaled
from rpft.plan.partition import improved
from rpft.plan.plan import Plan, Stage
from rpft.plan.profile import LayerProfile
from rpft.plan.rates import Rates
from rpft.plan.simulate import update_seconds
from rpft.train.planned import AnyPlanned, Planned
from rpft.train.planning import plan_in_rounds
from rpft.train.prepare import Prepared

WORTH_A_CHANGE = 0.03
"""Share of a step that another plan must save."""

_TRACED = 3
"""Which step of a run is traced: the first ones compile, and fill caches."""

_PAYS_AFTER = 3.0
"""Steps that all that are left must save together: to empty and fill the pipeline, and to plan."""

_EVEN = 1.1
"""Workers whose times are within this of one another are alike."""

_LEAST_OF_A_HEAD = 0.1
"""Of the fused stage's ratio, what a head keeps at least when the blocks beside it are taken off."""

_ENOUGH_BYTES, _ENOUGH_PARAMETERS = 1 << 24, 1 << 22
"""Of copies and updates, for a rate: fewer say more of what it takes to begin."""

_UPDATE = re.compile(r": update of layer (\d+)(?: \[(\d+)\.\.(\d+)\])?$")


class FirstSteps:
    """Traces one of the first steps and says whether another plan pays. Called from the training loop."""

    def __init__(self, planned: Prepared, first: int, num_steps: int) -> None:
        """``first``: the step that the run begins with."""
        self._planned, self._traced, self._num_steps = planned, first + _TRACED - 1, num_steps
        self._tracer: Tracer | None = None
        left = num_steps - self._traced
        # A plan that was given is meant; times with delays of our own are none.
        settings = planned.recipe.engine
        self._wanted = planned.given is None and settings.inject_delays is None
        self._wanted &= left * WORTH_A_CHANGE > _PAYS_AFTER

    def before(self, step: int, streams: Sequence[Stream]) -> None:
        """To be called before ``step`` is submitted. One that is traced for somebody else is left to them."""
        if self._wanted and self._tracer is None and step >= self._traced and not being_traced(streams):
            self._traced = step
            self._tracer = Tracer(streams)
            self._tracer.start()

    def forget(self) -> None:
        """The run goes on otherwise: nothing is traced or changed any more."""
        if self._tracer is not None:
            self._tracer.drop()
        self._tracer, self._wanted = None, False

    def after(self, step: int) -> Prepared | None:
        """To be called when ``step`` is finished; another plan for those after the next, where that pays."""
        if self._tracer is None or step < self._traced:
            return None
        trace, self._tracer, self._wanted = self._tracer.stop(), None, False
        measured = as_measured(self._planned, trace)
        if measured is None:
            return None
        found = replanned(measured)
        now, then = measured.full_step_seconds, found.full_step_seconds
        left = self._num_steps - step - 1
        pays = now - then > WORTH_A_CHANGE * now and left * (now - then) > _PAYS_AFTER * now
        return found if pays and found.memory_short == 0 else None


def as_measured(planned: AnyPlanned, trace: Trace) -> AnyPlanned | None:
    """``planned``, its plan as it is, with the times of ``trace`` in the place of those it was made from.

    Layers keep their proportions: forward, backward and head each take so many times as long as was thought.
    None where the trace does not hold a slot of each kind.
    """
    plan, head = planned.plan, planned.plan.fused.last
    thought = planned.profiles or _from_shapes(planned)
    expected = _expected(planned, thought)
    took = {slot: times for slot, times in _slot_seconds(trace).items() if slot in expected}
    if {kind for kind, _ in took} != {kind for kind, _ in expected}:
        return None

    def ratio(kind: str) -> float | None:
        known = [slot for slot in took if slot[0] == kind]
        seconds = sum(statistics.median(took[slot]) for slot in known)
        return seconds / sum(expected[slot] for slot in known) if known else None

    fused = ratio("fused")
    assert fused is not None
    behind = ratio("backward") or fused
    ahead = ratio("forward") or behind
    of_head = thought[head].fused_seconds / sum(thought[layer].fused_seconds for layer in plan.fused.layers)
    last = max(_LEAST_OF_A_HEAD * fused, (fused - behind * (1 - of_head)) / of_head)
    profiles = [
        replace(
            profile,
            forward_seconds=(last if layer == head else ahead) * profile.forward_seconds,
            backward_seconds=(last if layer == head else behind) * profile.backward_seconds,
            kept_seconds=None if profile.kept_seconds is None else behind * profile.kept_seconds,
        )
        for layer, profile in enumerate(thought)
    ]
    speeds = _speeds(trace, _expected(planned, profiles))
    target = replace(planned.target, rates=_rates(planned, trace), speeds=speeds)
    return replace(planned, target=target, profile=None, profiles=profiles)


def _expected(planned: Planned, profiles: Sequence[LayerProfile]) -> dict[tuple[str, Stage], float]:
    """What each (kind, stage) should compute for a microbatch as long as they are on average."""
    plan, share = planned.plan, planned.mean_step()[0] / planned.max_tokens
    mean = [scaled(profile, share) for profile in profiles]
    costs = measured_costs(mean, plan.keep_bytes_per_token, plan.recompute)
    found = {("forward", stage): sum(costs[i].forward for i in stage.layers) for stage in plan.forward}
    found["fused", plan.fused] = sum(costs[i].with_recompute + costs[i].fused for i in plan.fused.layers)
    for stage in plan.backward[1:]:
        if any(planned.layouts[i].grad_elements for i in range(stage.last + 1)):
            found["backward", stage] = sum(costs[i].with_recompute - costs[i].spared for i in stage.layers)
    return found


def _from_shapes(planned: Planned) -> list[LayerProfile]:
    """Profiles whose times have the right proportions only, and no bytes."""
    costs = layer_costs(planned.layouts, planned.skeleton)
    return [LayerProfile(1e-12 + cost.forward, 2e-12 + cost.with_recompute, 0, 0) for cost in costs]


_SLOT = re.compile(r"slot (\d+) \((\w+) stage \[(\d+)\.\.(\d+)\]\) microbatch (\d+)")


def _slot_seconds(trace: Trace, worker: str | None = None) -> dict[tuple[str, Stage], list[float]]:
    """Compute of each (kind, stage), a figure a slot and microbatch, of one worker or all."""
    found: dict[tuple[str, Stage, str, str], float] = defaultdict(float)
    for span in trace.spans:
        slot = _SLOT.match(span.what)
        if span.stream != "compute" or span.nature != TASK or slot is None or worker not in (None, span.worker):
            continue
        number, kind, first, last, microbatch = slot.groups()
        found[kind, Stage(int(first), int(last)), number, microbatch] += span.seconds
    took = defaultdict(list)
    for (kind, stage, _, _), seconds in found.items():
        took[kind, stage].append(seconds)
    return dict(took)


def _rates(planned: Planned, trace: Trace) -> Rates:
    """Those of ``planned`` with what copies and updates reached, where the trace has enough of them."""
    rates = planned.target.rates

    def reached(stream: str, known: float) -> float:
        copies = [s for s in trace.spans if s.stream == stream and s.copied_bytes]
        num_bytes, seconds = sum(s.copied_bytes for s in copies), sum(s.seconds for s in copies)
        return num_bytes / seconds if num_bytes >= _ENOUGH_BYTES and seconds else known

    updated, seconds = 0, 0.0
    for span in trace.spans:
        layer = _UPDATE.search(span.what) if span.nature == PART else None
        if layer is not None:
            part = int(layer[3]) - int(layer[2]) if layer[2] else planned.layouts[int(layer[1])].num_trained
            updated, seconds = updated + part, seconds + span.seconds
    update = rates.update
    if updated >= _ENOUGH_PARAMETERS and seconds:
        # The trace has in it what copies beside the update took, which the simulator adds by itself.
        alone = seconds - _seconds_for_copies(planned, updated)
        update = min(updated / alone if alone > 0 else math.inf, max(updated / seconds, rates.update))
    if rates.switch_share:  # what copies reached has the others' share in it already
        return replace(rates, update=update)
    return replace(
        rates, up=reached("weights up", rates.up), down=reached("gradients down", rates.down), update=update
    )


def _seconds_for_copies(planned: Planned, updated: int) -> float:
    """By how much copies beside it make the update of so many parameters longer, by the simulator."""
    usual = planned.usual_step()
    if usual is None:
        return 0.0
    whole = update_seconds(usual.plan, usual.shape, planned.rates)
    alone = update_seconds(usual.plan, usual.shape, replace(planned.rates, memory=math.inf))
    return (whole - alone) * updated / sum(load.num_trained for load in usual.shape.loads)


def _speeds(trace: Trace, expected: dict[tuple[str, Stage], float]) -> tuple[float, ...] | None:
    """Of each worker, over their mean; None where they are alike."""
    workers = dict.fromkeys(worker for worker, stream in trace.rows if stream == "compute")
    speeds = []
    for worker in workers:
        took = {slot: times for slot, times in _slot_seconds(trace, worker).items() if slot in expected}
        seconds = sum(sum(times) for times in took.values())
        thought = sum(expected[slot] * len(times) for slot, times in took.items())
        speeds.append(thought / seconds if seconds else 1.0)
    return None if max(speeds) < _EVEN * min(speeds) else tuple(speeds)


def replanned(measured: AnyPlanned) -> AnyPlanned:
    """The best plan of ``measured``, of those that give the same bits."""
    plan = measured.plan
    if measured.kernels.kind != "compile":
        found = plan_in_rounds(measured, measured.target, measured.profiles, None)
        return replace(measured, plan=found.plan, bill=found.bill)
    if plan.recompute != "layer":  # layers of a stage run as other graphs in the middle than at its end
        return measured
    target, profiles = measured.target, measured.profiles
    assert profiles is not None
    work = target.workload(measured, profiles)

    billing = Billing(measured.layouts, work)

    def fits(other: Plan) -> bool:
        return other.fused == plan.fused and billing.fits(other, target.vram_bytes, target.ram_bytes)

    costs = measured_costs(profiles, plan.keep_bytes_per_token, plan.recompute)
    shape = step_shape(measured.layouts, work, costs, target.num_workers, measured.rounds, target.speeds)
    found, _ = improved(plan, fits, shape, measured.rates)
    return replace(measured, plan=found, bill=billing.of(found))
