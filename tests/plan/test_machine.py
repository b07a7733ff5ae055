"""Machines that one need not have: their files, and plans for them."""

from dataclasses import replace

import pytest
import torch
import transformers

from rpft.errors import UserError
from rpft.model.build import build_model
from rpft.model.cut import cut
from rpft.model.layers import build_layers
from rpft.plan.bill import Workload, make_bill
from rpft.plan.choose import choose_plan, model_shape, step_shape
from rpft.plan.costs import measured_costs
from rpft.plan.count import counting
from rpft.plan.machine import datasheet_profiles, machine_names, read_machine
from rpft.plan.simulate import step_seconds

GOOD = """
gpus:
  - {name: A, count: 2, tflops: 100, memory_gib: 24, link_gbps: 25}
  - {name: B, count: 1, tflops: 40.5, memory_gib: 16, link_gbps: 12}
shared_link: {gpus: 2, gbps: 30}
host: {ram_gib: 64, memory_gbps: 80, cores: 8}
"""


@pytest.mark.parametrize("name", machine_names())
def test_every_shipped_machine_is_what_its_name_says(name):
    machine = read_machine(name)
    assert machine.num_workers == int(name.partition("x")[0])
    assert machine.gpus[0].name.replace(" ", "").lower().endswith(name.partition("x")[2])
    assert machine.speeds is None
    assert machine.rates.update > 0


def test_the_machines_that_were_promised_are_shipped():
    assert machine_names() == ["1x4060ti", "2x5090", "2xh200", "4x3090", "8x4090", "8xa800"]


def test_mixed_cards_are_as_fast_as_they_are_and_limited_by_the_smallest(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    machine = read_machine(str(path))
    assert machine.speeds == [1.0, 1.0, 0.405]
    assert 14 * 2**30 < machine.vram_bytes < 16 * 2**30
    assert (machine.rates.up, machine.rates.workers_per_switch, machine.rates.switch_share) == (12e9, 1, 0.0)


def test_links_that_meet_in_a_switch_wait_for_it():
    rates = read_machine("8x4090").rates
    assert (rates.up, rates.workers_per_switch) == (25e9, 4)
    assert rates.switch_share == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("gpus: [", "not a machine file"),
        ("3", "the file: "),
        ("gpus: []", "gpus: .*at least 1 item.*; host: field required"),
        (GOOD.replace("tflops: 100", "tflops: fast"), r"gpus\.0\.tflops: "),
        (GOOD.replace("tflops: 40.5", "tflops: 0"), r"gpus\.1\.tflops: .*greater than 0"),
        (GOOD.replace("cores: 8", "cores: 8, cpus: 2"), r"host\.cpus: extra inputs are not permitted"),
        ("", "the file is empty"),
        (GOOD.replace("count: 1,", "count: 1, count: 2,"), "count"),
        (GOOD.replace("count: 1", "count: 10000"), r"gpus\.1\.count: .*1024, and is 10000 \(line 4\)"),
        (GOOD.replace("ram_gib: 64", "ram_gib: 1e300"), r"host\.ram_gib: .*less than or equal.*\(line 6\)"),
        (GOOD.replace("ram_gib: 64", "ram_gib: 64GiB"), r"host\.ram_gib: .*valid number, and is '64GiB'"),
        (GOOD.replace("{gpus: 2, gbps: 30}", "30"), r"shared_link: should be a mapping of keys \(line 5\)"),
        (GOOD.replace("cores: 8", "cores: 8, cpus: 2"), r"host\.cpus: .*there are ram_gib, memory_gbps, cores"),
        (GOOD.replace("gbps: 30", "gbs: 30"), r"shared_link\.gbps: field required"),
    ],
)
def test_a_faulty_machine_file_is_named_with_the_key(content, says, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=says) as caught:
        read_machine(str(path))
    assert str(path) in str(caught.value)


def test_one_slip_in_a_machine_file_is_one_fault(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace("tflops: 100", "tflops: fast"))
    with pytest.raises(UserError) as caught:
        read_machine(str(path))
    assert ";" not in str(caught.value)


def test_an_unknown_machine_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(UserError, match="did you mean `8x4090`"):
        read_machine("8x4080")
    with pytest.raises(UserError, match="there are 1x4060ti"):
        read_machine("dgx")
    with pytest.raises(UserError, match="no such machine file"):
        read_machine(str(tmp_path / "none.yaml"))


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    skeleton = cut(build_model(config, torch.bfloat16, "auto"))
    return config, skeleton, build_layers(skeleton, torch.bfloat16)


def predicted(model, name, rows, sequence, microbatches):
    """(plan, bill, tokens a second) for Llama-3.1-8B in full on a shipped machine."""
    config, skeleton, layouts = model
    machine = read_machine(name)
    work = Workload(model_shape(config, 2), rows * sequence, microbatches, False, "compile", torch.bfloat16)
    work = replace(work, profiles=datasheet_profiles(machine, layouts, skeleton, work, sequence))
    work = counting(skeleton, layouts, work, sequence, torch.bfloat16)
    assert work.profiles is not None
    workers, limit = machine.num_workers, machine.vram_bytes
    plan = choose_plan(layouts, skeleton, work, workers, microbatches, "layer", limit, None, machine.rates)
    plan.check(len(layouts))
    shape = step_shape(layouts, work, measured_costs(work.profiles), workers, 1)
    seconds = step_seconds(plan, shape, machine.rates)
    return plan, make_bill(plan, layouts, work), microbatches * rows * sequence / seconds


def test_layers_of_a_datasheet_take_what_was_measured_on_that_card(model):
    config, skeleton, layouts = model
    work = Workload(model_shape(config, 2), 8 * 4096, 3, False, "compile", torch.bfloat16)
    embedding, block, *_, head = datasheet_profiles(read_machine("2xh200"), layouts, skeleton, work, 4096)
    # docs/performance.md: 22.72 ms, 67.47 ms, 160.6 ms
    assert block.forward_seconds == pytest.approx(22.72e-3, rel=0.1)
    assert block.backward_seconds == pytest.approx(67.47e-3, rel=0.1)
    assert head.backward_seconds == pytest.approx(160.6e-3, rel=0.1)
    assert embedding.forward_seconds == 0


def test_a_plan_for_a_shipped_machine_fits_it_and_more_cards_are_faster(model):
    one = predicted(model, "1x4060ti", 1, 2048, 8)
    eight = predicted(model, "8x4090", 4, 2048, 16)
    for name, (_, bill, _) in (("1x4060ti", one), ("8x4090", eight)):
        assert bill.device <= read_machine(name).vram_bytes
    assert eight[2] > 8 * one[2]
    # No more than the products of 8 cards allow: 6 a parameter and 2 for the recompute.
    assert eight[2] < 8 * 165e12 / (8 * 7.5e9)
