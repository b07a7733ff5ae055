"""What the peers have in common: their arguments, a random model to train, timing, and the line of results."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks, which are no package

from random_job import PRESETS, make_config
from record import machine, write_record

DTYPE = torch.bfloat16
CHUNK_TOKENS = 4096
"""Tokens whose logits exist at once."""


def parser(description: str | None, rows: int, warm_up: int = 3) -> argparse.ArgumentParser:
    """The arguments of every peer."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("preset", choices=PRESETS)
    made.add_argument("--rows", type=int, default=rows, help="rows of a step")
    made.add_argument("--sequence", type=int, default=4096)
    made.add_argument("--steps", type=int, default=10, help="timed, drained at both ends")
    made.add_argument("--warm-up", type=int, default=warm_up, help="steps before those that are timed")
    made.add_argument("--json", type=Path)
    return made


def meta_model(preset: str) -> Any:
    """transformers' model of ``preset`` with weights on the meta device; attention is torch's."""
    from transformers import AutoModelForCausalLM

    config = make_config(preset)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=DTYPE)
    return model.train()


def draw(target: Tensor, device: torch.device) -> None:
    """Fills a weight: matrices normal(0, 0.02), drawn on ``device`` where it is quick, everything else one."""
    if target.dim() < 2:
        target.fill_(1.0)
    else:
        target.copy_(torch.empty(target.shape, dtype=target.dtype, device=device).normal_(0.0, 0.02))


def complete(model: Any, device: torch.device) -> None:
    """Mends what ``to_empty`` leaves of a meta model: no rotary frequencies, weights no longer tied."""
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)


def run_block(block: nn.Module, hidden: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    """One decoder block, causal; what every peer checkpoints."""
    out = block(hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions)
    return out[0] if isinstance(out, tuple) else out


@torch.compile(dynamic=False)
def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Loss sum of final hidden states [tokens, hidden] under the LM head's ``weight``."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


@dataclass
class Timing:
    """Seconds of each timed step, and of all of them drained at both ends."""

    steps: list[float]
    total: float


def timed(
    step: Callable[[], object],
    count: int,
    devices: list[torch.device],
    on_device: bool,
    finish: Callable[[], object] = lambda: None,
) -> Timing:
    """Times ``count`` steps. ``on_device``: a step ends where the first device has done it, not the host.

    That is right for steps that are only issued; a step that ends in work of the host is timed there. ``finish``
    waits for what a step has left to other threads.
    """
    on_device = on_device and devices[0].type == "cuda"

    def mark() -> Any:
        if not on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def drain() -> None:
        finish()
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    drain()
    started = time.perf_counter()
    marks = [mark()]
    for _ in range(count):
        step()
        marks.append(mark())
    drain()
    total = time.perf_counter() - started
    seconds = [a.elapsed_time(b) / 1e3 if on_device else b - a for a, b in pairwise(marks)]
    return Timing(seconds, total)


def reset_peaks(devices: list[torch.device]) -> None:
    """Forgets the peaks of VRAM so far."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def _used_bytes() -> int:
    """RAM in use on the machine: what a process has page-locked through CUDA is no part of its resident set."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available


_USED_BEFORE = _used_bytes()


def report(case: str, tokens: int, timing: Timing, devices: list[torch.device], path: Path | None) -> None:
    """Prints the RESULT line and writes the record. ``tokens``: of a step, all GPUs together.

    RAM is what the machine has come to use since this module was loaded.
    """
    cuda = [device for device in devices if device.type == "cuda"]
    allocated = max((torch.cuda.max_memory_allocated(device) for device in cuda), default=0) / 2**30
    reserved = max((torch.cuda.max_memory_reserved(device) for device in cuda), default=0) / 2**30
    ram = (_used_bytes() - _USED_BEFORE) / 2**30
    median = tokens / statistics.median(timing.steps)
    drained = tokens * len(timing.steps) / timing.total
    print(
        f"RESULT {case}: {median:.0f} tok/s by the median step, {drained:.0f} drained;"
        f" peak VRAM {allocated:.1f} GiB (reserved {reserved:.1f} GiB); RAM {ram:.1f} GiB",
        flush=True,
    )
    if path is None:
        return
    figures = [
        ("tokens a second, median step", median, "tok/s"),
        ("tokens a second, drained", drained, "tok/s"),
        ("peak VRAM, allocated", allocated, "GiB"),
        ("peak VRAM, reserved", reserved, "GiB"),
        ("RAM, taken", ram, "GiB"),
    ]
    names = [torch.cuda.get_device_name(device) for device in cuda] or ["CPU"]
    results = [{"case": case, "metric": m, "value": round(value, 2), "unit": unit} for m, value, unit in figures]
    write_record(path, "peer", machine(names), results)
