"""What `make quickstart` runs: get model and data, fine-tune by the public command, show what it changed.

python scripts/quickstart.py
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from get_quickstart_data import get_data
from get_quickstart_model import get_model

from rpft.errors import EXIT_DONE, EXIT_FAULT, EXIT_INTERRUPTED, UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipes/quickstart.yaml"
# The row of eval.jsonl whose question is put to the model: "what is bacteriology", a short and plain one.
SHOWN_ROW = 12
MAX_ANSWER_TOKENS = 40


@dataclass(frozen=True)
class Paths:
    """What the recipe reads and writes, relative to the repository."""

    model: Path
    data: Path
    eval_file: Path
    output: Path


@dataclass(frozen=True)
class Outcome:
    """What the closing report says; losses are nats a trained token."""

    loss_before: float
    loss_after: float
    question: str
    answer_before: str
    answer_after: str
    adapter: Path
    seconds: float


def read_paths(recipe: Path) -> Paths:
    """The paths that the recipe names, so that they stand in one place."""
    import yaml

    settings: dict[str, Any] = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    eval_file = Path(settings["data"]["eval"][0]["path"])
    return Paths(Path(settings["model"]["path"]), eval_file.parent, eval_file, Path(settings["output_dir"]))


def unused_folder(folder: Path) -> Path:
    """``folder`` itself, or with -2, -3, ... the first that does not exist; earlier runs stay."""
    later = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], later) if not (ROOT / path).exists())


def evaluation_losses(metrics_lines: Iterable[str]) -> list[float]:
    """The evaluation losses of a metrics.jsonl, in order: its first is before training, its last after."""
    rows = [json.loads(line) for line in metrics_lines if line.strip()]
    losses = [float(row["eval_loss"]) for row in rows if "eval_loss" in row]
    if len(losses) < 2:
        raise UserError(f"metrics.jsonl holds {len(losses)} evaluations, expected one before and one after")
    return losses


def train(output: Path, default_output: Path) -> int:
    """Run the public command, its output going straight to the person; returns its exit code."""
    arguments = ["train", RECIPE]
    if output != default_output:
        arguments.append(f"output_dir={output}")
    print(f"\n$ rpft {' '.join(arguments)}", flush=True)
    return subprocess.run([sys.executable, "-m", "rpft", *arguments], cwd=ROOT).returncode


def answers(model_folder: Path, adapter_folder: Path, question: str) -> tuple[str, str]:
    """The greedy answer to ``question`` of the model as it came, and with the adapter on it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    # What the libraries say to their own developers would push the report off the screen.
    disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )

    def answer(model: Any) -> str:
        with torch.inference_mode():
            tokens = model.generate(**prompt, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)[0]
        new = tokens[prompt["input_ids"].shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True).strip()
        return text if new[-1] == tokenizer.eos_token_id else f"{text} ..."

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    before = answer(model)
    return before, answer(PeftModel.from_pretrained(model, adapter_folder))


def print_report(outcome: Outcome) -> None:
    """The closing page: what was lost, what was won, where it lies, what to do next."""
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    fell = outcome.loss_after < outcome.loss_before
    change = 100 * (outcome.loss_after / outcome.loss_before - 1)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    losses = f"{outcome.loss_before:.3f} -> {outcome.loss_after:.3f}  ({change:+.0f}%)"
    table.add_row("Evaluation loss", Text(losses, style="green" if fell else "red"))
    table.add_row("Question", Text(outcome.question))
    table.add_row("Answer before", Text(outcome.answer_before, style="dim"))
    table.add_row("Answer after", Text(outcome.answer_after))
    table.add_row("Adapter", Text(str(outcome.adapter)))
    table.add_row("Time", f"{outcome.seconds:.0f} s, model and data included")
    following = Text(
        "\nNext\n"
        "  rpft recipes                    see what else there is\n"
        "  rpft recipes copy quickstart    get a recipe of your own, put your model and rows in\n"
        "  rpft train quickstart.yaml      run it"
    )
    note = Text(
        "\nNo question of the evaluation was trained on: what changed is how it answers, not what it knows."
    )
    title = "The model learned" if fell else "The evaluation loss did not fall"
    Console().print(Panel(Group(table, note, following), title=title, border_style="green" if fell else "red"))


def run() -> int:
    """The whole quickstart; returns the exit code."""
    started = time.monotonic()
    paths = read_paths(ROOT / RECIPE)
    for get, folder in ((get_model, paths.model), (get_data, paths.data)):
        if not get(ROOT / folder):
            print(f"{folder} is there already.")
    output = unused_folder(paths.output)
    exit_code = train(output, paths.output)
    if exit_code != EXIT_DONE:
        print(f"Error: rpft train ended with exit code {exit_code}; its report stands above.", file=sys.stderr)
        return exit_code if exit_code > 0 else EXIT_FAULT
    with (ROOT / output / "metrics.jsonl").open(encoding="utf-8") as lines:
        losses = evaluation_losses(lines)
    rows = (ROOT / paths.eval_file).read_text(encoding="utf-8").split("\n")
    question = json.loads(rows[SHOWN_ROW])["messages"][0]["content"]
    print("\nAsking the model one question of the evaluation set, without and with the adapter ...", flush=True)
    before, after = answers(ROOT / paths.model, ROOT / output / "adapter", question)
    seconds = time.monotonic() - started
    print_report(Outcome(losses[0], losses[-1], question, before, after, output / "adapter", seconds))
    return EXIT_DONE if losses[-1] < losses[0] else EXIT_FAULT


def main() -> int:
    """Command line; returns the exit code."""
    try:
        return run()
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
