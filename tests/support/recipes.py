"""Whole runs of `rpft train` on tiny models, in process: checkpoint and tokenizer, rows, recipe, the command."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rpft.cli import main
from rpft.console.plain import PlainReporter
from rpft.train.metrics import StepRecord
from support.models import VOCABULARY, tiny_checkpoint

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<pad>", "<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("the", "answer", "is", "yes", "no", "one", "two", "three", "red", "green", "blue", "maybe", "never")


class Ran(NamedTuple):
    """What one command line gave."""

    code: int
    out: str
    err: str


def run_rpft(*words: str) -> Ran:
    """Runs `rpft WORDS...` in this process (importing torch takes seconds) and gives exit code and outputs."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return Ran(code, out.getvalue(), err.getvalue())


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most VOCABULARY ids with a ChatML template; special ids as in the tiny configs."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIALS),
        show_progress=False,
    )
    core.train_from_iterator([" ".join(WORDS), "user assistant"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIALS[3:])})
    tokenizer.chat_template = CHATML
    return tokenizer


def chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of messages: a question, an answer, sometimes a second pair; 14 to 50 tokens or so."""
    rng = random.Random(seed)

    def said() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))

    rows = []
    for _ in range(count):
        messages = []
        for _ in range(rng.choice([1, 1, 2])):
            messages += [{"role": "user", "content": said()}, {"role": "assistant", "content": said()}]
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_plan(path: Path, forward: Any, backward: Any, num_microbatches: int, recompute: str = "stage") -> Path:
    """A plan file as people write it."""
    stages = {"forward": forward, "backward": backward}
    path.write_text(
        json.dumps({"version": 1, **stages, "num_microbatches": num_microbatches, "recompute": recompute}),
        encoding="utf-8",
    )
    return path


@dataclass
class Project:
    """A folder with a recipe, its model and its rows; ``train`` runs the recipe into ``folder / output``."""

    folder: Path
    recipe: Path

    def train(self, output: str, *words: str) -> Ran:
        """`rpft train RECIPE output_dir=... WORDS...`."""
        return run_rpft("train", str(self.recipe), f"output_dir={self.folder / output}", *words)

    def train_well(self, output: str, *words: str) -> Outcome:
        """A run that must end well, and what it left."""
        ran = self.train(output, *words)
        assert ran.code == 0, ran.err
        return self.outcome(output)

    def outcome(self, output: str) -> Outcome:
        return Outcome(self.folder / output)


OnStep = Callable[[StepRecord], None]
OnSave = Callable[[Path], None]
TIMES = ("tokens_per_second", "step_seconds", "optimizer_seconds", "host_rss_bytes", "devices")
"""Keys of a step's metrics that are measured, not computed."""


@dataclass
class Outcome:
    """What a run left in its output directory."""

    folder: Path
    lines: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        self.lines = [json.loads(line, parse_constant=_no_constant) for line in text.splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "loss" in line]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.steps]

    @property
    def evaluations(self) -> dict[int, float]:
        """Step to evaluation loss."""
        return {line["step"]: line["eval_loss"] for line in self.lines if "eval_loss" in line}

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """Every line of a step or an evaluation, in order, with what must be the same in an equal run."""
        kept = [line for line in self.lines if line.keys() & {"loss", "eval_loss"}]
        return [{k: v for k, v in line.items() if k not in TIMES} for line in kept]

    @property
    def smaller_plans(self) -> list[dict[str, Any]]:
        """Lines of plans that were made smaller on the way."""
        return [line for line in self.lines if "out_of_memory" in line]

    @property
    def result(self) -> dict[str, bytes]:
        """The saved tensors: file name to bytes."""
        return {path.name: path.read_bytes() for path in self.folder.glob("[ma]*/*.safetensors")}

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("*"))


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def make_project(
    folder: Path,
    family: str = "llama",
    *,
    rows: list[dict[str, Any]] | None = None,
    eval_rows: int = 5,
    sections: dict[str, dict[str, Any]] | None = None,
    change_model: Callable[[Any], None] | None = None,
    **config: Any,
) -> Project:
    """A float32 project on one CPU worker; ``sections`` add to the recipe's, ``config`` changes the model's.

    By default 24 rows, steps of 4 rows in 4 microbatches, 4 steps, evaluation on 5 other rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_checkpoint(folder / "base", family, **config)
    if change_model is not None:
        change_model(model)
        model.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    train_file = write_jsonl(folder / "train.jsonl", chats(24) if rows is None else rows)
    data: dict[str, Any] = {"train": [str(train_file)], "max_seq_len": 120}
    if eval_rows:
        data["eval"] = [str(write_jsonl(folder / "eval.jsonl", chats(eval_rows, seed=99)))]
    recipe: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "base"), "dtype": "float32"},
        "data": data,
        "train": {"learning_rate": 0.01, "gradient_accumulation_steps": 4, "max_steps": 4, "warmup_ratio": 0.25},
        "optimizer": {"weight_decay": 0.1},
        "engine": {"device": "cpu", "workers": 1, "cpu_threads": 1},
    }
    for name, keys in (sections or {}).items():
        recipe[name] = {**recipe.get(name, {}), **keys}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe, "output_dir": str(folder / "out")}), encoding="utf-8")
    return Project(folder, path)


def encode_chat(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids of a row and its labels (-100 where not trained; not shifted), piece by piece, without rpft."""
    ids: list[int] = []
    labels: list[int] = []
    for message in row["messages"]:
        answers = message["role"] == "assistant"
        for text, trained in (
            (f"<|im_start|>{message['role']}\n", False),
            (message["content"] + "<|im_end|>", answers),
            ("\n", False),
        ):
            piece = tokenizer(text, add_special_tokens=False).input_ids
            ids += piece
            labels += piece if trained else [-100] * len(piece)
    return ids, labels


def plain_loss_sum(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, int]:
    """Cross-entropy over the answers of ``rows`` in plain transformers, row by row, and the tokens scored."""
    total, count = torch.zeros(()), 0
    for row in rows:
        ids, labels = encode_chat(tokenizer, row)
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        targets = torch.tensor(labels[1:])
        total = total + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        count += int((targets >= 0).sum())
    return total, count


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def unbroken_runs(
    project: Callable[..., Project],
    label: str,
    kinds: Mapping[str, tuple[str, dict[str, Any]]],
    train: dict[str, Any],
) -> Callable[[str], tuple[Project, Outcome]]:
    """of(kind) -> the project of (family, sections) and ``train``, and its run without a break, made once."""
    known: dict[str, Outcome] = {}

    def of(kind: str) -> tuple[Project, Outcome]:
        family, sections = kinds[kind]
        made = project(
            f"{label} {kind}", family, sections={**sections, "train": {**sections.get("train", {}), **train}}
        )
        if kind not in known:
            known[kind] = made.train_well("unbroken")
        return made, known[kind]

    return of


class _Watched(PlainReporter):
    """Plain lines; calls back on each step and each save, where a test may fail or interrupt the run."""

    def __init__(self, every_steps: int, on_step: OnStep, on_save: OnSave) -> None:
        super().__init__(every_steps)
        self._on_step, self._on_save = on_step, on_save

    def stepped(self, record: StepRecord) -> None:
        super().stepped(record)
        self._on_step(record)

    def saved(self, path: Path) -> None:
        super().saved(path)
        self._on_save(path)


def watch(
    monkeypatch: pytest.MonkeyPatch,
    on_step: OnStep = lambda record: None,
    on_save: OnSave = lambda path: None,
) -> None:
    """Has the steps and saves of this test's runs reported to the test, in the main thread."""

    def make(console: str, every_steps: int, terminal: object) -> _Watched:
        return _Watched(every_steps, on_step, on_save)

    monkeypatch.setattr("rpft.console.make_reporter", make)


class Crash(Exception):
    """The end of a run that nothing in it foresaw."""


def crash_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends this test's runs when ``step`` is reported."""

    def on_step(record: StepRecord) -> None:
        if record.step == step:
            raise Crash(f"step {step}")

    watch(monkeypatch, on_step)
