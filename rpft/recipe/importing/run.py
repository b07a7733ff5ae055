"""Turning another program's configuration into a recipe, with a word on every key that it holds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from rpft.errors import UserError
from rpft.recipe.dump import to_yaml
from rpft.recipe.explain import explain
from rpft.recipe.importing import axolotl, llama_factory, trainer
from rpft.recipe.importing.draft import Draft, Fate, Note, Rule
from rpft.recipe.importing.sources import TO_FILL_IN
from rpft.recipe.keys import section_at
from rpft.recipe.schema import Recipe
from rpft.recipe.yaml_tree import Located, parse_yaml


class Program(NamedTuple):
    """A program whose files are read. ``mark``: the key that every file of it has. ``rows``: that of the data."""

    name: str
    mark: str
    rows: str
    rules: Mapping[str, Rule]
    patterns: Sequence[tuple[str, Rule]]
    defaults: Callable[[Draft], dict[str, Any]]


PROGRAMS = tuple(
    Program(
        name,
        mark,
        rows,
        {**trainer.RULES, **keys.RULES},
        (*keys.PATTERNS, *trainer.PATTERNS),
        keys.defaults,
    )
    for name, mark, rows, keys in (
        ("axolotl", "base_model", "datasets", axolotl),
        ("LLaMA-Factory", "model_name_or_path", "dataset", llama_factory),
    )
)


@dataclass(frozen=True)
class Imported:
    """A recipe's text, and what became of the keys it was made of."""

    origin: str
    program: str
    mark: str
    notes: list[Note]
    defaults: list[str]
    """Keys that the file leaves out and whose default there is written out here."""
    off_keys: list[str]
    """Keys that are empty or switched off there, as they are here."""
    recipe: Located

    def text(self, path: str) -> str:
        """The recipe as YAML, headed by the command that runs it as ``path`` and by what it lacks."""
        missing = [note for note in self.notes if note.fate in (Fate.LOST, Fate.UNKNOWN)]
        lines = [f"# rpft train {shlex.quote(path)}", f"# From {self.origin}, a file of {self.program}."]
        lines += [f"# {note.fate.value}: {note.key}: {note.text}" for note in missing]
        values = _in_order(self.recipe.plain(), ())
        parts = [to_yaml({name: value}) for name, value in values.items()]
        return "\n".join(lines) + "\n\n" + "\n".join(parts)

    def report(self) -> str:
        """What a person should know, key by key."""
        lines = [f"{self.origin}: read as a file of {self.program}, which has {self.mark}"]
        for fate in (Fate.LOST, Fate.UNKNOWN, Fate.CHANGED, Fate.OURS):
            some = [note for note in self.notes if note.fate is fate]
            if some:
                lines.append(f"{fate.value}:")
                lines += [f"  {note.where}: {note.key}: {note.text}" for note in some]
        carried = [note.key for note in self.notes if note.fate is Fate.CARRIED and note.key not in self.defaults]
        lines.append(f"{Fate.CARRIED.value}: {', '.join(carried)}")
        if self.defaults:
            lines.append(f"left out there, and written with {self.program}'s default: {', '.join(self.defaults)}")
        if self.off_keys:
            lines.append(f"empty or off there, as here: {', '.join(self.off_keys)}")
        if TO_FILL_IN in str(self.recipe.plain()):
            lines.append(f"to be done: replace the paths that begin with {TO_FILL_IN}")
        return "\n".join(lines)


def _in_order(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Keys as the schema has them."""
    section = section_at(path)
    if section is None:
        return values
    return {
        name: _in_order(values[name], (*path, name)) if isinstance(values[name], dict) else values[name]
        for name in section.model_fields
        if name in values
    }


def import_recipe(path: Path, num_gpus: int = 1) -> Imported:
    """Read a file of one of PROGRAMS as a recipe.

    Args:
        path: the file, YAML.
        num_gpus: GPUs that it was written for; rows of a step are counted over all of them here.

    Raises UserError where it is no such file, describes a run of another kind, or has a value that a recipe
    refuses.
    """
    source = _read(path)
    program = _program_of(source, str(path))
    draft = Draft(source, str(path), num_gpus)
    defaults = {key: value for key, value in program.defaults(draft).items() if key not in source}
    for key, value in defaults.items():
        source[key] = Located(value, f"{path}: {program.name}'s default of {key}")
    draft.follow(program.rules, program.patterns)
    if "train" not in draft.root.plain().get("data", {}):
        raise UserError(f"{path}: names no rows: {program.rows} is missing")
    _drop_what_nothing_evaluates(draft)
    try:
        Recipe.model_validate(draft.root.plain())
    except ValidationError as error:
        raise UserError("\n  ".join(explain(error, draft.root))) from None
    return Imported(str(path), program.name, program.mark, draft.notes, list(defaults), draft.off_keys, draft.root)


def _read(path: Path) -> dict[str, Located]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8; save it as UTF-8") from error
    root, errors = parse_yaml(text, str(path))
    if errors:
        raise UserError("\n  ".join(errors))
    if root is None or not isinstance(root.value, dict):
        raise UserError(f"{path}: holds no keys; a configuration of axolotl or LLaMA-Factory is a mapping")
    return root.value


def _program_of(source: Mapping[str, Located], origin: str) -> Program:
    found = [program for program in PROGRAMS if program.mark in source]
    if len(found) == 1:
        return found[0]
    if isinstance(model := source.get("model"), Located) and isinstance(model.value, dict):
        if "_component_" in model.value:
            advice = "it looks like torchtune's; docs/coming-from.md says what its keys are called here"
        else:
            advice = "it looks like a recipe of rpft, which `rpft train` takes as it is"
    else:
        advice = "of axolotl it would have base_model, of LLaMA-Factory model_name_or_path"
    which = "has keys of both" if found else "is a file of neither axolotl nor LLaMA-Factory"
    raise UserError(f"{origin}: {which}; {advice}")


def _drop_what_nothing_evaluates(draft: Draft) -> None:
    """Steps between evaluations say nothing where no row is held out; a recipe refuses them."""
    values = draft.root.plain()
    data, sections = values.get("data", {}), draft.root.value
    if any(key in data for key in ("eval", "eval_fraction", "eval_rows")) or "eval_every" not in values.get(
        "train", {}
    ):
        return
    assert isinstance(sections, dict)
    train = sections["train"].value
    assert isinstance(train, dict)
    node = train.pop("eval_every")
    draft.note(Fate.LOST, "eval_steps", node, "no rows are held out for evaluation; set data.eval_fraction first")
