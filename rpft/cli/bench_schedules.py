"""`rpft bench --simulate`: schedules held against one another, on measured costs or on a machine's datasheet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rpft.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from rpft.plan.cases import Played
    from rpft.plan.compare import Compared

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

DEFAULT_MODEL = "qwen3-32b"


def refuse(options: dict[str, Any], why: str) -> None:
    """UserError with ``why`` where any of ``options`` was given."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UserError(f"{' and '.join(given)} {why}")


def simulate_schedules(
    simulate: str, model: str | None, sizes: dict[str, int | None], as_json: bool, into_file: bool
) -> None:
    """Prints what schedules take on the costs file or machine ``simulate``; ``sizes``: options of the model's."""
    if into_file:
        raise UserError("--json takes a file with a recipe only; with --simulate it stands alone and prints")
    if Path(simulate).suffix == ".json" or (Path(simulate).is_file() and not _is_machine(simulate)):
        refuse(
            {"--model": model, **sizes},
            f"cannot be had with the costs file {simulate}, which says what layers take;"
            " --simulate MACHINE prices a model, as in --simulate 8x4090",
        )
        _play_costs(Path(simulate), as_json)
    else:
        _play_machine(simulate, model or DEFAULT_MODEL, sizes, as_json)


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
