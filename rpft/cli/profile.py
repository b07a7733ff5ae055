"""`rpft profile`: what the layers, links and memory of this machine take for a recipe, measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rpft.cli.output import check_output, write_output

if TYPE_CHECKING:
    from rich.table import Table

    from rpft.plan.profile import LayerProfile
    from rpft.plan.profile_file import KindProfile, Profile


def profile(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, as in train.micro_batch_size=4."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the profile as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON, for programs.")] = False,
) -> None:
    """Measure RECIPE's layers, links and memory on this machine, with random weights; nothing is trained.

    The next `rpft plan` and `rpft train` of the same model, shapes, kernels and machine use what was found.

    Example:

        rpft profile recipe.yaml
    """
    from rpft.cli.train import set_up_process
    from rpft.recipe.load import load_recipe

    check_output("--out", out)
    settings = load_recipe(recipe, overrides or [])
    set_up_process(settings)
    from rpft.train.prepare import set_up

    def say(line: str) -> None:
        typer.echo(line, err=True)

    measured = set_up(settings).measure_and_keep(say, lengths=True, thorough=True)
    if out is not None:
        write_output("--out", out, measured.to_json() + "\n")
    if as_json:
        typer.echo(measured.to_json())
        return
    from rich.console import Console

    console, what = Console(highlight=False), measured.conditions
    console.print(
        f"{what['model']}, {what['dtype']}, {what['kernels']} kernels; {what['rows']} line(s) a microbatch,"
        f" {what['machine']['workers'][0]}"
    )
    console.print(_layers(measured))
    console.print(_memory(measured))
    for line in _rates(measured):
        console.print(line, markup=False, soft_wrap=True)


def _layers(measured: Profile) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    rates = measured.rates()
    table = Table(box=SIMPLE)
    table.add_column("ms", no_wrap=True)
    for title in ("tokens", "forward", "recompute\n+ backward", "in the\nfused stage", "up", "down", "update"):
        table.add_column(title, justify="right")

    def add(name: str, number: int, sequence: int, times: LayerProfile, *rest: str) -> None:
        # The head runs forward and backward at once.
        ahead = "" if number == len(measured.kinds) - 1 else _ms(times.forward_seconds)
        backward, fused = _ms(times.backward_seconds), _ms(times.fused_seconds)
        table.add_row(name, str(sequence), ahead, backward, fused, *rest)

    for number, kind in enumerate(measured.kinds):
        times = kind.measured
        moved = (kind.weight_bytes / rates.up, kind.gradient_bytes / rates.down, kind.num_trained / rates.update)
        add(_name(kind), number, measured.sequence, times, *map(_ms, moved))
        for layer, checked in measured.checks.items():
            if layer in kind.layers:
                add(f"  {kind.name} {layer}", number, measured.sequence, checked)
        for length in measured.lengths:
            add("", number, length.sequence, length.kinds[number])
    return table


def _memory(measured: Profile) -> Table:
    """What a layer takes of a worker; what is not weights or gradients is measured on GPUs only."""
    from rich.box import SIMPLE
    from rich.table import Table

    from rpft.plan.bill import gib
    from rpft.plan.profile import memory_measured

    table = Table(box=SIMPLE)
    table.add_column("memory of a worker", no_wrap=True)
    for title in ("weights", "gradients,\nfloat32", "kept for\nthe backward", "workspace"):
        table.add_column(title, justify="right")
    has_bytes = memory_measured(measured.layers)
    for kind in measured.kinds:
        layer = kind.measured
        most = max(layer.forward_bytes, layer.backward_bytes, layer.kept_bytes + layer.kept_backward_bytes)
        rest = (gib(layer.kept_bytes), gib(most - layer.kept_bytes)) if has_bytes else ("-", "-")
        table.add_row(_name(kind), gib(kind.weight_bytes), gib(4 * kind.num_trained), *rest)
    return table


def _name(kind: KindProfile) -> str:
    return f"{kind.name} {kind.layers[0]}" + (f" of {len(kind.layers)}" if len(kind.layers) > 1 else "")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _rates(measured: Profile) -> Iterator[str]:
    gb = 1e9
    alone = "; ".join(f"{up / gb:.1f} up, {down / gb:.1f} down" for up, down in measured.links)
    yield f"link, GB/s, alone: {alone}"
    if measured.links_together:
        together = "; ".join(f"{up / gb:.1f} up, {down / gb:.1f} down" for up, down in measured.links_together)
        yield f"link, GB/s, all at once: {together}"
    beside = measured.beside
    yield f"optimizer: {measured.updates / gb:.2f} G parameters/s"
    yield (
        f"while all links copy both ways: {beside.updates / gb:.2f}; the copies: {beside.copied / gb:.1f} GB/s in"
        f" all, {beside.copied_alone / gb:.1f} while it rests"
    )
    if measured.host_memory is not None:
        yield f"host memory: {measured.host_memory / gb:.1f} GB/s read and written"
    if measured.slowdown != 1.0:
        yield f"with all workers at once a layer takes {measured.slowdown:.2f} times as long"
