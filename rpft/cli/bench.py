"""`rpft bench`: schedules held against one another in the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rpft.plan.cases import Played

_COLUMNS = {
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "interleaved_1f1b": "1F1B,\ninter-\nleaved",
    "looped_bfs": "looped,\nbreadth\nfirst",
    "round_pipe_sync": "Round-\nPipe,\nexact",
    "round_pipe_async": "Round-\nPipe,\ndelayed",
}


def bench(
    simulate: Annotated[
        Path,
        typer.Option("--simulate", metavar="FILE", help="A costs file: JSON, its form is in docs/planning.md."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Play the schedules of a costs FILE: how long a step takes, and how much of it the workers are idle.

    Example:

        rpft bench --simulate costs.json
    """
    from rpft.plan.cases import play, read_cases

    played = {name: play(case) for name, case in read_cases(simulate).items()}
    if as_json:
        import dataclasses
        import json

        cases = {name: dataclasses.asdict(result) for name, result in played.items()}
        typer.echo(json.dumps({"cases": cases}, indent=1))
        return
    from rich.console import Console

    Console().print(_table(played))


def _table(played: dict[str, Played]):  # type: ignore[no-untyped-def]
    from rich.table import Table

    table = Table(title="milliseconds a step, and how much of the workers' time is idle")
    table.add_column("case", no_wrap=True)
    for title in _COLUMNS.values():
        table.add_column(title, justify="right")
    for name, result in played.items():
        cells = (f"{result.makespan_ms[key]:,.0f}\n{result.bubble_percent[key]:.1f}%" for key in _COLUMNS)
        table.add_row(name, *cells)
    return table
