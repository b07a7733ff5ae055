"""What is written to disk stays written: the few file operations that the safety of a run rests on.

They are called through this module (``files.write(...)``), so that a test can put a failing disk in their place.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Writes all of ``data`` to a file that is open without a buffer."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def read_at(descriptor: int, target: memoryview, offset: int) -> None:
    """Fills ``target`` with what lies from ``offset`` on; OSError where the file ends before."""
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file ends before what was written to it")
        target, offset = target[count:], offset + count


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes all of ``data`` to ``offset``."""
    while data:
        count = os.pwritev(descriptor, [data], offset)
        data, offset = data[count:], offset + count


def reserve(descriptor: int, num_bytes: int) -> None:
    """Makes an empty file ``num_bytes`` of zeros, which the disk has room for from now on; OSError if not."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:
        os.ftruncate(descriptor, num_bytes)


def sync(path: Path) -> None:
    """Returns when the content of the file or folder ``path`` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Gives ``source`` the name ``target``, for good when it returns. A file that stands there is replaced."""
    os.replace(source, target)
    sync(target.parent)


def remove_tree(path: Path) -> None:
    """Removes a folder and what is in it, a file, or a link but not its target; nothing when there is none."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Replaces the content of ``path`` by ``text``: a reader finds the old or the new, after any crash too."""
    fresh = path.with_name(path.name + ".partial")
    fresh.unlink(missing_ok=True)  # what a crash left, or a link that is not to be followed
    with fresh.open("xb", buffering=0) as file:
        write(file, text.encode())
    sync(fresh)
    rename(fresh, path)


def existing_folder(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.is_dir())


def free_bytes(path: Path) -> int:
    """Bytes that may be written on the disk of ``path``, which need not exist yet."""
    return shutil.disk_usage(existing_folder(path)).free


def digest(paths: Iterable[Path]) -> str:
    """A short checksum of files' names and contents, in the order given."""
    hashed = hashlib.blake2b(digest_size=16)
    for path in paths:
        hashed.update(path.name.encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()


@contextmanager
def scratch_folder(place: Path, prefix: str) -> Iterator[Path]:
    """A new folder in ``place`` that is gone in the end; OSError where none can be made.

    Folders of the same ``prefix`` whose process has ended are removed first: each is locked by its own, and the
    system lets go of the lock however that ends. Where the disk has no locks, they stay.
    """
    for left in place.glob(f"{prefix}*"):
        with suppress(OSError), _opened(left) as descriptor:  # another's, or another user's
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(left)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        with _opened(folder) as descriptor:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not folder.exists():  # taken for a dead one's before it was locked
                continue
            try:
                yield folder
            finally:
                remove_tree(folder)
            return


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
