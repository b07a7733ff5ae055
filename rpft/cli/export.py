"""`rpft export`: make of a run a folder that transformers, vLLM or peft load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def export(
    run: Annotated[Path, typer.Argument(help="The output directory of a run, finished or interrupted.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to; new or empty. Without it RUN/export.")
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint",
            metavar="latest|best|PATH",
            help="latest: the result, or of an unfinished run its newest whole checkpoint. best: the one with the"
            " lowest evaluation loss. Or a checkpoint: its folder, or its name such as step-00000200.",
        ),
    ] = "latest",
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None, typer.Option("--dtype", help="Without it that of the run.")
    ] = None,
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--max-shard-size", metavar="SIZE", help="Of a file of weights; about twice that is held in RAM."
        ),
    ] = "2GiB",
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write the adapter as peft has it; merge nothing.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="DIR", help="Where the base model is now, if not where the recipe says; unquantised."
        ),
    ] = None,
) -> None:
    """Write the model that RUN trained as one folder: weights, config, tokenizer, chat template, model card.

    An adapter is merged into its base model in float32 and rounded once; how far that moves the logits is said.

    Examples:

        rpft export out/my-run

        rpft export out/my-run --checkpoint best --dtype fp16 --out exports/best

        rpft export out/my-run --adapter-only --out exports/adapter
    """
    from rpft.cli.train import quiet_libraries
    from rpft.errors import UserError
    from rpft.recipe.sizes import parse_bytes

    try:
        shard_bytes = parse_bytes(max_shard_size)
    except ValueError as error:
        raise UserError(f"--max-shard-size: {error}") from None
    quiet_libraries()
    import torch

    from rpft.train.export import ExportSettings, export_run
    from rpft.train.run_folder import open_run

    opened = open_run(run)
    settings = ExportSettings(
        out=out or run / "export",
        checkpoint=checkpoint,
        dtype=None if dtype is None else getattr(torch, DTYPES[dtype]),
        shard_bytes=shard_bytes,
        adapter_only=adapter_only,
        base=base,
    )
    made = export_run(opened, settings, typer.echo)
    drift = made.drift
    if drift is not None:
        typer.echo(
            f"merged: logits on {drift.tokens} probe tokens differ by {drift.max_abs:.3g} at most,"
            f" {drift.mean_abs:.3g} on average, of {drift.largest:.3g}; same likeliest token after"
            f" {drift.top1_agreement:.1%}"
        )
    typer.echo(f"{made.folder}: {'an adapter for peft' if adapter_only else 'a model'}; README.md says what it is")
