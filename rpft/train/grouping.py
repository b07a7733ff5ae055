"""Plans a job with experts in layers of their own where a worker's memory does not do otherwise, only there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeGuard

from rpft.plan.bill import least_device_bytes
from rpft.train.job import Job
from rpft.train.measuring import LayerTooLarge
from rpft.train.planned import AnyPlanned


def plan_groups(job: Job, vram_bytes: int | None, plan: Callable[[Job], AnyPlanned]) -> AnyPlanned:
    """``plan`` of ``job``, or of it with the experts of each block in the fewest groups that fit ``vram_bytes``.

    Where none does, the outcome is that of whole blocks. ``vram_bytes`` None: all fits.
    """
    if vram_bytes is None or job.given is not None:
        return plan(job)

    def could_fit(job: Job) -> bool:
        return least_device_bytes(job.layouts, job.workload(None)) <= vram_bytes

    whole: AnyPlanned | LayerTooLarge | None = None
    if could_fit(job):
        whole = _plan_or_fault(job, plan)
        if _fits(whole):
            return whole
    for other in filter(could_fit, job.in_expert_groups()):
        planned = _plan_or_fault(other, plan)
        if _fits(planned):
            return planned
    if isinstance(whole, LayerTooLarge):
        raise whole
    return plan(job) if whole is None else whole


def _plan_or_fault(job: Job, plan: Callable[[Job], AnyPlanned]) -> AnyPlanned | LayerTooLarge:
    try:
        return plan(job)
    except LayerTooLarge as fault:
        said = str(fault)
    gc.collect()  # the traceback, whose frames hold what was on the device
    return LayerTooLarge(said)


def _fits(planned: AnyPlanned | LayerTooLarge) -> TypeGuard[AnyPlanned]:
    return not isinstance(planned, LayerTooLarge) and "vram_bytes" not in planned.short_of
