"""Peers on GPUs, each in processes of its own, have the losses of the run."""

from __future__ import annotations

import json

import pytest
import torch
from support.recipes import make_project, run_rpft

from rpft.peers import PEERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("kind", "kernels"), [("full", "compile"), ("lora", "eager"), ("delayed", "eager")])
def test_every_peer_that_is_installed_has_the_losses_of_the_run(kind, kernels, tmp_path):
    """Those that are not are lines with their reason."""
    sections = {
        "model": {"dtype": "bfloat16"},
        "train": {"max_steps": 8, "learning_rate": 1e-3, "micro_batch_size": 2},
        "optimizer": {"update": "delayed" if kind == "delayed" else "sync"},
        "engine": {"device": "cuda", "kernels": kernels},
        **({"adapter": {"r": 4, "alpha": 8}} if kind == "lora" else {}),
    }
    project = make_project(tmp_path, "qwen3", eval_rows=0, sections=sections)
    logs = tmp_path / "logs"
    count = str(min(torch.cuda.device_count(), 2))  # each peer is a process a count, which imports all of it
    # A delayed run has the numbers of the one peer that is late as well.
    peers = "roundpipe" if kind == "delayed" else ",".join(PEERS)
    words = ("--workers", count, "--steps", "2", "--peers", peers, "--losses", "5", "--peer-logs", str(logs))
    ran = run_rpft("bench", str(project.recipe), *words, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert all(result["share_of_roof"] > 0 for result in found["results"])
    installed = {name for name, peer in PEERS.items() if peer.missing() is None}
    for peer in found["peers"]:
        name = peer["peer"]
        if name not in installed:
            assert peer["failed"].startswith(f"{PEERS[name].package} is not installed")
            continue
        assert "failed" not in peer, f"{name}: {peer['failed']}"
        assert peer["vram_peak_bytes"] > 0
        if name != "roof":
            assert peer["largest_loss_difference"] < 0.05, f"{name}: {peer['losses']}"
