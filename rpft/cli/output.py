"""Files that a verb writes because an option asks for them."""

from __future__ import annotations

from pathlib import Path

from rpft.errors import UserError


def write_output(option: str, path: Path, text: str) -> None:
    """Writes ``text`` to ``path``, which ``option`` named; UserError where that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written: {error.strerror}") from error
