"""From a recipe to everything that a run needs, short of the weights. What can be refused is refused here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rpft.engine.device import Device, make_pool
from rpft.errors import UserError
from rpft.model.functions import LayerFunctions
from rpft.model.packed_trial import adopt
from rpft.optim.one_pass import FusedPass, OnePass
from rpft.optim.one_pass import prepare as prepare_one_pass
from rpft.plan.bill import available_host_bytes
from rpft.plan.disk_rate import disk_rate, turnover_rate, write_rate
from rpft.plan.profile_file import Profile
from rpft.plan.rates import ASSUMED_RATES
from rpft.recipe.schema import Recipe
from rpft.recipe.sections.engine import Engine
from rpft.train.dividing import plan_rows
from rpft.train.grouping import plan_groups
from rpft.train.job import Job, read_job
from rpft.train.kernels import choose_kernels
from rpft.train.measuring import Say, Workbench
from rpft.train.planned import Planned
from rpft.train.planning import plan_job
from rpft.train.room import check_offload, room_apart, room_bytes
from rpft.train.target import Target
from rpft.train.tries import refuse_unless_fits

logger = logging.getLogger(__name__)


@dataclass
class Prepared(Planned):
    """A run, ready to load its weights."""

    devices: list[Device]
    functions: list[LayerFunctions]
    """What runs the layers, one a device."""
    one_pass: OnePass
    """What updates the layers."""


def prepare(recipe: Recipe, say: Say = lambda line: None, measured: bool = False) -> Prepared:
    """Reads config, tokenizer and data, builds skeleton and plan, checks memory; UserError where it fails.

    ``measured``: whether layers are measured in any case, so that there is a prediction.
    """
    bench = set_up(recipe, weights=True)
    # Compiled layers are worth a plan of their own, and so is a choice of rows; else shapes give one at once.
    needed = measured or bench.job.open_rows or (bench.job.kernels.graphs and bench.on_cuda)
    # Without graphs no layer is compiled, and other lengths are soon measured.
    lengths = measured and not bench.job.kernels.graphs
    prepared = plan_rows_here(bench, lambda bench: bench.find_profile(say, needed, lengths))
    refuse_unless_fits(prepared)
    return prepared


def set_up(recipe: Recipe, weights: bool = False) -> Workbench:
    """The recipe's job on the workers of this machine. ``weights``: whether the checkpoint's will be read."""
    if recipe.optimizer.offload is not None:
        check_offload(Path(recipe.optimizer.offload))
    devices = make_devices(recipe.engine)
    job = read_job(recipe, choose_kernels(recipe.engine.kernels, devices[0].torch_device.type), weights)
    return workbench(job, devices)


def workbench(job: Job, devices: list[Device]) -> Workbench:
    """``job`` with what runs its layers on ``devices`` and what updates them."""
    recipe = job.recipe
    one_pass = prepare_one_pass(recipe.optimizer.state, num_threads=recipe.engine.cpu_threads)
    return Workbench(job, devices, _make_functions(job, devices), one_pass)


def _make_functions(job: Job, devices: list[Device]) -> list[LayerFunctions]:
    """What runs the layers of ``job``, one a device."""
    recipe = job.recipe
    functions = [
        LayerFunctions(job.skeleton, device.torch_device, job.dtype, job.kernels.kind, recipe.engine.deterministic)
        for device in devices
    ]
    if recipe.data.packing and recipe.model.attention == "auto" and devices[0].torch_device.type == "cuda":
        for reason in dict.fromkeys(map(adopt, functions)):
            if reason is not None:
                logger.warning("packed rows attend with masks, which is slower: %s", reason)
    return functions


def plan_here(bench: Workbench, profile: Profile | None) -> Prepared:
    """Plans for this machine; whether that fits is not asked here."""
    recipe, devices = bench.job.recipe, bench.devices
    speeds = None
    if profile is not None and profile.slowdown != 1.0:
        speeds = (1 / profile.slowdown,) * len(devices)
    elif profile is not None and profile.speeds:
        speeds = profile.speeds
    offload = bench.job.offload
    target = Target(
        name="this machine",
        num_workers=len(devices),
        vram_bytes=_vram_bytes(devices),
        ram_bytes=recipe.engine.ram_limit or available_host_bytes(),
        disk_bytes=room_bytes(recipe),
        rates=ASSUMED_RATES if profile is None else profile.rates(),
        speeds=speeds,
        page_locks=bench.on_cuda,
        # torch's fused kernel wants whole masters: it would have to join and split what lies in two halves.
        whole_masters=isinstance(bench.one_pass, FusedPass),
        offload_bytes=None if offload is None else room_apart(offload, recipe),
        turnover_rate=None if offload is None else turnover_rate(offload),
    )
    planned = plan_job(bench.job, target, None if profile is None else profile.layers, profile)
    if planned.on_disk:
        planned = replace(planned, target=replace(target, disk_rate=disk_rate(Path(recipe.output_dir))))
    if planned.copies_bytes < planned.most_copies_bytes:
        rate = write_rate(Path(recipe.output_dir), planned.checkpoint_bytes)
        planned = replace(planned, target=replace(planned.target, write_rate=rate))
    # Its fields only: what was worked out from them may be other with a rate of the disk.
    of_plan = {field.name: getattr(planned, field.name) for field in fields(planned)}
    return Prepared(**of_plan, devices=devices, functions=bench.functions, one_pass=bench.one_pass)


def plan_rows_here(bench: Workbench, find_profile: Callable[[Workbench], Profile | None]) -> Prepared:
    """As ``plan_here``, and chooses the rows of a microbatch where they are open, and groups of experts where they
    are needed; each has a profile.
    """

    def plan(job: Job) -> Prepared:
        same = job.skeleton is bench.job.skeleton
        functions = bench.functions if same else _make_functions(job, bench.devices)
        own = replace(bench, job=job, functions=functions)

        def plan_with(job: Job) -> Prepared:
            other = replace(own, job=job)
            return plan_here(other, find_profile(other))

        return plan_rows(job, plan_with)

    return plan_groups(bench.job, _vram_bytes(bench.devices), plan)


def _vram_bytes(devices: list[Device]) -> int | None:
    """What a run may take of each of ``devices``; None where they have no memory of their own."""
    return min((size for device in devices if (size := device.memory_bytes()) is not None), default=None)


def make_devices(settings: Engine) -> list[Device]:
    """The workers that a recipe asks for; UserError where this machine lacks them."""
    devices = make_pool(settings.device, settings.workers, settings.vram_limit, settings.emulate_link_gbps)
    if settings.emulate_link_gbps is not None and devices[0].torch_device.type == "cpu":
        auto = ", and no GPU is found," if settings.device == "auto" else ""
        raise UserError(
            f"engine.emulate_link_gbps slows down the link of a GPU; engine.device is {settings.device}{auto} and"
            " the CPU pool has no link. Set engine.emulate_link_gbps to null"
        )
    return devices
