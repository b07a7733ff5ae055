"""`rpft plan --html`: a page that needs no other file, says what the plan says, and can be read in a browser."""

import json
import re

import pytest
from support.pages import assert_whole_and_alone, in_browser, needs_browser
from support.recipes import make_project, run_rpft

from rpft.console.plan_timeline import draw_step
from rpft.draw.figures import duration
from rpft.draw.page import page
from rpft.plan.costs import LayerLoad
from rpft.plan.plan import Plan, Stage
from rpft.plan.playback import play_back
from rpft.plan.rates import ASSUMED_RATES
from rpft.plan.step_shape import StepShape


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(the page, the plan as JSON) of a tiny model, LoRA, on a machine that is described."""
    folder = tmp_path_factory.mktemp("page")
    sections = {"adapter": {"type": "lora", "r": 4}, "engine": {"workers": None}}
    made = make_project(folder, "qwen3", eval_rows=0, sections=sections)
    path = folder / "plan.html"
    ran = run_rpft("plan", str(made.recipe), "--machine", "2x5090", "--html", str(path), "--json")
    assert ran.code == 0, ran.err
    return path, json.loads(ran.out)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The page of 70 layers on 8 workers: 3 layers a forward stage, one a backward stage, 2 rounds of 16."""
    load = LayerLoad(0.05, 0.15, weight_bytes=10**9, gradient_bytes=10**9, num_trained=5 * 10**8)
    forward = tuple(Stage(first, min(first + 2, 68)) for first in range(0, 69, 3))
    plan = Plan(forward, tuple(Stage(layer, layer) for layer in range(69, -1, -1)), 16, "layer")
    played = play_back(plan, StepShape([load] * 70, 4096, 4 * 10**7, 8, 2, False), ASSUMED_RATES)
    path = tmp_path_factory.mktemp("large") / "large.html"
    path.write_text(page("large", [f"<section>{draw_step(played)}</section>"]), encoding="utf-8")
    return path


@pytest.mark.parametrize("which", ["written", "large"])
def test_the_page_needs_no_other_file_and_no_script_and_is_whole(which, request):
    made = request.getfixturevalue(which)
    text = (made[0] if isinstance(made, tuple) else made).read_text(encoding="utf-8")
    assert_whole_and_alone(text)


def test_the_page_says_what_the_plan_says(written):
    path, plan = written
    text = path.read_text(encoding="utf-8")
    visible = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text))
    assert f"{plan['predicted']['tokens_per_second']:,.0f}" in visible
    assert f"{plan['predicted']['bubble_percent']:.1f}%" in visible
    for said in (
        "It fits",
        plan["predicted"]["limited_by"],
        "LoRA of rank 4",
        "2 x RTX 5090",
        "worker 1",
        "CPU: update",
    ):
        assert said in visible
    for slot in plan["slots"]:
        first, last = slot["layers"]
        assert f"{slot['slot']} {slot['kind']} {first if first == last else f'{first} to {last}'} " in visible
        assert duration(slot["seconds"]["compute"]) in visible
    for parts in plan["memory_parts"].values():
        assert all(name in visible for name, size in parts.items() if size)
    assert all(version in visible for version in plan["versions"].values())
    assert "adapter:" in text  # the whole recipe


def test_everything_on_the_page_is_in_the_json_too(written):
    plan = written[1]
    assert plan.keys() >= {
        *("slots", "changes", "machine", "recipe", "versions", "short_of", "memory_parts", "memory_limits"),
        *("forward", "backward", "num_microbatches", "rounds", "recompute", "predicted", "memory", "fits"),
    }
    assert [slot["layers"] for slot in plan["slots"]] == plan["forward"] + plan["backward"]
    for key, parts in plan["memory_parts"].items():
        assert sum(parts.values()) == plan["memory"][key]
    assert set(plan["slots"][0]["seconds"]) == {
        *("compute", "weights_up", "activations_up", "activations_down", "gradients_down")
    }
    assert plan["short_of"] == []
    assert plan["machine"]["description"]["gpus"][0]["name"] == "RTX 5090"


def test_seventy_layers_on_eight_workers_make_a_small_page_with_every_slot_named(large):
    text = large.read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert text.count("<title>") >= 2 * 93
    for worker in range(8):
        assert f"worker {worker}" in text
    for first in range(0, 69, 3):
        assert f"forward, layers {first} to {first + 2} (" in text
    assert "fused, layer 69 (" in text
    for layer in range(69):
        assert f"backward, layer {layer} (" in text


def test_a_plan_that_does_not_fit_says_so_first_and_what_would(tmp_path):
    made = make_project(tmp_path, "qwen3", eval_rows=0)
    path = tmp_path / "plan.html"
    words = ["--machine", "1x4060ti", "engine.ram_limit=1GiB", "--html", str(path)]
    ran = run_rpft("plan", str(made.recipe), *words)
    assert ran.code == 2
    text = path.read_text(encoding="utf-8")
    assert "It does not fit. RAM:" in text
    assert "What needs less memory" in text
    assert "class='over'" in text


@pytest.mark.parametrize("option", ["--html", "--out"])
def test_a_file_that_cannot_be_there_is_refused_before_anything_is_planned(option, tmp_path):
    ran = run_rpft("plan", "no.yaml", option, str(tmp_path / "none" / "plan"))
    assert (ran.code, "there is no folder" in ran.err) == (2, True)
    ran = run_rpft("plan", "no.yaml", option, str(tmp_path))
    assert (ran.code, "that is a folder" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 s"), (1.2345, "1.23 s"), (82.2, "82.2 s"), (1234, "1,234 s"), (2e-4, "200 µs")]
)
def test_a_time_is_said_in_the_unit_that_reads_best(seconds, said):
    assert duration(seconds) == said


_MEASURE = """
const texts = [...document.querySelectorAll('.timeline svg text')].filter(t => t.getBoundingClientRect().width);
const widths = [...document.querySelectorAll('.plot .slot')].map(s => s.getBoundingClientRect());
document.title = JSON.stringify({
  page: document.documentElement.scrollWidth, window: innerWidth,
  smallest: Math.min(...texts.map(t => parseFloat(getComputedStyle(t).fontSize))), texts: texts.length,
  labels: texts.filter(t => /^[0-9]+(-[0-9]+)?$/.test(t.textContent) && t.className.baseVal).length,
  narrowest: Math.min(...widths.map(w => w.width)), slots: widths.length,
  high: Math.max(...[...document.querySelectorAll('.timeline')].map(t => t.getBoundingClientRect().height)),
  background: getComputedStyle(document.body).backgroundColor});
"""


def measured(path, tmp_path, width, zoom=1, dark=False):
    """What a browser makes of the page."""
    text = path.read_text(encoding="utf-8").replace("</body>", f"<script>{_MEASURE}</script></body>")
    if zoom != 1:
        text = text.replace("id='zoom1' checked", "id='zoom1'").replace(
            f"id='zoom{zoom}'", f"id='zoom{zoom}' checked"
        )
    return in_browser(text, tmp_path, width, dark)


@needs_browser
@pytest.mark.parametrize("width", [1280, 800])
def test_in_a_browser_nothing_is_wider_than_the_window_and_no_text_is_small(width, written, large, tmp_path):
    for path in (written[0], large):
        found = measured(path, tmp_path, width)
        assert found["background"] == "rgb(246, 247, 248)"
        assert found["page"] <= found["window"] + 1
        assert found["smallest"] >= 10
        assert found["high"] < 700


@needs_browser
def test_in_a_browser_more_slots_are_labelled_the_further_one_zooms(large, tmp_path):
    near = measured(large, tmp_path, 1280)
    far = measured(large, tmp_path, 1280, zoom=8)
    assert far["narrowest"] > 4 * near["narrowest"] > 4
    assert far["labels"] > near["labels"]
    assert far["labels"] >= 2 * 93  # every slot of the step
    assert far["page"] <= far["window"] + 1


@needs_browser
def test_in_a_browser_the_page_is_dark_where_one_wants_it(large, tmp_path):
    assert measured(large, tmp_path, 800, dark=True)["background"] == "rgb(18, 21, 24)"
