"""`rpft data`: look at the rows of a recipe as the model will see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpft.errors import UserError

if TYPE_CHECKING:
    from rpft.data.dataset import Dataset, DataSettings
    from rpft.data.sources import Source
    from rpft.recipe.schema import Recipe


def data(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, as in data.max_seq_len=4096."),
    ] = None,
    row: Annotated[
        int | None,
        typer.Option("--row", min=0, help="Show this row of the first training entry, from 0, in full."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the counts, or the tokens of --row, as JSON.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page that needs no other file.")
    ] = None,
) -> None:
    """Show what RECIPE trains on: rows as the model sees them, trained tokens in colour, and what was left out.

    Examples:

        rpft data recipe.yaml

        rpft data recipe.yaml --row 17

        rpft data recipe.yaml data.train_on=all --html rows.html
    """
    from rpft.recipe.load import load_recipe

    settings = load_recipe(recipe, overrides or [])
    if html is not None and (as_json or row is not None):
        raise UserError("--html shows everything on one page; give it without --json and --row")
    from rpft.cli.train import quiet_libraries

    quiet_libraries()
    from rpft.model.checkpoint import resolve_checkpoint
    from rpft.train.rows import data_settings, data_sources, load_rows, load_tokenizer

    tokenizer = load_tokenizer(resolve_checkpoint(settings.model.path, settings.model.revision, weights=False))
    how, sources = data_settings(settings.data), data_sources(settings.data.train)
    if row is not None:
        _show_row(sources[0], row, tokenizer, how, as_json)
    elif as_json:
        dataset, _ = load_rows(settings.data, tokenizer, how)
        counts = [
            {"path": r.path, "rows": r.rows, "trained_rows": r.trained_rows, "dropped": r.dropped}
            for r in dataset.reports
        ]
        whole = {"sources": counts, "tokens": dataset.tokens, "trained_tokens": dataset.trained_tokens}
        typer.echo(json.dumps(whole, indent=1))
    elif html is not None:
        _write_page(settings, recipe, html, sources, tokenizer, how)
    else:
        _show(settings, sources, tokenizer, how)


def _show_row(source: Source, index: int, tokenizer: Any, how: DataSettings, as_json: bool) -> None:
    from rpft.data.dataset import explain_row, find_row

    if as_json:
        tokens = explain_row(source, index, tokenizer, how)
        listed = [{"id": token, "text": text, "trained": trained} for token, text, trained in tokens]
        typer.echo(json.dumps({"tokens": listed}, ensure_ascii=False))
        return
    from rich.console import Console

    from rpft.data.show import legend, print_row

    where, rows = find_row(source, index, tokenizer, how)
    console = Console(highlight=False)
    legend(console)
    for name, row in zip(("chosen ", "rejected ") if len(rows) > 1 else ("",), rows, strict=True):
        console.print(
            f"\n{where}: {name}{len(row.ids):,} tokens, {int(row.trained.sum()):,} trained",
            markup=False,
            soft_wrap=True,
        )
        print_row(console, row, tokenizer)


def _show(settings: Recipe, sources: list[Source], tokenizer: Any, how: DataSettings) -> None:
    from rich.console import Console

    from rpft.data.preview import first_row, preview
    from rpft.data.show import legend, print_figures, print_reports, print_row
    from rpft.train.rows import load_rows

    console = Console(highlight=False)
    legend(console)
    # Before anything that takes its time with large data.
    for source in sources:
        found = first_row(source, tokenizer, how)
        if found is not None:
            console.print(f"\n{found[0]}", markup=False, soft_wrap=True)
            print_row(console, found[1], tokenizer, short=True)
    console.print()
    dataset, evaluation = load_rows(settings.data, tokenizer, how)
    print_reports(console, "train", dataset.reports)
    if evaluation is not None:
        print_reports(console, "eval", evaluation.reports)
    for line in _evaluation_lines(settings, dataset, evaluation):
        console.print(line, markup=False)
    figures = preview(dataset, sources, how.max_seq_len)
    print_figures(console, dataset, figures, how.max_seq_len)
    console.print(f"\nthe strangest of {figures.looked_at:,} rows", markup=False)
    for strange in figures.strangest:
        console.print(f"\n{strange.where}: {strange.why}", markup=False, soft_wrap=True)
        print_row(console, strange.row, tokenizer, short=True)


def _evaluation_lines(settings: Recipe, dataset: Dataset, evaluation: Dataset | None) -> list[str]:
    """What is held out of the training rows, and what is in both."""
    from rpft.data.selection import count_shared
    from rpft.train.rows import split_rows

    spec, lines = settings.data, []
    if spec.eval_fraction or spec.eval_rows:
        train_rows, eval_rows = split_rows(spec, dataset.rows, settings.train.seed)
        lines.append(f"{len(eval_rows):,} of {len(dataset.rows):,} rows are held out for evaluation")
    elif evaluation is not None:
        train_rows, eval_rows = dataset.rows, evaluation.rows
    else:
        return []
    shared = count_shared(train_rows, eval_rows)
    if shared:
        lines.append(f"{shared:,} of {len(eval_rows):,} evaluation rows are also training rows")
    return lines


def _write_page(
    settings: Recipe, recipe: Path, html: Path, sources: list[Source], tokenizer: Any, how: DataSettings
) -> None:
    from rpft.cli.output import write_output
    from rpft.data.page import render_page
    from rpft.data.preview import first_row, preview
    from rpft.train.rows import load_rows

    dataset, evaluation = load_rows(settings.data, tokenizer, how)
    figures = preview(dataset, sources, how.max_seq_len)
    first = [found for source in sources if (found := first_row(source, tokenizer, how)) is not None]
    reports = evaluation.reports if evaluation is not None else []
    lines = _evaluation_lines(settings, dataset, evaluation)
    page = render_page(f"rpft data {recipe}", dataset, reports, lines, figures, first, tokenizer, how.max_seq_len)
    write_output("--html", html, page)
    typer.echo(f"{html}: {len(dataset.rows):,} rows of {len(sources)} entries; open it in a browser")
