"""`rpft plan` and `rpft profile`: what they print, write and refuse, and that `rpft train` uses it."""

import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.recipes import run_rpft

from rpft.machine import unlike_others
from rpft.plan import profile_file
from rpft.plan.plan import read_plan
from rpft.plan.profile import LayerProfile
from rpft.plan.profile_file import read_profile
from rpft.recipe.load import load_recipe
from rpft.train import tries
from rpft.train.measuring import Workbench
from rpft.train.prepare import plan_here, prepare, set_up
from rpft.train.tries import smaller

DOCUMENTED = {"forward", "backward", "num_microbatches", "rounds", "recompute", "predicted", "memory", "fits"}
MEMORY = {"vram_bytes", "host_bytes", "pinned_bytes", "disk_bytes"}


@pytest.fixture(scope="module")
def made(project):
    return project("plans", "qwen3", eval_rows=0, sections={"engine": {"workers": 2}})


@pytest.fixture(scope="module")
def profiled(made):
    """(project, what `rpft profile --json --out` printed, the file)."""
    path = made.folder / "profile.json"
    ran = run_rpft("profile", str(made.recipe), "--json", "--out", str(path))
    assert ran.code == 0, ran.err
    return made, ran, path


@pytest.fixture
def nothing_is_measured(monkeypatch):
    monkeypatch.setattr(Workbench, "measure", lambda *arguments, **more: pytest.fail("measured"))


def plan_json(made, *words):
    ran = run_rpft("plan", str(made.recipe), *words, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


@pytest.fixture(scope="module")
def planned(profiled):
    """What `rpft plan --json` prints of the project as it is."""
    return plan_json(profiled[0])


def test_a_profile_has_every_layer_its_checks_two_more_lengths_and_all_rates(profiled):
    _, ran, path = profiled
    found = read_profile(path)
    assert json.loads(ran.out) == json.loads(path.read_text())
    assert [(kind.name, kind.layers) for kind in found.kinds] == [
        ("embedding", (0,)),
        ("block", (1, 2, 3, 4)),
        ("head", (5,)),
    ]
    assert all(kind.measured.backward_seconds > 0 and kind.weight_bytes > 0 for kind in found.kinds)
    assert sorted(found.checks) == [3, 4]
    assert len({found.sequence, *(length.sequence for length in found.lengths)}) == 3
    assert found.updates > 0
    assert found.host_memory is not None
    assert found.host_memory > 0
    assert found.slowdown >= 1
    assert {"machine", "model", "dtype", "kernels", "rows", "sequence", "versions"} <= found.conditions.keys()


def test_the_table_of_a_profile_names_kinds_links_and_memory(profiled, monkeypatch):
    made, _, path = profiled
    monkeypatch.setattr(Workbench, "measure", lambda *arguments, **more: read_profile(path))
    ran = run_rpft("profile", str(made.recipe))
    assert ran.code == 0
    for said in ("embedding 0", "block 1 of 4", "block 4", "head 5", "link, GB/s", "optimizer:", "host memory:"):
        assert said in ran.out


def test_the_memory_of_a_layer_is_told_by_what_it_is_for(profiled, monkeypatch):
    made, _, path = profiled
    mib = 1 << 20
    found = read_profile(path)
    measured = LayerProfile(1, 1, 3 * mib, 40 * mib, kept_bytes=30 * mib, kept_backward_bytes=5 * mib)
    kinds = [
        replace(k, weight_bytes=7 * mib, num_trained=2 * mib, measured=measured) if k.name == "block" else k
        for k in found.kinds
    ]
    on_a_gpu = replace(found, kinds=tuple(kinds))
    monkeypatch.setattr(Workbench, "measure", lambda *arguments, **more: on_a_gpu)
    *_, row = (line for line in run_rpft("profile", str(made.recipe)).out.splitlines() if "block 1 of 4" in line)
    # The workspace is what the most that is held at once is beyond what is kept.
    assert row.split()[4:] == ["7", "MiB", "8", "MiB", "30", "MiB", "10", "MiB"]
    monkeypatch.setattr(Workbench, "measure", lambda *arguments, **more: found)
    *_, row = (line for line in run_rpft("profile", str(made.recipe)).out.splitlines() if "head 5" in line)
    assert row.split()[-2:] == ["-", "-"]


def test_a_plan_as_json_is_what_programs_rely_on_and_measures_nothing_twice(profiled, nothing_is_measured):
    found = plan_json(profiled[0])
    assert found.keys() >= DOCUMENTED
    assert {"tokens_per_second", "step_seconds", "limited_by"} <= found["predicted"].keys()
    assert found["predicted"]["limited_by"] in found["predicted"]["saved_seconds"]
    assert found["memory"].keys() == MEMORY
    assert found["fits"] is True
    assert (found["num_microbatches"], found["rounds"]) == (4, 1)
    assert found["forward"][0][0] == 0
    assert found["backward"][0][1] == 5


def test_the_plan_file_is_read_by_a_run_of_the_same_numbers(profiled, nothing_is_measured):
    made = profiled[0]
    path = made.folder / "made.json"
    ran = run_rpft("plan", str(made.recipe), "--out", str(path))
    assert ran.code == 0, ran.err
    for said in (
        "forward",
        "fused",
        "backward",
        "RAM",
        "page-locked",
        "disk",
        "tokens/s",
        "limited by",
        "more tokens",
    ):
        assert said in ran.out
    assert f"engine.plan={path}" in ran.out
    read_plan(path).check(6)
    words = ("train.max_steps=2",)
    assert (
        made.train_well("given", f"engine.plan={path}", *words).numbers == made.train_well("own", *words).numbers
    )


def test_a_run_uses_the_cached_profile_and_leaves_profile_and_prediction(profiled, nothing_is_measured):
    made, _, path = profiled
    outcome = made.train_well("with profile", "train.max_steps=1")
    assert read_profile(outcome.folder / "profile.json") == read_profile(path)
    left = json.loads((outcome.folder / "plan.json").read_text())
    assert left["predicted"]["step_seconds"] > 0
    assert left["memory"].keys() == MEMORY
    assert "predicted: " in made.train("dry", "--dry-run").out


def test_a_torn_cached_profile_is_said_and_not_used(profiled, cache):
    made = profiled[0]
    path = profile_file.cached_path(set_up(load_recipe(made.recipe)).conditions())
    whole = path.read_text()
    path.write_text(whole[:100])
    said = []
    try:
        assert prepare(load_recipe(made.recipe), said.append).profile is None
    finally:
        path.write_text(whole)
    assert "it is not used" in said[0]
    assert path.parent == cache


@pytest.mark.parametrize(
    "word",
    [
        "model.dtype=bfloat16",
        "engine.kernels=trace",
        "train.micro_batch_size=2",
        "engine.workers=1",
        "adapter.r=4",
        "data.packing=true",
        "optimizer.state=8bit",
        "model.attention=eager",
        "engine.deterministic=true",
    ],
)
def test_another_shape_precision_kernel_or_machine_is_another_profile(word, profiled):
    recipe = profiled[0].recipe
    before, after = (set_up(load_recipe(recipe, words)).conditions() for words in ([], [word]))
    assert before != after


def test_a_machine_of_the_same_parts_is_another_by_its_gpus_or_where_there_are_none_by_its_system(monkeypatch):
    cpu, gpu = (torch.device(kind, 0) for kind in ("cpu", "cuda"))

    def told(place, uuid, system):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: SimpleNamespace(uuid=uuid))
        monkeypatch.setattr("rpft.machine.installation", lambda: system)
        return unlike_others([place])

    assert told(gpu, "a", "x") == told(gpu, "a", "y")  # as in another container
    assert told(cpu, "a", "x") == told(cpu, "b", "x")
    assert len({told(gpu, "a", "x"), told(gpu, "b", "x"), told(cpu, "a", "x"), told(cpu, "a", "y")}) == 4


def test_what_is_measured_while_others_work_is_used_and_not_kept(made, monkeypatch, tmp_path):
    bench, said = set_up(load_recipe(made.recipe)), []
    monkeypatch.setattr(profile_file, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr("rpft.train.measuring.others_cores", lambda: 1e3)
    monkeypatch.setattr(Workbench, "measure", lambda *arguments: "measured")
    assert bench.find_profile(said.append, needed=True) == "measured"
    assert not list(tmp_path.iterdir())
    assert "they kept 1000.0 cores busy" in said[-1]


def test_no_more_stand_ins_than_cores_are_measured_at_once(made, monkeypatch):
    monkeypatch.setattr("rpft.train.measuring.available_cores", lambda: 3)
    monkeypatch.setattr("rpft.train.measuring.measure_slowdown", lambda meters, layer: 10.0 + len(meters))
    found = {n: set_up(load_recipe(made.recipe, [f"engine.workers={n}"]))._slowdown(16, 1) for n in (1, 2, 3, 6)}
    assert found == {1: 1.0, 2: 12.0, 3: 13.0, 6: 26.0}


def test_a_recipe_that_does_not_fit_says_what_would_and_ends_with_2(profiled, nothing_is_measured):
    made = profiled[0]
    ran = run_rpft("plan", str(made.recipe), "engine.ram_limit=1GiB")
    assert ran.code == 2
    assert "weights, gradients, optimizer state" in ran.out
    error, *settings = ran.err.splitlines()[-4:]
    assert error.startswith("error: this does not fit: too little RAM")
    assert all("=" in line and "less" in line for line in settings)
    assert plan_json(made, "engine.ram_limit=1GiB")["fits"] is False


def test_a_disk_without_room_is_no_matter_of_the_machine_or_the_model(profiled, nothing_is_measured, monkeypatch):
    monkeypatch.setattr("rpft.train.prepare.room_bytes", lambda recipe: 1)
    ran = run_rpft("plan", str(profiled[0].recipe))
    assert ran.code == 2
    assert "too little disk: result and checkpoints (another output_dir may have room)" in ran.err
    assert "it takes a machine" not in ran.err


def test_the_settings_named_are_those_that_save_most_of_what_is_short(profiled, nothing_is_measured):
    bench = set_up(load_recipe(profiled[0].recipe, ["engine.ram_limit=1GiB"]))
    planned = plan_here(bench, bench.find_profile(lambda line: None, needed=True))
    assert planned.short_of == ["host_bytes"]
    found = smaller(planned)
    needs = [tried.planned.memory["host_bytes"] for tried in found]
    assert len(found) == 3
    assert needs == sorted(needs)
    assert needs[-1] < planned.memory["host_bytes"]
    # Which is first goes by measured times, since the plan does: of a tiny model several save nearly the same.
    assert {tried.setting for tried in found} & {"model.dtype=bfloat16", "adapter.r=16"}
    words = ["engine.ram_limit=1GiB", found[1].setting]
    bench = set_up(load_recipe(profiled[0].recipe, words))
    assert plan_here(bench, None).memory["host_bytes"] == pytest.approx(needs[1], rel=0.01)


def test_where_no_setting_does_alone_several_are_named_that_fit_together(fresh):
    sections = {"adapter": {"r": 4}, "model": {"dtype": "bfloat16"}, "train": {"micro_batch_size": 4}}
    made = fresh("llama", sections=sections, hidden_size=256, intermediate_size=4096)
    words = ["--machine", "8x4090", "engine.workers=1", "engine.vram_limit=24MiB", "engine.ram_limit=2570MiB"]
    ran = run_rpft("plan", str(made.recipe), *words)
    assert ran.code == 2
    *alone, together = ran.err.splitlines()[1:]
    assert len(alone) == 3
    assert not any("fits" in line for line in alone)
    settings = together.strip().partition(": ")[0].split(" ")
    assert len(settings) in (2, 3)
    assert together.endswith("that fits")
    assert plan_json(made, *words, *settings)["fits"] is True


def test_what_does_alone_comes_first_though_another_setting_saves_more(monkeypatch):
    def needing(ram, vram):
        return SimpleNamespace(needs={"host_bytes": ram, "vram_bytes": vram}, fits=max(ram, vram) <= 100)

    planned = SimpleNamespace(short_of=["host_bytes", "vram_bytes"], **vars(needing(400, 110)))
    planned.limits = {"host_bytes": 100, "vram_bytes": 100}
    found = [tries.Tried("more=1", needing(50, 110)), tries.Tried("enough=1", needing(100, 100))]
    monkeypatch.setattr(tries, "_tried", lambda planned, changes: iter(found))
    assert [tried.setting for tried in smaller(planned)] == ["enough=1", "more=1"]


def test_a_plan_for_a_machine_that_is_not_there_needs_no_gpu_and_fits_its_cards(profiled, nothing_is_measured):
    made = profiled[0]
    found = plan_json(made, "--machine", "8x4090", "engine.workers=null", "train.gradient_accumulation_steps=16")
    assert (found["target"], found["num_microbatches"] * found["rounds"]) == ("8x4090", 16)
    assert found["memory"]["pinned_bytes"] > 0
    assert plan_json(made, "--machine", "8x4090", "engine.vram_limit=64KiB")["fits"] is False
    refused = run_rpft("plan", str(made.recipe), "--machine", "2x5090", "engine.workers=3")
    assert (refused.code, "engine.workers is 3" in refused.err) == (2, True)
    unknown = run_rpft("plan", str(made.recipe), "--machine", "8x4080")
    assert (unknown.code, "8x4090" in unknown.err) == (2, True)


@pytest.mark.parametrize(
    ("change", "words", "says"),
    [
        (
            {"made_for": {"model": "LlamaForCausalLM", "blocks": 4}},
            [],
            "made for model LlamaForCausalLM, not Qwen3",
        ),
        ({"made_for": {"hidden_size": 128}}, [], "made for hidden_size 128, not 64"),
        ({}, ["engine.num_microbatches=2"], "num_microbatches is 4 and engine.num_microbatches is 2"),
        ({}, ["train.gradient_accumulation_steps=2"], "its rounds have 4 microbatches, and a step 2"),
        ({"recompute": "stage"}, ["engine.recompute=layer"], "recompute is stage and engine.recompute is layer"),
    ],
)
def test_a_plan_that_does_not_fit_model_or_recipe_is_refused_with_the_difference(
    change, words, says, profiled, planned
):
    made = profiled[0]
    path = made.folder / "other.json"
    path.write_text(json.dumps({**planned, **change}))
    ran = made.train("refused", f"engine.plan={path}", *words)
    assert ran.code == 2
    assert says in ran.err
    assert not os.path.exists(made.folder / "refused")


def test_a_plan_that_does_not_fit_the_machine_is_refused_with_what_it_needs(profiled, planned):
    made = profiled[0]
    path = made.folder / "whole.json"
    path.write_text(json.dumps(planned))
    ran = made.train("refused", f"engine.plan={path}", "engine.ram_limit=1GiB")
    assert ran.code == 2
    assert "this run needs" in ran.err
    assert re.search(r"need least: [\w.]+=\w+ \(RAM ", ran.err)


def test_what_is_advised_beside_a_plan_that_is_given_says_that_it_must_go(profiled, planned, nothing_is_measured):
    made = profiled[0]
    path = made.folder / "keeps.json"
    path.write_text(json.dumps({**planned, "recompute": "layer", "keep_bytes_per_token": 1 << 40}))
    words = (f"engine.plan={path}", "engine.ram_limit=4GiB")
    found = plan_json(made, *words)
    assert found["fits"] is False
    settings = [change["setting"] for change in found["changes"]]
    assert settings[0] == "engine.plan=null"
    assert len(settings) == 3
    assert all(setting.startswith("engine.plan=null ") for setting in settings[1:])
    assert plan_json(made, *words, settings[0])["fits"] is True
    assert "with engine.plan=null, these need least: engine.plan=null (RAM" in made.train("keeps", *words).err
    # What would be faster is planned anew, too.
    path.write_text(json.dumps({**planned, "dispatch": [0]}))
    settings = [change["setting"] for change in plan_json(made, f"engine.plan={path}")["changes"]]
    assert "engine.plan=null" in settings
    assert all(setting.startswith("engine.plan=null") for setting in settings)


def test_a_plan_needs_no_weights_to_be_there_and_a_run_does(fresh):
    made = fresh("qwen3", eval_rows=0)
    [weights] = made.folder.glob("base/*.safetensors")
    weights.unlink()
    assert plan_json(made, "--machine", "8x4090", "engine.workers=null")["fits"] is True
    ran = made.train("none", "--dry-run")
    assert (ran.code, "no safetensors file in it" in ran.err) == (2, True)
