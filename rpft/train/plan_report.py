"""All that is said of a plan, worked out once: for the terminal, for programs, and for a page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rpft.machine import versions
from rpft.plan.bill import gib
from rpft.plan.machine import Machine
from rpft.plan.plan import Stage
from rpft.plan.playback import Playback, play_back, slot_kind
from rpft.plan.predict import Prediction
from rpft.plan.simulate import slot_works
from rpft.train.given_plan import made_for
from rpft.train.hold_up import about_saves
from rpft.train.planned import MEMORY_NAMES, Planned
from rpft.train.planning import full_prediction
from rpft.train.tries import Tried, faster, smaller, tokens_per_second

LIMITS = {
    "compute": "the products of the layers",
    "link": "weights, gradients and hidden states on their way between RAM and the workers",
    "optimizer": "the update of the weights on the CPU",
    "disk": "moments on their way from the disk of optimizer.offload and back",
    "fill-drain": "workers that wait for the first and the last slots of a step",
    "memory": "too little memory for a better plan",
}
"""The keys of ``Prediction.saved_seconds``, for people."""


COPIES = ("weights up", "activations up", "activations down", "gradients down")
"""The keys of ``SlotReport.seconds`` beside compute."""


@dataclass(frozen=True)
class SlotReport:
    """What one slot of a round takes: seconds for all its microbatches, on lines of the usual length."""

    slot: int
    kind: str
    """forward, fused or backward."""
    stage: Stage
    weights_bytes: int
    gradient_bytes: int
    seconds: dict[str, float]
    """Of compute, and of each of ``COPIES``."""

    @property
    def longest(self) -> str:
        """What takes longest, and so sets the pace: they run side by side."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def longest_copy(self) -> str:
        """That of ``seconds`` beside compute which takes longest."""
        return max(COPIES, key=lambda name: self.seconds[name])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "slot": self.slot,
            "kind": self.kind,
            "layers": list(self.stage),
            "weights_bytes": self.weights_bytes,
            "gradient_bytes": self.gradient_bytes,
            "seconds": {name.replace(" ", "_"): seconds for name, seconds in self.seconds.items()},
            "longest": self.longest.replace(" ", "_"),
        }


@dataclass(frozen=True)
class MemoryReport:
    """One kind of memory."""

    name: str
    takes: int
    limit: int | None
    """None where there is none, or none is known."""
    parts: dict[str, int]

    @property
    def short(self) -> bool:
        return self.limit is not None and self.takes > self.limit


@dataclass(frozen=True)
class Change:
    """A setting that was tried, as it would stand on the command line, and what came of it."""

    setting: str
    memory: dict[str, int]
    """What it would need, as ``Planned.needs``."""
    fits: bool
    gain: float
    """Tokens a second more, as a share, on lines of full length."""


@dataclass(frozen=True)
class PlanReport:
    """A plan, what it takes, how fast it should be, and what would change that."""

    planned: Planned
    prediction: Prediction
    slots: list[SlotReport]
    memory: dict[str, MemoryReport]
    changes: list[Change]
    """What would be faster where the plan fits, what would need less memory where it does not; the best first."""
    machine: dict[str, Any]
    """What it is planned for. Rates are bytes, or parameters, a second."""
    versions: dict[str, str]

    @property
    def model_name(self) -> str:
        """The last part of the model's path or hub id."""
        return Path(self.planned.recipe.model.path).name

    @property
    def machine_name(self) -> str:
        """That of the machine, or of the file that describes it."""
        return Path(self.planned.target.name).name

    @property
    def headline(self) -> str:
        """What is trained, and in which steps."""
        planned, train = self.planned, self.planned.recipe.train
        adapter = planned.recipe.adapter
        what = "every weight trained" if adapter is None else f"LoRA of rank {adapter.r}"
        return (
            f"{planned.target.num_workers} worker(s); {what}, {planned.recipe.model.dtype}; a step of"
            f" {train.gradient_accumulation_steps} microbatches of {planned.rows} x {planned.data.longest:,}"
            f" tokens at most, in {planned.rounds} round(s) of {planned.plan.num_microbatches}"
        )

    @property
    def changes_title(self) -> str:
        """What ``changes`` are."""
        return "What would be faster" if self.planned.fits else "What needs less memory"

    def machine_facts(self) -> list[tuple[str, str]]:
        """``machine`` for people."""
        told = self.machine
        facts = [("name", told["name"]), ("times of layers", told["times"]), ("workers", str(told["workers"]))]
        description = told.get("description")
        if description is not None:
            facts += [
                (
                    "GPUs",
                    f"{gpus['count']} x {gpus['name']}: {gpus['tflops']:g} TFLOP/s, {gpus['memory_gib']:g} GiB,"
                    f" link {gpus['link_gbps']:g} GB/s",
                )
                for gpus in description["gpus"]
            ]
            host = description["host"]
            facts.append(("host", f"{host['cores']} cores, memory {host['memory_gbps']:g} GB/s"))
        measured = told.get("measured")
        if measured is not None:
            names = measured["workers"]
            facts.append(("devices", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))))
            facts.append(("processor", f"{measured['processor']}, {measured['cores']} cores"))
        if told["vram_bytes"] is not None:
            facts.append(("memory a run may take of each", gib(told["vram_bytes"])))
        facts.append(("RAM", gib(told["ram_bytes"])))
        if told["disk_bytes"] is not None:
            facts.append(("free disk", gib(told["disk_bytes"])))
        facts.append(("link, up and down", f"{told['link_up'] / 1e9:.1f} and {told['link_down'] / 1e9:.1f} GB/s"))
        if told["links_at_once"] is not None:
            at_once = f"{told['workers_per_switch']} links, as fast as {told['links_at_once']:.2g} of them"
            facts.append(("one switch carries", at_once))
        facts.append(("optimizer", f"{told['updates'] / 1e9:.2f} G parameters/s"))
        if told["turnover"] is not None:
            facts.append(("disk, read and written at once", f"{told['turnover'] / 1e9:.2f} GB/s"))
        return facts

    def run_facts(self) -> list[tuple[str, str]]:
        """What of the recipe and the model decides the plan."""
        planned, made = self.planned, made_for(self.planned.skeleton)
        recipe, plan = planned.recipe, planned.plan
        trained = sum(layout.num_trained for layout in planned.layouts)
        facts = [
            (
                "model",
                f"{recipe.model.path} ({made['model']}, {made['blocks']} blocks of {made['hidden_size']:,})",
            ),
            ("trained parameters", f"{trained:,}"),
            ("precision", f"{recipe.model.dtype}, host gradients {str(planned.gradient_dtype).partition('.')[2]}"),
            ("kernels", planned.kernels.kind),
            ("updates", recipe.optimizer.update),
            ("recompute", f"by {plan.recompute}"),
        ]
        if plan.keep_bytes_per_token:
            facts.append(("kept for the backward", f"{plan.keep_bytes_per_token:,} bytes a token and block"))
        if plan.resident:
            facts.append(("frozen weights that stay on workers", f"of {len(plan.resident)} layers"))
        facts += about_memory(planned)
        facts += [("chosen by the planner", choice) for choice in planned.choices]
        if plan.dispatch:
            facts.append(("slots of a step go to workers", " ".join(map(str, plan.dispatch))))
        facts.append(("plan", f"given: {recipe.engine.plan}" if planned.given is not None else "chosen"))
        return facts

    def playback(self) -> Playback:
        """A step of it, played."""
        usual = self.planned.usual_step()
        assert usual is not None
        return play_back(usual.plan, usual.shape, self.planned.rates)

    def as_json(self) -> str:
        """The plan file, and the rest of this report."""
        return self.planned.plan.to_json(
            **self.planned.about(self.prediction),
            memory_parts={key: kind.parts for key, kind in self.memory.items() if kind.parts},
            memory_limits={key: kind.limit for key, kind in self.memory.items()},
            short_of=self.planned.short_of,
            slots=[slot.as_dict() for slot in self.slots],
            changes=[asdict(change) for change in self.changes],
            machine=self.machine,
            recipe=self.planned.recipe.model_dump(mode="json"),
            versions=self.versions,
        )


def about_memory(planned: Planned) -> list[tuple[str, str]]:
    """What comes of too little memory for the usual way, by what it is about, for people."""
    found = [
        ("experts", planned.about_groups),
        ("host store", planned.about_disk),
        ("moments", planned.about_offload),
        ("saves", about_saves(planned)),
    ]
    return [(name, said) for name, said in found if said is not None]


def report_plan(planned: Planned, machine: Machine | None = None) -> PlanReport:
    """Works out everything. ``machine``: the description that was planned for, where it is not the one at hand.

    Changes are planned anew, each a search, and so is what memory costs: seconds for a large model.
    """
    prediction = full_prediction(planned)
    assert prediction is not None, "layers have times: measured ones, or those of a datasheet"
    tried = faster(planned) if planned.fits else smaller(planned)
    return PlanReport(
        planned,
        prediction,
        _slots(planned),
        _memory(planned),
        [_change(planned, each) for each in tried],
        _machine(planned, machine),
        versions(),
    )


def _slots(planned: Planned) -> list[SlotReport]:
    usual = planned.usual_step()
    assert usual is not None
    plan, shape, rates = usual.plan, usual.shape, planned.rates
    input_up, output_down = shape.boundary_bytes / rates.up, shape.boundary_bytes / rates.down
    count = plan.num_microbatches
    reports = []
    for number, (stage, work) in enumerate(
        zip(plan.forward + plan.backward, slot_works(plan, shape, rates), strict=True)
    ):
        layouts = [planned.layouts[layer] for layer in stage.layers]
        kept = [layout.frozen_bytes * (layout.layer in plan.resident) for layout in layouts]
        gradients = sum(layout.grad_elements for layout in layouts) * planned.gradient_dtype.itemsize
        kind = slot_kind(plan, number)
        seconds = {
            "compute": count * (work.compute + work.recompute),
            "weights up": work.upload,
            "activations up": count * max(input_up, work.kept_up),
            "activations down": count * (output_down + work.kept_down),
            "gradients down": work.gradients_down,
        }
        weights = sum(layout.region_bytes for layout in layouts) - sum(kept)
        reports.append(SlotReport(number, kind, stage, weights, gradients * (kind != "forward"), seconds))
    return reports


def _memory(planned: Planned) -> dict[str, MemoryReport]:
    disk = {"result": planned.bill.result}
    if planned.on_disk:
        disk["frozen weights"] = planned.bill.frozen_file
    if planned.moments_beside_output:
        disk["moments"] = planned.bill.moments_file
    if planned.num_checkpoints:
        disk[f"{planned.num_checkpoints} checkpoint(s)"] = planned.num_checkpoints * planned.checkpoint_bytes
    parts = {"vram_bytes": planned.bill.device_parts, "host_bytes": planned.host_parts, "disk_bytes": disk}
    limits = planned.limits
    return {
        key: MemoryReport(MEMORY_NAMES[key], takes, limits[key], dict(parts.get(key, {})))
        for key, takes in planned.memory.items()
    }


def _change(planned: Planned, tried: Tried) -> Change:
    gain = tried.tokens_per_second / tokens_per_second(planned) - 1
    return Change(tried.setting, tried.planned.needs, tried.planned.fits, gain)


def _machine(planned: Planned, machine: Machine | None) -> dict[str, Any]:
    target, rates = planned.target, planned.target.rates
    told: dict[str, Any] = {
        "name": target.name,
        "times": "measured" if planned.profile is not None else "from the datasheet",
        "workers": target.num_workers,
        "vram_bytes": target.vram_bytes,
        "ram_bytes": target.ram_bytes,
        "disk_bytes": target.disk_bytes,
        "link_up": rates.up,
        "link_down": rates.down,
        "workers_per_switch": rates.workers_per_switch,
        "links_at_once": 1 / rates.switch_share if rates.switch_share else None,
        "updates": rates.update,
        "turnover": target.turnover_rate,
    }
    if machine is not None:
        told["description"] = machine.model_dump(mode="json")
    if planned.profile is not None:
        told["measured"] = planned.profile.conditions["machine"]
    return told
