"""The first steps' times: what they say of layers, links and workers, and the change of the plan in mid-run."""

import json
from dataclasses import replace

import pytest

import rpft.train.refine as refine
from rpft.engine.trace import PART, TASK, Span, Trace
from rpft.plan.plan import Plan, Stage, read_plan
from rpft.plan.profile import LayerProfile
from rpft.plan.rates import Rates
from rpft.plan.simulate import update_seconds
from rpft.recipe.load import load_recipe
from rpft.train.job import read_job
from rpft.train.kernels import KernelChoice
from rpft.train.planning import plan_job
from rpft.train.refine import FirstSteps, as_measured, replanned
from rpft.train.target import Target

RATES = Rates(1e9, 1e9, 5e6)
TARGET = Target("a test", 2, None, 64 << 30, None, RATES)
PROFILES = [LayerProfile(x, 3 * x, 0, 0) for x in (1e-5, 1e-3, 1e-3, 1e-3, 1e-3, 2e-3)]


@pytest.fixture(scope="module")
def made(project):
    return project("refine", "llama", eval_rows=0)


@pytest.fixture(scope="module")
def planned(made):
    job = read_job(load_recipe(made.recipe), KernelChoice("eager"))
    return plan_job(job, TARGET, PROFILES)


def traced(planned, forward=1.0, backward=1.0, head=1.0, slow_worker=1.0, updates=0.0):
    """A trace of a step in which layers took so many times what was thought."""
    share = planned.mean_step()[0] / planned.max_tokens
    plan, profiles = planned.plan, planned.profiles
    spans = []
    slots = [("forward", s) for s in plan.forward] + [("fused", plan.fused)]
    slots += [("backward", s) for s in plan.backward[1:]]
    for number, (kind, stage) in enumerate(2 * slots):
        worker = number % 2
        seconds = 0.0
        for layer in stage.layers:
            of_head = layer == plan.fused.last
            if kind == "forward":
                seconds += forward * profiles[layer].forward_seconds
            else:
                seconds += (head if of_head else backward) * profiles[layer].backward_seconds
        seconds *= share * (slow_worker if worker else 1.0)
        for m in range(plan.num_microbatches):
            what = f"slot {number} ({kind} stage {stage}) microbatch {m}"
            spans += [Span(f"cpu:{worker}", "compute", TASK, what, i, i + seconds / 2, 0.0) for i in range(2)]
        up = f"slot {number} ({kind} stage {stage}) weights"
        spans.append(Span(f"cpu:{worker}", "weights up", TASK, up, 0.0, 0.5, 0.0, 10**9))
    if updates:
        spans.append(Span("host", "optimizer", PART, "the update of step 3: update of layer 1", 0.0, updates, 0.0))
    rows = [(f"cpu:{w}", stream) for w in range(2) for stream in ("compute", "weights up")]
    return Trace([*rows, ("host", "optimizer")], spans, 0.0, 10.0)


def test_forward_backward_and_head_take_what_the_trace_says(planned):
    assert len(planned.plan.backward) > 1
    found = as_measured(planned, traced(planned, forward=2.0, backward=3.0, head=0.5))
    assert found is not None
    for layer, (before, now) in enumerate(zip(PROFILES, found.profiles, strict=True)):
        last = layer == len(PROFILES) - 1
        assert now.forward_seconds == pytest.approx((0.5 if last else 2.0) * before.forward_seconds)
        assert now.backward_seconds == pytest.approx((0.5 if last else 3.0) * before.backward_seconds)
    assert found.plan == planned.plan
    assert found.target.speeds is None
    assert found.target.rates.up == pytest.approx(2e9)
    assert found.target.rates.down == RATES.down  # nothing came down in the trace


def test_the_same_times_leave_the_prediction_as_it_was(planned):
    found = as_measured(planned, traced(planned))
    assert found is not None
    same = replace(found, target=TARGET)
    assert same.full_step_seconds == pytest.approx(planned.full_step_seconds)


def test_workers_that_differ_get_speeds_and_alike_ones_none(planned):
    found = as_measured(planned, traced(planned, slow_worker=2.0))
    assert found is not None
    fast, slow = found.target.speeds
    assert fast == pytest.approx(2 * slow, rel=0.2)


def test_the_optimizer_gets_its_rate_where_enough_was_updated(planned, monkeypatch):
    trained = planned.layouts[1].num_trained
    little = as_measured(planned, traced(planned, updates=1.0))
    monkeypatch.setattr(refine, "_ENOUGH_PARAMETERS", 1)
    enough = as_measured(planned, traced(planned, updates=2.0))
    assert little is not None
    assert enough is not None
    assert (little.target.rates.update, enough.target.rates.update) == (RATES.update, trained / 2.0)


def test_copies_beside_the_update_are_not_counted_twice(planned, monkeypatch):
    monkeypatch.setattr(refine, "_ENOUGH_PARAMETERS", 1)
    usual, trained = planned.usual_step(), planned.layouts[1].num_trained
    rates = replace(RATES, memory=2e7)
    shared = replace(planned, target=replace(TARGET, rates=rates))
    took = update_seconds(usual.plan, usual.shape, rates)
    assert took > 1.1 * update_seconds(usual.plan, usual.shape, RATES)
    of_one_layer = took * trained / sum(layout.num_trained for layout in planned.layouts)
    found = as_measured(shared, traced(shared, updates=of_one_layer))
    assert found is not None
    assert found.target.rates.update == pytest.approx(RATES.update)
    faster = as_measured(shared, traced(shared, updates=1e-3 * of_one_layer))
    assert faster is not None
    assert faster.target.rates.update == pytest.approx(trained / (1e-3 * of_one_layer)), "no faster than it was"


def test_a_trace_without_some_kind_of_slot_says_nothing(planned):
    whole = traced(planned)
    assert as_measured(planned, replace(whole, spans=[s for s in whole.spans if "fused" not in s.what])) is None


def test_a_plan_from_wrong_times_is_replaced_by_that_of_the_true_ones(planned):
    wrong = [replace(p, forward_seconds=p.forward_seconds, backward_seconds=p.backward_seconds) for p in PROFILES]
    wrong[-1] = LayerProfile(2e-2, 6e-2, 0, 0)  # ten times the truth
    misled = plan_job(planned, TARGET, wrong)
    measured = as_measured(misled, traced(misled, head=0.1))
    assert measured is not None
    found = replanned(measured)
    assert found.full_step_seconds < 0.97 * measured.full_step_seconds
    assert found.num_microbatches == misled.num_microbatches
    best = plan_job(planned, found.target, PROFILES).full_step_seconds
    assert found.full_step_seconds == pytest.approx(best, rel=0.02)


def test_where_nothing_was_known_the_trace_gives_times_in_the_proportions_of_the_shapes(made):
    job = read_job(load_recipe(made.recipe), KernelChoice("eager"))
    blind = plan_job(job, TARGET, None)
    thought = replace(blind, profiles=refine._from_shapes(blind))
    found = as_measured(blind, traced(thought, forward=1e-9, backward=1e-9, head=1e-9))
    assert found is not None
    assert found.full_step_seconds > 0


def test_compiled_layers_keep_the_graphs_that_they_run_as(planned):
    stages = (Stage(0, 0), Stage(1, 2), Stage(3, 3)), (Stage(4, 5), Stage(0, 3))
    odd = Plan(*stages, planned.plan.num_microbatches, "layer")
    compiled = replace(planned, kernels=KernelChoice("compile"), plan=odd)
    measured = as_measured(compiled, traced(compiled))
    assert measured is not None
    found = replanned(measured)
    assert found.full_step_seconds < measured.full_step_seconds
    assert (found.plan.fused, found.plan.recompute) == (odd.fused, "layer")
    by_stage = replace(measured, plan=replace(odd, recompute="stage"))
    assert replanned(by_stage).plan == by_stage.plan


@pytest.mark.parametrize(
    ("words", "steps", "wanted"),
    [([], 200, True), ([], 40, False), (["engine.inject_delays=3"], 200, False)],
    ids=["a long run", "too short to pay", "delays of our own"],
)
def test_only_runs_that_could_gain_are_traced(words, steps, wanted, planned, made):
    recipe = load_recipe(made.recipe, words)
    assert FirstSteps(replace(planned, recipe=recipe), 1, steps)._wanted is wanted


# ---- through the command


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["optimizer.update=delayed", "engine.workers=2", "checkpoint.every_steps=2"],
        ["adapter.r=4", "adapter.dropout=0.3", "engine.workers=2"],
    ],
    ids=["exact", "delayed", "LoRA with dropout"],
)
def test_a_plan_that_changes_in_mid_run_changes_no_number(words, made, monkeypatch):
    words = [*words, "train.max_steps=7"]
    name = f"refined {len(words)}{words[0]}"
    unbroken = made.train_well(f"{name} unbroken", *words)
    monkeypatch.setattr(refine, "WORTH_A_CHANGE", -1e3)
    monkeypatch.setattr(refine, "_PAYS_AFTER", -1e9)
    other = Plan((Stage(0, 1), Stage(2, 2)), (Stage(3, 5), Stage(1, 2), Stage(0, 0)), 4, "layer")
    monkeypatch.setattr(refine, "replanned", lambda measured: replace(measured, plan=other))
    ran = made.train(name, *words)
    assert ran.code == 0, ran.err
    assert "step 4: by the times of the first steps another plan is" in ran.out
    changed = made.outcome(name)
    assert changed.numbers == unbroken.numbers
    assert changed.result == unbroken.result
    assert read_plan(changed.folder / "plan.json") == other
    left = json.loads((changed.folder / "plan.json").read_text())
    assert left["predicted"]["step_seconds"] > 0
