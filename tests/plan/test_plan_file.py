"""Plans: what is legal, what is said about what is not, and the file."""

import json
from dataclasses import replace

import pytest
from support.engines import plan_of, random_plan

from rpft.errors import UserError
from rpft.plan.plan import Plan, Stage, read_about, read_plan

LAYERS = 6


@pytest.mark.parametrize("seed", range(50))
def test_any_legal_plan_passes_and_comes_back_from_its_file(seed, tmp_path):
    import random

    plan = random_plan(random.Random(seed), LAYERS, num_microbatches=1 + seed % 7)
    plan.check(LAYERS)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert read_plan(path) == plan
    assert plan.num_layers == LAYERS
    assert plan.num_slots == len(plan.forward) + len(plan.backward)


def test_the_order_of_workers_comes_back_from_the_file_and_begins_again_where_it_ends(tmp_path):
    plan = replace(plan_of([(0, 3)], [(4, 5), (0, 3)], 2, "layer"), dispatch=(1, 0, 2))
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert read_plan(path) == plan
    assert [plan.worker_of(place, 3) for place in range(4)] == [1, 0, 2, 1]
    assert [plan.worker_of(place, 2) for place in range(3)] == [1, 0, 0]  # of another machine
    assert replace(plan, dispatch=()).worker_of(1, 3) is None
    with pytest.raises(UserError, match="`dispatch`"):
        replace(plan, dispatch=(0, -1)).check(LAYERS)


def test_the_fused_stage_may_be_the_head_alone_or_the_whole_model():
    plan_of([], [(0, 5)], 1, "stage").check(LAYERS)
    plan_of([(0, 4)], [(5, 5), (0, 4)], 1, "stage").check(LAYERS)


@pytest.mark.parametrize(
    ("forward", "backward", "m", "recompute", "says"),
    [
        ([(0, 3)], [], 1, "stage", "fused stage"),
        ([(0, 3)], [(4, 4), (0, 3)], 1, "stage", r"fused stage \[4\.\.4\].*head, layer 5"),
        ([(0, 3)], [(4, 6), (0, 3)], 1, "stage", r"fused stage \[4\.\.6\].*head, layer 5"),
        ([(0, 1), (3, 3)], [(4, 5), (0, 3)], 1, "stage", r"`forward` stage \[3\.\.3\].*layer 2"),
        ([(0, 2), (2, 3)], [(4, 5), (0, 3)], 1, "stage", r"`forward` stage \[2\.\.3\].*layer 3"),
        ([(1, 3)], [(4, 5), (0, 3)], 1, "stage", r"`forward` stage \[1\.\.3\].*layer 0"),
        ([(0, 1), (2, 1), (2, 3)], [(4, 5), (0, 3)], 1, "stage", r"`forward` stage \[2\.\.1\].*empty"),
        ([(2, 3), (0, 1)], [(4, 5), (0, 3)], 1, "stage", r"`forward` stage \[2\.\.3\].*layer 0"),
        ([(0, 2)], [(4, 5), (0, 3)], 1, "stage", "`forward` stages cover layers below 3.*starts at 4"),
        ([(0, 4)], [(4, 5), (0, 3)], 1, "stage", "`forward` stages cover layers below 5.*starts at 4"),
        ([(0, 3)], [(4, 5), (0, 1), (2, 3)], 1, "stage", r"`backward` stage \[2\.\.3\].*layer 0"),
        ([(0, 3)], [(4, 5), (3, 3), (0, 1)], 1, "stage", r"`backward` stage \[3\.\.3\].*layer 2"),
        ([(0, 3)], [(4, 5), (1, 3)], 1, "stage", r"`backward` stage \[1\.\.3\].*layer 0"),
        ([(0, 3)], [(4, 5)], 1, "stage", "`backward` stages cover layers below 0.*starts at 4"),
        ([], [(-1, 5)], 1, "stage", r"fused stage \[-1\.\.5\]|starts at -1"),
        ([(0, 3)], [(4, 5), (0, 3)], 0, "stage", "`num_microbatches` is 0"),
        ([(0, 3)], [(4, 5), (0, 3)], 1, "block", "`recompute` is 'block'"),
    ],
)
def test_an_illegal_plan_is_refused_with_the_stage(forward, backward, m, recompute, says):
    with pytest.raises(UserError, match=says):
        plan_of(forward, backward, m, recompute).check(LAYERS)


def test_segments_are_the_stage_or_its_layers_from_the_top():
    stage = Stage(1, 3)
    assert plan_of([(0, 3)], [(4, 5), (0, 3)], 1, "stage").segments(stage) == (stage,)
    assert plan_of([(0, 3)], [(4, 5), (0, 3)], 1, "layer").segments(stage) == (
        Stage(3, 3),
        Stage(2, 2),
        Stage(1, 1),
    )


GOOD = json.loads(plan_of([(0, 3)], [(4, 5), (0, 3)], 2, "stage").to_json())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such plan file.*engine.plan"),
        ("{not json", "not a plan file"),
        ("[1, 2]", "not a plan file"),
        ("null", "not a plan file"),
        (json.dumps({**GOOD, "version": 99}), "version 99 is not 1"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "version"}), "not a plan file.*version"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "backward"}), "not a plan file.*backward"),
        (json.dumps({**GOOD, "forward": [[0]]}), "not a plan file"),
        (json.dumps({**GOOD, "forward": [["a", "b"]]}), "not a plan file"),
        (json.dumps({**GOOD, "forward": 7}), "not a plan file"),
        (json.dumps({**GOOD, "num_microbatches": None}), "not a plan file"),
        (b"\xff\xfe", "not a plan file"),
        ("[" * 100_000, "not a plan file"),
        # A number that would be rounded is not what whoever wrote it meant.
        (json.dumps({**GOOD, "forward": [[0, 3.5]]}), r"forward should be a list of stages.*\[\[0, 3.5\]\]"),
        (json.dumps({**GOOD, "forward": [[0, 1, 3]]}), "forward should be .*first layer, last layer"),
        (json.dumps({**GOOD, "backward": {"4": 5}}), "backward should be a list of stages"),
        (json.dumps({**GOOD, "num_microbatches": 2.5}), "num_microbatches should be a whole number, and is 2.5"),
        (json.dumps({**GOOD, "num_microbatches": True}), "num_microbatches should be a whole number, and is true"),
        (json.dumps({**GOOD, "recompute": "all"}), 'recompute should be stage or layer, and is "all"'),
        (json.dumps({**GOOD, "recompute": []}), "recompute should be stage or layer"),
        (json.dumps({**GOOD, "resident": "12"}), 'resident should be a list of whole numbers, and is "12"'),
        (json.dumps({**GOOD, "dispatch": [0, "1"]}), "dispatch should be a list of whole numbers"),
        (json.dumps({**GOOD, "dispach": [0, 0]}), "dispach: unknown key; did you mean `dispatch`"),
        (json.dumps({**GOOD, "micro_batchsize": 2}), "did you mean `micro_batch_size`"),
    ],
)
def test_a_faulty_plan_file_is_named(content, says, tmp_path):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=says) as caught:
        read_plan(path)
    assert str(path) in str(caught.value)


def test_a_folder_in_the_place_of_the_plan_file_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot be read as a plan file"):
        read_plan(tmp_path)


def test_what_else_a_plan_file_says_is_left_alone(tmp_path):
    path = tmp_path / "plan.json"
    about = {"micro_batch_size": 2, "rounds": 2, "predicted": None, "note": "of a run last week", "memory": {}}
    path.write_text(json.dumps({**GOOD, **about}))
    assert read_plan(path).num_microbatches == 2
    assert read_about(path)["micro_batch_size"] == 2


def test_plans_are_values():
    assert isinstance(hash(plan_of([(0, 3)], [(4, 5), (0, 3)], 2, "stage")), int)
    assert plan_of([], [(0, 5)], 1, "stage") == Plan((), (Stage(0, 5),), 1, "stage")
