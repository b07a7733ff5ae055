"""Turn a row of one of the known formats into a chat or a plain text, values unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rpft.data.sources import Format, RawRow
from rpft.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}

EMPTY_ANSWER = "empty answer"
EMPTY_TEXT = "empty text"
NO_ANSWER = "no assistant turn"


@dataclass(frozen=True)
class Chat:
    """The messages of a row, and for each whether it may be trained (never true for an empty answer)."""

    messages: list[dict[str, Any]]
    trainable: list[bool]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Dropped:
    """A row that gives nothing to train on, with the reason under which it is counted."""

    reason: str


def detect_format(row: RawRow) -> Format:
    """The format that the keys of a file's first row say; UserError when they say none."""
    keys = row.value.keys()
    if "messages" in keys or "conversations" in keys:
        return "messages"
    if "instruction" in keys and "output" in keys:
        return "alpaca"
    if "text" in keys:
        return "text"
    raise UserError(
        f"{row.where}: no format is known for a row with the keys {', '.join(sorted(keys)) or '(none)'}. "
        "Known are messages (or conversations), instruction + output, and text."
    )


def parse_row(row: RawRow, format: Format) -> Chat | str | Dropped:
    """Read one row: a Chat, the text of a text row, or Dropped; UserError when the row does not fit."""
    if format == "messages":
        return _parse_chat(row)
    if format == "alpaca":
        return _parse_alpaca(row)
    text = _optional_text(row, "text", format)
    return text or Dropped(EMPTY_TEXT)


def _parse_chat(row: RawRow) -> Chat | Dropped:
    key = "messages" if "messages" in row.value else "conversations"
    entries = row.value.get(key)
    if not isinstance(entries, list) or not entries:
        raise UserError(
            f"{row.where}: a row of format messages needs a list `messages` (or `conversations`) that is not "
            f"empty; this row has the keys {', '.join(sorted(row.value)) or '(none)'}."
        )
    tools = row.value.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{row.where}: `tools` must be a list of JSON schemas.")
    messages, trainable = [], []
    for number, entry in enumerate(entries):
        place = f"{row.where}, {key}[{number}]"
        if not isinstance(entry, dict):
            raise UserError(f"{place}: a message must be an object.")
        message, trained = _parse_message(entry, place)
        messages.append(message)
        trainable.append(trained)
    return _chat_or_dropped(messages, trainable, tools or None)


def _parse_message(entry: dict[str, Any], place: str) -> tuple[dict[str, Any], bool]:
    if "role" not in entry and "from" in entry:
        entry = {**entry, "role": _sharegpt_role(entry["from"], place), "content": entry.get("value")}
        del entry["from"]
        entry.pop("value", None)
    role = entry.get("role")
    if role not in ROLES:
        raise UserError(f"{place}: unknown role {role!r}; the roles are {', '.join(ROLES)}.")
    # Files that passed through a table format hold null for every key that a message does not have, and
    # templates that ask whether the key is there would take it for present.
    message = {key: value for key, value in entry.items() if value is not None and key != "train"}
    train = entry.get("train")
    if train not in (None, True, False) or (train and role != "assistant"):
        raise UserError(
            f"{place}: `train` must be true or false, and only an assistant message can be true "
            "(data.train_on: all trains on every message)."
        )
    calls = message.get("tool_calls")
    if calls is not None and (role != "assistant" or not _is_list_of_calls(calls)):
        raise UserError(
            f"{place}: `tool_calls` must stand in an assistant message, as a list of "
            "{function: {name, arguments}}."
        )
    message["content"] = _content(entry.get("content"), role, bool(calls), place)
    empty = role == "assistant" and not calls and not (message["content"] or "").strip()
    return message, train is not False and not empty


def _is_list_of_calls(calls: Any) -> bool:
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function", call), dict) for call in calls
    )


def _sharegpt_role(name: Any, place: str) -> str:
    if name == "function_call":
        raise UserError(
            f"{place}: `function_call` turns are not read yet: their value is text whose tool call cannot be "
            "given to a chat template. Write an assistant message with `tool_calls` instead."
        )
    if not isinstance(name, str) or name not in SHAREGPT_ROLES:
        raise UserError(f"{place}: unknown speaker {name!r}; known are {', '.join(SHAREGPT_ROLES)}.")
    return SHAREGPT_ROLES[name]


def _content(content: Any, role: str, has_calls: bool, place: str) -> Any:
    if isinstance(content, list) and content and all(isinstance(p, dict) and "type" in p for p in content):
        others = sorted({str(part["type"]) for part in content} - {"text"})
        if others:
            raise UserError(f"{place}: content of type {', '.join(others)} is not supported, only text.")
        if not all(isinstance(part.get("text"), str) for part in content):
            raise UserError(f"{place}: a content part of type text needs a `text` that is text.")
        return "".join(part["text"] for part in content)
    # A tool may answer with any JSON value; what to print of it is the template's affair.
    if isinstance(content, str) or (role == "tool" and content is not None):
        return content
    if content is None and role == "assistant":
        return None if has_calls else ""
    raise UserError(f"{place}: `content` of a {role} message must be text, not {type(content).__name__}.")


def _parse_alpaca(row: RawRow) -> Chat | Dropped:
    instruction = _optional_text(row, "instruction", "alpaca")
    extra = _optional_text(row, "input", "alpaca") if "input" in row.value else ""
    output = _optional_text(row, "output", "alpaca")
    messages = [
        {"role": "user", "content": "\n\n".join(part for part in (instruction, extra) if part)},
        {"role": "assistant", "content": output},
    ]
    return _chat_or_dropped(messages, [True, bool(output.strip())], None)


def _optional_text(row: RawRow, key: str, format: str) -> str:
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
    if not any(answer.get("tool_calls") or answer["content"].strip() for answer in answers):
        return Dropped(EMPTY_ANSWER)
    return Chat(messages, trainable, tools)
