"""A job with its plan: what memory the run takes, and how long a step should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rpft import files
from rpft.model.layout import first_trained
from rpft.model.moments import moments_bytes
from rpft.plan.bill import MOMENTS_WINDOW, READ_AHEAD, Bill, gib
from rpft.plan.choose import step_shape
from rpft.plan.costs import measured_costs, scaled
from rpft.plan.plan import Plan
from rpft.plan.predict import Prediction, predict
from rpft.plan.profile import LayerProfile
from rpft.plan.profile_file import Profile
from rpft.plan.rates import Rates
from rpft.plan.simulate import step_seconds
from rpft.plan.sizes import frozen_bytes_up
from rpft.plan.step_shape import StepShape
from rpft.train.checkpoint import checkpoint_bytes
from rpft.train.given_plan import made_for
from rpft.train.job import Job
from rpft.train.room import most_checkpoints
from rpft.train.save_copies import copies_bytes
from rpft.train.target import Target

MEMORY_NAMES = {
    "vram_bytes": "each worker's memory",
    "host_bytes": "RAM",
    "pinned_bytes": "of that page-locked",
    "disk_bytes": "disk: result and checkpoints",
    "offload_bytes": "disk of optimizer.offload",
}
"""For people, the keys of ``Planned.memory``."""

PLAN_FILE = "plan.json"

_DISKS = ("disk_bytes", "offload_bytes")

COPIES = "copies while a checkpoint is written"
"""The part of ``Planned.host_parts`` that a run takes only where it is free."""


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


AnyPlanned = TypeVar("AnyPlanned", bound=Planned)
