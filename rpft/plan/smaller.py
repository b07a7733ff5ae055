"""Makes a plan smaller when a worker's memory did not do, whatever the bill says: the one place for it.

In this order, each only where the bill says that it takes less of a device and no more RAM than there is:

    1. nothing is kept beside the layers' inputs, no frozen weights stay
    2. recompute by layer
    3. stages of fewer layers, a tenth of the memory at a time
    4. microbatches of fewer rows (train/smaller.py, which knows of rows)

The first three change no bit of the result, the last one the order of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton
from rpft.plan.bill import Billing, Workload
from rpft.plan.choose import choose_plan
from rpft.plan.plan import Plan
from rpft.plan.rates import Rates

_SHARE = 0.9
"""Of a device's bill that the next one may have."""


def smaller_plan(
    plan: Plan,
    layouts: list[LayerLayout],
    skeleton: Skeleton,
    work: Workload,
    num_workers: int,
    ram_bytes: int | None,
    rates: Rates,
    speeds: Sequence[float] | None = None,
) -> Plan | None:
    """The next smaller plan with the same microbatches, or None. For the arguments see ``choose_plan``."""
    billing = Billing(layouts, work)
    now = billing.of(plan).device

    def candidates() -> Iterator[Plan]:
        lean = replace(plan, keep_bytes_per_token=0, resident=())
        yield lean
        yield replace(lean, recompute="layer")
        for grain in ("layer", "stage"):  # by stage takes less RAM
            size, limit = plan.num_microbatches, int(_SHARE * now)
            found = choose_plan(layouts, skeleton, work, num_workers, size, grain, limit, ram_bytes, rates, speeds)
            yield replace(found, resident=())

    for candidate in candidates():
        bill = billing.of(candidate)
        if bill.device < now and (ram_bytes is None or bill.host <= ram_bytes):
            return candidate
    return None
