"""Files and folders that a verb writes because an option or a recipe asks for them."""

from __future__ import annotations

from pathlib import Path

from rpft.errors import UserError


def check_output_dir(path: Path) -> None:
    """UserError where ``path``, a recipe's output_dir, can be no folder, or a link in it leads out of it."""
    wrong = next((each for each in (path, *path.absolute().parents) if each.exists() and not each.is_dir()), None)
    if wrong is not None:
        raise UserError(f"output_dir {path}: {wrong} is a file; give a folder, there or to be made")
    inside = path.resolve()
    for each in sorted(path.iterdir()) if path.is_dir() else ():
        if each.is_symlink() and inside not in each.resolve().parents:
            raise UserError(
                f"output_dir {path}: {each.name} in it is a link to {each.resolve()}, where nothing is to be"
                " written: remove it; to keep a run elsewhere let output_dir itself be the link"
            )


def make_output_dir(path: Path) -> None:
    """Makes a recipe's output_dir; UserError where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"output_dir {path}: cannot be made: {error.strerror}; give another folder (output_dir=FOLDER)"
        ) from error


def check_output(option: str, path: Path | None) -> None:
    """UserError where a file could not be there, before work goes into what it should hold."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path}: that is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; make it, or name another file")


def write_output(option: str, path: Path, text: str) -> None:
    """Writes ``text`` to ``path``, which ``option`` named; UserError where that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written: {error.strerror}") from error
