"""`rpft generate`: answers from a run or a model folder."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[
        Path, typer.Argument(help="The output directory of a run, or the folder of a model or of an adapter.")
    ],
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from the standard input.")],
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint",
            metavar="latest|best|base|PATH",
            help="Of a run: its result or else newest checkpoint, the one with the lowest evaluation loss, the"
            " model before training, or a checkpoint by its folder or name.",
        ),
    ] = "latest",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="The longest answer.")] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0: always the likeliest token. Above: drawn at random.")
    ] = 0.0,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="DIR", help="Where the base model is now, if not where the recipe says."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer and its figures as JSON.")] = False,
) -> None:
    """Ask the model that RUN trained, as its rows asked: with their chat template.

    A model that fits no GPU is streamed through it, layer by layer for every token, which takes its time.

    Examples:

        rpft generate out/my-run "What is a round?"

        rpft generate out/my-run - --checkpoint best --system "Be brief." < question.txt
    """
    from rpft.cli.train import quiet_libraries

    quiet_libraries()
    from rpft.train.generate import Speaker

    asked = sys.stdin.read() if prompt == "-" else prompt
    speaker = Speaker(run, checkpoint, base, say=lambda line: typer.echo(line, err=True))
    try:
        if not as_json:
            typer.echo(f"{speaker.described}:", err=True)
        answer = speaker.answer(
            asked,
            system=system,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            write=(lambda text: None) if as_json else lambda text: typer.echo(text, nl=False),
        )
    finally:
        speaker.close()
    if as_json:
        typer.echo(json.dumps({"model": speaker.described, "prompt": asked, **asdict(answer)}, ensure_ascii=False))
        return
    typer.echo()
    end = "" if answer.ended else f"; cut at --max-new-tokens {max_new_tokens}"
    typer.echo(f"{answer.tokens} tokens in {answer.seconds:.1f} s{end}", err=True)
