"""Reading the data sets of an axolotl configuration: files, formats, columns, one entry each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpft.errors import UserError
from rpft.recipe.importing.draft import Draft, Fate, Rule, shown
from rpft.recipe.importing.sources import hub_or_path
from rpft.recipe.yaml_tree import Located

OWN_TEMPLATE = "tokenizer_default"
_FORMATS = {"chat_template": "messages", "sharegpt": "messages", "alpaca": "alpaca", "completion": "text"}
_MESSAGE_KEYS = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
_PROMPT_COLUMNS = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
}


def sources(path: str, format: str | None = None) -> Rule:
    """The entries of a list of data sets become those of ``path``; ``format``: of all, where no entry says it."""

    def rule(draft: Draft, key: str, node: Located) -> None:
        entries = node.value if isinstance(node.value, list) else [node]
        found = [
            source
            for number, entry in enumerate(entries)
            for source in _source(draft, f"{key}[{number}]", entry, format)
        ]
        draft.set(path, found, node.where)
        draft.note(Fate.CARRIED, key, node, f"is {path}")

    return rule


def _source(draft: Draft, key: str, node: Located, format: str | None) -> list[dict[str, Any]]:
    """The entries that one data set becomes: several where it names several files."""
    entry = node.value if isinstance(node.value, dict) else {"path": node}
    source: dict[str, Any] = {}
    columns: dict[str, str] = {}
    if format is not None:
        source["format"] = format

    def lose(name: str, why: str) -> None:
        draft.note(Fate.LOST, f"{key}.{name}", entry[name], why)

    for name, child in entry.items():
        value = child.plain()
        if value is None or name in ("path", "data_files"):
            continue
        if name == "type":
            _type(draft, f"{key}.type", child, source, columns)
        elif name == "ds_type":
            draft.note(Fate.OURS, f"{key}.{name}", child, "the ending of a file says what it is")
        elif name in ("split", "revision"):
            source[name] = value
        elif name == "name":
            source["config"] = value
        elif name == "field_messages":
            if value not in ("messages", "conversations"):
                columns["messages"] = value
        elif name in ("field", "text_column"):
            if value != "text":
                columns["text"] = value
        elif name in ("message_property_mappings", "message_field_role", "message_field_content"):
            _message_keys(draft, key, name, entry)
        elif name == "roles_to_train":
            if value != ["assistant"]:
                lose(
                    name,
                    "data.train_on says it for all rows; `train: false` leaves a message out",
                )
        elif name in ("train_on_eos", "train_on_eot"):
            if value != "turn":
                lose(name, "an answer is trained with the token that ends its turn, and no other is")
        elif name == "chat_template":
            if value != OWN_TEMPLATE:
                lose(name, "one chat template serves all rows: data.chat_template")
        elif name in _ENTRY_LOST:
            if value not in (False, [], {}):
                lose(name, _ENTRY_LOST[name])
        else:
            draft.note(Fate.UNKNOWN, f"{key}.{name}", child, f"is {shown(value)}")
    if columns:
        source["columns"] = columns
    return [{"path": path, **source} for path in _paths(draft, key, entry, node)]


def _paths(draft: Draft, key: str, entry: Mapping[str, Located], node: Located) -> list[str]:
    files = entry["data_files"].plain() if "data_files" in entry else None
    path = entry["path"].plain() if "path" in entry else None
    if files and (path is None or path in ("json", "csv", "parquet", "text", "arrow")):
        return [files] if isinstance(files, str) else list(files)
    if files:
        draft.note(Fate.LOST, f"{key}.data_files", entry["data_files"], "the whole split is read")
    if path is None:
        raise UserError(f"{node.where}: {key} names no path")
    return [hub_or_path(draft, f"{key}.path", entry["path"])]


def _type(draft: Draft, key: str, node: Located, source: dict[str, Any], columns: dict[str, str]) -> None:
    value = node.plain()
    if isinstance(value, dict):
        source["format"] = "alpaca"
        columns.update({column: value[name] for name, column in _PROMPT_COLUMNS.items() if value.get(name)})
        for name in set(value) - set(_PROMPT_COLUMNS):
            text = "the chat template makes the text; put a fixed prompt into the rows, or into a template file"
            draft.note(Fate.LOST, f"{key}.{name}", node, text)
        return
    name = str(value).partition(".")[0]
    if name in _FORMATS:
        source["format"] = _FORMATS[name]
        if "." in str(value):
            draft.note(Fate.CHANGED, key, node, f"{value} is read as {name}; look at `rpft data`")
    elif value != "":
        draft.note(Fate.LOST, key, node, f"{value} is not there: data.train's format goes by the keys of the rows")


def _message_keys(draft: Draft, key: str, name: str, entry: Mapping[str, Located]) -> None:
    mapping = entry["message_property_mappings"].plain() if "message_property_mappings" in entry else {}
    for part in ("role", "content"):
        if f"message_field_{part}" in entry:
            mapping[part] = entry[f"message_field_{part}"].plain()
    read = {part: mapping.get(part, part) for part in ("role", "content")}
    if read not in _MESSAGE_KEYS or set(mapping) - set(read):
        text = "a message has role and content (or from and value), and tool_calls; rename the keys in the rows"
        draft.note(Fate.LOST, f"{key}.{name}", entry[name], text)


_ENTRY_LOST = {
    "shards": "data.train.0.max_rows takes the first rows, and weight a share of them",
    "shards_idx": "data.train.0.max_rows takes the first rows, and weight a share of them",
    "preprocess_shards": "rows are tokenised in bounded memory",
    "conversation": "data.chat_template says how a chat is written",
    "input_format": "data.chat_template says how a chat is written",
    "input_transform": "rows are not changed; change the file",
    "chat_template_jinja": "one chat template serves all rows: data.chat_template",
    "message_field_training": "a message is left out with `train: false`; rename the key in the rows",
    "message_field_training_detail": "whole messages are trained or not",
    "field_tools": "tools stand in the key `tools`; rename it in the rows",
    "field_thinking": "messages go to the chat template as they are",
    "template_thinking_key": "messages go to the chat template as they are",
    "split_thinking": "messages go to the chat template as they are",
    "field_human": "name columns in data.train.0.columns",
    "field_model": "name columns in data.train.0.columns",
    "roles": "roles are system, user, assistant, tool, and ShareGPT's; rename others in the rows",
    "drop_system_message": "rows are not changed; leave the message out of the file",
    "trust_remote_code": "rpft runs no code that comes with data",
    "skip": "data.train.0.max_rows takes the first rows; none are skipped",
}
