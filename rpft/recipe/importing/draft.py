"""A recipe as an importer puts it together: values, and what became of every key that was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatch
from typing import Any

from rpft.recipe.scalars import plain_scalar
from rpft.recipe.yaml_tree import Located, Value


class Fate(Enum):
    """What became of a key; the value is the heading under which a person reads it."""

    CARRIED = "carried over"
    CHANGED = "carried over, and not quite the same"
    OURS = "not needed: rpft does this itself"
    LOST = "could not be carried over"
    UNKNOWN = "not known to this importer, so left out"


@dataclass(frozen=True)
class Note:
    """One key of the file that was read."""

    where: str
    key: str
    fate: Fate
    text: str


Rule = Callable[["Draft", str, Located], None]


@dataclass
class Draft:
    """What a rule may read, set and say.

    ``source``: the keys of the file. ``num_gpus``: on how many GPUs that program ran it.
    """

    source: dict[str, Located]
    origin: str
    num_gpus: int = 1
    root: Located = field(default_factory=lambda: Located({}, ""))
    notes: list[Note] = field(default_factory=list)
    off_keys: list[str] = field(default_factory=list)
    """Keys that are empty or switched off there, as they are here."""

    def __post_init__(self) -> None:
        self.root.where = self.origin

    def set(self, path: str, value: Any, where: str) -> None:
        """Give the key ``path`` (dotted) of the recipe a value that was read at ``where``."""
        *sections, last = path.split(".")
        children = self.root.value
        for section in sections:
            assert isinstance(children, dict)
            children = children.setdefault(section, Located({}, where)).value
        assert isinstance(children, dict)
        children[last] = located(value, where)

    def get(self, key: str) -> Any:
        """The plain value of a key of the file; None where it is missing."""
        node = self.source.get(key)
        return None if node is None else unquoted(node.plain())

    def note(self, fate: Fate, key: str, node: Located, text: str) -> None:
        self.notes.append(Note(node.where, key, fate, text))

    def off(self, key: str) -> None:
        self.off_keys.append(key)

    def follow(self, rules: Mapping[str, Rule], patterns: Sequence[tuple[str, Rule]]) -> None:
        """Apply to every key its rule: by name, else by the first pattern (as of file names) that fits."""
        for key, node in self.source.items():
            rule = rules.get(key) or next((rule for pattern, rule in patterns if fnmatch(key, pattern)), None)
            if rule is None:
                self.note(Fate.UNKNOWN, key, node, f"is {shown(node.plain())}")
            elif node.value is None:
                self.off(key)
            else:
                rule(self, key, node)


def located(value: Any, where: str) -> Located:
    """A plain value as if all of it had been read at ``where``."""
    inner: Value = value
    if isinstance(value, dict):
        inner = {key: located(item, where) for key, item in value.items()}
    elif isinstance(value, list):
        inner = [located(item, where) for item in value]
    return Located(inner, where)


def shown(value: Any) -> str:
    """A value in a message: short, as YAML writes it."""
    text = {True: "true", False: "false", None: "null"}.get(value) if isinstance(value, bool | None) else None
    text = text or str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def unquoted(value: Any) -> Any:
    """What readers of YAML 1.1 and their programs make of text: `yes` is true, "2e-5" is a number."""
    if not isinstance(value, str):
        return value
    word = {"yes": True, "on": True, "no": False, "off": False}.get(value.lower())
    return plain_scalar(value) if word is None else word


def to(path: str, value: Callable[[Any], Any] = unquoted) -> Rule:
    """The key means what ``path`` means here."""

    def rule(draft: Draft, key: str, node: Located) -> None:
        draft.set(path, value(node.plain()), node.where)
        draft.note(Fate.CARRIED, key, node, f"is {path}")

    return rule


def ours(why: str) -> Rule:
    """How a step is carried out: here the engine's business, whatever is set there."""
    return _said(Fate.OURS, why)


def lost(why: str) -> Rule:
    """There is no such thing here."""
    return _said(Fate.LOST, why)


def _said(fate: Fate, why: str) -> Rule:
    def rule(draft: Draft, key: str, node: Located) -> None:
        if unquoted(node.plain()) in (False, "", "none", "None") or node.value in ([], {}):
            draft.off(key)
        else:
            draft.note(fate, key, node, why)

    return rule
