"""The recipes that come with rpft: listed, read, and copied to make them one's own."""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path
from typing import NamedTuple

from rpft.errors import UserError


class Header(NamedTuple):
    """The comment that opens a shipped recipe: its command, what it does, what it runs on."""

    command: str
    description: str
    hardware: str


def shipped_folder() -> Path:
    """Where the recipes are: beside this file in an installed wheel, else at the top of the checkout."""
    installed = Path(__file__).with_name("shipped_files")
    return installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"


def shipped_names() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))


def shipped_path(name: str) -> Path:
    """The file of a shipped recipe; an unknown name raises UserError with a suggestion."""
    names = shipped_names()
    name = name.removesuffix(".yaml")
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
        advice = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(names)}"
        raise UserError(f"no shipped recipe is called {name!r}; {advice}")
    return shipped_folder() / f"{name}.yaml"


def read_shipped(name: str) -> str:
    """The text of a shipped recipe."""
    return shipped_path(name).read_text(encoding="utf-8")


def read_header(name: str) -> Header:
    """The three comment lines that open a shipped recipe."""
    command, description, hardware = (line.removeprefix("# ") for line in read_shipped(name).splitlines()[:3])
    return Header(command, description, hardware.removeprefix("Hardware: "))


def copy_shipped(name: str, destination: Path | None = None) -> Path:
    """Copy a shipped recipe to a file or into a folder, by default the current one; nothing is overwritten.

    The command in the copy's first line names the copy. Returns the path written.
    """
    source = shipped_path(name)
    target = destination or Path(source.name)
    if target.is_dir():
        target = target / source.name
    first_line, newline, rest = source.read_text(encoding="utf-8").partition("\n")
    first_line = first_line.replace(f"recipes/{source.name}", shlex.quote(str(target)))
    write_new(target, first_line + newline + rest)
    return target


def write_new(target: Path, text: str) -> None:
    """Write a recipe, and the folders above it; UserError where the file is already there."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{target} is already there and is not overwritten; name another file") from None
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from None
