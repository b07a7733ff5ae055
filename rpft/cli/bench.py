"""`rpft bench`: how fast a recipe is on this machine, alone and beside other programs; or schedules, simulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from rpft.cli.bench_schedules import DEFAULT_MODEL, refuse, simulate_schedules
from rpft.cli.output import check_output, write_output
from rpft.errors import EXIT_BAD_INPUT, UserError
from rpft.peers import PEERS

if TYPE_CHECKING:
    from rich.table import Table

    from rpft.train.bench import Measured
    from rpft.train.bench_peers import PeerOutcome
    from rpft.train.bench_workers import Comparison, Failed

_STEPS = 4
"""Of a window: as many as the prediction takes its mean from."""


PRINTED = "-"
"""The file of ``--json`` that stands for standard output."""

_ALL = "all"


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
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers",
            metavar="all|NAME[,NAME]...",
            help=f"Programs that do the same work, each in its own process: {', '.join(PEERS)}.",
        ),
    ] = None,
    losses: Annotated[
        int | None,
        typer.Option("--losses", min=1, help="With --peers: first steps whose losses are compared [8]."),
    ] = None,
    peer_logs: Annotated[
        Path | None,
        typer.Option(
            "--peer-logs", metavar="FOLDER", help="With --peers: keep their work and what they print here."
        ),
    ] = None,
    chart: Annotated[
        Path | None, typer.Option("--chart", metavar="FILE.svg", help="A picture of speeds and losses.")
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
            help=f"On a machine: a shipped shape ({DEFAULT_MODEL} if left out), a folder with a config.json, or a"
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

    A run is timed over windows of its first steps, from rest to rest. Only files that were asked for are written,
    and the profile of the layers in the cache. Exit code: 0, or 2 where no number of workers could be measured.

    Examples:

        rpft bench recipe.yaml --workers 1,2 --json bench.json

        rpft bench recipe.yaml engine.vram_limit=24GiB

        rpft bench recipe.yaml --peers all --chart bench.svg

        rpft bench recipe.yaml --peers roof,fsdp2 --workers 2

        rpft bench --simulate costs.json

        rpft bench --simulate 8x4090

        rpft bench --simulate 4x3090 --model llama-3.1-8b --microbatches 32
    """
    sizes = {"--sequence": sequence, "--rows": rows, "--microbatches": microbatches}
    of_schedules = {"--model": model, **sizes}
    of_peers = {"--losses": losses, "--peer-logs": peer_logs}
    of_runs = {"RECIPE": recipe, "--workers": workers, "--steps": steps, "--peers": peers, "--chart": chart}
    if simulate is not None:
        refuse({**of_runs, **of_peers}, "cannot be had with --simulate, which runs nothing")
        simulate_schedules(simulate, model, sizes, json_file is not None, json_file not in (None, PRINTED))
    elif recipe is None:
        raise UserError(
            "give a recipe, whose run is timed here, or --simulate with a costs file or a machine, as in"
            " `rpft bench --simulate 8x4090`"
        )
    else:
        refuse(of_schedules, "can be had with --simulate only: a recipe says it itself")
        if peers is None:
            refuse(of_peers, "can be had with --peers only")
        compared = None if peers is None else Compared(_names(peers), losses, peer_logs)
        _run(recipe, overrides or [], workers, steps or _STEPS, Outputs(json_file, chart), compared)


class Outputs(NamedTuple):
    """What is left of a bench beside its tables."""

    json: str | None
    chart: Path | None


class Compared(NamedTuple):
    """What ``--peers`` and its company say."""

    peers: list[str]
    losses: int | None
    logs: Path | None


def _names(text: str) -> list[str]:
    if text == _ALL:
        return list(PEERS)
    names = list(dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UserError(f"--peers {text}: there is no {unknown[0]!r}; there are {', '.join(PEERS)}, or {_ALL}")
    return names


def _run(
    path: Path, overrides: list[str], workers: str | None, steps: int, outputs: Outputs, compared: Compared | None
) -> None:
    from rpft.recipe.load import load_recipe

    json_file = outputs.json
    file = None if json_file in (None, PRINTED) else Path(json_file)
    check_output("--json", file)
    check_output("--chart", outputs.chart)
    if outputs.chart is not None and outputs.chart.suffix.lower() != ".svg":
        raise UserError(f"--chart {outputs.chart}: the picture is SVG; give a name that ends in .svg")
    counts = None if workers is None else _counts(workers)
    recipe = load_recipe(path, overrides)
    from rpft.cli.train import set_up_process
    from rpft.train import bench_report, bench_workers

    def say(line: str) -> None:
        typer.echo(line, err=True)

    load = bench_workers.load_average()
    busy = bench_workers.not_quiet(load)
    if busy is not None:
        say(f"warning: {busy}")
    counts = bench_workers.default_workers(recipe) if counts is None else counts
    with _comparison(compared) as comparison:
        results, peers = bench_workers.bench(recipe, counts, steps, set_up_process, say, comparison)
    if json_file is not None:
        about = {"recipe": str(path), "overrides": overrides, "steps": steps, "load_average": load}
        text = bench_report.as_json(about, results, peers)
        if file is None:
            typer.echo(text)
        else:
            write_output("--json", file, text + "\n")
    if json_file != PRINTED:
        _show(recipe.model.path, results, steps)
        if compared is not None:
            _show_peers(results, peers)
    if outputs.chart is not None:
        from rpft.console.bench_chart import bench_chart

        write_output("--chart", outputs.chart, bench_chart(f"{recipe.model.path}: rpft bench", results, peers))
    if all(isinstance(result, bench_workers.Failed) for result in results):
        raise typer.Exit(EXIT_BAD_INPUT)


@contextmanager
def _comparison(compared: Compared | None) -> Iterator[Comparison | None]:
    """What the bench is told of peers; their folder is gone afterwards, unless it was asked for."""
    if compared is None:
        yield None
        return
    from rpft.train.bench_peers import LOSSES
    from rpft.train.bench_workers import Comparison

    count = compared.losses or LOSSES
    if compared.logs is not None:
        yield Comparison(compared.peers, compared.logs, count)
        return
    with TemporaryDirectory(prefix="rpft-bench-") as folder:
        yield Comparison(compared.peers, Path(folder), count)


def _counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UserError(
            f"--workers {text}: numbers of workers from 1, with commas between them, as in --workers 1,2"
        )
    return list(dict.fromkeys(map(int, words)))


def _show(model: str, results: list[Measured | Failed], steps: int) -> None:
    from rich.console import Console

    from rpft.train.bench import WINDOWS, Measured
    from rpft.train.bench_report import table
    from rpft.train.bench_workers import Failed

    console = Console(highlight=False)
    rows = table(results)
    if len(rows[0]) > 1:
        console.print(f"{model}: median (least to most) of {WINDOWS} windows of 1 + {steps} steps", soft_wrap=True)
        console.print(_table(rows))
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


def _show_peers(results: list[Measured | Failed], peers: list[PeerOutcome]) -> None:
    from rich.console import Console

    from rpft.train.bench_report import failures, loss_table, peer_table

    console = Console(highlight=False)
    rows = peer_table(results, peers)
    if len(rows) > 1:
        console.print(
            "the same work by other programs, here; roof: forward, recompute and backward in plain PyTorch",
            soft_wrap=True,
        )
        console.print(_table(rows))
    for line in failures(peers):
        console.print(line, soft_wrap=True, markup=False)
    losses = loss_table(results, peers)
    if losses:
        console.print(
            "loss of each step, of whom on how many workers; all from the same first weights", soft_wrap=True
        )
        console.print(_table(losses))


def _table(rows: list[list[str]]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    shown = Table(*rows[0], box=SIMPLE, padding=(0, 1, 0, 0))
    for row in rows[1:]:
        shown.add_row(*row)
    return shown
