"""Exact steps on two GPUs that were measured, predicted from rates that were recorded on machines of that kind."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.docs import ROOT

from rpft.model.build import build_model
from rpft.model.cut import cut
from rpft.model.layers import build_layers
from rpft.model.layout import LayerLayout
from rpft.model.skeleton import Skeleton
from rpft.plan.bill import Workload
from rpft.plan.choose import choose_plan, model_shape, step_shape
from rpft.plan.costs import measured_costs
from rpft.plan.count import counting
from rpft.plan.machine import datasheet_profiles, read_machine
from rpft.plan.model_shapes import read_shape
from rpft.plan.rates import Rates
from rpft.plan.simulate import step_seconds

WORKERS, MICROBATCHES, MEASURED_TOKENS = 2, 3, 8 * 4096
BLOCK_AND_HEAD = {
    # seconds of a microbatch of MEASURED_TOKENS, docs/performance.md: forward, recompute and backward; head
    "qwen3-1.7b": (5.75e-3, 17.9e-3, 97.5e-3),
    "llama-3.1-8b": (24.0e-3, 67.1e-3, 158.0e-3),
}
CASES = [
    ("qwen3-1.7b", 24, 4096, "throughput_1.7b_sync_2x_h200"),
    ("llama-3.1-8b", 24, 4096, "throughput_sync_2x_h200"),
    ("llama-3.1-8b", 12, 1024, "throughput_sync_2x_h200"),
]
UPDATE_BYTES = 26
LINK, BOTH_LINKS = 55e9, 107e9


def recorded(name: str, case: str, metric: str) -> float:
    """A figure of benchmarks/results."""
    record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return next(r["value"] for r in record["results"] if case in r["case"] and r["metric"] == metric)


@cache
def built(model: str) -> tuple[Any, Skeleton, list[LayerLayout]]:
    config = read_shape(model)
    skeleton = cut(build_model(config, torch.bfloat16, "auto"))
    return config, skeleton, build_layers(skeleton, torch.bfloat16)


def predicted(model: str, rows: int, sequence: int, rates: Rates, *others: Rates) -> list[float]:
    """Tokens a second with layers as they were measured, under the plan for ``rates``; and by other rates."""
    config, skeleton, layouts = built(model)
    tokens = rows // MICROBATCHES * sequence
    work = Workload(model_shape(config, 2), tokens, MICROBATCHES, False, "compile", torch.bfloat16)
    work = counting(skeleton, layouts, work, sequence, torch.bfloat16)
    thought = datasheet_profiles(read_machine("2xh200"), layouts, skeleton, work, sequence)
    forward, backward, head = (seconds * tokens / MEASURED_TOKENS for seconds in BLOCK_AND_HEAD[model])
    block = replace(thought[1], forward_seconds=forward, backward_seconds=backward)
    last = replace(thought[-1], forward_seconds=head / 4, backward_seconds=head)
    profiles = [thought[0], *[block] * (len(thought) - 2), last]
    work = replace(work, profiles=profiles)
    plan = choose_plan(layouts, skeleton, work, WORKERS, MICROBATCHES, "layer", 22 << 30, 140 << 30, rates)
    shape = step_shape(layouts, work, measured_costs(profiles), WORKERS, 1)
    return [rows * sequence / step_seconds(plan, shape, each) for each in (rates, *others)]


@pytest.mark.parametrize(("model", "rows", "sequence", "record"), CASES)
def test_an_update_over_more_than_caches_hold_with_copies_beside_it_predicts_exact_steps_on_two_gpus(
    model: str, rows: int, sequence: int, record: str
) -> None:
    case = f"{model.replace('llama-3.1', 'llama')} full sync, 2 worker(s), {rows} x {sequence}"
    measured = recorded(record, case, "tokens a second, median step")
    update = recorded("optimizer_2x_h200", "one pass, 26 threads", "median") * 1e9  # over 100 M parameters
    links = {"workers_per_switch": WORKERS, "switch_share": LINK / BOTH_LINKS}
    # No record has the two beside one another: a copied byte takes the memory as long as a byte of the update.
    shared = Rates(LINK, LINK, update, memory=UPDATE_BYTES * update, **links)
    # As it was: measured over what caches hold in part, and 1.4 copied bytes for one of the update.
    before = Rates(LINK, LINK, 7.8e9, memory=1.4 * UPDATE_BYTES * 7.8e9, **links)
    now, then = predicted(model, rows, sequence, shared, before)
    assert now == pytest.approx(measured, rel=0.07)
    assert then > 1.08 * measured
