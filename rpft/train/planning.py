"""The plan of a job for a machine, at hand or described: stages, memory, how fast it should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rpft import files
from rpft.model.graphs import KernelKind
from rpft.model.layout import first_trained
from rpft.model.moments import BLOCK, moments_bytes
from rpft.plan.bill import MOMENTS_WINDOW, READ_AHEAD, Bill, Workload, gib, make_bill
from rpft.plan.choose import choose_plan, step_shape
from rpft.plan.compare import Workbook
from rpft.plan.costs import measured_costs
from rpft.plan.machine import Machine, datasheet_profiles
from rpft.plan.plan import Plan
from rpft.plan.predict import Prediction, predict
from rpft.plan.profile import LayerProfile
from rpft.plan.profile_file import Profile
from rpft.plan.rates import ASSUMED_RATES, Rates
from rpft.plan.simulate import step_seconds
from rpft.plan.sizes import frozen_bytes_up
from rpft.plan.smaller import smaller_plan
from rpft.plan.step_shape import StepShape
from rpft.recipe.schema import Recipe
from rpft.train.checkpoint import checkpoint_bytes
from rpft.train.dividing import plan_rounds, plan_rows
from rpft.train.grouping import plan_groups
from rpft.train.job import Job, made_for, read_job
from rpft.train.kernels import KernelChoice
from rpft.train.room import most_checkpoints
from rpft.train.save_copies import copies_bytes

MEMORY_NAMES = {
    "vram_bytes": "each worker's memory",
    "host_bytes": "RAM",
    "pinned_bytes": "of that page-locked",
    "disk_bytes": "disk: result and checkpoints",
    "offload_bytes": "disk of optimizer.offload",
}
"""For people, the keys of ``Planned.memory``."""

PLAN_FILE = "plan.json"

_ENDLESS = 1 << 60
"""Bytes that no run takes."""

_WORTH_SAYING = 0.005
"""Share of a step that more memory must save to be called a limit."""

_DISKS = ("disk_bytes", "offload_bytes")

COPIES = "copies while a checkpoint is written"
"""The part of ``Planned.host_parts`` that a run takes only where it is free."""

_RAM_LEFT_FREE = 0.05
"""Share of the RAM there is that such copies leave to other programs and to the system's cache of files."""


@dataclass(frozen=True)
class Target:
    """What a job is planned for."""

    name: str
    num_workers: int
    vram_bytes: int | None
    """Of each worker; None where it has no memory of its own."""
    ram_bytes: int
    disk_bytes: int | None
    """Free where the run writes; None where that is not known."""
    rates: Rates
    speeds: tuple[float, ...] | None = None
    """Of each worker, over that of the one whose layers are known."""
    page_locks: bool = True
    """Whether copies to a worker need page-locked memory."""
    whole_masters: bool = False
    """As of the host store."""
    disk_rate: float | None = None
    """Bytes a second that the disk of the output directory is read with; None where that is not known."""
    offload_bytes: int | None = None
    """Free on the disk of ``optimizer.offload``, where that is another than the output directory's."""
    turnover_rate: float | None = None
    """Bytes a second that it reads and writes back at once; None where that is not known."""
    write_rate: float | None = None
    """Bytes a second that a checkpoint is written with; None where that is not known."""

    @property
    def ram_reserve_bytes(self) -> int:
        """That are left free by what a run takes only because it is there."""
        return int(_RAM_LEFT_FREE * self.ram_bytes)

    def rates_of(self, job: Job) -> Rates:
        """``rates``, with that of the disk where the moments of ``job`` lie there."""
        if job.offload is None or self.turnover_rate is None:
            return self.rates
        return replace(self.rates, moments=self.turnover_rate / moments_bytes(job.state_format, BLOCK) * BLOCK)

    def workload(self, job: Job, profiles: Sequence[LayerProfile] | None) -> Workload:
        """What decides the memory of ``job`` here."""
        workers_in_ram = self.num_workers if self.vram_bytes is None else 0
        return job.workload(profiles, self.whole_masters, workers_in_ram, self.num_workers)


class UsualStep(NamedTuple):
    """A step as the simulator is told of it."""

    plan: Plan
    shape: StepShape
    tokens: float
    """Without padding."""


@dataclass
class Planned(Job):
    """A job with its plan."""

    target: Target
    profile: Profile | None
    """What was measured, where it was."""
    profiles: list[LayerProfile] | None
    """What each layer takes at the longest line, measured or from a datasheet; None where nothing is known."""
    plan: Plan
    bill: Bill
    choices: tuple[str, ...] = field(kw_only=True, default=())
    """What the planner chose of the division of a step, for people, with what it would else have been."""

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint."""
        return checkpoint_bytes(self.layouts, self.delayed, self.recipe.optimizer.state)

    @cached_property
    def most_copies_bytes(self) -> int:
        """Of all that a save on the way could have to copy; 0 where nothing is saved there."""
        if not self.recipe.checkpoint.regular:
            return 0
        return copies_bytes(self.layouts, self.delayed, self.state_format)

    @cached_property
    def copies_bytes(self) -> int:
        """RAM for such copies, of what the plan leaves free.

        None where moments lie in a file: an update brings them from the disk, as copies of them would have to.
        """
        spare = self.target.ram_bytes - self.target.ram_reserve_bytes - self.bill.host
        return 0 if self.offload is not None else max(0, min(self.most_copies_bytes, spare))

    @property
    def host_parts(self) -> dict[str, int]:
        """What the run takes of RAM, by what it is for."""
        return self.bill.host_parts | ({COPIES: self.copies_bytes} if self.copies_bytes else {})

    @property
    def num_checkpoints(self) -> int:
        """On the disk at once, at most."""
        return most_checkpoints(self.recipe, self.data.order.num_steps)

    @property
    def memory(self) -> dict[str, int]:
        """What the run takes of each kind of memory, in bytes; VRAM is of one worker."""
        return self.needs | {"host_bytes": self.bill.host + self.copies_bytes}

    @cached_property
    def needs(self) -> dict[str, int]:
        """``memory`` without what is taken only because it is free."""
        pinned = 0
        if self.target.page_locks:
            crossing = ("hidden states between stages", "kept for the backward")
            gradients = self.gradient_dtype.itemsize
            pinned = sum(layout.host_bytes + layout.grad_elements * gradients for layout in self.layouts)
            pinned += sum(self.bill.host_parts[part] for part in crossing)
            if self.on_disk:
                pinned += self.bill.host_parts[READ_AHEAD] - self._frozen_bytes
        disk = self.bill.result + self.bill.frozen_file + self.num_checkpoints * self.checkpoint_bytes
        return {
            "vram_bytes": self.bill.device,
            "host_bytes": self.bill.host,
            "pinned_bytes": pinned,
            "disk_bytes": disk + (self.bill.moments_file if self.moments_beside_output else 0),
            **({"offload_bytes": self.bill.moments_file} if self.target.offload_bytes is not None else {}),
        }

    @property
    def _frozen_bytes(self) -> int:
        return sum(layout.frozen_bytes for layout in self.layouts)

    @property
    def frozen_bytes_a_step(self) -> int:
        """Bytes of frozen weights that the slots of a step bring up."""
        return self.rounds * frozen_bytes_up(self.layouts, self.plan, first_trained(self.layouts))

    @property
    def about_disk(self) -> str | None:
        """What it saves and costs that frozen weights lie on the disk, for people; None where they do not."""
        if not self.on_disk:
            return None
        saved = self._frozen_bytes - self.bill.host_parts[READ_AHEAD]
        read, rate = self.frozen_bytes_a_step, self.target.disk_rate
        seconds = "" if rate is None else f": at {rate / 1e9:.2g} GB/s at least {read / rate:.2g} s"
        return (
            f"frozen weights lie in a file in output_dir: {gib(abs(saved))} {'less' if saved >= 0 else 'more'}"
            f" RAM; a step reads {gib(read)}{seconds}, less what the system has RAM left to keep"
        )

    @property
    def about_groups(self) -> str | None:
        """Into what blocks are cut and why, for people; None where they are not."""
        groups = self.skeleton.num_groups
        if groups == 1:
            return None
        whole, layers = len(self.skeleton.blocks), len(self.layouts)
        return (
            f"the experts of a block are {groups} layers of their own, since a worker's memory does not do for a"
            f" block in one: {whole + 2} layers have become {layers}"
        )

    @property
    def moments_beside_output(self) -> bool:
        """Whether moments lie on the disk of the output directory."""
        return self.offload is not None and self.target.offload_bytes is None

    @property
    def about_offload(self) -> str | None:
        """What it saves and costs that moments lie on the disk, for people; None where they do not."""
        if self.offload is None:
            return None
        parameters = sum(layout.num_trained for layout in self.layouts)
        saved = moments_bytes(self.state_format, parameters) - self.bill.host_parts[MOMENTS_WINDOW]
        moved, rate = self.bill.moments_file, self.target.turnover_rate
        if rate is None:
            seconds = ", which the prediction leaves out, since the disk's rate is not known"
        else:
            seconds = f": at {rate / 1e9:.2g} GB/s {moved / rate:.2g} s"
        return (
            f"moments lie in a file in {self.offload}: {gib(abs(saved))} {'less' if saved >= 0 else 'more'} RAM;"
            f" an update reads {gib(moved)} and writes them back at the same time{seconds}"
        )

    @property
    def rates(self) -> Rates:
        """Those of links, optimizer and, where moments lie on it, disk."""
        return self.target.rates_of(self)

    @property
    def limits(self) -> dict[str, int | None]:
        """What there is of each; None where there is no limit, or none is known."""
        target = self.target
        return {
            "vram_bytes": target.vram_bytes,
            "host_bytes": target.ram_bytes,
            "pinned_bytes": None,
            "disk_bytes": target.disk_bytes,
            **({"offload_bytes": target.offload_bytes} if target.offload_bytes is not None else {}),
        }

    @property
    def short_of(self) -> list[str]:
        """The kinds of memory of which there is too little."""
        needs = self.needs
        return [name for name, limit in self.limits.items() if limit is not None and needs[name] > limit]

    @property
    def fits(self) -> bool:
        return not self.short_of

    @property
    def memory_short(self) -> float:
        """The largest share by which RAM or VRAM is exceeded; 0 where both do."""
        needs, limits = self.needs, self.limits
        return max(
            0.0, *(needs[n] / limit - 1 for n, limit in limits.items() if limit is not None and n not in _DISKS)
        )

    def prediction(self) -> Prediction | None:
        """What a step should take with lines as long as the data's are on average; None where nothing is known."""
        usual = self.usual_step()
        return None if usual is None else predict(usual.plan, usual.shape, self.rates, usual.tokens)

    def usual_step(self) -> UsualStep | None:
        """A step with lines as long as the data's are on average; None where nothing is known."""
        if self.profiles is None:
            return None
        padded, tokens = self.mean_step()
        if self.profile is not None:
            profiles = self.profile.at(padded / self.rows)
        else:
            profiles = [scaled(profile, padded / self.max_tokens) for profile in self.profiles]
        # A plan that was given may hold more microbatches than a round has.
        in_round = -(-self.recipe.train.gradient_accumulation_steps // self.rounds)
        return UsualStep(
            replace(self.plan, num_microbatches=in_round), self._step_shape(profiles, round(padded)), tokens
        )

    def mean_step_seconds(self) -> float:
        """The seconds of ``prediction``, by which divisions of a step are held; 0 where nothing is known."""
        usual = self.usual_step()
        return 0.0 if usual is None else step_seconds(usual.plan, usual.shape, self.rates)

    def full_prediction(self) -> Prediction | None:
        """``prediction``, with what memory costs: that takes another search for a plan."""
        found = self.prediction()
        if found is None:
            return None
        share = self.memory_saved_seconds() / self.full_step_seconds
        return replace(found, saved_seconds={**found.saved_seconds, "memory": share * found.step_seconds})

    def memory_saved_seconds(self) -> float:
        """By how much a full step would be shorter under the best plan for a machine without limits to memory."""
        if self.profiles is None or self.given is not None:
            return 0.0
        vram = None if self.target.vram_bytes is None else _ENDLESS
        endless = replace(self.target, vram_bytes=vram, ram_bytes=_ENDLESS)
        saved = self.full_step_seconds - plan_job(self, endless, self.profiles).full_step_seconds
        return saved if saved > _WORTH_SAYING * self.full_step_seconds else 0.0

    @cached_property
    def full_step_seconds(self) -> float:
        """What a step should take whose lines are all as long as the longest; what plans are compared by."""
        assert self.profiles is not None
        shape = self._step_shape(self.profiles, self.max_tokens)
        return step_seconds(self.plan, shape, self.rates)

    def round_upload_seconds(self) -> float:
        """What the weights of a round keep the workers' links busy, spread evenly: no step takes less a round."""
        plan, frozen = self.plan, set(self.plan.resident)
        layers = [self.layouts[i] for stage in plan.forward + plan.backward for i in stage.layers]
        sent = sum(layer.region_bytes - layer.frozen_bytes * (layer.layer in frozen) for layer in layers)
        return sent / self.rates.up / self.target.num_workers

    def seconds_in_rounds(self, num_microbatches: int) -> float:
        """``full_step_seconds`` with the same stages and rounds of another length."""
        assert self.profiles is not None
        job = self.with_rounds(num_microbatches)
        shape = replace(self._step_shape(self.profiles, self.max_tokens), rounds=job.rounds)
        return step_seconds(replace(self.plan, num_microbatches=num_microbatches), shape, self.rates)

    def _step_shape(self, profiles: Sequence[LayerProfile], max_tokens: int) -> StepShape:
        """What the simulator is told of a step whose microbatches have ``max_tokens``, padding included."""
        target = self.target
        work = replace(target.workload(self, profiles), max_tokens=max_tokens)
        costs = measured_costs(profiles, self.plan.keep_bytes_per_token, self.plan.recompute)
        return step_shape(self.layouts, work, costs, target.num_workers, self.rounds, target.speeds)

    def about(self, prediction: Prediction | None) -> dict[str, Any]:
        """What a plan file says beside the plan."""
        return {
            "micro_batch_size": self.rows,
            "expert_groups": self.skeleton.num_groups,
            "rounds": self.rounds,
            "predicted": prediction and prediction.as_dict(),
            "memory": self.memory,
            "fits": self.fits,
            "made_for": made_for(self.skeleton),
            "target": self.target.name,
        }

    def write_plan_file(self) -> None:
        """Leaves the plan in the output directory."""
        text = self.plan.to_json(**self.about(self.prediction()))
        files.write_whole(Path(self.recipe.output_dir) / PLAN_FILE, text)


def plan_job(
    job: Job,
    target: Target,
    profiles: Sequence[LayerProfile] | None,
    profile: Profile | None = None,
    near: Plan | None = None,
) -> Planned:
    """Chooses the plan, unless one is given, and the rounds, where the recipe does not say; and makes its bill.

    No number depends on the rounds: those are tried that leave the host gradients as precise as they are, and the
    others only where none of these fits. Whether the outcome fits is not asked here. With ``engine.host_store:
    auto`` frozen weights lie on the disk if RAM is too little for them and all fits so. ``near``: see
    ``choose_plan``.
    """
    planned = plan_rounds(job, lambda job: plan_in_rounds(job, target, profiles, profile, near))
    if job.recipe.engine.host_store == "auto" and job.recipe.adapter and "host_bytes" in planned.short_of:
        on_disk = plan_job(job.with_frozen_on_disk(), target, profiles, profile, near)
        if on_disk.fits:
            return on_disk
    return planned


def plan_in_rounds(
    job: Job,
    target: Target,
    profiles: Sequence[LayerProfile] | None,
    profile: Profile | None,
    near: Plan | None = None,
) -> Planned:
    """The plan for the rounds of ``job``, chosen unless one is given."""
    work = target.workload(job, profiles)
    plan = job.given or choose_plan(
        job.layouts,
        job.skeleton,
        work,
        target.num_workers,
        job.num_microbatches,
        job.recipe.engine.recompute,
        target.vram_bytes,
        target.ram_bytes,
        ASSUMED_RATES if profiles is None else target.rates_of(job),
        target.speeds,
        near,
    )
    return Planned(
        **job.parts(),
        target=target,
        profile=profile,
        profiles=None if profiles is None else list(profiles),
        plan=plan,
        bill=make_bill(plan, job.layouts, work),
    )


_P = TypeVar("_P", bound=Planned)


def smaller(planned: _P) -> _P | None:
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


def _with_half_the_rows(planned: _P) -> _P:
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


def plan_for_machine(recipe: Recipe, machine: Machine, name: str) -> Planned:
    """The plan of a recipe for a machine that one need not have, from its datasheet."""
    job = _job_for_machine(recipe)
    wanted = recipe.engine.workers
    machine = machine if wanted is None else machine.with_workers(wanted)
    speeds = machine.speeds
    target = Target(
        name=name,
        num_workers=machine.num_workers,
        vram_bytes=min(machine.vram_bytes, recipe.engine.vram_limit or machine.vram_bytes),
        ram_bytes=recipe.engine.ram_limit or machine.ram_bytes,
        disk_bytes=None,
        rates=machine.rates_with(recipe.optimizer.state),
        turnover_rate=machine.host.disk_gbps and machine.host.disk_gbps * 1e9,
        speeds=None if speeds is None else tuple(speeds),
    )

    def plan(job: Job) -> Planned:
        work = job.workload(None)
        profiles = datasheet_profiles(machine, job.layouts, job.skeleton, work, job.data.longest)
        return plan_job(job, target, profiles)

    return plan_groups(job, target.vram_bytes, lambda job: plan_rows(job, plan))


def _job_for_machine(recipe: Recipe) -> Job:
    setting = recipe.engine.kernels
    kernels: KernelKind = "compile" if setting == "auto" else setting
    return read_job(recipe, KernelChoice(kernels), weights=False)


def workbook_of(recipe: Recipe) -> Workbook:
    """A recipe's model and steps, for schedules to be compared on a machine that one need not have."""
    job = _job_for_machine(recipe)
    return Workbook(job.layouts, job.skeleton, job.workload(None), job.data.longest)


def scaled(profile: LayerProfile, share: float) -> LayerProfile:
    """``profile`` for a microbatch of so many times the tokens: everything grows with them."""
    return LayerProfile(
        profile.forward_seconds * share,
        profile.backward_seconds * share,
        round(profile.forward_bytes * share),
        round(profile.backward_bytes * share),
        round(profile.kept_bytes * share),
        round(profile.kept_backward_bytes * share),
        profile.keep_options,
    )
