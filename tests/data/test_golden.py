"""Chats of seven families print and train exactly what golden/ says; marks of others mark the same answers."""

import json
import re

import pytest
from golden_chats import CHATS, CLOSE, FOLDER, MODELS, OPEN, bracketed, rows_of
from support import packages

from rpft.data.loader import DataSettings, RowLoader
from rpft.data.report import SourceReport
from rpft.data.sources import Source, Unread

pytestmark = pytest.mark.slow

MARKED_BY_OTHERS = {
    "qwen3": "qwen3_instruct_2507",
    "llama3": "llama3",
    "gemma3": "gemma3",
    "deepseek_v3": "deepseekv3",
    "phi3": "phi3",
}
"""Templates of the PyPI package trl, with generation marks, by the family whose tokenizer reads them."""

HEADERS = ("<｜Assistant｜>",)
"""What those marks take in before an answer: there it is part of the prompt."""


@pytest.mark.parametrize("model", MODELS)
def test_chats_of_a_family_print_and_train_exactly_this(model):
    golden = json.loads((FOLDER / f"{model}.json").read_text(encoding="utf-8"))
    assert rows_of(model) == golden


@pytest.mark.parametrize("model", MODELS)
def test_golden_rows_train_every_answer_whole_and_nothing_that_others_say(model):
    for name, found in json.loads((FOLDER / f"{model}.json").read_text(encoding="utf-8")).items():
        if "refused" in found:
            assert name == "a tool"
            continue
        trained = re.findall(f"{OPEN}(.*?){CLOSE}", found["text"], re.DOTALL)
        answers = [m for m in CHATS[name]["messages"] if m["role"] == "assistant"]
        asked = [m["content"] for m in answers if m.get("train") is not False]
        assert len(trained) == len(asked)
        for piece, answer in zip(trained, asked, strict=True):
            said = (answer or "").rpartition("</think>")[2].strip()
            assert said.replace(" ", "") in piece.replace(" ", "")
        for message in CHATS[name]["messages"]:
            if message["role"] == "user":
                assert not any(
                    message["content"].strip() in piece for piece in trained if len(message["content"]) > 3
                )


@pytest.mark.parametrize("model", MARKED_BY_OTHERS)
def test_marks_of_others_mark_the_same_answers(model):
    """The same template with marks and without: the same is derived, but for marked headers and line ends."""
    folder = packages.pypi_package("trl==1.16.0") / "trl/chat_templates"
    marked = (folder / f"{MARKED_BY_OTHERS[model]}_training.jinja").read_text(encoding="utf-8")
    plain = re.sub(r"\{%-? *(end)?generation *-?%\}", _blank_control, marked)
    tokenizer = MODELS[model][0]()
    for name, row in CHATS.items():
        if name == "a tool" or (model == "phi3" and name == "one answer left out"):
            # Calls are printed in words of their own there, and Phi 3's end of text has marks of its own, so that
            # single answers cannot be chosen.
            continue
        texts = []
        for template in (marked, plain):
            loader = RowLoader(tokenizer, DataSettings(4096, chat_template=template))
            ((_, found),) = loader.rows([Unread("row", row)], 0, Source("f"), SourceReport("f"))
            texts.append(bracketed(found.ids.tolist(), found.trained.tolist(), loader))
        by_marks, derived = (
            [_core(piece) for piece in re.findall(f"{OPEN}(.*?){CLOSE}", t, re.DOTALL)] for t in texts
        )
        assert derived == by_marks, name
        assert re.sub(f"[{OPEN}{CLOSE}]", "", texts[0]) == re.sub(f"[{OPEN}{CLOSE}]", "", texts[1])


def _blank_control(mark: re.Match[str]) -> str:
    """A tag that prints nothing and takes the blanks that the mark took."""
    text = mark.group()
    return f"{{%{'-' if text[2] == '-' else ''} set _ = 0 {'-' if text[-3] == '-' else ''}%}}"


def _core(piece: str) -> str:
    for header in HEADERS:
        piece = piece.removeprefix(header)
    return piece.strip()
