"""What an unquoted word means in YAML 1.2: `1e-4` is a number, `yes` is a word."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from rpft.errors import UserError

_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]{1,4000}", re.ASCII)
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")

_ENVIRONMENT = re.compile(r"\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


def plain_scalar(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar under the core schema of YAML 1.2."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITE.fullmatch(text):
        return float(text.replace(".", ""))
    if _NAN.fullmatch(text):
        return float("nan")
    return text


def expand_environment(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replace `${env:NAME}` and `${env:NAME:-default}`; any other `${` raises UserError.

    The default serves, as in a shell, when the variable is not set or empty.
    """
    if "${" not in text:
        return text

    def value_of(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        value = environment.get(name)
        if default is not None:
            return value or default
        if value is None:
            raise UserError(
                f"the environment variable {name} is not set; set it, or write ${{env:{name}:-default}}"
            )
        return value

    expanded = _ENVIRONMENT.sub(value_of, text)
    if "${" in expanded:
        raise UserError(f"cannot read {text!r}; only ${{env:NAME}} and ${{env:NAME:-default}} are replaced")
    return expanded
