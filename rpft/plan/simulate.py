"""How long a step takes under a plan: the schedule with its transfers and its optimizer, played through in order.

A slot meets nothing but earlier slots of the round-robin order and earlier updates, so that one pass over the
slots, in the order in which the controller dispatches them, gives every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rpft.model.layout import LayerLayout
from rpft.plan.costs import LayerCost
from rpft.plan.plan import Plan, Stage

_STEPS = 4
"""Steps played; the last one is past what starting up changes."""


@dataclass(frozen=True)
class Rates:
    """What moves bytes and updates parameters, a second."""

    up: float
    """Bytes from host to one device."""
    down: float
    update: float
    """Parameters that the optimizer updates."""
    publish: float
    """Parameters whose working weights a delayed update writes."""

    @property
    def memory(self) -> float:
        """Bytes that copies take from the host's memory while the optimizer would have it.

        Measured: an update of 26 bytes a parameter, slowed down by the hidden states that go down beside it.
        """
        return 1.4 * _UPDATE_BYTES * self.update


_UPDATE_BYTES = 26
"""Of memory traffic for a parameter's update."""

_SLOT_SECONDS = 3e-4
"""What it takes to begin and end a slot."""

ASSUMED_RATES = Rates(up=25e9, down=25e9, update=2e9, publish=8e9)
"""PCIe 4 x16 and a desktop's memory, where nothing was measured."""


@dataclass(frozen=True)
class StepShape:
    """What of a run decides how its steps go, beside the plan."""

    layouts: Sequence[LayerLayout]
    costs: Sequence[LayerCost]
    """In seconds for one microbatch."""
    tokens: int
    """Of a microbatch."""
    boundary_bytes: int
    gradient_bytes: int
    """Of one element of a host gradient."""
    num_workers: int
    rounds: int
    delayed: bool


class _Worker:
    def __init__(self) -> None:
        self.compute = self.weights_up = self.inputs_up = self.outputs_down = self.gradients_down = 0.0
        self.ends = [0.0, 0.0]
        """When the last two slots let go of their weight buffers."""


class _Run:
    """Times of everything that later slots may wait for."""

    def __init__(self, plan: Plan, shape: StepShape, rates: Rates) -> None:
        self.plan, self.shape, self.rates = plan, shape, rates
        self.workers = [_Worker() for _ in range(shape.num_workers)]
        self.slots = 0
        self.written = [0.0] * len(shape.layouts)
        self.last_upload = [0.0] * len(shape.layouts)
        self.landed = [0.0] * len(shape.layouts)
        self.optimizer = 0.0
        self.beside = self._copied_beside_update()
        self.pending: list[float] | None = None
        """A delayed update: when each layer's masters are ready."""

    def step(self) -> float:
        """Plays one step and its update; when its last gradient lands."""
        self.last_upload = [0.0] * len(self.shape.layouts)
        for _ in range(self.shape.rounds):
            self._round()
        end = max(self.landed)
        self._update(end)
        return end

    def _round(self) -> None:
        plan, costs = self.plan, self.shape.costs
        ready = [0.0] * plan.num_microbatches
        for stage in plan.forward:
            ready = self._slot(stage, sum(costs[i].forward for i in stage.layers), ready, backward=False)
        for stage in plan.backward:
            ready = self._slot(stage, sum(costs[i].with_recompute for i in stage.layers), ready, backward=True)

    def _uploaded_bytes(self, layer: int) -> int:
        layout = self.shape.layouts[layer]
        return layout.region_bytes - (layout.frozen_bytes if layer in self.plan.resident else 0)

    def _copied_beside_update(self) -> list[float]:
        """For each layer, what the next forward copies to and from the host while an exact update goes on."""
        copied = [0.0] * len(self.shape.layouts)
        for stage in self.plan.forward:
            carried = self._carried_bytes(stage) * self.plan.num_microbatches
            for layer in stage.layers:
                copied[layer] = carried / len(stage.layers) + self._uploaded_bytes(layer)
        return copied

    def _carried_bytes(self, stage: Stage) -> int:
        """For one microbatch: a hidden state a stage, or by layer one for each, with what its block keeps."""
        if self.plan.recompute == "stage" or stage is self.plan.fused:
            return self.shape.boundary_bytes
        kept = self.plan.keep_bytes_per_token * self.shape.tokens
        return len(stage.layers) * (self.shape.boundary_bytes + kept)

    def _slot(self, stage: Stage, seconds: float, ready: list[float], backward: bool) -> list[float]:
        """One slot; when each microbatch's output is delivered to the host."""
        shape, rates = self.shape, self.rates
        worker = self.workers[self.slots % len(self.workers)]
        self.slots += 1
        up = max(worker.weights_up, worker.ends[0])
        for layer in stage.layers:
            sources = [piece.layer for piece in shape.layouts[layer].weight_pieces]
            up = max([up, *(self.written[source] for source in sources)])
            up += self._uploaded_bytes(layer) / rates.up
            for source in sources:
                self.last_upload[source] = max(self.last_upload[source], up)
        worker.weights_up = up
        delivered = []
        # A hidden state a layer is carried while the neighbouring layers compute: what is slower sets the pace.
        carried = self._carried_bytes(stage)
        going_up, going_down = (carried / rates.up, 0.0) if backward else (0.0, carried / rates.down)
        for moment in ready:
            worker.inputs_up = max(worker.inputs_up, moment) + shape.boundary_bytes / rates.up
            start = max(worker.compute, up, worker.inputs_up)
            worker.inputs_up = max(worker.inputs_up, start + going_up)
            worker.compute = max(start + seconds, worker.inputs_up)
            worker.outputs_down = max(worker.outputs_down + going_down, worker.compute)
            worker.outputs_down += shape.boundary_bytes / rates.down
            delivered.append(worker.outputs_down)
        worker.compute += _SLOT_SECONDS
        worker.ends = [worker.ends[1], worker.compute]
        if backward:
            worker.compute = max(worker.compute, worker.gradients_down)  # rounding waits for the buffer
            down = worker.compute
            for layer in reversed(stage.layers):
                down += shape.layouts[layer].grad_elements * shape.gradient_bytes / rates.down
                self.landed[layer] = down
            worker.gradients_down = down
        return delivered

    def _update(self, end: float) -> None:
        """The optimizer's work after a step: in place, or one step late."""
        moment = max(self.optimizer, end)
        sizes = [layout.num_trained for layout in self.shape.layouts]
        if not self.shape.delayed:
            for layer, size in enumerate(sizes):
                moment = max(moment, self.last_upload[layer]) + size / self.rates.update
                moment += self.beside[layer] / self.rates.memory
                self.written[layer] = moment
            self.optimizer = moment
            return
        if self.pending is not None:  # what the last step's update left to be written, now that nobody reads
            publish = max(self.pending)
            for layer in reversed(range(len(sizes))):
                publish = max(publish, self.last_upload[layer]) + sizes[layer] / self.rates.publish
                self.written[layer] = publish
            moment = max(moment, publish)
        self.pending = []
        for size in sizes:
            moment += size / self.rates.update
            self.pending.append(moment)
        self.optimizer = moment


def step_seconds(plan: Plan, shape: StepShape, rates: Rates) -> float:
    """Seconds a step in the long run."""
    run = _Run(plan, shape, rates)
    ends = [run.step() for _ in range(_STEPS)]
    return (ends[-1] - ends[1]) / (len(ends) - 2)
