"""A costs file: what layers take, and the splits of several schedules; read, and played.

The form is that of the figures published with RoundPipe (arXiv 2604.27085). Times are in milliseconds and for one
microbatch; a decoder layer's backward is without its recompute, which costs what its forward does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpft.errors import UserError
from rpft.plan.costs import LayerLoad
from rpft.plan.plan import Plan, Stage
from rpft.plan.rates import AT_ONCE
from rpft.plan.schedules import StageTime, Timeline, breadth_first, one_f_one_b
from rpft.plan.simulate import step_seconds
from rpft.plan.step_shape import StepShape

_WORK = ("layer_forward", "layer_backward", "head_forward", "head_backward")
_TIMES = (*_WORK, "hop")
_LONGEST_MS = 1e12
"""Some 30 years: what is longer is a slip, and sums of it could have no number."""
_SPLITS = ("one_per_gpu", "looped", "forward", "backward")


@dataclass(frozen=True)
class Case:
    """One model. Splits count the decoder layers of each stage; the head is in the last, or the fused one."""

    num_workers: int
    microbatches: int
    """Of a step."""
    round: int
    """Microbatches of a round."""
    layers: int
    layer_forward: float
    layer_backward: float
    head_forward: float
    head_backward: float
    hop: float
    """From the end of a microbatch on one worker to its start on the next."""
    one_per_gpu: tuple[int, ...]
    looped: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    """The fused stage first, the stage of the lowest layers last."""

    @property
    def plan(self) -> Plan:
        """The RoundPipe plan; layer 0, the embedding, costs nothing and comes with the first decoder layer."""
        head = self.layers + 1
        fused = Stage(head - self.backward[0], head)
        backward = _stages(self.backward[:0:-1])
        return Plan(_stages(self.forward), (fused, *reversed(backward)), self.round, "stage")

    def shape(self, delayed: bool) -> StepShape:
        """The step that the simulator plays: hops take time, uploads and updates none."""
        layer = LayerLoad(self.layer_forward, self.layer_backward, self.layer_forward)
        head = LayerLoad(self.head_forward, self.head_forward + self.head_backward)
        loads = [LayerLoad(0.0, 0.0), *[layer] * self.layers, head]
        rounds = self.microbatches // self.round
        return StepShape(loads, 0, 0, self.num_workers, rounds, delayed, self.hop, slot_seconds=0.0)

    def bound(self, split: Sequence[int]) -> list[StageTime]:
        """The stages of a schedule that binds them to workers."""
        stages = [
            StageTime(n * self.layer_forward, n * self.layer_backward, n * self.layer_forward) for n in split
        ]
        last = stages[-1]
        stages[-1] = StageTime(
            last.forward + self.head_forward, last.backward + self.head_backward, last.recompute
        )
        return stages


@dataclass(frozen=True)
class Played:
    """What became of one case."""

    makespan_ms: dict[str, float]
    bubble_percent: dict[str, float]


def play(case: Case) -> Played:
    """All schedules on one case: time of a step, and the share of the workers' time that is idle."""
    workers, microbatches = case.num_workers, case.microbatches
    timelines: dict[str, Timeline] = {
        "gpipe": breadth_first(case.bound(case.one_per_gpu), workers, microbatches, case.hop),
        "one_f_one_b": one_f_one_b(case.bound(case.one_per_gpu), workers, microbatches, case.hop),
        "interleaved_1f1b": one_f_one_b(case.bound(case.looped), workers, microbatches, case.hop),
        "looped_bfs": breadth_first(case.bound(case.looped), workers, microbatches, case.hop),
    }
    makespans = {name: timeline.makespan for name, timeline in timelines.items()}
    bubbles = {name: 100 * timeline.bubble for name, timeline in timelines.items()}
    fused = case.backward[0]
    recomputed = (2 * case.layers - fused) * case.layer_forward + case.layers * case.layer_backward
    work = microbatches * (recomputed + case.head_forward + case.head_backward)
    for mode, delayed in (("round_pipe_sync", False), ("round_pipe_async", True)):
        makespans[mode] = step_seconds(case.plan, case.shape(delayed), AT_ONCE)
        bubbles[mode] = 100 * (1 - work / (workers * makespans[mode]))
    makespans["round_pipe"] = makespans["round_pipe_sync"]
    return Played(makespans, bubbles)


def read_cases(path: Path) -> dict[str, Case]:
    """The cases of a costs file, by name; UserError naming the file and the key of what is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such costs file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a costs file: it should be JSON ({error})") from error
    fields = _Fields(path, "", data)
    common = [fields.whole(key, 1) for key in ("workers", "microbatches", "round")]
    if common[1] % common[2]:
        raise fields.wrong("round", f"{common[2]} must divide microbatches, {common[1]}")
    cases = fields.get("cases", lambda v: isinstance(v, dict) and bool(v), "an object with cases by name")
    return {name: _case(_Fields(path, f"cases.{name}.", case), common) for name, case in cases.items()}


def _case(fields: _Fields, common: Sequence[int]) -> Case:
    layers = fields.whole("layers", 1)
    times = {key: fields.time(key) for key in _TIMES}
    if not any(times[key] for key in _WORK):
        raise fields.wrong(_WORK[0], f"{', '.join(_WORK)} are all 0: there is nothing to play")
    splits = {key: fields.split(key) for key in _SPLITS}
    if len(splits["one_per_gpu"]) != common[0]:
        raise fields.wrong("one_per_gpu", f"{len(splits['one_per_gpu'])} stages for {common[0]} workers")
    fused = splits["backward"][0]
    for key in _SPLITS:
        if sum(splits[key]) != layers - (fused if key == "forward" else 0):
            less = f", less the {fused} of the fused stage" if key == "forward" and fused else ""
            raise fields.wrong(key, f"the stages have {sum(splits[key])} layers, not {layers}{less}")
    for key in ("forward", "backward"):
        if 0 in splits[key][key == "backward" :]:
            raise fields.wrong(key, "a stage without layers; only the fused one, backward[0], may have none")
    values: dict[str, Any] = {**times, **splits}
    return Case(common[0], common[1], common[2], layers, **values)


class _Fields:
    """One object of the file, with the way to it for messages."""

    def __init__(self, path: Path, prefix: str, data: Any) -> None:
        self.path, self.prefix = path, prefix
        if not isinstance(data, Mapping):
            raise UserError(f"{path}: {prefix.rstrip('.') or 'the file'} should be an object")
        self.data = data

    def wrong(self, key: str, why: str) -> UserError:
        return UserError(f"{self.path}: {self.prefix}{key}: {why}")

    def get(self, key: str, good: Callable[[Any], bool], expected: str) -> Any:
        if key not in self.data:
            raise self.wrong(key, f"missing; it should be {expected}")
        if not good(self.data[key]):
            raise self.wrong(key, f"{json.dumps(self.data[key])[:60]} should be {expected}")
        return self.data[key]

    def whole(self, key: str, least: int) -> int:
        return self.get(key, lambda v: _is_whole(v) and v >= least, f"a whole number of at least {least}")

    def time(self, key: str) -> float:
        return float(self.get(key, _is_time, "milliseconds, 0 to 1e12"))

    def split(self, key: str) -> tuple[int, ...]:
        def good(value: Any) -> bool:
            return isinstance(value, list) and bool(value) and all(_is_whole(n) and n >= 0 for n in value)

        return tuple(self.get(key, good, "a list with the number of decoder layers of each stage"))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _LONGEST_MS


def _stages(sizes: Sequence[int]) -> tuple[Stage, ...]:
    """Stages of so many decoder layers from the bottom; the embedding comes with the first."""
    stages, first = [], 0
    for size in sizes:
        last = (stages[-1].last if stages else 0) + size
        stages.append(Stage(first, last))
        first = last + 1
    return tuple(stages)
