"""What the machine at hand is, and the software on it: as profiles, runs, benches and records describe it."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import transformers

import rpft
from rpft.host import available_cores, installation, processor


def machine_of(workers: Sequence[torch.device]) -> dict[str, Any]:
    """The machine with workers at these places, as far as what is measured on it depends on it."""
    on_cuda = workers[0].type == "cuda"
    return {
        "workers": device_names(workers),
        "cuda": (torch.version.cuda or torch.version.hip) if on_cuda else None,
        "processor": processor(),
        "cores": available_cores(),
    }


def unlike_others(workers: Sequence[torch.device]) -> str:
    """A mark that no other machine has, though it be of the same parts, and that starts of this one do not change.

    For what is kept in a folder that machines share. It is of the GPUs themselves, without any of the system, and
    of the size of RAM.
    """
    gpus = [str(torch.cuda.get_device_properties(place).uuid) for place in workers if place.type == "cuda"]
    told = (round(psutil.virtual_memory().total / 2**30), gpus or installation())
    return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()


def places(count: int | None = None) -> list[torch.device]:
    """Those of ``count`` workers, on GPUs where there are any; None: of one on each GPU, or of one on none."""
    gpus = torch.cuda.device_count()
    count = count or max(1, gpus)
    return [torch.device("cuda", number) if gpus else torch.device("cpu") for number in range(count)]


def device_names(workers: Sequence[torch.device]) -> list[str]:
    """What each of the workers at these places runs on."""
    return [torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU" for place in workers]


def counted(names: Sequence[str]) -> list[str]:
    """Each name once, with how many there are of it."""
    return [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]


def versions() -> dict[str, str]:
    """Of all software on which a number may depend."""
    return {
        "rpft": rpft.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
