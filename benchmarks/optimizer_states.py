"""What the formats of the optimizer's moments change: loss, RAM, and the rate of updates.

    python benchmarks/optimizer_states.py [--steps 300] [--rows 2] [--length 64] [--json FILE]

SmolLM2-135M-Instruct, every weight trained in bfloat16 on the quickstart's rows (`make quickstart` gets both), all
tokens of them: a plain loop of transformers' model, whose weights and gradients are views of what the one pass
updates, masters in two halves, as a run does. One model for each format of `optimizer.state`, step by step in
turn, with the same rows. A step is a few short rows, so that single losses say little: compared are means over all
steps and over the last fifty, and the loss of rows that were held out. Updates are timed alone, on one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, get_args

import torch
from record import ROOT, machine, write_record
from transformers import AutoModelForCausalLM, AutoTokenizer

from rpft.model.moments import BLOCK, StateFormat, moments_bytes, moments_in
from rpft.optim.kernels import Weights
from rpft.optim.one_pass import CompiledPass
from rpft.optim.schedule import Schedule
from rpft.train.beside import measured_rate

MODEL, ROWS = ROOT / "models/SmolLM2-135M-Instruct", ROOT / "out/quickstart-data"
LEARNING_RATE, HELD_OUT_BATCHES, LAST = 5e-5, 8, 50

Result = dict[str, Any]


class Training:
    """Weights of ``model`` in memory of their own, flat, with what updates them."""

    def __init__(self, model: torch.nn.Module, state: StateFormat, gradient: torch.Tensor) -> None:
        self.parameters = list(model.parameters())
        self.gradient = gradient
        self.working = torch.cat([p.detach().flatten() for p in self.parameters])
        self.remainder = torch.zeros(len(self.working), dtype=torch.int16)
        size = moments_bytes(state, len(self.working))
        self.moments = moments_in(torch.zeros(size, dtype=torch.uint8), state, len(self.working))
        self.kernels = CompiledPass(state)
        self.kernels.num_threads = 1

    def put_into_model(self) -> None:
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            parameter.data = self.working[start:stop].view_as(parameter)
            parameter.grad = self.gradient[start:stop].view_as(parameter)
            start = stop

    def update(self, step: int, learning_rate: float) -> None:
        norm = math.sqrt(self.kernels.square_sum([self.gradient]))
        self.kernels.adamw_pass(
            [self.gradient],
            Weights(self.working, self.working, self.remainder),
            self.moments,
            learning_rate=learning_rate,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.0,
            updates_before=step - 1,
            gradient_divisor=max(1.0, norm),
            rounding_key=step,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=2, help="rows of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    gradient = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.bfloat16)
    trainings = {state: Training(model, state, gradient) for state in get_args(StateFormat)}
    batches, held_out = (batches_of(name, arguments.rows, arguments.length) for name in ("train", "eval"))
    schedule = Schedule("cosine", LEARNING_RATE, arguments.steps, warmup_ratio=0.03)
    losses: dict[StateFormat, list[float]] = {state: [] for state in trainings}
    for step in range(1, arguments.steps + 1):
        for state, training in trainings.items():
            training.put_into_model()
            gradient.zero_()
            batch = batches[(step - 1) % len(batches)]
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            training.update(step, schedule(step))
            losses[state].append(float(loss.detach()))
        if step % 10 == 0:
            print(step, {state: round(steps[-1], 4) for state, steps in losses.items()}, flush=True)
    held = {state: evaluate(model, training, held_out) for state, training in trainings.items()}
    results = [result for state in losses for result in [*of_run(state, losses, held), *of_pass(state)]]
    for result in results:
        print(f"{result['case']:5} {result['metric']:42} {result['value']:9.5g} {result['unit']}")
    if arguments.json is not None:
        write_record(arguments.json, "optimizer_states", machine(["CPU"]), results)
    return 0


def batches_of(name: str, rows: int, length: int) -> list[torch.Tensor]:
    """The rows of a file as one text, cut into batches of token ids [rows, length], in order."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lines = (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ids: list[int] = []
    for line in lines:
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        ids += tokenizer(text)["input_ids"]
    count = len(ids) // (rows * length)
    return list(torch.tensor(ids[: count * rows * length]).view(count, rows, length))


@torch.no_grad()
def evaluate(model: torch.nn.Module, training: Training, batches: list[torch.Tensor]) -> float:
    """The mean loss of the first batches that were held out."""
    training.put_into_model()
    found = [model(input_ids=b, labels=b, use_cache=False).loss for b in batches[:HELD_OUT_BATCHES]]
    return statistics.mean(float(loss) for loss in found)


def of_run(
    state: StateFormat, losses: dict[StateFormat, list[float]], held: dict[StateFormat, float]
) -> list[Result]:
    """What the run of ``state`` came to, and how far that is from float32 moments."""
    steps, exact = losses[state], losses["fp32"]
    values = {
        "mean loss": (statistics.mean(steps), statistics.mean(exact)),
        f"mean loss of the last {LAST} steps": (statistics.mean(steps[-LAST:]), statistics.mean(exact[-LAST:])),
        "held-out loss": (held[state], held["fp32"]),
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
