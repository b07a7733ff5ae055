"""The plan: forward and backward stages, microbatches a round, recompute grain; and its file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rpft.errors import UserError

PLAN_VERSION = 1

_KINDS = {"made_for": dict, "micro_batch_size": int, "expert_groups": int}
"""Of what a plan file says beside the plan and is asked for."""


class Stage(NamedTuple):
    """Consecutive layers ``first`` to ``last``, both included, that are uploaded together."""

    first: int
    last: int

    @property
    def layers(self) -> range:
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        return f"[{self.first}..{self.last}]"


@dataclass(frozen=True)
class Plan:
    """The two partitions of the layers. Layer 0 is the embedding, the highest number is the head.

    A round runs ``forward`` in order, then ``backward`` in order. ``backward[0]`` is the fused stage: it holds
    the head, and its layers run forward, loss and backward at once. The forward stages cover exactly the layers
    below it; so do the other backward stages, from the top down.
    """

    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    num_microbatches: int
    """M, the microbatches of a round."""
    recompute: str
    """stage: a backward stage keeps its first layer's input; layer: every layer's input is kept."""
    keep_bytes_per_token: int = 0
    """With recompute by layer: what a block's forward keeps beside its input, so that less is recomputed."""
    resident: tuple[int, ...] = ()
    """Layers whose frozen weights every worker holds all the time, and which are uploaded without them."""
    dispatch: tuple[int, ...] = ()
    """The worker of each slot of a step, again from the start where a step has more; empty: workers in turn."""

    @property
    def fused(self) -> Stage:
        return self.backward[0]

    @property
    def num_layers(self) -> int:
        return self.fused.last + 1

    @property
    def num_slots(self) -> int:
        """Slots of a round."""
        return len(self.forward) + len(self.backward)

    def worker_of(self, place: int, num_workers: int) -> int | None:
        """The worker of slot ``place`` of a step, of as many as there are; None: the next in turn."""
        return self.dispatch[place % len(self.dispatch)] % num_workers if self.dispatch else None

    def segments(self, stage: Stage) -> tuple[Stage, ...]:
        """The pieces of a backward stage that are recomputed one at a time, in order of execution."""
        if self.recompute == "stage":
            return (stage,)
        return tuple(Stage(layer, layer) for layer in reversed(stage.layers))

    def check(self, num_layers: int) -> None:
        """Raises UserError unless both partitions are legal for a model of ``num_layers`` layers."""
        wrong = _partition_fault(self, num_layers)
        if wrong:
            raise UserError(f"plan: {wrong}")

    def to_json(self, **about: Any) -> str:
        """The plan file's text. ``about``: what else it says, of what was predicted; no run depends on it."""
        return json.dumps(
            {
                "version": PLAN_VERSION,
                "forward": [list(stage) for stage in self.forward],
                "backward": [list(stage) for stage in self.backward],
                "num_microbatches": self.num_microbatches,
                "recompute": self.recompute,
                "keep_bytes_per_token": self.keep_bytes_per_token,
                "resident": list(self.resident),
                "dispatch": list(self.dispatch),
                **about,
            },
            indent=1,
        )


def smallest_stages(num_layers: int, num_microbatches: int, recompute: str) -> Plan:
    """The plan of one layer a stage."""
    stages = tuple(Stage(layer, layer) for layer in range(num_layers))
    return Plan(stages[:-1], stages[::-1], num_microbatches, recompute)


def _partition_fault(plan: Plan, num_layers: int) -> str | None:
    if not plan.backward:
        return "`backward` needs at least the fused stage, which holds the head"
    if plan.num_microbatches < 1:
        return f"`num_microbatches` is {plan.num_microbatches}; it must be at least 1"
    if plan.recompute not in ("stage", "layer"):
        return f"`recompute` is {plan.recompute!r}; it must be stage or layer"
    if plan.keep_bytes_per_token < 0 or (plan.keep_bytes_per_token and plan.recompute != "layer"):
        return f"`keep_bytes_per_token` is {plan.keep_bytes_per_token}; it needs `recompute` layer, and at least 0"
    if any(not 0 <= layer < num_layers for layer in plan.resident):
        return f"`resident` is {list(plan.resident)}; the model has layers 0 to {num_layers - 1}"
    if any(worker < 0 for worker in plan.dispatch):
        return f"`dispatch` is {list(plan.dispatch)}; workers have numbers from 0"
    fused = plan.fused
    if fused.last != num_layers - 1:
        return (
            f"the fused stage {fused} must end with the head, layer {num_layers - 1}:"
            f" the model has layers 0 to {num_layers - 1}"
        )
    for name, stages in (("forward", plan.forward), ("backward", plan.backward[:0:-1])):
        expected = 0
        for stage in stages:
            if stage.first != expected or stage.last < stage.first:
                return f"`{name}` stage {stage} must start at layer {expected} and not be empty"
            expected = stage.last + 1
        if expected != fused.first:
            return f"`{name}` stages cover layers below {expected}, the fused stage starts at {fused.first}"
    return None


def read_plan(path: Path) -> Plan:
    """Reads a plan file; UserError naming the file, the key and the fault."""
    data = _read_object(path)
    try:
        if data["version"] != PLAN_VERSION:
            raise UserError(f"{path}: plan version {data['version']} is not {PLAN_VERSION}; make the plan again")
        found = {key: data[key] for key in _REQUIRED} | {key: data[key] for key in _OPTIONAL if key in data}
    except KeyError as error:
        raise UserError(f"{path}: not a plan file: {error.args[0]} is missing; {_MAKE}") from error
    for key, value in found.items():
        is_good, form = (_REQUIRED | _OPTIONAL)[key]
        if not is_good(value):
            shown = json.dumps(value)
            raise UserError(f"{path}: not a plan file: {key} should be {form}, and is {shown[:60]}; {_MAKE}")
    for key in data.keys() - found.keys():
        # Others say what was predicted; one that is meant for the plan must not be passed over.
        for meant in difflib.get_close_matches(key, _OPTIONAL.keys() | _KINDS.keys(), n=1, cutoff=0.85):
            if key not in _KINDS:
                raise UserError(f"{path}: {key}: unknown key; did you mean `{meant}`?")
    stages = {key: tuple(Stage(*pair) for pair in found.pop(key)) for key in ("forward", "backward")}
    layers = {key: tuple(found.pop(key)) for key in ("resident", "dispatch") if key in found}
    return Plan(**stages, **layers, **found)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such plan file (recipe key engine.plan); `rpft plan RECIPE --out FILE` makes one"
        ) from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read as a plan file (recipe key engine.plan): {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a plan file: it should be JSON ({error}); {_MAKE}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: not a plan file: it should be a JSON object; {_MAKE}")
    return data


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_whole(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _are_stages(value: Any) -> bool:
    return isinstance(value, list) and all(_are_whole(pair) and len(pair) == 2 for pair in value)


_Form = tuple[Callable[[Any], bool], str]
"""Whether a value is of the form, and the form for people."""

_STAGES: _Form = _are_stages, "a list of stages, each [first layer, last layer]"
_WHOLE: _Form = _is_whole, "a whole number"
_NUMBERS: _Form = _are_whole, "a list of whole numbers"

_REQUIRED: dict[str, _Form] = {
    "forward": _STAGES,
    "backward": _STAGES,
    "num_microbatches": _WHOLE,
    "recompute": (lambda value: value in ("stage", "layer"), "stage or layer"),
}
_OPTIONAL: dict[str, _Form] = {"keep_bytes_per_token": _WHOLE, "resident": _NUMBERS, "dispatch": _NUMBERS}

_MAKE = "`rpft plan RECIPE --out FILE` makes one"


def read_about(path: Path) -> dict[str, Any]:
    """What a plan file says beside the plan, as ``to_json`` was told; those by hand say nothing.

    UserError naming the file where it is not a plan file.
    """
    read_plan(path)
    data = _read_object(path)
    return {key: value for key, value in data.items() if isinstance(value, _KINDS.get(key, object))}
