"""Any two settings of different features stand together, or are refused by their keys: each pair is tried."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from support.covering import covering_array, pairs_in, pairs_to_cover
from support.pair_checks import check
from support.pairs import CONFIGS, EXCLUDED, FACTORS, allowed, words_of, write_rows
from support.recipes import Project

VALUES = {factor: list(values) for factor, values in FACTORS.items()}
ROWS = covering_array(VALUES, allowed, seed=1)
QUICK = (13, 47)
"""Of the default suite; the others take minutes."""


@pytest.fixture
def project_of(project: Any) -> Any:
    """project_of(family) -> the project of its tiny model, with rows of every format."""

    def of(family: str) -> Project:
        made = project(f"pairs {family}", family, **CONFIGS.get(family, {}))
        if not (made.folder / "train-text.jsonl").exists():
            write_rows(made.folder)
        return made

    return of


def test_every_pair_that_is_possible_stands_in_a_row_and_no_other() -> None:
    covered = {pair for row in ROWS for pair in pairs_in(row)}
    assert covered == pairs_to_cover(VALUES, allowed)
    assert len(ROWS) < 100


@pytest.mark.parametrize(
    "number",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(len(ROWS))],
)
def test_a_row_of_settings_trains_is_the_same_after_any_trouble_and_leaves_what_others_load(
    number: int, project_of: Any
) -> None:
    row = ROWS[number]
    print(row)
    check(row, project_of(row["family"]), number)


def refusals() -> Iterator[Any]:
    """(factor, value, other factor, its value, what is said), those of the default suite unmarked."""
    for one, values, other, others, said in EXCLUDED:
        for x, y in product(values, others):
            quick = x == values[-1] and y == others[0]
            yield pytest.param(one, x, other, y, said, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("one", "x", "other", "y", "said"), list(refusals()))
def test_a_pair_that_is_not_possible_is_refused_by_its_keys(
    one: str, x: str, other: str, y: str, said: str, project_of: Any
) -> None:
    row = {one: x, other: y}
    for factor, values in VALUES.items():
        if factor not in row:
            row[factor] = next(v for v in values if allowed(factor, v, one, x) and allowed(factor, v, other, y))
    made = project_of(row["family"])
    ran = made.train("refused", *words_of(row, made, 0))
    assert ran.code == 2, ran
    last = ran.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert said in last
    assert not (made.folder / "refused").exists()
