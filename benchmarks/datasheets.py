"""Tokens a second that datasheets let expect of 8 RTX 4090, against the table that was published with RoundPipe.

    python benchmarks/datasheets.py [--update sync,delayed]

Published (arXiv 2604.27085): sequence 2,048, products summed in float16. A hidden state takes 21 GB/s times the
published time of a hop if a microbatch is 4 rows, in all five models. Kernels are eager, as they are there. Needs
no GPU and no weights; takes some minutes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from rpft.model.adapters import LoraSettings, inject_lora
from rpft.model.build import build_model
from rpft.model.cut import cut
from rpft.model.layers import build_layers
from rpft.plan.bill import Workload
from rpft.plan.choose import choose_plan, model_shape, step_shape
from rpft.plan.costs import measured_costs
from rpft.plan.count import counting
from rpft.plan.machine import datasheet_profiles, read_machine
from rpft.plan.model_shapes import read_shape
from rpft.plan.simulate import step_seconds

ROWS, SEQUENCE, MICROBATCHES, IN_ROUND = 4, 2048, 16, 16
PUBLISHED = {
    # model shape, whether an adapter is trained: tokens a second as published
    ("qwen3-1.7b", False): {"sync": 56489, "delayed": 65417},
    ("llama-3.1-8b", False): {"sync": 18888, "delayed": 24275},
    ("gpt-oss-20b", False): {"sync": 12549, "delayed": 18122},
    ("qwen3-32b", False): {"sync": 4164, "delayed": 5516},
    ("qwen3-235b-a22b", True): {"sync": 1592, "delayed": 1820},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=lambda text: text.split(","), default=["sync", "delayed"])
    updates = parser.parse_args().update
    machine = read_machine("8x4090")
    in_float16 = machine.gpus[0].model_copy(update={"tflops": 330.0})
    machine = machine.model_copy(update={"gpus": (in_float16,)})
    for (name, adapted), published in PUBLISHED.items():
        config = read_shape(name)
        skeleton = cut(build_model(config, torch.bfloat16, "auto"))
        if adapted:
            inject_lora(skeleton, LoraSettings(32, 64, 0.0, ["q_proj", "k_proj", "v_proj", "o_proj"]), name)
        layouts = build_layers(skeleton, torch.bfloat16)
        for update in updates:
            delayed = update == "delayed"
            shape = model_shape(config, 2)
            work = Workload(shape, ROWS * SEQUENCE, MICROBATCHES, delayed, "eager", torch.bfloat16)
            profiles = datasheet_profiles(machine, layouts, skeleton, work, SEQUENCE)
            work = counting(skeleton, layouts, replace(work, profiles=profiles), SEQUENCE, torch.bfloat16)
            plan = choose_plan(
                layouts, skeleton, work, 8, IN_ROUND, "layer", machine.vram_bytes, None, machine.rates
            )
            costs = measured_costs(profiles, plan.keep_bytes_per_token, plan.recompute)
            shape = step_shape(layouts, work, costs, 8, MICROBATCHES // IN_ROUND)
            rate = MICROBATCHES * ROWS * SEQUENCE / step_seconds(plan, shape, machine.rates)
            forward, backward = (1e3 * t for t in (profiles[1].forward_seconds, profiles[1].backward_seconds))
            print(
                f"| {name} | {update} | {published[update]:,} | {rate:,.0f} |"
                f" {100 * (rate / published[update] - 1):+.0f}% | block {forward:.1f} and {backward:.1f} ms |",
                flush=True,
            )


if __name__ == "__main__":
    main()
