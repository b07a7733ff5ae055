"""The chat templates that come with rpft, and what holds for every template: no date but a pinned one."""

from __future__ import annotations

import difflib
import functools
import json
import re
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

from rpft.errors import UserError

PINNED_DATE = "2024-07-26"
"""What templates print for today's date, so that rows are the same every day."""

_FOLDER = Path(__file__).with_name("templates")
_TODAY = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>[^'"\\]*)(?P=quote)\s*\)""")


def shipped_templates() -> list[str]:
    """The names of the templates that come with rpft."""
    return sorted(path.stem for path in _FOLDER.glob("*.jinja"))


def read_template(name_or_path: str) -> str:
    """The text of a shipped template by its name, or of a file; UserError where it is neither."""
    if name_or_path in shipped_templates():
        return (_FOLDER / f"{name_or_path}.jinja").read_text(encoding="utf-8")
    try:
        return Path(name_or_path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        close = difflib.get_close_matches(name_or_path, shipped_templates(), n=1)
        advice = f"did you mean {close[0]}? " if close else ""
        raise UserError(
            f"data.chat_template {name_or_path}: no such file, and no template of that name; {advice}"
            f"There are {', '.join(shipped_templates())}."
        ) from error
    except OSError as error:
        raise UserError(f"data.chat_template {name_or_path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"data.chat_template {name_or_path}: {error}; save it as UTF-8") from error


@functools.lru_cache(maxsize=16)
def pin_date(template: str, day: str) -> tuple[str, bool]:
    """The template with ``day`` (YYYY-MM-DD) in the place of today's date, and whether it asks for it.

    Calls of ``strftime_now`` with a written format become their result. UserError for a call whose format the
    template computes: the rows would change from day to day.
    """
    pinned = date.fromisoformat(day)

    def printed(call: re.Match[str]) -> str:
        return call["quote"] + pinned.strftime(call["format"]) + call["quote"]

    text, count = _TODAY.subn(printed, template)
    if re.search(r"strftime_now\s*\(", text):
        raise UserError(
            "The chat template prints today's date in a format that it computes, so every day would give other"
            " rows. Write the date into a copy of the template and name that in data.chat_template."
        )
    return text, count > 0


@functools.lru_cache(maxsize=16)
def compile_template(template: str) -> jinja2.Template:
    """A chat template in the surroundings that transformers documents for them, without marks and dates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    compiled = environment.from_string(template)
    # Every rendering copies them, and out of the chain of mappings that they come in this takes most of its time.
    compiled.globals = dict(compiled.globals)
    return compiled


def _to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
