"""What a job is planned for: workers, memory, disks and rates of a machine, at hand or described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rpft.model.moments import BLOCK, moments_bytes
from rpft.plan.bill import Workload
from rpft.plan.profile import LayerProfile
from rpft.plan.rates import Rates
from rpft.train.job import Job

_RAM_LEFT_FREE = 0.05
"""Share of the RAM there is that is left to other programs and to the system's cache of files by what a run takes
only because it is there."""


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
