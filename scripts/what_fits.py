"""The tables of docs/hardware.md, by the planner: what fits in which card and RAM, and how fast it should be.

python scripts/what_fits.py --write docs/hardware.md

No GPU, no weights: the shapes of models (rpft/plan/models), descriptions of machines (rpft/plan/machines), the
memory bill and the simulator. Takes some minutes.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rpft import __version__
from rpft.model.adapters import LoraSettings, inject_lora
from rpft.model.build import build_model
from rpft.model.cut import cut
from rpft.model.layers import build_layers
from rpft.model.layout import LayerLayout
from rpft.model.quant_choice import quantize_base
from rpft.model.skeleton import Skeleton
from rpft.plan.bill import Workload, make_bill
from rpft.plan.choose import choose_plan, model_shape, step_shape
from rpft.plan.costs import measured_costs
from rpft.plan.count import counting
from rpft.plan.machine import datasheet_profiles, read_machine
from rpft.plan.model_shapes import read_shape
from rpft.plan.simulate import step_seconds

MODELS = (
    *("qwen3-1.7b", "llama-3.1-8b", "qwen3-14b", "qwen3-32b", "llama-3.1-70b"),
    *("qwen3-30b-a3b", "qwen3-235b-a22b"),
)
METHODS = ("full", "LoRA", "LoRA, nf4")
CARDS_GIB = (24, 48)
RAM_GIB = (64, 128, 256, 512)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
"""What gets an adapter in mixtures of experts: one on every expert would be a model of its own."""

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
MACHINES = ("1x4060ti", "2x5090", "4x3090", "8x4090")
MICROBATCHES = 8
"""Of a step of the first tables, one row each, in one round."""

SPEED_ROWS, SPEED_LENGTH, SPEED_MICROBATCHES = 4, 2048, 16
LEFT_OF_VRAM = 0.94
"""As of a described machine: context and libraries take the rest."""

LEFT_OF_RAM = 0.95
"""The system takes the rest."""


@dataclass(frozen=True)
class Job:
    """A model and how it is trained; ``parameters`` without those of the adapter."""

    layouts: list[LayerLayout]
    skeleton: Skeleton
    work: Workload
    parameters: int


def make_job(model: str, method: str, rows: int, length: int, microbatches: int) -> Job:
    """bfloat16, compiled layers, exact updates, a step of one round; LoRA of rank 16."""
    config = read_shape(model)
    skeleton = cut(build_model(config, torch.bfloat16, "auto"))
    parameters = sum(parameter.numel() for parameter in skeleton.model.parameters())
    if method != "full":
        targets = ATTENTION if hasattr(config, "num_experts") else "all-linear"
        inject_lora(skeleton, LoraSettings(16, 32, 0.0, targets), model)
    if method == "LoRA, nf4":
        quantize_base(skeleton, "nf4", torch.bfloat16)
    shape = model_shape(config, 2)
    layouts = build_layers(skeleton, torch.bfloat16)
    work = Workload(shape, rows * length, microbatches, False, "compile", torch.bfloat16)
    return Job(layouts, skeleton, counting(skeleton, layouts, work, length, torch.bfloat16), parameters)


def needed_bytes(job: Job, length: int, vram: int, ram: int) -> tuple[int, int]:
    """(RAM, memory of a card) of the plan that is chosen under these limits for rows of ``length``."""
    work = counting(job.skeleton, job.layouts, replace(job.work, max_tokens=length), length, torch.bfloat16)
    plan = choose_plan(job.layouts, job.skeleton, work, 1, MICROBATCHES, "auto", vram, ram)
    bill = make_bill(plan, job.layouts, work)
    return bill.host, bill.device


def longest_row(job: Job, card_gib: int, ram_gib: int) -> str:
    """The longest of LENGTHS that fits; a dash where none does."""
    vram, ram = int(card_gib * LEFT_OF_VRAM * 2**30), int(ram_gib * LEFT_OF_RAM * 2**30)
    for length in reversed(LENGTHS):
        host, device = needed_bytes(job, length, vram, ram)
        if host <= ram and device <= vram:
            return f"{length // 1024}k"
    return "-"


def fits_table(models: Iterable[str]) -> str:
    """A row a model and method: RAM for rows of 4,096 tokens, and the longest row in each card and RAM."""
    titles = [f"{card} / {ram}" for card in CARDS_GIB for ram in RAM_GIB]
    lines = [
        f"| model | trained | RAM for 4k rows | {' | '.join(titles)} |",
        "|---|---|---|" + "---|" * len(CARDS_GIB) * len(RAM_GIB),
    ]
    for model in models:
        for method in METHODS:
            job = make_job(model, method, 1, 4096, MICROBATCHES)
            host, _ = needed_bytes(job, 4096, int(24 * LEFT_OF_VRAM * 2**30), 1 << 60)
            cells = [longest_row(job, card, ram) for card in CARDS_GIB for ram in RAM_GIB]
            size = f"{model} ({job.parameters / 1e9:.1f} B)" if method == "full" else ""
            lines.append(f"| {size} | {method} | {host / 2**30:,.0f} GiB | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def speed(model: str, method: str, machine_name: str) -> str:
    """Predicted tokens a second, a bound from above; what there is too little of, where it does not fit."""
    machine = read_machine(machine_name)
    job = make_job(model, method, SPEED_ROWS, SPEED_LENGTH, SPEED_MICROBATCHES)
    profiles = datasheet_profiles(machine, job.layouts, job.skeleton, job.work, SPEED_LENGTH)
    work = replace(job.work, profiles=profiles)
    plan = choose_plan(
        job.layouts,
        job.skeleton,
        work,
        machine.num_workers,
        SPEED_MICROBATCHES,
        "auto",
        machine.vram_bytes,
        machine.ram_bytes,
        machine.rates,
    )
    bill = make_bill(plan, job.layouts, work)
    if bill.host > machine.ram_bytes:
        return "RAM"
    if bill.device > machine.vram_bytes:
        return "VRAM"
    costs = measured_costs(profiles, plan.keep_bytes_per_token)
    shape = step_shape(job.layouts, work, costs, machine.num_workers, 1)
    tokens = work.max_tokens * work.accumulation
    return f"{tokens / step_seconds(plan, shape, machine.rates):,.0f}"


def speed_table(models: Iterable[str]) -> str:
    """A row a model and method, a column a machine."""
    lines = [
        f"| model | trained | {' | '.join(MACHINES)} |",
        "|---|---|" + "---|" * len(MACHINES),
    ]
    for model in models:
        for method in METHODS[:2]:
            cells = [speed(model, method, machine) for machine in MACHINES]
            lines.append(f"| {model} | {method} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def tables(models: Iterable[str]) -> dict[str, str]:
    """Name to text of everything that the page holds between marks."""
    day = datetime.datetime.now(datetime.timezone.utc).date()
    made = f"Made on {day} with rpft {__version__} by `python scripts/what_fits.py --write docs/hardware.md`."
    return {"fits": fits_table(models), "speed": speed_table(models), "made": made}


def put(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the marks of that name."""
    mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    assert mark.search(page), f"the page has no <!-- {name} --> ... <!-- end -->"
    return mark.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page, between marks")
    parser.add_argument("--models", default=",".join(MODELS), help="names in rpft/plan/models, with commas")
    options = parser.parse_args()
    found = tables(options.models.split(","))
    if options.write is None:
        print("\n\n".join(found.values()))
        return
    page = options.write.read_text(encoding="utf-8")
    for name, text in found.items():
        page = put(page, name, text)
    options.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
