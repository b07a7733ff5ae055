"""YAML text to plain values that remember where they were written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from rpft.errors import UserError
from rpft.recipe.scalars import expand_environment, plain_scalar

# A recipe is a page of text three levels deep; what goes past these is a mistake or an attack.
MAX_DEPTH = 32
MAX_ALIASED_NODES = 1000


class Unreadable:
    """Stands for a value whose error is already reported, so that it is not reported twice."""

    def __repr__(self) -> str:
        return "(unreadable)"


UNREADABLE = Unreadable()

Value: TypeAlias = "dict[str, Located] | list[Located] | str | int | float | bool | Unreadable | None"


@dataclass
class Located:
    """A value and the place it came from, "recipe.yaml:12" or "override train.seed=1"."""

    value: Value
    where: str

    def plain(self) -> Any:
        """The value without its places: dict, list and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def parse_yaml(text: str, origin: str, numbered: bool = True) -> tuple[Located | None, list[str]]:
    """Parse one YAML document into located values, None for an empty one, and a list of errors.

    Args:
        text: the document.
        origin: what to call it in messages: a file name, or an override.
        numbered: whether places get the line number, "origin:line".

    Raises UserError when the text is not YAML at all; what is wrong with single keys and values
    (duplicate keys, environment variables) is collected, so that it can be reported with the rest.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, origin, numbered) from None
    if node is None:
        return None, []
    converter = _Converter(origin, numbered)
    where = converter.where(node)
    return Located(converter.convert(node, where), where), converter.errors


class _Loader(yaml.SafeLoader):
    """Composes nodes; refuses tags and deep nesting before anything is built from them."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            problem = f"the tag {event.tag} is not allowed; write plain values only"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        if self._depth == MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} levels deep"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Converter:
    """Turns composed nodes into located values. A node met again was reached through an alias."""

    def __init__(self, origin: str, numbered: bool) -> None:
        self.errors: list[str] = []
        self._origin = origin
        self._numbered = numbered
        self._seen: set[int] = set()
        self._open: set[int] = set()
        self._num_aliased = 0

    def where(self, node: yaml.Node) -> str:
        return _place(self._origin, node.start_mark.line, self._numbered)

    def convert(self, node: yaml.Node, where: str) -> Value:
        if id(node) in self._open:
            raise UserError(f"{where}: an alias (*name) stands inside the value that it repeats")
        if id(node) in self._seen:
            self._num_aliased += 1
            if self._num_aliased > MAX_ALIASED_NODES:
                raise UserError(
                    f"{where}: aliases (*name) repeat more than {MAX_ALIASED_NODES} values; write them out"
                )
        self._seen.add(id(node))
        self._open.add(id(node))
        value = self._children(node, where)
        self._open.remove(id(node))
        return value

    def _children(self, node: yaml.Node, where: str) -> Value:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode):
            return [Located(self.convert(item, self.where(item)), self.where(item)) for item in node.value]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, where)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Located]:
        mapping: dict[str, Located] = {}
        for key_node, value_node in node.value:
            where = self.where(key_node)
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self.errors.append(f"{where}: a key must be a word, not a list or a mapping")
            elif key == "<<":
                self.errors.append(f"{where}: merge keys (<<) are not supported; write the keys out")
            elif key in mapping:
                self.errors.append(f"{where}: `{key}` is given twice, first at {mapping[key].where}")
            else:
                mapping[key] = Located(self.convert(value_node, where), where)
        return mapping

    def _scalar(self, node: yaml.ScalarNode, where: str) -> Value:
        try:
            text = expand_environment(node.value)
        except UserError as error:
            self.errors.append(f"{where}: {error}")
            return UNREADABLE
        return text if node.style is not None else plain_scalar(text)


def _place(origin: str, line_index: int, numbered: bool) -> str:
    return f"{origin}:{line_index + 1}" if numbered else origin


def _syntax_error(error: yaml.YAMLError, text: str, origin: str, numbered: bool) -> UserError:
    if isinstance(error, yaml.reader.ReaderError):
        place = _place(origin, text.count("\n", 0, error.position), numbered)
        return UserError(f"{place}: the character U+{error.character:04X} is not allowed in YAML")
    assert isinstance(error, yaml.MarkedYAMLError)
    problem = error.problem or "not YAML"
    mark = error.problem_mark
    if "unexpected end of stream" in problem:
        problem, mark = "a quoted value that begins here is never closed", error.context_mark
    line_index = mark.line if mark else 0
    lines = text.splitlines()
    line = lines[line_index] if line_index < len(lines) else ""
    return UserError(f"{_place(origin, line_index, numbered)}: {_explain(problem, line)}")


def _explain(problem: str, line: str) -> str:
    indentation = line[: len(line) - len(line.lstrip())]
    if "\t" in indentation:
        return "a tab in the indentation; YAML allows spaces only"
    if "'\\t'" in problem:
        return "a tab before the value; write a space"
    if "another document" in problem:
        return "a second document begins here; a recipe is one document"
    if "${" in line:
        return f"{problem}; inside [ ] and {{ }} a value with ${{...}} must be quoted"
    if "mapping values are not allowed" in problem:
        return f"{problem}; check the indentation, and quote a value that holds a colon"
    if "cannot start any token" in problem or "undefined alias" in problem:
        return f"{problem}; quote a value that begins with a special character"
    return problem
