"""Charts of lines: no spike flattens them, none is lost, and names of lines do not lie on one another."""

import math
import random
import re
from itertools import pairwise

import pytest
from support.pages import assert_whole_and_alone

from rpft.draw.chart import Chart, Line, Mark, draw, label_width
from rpft.draw.chart_style import MOST_LINES, STYLE
from rpft.draw.figures import count, short
from rpft.draw.page import page
from rpft.draw.scale import MOST_POINTS, Scale, fitting, middle_line, thinned


def noise(num_points, level=1.0):
    rng = random.Random(0)
    return [(float(i), level + rng.gauss(0, 0.05)) for i in range(num_points)]


def test_one_spike_does_not_stretch_the_axis_and_a_fall_at_the_start_is_shown_whole():
    falling = [1.0 + 2.6 * math.exp(-i / 60) for i in range(900)]
    calm, spiked = fitting(falling), fitting([*falling, 300.0])
    assert calm.high > falling[0]
    assert spiked.high == pytest.approx(calm.high)
    assert not spiked.holds(300.0)
    assert spiked.share(300.0) == 1.0


def test_with_few_figures_none_is_an_outlier():
    assert fitting([1.0, 1.1, 50.0]).holds(50.0)


@pytest.mark.parametrize("values", [[], [0.0], [3.0, 3.0], [-1.0, 2.0], [1e-9, 1e9]])
@pytest.mark.parametrize("log", [False, True])
def test_any_figures_have_a_scale_with_round_ticks(values, log):
    scale = fitting(values, log)
    ticks = scale.ticks()
    assert scale.low < scale.high
    assert 1 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks))
    assert all(scale.holds(tick) for tick in ticks)


def test_a_log_scale_has_its_decades_at_even_distances():
    scale = Scale(1.0, 100.0, log=True)
    assert scale.ticks() == [1.0, 10.0, 100.0]
    assert [scale.share(tick) for tick in scale.ticks()] == pytest.approx([0.0, 0.5, 1.0])
    assert scale.share(0.0) == 0.0


def test_many_points_become_few_and_every_spike_among_them_stays():
    points = noise(100_000)
    points[77_777] = (77_777.0, 9.0)
    points[5] = (5.0, -9.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert {points[77_777], points[5], points[0], points[-1]} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(points[:100]) == points[:100]


def test_the_middle_of_noise_is_a_median_that_no_spike_moves():
    points = noise(2000)
    points[1000] = (1000.0, 1e6)
    middle = middle_line(points)
    assert middle is not None
    assert all(abs(y - 1.0) < 0.06 for _, y in middle)
    assert all(abs(y - 1.0) < 0.03 for _, y in middle[100:])  # the end is no single figure
    assert (middle[0][0], middle[-1][0]) == (0.0, 1999.0)
    assert middle_line(points[:40]) is None


def drawn(chart):
    text = draw(chart, label_width([chart]))
    assert_whole_and_alone(page("a chart", [text], STYLE))
    return text


def test_eight_lines_that_end_alike_have_names_apart_each_with_its_own_colour_and_dash():
    lines = [Line(f"run {i}", [(0.0, 1.0), (10.0, 1.0 + i * 1e-3), (11.0, 1.0)], i) for i in range(MOST_LINES)]
    text = drawn(Chart("Loss", lines, short))
    places = [float(y) for y in re.findall(r"<text x='[0-9.]+' y='([0-9.]+)' class='name", text)]
    assert len(places) == MOST_LINES
    assert min(b - a for a, b in pairwise(places)) >= 12
    assert {f"class='line s{i}'" for i in range(MOST_LINES)} <= set(re.findall(r"class='line s[0-9]'", text))
    dashes = re.findall(r"\.s[0-9] \{[^}]*?(?:stroke-dasharray: ([^;]*))?; \}", STYLE)
    assert len(set(dashes)) == MOST_LINES


def test_what_is_beyond_the_axis_is_marked_and_said():
    points = noise(200)
    points[150] = (150.0, 80.0)
    text = drawn(Chart("Loss", [Line("", points, noisy=True)], short))
    assert "beyond the axis: 80 at step 150" in text
    assert text.count("class='bad'") == 1


def test_marks_stand_at_their_steps_and_names_that_would_collide_take_another_row():
    marks = [Mark(5.0, "smaller plan"), Mark(5.2, "back from 9"), Mark(3.0, "step 3 was skipped", "point")]
    text = drawn(Chart("Loss", [Line("", [(0.0, 1.0), (10.0, 2.0)])], short, marks=marks))
    rows = re.findall(r"y='([0-9.]+)' class='event'", text)
    assert len(set(rows)) == 2
    assert text.count("<line class='event'") == 2
    assert "step 3 was skipped" in text


def test_a_name_with_markup_in_it_is_text():
    text = drawn(Chart("<b>", [Line("<i>&'", [(0.0, 1.0), (1.0, 2.0)])], short, "<u>"))
    assert "<i>" not in text
    assert "<b>" not in text


def test_steps_are_whole_and_a_mark_beyond_the_line_has_its_place():
    text = drawn(Chart("Gradient norm", [Line("", [(1.0, 5.0)])], short, marks=[Mark(3.0, "skipped", "point")]))
    assert [said for said in re.findall(r"'middle'>([^<]*)<", text) if said != "step"] == ["1", "2", "3"]
    dot = float(re.search(r"<circle class='d0' cx='([0-9.]+)'", text)[1])
    assert float(re.search(r"<path class='bad' d='M([0-9.]+) ", text)[1]) > dot + 100


@pytest.mark.parametrize("points", [[], [(3.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)]])
def test_none_one_and_equal_figures_are_drawn(points):
    assert "nan" not in drawn(Chart("Loss", [Line("x", points)], short, log=True))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0"),
        (1.03456, "1.035"),
        (576.25, "576.2"),
        (35290.4, "35,290"),
        (2e-4, "2e-4"),
        (1.25e-5, "1.25e-5"),
        (8.5361e29, "8.536e29"),
    ],
)
def test_a_figure_is_said_in_four_digits(value, said):
    assert short(value) == said


def test_a_hundred_is_not_said_as_a_power_of_ten_however_few_the_digits():
    assert [short(value, 2) for value in (100, 1, 0.01)] == ["100", "1", "0.01"]


@pytest.mark.parametrize(
    ("number", "said"), [(2700, "2,700"), (576_000_000, "576 M"), (12_340_000_000, "12.34 B")]
)
def test_millions_are_not_told_to_the_last(number, said):
    assert count(number) == said
