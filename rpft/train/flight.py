"""A step on its way through the engine: what is given to it, and the record that is made of what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from rpft.data.batches import Microbatch
from rpft.engine.device import Device
from rpft.engine.slot import HostBatch
from rpft.optim.host_optimizer import UpdateResult
from rpft.train.metrics import StepRecord


def to_host_batch(batch: Microbatch) -> HostBatch:
    """What the engine needs of a microbatch: labels become the places that are scored and their targets."""
    flat = batch.labels.flatten()
    trained_at = (flat >= 0).nonzero().flatten()
    return HostBatch(batch.input_ids, batch.position_ids, trained_at, flat[trained_at])


@dataclass(frozen=True)
class Flight:
    """A step that is to be trained, or is under way."""

    step: int
    microbatches: Sequence[Microbatch]

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.microbatches)

    @property
    def trained_tokens(self) -> int:
        return sum(batch.trained_tokens for batch in self.microbatches)

    def host_batches(self) -> list[HostBatch]:
        return [to_host_batch(batch) for batch in self.microbatches]

    def record(self, result: UpdateResult, seconds: float, epoch: float, devices: Sequence[Device]) -> StepRecord:
        """Its line of metrics.jsonl; ``epoch``: how many are done with it."""
        return StepRecord(
            step=self.step,
            epoch=round(epoch, 6),
            loss=result.loss_sum / self.trained_tokens,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            trained_tokens=self.trained_tokens,
            tokens=self.tokens,
            tokens_per_second=self.tokens / seconds,
            step_seconds=seconds,
            skipped_steps=result.skipped_steps,
            host_rss_bytes=psutil.Process().memory_info().rss,
            devices=[
                {
                    "name": device.name,
                    "peak_bytes": device.peak_bytes(),
                    "allocation_retries": device.allocation_retries(),
                }
                for device in devices
            ],
            optimizer_seconds=result.update_seconds,
            router_aux_loss=result.router_aux_loss,
        )
