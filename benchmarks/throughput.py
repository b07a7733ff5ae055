"""Tokens a second of full or LoRA training of a model of real size, random weights, random tokens.

    python benchmarks/throughput.py qwen3-1.7b --rows 8 --sequence 4096 --microbatches 8 --steps 5
        [--lora R] [--workers N] [--vram-limit 24GiB] [--update delayed] [--json FILE]

No checkpoint and no data are needed. Prints the median step and the rate over all timed steps, drained at both ends.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import torch

from rpft.engine.device import make_pool
from rpft.engine.engine import Engine
from rpft.engine.failure import Failure
from rpft.engine.slot import HostBatch
from rpft.engine.streams import Delays
from rpft.model.adapters import LoraSettings, initialise_lora, inject_lora
from rpft.model.functions import HEAD_CHUNK_TOKENS
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.model.skeleton import build_model, cut
from rpft.optim.adamw import AdamW
from rpft.optim.host_optimizer import HostOptimizer
from rpft.optim.schedule import Schedule
from rpft.plan.bill import ModelShape, gib, make_bill
from rpft.plan.costs import layer_costs
from rpft.plan.partition import balanced_plan

PRESETS = {
    # family, vocabulary, hidden, intermediate, blocks, heads, key-value heads, tied
    "qwen3-1.7b": ("Qwen3", 151936, 2048, 6144, 28, 16, 8, True),
    "llama-8b": ("Llama", 128256, 4096, 14336, 32, 32, 8, False),
    "tiny": ("Llama", 512, 64, 192, 4, 4, 2, False),
}


def make_config(preset: str):
    """The transformers config of a preset."""
    import transformers

    family, vocabulary, hidden, intermediate, blocks, heads, kv_heads, tied = PRESETS[preset]
    return getattr(transformers, f"{family}Config")(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=131072,
        tie_word_embeddings=tied,
    )


def fill_randomly(store: HostStore, device: torch.device) -> None:
    """Normal(0, 0.02) matrices and unit norms, drawn where it is quick."""
    for name in store.names():
        target = store.tensor(name)
        if target.dim() < 2:
            store.write(name, torch.ones_like(target))
        else:
            store.write(name, torch.empty(target.shape, device=device, dtype=target.dtype).normal_(0, 0.02))


def random_step(rows: int, sequence: int, microbatches: int, vocabulary: int, seed: int) -> list[HostBatch]:
    """``microbatches`` of rows / microbatches rows; all but the last position of a row is trained."""
    generator = torch.Generator().manual_seed(seed)
    size = rows // microbatches
    at = torch.arange(size * sequence).view(size, sequence)[:, :-1].flatten()
    batches = []
    for _ in range(microbatches):
        ids = torch.randint(0, vocabulary, (size, sequence), generator=generator)
        batches.append(HostBatch(ids, None, at, ids[:, 1:].flatten()))
    return batches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=8, help="of a step, all in one round")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains every weight")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--vram-limit", type=float, default=24.0, help="GiB a worker")
    parser.add_argument("--update", choices=["sync", "delayed"], default="sync")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    limit = int(arguments.vram_limit * 2**30)
    devices = make_pool(arguments.device, arguments.workers, limit)
    dtype = torch.bfloat16
    config = make_config(arguments.preset)
    skeleton = cut(build_model(config, dtype, "auto"))
    if arguments.lora:
        inject_lora(
            skeleton, LoraSettings(arguments.lora, 2 * arguments.lora, 0.0, "all-linear"), arguments.preset
        )
    layouts = build_layers(skeleton, dtype)
    max_tokens = arguments.rows // arguments.microbatches * arguments.sequence
    shape = ModelShape(config.hidden_size, config.intermediate_size, config.vocab_size, dtype.itemsize)

    def bill(plan):
        return make_bill(plan, layouts, shape, max_tokens, HEAD_CHUNK_TOKENS)

    costs = layer_costs(layouts, skeleton)
    plan = None
    for grain in ("stage", "layer"):
        plan = plan or balanced_plan(
            costs, len(devices), arguments.microbatches, 1, grain, lambda p: bill(p).device <= limit
        )
    if plan is None:
        sys.exit("no plan fits under the VRAM limit")
    started = time.perf_counter()
    store = HostStore(layouts, devices[0].allocate_host)
    fill_randomly(store, devices[0].torch_device)
    if arguments.lora:
        initialise_lora(skeleton, store, 0)
    print(
        f"host store filled in {time.perf_counter() - started:.0f} s, {gib(bill(plan).host)} RAM by the bill",
        flush=True,
    )
    failure, delays = Failure(), Delays(None)
    total = arguments.steps + 2
    optimizer = HostOptimizer(store, AdamW(), Schedule("constant", 1e-5, total), 1.0, failure, delays)
    engine = Engine(
        skeleton,
        store,
        plan,
        devices,
        dtype=dtype,
        max_tokens=max_tokens,
        seed=0,
        update_lag=1 if arguments.update == "delayed" else 0,
        send_update=optimizer.submit,
        failure=failure,
        delays=delays,
    )
    marks = []
    losses = []
    tokens = arguments.rows * arguments.sequence

    def finish(step: int) -> None:
        result = optimizer.wait(step)
        losses.append(result.loss_sum / (arguments.rows * (arguments.sequence - 1)))
        marks.append(time.perf_counter())

    for step in range(1, total + 1):
        batches = random_step(
            arguments.rows, arguments.sequence, arguments.microbatches, config.vocab_size, step % 2
        )
        engine.submit_step(step, batches)
        if step not in (1, 3):  # step 2 was waited for before step 3 was queued
            finish(step - 1)
        if step == 2:  # drained before the timed steps, and after them
            engine.flush()
            finish(2)
            marks = [time.perf_counter()]
        elif step == total:
            engine.flush()
            finish(total)
    engine.close()
    optimizer.close()
    seconds = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    median, drained = tokens / statistics.median(seconds), tokens * len(seconds) / (marks[-1] - marks[0])
    peaks = [device.peak_bytes() for device in devices]
    what = f"LoRA r{arguments.lora}" if arguments.lora else "full"
    case = f"{arguments.preset} {what} {arguments.update}, {arguments.rows} x {arguments.sequence}, M = {arguments.microbatches}"
    name = torch.cuda.get_device_name(0) if devices[0].torch_device.type == "cuda" else "CPU pool"
    machine = f"{len(devices)} x {name}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(
        f"plan: forward {' '.join(map(str, plan.forward))}; backward {' '.join(map(str, plan.backward))}; {plan.recompute}"
    )
    print(f"losses {' '.join(f'{loss:.4f}' for loss in losses)}")
    print(f"step seconds {' '.join(f'{s:.2f}' for s in seconds)}")
    print(
        f"RESULT {case}; {machine}: {median:.0f} tok/s by the median step, {drained:.0f} drained;"
        f" peak VRAM {' '.join(map(gib, peaks))} of {gib(bill(plan).device)} by the bill"
    )
    if arguments.json is not None:
        figures = [("tokens/s, median step", median, "tok/s"), ("tokens/s, drained", drained, "tok/s")]
        figures += [
            ("peak VRAM", max(peaks) / 2**30, "GiB"),
            ("VRAM by the bill", bill(plan).device / 2**30, "GiB"),
        ]
        record = {
            "name": "throughput",
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "machine": machine,
            "command": " ".join(["python", *sys.argv]),
            "results": [
                {"case": case, "metric": metric, "value": round(value, 2), "unit": unit}
                for metric, value, unit in figures
            ],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
