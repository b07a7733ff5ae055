"""docs/hardware.md: its tables are those of the planner, and hold every model and machine that is named."""

from __future__ import annotations

import re

import pytest
import what_fits
from support.docs import ROOT

PAGE = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")


def rows(name: str) -> list[list[str]]:
    """Cells of the table between the marks of that name, without its head."""
    match = re.search(rf"<!-- {name} -->(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert match is not None
    lines = [line for line in match[1].strip().splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_model_is_there_in_every_way_and_on_every_machine() -> None:
    fits, speed = rows("fits"), rows("speed")
    models = [row[0].split(" ")[0] for row in fits if row[0]]
    assert models == list(what_fits.MODELS)
    assert [row[1] for row in fits] == list(what_fits.METHODS) * len(models)
    assert [row[0] for row in speed[::2]] == models
    assert {len(row) for row in speed} == {2 + len(what_fits.MACHINES)}
    assert re.search(r"<!-- made -->\n\nMade on \d{4}-\d\d-\d\d with rpft \S+ by `python scripts/", PAGE)


def test_the_bill_of_an_8b_in_full_is_the_one_on_the_page() -> None:
    job = what_fits.make_job("llama-3.1-8b", "full", 1, 4096, what_fits.MICROBATCHES)
    host, device = what_fits.needed_bytes(job, 4096, int(24 * what_fits.LEFT_OF_VRAM * 2**30), 1 << 60)
    said = next(row[2] for row in rows("fits") if row[0].startswith("llama-3.1-8b"))
    message = "make the tables again: python scripts/what_fits.py --write docs/hardware.md"
    assert host / 2**30 == pytest.approx(float(said.removesuffix(" GiB")), rel=0.03), message
    assert device < 24 * 2**30


@pytest.mark.slow
def test_the_rows_of_two_models_are_what_the_planner_says_now() -> None:
    models = ("qwen3-1.7b", "llama-3.1-8b")
    made = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in what_fits.fits_table(models).splitlines()
    ]
    assert made[2:] == rows("fits")[: len(made) - 2]
