"""What this process has of the machine that it runs on: cores, and a place for what it would else make anew."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

CXX_NAMES = ("g++", "clang++")
"""C++ compilers, for ``find_compiler``."""


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def others_cores(seconds: float = 0.3) -> float | None:
    """Cores that other processes of the machine keep busy, in the mean of so long a look; None where the system
    does not say.
    """
    before, begun = _others_seconds(), time.perf_counter()
    time.sleep(seconds)
    after, ended = _others_seconds(), time.perf_counter()
    return None if before is None or after is None else max(0.0, after - before) / (ended - begun)


def _others_seconds() -> float | None:
    """Core seconds of all processes but this one, ever."""
    try:
        ticks = Path("/proc/stat").read_text(encoding="utf-8").split(maxsplit=4)[1:4]  # user, nice, system
    except OSError:
        return None
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") - time.process_time()


def installation() -> str:
    """What the system on this machine is called by: no other is, and the next start changes nothing."""
    try:
        own = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        own = ""
    return own or platform.node()


def memory_left_by_groups(
    process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes of RAM that the control groups of this process still leave it; None where they set no limit.

    What the system keeps of files counts as left, since it goes when memory is needed. Every group from the
    process's own up to the root may have a limit; in a container only the upper ones are to be seen.
    """
    left = [
        bound - used
        for folder, limit, usage in _memory_groups(process, root)
        if (bound := _number(folder / limit)) is not None and (used := _used(folder, usage)) is not None
    ]
    return max(0, min(left)) if left else None


def _memory_groups(process: Path, root: Path) -> Iterator[tuple[Path, str, str]]:
    """(folder, name of its limit, of its usage) of the groups, in both versions of the interface."""
    try:
        lines = process.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = base / path.strip("/")
        for folder in (own, *own.parents):
            yield folder, *names
            if folder == base:
                break


def _used(folder: Path, usage: str) -> int | None:
    """Bytes in use by a group without those of files that may go."""
    used = _number(folder / usage)
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return used
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    files = [stat.get(f"total_{kind}", stat.get(kind, "0")) for kind in ("inactive_file", "active_file")]
    return None if used is None else max(0, used - sum(int(number) for number in files))


def _number(file: Path) -> int | None:
    """The number that ``file`` holds; None where there is none, as with "max", which is no limit."""
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def cache_folder(kind: str) -> Path:
    """Where things of one kind are kept for the next run; need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rpft" / kind


def find_compiler(variable: str, names: Sequence[str]) -> list[str] | None:
    """A compiler's command: that of the environment's ``variable``, or if it is not set the first of ``names``.

    None where there is no such program.
    """
    own = shlex.split(os.environ.get(variable, ""))
    commands = [own] if own else [[name] for name in names]
    return next((words for words in commands if shutil.which(words[0])), None)
