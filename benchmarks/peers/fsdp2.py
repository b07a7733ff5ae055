"""What a PyTorch user would build: FSDP2 with CPU offload, layers compiled and checkpointed, fused AdamW.

    torchrun --standalone --nproc-per-node 2 benchmarks/peers/fsdp2.py qwen3-1.7b --rows 24 --micro-rows 4
        [--resident] [--json FILE]

--rows are those of a step, all GPUs together; each GPU takes its share in microbatches of --micro-rows. --resident
keeps the shards on the GPUs. Weights are float32, computed with in bfloat16; there is no clipping.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    CHUNK_TOKENS,
    complete,
    cross_entropy,
    draw,
    meta_model,
    parser,
    report,
    reset_peaks,
    run_block,
    timed,
)
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class LossSum(nn.Module):
    """The model as a function of ids [rows, sequence] to the loss sum, its blocks and loss checkpointed."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        trunk = self.model.model
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        hidden = trunk.embed_tokens(ids)
        rotary = trunk.rotary_emb(hidden, positions)
        for block in trunk.layers:
            hidden = checkpoint(run_block, block, hidden, rotary, positions, use_reentrant=False)
        final, targets = trunk.norm(hidden).flatten(0, 1), ids.flatten().roll(-1)
        weight = self.model.lm_head.weight
        total = torch.zeros((), device=ids.device)
        for chunk, target in zip(final.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
            total = total + checkpoint(cross_entropy, chunk, weight, target, use_reentrant=False)
        return total


def sharded_model(preset: str, resident: bool, device: torch.device) -> Any:
    """The model cut into shards of blocks, with random weights."""
    inner = meta_model(preset).float()
    for layer in inner.model.layers:
        layer.compile(dynamic=False)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    how: dict[str, Any] = {"mp_policy": precision, "reshard_after_forward": True}
    if not resident:
        how["offload_policy"] = CPUOffloadPolicy()
    for layer in inner.model.layers:
        fully_shard(layer, **how)
    model: Any = fully_shard(LossSum(inner), **how)
    model.to_empty(device=device if resident else "cpu")
    complete(inner, device)
    with torch.no_grad():
        for parameter in model.parameters():
            draw(parameter.to_local(), device)
    return model


def main() -> int:
    arguments_of = parser(__doc__, rows=24, warm_up=2)
    arguments_of.add_argument("--micro-rows", type=int, default=4, help="rows of a GPU's microbatch")
    arguments_of.add_argument("--resident", action="store_true", help="no offload: shards stay on the GPUs")
    arguments = arguments_of.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if arguments.rows % world:
        sys.exit(f"--rows {arguments.rows} cannot be shared by {world} processes")
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, ((os.cpu_count() or 1) - world) // world))
    model = sharded_model(arguments.preset, arguments.resident, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = arguments.rows * arguments.sequence
    vocabulary = model.model.config.vocab_size
    ids = torch.randint(0, vocabulary, (arguments.rows // world, arguments.sequence), device=device)
    parts = ids.split(arguments.micro_rows)

    def step() -> None:
        for number, part in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            (model(part) / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(arguments.warm_up):
        step()
    reset_peaks([device])
    dist.barrier()
    timing = timed(step, arguments.steps, [device], on_device=arguments.resident)
    if rank == 0:
        kind = "resident" if arguments.resident else "CPU offload"
        case = (
            f"FSDP2 {kind} {arguments.preset} full, {world} GPU(s), {arguments.rows} x {arguments.sequence},"
            f" {arguments.micro_rows} rows a microbatch"
        )
        report(case, tokens, timing, [device], arguments.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
