"""The roof: the same model wholly resident on one GPU, forward, recompute and backward, and nothing else.

    python benchmarks/peers/roof.py qwen3-1.7b --rows 8 --sequence 4096 [--attention cudnn] [--lora 32]

No optimizer, no transfer, layers compiled and checkpointed. Tokens a second of this, times the number of GPUs, is
the most that anything can reach which recomputes each layer with these kernels. --rows are those of a microbatch.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
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
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


def resident_model(preset: str, lora: int, device: torch.device) -> Any:
    """The model with random weights on ``device``; with ``lora`` only an adapter of that rank is trained."""
    model = meta_model(preset).to_empty(device=device)
    complete(model, device)
    with torch.no_grad():
        for parameter in model.parameters():
            draw(parameter, device)
    if lora:
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(r=lora, lora_alpha=2 * lora, lora_dropout=0.0, target_modules="all-linear")
        inject_adapter_in_model(config, model)  # which freezes everything else
        model.lm_head.requires_grad_(False)
    return model


def train_step(model: Any, ids: Tensor, positions: Tensor) -> None:
    """Forward, recompute and backward of all rows; gradients are dropped at the next step's start."""
    for parameter in model.parameters():
        parameter.grad = None
    trunk = model.model
    hidden = trunk.embed_tokens(ids)
    rotary = trunk.rotary_emb(hidden, positions)
    for block in trunk.layers:
        hidden = checkpoint(run_block, block, hidden, rotary, positions, use_reentrant=False)
    final = trunk.norm(hidden).flatten(0, 1)
    scored = final.detach().requires_grad_()
    targets = ids.flatten().roll(-1)
    for chunk, target in zip(scored.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
        cross_entropy(chunk, model.lm_head.weight, target).backward()
    final.backward(scored.grad)


def main() -> int:
    arguments_of = parser(__doc__, rows=8)
    arguments_of.add_argument("--attention", choices=["default", "cudnn"], default="default")
    arguments_of.add_argument("--lora", type=int, default=0, help="rank; 0 trains every weight")
    arguments = arguments_of.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = resident_model(arguments.preset, arguments.lora, device)
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    shape = (arguments.rows, arguments.sequence)
    ids = torch.randint(0, model.config.vocab_size, shape, device=device)
    positions = torch.arange(arguments.sequence, device=device)[None]
    cudnn = arguments.attention == "cudnn"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else nullcontext():
        for _ in range(arguments.warm_up):
            train_step(model, ids, positions)
        reset_peaks([device])
        timing = timed(lambda: train_step(model, ids, positions), arguments.steps, [device], on_device=True)
    kind = f"LoRA r{arguments.lora}" if arguments.lora else "full"
    case = (
        f"roof {arguments.preset} {kind}, 1 GPU, {arguments.rows} x {arguments.sequence},"
        f" {arguments.attention} attention"
    )
    report(case, ids.numel(), timing, [device], arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
