"""`rpft plan`: what a recipe would run as, what it takes and how fast it should be, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rpft.cli.output import check_output, write_output
from rpft.errors import EXIT_BAD_INPUT

if TYPE_CHECKING:
    from rich.table import Table

    from rpft.recipe.schema import Recipe
    from rpft.train.plan_report import PlanReport, SlotReport


def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, as in engine.workers=4."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option("--machine", metavar="NAME|FILE", help="Plan for this machine, described and not at hand."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the plan; engine.plan takes the file.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page: a step as a picture, stages, memory."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, for programs.")] = False,
) -> None:
    """Plan RECIPE: stages, memory, predicted speed, what limits it. No weight is read, nothing is trained.

    Exit code: 0, or 2 where it does not fit; with --json `fits` says so and the code is 0.

    Examples:

        rpft plan recipe.yaml --out plan.json --html plan.html

        rpft plan recipe.yaml engine.vram_limit=16GiB

        rpft plan recipe.yaml --machine 8x4090
    """
    from rpft.recipe.load import load_recipe

    check_output("--out", out)
    check_output("--html", html)
    report = _report(load_recipe(recipe, overrides or []), machine)
    if out is not None:
        about = report.planned.about(report.prediction)
        write_output("--out", out, report.planned.plan.to_json(**about) + "\n")
    if html is not None:
        from rpft.console.plan_page import render_plan

        write_output("--html", html, render_plan(report))
    if as_json:
        typer.echo(report.as_json())
        return
    _show(report)
    if out is not None:
        typer.echo(f"{out}: the plan, for engine.plan={out}")
    if html is not None:
        typer.echo(f"{html}: a page for a browser")
    if not report.planned.fits:
        _say_what_would_fit(report)
        raise typer.Exit(EXIT_BAD_INPUT)
    _say_what_is_faster(report)


def _report(settings: Recipe, machine: str | None) -> PlanReport:
    from rpft.cli.train import set_up_process

    set_up_process(settings)
    from rpft.train.plan_report import report_plan

    if machine is not None:
        from rpft.plan.machine import read_machine
        from rpft.train.planning import plan_for_machine

        described = read_machine(machine)
        if settings.engine.workers is not None:
            described = described.with_workers(settings.engine.workers)
        return report_plan(plan_for_machine(settings, described, machine), described)
    from rpft.train.prepare import plan_rows_here, set_up

    def say(line: str) -> None:
        typer.echo(line, err=True)

    bench = set_up(settings)
    # Without graphs no layer is compiled, and other lengths are soon measured.
    lengths = not bench.job.kernels.graphs
    return report_plan(plan_rows_here(bench, lambda bench: bench.find_profile(say, needed=True, lengths=lengths)))


def _show(report: PlanReport) -> None:
    from rich.console import Console

    from rpft.train.plan_report import about_memory

    console, prediction = Console(highlight=False), report.prediction

    def line(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    line(f"{report.model_name} on {report.machine_name}: {report.headline}")
    line(f"recompute by {report.planned.plan.recompute}")
    if report.planned.choices:
        line(f"chosen: {'; '.join(report.planned.choices)}")
    for _, said in about_memory(report.planned):
        line(said)
    if report.planned.plan.dispatch:
        line(f"slots of a step go to workers {' '.join(map(str, report.planned.plan.dispatch))}, not in turn")
    kept = report.planned.plan.keep_bytes_per_token
    if kept:
        line(f"the forward of a block keeps {kept:,} bytes a token for its backward")
    console.print(_stages(report.slots))
    console.print(_memory(report))
    line(
        f"predicted: {prediction.tokens_per_second:,.0f} tokens/s, {prediction.step_seconds:.3g} s a step, workers"
        f" idle {prediction.bubble:.1%}; limited by {prediction.limited_by}"
    )
    saved = ", ".join(
        f"{name} {100 * seconds / prediction.step_seconds:.0f}%"
        for name, seconds in sorted(prediction.saved_seconds.items(), key=lambda item: -item[1])
    )
    line(f"a step would be shorter, were it free, by: {saved}")


def _stages(slots: Sequence[SlotReport]) -> Table:
    """A line for slots in a row that are alike."""
    from rich.box import SIMPLE
    from rich.table import Table

    from rpft.draw.figures import duration
    from rpft.plan.bill import gib

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("slots", justify="right", no_wrap=True)
    for title in ("kind", "layers"):
        table.add_column(title, no_wrap=True)
    for title in ("weights", "compute", "longest copy"):
        table.add_column(title, justify="right", no_wrap=True)
    for _, alike in groupby(slots, key=lambda slot: (slot.kind, len(slot.stage.layers), slot.weights_bytes)):
        some = list(alike)
        first, last = some[0], some[-1]
        layers = [layer for slot in some for layer in slot.stage]
        each = f", {len(first.stage.layers)} each" if len(some) > 1 else ""
        copy = first.longest_copy
        table.add_row(
            _span(first.slot, last.slot),
            first.kind,
            _span(min(layers), max(layers)) + each,
            gib(first.weights_bytes),
            duration(first.seconds["compute"]),
            f"{copy} {duration(first.seconds[copy])}",
        )
    return table


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _memory(report: PlanReport) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    from rpft.plan.bill import gib

    table = Table(box=SIMPLE)
    table.add_column("memory")
    for title in ("takes", "there is"):
        table.add_column(title, justify="right")
    for kind in report.memory.values():
        there_is = "-" if kind.limit is None else gib(kind.limit)
        table.add_row(kind.name, gib(kind.takes), there_is + (" [bold red]!![/]" if kind.short else ""))
        for part, num_bytes in kind.parts.items():
            if num_bytes:
                table.add_row(f"  [dim]{part}[/]", f"[dim]{gib(num_bytes)}[/]", "")
    return table


_ELSEWHERE = {
    "disk_bytes": " (another output_dir may have room)",
    "offload_bytes": " (a folder of another disk may have room)",
}


def _say_what_would_fit(report: PlanReport) -> None:
    from rpft.plan.bill import gib
    from rpft.train.tries import less

    memory, short = report.memory, report.planned.short_of
    names = " and ".join(memory[name].name + _ELSEWHERE.get(name, "") for name in short)
    if not report.changes:
        rest = "" if _ELSEWHERE.keys() >= set(short) else ": it takes a machine with more, or a smaller model"
        typer.echo(
            f"error: this does not fit: too little {names}. No setting that was tried needs less{rest}", err=True
        )
        return
    enough = "" if any(change.fits for change in report.changes) else ", which is not enough"
    typer.echo(f"error: this does not fit: too little {names}. What changes it most{enough}:", err=True)
    for change in report.changes:
        saved = ", ".join(
            f"{memory[name].name} {gib(change.memory[name])}, {less(memory[name].takes - change.memory[name])}"
            for name in short
        )
        typer.echo(f"  {change.setting}: {saved}{'; that fits' if change.fits else ''}", err=True)


def _say_what_is_faster(report: PlanReport) -> None:
    saved = report.prediction.saved_seconds["memory"]
    if saved:
        share = saved / report.prediction.step_seconds
        typer.echo(f"with memory without end the best plan would save {100 * share:.0f}% of a step")
    if not report.changes:
        typer.echo("none of the settings that were tried makes it faster")
    for change in report.changes:
        typer.echo(f"{change.setting}: {100 * change.gain:.0f}% more tokens a second")
