"""Tokens a second of full or LoRA training of a model of real size, random weights, random tokens.

    python benchmarks/throughput.py qwen3-1.7b --rows 8 --sequence 4096 --microbatches 8 --steps 5
        [--lora R] [--workers N] [--vram-limit 24GiB] [--update delayed] [--json FILE]

No checkpoint and no data are needed. Prints the rate of the median step and over all timed steps,
drained at both ends.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from record import machine, write_record

from rpft.engine.device import Device, make_pool
from rpft.engine.engine import Engine
from rpft.engine.failure import Failure
from rpft.engine.slot import HostBatch
from rpft.engine.streams import Delays
from rpft.model.adapters import LoraSettings, initialise_lora, inject_lora
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.model.skeleton import build_model, cut
from rpft.optim.adamw import AdamW
from rpft.optim.host_optimizer import HostOptimizer
from rpft.optim.schedule import Schedule
from rpft.plan.bill import Workload, gib, make_bill
from rpft.plan.choose import choose_plan, model_shape

DTYPE = torch.bfloat16

PRESETS = {
    # family, vocabulary, hidden, intermediate, blocks, heads, key-value heads, head size, tied
    "qwen3-1.7b": ("Qwen3", 151936, 2048, 6144, 28, 16, 8, 128, True),
    "llama-8b": ("Llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
    "qwen3-32b": ("Qwen3", 151936, 5120, 25600, 64, 64, 8, 128, False),
    "tiny": ("Llama", 512, 64, 192, 4, 4, 2, 16, False),
}


def make_config(preset: str):
    """The transformers config of a preset."""
    import transformers

    family, vocabulary, hidden, intermediate, blocks, heads, kv_heads, head_size, tied = PRESETS[preset]
    return getattr(transformers, f"{family}Config")(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=8, help="of a step, all in one round")
    parser.add_argument("--steps", type=int, default=5, help="timed, after two that warm up")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains every weight")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--vram-limit", type=float, default=24.0, help="GiB a worker")
    parser.add_argument("--update", choices=["sync", "delayed"], default="sync")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Run:
    """A model with random weights, its plan and its engine, ready to step."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rows, self.sequence, self.microbatches = arguments.rows, arguments.sequence, arguments.microbatches
        limit = int(arguments.vram_limit * 2**30)
        self.devices = make_pool(arguments.device, arguments.workers, limit)
        config = make_config(arguments.preset)
        self.vocabulary = config.vocab_size
        skeleton = cut(build_model(config, DTYPE, "auto"))
        if arguments.lora:
            inject_lora(skeleton, LoraSettings(arguments.lora, 2 * arguments.lora, 0.0, "all-linear"), "random")
        layouts = build_layers(skeleton, DTYPE)
        max_tokens = self.rows // self.microbatches * self.sequence
        delayed = arguments.update == "delayed"
        work = Workload(model_shape(config, DTYPE.itemsize), max_tokens, self.microbatches, delayed)
        self.plan = choose_plan(layouts, skeleton, work, len(self.devices), self.microbatches, "auto", limit)
        self.bill = make_bill(self.plan, layouts, work)
        if self.bill.device > limit:
            sys.exit(f"the smallest plan takes {gib(self.bill.device)} of VRAM")
        store = HostStore(layouts, self.devices[0].allocate_host, separate_masters=delayed)
        fill_randomly(store, self.devices[0].torch_device)
        if arguments.lora:
            initialise_lora(skeleton, store, 0)
        failure, delays = Failure(), Delays(None)
        self.optimizer = HostOptimizer(store, AdamW(), Schedule("constant", 1e-5, 10**6), 1.0, failure, delays)
        self.engine = Engine(
            skeleton,
            store,
            self.plan,
            self.devices,
            dtype=DTYPE,
            max_tokens=max_tokens,
            seed=0,
            update_lag=int(delayed),
            send_update=self.optimizer.submit,
            failure=failure,
            delays=delays,
        )

    def steps(self, first: int, count: int) -> list[float]:
        """Runs ``count`` steps, each queued while the one before computes, drained at both ends; their seconds."""
        marks = [time.perf_counter()]
        for step in range(first, first + count + 1):
            if step < first + count:
                batches = random_step(self.rows, self.sequence, self.microbatches, self.vocabulary, step % 2)
                self.engine.submit_step(step, batches)
            else:
                self.engine.flush()
            if step > first:
                result = self.optimizer.wait(step - 1)
                marks.append(time.perf_counter())
                loss = result.loss_sum / (self.rows * (self.sequence - 1))
                print(f"step {step - 1}: loss {loss:.4f}, {marks[-1] - marks[-2]:.2f} s", flush=True)
        return [after - before for before, after in pairwise(marks)]

    def close(self) -> None:
        self.engine.close()
        self.optimizer.close()


def main() -> int:
    arguments = parse()
    started = time.perf_counter()
    run = Run(arguments)
    print(f"ready after {time.perf_counter() - started:.0f} s; {gib(run.bill.host)} of RAM by the bill")
    stages = " ".join(map(str, run.plan.forward)), " ".join(map(str, run.plan.backward))
    print(f"plan: forward {stages[0]}; backward {stages[1]}; recompute by {run.plan.recompute}", flush=True)
    run.steps(1, 2)
    seconds = run.steps(3, arguments.steps)
    run.close()
    tokens = run.rows * run.sequence
    median, drained = tokens / statistics.median(seconds), tokens * len(seconds) / sum(seconds)
    peaks = [device.peak_bytes() for device in run.devices]
    what = f"LoRA r{arguments.lora}" if arguments.lora else "full"
    case = (
        f"{arguments.preset} {what} {arguments.update}, {len(peaks)} worker(s),"
        f" {run.rows} x {run.sequence}, M = {run.microbatches}"
    )
    print(
        f"RESULT {case}: {median:.0f} tok/s by the median step, {drained:.0f} drained;"
        f" peak VRAM {' '.join(map(gib, peaks))} of {gib(run.bill.device)} by the bill"
    )
    if arguments.json is not None:
        figures = [
            ("tokens a second, median step", median, "tok/s"),
            ("tokens a second, drained", drained, "tok/s"),
            ("peak VRAM", max(peaks) / 2**30, "GiB"),
            ("VRAM by the bill", run.bill.device / 2**30, "GiB"),
        ]
        results = [
            {"case": case, "metric": m, "value": round(value, 2), "unit": unit} for m, value, unit in figures
        ]
        write_record(arguments.json, "throughput", machine(gpu_names(run.devices)), results)
    return 0


def gpu_names(devices: list[Device]) -> list[str]:
    """What each worker runs on."""
    cuda = devices[0].torch_device.type == "cuda"
    return [torch.cuda.get_device_name(d.torch_device) if cuda else "CPU worker" for d in devices]


if __name__ == "__main__":
    sys.exit(main())
