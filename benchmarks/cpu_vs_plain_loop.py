"""Time of a step on the CPU pool with one worker against a plain PyTorch loop with checkpointing, same work.

    python benchmarks/cpu_vs_plain_loop.py MODEL_FOLDER [--rows 4] [--sequence 128] [--steps 8] [--dtype bfloat16]

Both train every weight of the model with AdamW and clipping on the same random tokens, in one process, a step of
one and a step of the other in turn, so that a machine that slows down slows both. Prints medians and their
ratio, and writes them with --json FILE.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from record import machine, write_record

from rpft.engine.cpu import CpuDevice
from rpft.engine.engine import Engine
from rpft.engine.failure import Failure
from rpft.engine.slot import HostBatch
from rpft.engine.streams import Delays
from rpft.model.build import build_model
from rpft.model.checkpoint import Checkpoint, read_config
from rpft.model.cut import cut
from rpft.model.functions import LayerFunctions
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.model.load import load_checkpoint
from rpft.optim.adamw import AdamW
from rpft.optim.host_optimizer import HostOptimizer
from rpft.optim.schedule import Schedule
from rpft.plan.costs import layer_costs
from rpft.plan.partition import balanced_plan


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


class PlainLoop:
    """What a PyTorch user would write: checkpointed blocks, float32 masters, fused AdamW, clipping."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.parameters = list(self.model.parameters())
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5, weight_decay=0.0, fused=True)

    def step(self, batches: list[HostBatch]) -> float:
        tokens = sum(batch.trained_tokens for batch in batches)
        total = 0.0
        for batch in batches:
            logits = self.model(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)
            loss = F.cross_entropy(logits[batch.trained_at].float(), batch.targets, reduction="sum")
            (loss / tokens).backward()
            total += float(loss)
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)
        return total / tokens


class PoolLoop:
    """The same through the engine, one worker."""

    def __init__(self, folder: Path, dtype: torch.dtype, num_microbatches: int, max_tokens: int) -> None:
        skeleton = cut(build_model(read_config(folder), dtype, "auto"))
        store = HostStore(build_layers(skeleton, dtype))
        load_checkpoint(Checkpoint(folder), skeleton, store)
        failure, delays = Failure(), Delays(None)
        layouts = [layer.layout for layer in store.layers]
        costs = layer_costs(layouts, skeleton)
        plan = balanced_plan(costs, 1, num_microbatches, 1, "stage", lambda plan: True)
        assert plan is not None
        self.optimizer = HostOptimizer(store, AdamW(), Schedule("constant", 1e-5, 10**6), 1.0, failure, delays)
        self.engine = Engine(
            skeleton,
            store,
            plan,
            [CpuDevice(0)],
            functions=[LayerFunctions(skeleton, torch.device("cpu"), dtype)],
            max_tokens=max_tokens,
            seed=0,
            update_lag=0,
            send_update=self.optimizer.submit,
            failure=failure,
            delays=delays,
        )
        self.plan, self.number = plan, 0

    def step(self, batches: list[HostBatch]) -> float:
        self.number += 1
        self.engine.submit_step(self.number, batches)
        result = self.optimizer.wait(self.number)
        return result.loss_sum / sum(batch.trained_tokens for batch in batches)

    def close(self) -> None:
        self.engine.close()
        self.optimizer.close()
        self.optimizer.join(5.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=4, help="microbatches of one row a step")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    plain = PlainLoop(arguments.model, dtype)
    pool = PoolLoop(arguments.model, dtype, arguments.rows, arguments.sequence)
    vocabulary = plain.model.config.vocab_size
    times: dict[str, list[float]] = {"plain loop": [], "pool, one worker": []}
    for number in range(arguments.steps + 1):
        batches = random_step(arguments.rows, arguments.sequence, arguments.rows, vocabulary, number)
        losses = []
        for name, loop in (("plain loop", plain), ("pool, one worker", pool)):
            started = time.perf_counter()
            losses.append(loop.step(batches))
            if number > 0:  # the first step warms up
                times[name].append(time.perf_counter() - started)
        print(f"step {number}: loss plain {losses[0]:.4f}, pool {losses[1]:.4f}", flush=True)
    pool.close()
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
    tokens = arguments.rows * arguments.sequence
    where = machine(["CPU"])
    print(
        f"{where}, {torch.get_num_threads()} threads; {arguments.rows} x {arguments.sequence} tokens,"
        f" {arguments.dtype}"
    )
    for name, seconds in medians.items():
        print(f"{name:18} {seconds:6.2f} s a step, {tokens / seconds:7.1f} tokens/s (median of {arguments.steps})")
    print(
        f"pool / plain loop  {ratio:6.2f} (median of pairs;"
        f" plan of {len(pool.plan.forward)} + {len(pool.plan.backward)} stages)"
    )
    if arguments.json is not None:
        results = [
            {"case": name, "metric": "step time, median", "value": round(seconds, 4), "unit": "s"}
            for name, seconds in medians.items()
        ]
        results.append(
            {"case": "pool / plain loop", "metric": "ratio, median of pairs", "value": round(ratio, 4), "unit": ""}
        )
        write_record(arguments.json, "cpu_vs_plain_loop", where, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
