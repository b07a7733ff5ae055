"""Predicted against measured time of a step: models of random weights, in full and with LoRA, at several lengths.

    python benchmarks/predictions.py llama-45m,qwen3-80m [--lora 0,16] [--sequence 64,128] [--rows 4]
        [--microbatches 4] [--workers 1,2] [--update sync,delayed] [--windows 5] [--steps 2] [--json FILE]
    python benchmarks/predictions.py qwen3-1.7b,llama-3.1-8b --lora 0,32 --sequence 1024,4096 --rows 24
        --microbatches 3 --json FILE                        (on GPUs; --kernels compile is their default)

Layers, links and optimizer are measured and the run is planned as `rpft train` does it; then the same process
times it as `rpft bench` does. A prediction is of the long run: the first step of a window, which fills the
pipeline, is not counted. The load of the machine is noted before each case.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from random_job import PRESETS, Step, gpu_names
from record import machine, write_record
from throughput import Model, add_engine_arguments, numbers

from rpft.train.bench import WINDOWS, Measured, measure


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", type=lambda text: text.split(","), help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--lora", type=numbers, default=[0, 16], help="ranks; 0 trains every weight")
    add_engine_arguments(parser)
    parser.add_argument("--sequence", type=numbers, default=[64, 128])
    parser.add_argument("--rows", type=int, default=4, help="of a step")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step, all in one round")
    parser.add_argument("--update", type=lambda text: text.split(","), default=["sync"])
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--steps", type=int, default=2, help="of a window, beside its first")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(kernels="compile" if torch.cuda.is_available() else "eager")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.presets) - set(PRESETS))
    if unknown:
        sys.exit(f"no preset {', '.join(unknown)}; there are {', '.join(PRESETS)}")
    return arguments


def figures(case: str, found: Measured, load: float) -> list[dict[str, Any]]:
    """The figures of a case for the record."""
    values = [
        ("seconds a step, measured", found.step_seconds, "s"),
        ("tokens a second, measured", found.steady_tokens_per_second, "tok/s"),
        ("tokens a second, slowest window", min(found.steady), "tok/s"),
        ("tokens a second, fastest window", max(found.steady), "tok/s"),
        ("tokens a second, predicted", found.predicted_tokens_per_second, "tok/s"),
        ("predicted over measured, tokens a second", 100 * found.error, "%"),
        ("workers idle, measured", 100 * found.bubble, "%"),
        ("workers idle, predicted", 100 * found.predicted_bubble, "%"),
        ("allocation retries", found.allocation_retries, "times"),
        ("load average before", load, "processes"),
    ]
    return [{"case": case, "metric": name, "value": round(value, 3), "unit": unit} for name, value, unit in values]


def main() -> int:
    arguments = parse()
    results, names, errors = [], [], []
    print("| run | measured, tok/s | windows | predicted | error | idle | predicted | load |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for preset, lora in product(arguments.presets, arguments.lora):
        more = {"preset": preset, "lora": lora, "targets": "all-linear", "quantize": "none"}
        own = argparse.Namespace(**{**vars(arguments), **more})
        steps = [Step(arguments.rows, sequence, arguments.microbatches, 0) for sequence in arguments.sequence]
        model = Model(own, steps[0], quiet=True)
        updates = sorted(set(arguments.update), reverse=True)  # sync first: a delayed one changes the store
        for update, step, workers in product(updates, steps, arguments.workers):
            load = os.getloadavg()[0]
            prepared = model.prepare(step, update, workers, 0, measured=True)
            found = measure(prepared, model.store_for(prepared), arguments.steps, arguments.windows)
            names = names or gpu_names(prepared.devices)
            kind = f"LoRA r{lora}" if lora else "full"
            case = f"{preset} {kind}, {update}, {found.workers} worker(s), {step.rows} x {step.sequence}"
            errors.append(found.error)
            print(
                f"| {case} | {found.steady_tokens_per_second:,.0f} | {min(found.steady):,.0f} to"
                f" {max(found.steady):,.0f} | {found.predicted_tokens_per_second:,.0f} | {found.error:+.1%} |"
                f" {found.bubble:.1%} | {found.predicted_bubble:.1%} | {load:.1f} |",
                flush=True,
            )
            results += figures(case, found, load)
            if arguments.json is not None:
                write_record(arguments.json, "predictions", machine(names), results)
            del prepared
        del model
        gc.collect()
        torch.cuda.empty_cache()
    print(f"largest error {max(map(abs, errors)):.1%} of {len(errors)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
