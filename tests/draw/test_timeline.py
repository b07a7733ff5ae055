"""Timelines: where blocks, labels and ticks stand, what is joined, and colours that everyone can tell apart."""

import re
from itertools import pairwise

import pytest

from rpft.draw.colours import KINDS, SHADES, ink_on, luminance, shade
from rpft.draw.page import PARTS
from rpft.draw.timeline import LABEL_WIDTHS, Block, Lane, Named, Ruler, axis, bars, fitted


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


FILLS = [*KINDS.values(), *(shade(kind, depth / 10) for kind in SHADES for depth in range(11))]


@pytest.mark.parametrize("fill", FILLS)
def test_what_is_written_on_a_fill_can_be_read(fill):
    ink = {"#000": "#000000", "#fff": "#ffffff"}[ink_on(fill)]
    assert contrast(fill, ink) >= 4.5


def test_forward_is_lighter_than_backward_whatever_the_layers_so_that_no_hue_is_needed():
    darkest = min(luminance(shade("forward", depth / 10)) for depth in range(11))
    lightest = max(luminance(shade("backward", depth / 10)) for depth in range(11))
    assert darkest > lightest + 0.05
    ramp = [luminance(shade("backward", depth / 10)) for depth in range(11)]
    assert ramp == sorted(ramp, reverse=True)


def test_parts_side_by_side_differ_in_lightness():
    assert all(contrast(a, b) > 1.2 for a, b in pairwise(PARTS))


@pytest.mark.parametrize("pixels", [None, 1000.0])
def test_a_block_stands_where_its_time_is(pixels):
    ruler = Ruler(10.0, 20.0, 50.0 if pixels else 0.0, pixels)
    assert ruler.x(15.0) == ("50.000%" if pixels is None else "550.0")
    assert ruler.width(10.0, 12.5) == ("25.000%" if pixels is None else "250.0")
    assert ruler.width(11.0, 11.0) != ("0.000%" if pixels is None else "0.0")  # still seen


def test_labels_of_a_picture_that_stretches_show_from_the_width_on_that_they_need():
    ruler = Ruler(0.0, 100.0)
    shown = [ruler.label_class(0.0, seconds, "12-15") for seconds in (20.0, 4.0, 1.0, 0.01)]
    assert shown[:1] == ["w600"]
    assert shown[1] in {f"w{width}" for width in LABEL_WIDTHS}
    assert int(shown[1][1:]) * 0.04 > 5 * 6 > LABEL_WIDTHS[LABEL_WIDTHS.index(int(shown[1][1:])) - 1] * 0.04 - 6
    assert shown[3] is None


def test_joined_blocks_are_as_pale_as_there_was_little_work_in_them():
    blocks = [Block("weights", at, at + 0.25) for at in range(1000)]
    [joined], closed = fitted([blocks], 1000.0, 1000.0, most=1)
    assert len(joined) == 1
    assert closed >= 0.75
    assert joined[0].busy == pytest.approx(0.25, rel=0.01)
    [bar] = bars(Lane(joined), Ruler(0.0, 1000.0), 0.0)
    assert 'opacity=".4"' in bar
    [whole], _ = fitted([[Block("weights", 0.0, 1.0), Block("weights", 1.0, 2.0)]], 2.0, 100.0)
    assert [(b.start_seconds, b.end_seconds, b.busy) for b in whole] == [(0.0, 2.0, 1.0)]


def test_what_can_be_pointed_at_says_more_and_what_is_faint_has_no_label():
    named = [Named(0.0, 5.0, "1-2", "#0072b2", 'a <b> & "c"'), Named(5.0, 10.0, "3-4", "#0072b2", "", faint=True)]
    drawn = "".join(bars(Lane([], named), Ruler(0.0, 10.0), 0.0, 20))
    assert '<title>a &lt;b&gt; &amp; "c"</title>' in drawn
    assert "1-2" in drawn
    assert "3-4" not in drawn


@pytest.mark.parametrize(("seconds", "unit"), [(0.01, "ms"), (18.0, "ms"), (90.0, "s"), (1e4, "s")])
def test_an_axis_has_about_ten_round_ticks_on_both_sides_of_its_zero(seconds, unit):
    ruler = Ruler(-0.1 * seconds, seconds, 0.0, 1000.0)
    parts = axis(ruler, 0.0, 0.0, 10.0)
    texts = [re.sub("<[^>]*>", "", part) for part in parts if part.startswith("<text")]
    assert 5 <= len(texts) <= 14
    assert f"0 {unit}" in texts
    values = [float(text.removesuffix(f" {unit}")) for text in texts]
    assert values[0] <= 0 < values[-1]
    [step] = {round(b - a, 6) for a, b in pairwise(values)}
    assert f"{step:e}"[0] in "125"
