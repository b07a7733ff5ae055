"""`rpft report`: a run as a page: its charts, a traced step, recipe, plan, machine, what it left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rpft.cli.output import check_output, write_output


def report(
    run: Annotated[Path, typer.Argument(help="The output directory of a run: finished, stopped or running.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Where to. Without it RUN/report.html.")
    ] = None,
    samples: Annotated[
        bool,
        typer.Option(
            "--samples",
            help="Have the model answer up to 4 rows as it was before training and as it is now, and show both. It"
            " is loaded twice, as by rpft generate; the answers stay in RUN/samples.json.",
        ),
    ] = False,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="DIR", help="For --samples: the base model, if not where the recipe says."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what the page says as JSON; a page is written with --html only.")
    ] = False,
) -> None:
    """Write a page about RUN that needs no other file. It reads the run's folder and changes nothing in the run.

    Examples:

        rpft report out/my-run

        rpft report out/my-run --html my-run.html

        rpft report out/my-run --samples

        rpft report out/my-run --json
    """
    from rpft.cli.train import quiet_libraries

    check_output("--html", html)
    quiet_libraries()
    from rpft.train.run_report import report_run

    if samples:
        from rpft.train.samples import ask_samples

        ask_samples(run, base, lambda line: typer.echo(line, err=True))
    found = report_run(run)
    path = html if html is not None or as_json else run / "report.html"
    if path is not None:
        from rpft.console.run_page import render_run

        write_output("--html", path, render_run(found))
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
        return
    totals = found.totals
    of = f" of {totals.num_steps}" if totals.num_steps else ""
    speed = f", {totals.tokens_per_second:,.0f} tokens/s" if totals.tokens_per_second else ""
    loss = f", loss {totals.late_loss:.4f}" if totals.late_loss is not None else ""
    evaluated = (
        f", lowest evaluation loss {totals.best_eval_loss:.4f}" if totals.best_eval_loss is not None else ""
    )
    typer.echo(f"{run}: {found.standing}, step {totals.steps}{of}{loss}{evaluated}{speed}")
    typer.echo(f"{path}: a page for a browser")
