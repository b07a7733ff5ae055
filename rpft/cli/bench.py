"""`rpft bench`: how fast a recipe is on this machine, and schedules held against one another in the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rpft.cli.output import check_output, write_output
from rpft.errors import EXIT_BAD_INPUT, UserError

if TYPE_CHECKING:
    from rich.table import Table

    from rpft.plan.cases import Played
    from rpft.plan.compare import Compared
    from rpft.train.bench import Measured
    from rpft.train.bench_workers import Failed

_COLUMNS = {
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "interleaved_1f1b": "1F1B,\ninter-\nleaved",
    "looped_bfs": "looped,\nbreadth\nfirst",
    "round_pipe_sync": "Round-\nPipe,\nexact",
    "round_pipe_async": "Round-\nPipe,\ndelayed",
}

_NAMES = {
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "looped_bfs": "looped breadth-first",
    "mobius": "swapped, as Mobius",
    "round_pipe_sync": "RoundPipe, exact",
    "round_pipe_async": "RoundPipe, delayed",
    "rpft_sync": "rpft, exact",
    "rpft_delayed": "rpft, delayed",
}

_DEFAULT_MODEL = "qwen3-32b"

_STEPS = 4
"""Of a window: as many as the prediction takes its mean from."""


PRINTED = "-"
"""The file of ``--json`` that stands for standard output."""


class BenchCommand(TyperCommand):
    """Lets ``--json`` stand alone, for JSON that is printed, or before the file that gets it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Gives a lone ``--json`` its value, so that it does not take an option or a change for a file."""
        given: list[str] = []
        for number, word in enumerate(args):
            given.append(word)
            following = args[number + 1] if number + 1 < len(args) else ""
            if word == "--json" and (not following or following.startswith("--") or "=" in following):
                given.append(PRINTED)
        return super().parse_args(ctx, given)


def bench(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe: a YAML file, whose run is timed on this machine.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, as in train.micro_batch_size=4."),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option("--workers", metavar="N[,N]...", help="Numbers of workers [1, 2, 4 ... all]."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=2, help=f"Steps of a window beside its first [{_STEPS}].")
    ] = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            "--simulate",
            metavar="FILE|MACHINE",
            help="In the place of a recipe. A costs file: JSON, its form is in docs/planning.md; or a machine, as"
            " in 8x4090 or mine.yaml.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|FOLDER|RECIPE",
            help=f"On a machine: a shipped shape ({_DEFAULT_MODEL} if left out), a folder with a config.json, or a"
            " recipe, which brings its own microbatches.",
        ),
    ] = None,
    sequence: Annotated[int | None, typer.Option("--sequence", min=1, help="Tokens of a line [2048].")] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Lines of a microbatch [4].")] = None,
    microbatches: Annotated[int | None, typer.Option("--microbatches", min=1, help="Of a step [16].")] = None,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="[FILE]", help="JSON, for programs: into this file beside the table, or printed."
        ),
    ] = None,
) -> None:
    """Time the run of RECIPE on 1 to all workers, against its prediction; or, with --simulate, play schedules.

    A run is timed over windows of its first steps, from rest to rest. No file is written but that of --json, and
    the profile of the layers in the cache. Exit code: 0, or 2 where no number of workers could be measured.

    Examples:

        rpft bench recipe.yaml --workers 1,2 --json bench.json

        rpft bench recipe.yaml engine.vram_limit=24GiB

        rpft bench --simulate costs.json

        rpft bench --simulate 8x4090

        rpft bench --simulate 4x3090 --model llama-3.1-8b --microbatches 32
    """
    sizes = {"--sequence": sequence, "--rows": rows, "--microbatches": microbatches}
    of_schedules = {"--model": model, **sizes}
    of_runs = {"RECIPE": recipe, "--workers": workers, "--steps": steps}
    if simulate is not None:
        _refuse(of_runs, "cannot be had with --simulate, which runs nothing")
        _simulate(simulate, model, sizes, json_file)
    elif recipe is None:
        raise UserError(
            "give a recipe, whose run is timed here, or --simulate with a costs file or a machine, as in"
            " `rpft bench --simulate 8x4090`"
        )
    else:
        _refuse(of_schedules, "can be had with --simulate only: a recipe says it itself")
        _run(recipe, overrides or [], workers, steps or _STEPS, json_file)


def _refuse(options: dict[str, Any], why: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UserError(f"{' and '.join(given)} {why}")


def _run(path: Path, overrides: list[str], workers: str | None, steps: int, json_file: str | None) -> None:
    from rpft.recipe.load import load_recipe

    file = None if json_file in (None, PRINTED) else Path(json_file)
    check_output("--json", file)
    counts = None if workers is None else _counts(workers)
    recipe = load_recipe(path, overrides)
    from rpft.cli.train import set_up_process
    from rpft.train import bench_workers

    def say(line: str) -> None:
        typer.echo(line, err=True)

    load = bench_workers.load_average()
    busy = bench_workers.not_quiet(load)
    if busy is not None:
        say(f"warning: {busy}")
    counts = bench_workers.default_workers(recipe) if counts is None else counts
    results = bench_workers.bench(recipe, counts, steps, set_up_process, say)
    if json_file is not None:
        about = {"recipe": str(path), "overrides": overrides, "steps": steps, "load_average": load}
        text = bench_workers.as_json(about, results)
        if file is None:
            typer.echo(text)
        else:
            write_output("--json", file, text + "\n")
    if json_file != PRINTED:
        _show(recipe.model.path, results, steps)
    if all(isinstance(result, bench_workers.Failed) for result in results):
        raise typer.Exit(EXIT_BAD_INPUT)


def _counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UserError(
            f"--workers {text}: numbers of workers from 1, with commas between them, as in --workers 1,2"
        )
    return list(dict.fromkeys(map(int, words)))


def _show(model: str, results: list[Measured | Failed], steps: int) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from rpft.train.bench import WINDOWS, Measured
    from rpft.train.bench_workers import Failed, table

    console = Console(highlight=False)
    heading, *rows = table(results)
    if len(heading) > 1:
        console.print(f"{model}: median (least to most) of {WINDOWS} windows of 1 + {steps} steps", soft_wrap=True)
        shown = Table(*heading, box=SIMPLE, padding=(0, 1, 0, 0))
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
    for result in results:
        if isinstance(result, Failed):
            console.print(f"{result.workers} worker(s): {result.reason}", soft_wrap=True, markup=False)
        elif isinstance(result, Measured) and result.skipped_steps:
            console.print(
                f"{result.workers} worker(s): {result.skipped_steps} steps had gradients that are not finite and"
                " no update, so they are too fast"
            )
    if any(isinstance(result, Measured) and not result.on_cuda for result in results):
        console.print("workers on the CPU: of VRAM only buffers of fixed size are counted, the bill has all")


def _simulate(simulate: str, model: str | None, sizes: dict[str, int | None], json_file: str | None) -> None:
    if json_file not in (None, PRINTED):
        raise UserError("--json takes a file with a recipe only; with --simulate it stands alone and prints")
    as_json = json_file is not None
    if Path(simulate).suffix == ".json" or (Path(simulate).is_file() and not _is_machine(simulate)):
        _refuse(
            {"--model": model, **sizes},
            f"cannot be had with the costs file {simulate}, which says what layers take;"
            " --simulate MACHINE prices a model, as in --simulate 8x4090",
        )
        _play_costs(Path(simulate), as_json)
    else:
        _play_machine(simulate, model or _DEFAULT_MODEL, sizes, as_json)


def _is_machine(name: str) -> bool:
    from rpft.plan.machine import machine_names

    return name in machine_names() or Path(name).suffix in (".yaml", ".yml")


def _play_costs(path: Path, as_json: bool) -> None:
    from rpft.plan.cases import play, read_cases

    played = {name: play(case) for name, case in read_cases(path).items()}
    if as_json:
        import dataclasses
        import json

        cases = {name: dataclasses.asdict(result) for name, result in played.items()}
        typer.echo(json.dumps({"cases": cases}, indent=1))
        return
    from rich.console import Console

    Console().print(_table(played))


def _table(played: dict[str, Played]) -> Table:
    from rich.table import Table

    table = Table(title="milliseconds a step, and how much of the workers' time is idle")
    table.add_column("case", no_wrap=True)
    for title in _COLUMNS.values():
        table.add_column(title, justify="right")
    for name, result in played.items():
        cells = (f"{result.makespan_ms[key]:,.0f}\n{result.bubble_percent[key]:.1f}%" for key in _COLUMNS)
        table.add_row(name, *cells)
    return table


def _play_machine(name: str, model: str, sizes: dict[str, int | None], as_json: bool) -> None:
    from rpft.plan.compare import Workbook, compare, workbook
    from rpft.plan.machine import read_machine

    try:
        machine = read_machine(name)
    except UserError as error:
        if Path(name).suffix:
            raise
        raise UserError(f"--simulate {name}: there is no such costs file, and {error}") from None
    work: Workbook
    if Path(model).suffix in (".yaml", ".yml"):
        given = [option for option, value in sizes.items() if value is not None]
        if given:
            raise UserError(
                f"{' and '.join(given)} cannot be had with the recipe {model}, which says it itself:"
                " data.max_seq_len, train.micro_batch_size, train.gradient_accumulation_steps"
            )
        from rpft.recipe.load import load_recipe
        from rpft.train.planning import workbook_of

        work = workbook_of(load_recipe(Path(model), []))
    else:
        work = workbook(model, sizes["--sequence"] or 2048, sizes["--rows"] or 4, sizes["--microbatches"] or 16)
    found = compare(machine, work)
    if as_json:
        import dataclasses
        import json

        about: dict[str, Any] = {
            "machine": name,
            "model": model,
            "workers": machine.num_workers,
            "microbatches": work.work.accumulation,
            "tokens_per_step": work.work.accumulation * work.work.max_tokens,
        }
        schedules = {schedule: dataclasses.asdict(result) for schedule, result in found.items()}
        typer.echo(json.dumps({**about, "schedules": schedules}, indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(
        f"{model} on {name}, a step of {work.work.accumulation} microbatches of"
        f" {work.work.max_tokens:,} tokens; layers as datasheets let expect",
        soft_wrap=True,
    )
    console.print(_compared(found))
    for line in (
        "All but rpft on paper: compute, hops of hidden states and, where weights move, their upload; no"
        " optimizer. Held are weights and gradients; activations and the optimizer's state come on top.",
        "rpft as it runs: with every transfer and the optimizer, and all that a GPU holds; it fits where the state"
        f" fits in RAM too. `rpft plan RECIPE --machine {name}` says more.",
    ):
        console.print(line)


def _compared(found: dict[str, Compared]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    from rpft.draw.figures import duration
    from rpft.plan.bill import gib

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for title in ("stages", "step", "tokens/s", "bubble", "holds"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for name, one in found.items():
        table.add_row(
            _NAMES[name],
            str(one.stages),
            duration(one.step_seconds),
            f"{one.tokens_per_second:,.0f}",
            f"{one.bubble_percent:.1f}%",
            gib(one.held_bytes),
            "yes" if one.fits else "[bold red]no[/]",
        )
    return table
