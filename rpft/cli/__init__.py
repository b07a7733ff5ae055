"""The command line: the verbs, and what each kind of failure prints and exits with.

Nothing heavy is imported here or at the top of a verb's module, so that `rpft --help` is quick.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import typer
from typer.core import TyperGroup

from rpft import __version__
from rpft.cli.bench import BenchCommand, bench
from rpft.cli.compare import compare
from rpft.cli.data import data
from rpft.cli.doctor import doctor
from rpft.cli.export import export
from rpft.cli.generate import generate
from rpft.cli.plan import plan
from rpft.cli.profile import profile
from rpft.cli.recipes import app as recipes_app
from rpft.cli.report import report
from rpft.cli.train import TrainCommand, train
from rpft.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAULT, EXIT_INTERRUPTED, RunFault, UserError


@dataclass
class Invocation:
    """What the options before the verb said."""

    debug: bool = False


class _Verbs(TyperGroup):
    """Ends on an interrupt with our own exit code; the group's default would be that of a fault."""

    def invoke(self, ctx):  # type: ignore[no-untyped-def]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise SystemExit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    name="rpft",
    cls=_Verbs,
    help="Fine-tune large language models: weights in host RAM, GPUs as stateless workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rpft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    context.ensure_object(Invocation).debug = debug


app.add_typer(recipes_app, name="recipes")
app.command("bench", cls=BenchCommand)(bench)
app.command("compare")(compare)
app.command("data")(data)
app.command("doctor")(doctor)
app.command("export")(export)
app.command("generate")(generate)
app.command("plan")(plan)
app.command("profile")(profile)
app.command("report")(report)
app.command("train", cls=TrainCommand)(train)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command line (default: the process's own) and exit with its code."""
    code = _run(arguments)
    if _engine_threads_left():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int:
    invocation = Invocation()
    try:
        app(args=arguments, obj=invocation, prog_name="rpft")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_DONE
    except UserError as error:
        if invocation.debug:
            traceback.print_exc()
        typer.echo(f"error: {error}", err=True)
        return EXIT_BAD_INPUT
    except Exception as error:
        if invocation.debug:
            traceback.print_exc()
        with suppress(OSError):  # a terminal that is gone
            words = list(sys.argv[1:] if arguments is None else arguments)
            typer.echo(_fault_report(error, words, invocation.debug), err=True)
        return error.exit_code if isinstance(error, RunFault) else EXIT_FAULT
    return EXIT_DONE


def _engine_threads_left() -> bool:
    """Whether a thread of the engine outlived its close, so that only an immediate exit is a clean one."""
    streams = sys.modules.get("rpft.engine.streams")  # importing it would import torch
    return streams is not None and any(isinstance(t, streams.EngineThread) for t in threading.enumerate())


def _fault_report(error: BaseException, words: list[str], debug: bool) -> str:
    lines = []
    if isinstance(error, RunFault) and error.__cause__ is not None:
        lines.append(f"  {error}")
        if error.resumable and "--resume" not in words:  # without it the run would be refused
            words = [*words, "--resume"]
        error = error.__cause__
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines.insert(0, f"  at {frame.filename}:{frame.lineno}, in {frame.name}")
    if not debug:
        lines.append(f"  for the traceback, run: {shlex.join(['rpft', '--debug', *words])}")
    return "\n".join([f"fault: {type(error).__name__}: {error}", *lines])
