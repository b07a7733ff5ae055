"""Other programs on a run's work, for `rpft bench` and the benchmarks; each imported in its own process only."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """One program that can do the work."""

    name: str
    title: str
    """What it is, for people."""
    module: str
    """Under rpft.peers: its ``build`` makes the adapter."""
    package: str | None = None
    """What has to be installed; None where torch is enough."""
    install: str = ""
    """What pip is given for it."""
    needs_cuda: bool = False
    processes: bool = True
    """Whether each worker is a process; else one process has them all."""
    most_workers: int | None = None
    options: tuple[str, ...] = ()
    """Ways to run it that ``Work.options`` may ask for."""

    def missing(self) -> str | None:
        """What to do before it can run here; None where nothing is missing."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed: pip install {self.install}"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("roof", "roof, plain PyTorch", "resident", most_workers=1, options=("torch-attention",)),
        Peer("plain", "plain PyTorch, resident", "resident"),
        Peer("fsdp2", "FSDP2, CPU offload", "fsdp2", options=("resident",)),
        Peer("deepspeed", "DeepSpeed ZeRO-3, offload", "zero3", "deepspeed", "deepspeed"),
        Peer(
            "roundpipe",
            "roundpipe 0.1.1",
            "round_pipe",
            "roundpipe",
            "roundpipe==0.1.1 beartype",
            needs_cuda=True,
            processes=False,
            options=("as-it-comes",),
        ),
        Peer("torchao", "torchao, offloaded optimizer", "offloaded", "torchao", "torchao", needs_cuda=True),
    )
}
"""By name, in the order of tables."""
