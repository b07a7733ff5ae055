"""The controller: the one place that orders slots and gives them to workers, in turn or as the plan says.

A step's slots are built and queued in the order of the program, before any of them has run. Because every
event is made here, in that order, who waits for whom is decided in one thread and can be read in one file:

    1. the optimizer writes a layer's working weights after every upload of what lay there  (Update.replaced)
    2. an upload starts after that write                                                    (WeightVersion.written)
    3. the optimizer reads a layer's gradient after its download                            (Ticket.landed)
    4. the next download into the same gradient starts after that read                      (Ticket.read)
    5. a step's optimizer work on a layer follows the previous step's     (one optimizer thread, in order)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rpft.engine.buffers import Boundary, BoundaryPool, Reading
from rpft.engine.losses import Losses
from rpft.engine.slot import GradientCopy, HostBatch, Slot, SlotKind, Task, WeightCopy
from rpft.engine.streams import Event, happened
from rpft.engine.turns import Turn, Turns
from rpft.engine.worker import Worker
from rpft.model.dropout import mix
from rpft.model.host_store import HostStore
from rpft.plan.plan import Plan, Stage
from rpft.plan.sizes import keeping_layers, region_starts


class _Upload(NamedTuple):
    """One run of host weights that a stage uploads."""

    source: torch.Tensor
    start: int
    """In the weight buffer, in bytes."""
    owner: int
    """The layer that has it."""
    on_disk: bool


KeyedBatch = tuple[HostBatch, int | None]
"""A microbatch and the key of its dropout."""


@dataclass
class WeightVersion:
    """The working weights between two updates, layer by layer."""

    copy: int
    """Of the store's copies the one that they lie in."""
    written: list[Event]
    """[layers]: complete when the layer holds this version."""
    readers: list[list[Event]]
    """[layers]: uploads of this version."""

    @staticmethod
    def of(copy: int, written: list[Event]) -> WeightVersion:
        return WeightVersion(copy, written, [[] for _ in written])


@dataclass
class Ticket:
    """One submitted step: what the optimizer and the training loop need to know of it."""

    step: int
    trained_tokens: int
    landed: list[Event]
    """[layers]: the layer's gradient, summed so far, is in the host store; after the last round, the whole."""
    read: list[Event]
    """[layers]: the optimizer needs the layer's gradient no more."""
    losses: Losses
    squares: torch.Tensor
    """[layers] float64: the sum of squares of the layer's own gradient, valid once it has landed."""
    router_losses: Losses = field(default_factory=Losses)
    """Of the routers' load, each times the trained tokens of its microbatch by the number of routers; or none."""


@dataclass
class Update:
    """An order to the optimizer: apply the gradients of ``ticket`` to ``before``, which gives ``after``."""

    ticket: Ticket
    before: WeightVersion
    after: WeightVersion
    replaced: WeightVersion
    """What lay where ``after`` is written: ``before`` itself, or, with delayed updates, the version before it."""


class Controller:
    """Builds slots from steps and dispatches them. All methods are called from one thread."""

    def __init__(
        self,
        plan: Plan,
        store: HostStore,
        workers: Sequence[Worker],
        boundaries: Sequence[BoundaryPool],
        kept: BoundaryPool,
        widths: Sequence[int],
        seed: int | None,
        update_lag: int,
        send_update: Callable[[Update], None],
        lagging: bool = False,
        balanced: frozenset[int] = frozenset(),
    ) -> None:
        """``boundaries``: for each layer memory for its input, or the gradient of that, of which a token has
        ``widths`` elements; ``kept``: for what blocks keep. ``seed`` places dropout, None where there is none.
        ``update_lag``: 0 sync, 1 delayed updates, for a store with two copies. ``lagging``: the first step is to
        read the other copy, weights of one update ago. ``balanced``: layers with a load-balancing loss of their
        router.
        """
        self._plan, self._store, self._workers = plan, store, workers
        self._boundaries, self._kept = boundaries, kept
        self._widths, self._seed, self._update_lag, self._send_update = widths, seed, update_lag, send_update
        self._layouts = [layer.layout for layer in store.layers]
        self._has_gradient = [layout.grad_elements > 0 for layout in self._layouts]
        self.first_trained = self._has_gradient.index(True)
        self._keeping = set(keeping_layers(self._layouts, plan, self.first_trained))
        self._segments = {stage: self._segments_of(stage) for stage in plan.backward}
        kept_inputs = [s.first for stage in plan.backward[1:] for s in self._segments[stage] if s.first > 0]
        self._later_readers = Counter(kept_inputs)
        """[layer]: backward segments that read its input."""
        self._starts = {stage: region_starts(self._layouts, stage) for stage in {*plan.forward, *plan.backward}}
        self._uploads: dict[tuple[Stage, int], list[_Upload]] = {}
        """Of each stage and copy of the working weights, once it was asked for."""
        self._balanced = balanced
        self._turns = Turns(plan, len(workers))
        assert not update_lag or all(x.second.numel() > 0 for x in store.layers if x.layout.num_trained > 0)
        self._copies = [WeightVersion.of(i, [happened() for _ in store.layers]) for i in range(1 + update_lag)]
        """What lies in each copy of the working weights."""
        latest = store.layers[self.first_trained].latest
        self._latest = self._copies[latest]
        self._weights = self._copies[1 - latest] if lagging else self._latest
        """What the next slots read."""
        self._gradients_read = [happened() for _ in store.layers]

    # -- what the training loop calls ----------------------------------------------------------------------

    def submit_step(self, step: int, microbatches: Sequence[HostBatch]) -> Ticket:
        """Queues forward and backward of one step and, when its turn comes, the update."""
        ticket = Ticket(
            step,
            sum(batch.trained_tokens for batch in microbatches),
            [happened() for _ in self._layouts],
            [Event() if has else happened() for has in self._has_gradient],
            Losses(),
            torch.zeros(len(self._layouts), dtype=torch.float64),
        )
        if not self._update_lag:
            self._turns.rest()  # for the update
        size = self._plan.num_microbatches
        for number, start in enumerate(range(0, len(microbatches), size)):
            tasks = [(b, self._key(step, start + i)) for i, b in enumerate(microbatches[start : start + size])]
            self._submit_round(tasks, ticket, number, last=start + size >= len(microbatches))
        self._gradients_read = ticket.read
        before, number = self._latest, self._update_lag - self._latest.copy
        written = [Event() if t else old for t, old in zip(self._has_gradient, before.written, strict=True)]
        after = WeightVersion.of(number, written)
        self._send_update(Update(ticket, before, after, self._copies[number]))
        self._copies[number] = self._latest = after
        self._weights = before if self._update_lag else after
        return ticket

    def submit_evaluation(self, microbatches: Sequence[HostBatch]) -> Losses:
        """Queues forward and loss of ``microbatches`` with the weights that the next step would see."""
        losses = Losses()
        size = self._plan.num_microbatches
        for start in range(0, len(microbatches), size):
            batches = [(batch, None) for batch in microbatches[start : start + size]]
            inputs = self._forward_slots(batches, Counter(), None, None)
            self._loss_slot(batches, inputs, losses)
        return losses

    def flush(self) -> None:
        """Lets the next slots read the latest weights, also with delayed updates."""
        self._weights = self._latest

    def _key(self, step: int, number: int) -> int | None:
        """Places the dropout of microbatch ``number`` of a step, whatever the round and the worker."""
        return None if self._seed is None else mix(self._seed, step, number)

    # -- one round -----------------------------------------------------------------------------------------

    def _submit_round(self, batches: Sequence[KeyedBatch], ticket: Ticket, number: int, last: bool) -> None:
        """F0 .. F(p-1), the fused stage, B1 .. B(q-1) of round ``number`` of a step."""
        first_place = number * self._plan.num_slots
        keeping: dict[int, list[Boundary]] = {}
        inputs = self._forward_slots(batches, self._later_readers, keeping, first_place)
        gradients: list[Boundary] | None = None
        for place, stage in enumerate(self._plan.backward, first_place + len(self._plan.forward)):
            if stage.last < self.first_trained:
                break
            fused = stage is self._plan.fused
            passes_on = stage.first > self.first_trained
            turn = self._turns.next(place, len(batches), follows=place > first_place)
            segments = self._segments[stage]
            read = [segment.first for segment in segments if segment.first > 0]
            kept = [layer for segment in segments for layer in segment.layers if layer in keeping]
            tasks = []
            for m, batch in enumerate(batches):
                task, at = Task(*batch), turn.begins + m
                for layer in read:
                    task.inputs[layer] = self._read(layer, inputs[layer][m], at)
                for layer in kept:
                    task.kept_inputs[layer] = self._kept.read(keeping[layer][m], at)
                if gradients is not None:
                    task.grad_input = self._read(stage.last + 1, gradients[m], at)
                if passes_on:
                    task.grad_output = self._acquire(stage.first, task.batch, 1)
                tasks.append(task)
            gradients = [task.grad_output for task in tasks if task.grad_output is not None]
            self._dispatch(
                turn,
                SlotKind.FUSED if fused else SlotKind.BACKWARD,
                stage,
                segments,
                tasks,
                self._gradient_copies(stage, ticket, number == 0, last),
                ticket.losses if fused else None,
                ticket.router_losses,
            )

    def _segments_of(self, stage: Stage) -> tuple[Stage, ...]:
        """What a stage recomputes at a time; nothing below the first trained layer, and the fused stage whole."""
        if stage is self._plan.fused:
            return (stage,)
        return tuple(s for s in self._plan.segments(stage) if s.last >= self.first_trained)

    def _forward_slots(
        self,
        batches: Sequence[KeyedBatch],
        later_readers: Counter[int],
        keeping: dict[int, list[Boundary]] | None,
        place: int | None,
    ) -> dict[int, list[Boundary]]:
        """Queues the forward stages; gives for each layer whose input was kept a boundary a microbatch.

        ``later_readers``: of a layer's input, backward segments. ``keeping`` is filled with
        what blocks keep for their backward; None where there is none. ``place``: of the first slot in its step.
        """
        kept: dict[int, list[Boundary]] = {}
        starts = {stage.first for stage in self._plan.forward} | {self._plan.fused.first}
        for number, stage in enumerate(self._plan.forward):
            readers = {n: later_readers[n] + (n in starts) for n in range(stage.first + 1, stage.last + 2)}
            written = [layer for layer, count in readers.items() if count]
            keeps = [] if keeping is None else [each for each in stage.layers if each in self._keeping]
            turn = self._turns.next(None if place is None else place + number, len(batches), follows=number > 0)
            tasks = [Task(*batch) for batch in batches]
            for m, task in enumerate(tasks):
                if stage.first > 0:
                    task.inputs[stage.first] = self._read(stage.first, kept[stage.first][m], turn.begins + m)
                for layer in written:
                    boundary = self._acquire(layer, task.batch, readers[layer])
                    task.outputs[layer] = boundary
                    kept.setdefault(layer, []).append(boundary)
                if keeping is None:
                    continue
                for layer in keeps:
                    task.kept_outputs[layer] = self._kept.acquire_bytes(1)
                    keeping.setdefault(layer, []).append(task.kept_outputs[layer])
            self._dispatch(turn, SlotKind.FORWARD, stage, (), tasks, [], None)
        return kept

    def _loss_slot(self, batches: Sequence[KeyedBatch], inputs: dict[int, list[Boundary]], losses: Losses) -> None:
        fused = self._plan.fused
        turn = self._turns.next(None, len(batches), follows=bool(self._plan.forward))
        tasks = [Task(*batch) for batch in batches]
        if fused.first > 0:
            for m, task in enumerate(tasks):
                task.inputs[fused.first] = self._read(fused.first, inputs[fused.first][m], turn.begins + m)
        self._dispatch(turn, SlotKind.LOSS, fused, (), tasks, [], losses)

    def _acquire(self, layer: int, batch: HostBatch, num_readers: int) -> Boundary:
        """A boundary for the input of ``layer``, or the gradient of that, for one microbatch."""
        rows, sequence = batch.input_ids.shape
        return self._boundaries[layer].acquire((rows, sequence, self._widths[layer]), num_readers)

    def _read(self, layer: int, boundary: Boundary, at: int) -> Reading:
        """The next reading of a boundary that was acquired for ``layer``; ``at``: about when, see ``Pace``."""
        return self._boundaries[layer].read(boundary, at)

    def _gradient_copies(self, stage: Stage, ticket: Ticket, first: bool, last: bool) -> list[GradientCopy]:
        """How a stage's gradients come up (after the first round) and go down, last layer first."""
        starts = self._starts[stage]
        squares = ticket.squares.unbind()
        copies = []
        for layer in reversed(stage.layers):
            if self._has_gradient[layer]:
                after = self._gradients_read[layer] if first else ticket.landed[layer]
                host, num_own = self._store.layers[layer].gradient, self._layouts[layer].num_trained
                square = squares[layer] if last and num_own else None
                copies.append(GradientCopy(host, starts[layer][1], num_own, square, after, not first))
                ticket.landed[layer] = copies[-1].landed
        return copies

    def _dispatch(
        self,
        turn: Turn,
        kind: SlotKind,
        stage: Stage,
        segments: tuple[Stage, ...],
        tasks: list[Task],
        gradients: list[GradientCopy],
        losses: Losses | None,
        router_losses: Losses | None = None,
    ) -> None:
        """Gives a slot to the worker whose turn it is."""
        uploaded = Event()
        version = self._weights
        weights = []
        for source, start, owner, on_disk in self._uploads_of(stage, version.copy):
            weights.append(WeightCopy(source, start, version.written[owner], on_disk))
            version.readers[owner].append(uploaded)
        slot = Slot(turn.number, kind, stage, segments, tasks, weights, uploaded, gradients, None)
        if losses is not None:
            slot.losses = losses.expect((len(tasks),), slot.losses_ready)
        if router_losses is not None:
            slot.balanced = tuple(x for x in stage.layers if x in self._balanced and x >= self.first_trained)
            if slot.balanced:
                shape = len(tasks), len(slot.balanced)
                slot.router_losses = router_losses.expect(shape, slot.router_losses_ready)
        self._workers[turn.worker].enqueue(slot)

    def _uploads_of(self, stage: Stage, copy: int) -> list[_Upload]:
        """What the weights of ``stage`` are brought up from, in copy ``copy`` of the working weights."""
        found = self._uploads.get((stage, copy))
        if found is None:
            found = self._uploads[stage, copy] = []
            for layer in stage.layers:
                for piece in self._layouts[layer].weight_pieces:
                    stop = piece.stop
                    if layer in self._plan.resident and piece.layer == layer:
                        stop = self._layouts[layer].frozen_start
                    start = self._starts[stage][layer][0] + piece.region_offset
                    owner = self._store.layers[piece.layer]
                    for at, part in owner.pieces(copy, piece.start, stop):
                        on_disk = owner.on_disk and piece.start + at >= owner.layout.frozen_start
                        found.append(_Upload(part, start + at, piece.layer, on_disk))
        return found
