"""`rpft recipes`: list, show and copy the shipped recipes, and show the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rpft.recipe.shipped import copy_shipped, read_header, read_shipped, shipped_names

app = typer.Typer(
    help="List the shipped recipes, show one, or copy one to make it yours.\n\n"
    "Examples: `rpft recipes copy qwen3-1.7b-full mine.yaml`, `rpft recipes show-schema`.",
    invoke_without_command=True,
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a shipped recipe.", show_default=False)]


@app.callback()
def list_recipes(context: typer.Context) -> None:
    if context.invoked_subcommand is not None:
        return
    width = max(len(name) for name in shipped_names())
    for name in shipped_names():
        header = read_header(name)
        typer.echo(f"{name:{width}}  {header.description}")
        typer.echo(f"{'':{width}}  {header.hardware}")


@app.command()
def show(name: _Name) -> None:
    """Print a shipped recipe."""
    typer.echo(read_shipped(name), nl=False)


@app.command()
def copy(
    name: _Name,
    destination: Annotated[
        Path | None,
        typer.Argument(metavar="[DEST]", help="File or folder; default: NAME.yaml here.", show_default=False),
    ] = None,
) -> None:
    """Copy a shipped recipe to make it yours; nothing is overwritten."""
    target = copy_shipped(name, destination)
    typer.echo(f"{target}: yours now; its first line is the command that runs it")


@app.command()
def show_schema() -> None:
    """Print every key of a recipe with its meaning, type and default."""
    from rpft.recipe.schema_text import schema_text

    typer.echo(schema_text(), nl=False)
