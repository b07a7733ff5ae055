"""Read the messages of a chat, in OpenAI's or ShareGPT's keys, values unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rpft.data.lines import parse_json
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
    "function_call": "assistant",
}


@dataclass(frozen=True)
class Chat:
    """The messages of a row, and for each whether it may be trained (never true for an empty answer).

    ``completion_from``: the message with which the completion of a prompt starts, where the row says it.
    """

    messages: list[dict[str, Any]]
    trainable: list[bool]
    tools: list[Any] | None = None
    completion_from: int | None = None


def parse_messages(entries: Any, where: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """The messages of a list that may not be empty, and for each whether it may be trained.

    ``where`` names row and key.
    """
    messages, trainable = [], []
    for number, entry in enumerate(entries):
        place = f"{where}[{number}]"
        if not isinstance(entry, dict):
            raise UserError(f"{place}: a message must be an object.")
        message, trained = _parse_message(entry, place)
        messages.append(message)
        trainable.append(trained)
    return messages, trainable


def is_plain(message: dict[str, Any]) -> bool:
    """Whether a message is a role and a text, and nothing else."""
    return len(message) == 2 and isinstance(message["content"], str)


def _parse_message(entry: dict[str, Any], place: str) -> tuple[dict[str, Any], bool]:
    if "role" not in entry and "from" in entry:
        entry = _from_sharegpt(entry, place)
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


def _from_sharegpt(entry: dict[str, Any], place: str) -> dict[str, Any]:
    name, value = entry["from"], entry.get("value")
    if not isinstance(name, str) or name not in SHAREGPT_ROLES:
        raise UserError(f"{place}: unknown speaker {name!r}; known are {', '.join(SHAREGPT_ROLES)}.")
    kept = {key: item for key, item in entry.items() if key not in ("from", "value")}
    if name == "function_call":
        return {**kept, "role": "assistant", "tool_calls": _calls_of_text(value, place)}
    return {**kept, "role": SHAREGPT_ROLES[name], "content": value}


def _calls_of_text(value: Any, place: str) -> list[dict[str, Any]]:
    """The calls that the text of a `function_call` turn writes as JSON: one object, or a list of them."""
    calls = parse_json(value.encode("utf-8", "surrogatepass"), place) if isinstance(value, str) else None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise UserError(
            f"{place}: a `function_call` turn must hold the JSON of {{name, arguments}}. Correct it, or write an "
            "assistant message with `tool_calls` instead."
        )
    return [{"type": "function", "function": call} for call in calls]


def _content(content: Any, role: str, has_calls: bool, place: str) -> Any:
    if isinstance(content, list) and content and all(isinstance(p, dict) and "type" in p for p in content):
        others = sorted({str(part["type"]) for part in content} - {"text"})
        if others:
            raise UserError(
                f"{place}: content of type {', '.join(others)} is not supported, only text. Remove the row or the"
                " part."
            )
        if not all(isinstance(part.get("text"), str) for part in content):
            raise UserError(f"{place}: a content part of type text needs a `text` that is text.")
        return "".join(part["text"] for part in content)
    # A tool may answer with any JSON value; what to print of it is the template's affair.
    if isinstance(content, str) or (role == "tool" and content is not None):
        return content
    if content is None and role == "assistant":
        return None if has_calls else ""
    raise UserError(f"{place}: `content` of a {role} message must be text, not {type(content).__name__}.")
