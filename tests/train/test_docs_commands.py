"""Every rpft command of README and docs/ runs, in a folder with the files that they name, on a tiny model."""

from __future__ import annotations

import io
import itertools
import re
import shlex
import shutil
from pathlib import Path

import pytest
from support.docs import PAGES, ROOT, commands
from support.recipes import run_rpft

FORMS = {"RUN": "out/mine", "OUTPUT_DIR": "out/mine", "NAME": "quickstart", "RECIPE": "recipe.yaml"}
"""What stands for a name, and a name."""

LONG = ("train", "plan", "bench", "profile", "generate", "doctor", "--samples")
"""What takes seconds even here; the first page's, train and plan among them, are run by tests/test_docs.py."""

ELSEWHERE = {
    "rpft train recipes/quickstart.yaml optimizer.update=delayed": "a model that make quickstart gets",
    "rpft recipes show-schema --markdown > docs/recipe.md": "tests/test_reference.py",
}
"""Commands that run in other tests, or need what is not here."""

RECIPE = """
model: {path: base, dtype: float32}
data: {train: [train.jsonl], eval: [eval.jsonl], max_seq_len: 120}
adapter: {type: lora, r: 2}
train: {learning_rate: 0.01, gradient_accumulation_steps: 4, max_steps: 2, eval_every: 1}
checkpoint: {every_steps: 1, keep_best: true}
engine: {device: cpu, workers: 1, cpu_threads: 1}
output_dir: out/mine
"""
CONFIG = """
base_model: meta-llama/Llama-3.1-8B
datasets: [{path: rows.jsonl, type: chat_template}]
learning_rate: 0.0002
micro_batch_size: 1
gradient_accumulation_steps: 4
output_dir: ./out
"""


def lines() -> list[str]:
    """Each command of the pages once; a verb that is only named is none."""
    found = {}
    for command in itertools.chain.from_iterable(map(commands, PAGES)):
        if command.words[0] == "rpft" and len(command.words) > 2:
            found[" ".join(command.words)] = command.text.partition(" #")[0].strip()
    return sorted(text for text in found.values() if text not in ELSEWHERE)


LINES = lines()


@pytest.fixture(scope="module")
def prepared(project, tmp_path_factory):
    """The folder as it is before each command; it holds a run, and copies of it."""
    made, folder = (
        project("docs commands", "qwen3", max_position_embeddings=1024),
        tmp_path_factory.mktemp("docs commands"),
    )
    shutil.copytree(made.folder / "base", folder / "base")
    for name in ("train.jsonl", "eval.jsonl"):
        shutil.copyfile(made.folder / name, folder / name)
    for name in ("mine.yaml", "recipe.yaml"):
        (folder / name).write_text(RECIPE)
    (folder / "config.yml").write_text(CONFIG)
    (folder / "question.txt").write_text("yes or no")
    shutil.copyfile(ROOT / "rpft/plan/machines/4x3090.yaml", folder / "my-machine.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ran = run_rpft("train", "mine.yaml", "--quiet")
        assert ran.code == 0, ran.err
        for copy in ("out/second", "out/my-run"):
            shutil.copytree("out/mine", copy)
    return folder


def filled_in(line: str) -> list[str]:
    """The words of ``line`` without the program, with names of this folder for what stands for one."""
    words = [FORMS.get(word, word) for word in shlex.split(line, comments=True)][1:]
    match words:
        case ["recipes", "import", "FILE", *_]:
            words[2] = "config.yml"
        case ["bench", "--simulate", "FILE", *_]:
            words[2] = "my-machine.yaml"
        case ["data", _, "--row", _]:
            words[3] = "2"
        case ["train", _, "--resume", checkpoint]:
            words[3] = re.sub(".*/step-.*", "out/mine/checkpoints/step-00000001", checkpoint)
        case ["train", *rest] if "--resume" not in rest:
            words = [*(word for word in words if not word.startswith("output_dir=")), "output_dir=out/new"]
    return words


def is_long(line: str) -> bool:
    return any(word in LONG for word in line.split())


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.slow] if is_long(line) else [], id=line) for line in LINES]
)
def test_a_command_of_the_pages_runs(line, prepared, tmp_path, monkeypatch):
    here = tmp_path / "here"
    shutil.copytree(prepared, here)
    monkeypatch.chdir(here)
    line, _, asked = line.partition(" < ")
    if asked:
        monkeypatch.setattr("sys.stdin", io.StringIO(Path(asked.strip()).read_text()))
    words = filled_in(line)
    if words[:2] == ["recipes", "import"]:
        Path("mine.yaml").unlink()  # it is what the command writes
    ran = run_rpft(*words)
    assert ran.code == 0, ran.err
    assert (ran.out + ran.err).strip()
