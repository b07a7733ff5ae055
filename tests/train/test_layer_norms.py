"""layer_norms.jsonl: the norm of each layer's gradient, of few enough steps, whatever becomes of the run."""

import json
import math

import pytest

from rpft.train.layer_norms import LayerNormsFile


def steps(file):
    return [line["step"] for line in file.lines()]


def test_a_file_of_any_run_has_at_most_so_many_lines_evenly_spaced(tmp_path):
    file = LayerNormsFile(tmp_path, most_lines=10)
    for step in range(1, 201):
        file.append(step, [1.0])
        found = steps(file)
        stride = file.stride(step)
        assert found == list(range(stride, step + 1, stride))
        assert len(found) <= 10
    assert file.stride(200) == 32


def test_a_run_that_goes_back_notes_the_same_steps_again(tmp_path):
    file = LayerNormsFile(tmp_path, most_lines=10)
    for step in range(1, 41):
        file.append(step, [float(step)])
    with file.path.open("a") as half:
        half.write('{"step": 41, "no')
    before = file.lines()
    file.keep_until(21)
    assert steps(file) == [4, 8, 12, 16, 20]
    for step in range(22, 41):
        file.append(step, [float(step)])
    assert file.lines() == before


def test_what_is_no_number_is_null_and_a_full_disk_stops_nothing(tmp_path):
    file = LayerNormsFile(tmp_path)
    file.append(1, [0.123456, math.nan, None, math.inf])
    assert file.lines() == [{"step": 1, "norms": [0.1235, None, None, None]}]
    gone = LayerNormsFile(tmp_path / "nowhere")
    gone.append(1, [1.0])
    gone.keep_until(0)
    assert gone.lines() == []


@pytest.mark.parametrize("adapter", [False, True])
def test_the_layers_of_a_run_make_up_its_gradient_norm(adapter, project):
    sections = {"train": {"max_steps": 3}, "engine": {"workers": 2}}
    lora = {"adapter": {"type": "lora", "r": 2}} if adapter else {}
    made = project(f"norms {adapter}", "qwen3", sections={**sections, **lora})
    folder = made.train_well("out").folder
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = LayerNormsFile(folder).lines()
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line, step in zip(lines, (m for m in metrics if "loss" in m), strict=True):
        norms = line["norms"]
        assert ([norms[0], norms[-1]] == [None, None]) == adapter, "an adapter trains neither embedding nor head"
        assert all(norms[1:-1])
        assert math.hypot(*(norm for norm in norms if norm)) == pytest.approx(step["grad_norm"], rel=1e-3)
