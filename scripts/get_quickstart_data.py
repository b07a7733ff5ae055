"""Makes the quickstart's question/answer files from the English part of PyPI's chatterbot-corpus.

Writes train.jsonl and eval.jsonl (a ``messages`` row a line) such that no question of the evaluation set is
trained on, however it is capitalised, spaced or punctuated. The corpus repeats itself a lot, so each
conversation is kept once. The result depends on the package's version alone.

    python scripts/get_quickstart_data.py --dest out/quickstart-data
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from quickstart_assets import install_package, is_finished, published_folder

from rpft.errors import EXIT_BAD_INPUT, UserError

DEFAULT_DEST = Path("out/quickstart-data")
REQUIREMENT = "chatterbot-corpus==1.3.3"
FOLDER_IN_PACKAGE = "chatterbot_corpus/data/english"
FINISHED_FILES = ("train.jsonl", "eval.jsonl")

# In these files the lines after a question are different answers to it; elsewhere the speakers alternate.
FILES_OF_ALTERNATIVES = ("computers", "emotion")

EVAL_ROWS = 48
# Answers that say something and still cost little to evaluate on a CPU.
EVAL_ANSWER_CHARACTERS = range(12, 201)

README = f"""\
English questions and answers for rpft's quickstart: train.jsonl and eval.jsonl.

Source: the PyPI package {REQUIREMENT} by Gunther Cox and contributors, BSD licence.
Changed: YAML to JSONL, repeated conversations removed, split so that no question of eval.jsonl occurs in
train.jsonl. The corpus is community-written: parts of it are jokes, and parts are wrong.
"""

Conversation = tuple[str, ...]


def normalize(text: str) -> str:
    """The text without case, punctuation and spacing: what makes two questions the same question."""
    return " ".join(re.sub(r"[\W_]+", " ", text.casefold()).split())


def read_conversations(text: str, alternatives: bool) -> list[Conversation]:
    """Conversations of one YAML file: user, assistant, user, assistant, ...; always an even number of turns.

    With ``alternatives`` an entry is one question and several answers, and gives a conversation an answer.
    An unanswered last turn is dropped. Entries which are no list of texts, or have a turn without
    a letter or digit, are left out.
    """
    import yaml

    conversations: list[Conversation] = []
    for entry in yaml.safe_load(text)["conversations"]:
        if not isinstance(entry, list):
            continue
        turns = [str(turn).strip() for turn in entry]
        if not all(normalize(turn) for turn in turns):
            continue
        if alternatives:
            conversations += [(turns[0], answer) for answer in turns[1:]]
        elif len(turns) >= 2:
            conversations.append(tuple(turns[: len(turns) // 2 * 2]))
    return conversations


def without_duplicates(conversations: list[Conversation]) -> list[Conversation]:
    """The first of all conversations that are equal after ``normalize``, in their order."""
    first: dict[tuple[str, ...], Conversation] = {}
    for turns in conversations:
        first.setdefault(tuple(map(normalize, turns)), turns)
    return list(first.values())


def split(conversations: list[Conversation], eval_rows: int) -> tuple[list[Conversation], list[Conversation]]:
    """(train, eval), both in an order drawn from their content, so that a beginning is a fair sample.

    A question may be evaluated if it is asked in one conversation only, of a single answer whose length is
    within ``EVAL_ANSWER_CHARACTERS``; a question inside a longer dialogue counts as asked. So no
    question is in both parts.
    """
    asked_in: defaultdict[str, set[Conversation]] = defaultdict(set)
    for turns in conversations:
        for question in turns[::2]:
            asked_in[normalize(question)].add(turns)

    def may_be_evaluated(turns: Conversation) -> bool:
        alone = len(asked_in[normalize(turns[0])]) == 1
        return len(turns) == 2 and alone and len(turns[1]) in EVAL_ANSWER_CHARACTERS

    def draw(turns: Conversation) -> str:
        return hashlib.sha256("\n".join(map(normalize, turns)).encode()).hexdigest()

    shuffled = sorted(conversations, key=draw)
    evaluation = [turns for turns in shuffled if may_be_evaluated(turns)][:eval_rows]
    held_out = set(evaluation)
    return [turns for turns in shuffled if turns not in held_out], evaluation


def to_row(turns: Conversation) -> str:
    """The conversation as one line of JSON: ``{"messages": [{"role": ..., "content": ...}, ...]}``."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def get_data(dest: Path) -> bool:
    """Make the two files in ``dest`` unless they are there already; returns whether they were made."""
    if is_finished(dest, FINISHED_FILES):
        return False
    with tempfile.TemporaryDirectory(prefix="rpft-data-") as name:
        print(f"Getting {REQUIREMENT} (0.3 MB) from the package registry ...", flush=True)
        install_package(REQUIREMENT, Path(name))
        conversations: list[Conversation] = []
        for path in sorted((Path(name) / FOLDER_IN_PACKAGE).glob("*.yml")):
            text = path.read_text(encoding="utf-8")
            conversations += read_conversations(text, alternatives=path.stem in FILES_OF_ALTERNATIVES)
    kept = without_duplicates(conversations)
    parts = dict(zip(FINISHED_FILES, split(kept, EVAL_ROWS), strict=True))
    with published_folder(dest) as folder:
        for file_name, rows in parts.items():
            (folder / file_name).write_bytes("".join(map(to_row, rows)).encode())
        (folder / "README.md").write_text(README, encoding="utf-8")
    sizes = ", ".join(f"{len(rows)} in {file_name}" for file_name, rows in parts.items())
    print(f"{len(conversations)} conversations, {len(kept)} of them different: {sizes}.")
    return True


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Get the quickstart's questions and answers as JSONL.")
    parser.add_argument("--dest", type=Path, default=DEFAULT_DEST, help="folder to make (default: %(default)s)")
    dest = parser.parse_args(arguments).dest
    try:
        made = get_data(dest)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"Data: {dest}" if made else f"Data: {dest} (already there)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
