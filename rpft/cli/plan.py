"""`rpft plan`: what a recipe would run as, what it takes and how fast it should be, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rpft.cli.output import write_output
from rpft.errors import EXIT_BAD_INPUT

if TYPE_CHECKING:
    from rpft.plan.predict import Prediction
    from rpft.recipe.schema import Recipe
    from rpft.train.planning import Planned


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
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, for programs.")] = False,
) -> None:
    """Plan RECIPE: stages, memory, predicted speed, what limits it. No weight is read, nothing is trained.

    Exit code: 0, or 2 where it does not fit; with --json `fits` says so and the code is 0.

    Examples:

        rpft plan recipe.yaml --out plan.json

        rpft plan recipe.yaml engine.vram_limit=16GiB

        rpft plan recipe.yaml --machine 8x4090
    """
    from rpft.recipe.load import load_recipe

    settings = load_recipe(recipe, overrides or [])
    planned = _planned(settings, machine)
    prediction = planned.full_prediction()
    text = planned.plan.to_json(**planned.about(prediction))
    if out is not None:
        write_output("--out", out, text + "\n")
    if as_json:
        typer.echo(text)
        return
    _show(planned, prediction)
    if not planned.fits:
        _say_what_would_fit(planned)
        raise typer.Exit(EXIT_BAD_INPUT)
    _say_what_is_faster(planned, prediction)
    if out is not None:
        typer.echo(f"{out}: the plan, for engine.plan={out}")


def _planned(settings: Recipe, machine: str | None) -> Planned:
    from rpft.cli.train import set_up_process

    set_up_process(settings)
    if machine is not None:
        from rpft.plan.machine import read_machine
        from rpft.train.planning import plan_for_machine

        return plan_for_machine(settings, read_machine(machine), machine)
    from rpft.train.prepare import plan_rows_here, set_up

    def say(line: str) -> None:
        typer.echo(line, err=True)

    bench = set_up(settings)
    # Without graphs no layer is compiled, and other lengths are soon measured.
    lengths = not bench.job.kernels.graphs
    return plan_rows_here(bench, lambda bench: bench.find_profile(say, needed=True, lengths=lengths))


def _show(planned: Planned, prediction: Prediction | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from rpft.plan.bill import gib
    from rpft.train.planning import MEMORY_NAMES

    console, plan = Console(highlight=False), planned.plan
    target = planned.target
    console.print(
        f"{target.num_workers} worker(s), {target.name}: {planned.rounds} round(s) a step, of"
        f" {plan.num_microbatches} microbatches each, of {planned.rows} row(s); recompute by {plan.recompute}"
    )
    if plan.dispatch:
        console.print(f"slots of a step go to workers {' '.join(map(str, plan.dispatch))}, not in turn")
    if planned.choices:
        console.print(f"chosen: {'; '.join(planned.choices)}")
    if plan.keep_bytes_per_token:
        console.print(f"the forward of a block keeps {plan.keep_bytes_per_token:,} bytes a token for its backward")
    stages = Table()
    stages.add_column("slot", justify="right")
    for title in ("kind", "layers"):
        stages.add_column(title)
    stages.add_column("weights up", justify="right")
    for number, stage in enumerate(plan.forward + plan.backward):
        ahead = number < len(plan.forward)
        kind = "forward" if ahead else "fused" if number == len(plan.forward) else "backward"
        layouts = [planned.layouts[layer] for layer in stage.layers]
        moved = sum(y.region_bytes - y.frozen_bytes * (y.layer in plan.resident) for y in layouts)
        stages.add_row(str(number), kind, f"{stage.first} to {stage.last}", gib(moved))
    console.print(stages)
    memory = Table()
    memory.add_column("memory")
    for title in ("takes", "there is"):
        memory.add_column(title, justify="right")
    limits = planned.limits
    parts = {"vram_bytes": planned.bill.device_parts, "host_bytes": planned.bill.host_parts}
    for name, size in planned.memory.items():
        limit = limits[name]
        mark = "" if limit is None or size <= limit else " [bold red]!![/]"
        memory.add_row(MEMORY_NAMES[name], gib(size), ("-" if limit is None else gib(limit)) + mark)
        for part, num_bytes in parts.get(name, {}).items():
            memory.add_row(f"  [dim]{part}[/]", f"[dim]{gib(num_bytes)}[/]", "")
    console.print(memory)
    if prediction is not None:
        console.print(
            f"predicted: {prediction.tokens_per_second:,.0f} tokens/s, {prediction.step_seconds:.3g} s a step;"
            f" limited by {prediction.limited_by}"
        )
        saved = ", ".join(
            f"{name} {100 * seconds / prediction.step_seconds:.0f}%"
            for name, seconds in sorted(prediction.saved_seconds.items(), key=lambda item: -item[1])
        )
        console.print(f"a step would be shorter, were it free, by: {saved}")


def _say_what_would_fit(planned: Planned) -> None:
    from rpft.plan.bill import gib
    from rpft.train.planning import MEMORY_NAMES
    from rpft.train.tries import less, smaller

    names = " and ".join(MEMORY_NAMES[name] for name in planned.short_of)
    typer.echo(f"error: this does not fit: too little {names}. What changes it most, each tried alone:", err=True)
    for tried in smaller(planned):
        now = tried.planned.memory
        saved = ", ".join(
            f"{MEMORY_NAMES[name]} {gib(now[name])}, {less(planned.memory[name] - now[name])}"
            for name in planned.short_of
        )
        typer.echo(f"  {tried.setting}: {saved}{'; that fits' if tried.planned.fits else ''}", err=True)


def _say_what_is_faster(planned: Planned, prediction: Prediction | None) -> None:
    from rpft.train.tries import faster, tokens_per_second

    if prediction is None:
        return
    if prediction.saved_seconds["memory"]:
        share = prediction.saved_seconds["memory"] / prediction.step_seconds
        typer.echo(f"with memory without end the best plan would save {100 * share:.0f}% of a step")
    found = faster(planned)
    if not found:
        typer.echo("none of the settings that were tried makes it faster")
    for tried in found:
        gain = tried.tokens_per_second / tokens_per_second(planned) - 1
        typer.echo(f"{tried.setting}: {100 * gain:.0f}% more tokens a second")
