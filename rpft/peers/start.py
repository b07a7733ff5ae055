"""Starts a peer, in as many processes as it has workers, and gives what it did or why it did not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rpft.peers import PEERS
from rpft.peers.process import reason, run_python

if TYPE_CHECKING:
    from rpft.peers.harness import Result

SECONDS = 1800
"""What a peer may take before it is ended."""

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
_FOUND_HERE = str(Path(__file__).resolve().parents[2])
"""From where this package is imported, installed or not."""


def run_peer(name: str, folder: Path, workers: int, log: Path, on_cuda: bool) -> Result | str:
    """What peer ``name`` did of the work in ``folder`` on so many workers, or one line that says why not.

    Its output goes to ``log``.
    """
    peer = PEERS[name]
    missing = peer.missing()
    if missing is not None:
        return missing
    if peer.needs_cuda and not on_cuda:
        return "it needs a GPU"
    from rpft.peers.harness import read_result

    result = folder / f"{name}_{workers}.json"
    result.unlink(missing_ok=True)
    words = ["-m", "rpft.peers", name, str(folder), str(result)]
    if peer.processes:
        words = [*_TORCHRUN, str(workers), *words]
    code, lines = run_python(words, log, SECONDS, env=_environment(workers))
    if code is None:
        return f"ended after {SECONDS} s"
    if code or not result.exists():
        return reason(lines)
    return read_result(result)


def _environment(workers: int) -> dict[str, str]:
    """What a peer's process has beside ours: the first GPUs only, and the allocator's settings of the run."""
    path = os.pathsep.join([_FOUND_HERE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    found = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = list(map(str, range(workers))) if visible is None else visible.split(",")[:workers]
    found["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        found["PYTORCH_CUDA_ALLOC_CONF"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return found
