"""`rpft train`: fine-tune a model as a recipe says."""

from __future__ import annotations

import logging
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rpft.cli.output import check_output_dir, make_output_dir
from rpft.errors import EXIT_SIGNAL, RunFault, UserError

if TYPE_CHECKING:
    from rpft.console.run_log import RunLog
    from rpft.recipe.schema import Recipe
    from rpft.train.loop import Trainer
    from rpft.train.prepare import Prepared
    from rpft.train.run_lock import RunLock

logger = logging.getLogger(__name__)

LATEST = "latest"
_CHECKPOINT = re.compile(r"step-\d{8}/?$")


class TrainCommand(TyperCommand):
    """Lets ``--resume`` stand alone, for the newest checkpoint, or before the folder of one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Gives a lone ``--resume`` its value, so that it does not take a recipe or a change for one."""
        given: list[str] = []
        for number, word in enumerate(args):
            given.append(word)
            following = args[number + 1] if number + 1 < len(args) else ""
            if word == "--resume" and not (
                following == LATEST or _CHECKPOINT.search(following) or Path(following or "-").is_dir()
            ):
                given.append(LATEST)
        return super().parse_args(ctx, given)


def train(
    recipe: Annotated[
        Path, typer.Argument(help="A recipe: a YAML file. `rpft recipes` lists some to start from.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, as in train.learning_rate=2e-5."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[PATH|latest]",
            help="Go on from a checkpoint: a folder, or the newest whole one in the output directory, which is"
            " also what --resume alone means.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="With --resume: go on although the recipe is another one in what decides the result."
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", help="Plain lines, from loading to the result; what the run is stands in run.log only."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run and what memory it takes; train nothing.")
    ] = False,
) -> None:
    """Fine-tune a model as RECIPE says.

    Exit code: 0 done, 2 bad input, 130 (Ctrl-C), 143 (SIGTERM) or 129 (closed terminal) interrupted and saved;
    3 out of memory, 4 no progress, 5 disk, 6 loss not finite or jumping, 1 any other fault.

    Examples:

        rpft train recipe.yaml

        rpft train recipe.yaml train.learning_rate=1e-4 output_dir=out/second

        rpft train recipe.yaml --resume

        rpft train recipe.yaml --resume out/second/checkpoints/step-00000200
    """
    from rpft.recipe.load import load_recipe

    settings = load_recipe(recipe, overrides or [])
    check_output_dir(Path(settings.output_dir))
    if dry_run:
        _dry_run(settings)
        return
    from rpft.train.run_lock import RunLock

    lock = RunLock(Path(settings.output_dir))
    try:
        command = shlex.join(["rpft", "train", str(recipe), *(overrides or [])])
        _train_logged(settings, resume, force, quiet, lock, command)
    finally:
        lock.release()


def _dry_run(settings: Recipe) -> None:
    set_up_process(settings)
    from rpft.train.prepare import prepare

    for line in describe(prepare(settings, typer.echo)):
        typer.echo(line)


def _train_logged(
    settings: Recipe, resume: str | None, force: bool, quiet: bool, lock: RunLock, command: str
) -> None:
    from rpft.console import choose_console
    from rpft.console.run_log import RunLog

    console = "plain" if quiet else choose_console(settings.logging.console)
    with RunLog(take_stderr=sys.stderr.isatty()) as log:
        _train(settings, resume, force, quiet, console, lock, command, log)


def _train(
    settings: Recipe,
    resume: str | None,
    force: bool,
    quiet: bool,
    console: str,
    lock: RunLock,
    command: str,
    log: RunLog,
) -> None:
    from rpft.train.sinks import open_sinks, refuse_without_packages

    refuse_without_packages(settings)
    set_up_process(settings)
    log.adopt()
    from rpft.console import make_reporter
    from rpft.console.audience import Audience
    from rpft.train.faults import exit_code
    from rpft.train.interrupts import Interrupted, StoppedAtOnce
    from rpft.train.loop import Trainer
    from rpft.train.prepare import prepare
    from rpft.train.reporter import LastingReporter
    from rpft.train.resume import compare_runs, divided_as_before, find_checkpoint
    from rpft.train.run_lock import holder

    output_dir = Path(settings.output_dir)
    wanted = settings.train.resume_from_checkpoint if resume is None else resume == LATEST or resume
    if force and not wanted:
        raise UserError("--force is for --resume; give both, or neither")
    if output_dir.is_dir() and (wanted or holder(output_dir)):
        lock.take()
    checkpoint = find_checkpoint(settings, wanted)
    if checkpoint is not None:
        settings = divided_as_before(settings, checkpoint)

    def say(line: str) -> None:
        logger.info("%s", line)
        if not quiet:
            typer.echo(line)

    prepared = prepare(settings, say)
    changes = [] if checkpoint is None else compare_runs(checkpoint, prepared, force)
    make_output_dir(output_dir)
    lock.take()
    if checkpoint is None:
        find_checkpoint(settings, False)  # another run may have begun here while this one was prepared
    log.open(output_dir)
    sinks = open_sinks(settings)
    terminal = log.take_stdout() if console == "rich" and sys.stdout.isatty() else None
    shown = LastingReporter(make_reporter(console, settings.logging.every_steps, terminal))
    reporter = Audience(shown, sinks, quiet)
    log.show_through(reporter.warn)
    if console == "rich":
        log.take_python_stderr()
    trainer = Trainer(prepared, reporter)
    try:
        told = describe(prepared)
        _write_inputs(prepared, told)
        for line in [*told, *changes]:
            reporter.describe(line)
        if checkpoint is not None:
            reporter.say(f"resuming from {checkpoint}")
        trainer.run(checkpoint)
    except Interrupted as stop:
        reporter.say(f"{stop}. To go on: {command} --resume")
        raise typer.Exit(EXIT_SIGNAL + stop.signal_number) from None
    except StoppedAtOnce as stop:
        sinks.close(at_once=True)
        reporter.say(f"interrupted. {_standing(trainer, command)}")
        raise typer.Exit(EXIT_SIGNAL + stop.signal_number) from None
    except UserError:
        raise
    except Exception as error:
        sinks.close(failed=True)
        resumable = trainer.last_checkpoint is not None
        raise RunFault(_standing(trainer, command), exit_code(error), resumable) from error
    finally:
        reporter.close()


def _standing(trainer: Trainer, command: str) -> str:
    """Where a run that ended before its time stands, and how to go on."""
    step, checkpoint = trainer.last_step, trainer.last_checkpoint
    finished = f"step {step} is the last that was finished" if step else "no step was finished"
    if checkpoint is None:
        return f"{finished}, and no checkpoint was saved: start anew in another output_dir, or remove this one"
    return f"{finished}, the last checkpoint is {checkpoint}. To go on: {command} --resume"


def set_up_process(settings: Recipe) -> None:
    """Process-wide settings, before any tensor exists."""
    import os

    # cuBLAS reads this when it starts; without it deterministic products are refused.
    if settings.engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    quiet_libraries()
    import torch

    torch.use_deterministic_algorithms(settings.engine.deterministic)
    if settings.engine.cpu_threads is not None:
        torch.set_num_threads(settings.engine.cpu_threads)


def quiet_libraries() -> None:
    """No advice of tokenizers and transformers between our own lines."""
    import os

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def describe(prepared: Prepared) -> list[str]:
    """What a run is, for people: model, data, plan, memory."""
    from rpft.plan.bill import gib
    from rpft.train.plan_report import about_memory

    recipe, plan, bill, data = prepared.recipe, prepared.plan, prepared.bill, prepared.data
    total = sum(layout.num_parameters for layout in prepared.layouts)
    specs = [spec for layout in prepared.layouts for spec, _ in layout.own.values()]
    trained = sum(spec.num_elements for spec in specs if spec.trained)
    lines = [
        f"model {recipe.model.path}: {type(prepared.skeleton.model).__name__}, {total / 1e6:,.1f} M parameters,"
        f" {trained / 1e6:,.1f} M trained ({'LoRA' if prepared.peft_model else 'full'}), {recipe.model.dtype}"
    ]
    reports = data.train.reports + (data.eval.reports if data.eval and recipe.data.eval else [])
    for report in reports:
        lost = "".join(f"; {count} dropped: {reason}" for reason, count in report.dropped.items())
        lost += f"; {report.cut} cut" if report.cut else ""
        lost += f"; {report.trimmed} trimmed after the last answer" if report.trimmed else ""
        lines.append(
            f"data {report.path} ({report.format}): {report.trained_rows} of {report.rows} rows,"
            f" {report.trained_tokens:,} of {report.tokens:,} tokens trained{lost}"
        )
    lines += data.notes
    train = recipe.train
    lines.append(
        f"batch: {train.micro_batch_size} row(s) x {train.gradient_accumulation_steps} microbatches a step,"
        f" {data.order.num_steps} steps, longest row {data.longest} tokens"
    )
    if prepared.choices:
        lines.append(f"chosen by the planner: {'; '.join(prepared.choices)}; recompute by {plan.recompute}")
    lines += [said for _, said in about_memory(prepared)]
    lines += _describe_kernels(prepared)
    lines.append(
        f"plan for {len(prepared.devices)} worker(s) on {prepared.devices[0].torch_device.type}:"
        f" forward {' '.join(map(str, plan.forward)) or '-'}; fused {plan.fused};"
        f" backward {' '.join(map(str, plan.backward[1:])) or '-'}; {plan.num_microbatches} microbatches a round,"
        f" recompute by {plan.recompute}"
    )
    if plan.dispatch:
        lines.append(f"slots of a step go to workers {' '.join(map(str, plan.dispatch))}: faster than in turn")
    for name, size, parts in (
        ("RAM", prepared.memory["host_bytes"], prepared.host_parts),
        ("each worker", bill.device, bill.device_parts),
    ):
        detail = ", ".join(f"{part} {gib(num_bytes)}" for part, num_bytes in parts.items())
        lines.append(f"memory, {name}: {gib(size)} ({detail})")
    lines.append(
        f"disk: {gib(bill.result)} for the result, {gib(prepared.checkpoint_bytes)} a checkpoint, of which up to"
        f" {prepared.num_checkpoints} at once"
        + (f", {gib(bill.frozen_file)} for frozen weights while it lasts" if prepared.on_disk else "")
    )
    if not recipe.checkpoint.regular:
        lines.append(
            "checkpoints: none on the way, so a power cut or a fault loses all steps (an interrupt saves); set"
            " checkpoint.every_minutes for more"
        )
    prediction = prepared.prediction()
    if prediction is not None:
        lines.append(
            f"predicted: {prediction.tokens_per_second:,.0f} tokens/s, {prediction.step_seconds:.3g} s a step,"
            f" limited by {prediction.limited_by}; `rpft plan` says more"
        )
    return lines


def _describe_kernels(prepared: Prepared) -> list[str]:
    """What runs the layers, and what they were measured to take."""
    from rpft.plan.bill import gib

    kernels, gradients = prepared.kernels, str(prepared.gradient_dtype).removeprefix("torch.")
    line = f"kernels: {kernels.kind}"
    if kernels.missing is not None:
        line += f", slower than compiled ones ({kernels.missing})"
    if kernels.graphs:
        line += f"; rows padded to {', '.join(map(str, prepared.data.pad_lengths))} tokens"
    lines = [f"{line}; gradients wait in {gradients}"]
    if prepared.profiles is not None:
        forward = 1e3 * sum(profile.forward_seconds for profile in prepared.profiles[:-1])
        backward = 1e3 * sum(profile.backward_seconds for profile in prepared.profiles[:-1])
        head = 1e3 * prepared.profiles[-1].backward_seconds
        most = max(max(profile.forward_bytes, profile.backward_bytes) for profile in prepared.profiles)
        lines.append(
            f"measured, {prepared.recipe.train.micro_batch_size} x {prepared.data.longest} tokens on one worker:"
            f" forward {forward:.1f} ms, recompute and backward {backward:.1f} ms, head {head:.1f} ms"
            + (f"; a layer holds up to {gib(most)}" if most else "")
        )
    return lines


def _write_inputs(prepared: Prepared, told: list[str]) -> None:
    """Leaves the recipe as read, the plan, what was measured and what the run is in the output directory."""
    from rpft.files import write_whole
    from rpft.recipe.dump import dump_recipe
    from rpft.train.about import write_about
    from rpft.train.samples import write_samples

    output_dir = Path(prepared.recipe.output_dir)
    write_whole(output_dir / "recipe.yaml", dump_recipe(prepared.recipe))
    prepared.write_plan_file()
    write_about(prepared, told)
    write_samples(prepared.data, output_dir)
    if prepared.profile is not None:
        write_whole(output_dir / "profile.json", prepared.profile.to_json())
