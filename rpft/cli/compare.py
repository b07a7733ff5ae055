"""`rpft compare`: runs side by side: where their recipes differ, final figures, the same charts on one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rpft.cli.output import check_output, write_output

if TYPE_CHECKING:
    from rpft.train.run_compare import Comparison


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Output directories of runs, finished or not.")
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write a page: the same charts with a line a run, and tables."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON, for programs.")] = False,
) -> None:
    """Compare runs: the recipe keys in which they differ, final figures, and with --html charts with a line a run.

    Examples:

        rpft compare out/lora-16 out/lora-64 --html ranks.html

        rpft compare out/lora-16 out/lora-64 --json
    """
    from rpft.cli.train import quiet_libraries

    check_output("--html", html)
    quiet_libraries()
    from rpft.draw.chart_style import MOST_LINES
    from rpft.train.run_compare import read_runs

    compared = read_runs(runs, MOST_LINES)
    if html is not None:
        from rpft.console.compare_page import render_comparison

        write_output("--html", html, render_comparison(compared))
    if as_json:
        typer.echo(json.dumps(compared.as_dict(), indent=1))
        return
    _show(compared)
    if html is not None:
        typer.echo(f"{html}: a page for a browser")


def _show(compared: Comparison) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rpft.console.compare_page import final_figures, said_of_key

    console = Console(highlight=False)
    figures = Table(box=SIMPLE, padding=(0, 1, 0, 0), title="final figures", title_justify="left")
    figures.add_column("")
    recipes = Table(box=SIMPLE, padding=(0, 1, 0, 0), title="where the recipes differ", title_justify="left")
    recipes.add_column("key", overflow="fold")
    for name in compared.runs:
        figures.add_column(Text(name), justify="right", overflow="fold")
        recipes.add_column(Text(name), overflow="fold")
    for name, said, best in final_figures(compared):
        cells = (Text(f"* {text}" if good else text) for text, good in zip(said, best, strict=True))
        figures.add_row(Text(name), *cells)
    for key, values in compared.differing.items():
        recipes.add_row(Text(key), *(Text(said_of_key(value)) for value in values))
    console.print(figures)
    console.print("*: the best of them", markup=False)
    if compared.differing:
        console.print(recipes)
    else:
        console.print("the recipes differ in nothing but output_dir", markup=False)
    for caution in compared.cautions:
        console.print(f"note: {caution}", markup=False, soft_wrap=True)
