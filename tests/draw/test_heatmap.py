"""Fields of colours: any number of rows and columns, figures that are missing, one scale for several pictures."""

import re

import pytest
from support.pages import assert_whole_and_alone, visible

from rpft.draw.chart_style import STYLE
from rpft.draw.heatmap import COLOURS, Heatmap
from rpft.draw.page import page


def heat(rows, columns, value=lambda row, column: 1.0 + row + column):
    names = [f"row {row}" for row in range(rows)]
    return Heatmap("Norms", names, [(c + 1, [value(row, c) for row in range(rows)]) for c in range(columns)])


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 7), (82, 1000)])
def test_any_size_is_one_whole_picture_that_stays_small(rows, columns):
    drawn = heat(rows, columns).draw()
    assert_whole_and_alone(page("t", [drawn], STYLE))
    assert len(drawn) < 150_000
    assert drawn.count("<title>") == rows
    widths = [float(width) - 0.3 for width in re.findall(r"M[\d. ]+h([\d.]+)v", drawn)]
    assert sum(widths) == pytest.approx(rows * 548, rel=0.01), "every row is drawn to its end"


def test_the_lowest_figure_has_the_first_colour_and_the_highest_the_last():
    drawn = heat(1, 3, lambda row, column: 10.0**column).draw()
    fills = re.findall(r"<path fill='(#\w+)'", drawn)
    assert fills == [COLOURS[0], COLOURS[5], COLOURS[-1]], (
        "the logarithm in the middle is the colour in the middle"
    )
    assert re.findall(r"<path fill='(#\w+)'", heat(1, 1).draw((1e-3, 1.0))) == [COLOURS[-1]], (
        "a scale that is given"
    )


def test_what_is_missing_is_left_out_and_nothing_at_all_is_no_picture():
    assert heat(2, 3, lambda row, column: None).draw() == ""
    assert Heatmap("Norms", [], []).draw() == Heatmap("Norms", [], []).draw((1.0, 2.0)) == ""
    drawn = heat(2, 3, lambda row, column: None if row else 0.5).draw()
    assert "row 1: none" in drawn
    assert "row 0: first 0.5, median 0.5, last 0.5; highest 0.5 at step 1" in drawn
    assert {"row 0", "row 1"} <= set(re.findall(r">(row \d)<", drawn)), visible(drawn)
