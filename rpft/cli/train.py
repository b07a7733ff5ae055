"""`rpft train`: fine-tune a model as a recipe says."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rpft.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from rpft.recipe.schema import Recipe
    from rpft.train.prepare import Prepared


def train(
    recipe: Annotated[
        Path, typer.Argument(help="A recipe: a YAML file. `rpft recipes` lists some to start from.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, as in train.learning_rate=2e-5."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the output directory.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run and what memory it takes; train nothing.")
    ] = False,
) -> None:
    """Fine-tune a model as RECIPE says.

    Exit code: 0 done, 2 bad input, 130 interrupted and saved, 1 any other fault.

    Examples:

        rpft train recipe.yaml

        rpft train recipe.yaml train.learning_rate=1e-4 output_dir=out/second

        rpft train recipe.yaml --resume
    """
    from rpft.recipe.load import load_recipe

    settings = load_recipe(recipe, overrides or [])
    _set_up(settings)
    from rpft.train.loop import Interrupted, Trainer, find_checkpoint, refuse_unless_same_run
    from rpft.train.prepare import prepare

    wanted = resume or settings.train.resume_from_checkpoint
    checkpoint = None if dry_run else find_checkpoint(settings, wanted)
    prepared = prepare(settings, typer.echo)
    if dry_run:
        for line in describe(prepared):
            typer.echo(line)
        return
    if checkpoint is not None:
        refuse_unless_same_run(prepared, checkpoint)
    _write_inputs(prepared)
    from rpft.console import make_reporter

    reporter = make_reporter(settings.logging.console, settings.logging.every_steps)
    try:
        for line in describe(prepared):
            reporter.say(line)
        if checkpoint is not None:
            reporter.say(f"resuming from {checkpoint}")
        Trainer(prepared, reporter).run(checkpoint)
    except Interrupted as stop:
        words = shlex.join([str(recipe), *(overrides or [])])
        reporter.say(f"{stop}. To go on: rpft train {words} --resume")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        reporter.close()


def _set_up(settings: Recipe) -> None:
    """Process-wide settings, before any tensor exists."""
    import os

    # cuBLAS reads this when it starts; without it deterministic products are refused.
    if settings.engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(settings.engine.deterministic)
    if settings.engine.cpu_threads is not None:
        torch.set_num_threads(settings.engine.cpu_threads)


def describe(prepared: Prepared) -> list[str]:
    """What a run is, for people: model, data, plan, memory."""
    from rpft.plan.bill import gib

    recipe, plan, bill, data = prepared.recipe, prepared.plan, prepared.bill, prepared.data
    specs = [spec for layout in prepared.layouts for spec, _ in layout.own.values()]
    total = sum(spec.num_elements for spec in specs)
    trained = sum(spec.num_elements for spec in specs if spec.trained)
    lines = [
        f"model {recipe.model.path}: {type(prepared.skeleton.model).__name__}, {total / 1e6:,.1f} M parameters,"
        f" {trained / 1e6:,.1f} M trained ({'LoRA' if prepared.peft_model else 'full'}), {recipe.model.dtype}"
    ]
    reports = data.train.reports + (data.eval.reports if data.eval and not recipe.data.eval_fraction else [])
    for report in reports:
        lost = "".join(f"; {count} dropped: {reason}" for reason, count in report.dropped.items())
        lost += f"; {report.cut} cut" if report.cut else ""
        lost += f"; {report.trimmed} trimmed after the last answer" if report.trimmed else ""
        lines.append(
            f"data {report.path} ({report.format}): {report.trained_rows} of {report.rows} rows,"
            f" {report.trained_tokens:,} of {report.tokens:,} tokens trained{lost}"
        )
    train = recipe.train
    lines.append(
        f"batch: {train.micro_batch_size} row(s) x {train.gradient_accumulation_steps} microbatches a step,"
        f" {data.order.num_steps} steps, longest row {data.longest} tokens"
    )
    lines += _describe_kernels(prepared)
    lines.append(
        f"plan for {len(prepared.devices)} worker(s) on {prepared.devices[0].torch_device.type}:"
        f" forward {' '.join(map(str, plan.forward)) or '-'}; fused {plan.fused};"
        f" backward {' '.join(map(str, plan.backward[1:])) or '-'}; {plan.num_microbatches} microbatches a round,"
        f" recompute by {plan.recompute}"
    )
    for name, size, parts in (
        ("RAM", bill.host, bill.host_parts),
        ("each worker", bill.device, bill.device_parts),
    ):
        detail = ", ".join(f"{part} {gib(num_bytes)}" for part, num_bytes in parts.items())
        lines.append(f"memory, {name}: {gib(size)} ({detail})")
    lines.append(f"disk, result and one checkpoint: {gib(bill.disk)}")
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
            f" forward {forward:.1f} ms, recompute and backward {backward:.1f} ms, head {head:.1f} ms;"
            f" a layer holds up to {gib(most)}"
        )
    return lines


def _write_inputs(prepared: Prepared) -> None:
    """Leaves the recipe as it was read, and the plan, in the output directory."""
    from rpft.recipe.dump import dump_recipe

    output_dir = Path(prepared.recipe.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "recipe.yaml").write_text(dump_recipe(prepared.recipe), encoding="utf-8")
    (output_dir / "plan.json").write_text(prepared.plan.to_json(), encoding="utf-8")
