"""One run an output directory: a lock that the system lets go when the process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path

from rpft.errors import UserError

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class RunLock:
    """Holds OUTPUT_DIR/run.lock from ``take`` to ``release``. The file stays; only the lock on it counts."""

    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / LOCK_FILE
        self._descriptor: int | None = None

    def take(self) -> None:
        """UserError where another run, here or in another process, holds it. The directory must exist."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace")
            os.close(descriptor)
            raise UserError(
                f"output_dir {self._path.parent} is in use by a run ({_describe(holder)}): wait for it, stop it,"
                " or give another output_dir"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(descriptor)
                raise
            logger.warning(
                "%s: this disk has no locks; two runs into one directory would not be noticed", self._path
            )
        self._descriptor = descriptor  # before what a full disk refuses, so that ``release`` lets go of it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def holder(output_dir: Path) -> str | None:
    """The process that a run in ``output_dir`` has now; None where there is none."""
    try:
        descriptor = os.open(output_dir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # none has begun here, or another user's, whose lock cannot be seen
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _describe(os.pread(descriptor, 1000, 0).decode(errors="replace"))
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
    return None


def _describe(holder: str) -> str:
    try:
        content = json.loads(holder)
        return f"process {content['pid']} on {content['host']}"
    except (ValueError, KeyError, TypeError):
        return "just begun"
