"""`rpft recipes`: list, show and copy the shipped recipes, and show the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rpft.recipe.shipped import copy_shipped, read_header, read_shipped, shipped_names

app = typer.Typer(
    help="List the shipped recipes, show one, copy one to make it yours, or import another program's file.\n\n"
    "Examples: `rpft recipes copy qwen3-1.7b-full mine.yaml`, `rpft recipes import config.yml --out mine.yaml`.",
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
def show_schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As the page docs/recipe.md, which is made by this.")
    ] = False,
) -> None:
    """Print every key of a recipe with its meaning, type and default."""
    if markdown:
        from rpft.recipe.reference import reference

        typer.echo(reference(), nl=False)
        return
    from rpft.recipe.schema_text import schema_text

    typer.echo(schema_text(), nl=False)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file of axolotl or LLaMA-Factory.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="RECIPE", help="Write the recipe there; nothing is overwritten."),
    ] = None,
    gpus: Annotated[
        int, typer.Option("--gpus", min=1, help="GPUs that it ran on: there a step counts the rows of each.")
    ] = 1,
) -> None:
    """Turn FILE, of axolotl or LLaMA-Factory, into a recipe, and say what became of every key.

    Without --out the recipe is printed, and the rest goes to standard error.

    Example:

        rpft recipes import config.yml --out mine.yaml
    """
    from rpft.recipe.importing.run import import_recipe
    from rpft.recipe.shipped import write_new

    imported = import_recipe(file, gpus)
    if out is None:
        typer.echo(imported.text("RECIPE"), nl=False)
    else:
        write_new(out, imported.text(str(out)))
    typer.echo(imported.report(), err=out is None)
    if out is not None:
        typer.echo(f"{out}: look at the rows first: rpft data {out}")
