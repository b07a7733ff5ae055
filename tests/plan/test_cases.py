"""Costs files: read and played by `rpft bench`, and what is said about faulty ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rpft.cli import _run
from rpft.errors import UserError
from rpft.plan.cases import read_cases

SMALL = {
    "workers": 2,
    "microbatches": 4,
    "round": 2,
    "cases": {
        "tiny": {
            "layers": 4,
            "layer_forward": 1,
            "layer_backward": 2.0,
            "head_forward": 1,
            "head_backward": 2,
            "hop": 0,
            "one_per_gpu": [2, 2],
            "looped": [1, 1, 1, 1],
            "forward": [2, 1],
            "backward": [1, 1, 2],
        }
    },
}


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"

    def write(content):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_bench_gives_makespans_and_bubbles_for_programs(costs, capsys):
    assert _run(["bench", "--simulate", str(costs(SMALL)), "--json"]) == 0
    (name, case), *others = json.loads(capsys.readouterr().out)["cases"].items()
    assert (name, others) == ("tiny", [])
    assert {"gpipe", "one_f_one_b", "looped_bfs", "round_pipe"} <= set(case["makespan_ms"])
    # The first worker has 2 + 6 a microbatch, the second 3 + 8 and the first microbatch's forward to wait for.
    assert case["makespan_ms"]["gpipe"] == 2 + 4 * 11 + 6
    for schedule, share in case["bubble_percent"].items():
        assert 0 <= share < 100, schedule


def test_bench_prints_a_table_for_people(costs, capsys):
    assert _run(["bench", "--simulate", str(costs(SMALL))]) == 0
    out = capsys.readouterr().out
    assert "tiny" in out
    assert "GPipe" in out


def test_a_faulty_file_ends_with_the_exit_code_of_bad_input(costs, capsys):
    path = costs("{")
    assert _run(["bench", "--simulate", str(path), "--json"]) == 2
    assert str(path) in capsys.readouterr().err


def without(key):
    return {k: v for k, v in SMALL.items() if k != key}


WORK = ("layer_forward", "layer_backward", "head_forward", "head_backward")


def changed(**values):
    return {**SMALL, "cases": {"tiny": {**SMALL["cases"]["tiny"], **values}}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a costs file: it should be JSON"),
        ("[1]", "the file should be an object"),
        (without("workers"), "workers: missing"),
        (without("cases"), "cases: missing"),
        ({**SMALL, "cases": {}}, "cases: .*should be an object"),
        ({**SMALL, "cases": {"tiny": 3}}, "cases.tiny should be an object"),
        ({**SMALL, "workers": 0}, "workers: 0 should be a whole number of at least 1"),
        ({**SMALL, "workers": True}, "workers: true should be"),
        ({**SMALL, "round": 3}, "round: 3 must divide microbatches, 4"),
        (changed(layers="4"), 'cases.tiny.layers: "4" should be'),
        (changed(hop=-1), "cases.tiny.hop: -1 should be milliseconds"),
        (changed(layer_forward=None), "cases.tiny.layer_forward: null"),
        (changed(looped=[]), r"cases.tiny.looped: \[\] should be a list"),
        (changed(looped=[1, 1, 1]), "cases.tiny.looped: the stages have 3 layers, not 4"),
        (changed(one_per_gpu=[4]), "cases.tiny.one_per_gpu: 1 stages for 2 workers"),
        (changed(forward=[2, 2]), "cases.tiny.forward: the stages have 4 layers, not 4, less the 1 of the fused"),
        (changed(hop=10**400), "cases.tiny.hop: 10*.* should be milliseconds"),
        (changed(layer_forward=1e308), "cases.tiny.layer_forward: .* should be milliseconds, 0 to 1e12"),
        (changed(**dict.fromkeys(WORK, 0)), "cases.tiny.layer_forward: .*head_backward are all 0"),
        ("[" * 100_000, "not a costs file"),
        (changed(backward=[1, 0, 3]), "cases.tiny.backward: a stage without layers"),
    ],
)
def test_a_faulty_costs_file_is_named_with_the_key(content, says, costs):
    path = costs(content)
    with pytest.raises(UserError, match=says) as caught:
        read_cases(path)
    assert str(caught.value).startswith(str(path))


def test_a_costs_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="no such costs file"):
        read_cases(Path(tmp_path / "none.json"))


def test_costs_are_played_without_torch():
    code = "import sys, rpft.plan.cases; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
