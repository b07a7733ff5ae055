"""All schedules on one machine and one model: how long a step takes, and what a GPU must hold for it.

Bound schedules count compute and the hops of hidden states, and where weights are swapped their upload; no
optimizer. So does RoundPipe on paper. As this program runs it, every transfer and the optimizer count too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rpft.errors import UserError
from rpft.model.build import build_model
from rpft.model.cut import cut
from rpft.model.layers import build_layers
from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton
from rpft.plan.balance import even_stages
from rpft.plan.bill import Workload, make_bill
from rpft.plan.choose import choose_plan, model_shape, step_shape
from rpft.plan.costs import LayerLoad, measured_costs
from rpft.plan.count import counting
from rpft.plan.machine import Machine, datasheet_profiles
from rpft.plan.model_shapes import read_shape
from rpft.plan.plan import Plan, Stage
from rpft.plan.predict import even_seconds
from rpft.plan.rates import Rates
from rpft.plan.rounds import divisors
from rpft.plan.schedules import StageTime, Timeline, breadth_first, one_f_one_b
from rpft.plan.simulate import step_seconds
from rpft.plan.step_shape import StepShape

_STAGES_A_WORKER = 8
"""That looped and interleaved schedules are tried with, at most."""

_ROUND_SIZES = 3
"""Of RoundPipe, that are tried."""


@dataclass(frozen=True)
class Compared:
    """What became of one schedule."""

    step_seconds: float
    tokens_per_second: float
    bubble_percent: float
    stages: int
    """Of a bound schedule; slots of a round in RoundPipe."""
    held_bytes: int
    """Weights and gradients that the fullest GPU holds at once; for this program's own runs all that it needs."""
    fits: bool
    """Whether that is within a card, and, for this program's own runs, the state within RAM."""


@dataclass(frozen=True)
class Workbook:
    """A model and the steps that are played."""

    layouts: list[LayerLayout]
    skeleton: Skeleton
    work: Workload
    sequence: int


def workbook(model: str, sequence: int, rows: int, microbatches: int) -> Workbook:
    """The shape ``model``, all trained in bfloat16; steps of ``microbatches`` x ``rows`` x ``sequence`` tokens."""
    config = read_shape(model)
    skeleton = cut(build_model(config, torch.bfloat16, "auto"))
    layouts = build_layers(skeleton, torch.bfloat16)
    work = Workload(model_shape(config, 2), rows * sequence, microbatches, False, "compile", torch.bfloat16)
    return Workbook(layouts, skeleton, counting(skeleton, layouts, work, sequence, torch.bfloat16), sequence)


def compare(machine: Machine, book: Workbook) -> dict[str, Compared]:
    """Plays every schedule, layers priced from the datasheet, each with the number of stages that suits it best.

    UserError for cards of several kinds.
    """
    if machine.speeds is not None:
        kinds = ", ".join(kind.name for kind in machine.gpus)
        raise UserError(
            f"schedules are compared on cards of one kind, and this machine has {kinds}. Leave one kind in its"
            " file; `rpft plan --machine` plans for mixed cards"
        )
    return _Comparison(machine, book).all()


class _Comparison:
    def __init__(self, machine: Machine, book: Workbook) -> None:
        self.machine, self.layouts, self.skeleton = machine, book.layouts, book.skeleton
        profiles = datasheet_profiles(machine, book.layouts, book.skeleton, book.work, book.sequence)
        self.work = work = replace(book.work, profiles=profiles)
        self.num_workers = machine.num_workers
        self.rates = machine.rates
        self.shape = self._shape(work, 1)
        self.loads: Sequence[LayerLoad] = self.shape.loads
        self.hop = self.shape.boundary_bytes * (1 / self.rates.down + 1 / self.rates.up)
        """A hidden state goes through RAM, as cards without peer access do it."""
        self.tokens = work.max_tokens * work.accumulation

    def all(self) -> dict[str, Compared]:
        workers, microbatches = self.num_workers, self.work.accumulation
        one_each = [workers] if workers < len(self.loads) else []
        several = [n * workers for n in range(2, _STAGES_A_WORKER + 1) if n * workers < len(self.loads)]
        bound: dict[str, tuple[list[int], bool, Callable[[list[StageTime]], Timeline]]] = {
            "gpipe": (one_each, False, lambda s: breadth_first(s, workers, microbatches, self.hop)),
            "one_f_one_b": (one_each, False, lambda s: one_f_one_b(s, workers, microbatches, self.hop)),
            "looped_bfs": (several, False, lambda s: breadth_first(s, workers, microbatches, self.hop)),
            "mobius": (self._swapped_counts(), True, self._mobius),
        }
        if microbatches % workers == 0:  # in groups of as many as there are workers
            bound["interleaved_1f1b"] = (
                several,
                False,
                lambda s: one_f_one_b(s, workers, microbatches, self.hop),
            )
        found = {}
        for name, (counts, swapped, play) in bound.items():
            tried = list(self._bound(counts, swapped, play))
            # The fastest of those that fit, or where none does the one that needs least.
            fitting = [one for one in tried if one.fits]
            if tried:
                found[name] = min(
                    fitting or tried, key=lambda one: (one.held_bytes * (not fitting), one.step_seconds)
                )
        order = ("gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs", "mobius")
        result = {name: found[name] for name in order if name in found}
        for delayed, paper, own in (
            (False, "round_pipe_sync", "rpft_sync"),
            (True, "round_pipe_async", "rpft_delayed"),
        ):
            tried = [self._round_pipe(delayed, m) for m in self._round_sizes()]
            fitting = [one for one in tried if one[1].fits]
            result[paper], result[own] = min(fitting or tried, key=lambda one: one[1].step_seconds)
        return {name: result[name] for name in sorted(result, key=lambda n: n.startswith("rpft"))}

    def _shape(self, work: Workload, rounds: int) -> StepShape:
        assert work.profiles is not None
        return step_shape(self.layouts, work, measured_costs(work.profiles), self.num_workers, rounds)

    def _swapped_counts(self) -> list[int]:
        counts = {n * self.num_workers for n in range(1, _STAGES_A_WORKER + 1)} | {len(self.loads) - 1}
        return sorted(count for count in counts if count < len(self.loads))

    def _mobius(self, stages: list[StageTime]) -> Timeline:
        rates = self.rates
        return breadth_first(
            stages,
            self.num_workers,
            self.work.accumulation,
            self.hop,
            rates.workers_per_switch,
            rates.switch_share,
        )

    def _bound(
        self, counts: Sequence[int], swapped: bool, play: Callable[[list[StageTime]], Timeline]
    ) -> Iterator[Compared]:
        """A schedule that binds stages to workers, with each of ``counts`` of stages."""
        values = [load.forward + load.backward for load in self.loads]
        for stages in even_stages(values, counts):
            timeline = play([self._stage(stage, swapped) for stage in stages])
            held = [
                [self._held(stage) for stage in stages[w :: self.num_workers]] for w in range(self.num_workers)
            ]
            if swapped:  # one in use and one on its way
                most = max(sum(sorted(some)[-2:]) for some in held)
            else:
                most = max(map(sum, held))
            yield self._compared(timeline.makespan, timeline.bubble, len(stages), most, most <= self._card)

    @property
    def _card(self) -> int:
        return self.machine.vram_bytes

    def _stage(self, stage: Stage, swapped: bool) -> StageTime:
        loads = [self.loads[layer] for layer in stage.layers]
        head = len(self.loads) - 1
        recompute = sum(self.loads[layer].forward for layer in stage.layers if layer != head)
        # ``LayerLoad.backward`` has the recompute in it, and of the head, which recomputes nothing, its forward.
        forward = sum(load.forward for load in loads)
        upload = sum(load.weight_bytes for load in loads) / self.rates.up if swapped else 0.0
        return StageTime(forward, sum(load.backward for load in loads) - forward, recompute, upload)

    def _held(self, stage: Stage) -> int:
        return sum(self.loads[layer].weight_bytes + self.loads[layer].gradient_bytes for layer in stage.layers)

    def _round_sizes(self) -> list[int]:
        """Microbatches of a round that are tried: as many as there are workers, or more."""
        sizes = divisors(self.work.accumulation)
        return [m for m in sizes if m >= self.num_workers][:_ROUND_SIZES] or sizes[:1]

    def _round_pipe(self, delayed: bool, num_microbatches: int) -> tuple[Compared, Compared]:
        """(On paper, as this program runs it.)"""
        machine, rounds = self.machine, self.work.accumulation // num_microbatches
        # As a run has it: sums of several rounds stay in float32.
        gradients = self.work.gradient_dtype if rounds == 1 else torch.float32
        work = replace(self.work, delayed=delayed, gradient_dtype=gradients)
        plan = choose_plan(
            self.layouts,
            self.skeleton,
            work,
            self.num_workers,
            num_microbatches,
            "auto",
            machine.vram_bytes,
            machine.ram_bytes,
            self.rates,
        )
        bill, shape = make_bill(plan, self.layouts, work), self._shape(work, rounds)
        held = max(self._held(stage) for stage in plan.forward + plan.backward) * 2
        paper = replace(shape, boundary_bytes=0, hop=self.hop, slot_seconds=0.0)
        uploads = replace(self.rates, down=float("inf"), update=float("inf"))
        fits = bill.device <= machine.vram_bytes and bill.host <= machine.ram_bytes
        return (
            self._played(plan, paper, uploads, held, held <= machine.vram_bytes),
            self._played(plan, shape, self.rates, bill.device, fits),
        )

    def _played(self, plan: Plan, shape: StepShape, rates: Rates, held: int, fits: bool) -> Compared:
        seconds = step_seconds(plan, shape, rates)
        return self._compared(
            seconds, max(0.0, 1 - even_seconds(plan, shape) / seconds), plan.num_slots, held, fits
        )

    def _compared(self, seconds: float, bubble: float, stages: int, held: int, fits: bool) -> Compared:
        return Compared(seconds, self.tokens / seconds, max(0.0, 100 * bubble), stages, held, fits)
