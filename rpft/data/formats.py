"""Turn a row of one of the known formats into what is rendered or tokenised, values unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rpft.data.lines import parse_json
from rpft.data.messages import Chat, parse_messages
from rpft.data.sources import Format, RawRow
from rpft.errors import UserError

__all__ = ["Chat", "Completion", "Dropped", "Pair", "Parsed", "Tokens", "detect_format", "parse_row"]

EMPTY_ANSWER = "empty answer"
EMPTY_TEXT = "empty text"
NO_ANSWER = "no assistant turn"

_MEDIA = ("image", "images", "audio", "audios", "video", "videos", "pixel_values")


@dataclass(frozen=True)
class Completion:
    """Plain text in two parts, the second of which is what the model has to say."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokens:
    """A row that is tokenised already. ``trained``: for each id whether it is trained, None for all."""

    ids: list[int]
    trained: list[bool] | None


@dataclass(frozen=True)
class Pair:
    """The same prompt with the answer that is preferred, and the one that is not."""

    chosen: Chat | Completion
    rejected: Chat | Completion


@dataclass(frozen=True)
class Dropped:
    """A row that gives nothing to train on, with the reason under which it is counted."""

    reason: str


Parsed = Chat | Completion | str | Tokens | Pair | Dropped
"""What a row can be; a str is plain text."""


def detect_format(row: RawRow) -> Format:
    """The format that the keys of a source's first row say; UserError when they say none."""
    keys = row.value.keys()
    known: tuple[tuple[Format, tuple[str, ...]], ...] = (
        ("messages", ("messages",)),
        ("messages", ("conversations",)),
        ("preference", ("chosen", "rejected")),
        ("tokens", ("input_ids",)),
        ("alpaca", ("instruction", "output")),
        ("prompt_completion", ("prompt", "completion")),
        ("text", ("text",)),
    )
    for format, needed in known:
        if keys >= set(needed):
            return format
    raise UserError(
        f"{row.where}: no format is known for a row with the keys {', '.join(sorted(keys)) or '(none)'}. Known"
        " are messages (or conversations), chosen + rejected, input_ids, instruction + output, prompt +"
        " completion, and text. Other columns can be given these names with `columns`, as in {instruction:"
        " question, output: answer}."
    )


def parse_row(row: RawRow, format: Format) -> Parsed:
    """Read one row; UserError when it does not fit the format."""
    if format == "tokens":
        return _parse_tokens(row)
    for key in _MEDIA:
        if row.value.get(key) not in (None, [], ""):
            raise UserError(
                f"{row.where}: the row holds `{key}`, and only text is supported. Remove the row, or the key if"
                " the text stands by itself."
            )
    if format == "messages":
        return _parse_chat(row)
    if format == "alpaca":
        return _parse_alpaca(row)
    if format == "prompt_completion":
        return _parse_completion(row, row.value, "completion", "prompt_completion")
    if format == "preference":
        return _parse_pair(row)
    return _optional_text(row, "text", format) or Dropped(EMPTY_TEXT)


def _parse_chat(row: RawRow) -> Chat | Dropped:
    key = "messages" if "messages" in row.value else "conversations"
    entries = row.value.get(key)
    if not isinstance(entries, list) or not entries:
        raise UserError(
            f"{row.where}: a row of format messages needs a list `messages` (or `conversations`) that is not "
            f"empty; this row has the keys {', '.join(sorted(row.value)) or '(none)'}."
        )
    messages, trainable = parse_messages(entries, f"{row.where}, {key}")
    system = _optional_text(row, "system", "messages") if "system" in row.value else ""
    if system:
        if messages[0]["role"] == "system":
            raise UserError(
                f"{row.where}: the row has a `system` and a first message with that role; keep one of them."
            )
        messages.insert(0, {"role": "system", "content": system})
        trainable.insert(0, True)
    return _chat_or_dropped(messages, trainable, _tools(row))


def _tools(row: RawRow) -> list[Any] | None:
    tools = row.value.get("tools")
    if isinstance(tools, str):
        # A table keeps them as the text of the list.
        content = tools.encode("utf-8", "surrogatepass")
        tools = parse_json(content, f"{row.where}, tools") if content.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{row.where}: `tools` must be a list of JSON schemas.")
    return tools or None


def _parse_alpaca(row: RawRow) -> Chat | Dropped:
    instruction = _optional_text(row, "instruction", "alpaca")
    extra = _optional_text(row, "input", "alpaca") if "input" in row.value else ""
    system = _optional_text(row, "system", "alpaca") if "system" in row.value else ""
    output = _optional_text(row, "output", "alpaca")
    messages = [
        {"role": "user", "content": "\n\n".join(part for part in (instruction, extra) if part)},
        {"role": "assistant", "content": output},
    ]
    trainable = [True, bool(output.strip())]
    if system:
        messages.insert(0, {"role": "system", "content": system})
        trainable.insert(0, True)
    return _chat_or_dropped(messages, trainable, None)


def _parse_completion(row: RawRow, value: dict[str, Any], key: str, format: Format) -> Chat | Completion | Dropped:
    """Two texts, or two lists of messages."""
    prompt, said = value.get("prompt"), value.get(key)
    if isinstance(prompt, list) != isinstance(said, list) and prompt is not None and said is not None:
        raise UserError(f"{row.where}: `prompt` and `{key}` must both be text, or both be lists of messages.")
    if not isinstance(said, list):
        text = _optional_text(row, key, format)
        return Completion(_optional_text(row, "prompt", format), text) if text.strip() else Dropped(EMPTY_ANSWER)
    messages, trainable = parse_messages(prompt or [], f"{row.where}, prompt")
    answers, trained = parse_messages(said, f"{row.where}, {key}")
    completion = _chat_or_dropped(answers, trained, _tools(row))
    if isinstance(completion, Dropped):
        return completion
    return Chat(messages + answers, trainable + trained, completion.tools, len(messages))


def _parse_pair(row: RawRow) -> Pair | Dropped:
    sides = []
    for key in ("chosen", "rejected"):
        side = _parse_completion(row, row.value, key, "preference")
        if isinstance(side, Dropped):
            return side
        sides.append(_split_off_prompt(side) if "prompt" not in row.value else side)
    return Pair(*sides)


def _split_off_prompt(side: Chat | Completion) -> Chat | Completion:
    """Without a prompt of its own, all before the last answer of a chat is the prompt."""
    if isinstance(side, Completion):
        return side
    last = max(i for i, message in enumerate(side.messages) if message["role"] == "assistant")
    return Chat(side.messages, side.trainable, side.tools, last)


def _parse_tokens(row: RawRow) -> Tokens | Dropped:
    ids = _whole_numbers(row, "input_ids")
    if not ids:
        return Dropped(EMPTY_TEXT)
    marks = [key for key in ("labels", "completion_mask", "assistant_masks") if row.value.get(key) is not None]
    if not marks:
        return Tokens(ids, None)
    if len(marks) > 1:
        raise UserError(f"{row.where}: {' and '.join(marks)} both say what is trained; keep one of them.")
    flags = _whole_numbers(row, marks[0])
    if len(flags) != len(ids):
        raise UserError(f"{row.where}: `{marks[0]}` has {len(flags)} entries, `input_ids` has {len(ids)}.")
    if marks[0] != "labels":
        return Tokens(ids, [flag == 1 for flag in flags])
    for place, (label, token) in enumerate(zip(flags, ids, strict=True)):
        if label not in (-100, token):
            raise UserError(
                f"{row.where}: labels[{place}] is {label}; a label is the id at the same place, here {token}, or "
                "-100 where nothing is trained (the shift by one is done here)."
            )
    return Tokens(ids, [label != -100 for label in flags])


def _whole_numbers(row: RawRow, key: str) -> list[int]:
    values = row.value.get(key)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise UserError(f"{row.where}: `{key}` of a row of format tokens must be a list of whole numbers.")
    return values


def _optional_text(row: RawRow, key: str, format: Format) -> str:
    """The text under a key that must be there; null is the same as empty."""
    if key not in row.value:
        keys = ", ".join(sorted(row.value)) or "(none)"
        raise UserError(f"{row.where}: a row of format {format} needs the key `{key}`; this one has {keys}.")
    value = row.value[key]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{row.where}: `{key}` must be text, not {type(value).__name__}.")
    return value


def _chat_or_dropped(
    messages: list[dict[str, Any]], trainable: list[bool], tools: list[Any] | None
) -> Chat | Dropped:
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        return Dropped(NO_ANSWER)
    if not any(answer.get("tool_calls") or (answer["content"] or "").strip() for answer in answers):
        return Dropped(EMPTY_ANSWER)
    return Chat(messages, trainable, tools)
