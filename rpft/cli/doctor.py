"""`rpft doctor`: what this machine has for fine-tuning, and what each finding costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rpft.errors import EXIT_BAD_INPUT

_MARKS = {"good": "[green]✓[/]", "note": "[yellow]![/]", "fault": "[red]✗[/]"}


def doctor(
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where runs are to be written: that disk is tried.")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Look at this machine: versions, GPUs, links, RAM, optimizer, disk; all measured, in under a minute.

    Exit code: 0, or 2 where something keeps runs from training as they should.

    Example:

        rpft doctor --folder /data/out
    """
    from rpft.train.doctor import examine

    findings = []
    for finding in examine(folder):
        findings.append(finding)
        if not as_json:
            _show(finding.grade, finding.what, finding.found, finding.cost)
    sound = all(finding.grade != "fault" for finding in findings)
    if as_json:
        import dataclasses
        import json

        found = [dataclasses.asdict(finding) for finding in findings]
        typer.echo(json.dumps({"sound": sound, "findings": found}, indent=1))
    if not sound:
        raise typer.Exit(EXIT_BAD_INPUT)


def _show(grade: str, what: str, found: str, cost: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    console.print(f"{_MARKS[grade]} [bold]{escape(what)}[/]: {escape(found)}", soft_wrap=True)
    if cost:
        console.print(f"    [dim]{escape(cost)}[/]", soft_wrap=True)
