"""Rows a microbatch, microbatches a round, recompute grain: the best by the prediction, and the same numbers."""

import json
from dataclasses import replace

import pytest
import yaml
from support.partitions import every_plan

from rpft.plan.bill import make_bill
from rpft.plan.choose import step_shape
from rpft.plan.costs import measured_costs
from rpft.plan.profile import LayerProfile
from rpft.plan.rates import Rates
from rpft.plan.simulate import steps_seconds
from rpft.recipe.load import load_recipe
from rpft.train.dividing import plan_rows
from rpft.train.job import read_job
from rpft.train.kernels import KernelChoice
from rpft.train.planning import plan_job
from rpft.train.target import Target

RATES = Rates(1e9, 1e9, 5e6)
ROWS = 8


SECTIONS = {"train": {"micro_batch_size": "auto", "gradient_accumulation_steps": ROWS, "max_steps": 2}}


@pytest.fixture(scope="module")
def made(project):
    return project("dividing", "llama", eval_rows=0, sections=SECTIONS)


@pytest.fixture(scope="module")
def job(project):
    """One whose lines are all as long as the longest, so that nothing is padded."""
    rows = [{"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]}] * 24
    made = project("dividing even rows", "llama", rows=rows, eval_rows=0, sections=SECTIONS, num_hidden_layers=3)
    return read_job(load_recipe(made.recipe), KernelChoice("eager"))


def target(ram_bytes, num_workers=2, vram_bytes=None):
    return Target("a test", num_workers, vram_bytes, ram_bytes, None, RATES)


def profiles_of(job, start, blocks=(1.0, 1.0, 1.0), head=2.0):
    """Layers that take ``start`` seconds before their first token."""
    layers = [0.05, *blocks, head]
    tokens = job.rows * job.data.longest
    return [LayerProfile(x * (start + 1e-5 * tokens), 3 * x * (start + 1e-5 * tokens), 0, 0) for x in layers]


def plan_all(job, where, **times):
    return plan_rows(job, lambda job: plan_job(job, where, profiles_of(job, **times)))


def best_of_all(job, where, **times):
    """(seconds, rows, M, grain) of the fastest of all divisions, grains and partitions that fit."""
    best = []
    for rows in (1, 2, 4, 8):
        other = job.with_rows(rows)
        profiles = profiles_of(other, **times)
        for m in (n for n in range(1, ROWS // rows + 1) if ROWS // rows % n == 0):
            work = where.workload(other, profiles)
            for grain in ("stage", "layer"):
                plans = [
                    plan
                    for plan in every_plan(len(job.layouts), m, grain)
                    if make_bill(plan, job.layouts, work).host <= where.ram_bytes
                ]
                if not plans:
                    continue
                costs = measured_costs(profiles, 0, grain)
                rounds = ROWS // rows // m
                shape = step_shape(job.layouts, work, costs, where.num_workers, rounds, where.speeds)
                best.append((float(steps_seconds(plans, shape, where.rates).min()), rows, m, grain))
    return min(best)


@pytest.mark.parametrize(
    ("workers", "times"),
    [
        (1, {"start": 1e-4}),
        (2, {"start": 0.0}),
        (2, {"start": 1e-2}),
        (3, {"start": 1e-3, "blocks": (0.3, 2.0, 0.5), "head": 6.0}),
    ],
    ids=["one worker", "even", "much to start", "uneven"],
)
def test_the_division_of_a_step_is_the_fastest_of_all(times, workers, job):
    where = target(64 << 30, workers)
    chosen = plan_all(job, where, **times)
    seconds, *_ = best_of_all(job, where, **times)
    assert chosen.fits
    assert seconds * (1 - 1e-9) <= chosen.full_step_seconds <= seconds * 1.011  # half a percent twice is let go


def test_layers_that_take_long_to_start_get_large_microbatches_and_others_small_ones(job):
    where = target(64 << 30)
    assert plan_all(job, where, start=0.0).rows < plan_all(job, where, start=1.0).rows


def test_the_division_fits_where_another_would_be_faster_and_does_not(job):
    free = plan_all(job, target(64 << 30), start=1e-2)
    limit = target(free.bill.host - 1)
    tight = plan_all(job, limit, start=1e-2)
    assert tight.fits
    assert tight.full_step_seconds > free.full_step_seconds
    assert tight.full_step_seconds <= best_of_all(job, limit, start=1e-2)[0] * 1.011
    assert (tight.rows, tight.num_microbatches, tight.plan) != (free.rows, free.num_microbatches, free.plan)


@pytest.mark.parametrize("known", [True, False], ids=["times known", "nothing measured"])
def test_rounds_get_shorter_where_memory_is_too_little_for_the_usual_ones(known, job):
    one = job.with_rows(1)
    profiles = profiles_of(one, 0.0) if known else None
    work = target(64 << 30, vram_bytes=64 << 30).workload(one, profiles)
    plans = [plan for grain in ("stage", "layer") for plan in every_plan(len(one.layouts), ROWS, grain)]
    least = min(make_bill(plan, one.layouts, work).host for plan in plans)
    fewer = plan_job(one, target(least - 1, vram_bytes=64 << 30), profiles)
    assert fewer.fits
    assert fewer.num_microbatches < ROWS
    assert fewer.plan.num_microbatches * fewer.rounds == ROWS


def test_rounded_gradients_keep_the_one_round_that_they_need_unless_it_does_not_fit(job):
    recipe = job.recipe.model_copy(update={"model": job.recipe.model.model_copy(update={"dtype": "bfloat16"})})
    half = job.with_recipe(recipe)
    kept = plan_job(half, target(64 << 30), profiles_of(half, 0.0))
    assert (str(kept.gradient_dtype), kept.rounds) == ("torch.bfloat16", 1)
    tight = plan_job(half, target(kept.bill.host - (1 << 14)), profiles_of(half, 0.0))
    assert (str(tight.gradient_dtype) == "torch.bfloat16") == (tight.rounds == 1)


def test_what_was_chosen_is_said_in_one_line_with_what_else_it_could_have_been(job):
    chosen = plan_all(job, target(64 << 30), start=1e-4)
    rows, rounds = chosen.choices
    assert rows.startswith(f"{chosen.rows} row(s) a microbatch (")
    assert rounds.startswith(f"{chosen.num_microbatches} microbatch(es) a round")
    assert "% time" in rows


def test_rounds_that_the_recipe_sets_leave_only_divisions_that_they_divide(job):
    recipe = job.recipe.model_copy(update={"engine": job.recipe.engine.model_copy(update={"num_microbatches": 4})})
    chosen = plan_all(replace(job.with_recipe(recipe), open_rows=True), target(64 << 30), start=1.0)
    assert (chosen.rows, chosen.num_microbatches, chosen.rounds) == (2, 4, 1)


# ---- through the command


def recipe_of(outcome):
    return yaml.safe_load((outcome.folder / "recipe.yaml").read_text())["train"]


def test_a_run_whose_rows_are_open_is_the_run_of_what_was_chosen(made):
    ran = made.train("auto")
    assert ran.code == 0, ran.err
    assert "chosen by the planner: " in ran.out
    auto = made.outcome("auto")
    train = recipe_of(auto)
    assert train["micro_batch_size"] * train["gradient_accumulation_steps"] == ROWS
    plan = json.loads((auto.folder / "plan.json").read_text())
    assert plan["micro_batch_size"] == train["micro_batch_size"]
    words = [f"train.{key}={train[key]}" for key in ("micro_batch_size", "gradient_accumulation_steps")]
    given = made.train_well("given", *words)
    assert given.numbers == auto.numbers
    assert given.result == auto.result


def test_other_microbatches_of_the_same_rows_change_rounding_only(made):
    one = made.train_well("ones", "train.micro_batch_size=1")
    four = made.train_well("fours", "train.micro_batch_size=4", "train.gradient_accumulation_steps=2")
    assert four.losses == pytest.approx(one.losses, rel=1e-5)
    assert [s["trained_tokens"] for s in four.steps] == [s["trained_tokens"] for s in one.steps]


def test_a_resumed_run_keeps_the_division_of_the_checkpoint(made, monkeypatch):
    words = ("train.micro_batch_size=2", "train.gradient_accumulation_steps=4")
    whole = made.train_well("whole", *words)
    made.train_well("resumed", *words, "checkpoint.every_steps=1")
    checkpoint = made.folder / "resumed" / "checkpoints" / "step-00000001"
    monkeypatch.setattr("rpft.train.prepare.plan_rows", lambda job, plan: plan(job.with_rows(job.rows)))
    again = made.train("again", "--resume", str(checkpoint))  # the recipe leaves the rows open
    assert again.code == 0, again.err
    assert made.outcome("again").result == whole.result
