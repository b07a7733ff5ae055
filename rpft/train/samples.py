"""samples.json: a few rows as questions, and what the model answered before training and after it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rpft import files
from rpft.data.rows import Row
from rpft.errors import UserError
from rpft.train.generate import Speaker
from rpft.train.rows import RunData
from rpft.train.run_folder import BASE, LATEST, read_json
from rpft.train.run_lock import holder

SAMPLES_FILE = "samples.json"
MOST_NEW_TOKENS = 128

_SAMPLES = 4
_ROWS_LOOKED_AT = 100
_LONGEST_PROMPT, _LONGEST_ANSWER = 1024, 512
_START_OF_A_TEXT = 32


@dataclass(frozen=True)
class Sample:
    """One row of the run, as the tokens before its first trained ones and those."""

    prompt: list[int]
    expected: list[int]
    held_out: bool
    """Whether it is an evaluation row, which training has not seen."""
    asked: str = ""
    """The prompt as text, special tokens included; this and what follows is known once the model was asked."""
    wanted: str = ""
    before: str = ""
    after: str = ""
    after_of: str = ""
    """What answered last: the result, or the checkpoint of a step."""

    @property
    def answered(self) -> bool:
        return bool(self.after_of)


def write_samples(data: RunData, folder: Path) -> None:
    """Leaves questions in ``folder``: the first rows of the evaluation, or of the training where there is none."""
    of = data.train if data.eval is None else data.eval
    rows = (of.rows[i] for i in range(min(_ROWS_LOOKED_AT, len(of.rows))))
    samples = [sample for row in rows if (sample := _sample(row, data.eval is not None)) is not None]
    _write(folder, samples[:_SAMPLES])


def read_samples(folder: Path) -> list[Sample]:
    """Those of a run; none of one that left none."""
    try:
        return [Sample(**entry) for entry in read_json(folder / SAMPLES_FILE).get("samples", [])]
    except TypeError as error:
        raise UserError(f"{folder / SAMPLES_FILE}: not as a run leaves it ({error}); move it away") from error


def ask_samples(folder: Path, base: str | None, say: Callable[[str], None]) -> None:
    """Has the base model of the run in ``folder``, and what was trained, answer; the likeliest token always.

    Both are loaded, one after the other. UserError where the run is under way, or has no questions.
    """
    running = holder(folder)
    if running is not None:
        raise UserError(
            f"{folder} is in use by a run ({running}), and samples load its model once more beside it: wait for"
            " its end, or leave --samples out"
        )
    samples = read_samples(folder)
    if not samples:
        raise UserError(
            f"{folder}: no questions in {SAMPLES_FILE}: the run was begun by an rpft that left none, or its rows"
            f" are all too long. `rpft generate {folder} PROMPT` asks one of your own"
        )
    with ExitStack() as open_ones:
        speakers = {name: open_ones.enter_context(closing(Speaker(folder, name, base))) for name in (BASE, LATEST)}
        for name, speaker in speakers.items():  # neither has loaded anything yet
            say(f"{speaker.described} answers {len(samples)} row(s)")
            samples = [_answered(sample, speaker, name) for sample in samples]
            speaker.close()
    _write(folder, samples)


def _answered(sample: Sample, speaker: Speaker, checkpoint: str) -> Sample:
    said = speaker.answer_ids(sample.prompt, max_new_tokens=MOST_NEW_TOKENS).text
    if checkpoint == BASE:
        asked, wanted = speaker.text(sample.prompt, special=True), speaker.text(sample.expected)
        return replace(sample, asked=asked, wanted=wanted, before=said)
    return replace(sample, after=said, after_of=speaker.described)


def _sample(row: Row, held_out: bool) -> Sample | None:
    trained = row.trained.nonzero()[0].tolist()
    start = trained[0]
    if start <= 1:  # a text, which is trained from its start on: the model is to go on with it
        start = min(_START_OF_A_TEXT, len(row.ids) // 2)
    end = next((i for i in range(start, len(row.ids)) if not row.trained[i]), len(row.ids))
    if not 0 < start <= _LONGEST_PROMPT:
        return None
    end = min(end, start + _LONGEST_ANSWER)
    return Sample(row.ids[:start].tolist(), row.ids[start:end].tolist(), held_out)


def _write(folder: Path, samples: Sequence[Sample]) -> None:
    content: dict[str, Any] = {"samples": [asdict(sample) for sample in samples]}
    files.write_whole(folder / SAMPLES_FILE, json.dumps(content, ensure_ascii=False) + "\n")
