"""`rpft plan` cuts experts into groups where a block does not fit, and `rpft train` runs, resumes and saves so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.recipes import Outcome, Project, crash_at, run_rpft, write_plan

from rpft.plan.plan import Plan, Stage
from rpft.recipe.load import load_recipe
from rpft.train.grouping import plan_groups
from rpft.train.job import Job, read_job
from rpft.train.kernels import KernelChoice
from rpft.train.measuring import LayerTooLarge

LORA = {"adapter": {"r": 4, "target_modules": ["q_proj", "v_proj"]}, "checkpoint": {"every_steps": 2}}
IN_FULL = "adapter=null"
ON_EXPERTS = "adapter.target_modules=[]", "adapter.target_parameters=[experts.gate_up_proj, experts.down_proj]"
TRAINED: dict[str, tuple[str, ...]] = {
    "adapters of attention": (),
    "in full": (IN_FULL,),
    "adapters of experts": ON_EXPERTS,
}
WIDE = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
"""A block has 3 MiB of experts, and next to nothing else."""


@pytest.fixture(autouse=True, scope="module")
def nothing_faster_is_tried() -> Iterator[None]:
    """What would be faster than a plan is three more searches, each as long as its own, and is not asked here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rpft.train.plan_report.faster", lambda planned: [])
        yield


@pytest.fixture(scope="module")
def made(project: Any) -> Project:
    return project("expert groups", "qwen3_moe", sections=LORA, **WIDE)


def plan_for(made: Project, limit: str, *words: str) -> dict[str, Any]:
    ran = run_rpft(
        "plan",
        str(made.recipe),
        "--machine",
        "8x4090",
        "--json",
        f"engine.vram_limit={limit}",
        "engine.workers=2",
        *words,
    )
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def plan_file(made: Project, limit: str) -> Path:
    path = made.folder / f"plan-{limit}.json"
    path.write_text(json.dumps(plan_for(made, limit)))
    return path


@pytest.fixture(scope="module")
def small(project: Any) -> Project:
    """Two blocks, with a plan by hand that has their experts in two groups each."""
    made = project("few expert groups", "qwen3_moe", sections=LORA, num_hidden_layers=2, num_experts=8)
    path = write_plan(made.folder / "plan.json", [[0, 1], [2, 4]], [[5, 7], [3, 4], [0, 2]], 4)
    path.write_text(json.dumps({**json.loads(path.read_text()), "expert_groups": 2}))
    return made


@pytest.fixture(scope="module")
def in_groups(made: Project) -> str:
    """The recipe's key for a plan in four groups."""
    path = plan_file(made, "2.5MiB")
    assert json.loads(path.read_text())["expert_groups"] == 4
    return f"engine.plan={path}"


def test_experts_are_cut_into_the_fewest_groups_that_fit_and_only_where_blocks_do_not(made: Project) -> None:
    plans = {limit: plan_for(made, limit) for limit in ("16MiB", "6MiB", "64KiB")}
    found = {limit: (plan["expert_groups"], plan["fits"]) for limit, plan in plans.items()}
    assert found == {"16MiB": (1, True), "6MiB": (2, True), "64KiB": (1, False)}
    assert plans["6MiB"]["backward"][0][1] == 1 + 4 * 3


def test_a_plan_in_groups_says_so(made: Project) -> None:
    words = "--machine", "8x4090", "engine.vram_limit=6MiB", "engine.workers=2"
    ran = run_rpft("plan", str(made.recipe), *words)
    assert ran.code == 0, ran.err
    assert "the experts of a block are 2 layers of their own" in ran.out
    assert "6 layers have become 14" in ran.out


def test_gradients_count_so_that_experts_which_are_trained_are_cut_earlier(made: Project) -> None:
    plan = plan_for(made, "6MiB", IN_FULL)
    assert (plan["expert_groups"], plan["fits"]) == (4, True)


@pytest.mark.parametrize("kind", [*list(TRAINED)[:2], pytest.param("adapters of experts", marks=pytest.mark.slow)])
def test_a_run_in_groups_learns_what_one_of_whole_blocks_does_and_goes_on_as_either(
    kind: str, small: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, words, in_groups = small, TRAINED[kind], f"engine.plan={small.folder / 'plan.json'}"

    def train_well(name: str, *more: str) -> Outcome:
        return made.train_well(f"{name} {kind}", *words, *more)

    whole = train_well("whole")
    cut = train_well("cut", in_groups, "engine.workers=2")
    assert cut.losses == pytest.approx(whole.losses, rel=1e-5)
    assert cut.evaluations[4] == pytest.approx(whole.evaluations[4], rel=1e-5)
    found, expected = (load_result(run) for run in (cut, whole))
    assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in expected.items()}
    assert all(torch.allclose(found[name], value, rtol=1e-2, atol=1e-4) for name, value in expected.items())
    norms = [len(json.loads(line)["norms"]) for line in (cut.folder / "layer_norms.jsonl").open()]
    assert set(norms) == {1 + 2 + 1}
    with monkeypatch.context() as patch:
        crash_at(3, patch)
        assert made.train(f"broken {kind}", *words, in_groups).code == 1
    shutil.copytree(made.folder / f"broken {kind}", made.folder / f"other {kind}")
    same = train_well("broken", in_groups, "engine.workers=2", "--resume")
    assert same.numbers == cut.numbers
    assert same.result == cut.result
    other = train_well("other", "--resume")
    assert other.losses == pytest.approx(cut.losses, rel=1e-5)
    merged = made.folder / f"merged {kind}"
    exported = run_rpft("export", str(cut.folder), "--out", str(merged), "--checkpoint", "step-00000004")
    assert exported.code == 0, exported.err
    if kind == "in full":
        assert {path.name: path.read_bytes() for path in merged.glob("*.safetensors")} == cut.result


def load_result(run: Outcome) -> dict[str, torch.Tensor]:
    (file,) = run.folder.glob("[ma]*/*.safetensors")
    return load_file(file)


def test_layers_in_groups_are_measured_each_for_itself(made: Project, in_groups: str) -> None:
    ran = run_rpft("profile", str(made.recipe), in_groups, "--json")
    assert ran.code == 0, ran.err
    kinds = json.loads(ran.out)["kinds"]
    assert len(kinds) == 1 + 4 + 1, "a front, and first, inner and last groups"
    assert all(kind["measured"]["backward_seconds"] > 0 for kind in kinds[1:-1])


def test_a_plan_in_groups_that_the_model_does_not_have_is_refused(made: Project, in_groups: str) -> None:
    path = Path(in_groups.partition("=")[2])
    other = made.folder / "other.json"
    other.write_text(json.dumps({**json.loads(path.read_text()), "expert_groups": 5}))
    ran = made.train("refused", f"engine.plan={other}")
    assert ran.code == 2
    assert "cannot be in 5 groups" in ran.err
    assert "possible: 1, 2, 4, 8, 16, 32" in ran.err


def test_what_turns_out_too_large_when_it_is_measured_is_cut_further(made: Project) -> None:
    job, tried = read_job(load_recipe(made.recipe), KernelChoice("eager")), []

    def plan_from(enough: int) -> Any:
        def plan(job: Job) -> Any:
            tried.append(job.skeleton.num_groups)
            if tried[-1] < enough:
                raise LayerTooLarge(f"{tried[-1]} do not do")
            return SimpleNamespace(short_of=["host_bytes"], layouts=job.layouts)

        return plan

    found = plan_groups(job, 1 << 30, plan_from(4))
    assert tried == [1, 2, 4]
    assert len(found.layouts) == 2 + 4 * 5
    tried.clear()
    with pytest.raises(LayerTooLarge, match="1 do not do"):
        plan_groups(job, 1 << 30, plan_from(1000))
    assert tried == [1, 2, 4, 8, 16, 32], "until a group takes less than a front, of which more would be of no use"


def test_nothing_is_cut_for_workers_without_memory_of_their_own_or_a_plan_that_is_given(made: Project) -> None:
    job = read_job(load_recipe(made.recipe), KernelChoice("eager"))
    given: Any = Plan((), (Stage(0, 5),), 4, "stage")
    for one, limit in ((job, None), (replace(job, given=given), 1)):
        assert plan_groups(one, limit, lambda job: SimpleNamespace(job=job)).job is one  # type: ignore[type-var]
