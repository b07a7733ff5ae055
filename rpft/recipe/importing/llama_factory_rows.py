"""Reading the data sets that a LLaMA-Factory configuration names, from its dataset_info.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rpft.errors import UserError
from rpft.recipe.importing.draft import Draft, Fate, Rule, shown
from rpft.recipe.importing.sources import fill_in
from rpft.recipe.yaml_tree import Located

_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
_MESSAGES = {"messages": "messages", "system": "system", "tools": "tools"}
_READ = {"file_name", "hf_hub_url", "formatting", "columns", "tags", "subset", "split", "num_samples", "ranking"}
_TAGS = {"user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant"), "system_tag": ("system",)}


def names_in(value: Any) -> list[str]:
    """A list, or one that is written as a text with commas."""
    items = value if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in items]


def datasets(path: str) -> Rule:
    """The entries of the data sets that are named become those of ``path``."""

    def rule(draft: Draft, key: str, node: Located) -> None:
        folder = Path(str(draft.get("dataset_dir") or "data"))
        found = [_source(draft, key, node, folder, name) for name in names_in(node.plain())]
        if path == "data.train" and (rows := draft.get("max_samples")):
            found = [{**source, "max_rows": rows} for source in found]
        if draft.get("streaming") is True:
            found = [
                {**source, "streaming": True} if source["path"].startswith("hub:") else source for source in found
            ]
        draft.set(path, found, node.where)
        draft.note(Fate.CARRIED, key, node, f"is {path}")

    return rule


def read_with_dataset(draft: Draft, key: str, node: Located) -> None:
    """`max_samples`, which stands in every entry."""
    draft.note(Fate.CARRIED, key, node, "is max_rows of every entry of data.train")


def _source(draft: Draft, key: str, node: Located, folder: Path, name: str) -> dict[str, Any]:
    """The entry for one name of dataset_info.json."""
    info_file = next(
        (base / "dataset_info.json" for base in (folder, Path(draft.origin).parent / folder)
         if (base / "dataset_info.json").is_file()),
        None,
    )  # fmt: skip
    if info_file is None:
        text = f"{name}: there is no {folder / 'dataset_info.json'} here to say what it is; write its path"
        draft.note(Fate.LOST, key, node, text)
        return {"path": fill_in(name)}
    try:
        info = json.loads(info_file.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError) as error:
        raise UserError(f"{info_file}: cannot be read as JSON: {error}") from error
    if info is None:
        raise UserError(f"{node.where}: {name} is not in {info_file}; correct one of them")
    if info.get("ranking"):
        raise UserError(
            f"{node.where}: {name} is a set of preferences in {info_file}, which rpft does not train on"
        )
    return _described(draft, f"{key} {name}", node, info_file.parent, info)


def _described(draft: Draft, key: str, node: Located, folder: Path, info: dict[str, Any]) -> dict[str, Any]:
    chats = info.get("formatting", "alpaca") == "sharegpt"
    plain = draft.get("stage") == "pt"
    source: dict[str, Any] = {"path": str(folder / info.get("file_name", ""))}
    if "hf_hub_url" in info:
        source["path"] = f"hub:{info['hf_hub_url']}"
    elif "file_name" not in info:
        draft.note(Fate.LOST, key, node, "dataset_info.json names no file and no id of the hub; write its path")
        source["path"] = fill_in(key.rpartition(" ")[2])
    source["format"] = "text" if plain else "messages" if chats else "alpaca"
    read = {"prompt": "text"} if plain else _MESSAGES if chats else _ALPACA
    columns = {}
    for name, column in info.get("columns", {}).items():
        if name not in read:
            draft.note(Fate.LOST, f"{key}.columns.{name}", node, "is not read; change the rows")
        elif column != read[name] and not (name == "messages" and column == "conversations"):
            columns[read[name]] = column
    if columns:
        source["columns"] = columns
    for name, ours_name in (("subset", "config"), ("split", "split"), ("num_samples", "max_rows")):
        if name in info:
            source[ours_name] = info[name]
    for name in set(info) - _READ:
        draft.note(Fate.UNKNOWN, f"{key}.{name}", node, f"is {shown(info[name])} in dataset_info.json")
    _check_tags(draft, key, node, info.get("tags", {}))
    return source


def _check_tags(draft: Draft, key: str, node: Located, tags: dict[str, str]) -> None:
    keys = (tags.get("role_tag", "from"), tags.get("content_tag", "value"))
    odd = {} if keys in (("from", "value"), ("role", "content")) else {"role_tag": keys[0], "content_tag": keys[1]}
    odd |= {name: tags[name] for name, known in _TAGS.items() if tags.get(name, known[0]) not in known}
    for name, value in odd.items():
        text = f"{value} is not read: messages have role and content, or from and value; rename it in the rows"
        draft.note(Fate.LOST, f"{key}.tags.{name}", node, text)
