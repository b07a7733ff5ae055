"""What the formats of the optimizer's moments change: loss, RAM, and the rate of updates.

    python benchmarks/optimizer_states.py [--steps 300] [--rows 2] [--length 64] [--json FILE]

SmolLM2-135M-Instruct, every weight trained in bfloat16 on the quickstart's rows (`make quickstart` gets both), by
`rpft train`: one run for each format of `optimizer.state`, same seed, same rows, one worker on one thread. The loss
of a step is that of a few short rows, so that single steps say little: compared are the mean over all steps, over
the last fifty, and the evaluation loss at the end. The rate of updates is of the one pass alone, on one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

from record import ROOT, machine, write_record

from rpft.model.moments import BLOCK, StateFormat, moments_bytes
from rpft.optim.one_pass import CompiledPass, measured_rate

_LAST = 50
_SETTINGS = {
    "adapter": "null",
    "data.truncation": "right",
    "train.learning_rate": 5e-5,
    "train.gradient_accumulation_steps": 1,
    "train.warmup_ratio": 0.03,
    "engine.num_microbatches": "null",
    "engine.workers": 1,
    "engine.cpu_threads": 1,
}
"""Beside those of recipes/quickstart.yaml."""

Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=2, help="rows of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens to which rows are cut")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {state: losses(state, arguments) for state in get_args(StateFormat)}
    results = [result for state in found for result in [*of_run(state, found), *of_pass(state)]]
    for result in results:
        print(f"{result['case']:5} {result['metric']:40} {result['value']:9.5g} {result['unit']}")
    if arguments.json is not None:
        write_record(arguments.json, "optimizer_states", machine(["CPU"]), results)
    return 0


def losses(state: StateFormat, arguments: argparse.Namespace) -> tuple[list[float], float]:
    """(loss of each step, evaluation loss at the end) of a run."""
    with tempfile.TemporaryDirectory() as folder:
        settings = _SETTINGS | {
            "train.max_steps": arguments.steps,
            "train.micro_batch_size": arguments.rows,
            "data.max_seq_len": arguments.length,
            "optimizer.state": state,
            "output_dir": folder,
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "rpft", "train", "recipes/quickstart.yaml", *words]
        print(f"{state}: {' '.join(command[2:])}", flush=True)
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [line["loss"] for line in lines if "loss" in line]
    assert len(steps) == arguments.steps, len(steps)
    return steps, [line["eval_loss"] for line in lines if "eval_loss" in line][-1]


def of_run(state: StateFormat, found: dict[StateFormat, tuple[list[float], float]]) -> list[Result]:
    """What the run of ``state`` came to, and how far that is from float32 moments."""
    (steps, evaluation), (exact, exact_evaluation) = found[state], found["fp32"]
    values = {
        "mean loss": (statistics.mean(steps), statistics.mean(exact)),
        f"mean loss of the last {_LAST} steps": (statistics.mean(steps[-_LAST:]), statistics.mean(exact[-_LAST:])),
        "evaluation loss at the end": (evaluation, exact_evaluation),
    }
    results = []
    for metric, (value, reference) in values.items():
        results.append(_result(state, metric, value))
        results.append(_result(state, f"{metric}, less fp32's", value - reference))
    apart = statistics.mean(abs(a - b) for a, b in zip(steps, exact, strict=True))
    return [*results, _result(state, "mean distance of a step's loss", apart)]


def of_pass(state: StateFormat) -> list[Result]:
    """RAM of a parameter's moments, and how fast one thread updates."""
    kernels = CompiledPass(state)
    kernels.num_threads = 1
    size, rate = moments_bytes(state, BLOCK) / BLOCK, measured_rate(kernels)
    return [_result(state, "moments", size, "B/param"), _result(state, "updates", rate / 1e9, "G params/s")]


def _result(state: str, metric: str, value: float, unit: str = "") -> Result:
    return {"case": state, "metric": metric, "value": round(value, 5), "unit": unit}


if __name__ == "__main__":
    sys.exit(main())
