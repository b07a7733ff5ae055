"""The search for a job's plan on a machine, at hand or described, over all that its recipe leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rpft.model.graphs import KernelKind
from rpft.plan.bill import make_bill
from rpft.plan.choose import choose_plan
from rpft.plan.compare import Workbook
from rpft.plan.machine import Machine, datasheet_profiles
from rpft.plan.plan import Plan
from rpft.plan.predict import Prediction
from rpft.plan.profile import LayerProfile
from rpft.plan.profile_file import Profile
from rpft.plan.rates import ASSUMED_RATES
from rpft.recipe.schema import Recipe
from rpft.train.dividing import plan_rounds, plan_rows
from rpft.train.grouping import plan_groups
from rpft.train.job import Job, read_job
from rpft.train.kernels import KernelChoice
from rpft.train.planned import Planned
from rpft.train.target import Target

_ENDLESS = 1 << 60
"""Bytes that no run takes."""

_WORTH_SAYING = 0.005
"""Share of a step that more memory must save to be called a limit."""


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


def full_prediction(planned: Planned) -> Prediction | None:
    """``planned.prediction()``, with what memory costs: that takes another search for a plan."""
    found = planned.prediction()
    if found is None:
        return None
    share = memory_saved_seconds(planned) / planned.full_step_seconds
    return replace(found, saved_seconds={**found.saved_seconds, "memory": share * found.step_seconds})


def memory_saved_seconds(planned: Planned) -> float:
    """By how much a full step would be shorter under the best plan for a machine without limits to memory."""
    if planned.profiles is None or planned.given is not None:
        return 0.0
    vram = None if planned.target.vram_bytes is None else _ENDLESS
    endless = replace(planned.target, vram_bytes=vram, ram_bytes=_ENDLESS)
    saved = planned.full_step_seconds - plan_job(planned, endless, planned.profiles).full_step_seconds
    return saved if saved > _WORTH_SAYING * planned.full_step_seconds else 0.0


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
