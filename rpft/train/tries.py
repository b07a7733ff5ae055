"""What other settings would do to memory and speed, alone and together: each is planned, none is guessed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rpft import files
from rpft.errors import UserError
from rpft.model.layout import align
from rpft.model.scratch_file import lies_in_ram
from rpft.plan.bill import gib
from rpft.plan.costs import scaled
from rpft.plan.plan import Plan
from rpft.plan.rounds import choose_num_microbatches
from rpft.recipe.schema import Recipe
from rpft.recipe.sections.adapter import Adapter
from rpft.train.planned import MEMORY_NAMES, Planned
from rpft.train.planning import plan_job
from rpft.train.rows import PAD_TO_MULTIPLE

_WORTH_A_CHANGE = 0.01
"""Share of the tokens a second that a setting must add to be worth naming."""

_ANEW = "engine.plan=null"
"""What every other setting needs beside it where a plan is given, which would stay as it is."""

_MOST_TOGETHER = 3
"""Settings that are tried together: each on top takes as long as all that were tried alone."""


@dataclass(frozen=True)
class Tried:
    """A setting, as it would stand on the command line, and what came of it."""

    setting: str
    """Or several, with blanks between them."""
    planned: Planned

    @property
    def keys(self) -> dict[str, str]:
        """Each key that is set, with its setting."""
        return {setting.partition("=")[0]: setting for setting in self.setting.split(" ")}

    @property
    def tokens_per_second(self) -> float:
        """Of lines that are all as long as the longest."""
        return tokens_per_second(self.planned)


@dataclass(frozen=True)
class _Change:
    setting: str
    recipe: Recipe
    longest: int | None = None
    """To which lines would be cut, in tokens."""


def smaller(planned: Planned, count: int = 3) -> list[Tried]:
    """Those ``count`` settings that save most of the memory which ``planned`` is short of, those that fit first.

    Where none fits alone, one more: of several that fit together, if up to ``_MOST_TOGETHER`` do.
    """
    found = _by_saving(planned)
    together = None if not found or found[0].planned.fits else _together(planned, found)
    return found[:count] + ([] if together is None else [together])


def _by_saving(planned: Planned) -> list[Tried]:
    """All settings that save memory which ``planned`` is short of, each alone; those that fit first."""
    short = {name: limit for name in planned.short_of if (limit := planned.limits[name])}

    def saved(tried: Tried) -> float:
        now = tried.planned.needs
        return sum((planned.needs[name] - now[name]) / limit for name, limit in short.items())

    found = [(saved(tried), tried) for tried in _tried(planned, _smaller_changes(planned))]
    found = [(gain, tried) for gain, tried in found if gain > 0]

    def rank(item: tuple[float, Tried]) -> tuple[bool, bool, float]:
        gain, tried = item
        return not tried.planned.fits, tried.setting != _ANEW, -gain

    return [tried for _, tried in sorted(found, key=rank)]


def _together(planned: Planned, found: list[Tried]) -> Tried | None:
    """Settings that fit together: the first of ``found``, and on top of it again what then saves most."""
    for name in planned.short_of:
        needed, limit = planned.needs[name], planned.limits[name]
        saved = sorted((needed - tried.planned.needs[name] for tried in found), reverse=True)
        if limit is not None and needed - sum(saved[:_MOST_TOGETHER]) > limit:
            return None  # nor would they together
    best, settings = found[0], dict(found[0].keys)
    for _ in range(_MOST_TOGETHER - 1):
        found = _by_saving(best.planned)
        if not found:
            return None
        best = found[0]
        settings |= best.keys
        if best.planned.fits:
            return Tried(" ".join(settings.values()), best.planned)
    return None


def refuse_unless_fits(planned: Planned) -> None:
    """UserError where RAM, a worker's memory or the disk will not do: the bill, and what would change it most."""
    if planned.short_of:
        said = [_WHAT_IS_SHORT[name](planned) for name in planned.short_of]
        raise UserError(f"{'; '.join(said)}. {_advice(planned)}")


def _short_of_ram(planned: Planned) -> str:
    bill, free = planned.bill, planned.target.ram_bytes
    return (
        f"this run needs {gib(bill.host)} of RAM and {gib(free)} are free ({_parts(bill.host_parts)}; if that is"
        " wrong, set engine.ram_limit)"
    )


def _short_of_vram(planned: Planned) -> str:
    bill, limit = planned.bill, planned.target.vram_bytes
    assert limit is not None
    return (
        f"this run needs {gib(bill.device)} of memory on each GPU and may take {gib(limit)}"
        f" ({_parts(bill.device_parts)}; engine.vram_limit raises what it may take)"
    )


def _short_of_disk(planned: Planned) -> str:
    free, count = planned.target.disk_bytes, planned.num_checkpoints
    assert free is not None
    frozen = f"frozen weights {gib(planned.bill.frozen_file)}; " if planned.on_disk else ""
    moments = f"moments {gib(planned.bill.moments_file)}; " if planned.moments_beside_output else ""
    return (
        f"output_dir {planned.recipe.output_dir}: this run needs {gib(planned.memory['disk_bytes'])} there and"
        f" {gib(free)} are free on that disk (the result {gib(planned.bill.result)}; {count} checkpoint(s) at once"
        f" of {gib(planned.checkpoint_bytes)} each; {frozen}{moments}another output_dir may have room)"
    )


def _short_of_offload(planned: Planned) -> str:
    free = planned.target.offload_bytes
    assert free is not None
    return (
        f"optimizer.offload {planned.offload}: the moments need {gib(planned.bill.moments_file)} there and"
        f" {gib(free)} are free on that disk (a folder of another disk may have room)"
    )


_WHAT_IS_SHORT = {
    "host_bytes": _short_of_ram,
    "vram_bytes": _short_of_vram,
    "disk_bytes": _short_of_disk,
    "offload_bytes": _short_of_offload,
}


def _parts(parts: Mapping[str, int]) -> str:
    return "; ".join(f"{name} {gib(size)}" for name, size in parts.items())


def _advice(planned: Planned) -> str:
    """``smaller`` in a sentence, without its full stop."""
    found = []
    for tried in smaller(planned):
        now = tried.planned.needs
        needs = ", ".join(
            f"{MEMORY_NAMES[name]} {gib(now[name])}, {less(planned.needs[name] - now[name])}"
            for name in planned.short_of
        )
        found.append(
            f"{tried.setting.removeprefix(f'{_ANEW} ')} ({needs}{'; fits' if tried.planned.fits else ''})"
        )
    if not found:
        return "None of the settings that were tried needs less"
    anew = "" if planned.given is None else f", with {_ANEW},"
    return f"Of the settings that were tried{anew} these need least: {', '.join(found)}"


def less(num_bytes: int) -> str:
    """A difference of memory, for people."""
    return f"{gib(abs(num_bytes))} {'less' if num_bytes >= 0 else 'more'}"


def faster(planned: Planned) -> list[Tried]:
    """Settings under which the job still fits and does more tokens a second, the best first."""
    if planned.profiles is None:
        return []
    least = tokens_per_second(planned) * (1 + _WORTH_A_CHANGE)
    tries = _tried(planned, _faster_changes(planned), near=planned.plan)
    fitting = (tried for tried in tries if tried.planned.fits)
    found = [tried for tried in fitting if tried.tokens_per_second >= least]
    return sorted(found, key=lambda tried: -tried.tokens_per_second)


def tokens_per_second(planned: Planned) -> float:
    """Of lines that are all as long as the longest: what plans are compared by."""
    tokens = planned.rows * planned.data.longest * planned.recipe.train.gradient_accumulation_steps
    return tokens / planned.full_step_seconds


def _tried(planned: Planned, changes: Iterator[_Change], near: Plan | None = None) -> Iterator[Tried]:
    """What comes of ``changes``, each planned anew, and says so where the plan was given."""
    if planned.given is not None:
        own = _Change(_ANEW, planned.recipe)
        others = (replace(change, setting=f"{_ANEW} {change.setting}") for change in changes)
        changes = itertools.chain([own], others)
    for change in changes:
        try:
            job = planned.with_recipe(change.recipe, change.longest)
        except UserError:  # contradicts another setting
            continue
        share = job.rows * job.data.longest / (planned.rows * planned.data.longest)
        profiles = None if planned.profiles is None else [scaled(profile, share) for profile in planned.profiles]
        yield Tried(change.setting, plan_job(job, planned.target, profiles, near=near))


def _smaller_changes(planned: Planned) -> Iterator[_Change]:
    recipe, longest = planned.recipe, planned.data.longest
    if recipe.adapter is None:
        yield _Change("adapter.r=16", recipe.model_copy(update={"adapter": Adapter(r=16)}))
    elif recipe.model.quantize == "none":
        yield _Change("model.quantize=nf4", recipe.with_values("model", quantize="nf4"))
    if recipe.adapter is not None and not planned.on_disk:
        yield _Change("engine.host_store=mmap", recipe.with_values("engine", host_store="mmap"))
    folder = files.existing_folder(Path(recipe.output_dir))
    if planned.offload is None and not lies_in_ram(folder):
        yield _Change(f"optimizer.offload={folder}", recipe.with_values("optimizer", offload=str(folder)))
    elif planned.offload is not None:
        yield _Change("optimizer.offload=null", recipe.with_values("optimizer", offload=None))
    if recipe.model.dtype == "float32":
        yield _Change("model.dtype=bfloat16", recipe.with_values("model", dtype="bfloat16"))
    for state in {"fp32": ("bf16", "8bit"), "bf16": ("8bit",)}.get(recipe.optimizer.state, ()):
        yield _Change(f"optimizer.state={state}", recipe.with_values("optimizer", state=state))
    if planned.delayed:
        yield _Change("optimizer.update=sync", recipe.with_values("optimizer", update="sync"))
    if planned.rows > 1:
        rows = planned.rows // 2
        yield _Change(f"train.micro_batch_size={rows}", recipe.with_values("train", micro_batch_size=rows))
    half = align(longest // 2, PAD_TO_MULTIPLE)
    if half < longest:
        yield _Change(f"data.max_seq_len={half}", recipe.with_values("data", max_seq_len=half), half)
    if planned.num_microbatches > 1:
        fewer = choose_num_microbatches(recipe.train.gradient_accumulation_steps, planned.num_microbatches // 2)
        yield _Change(f"engine.num_microbatches={fewer}", recipe.with_values("engine", num_microbatches=fewer))
    for grain in {"layer", "stage"} - {planned.plan.recompute}:
        yield _Change(f"engine.recompute={grain}", recipe.with_values("engine", recompute=grain))
    if recipe.checkpoint.keep_last > 1:
        yield _Change("checkpoint.keep_last=1", recipe.with_values("checkpoint", keep_last=1))
    if not recipe.checkpoint.make_room:
        yield _Change("checkpoint.make_room=true", recipe.with_values("checkpoint", make_room=True))


def _faster_changes(planned: Planned) -> Iterator[_Change]:
    recipe, accumulation = planned.recipe, planned.recipe.train.gradient_accumulation_steps
    if not planned.delayed:
        yield _Change("optimizer.update=delayed", recipe.with_values("optimizer", update="delayed"))
    if planned.num_microbatches < accumulation:
        more = recipe.with_values("engine", num_microbatches=accumulation)
        yield _Change(f"engine.num_microbatches={accumulation}", more)
    twice = recipe.with_values("train", gradient_accumulation_steps=2 * accumulation)
    yield _Change(f"train.gradient_accumulation_steps={2 * accumulation}", twice)
    if recipe.engine.recompute != "auto":
        yield _Change("engine.recompute=auto", recipe.with_values("engine", recompute="auto"))
