"""Where rows come from: what another program names, as a path or an id of the hub."""

from __future__ import annotations

import re
from pathlib import Path

from rpft.recipe.importing.draft import Draft, Fate
from rpft.recipe.yaml_tree import Located

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zst")
_REMOTE = re.compile(r"[a-z0-9]+://")

TO_FILL_IN = "FILL-IN"
"""Begins a path that a person has to write; it names no file, so a run refuses it."""


def hub_or_path(draft: Draft, key: str, node: Located) -> str:
    """A path that is there or looks like one stays; `owner/name` is one of the hub."""
    path = str(node.plain())
    if _REMOTE.match(path):
        draft.note(Fate.LOST, key, node, f"{path} is not read from there: download it and name the file")
        return fill_in(path.rpartition("/")[2])
    if path.endswith(_ENDINGS) or Path(path).exists() or not _HUB_ID.fullmatch(path) or path.startswith("."):
        return path
    return f"hub:{path}"


def fill_in(name: str) -> str:
    return f"{TO_FILL_IN}-{name}"
