"""The reference implementation, roundpipe 0.1.1 from PyPI, through its public interface.

    pip install roundpipe==0.1.1 beartype
    python benchmarks/peers/roundpipe_0_1_1.py llama-3.1-8b --rows 24 --sequence 4096 --microbatches 3
        [--compile-layers] [--sync-step] [--lora 32] [--workers 2] [--json FILE]

As it comes, or with --compile-layers its decoder layers compiled, the strongest way to run it. A dependency of
benchmarks only: it is under the LGPL and no part of this program. Its update is one step stale unless --sync-step.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

VERSION = "0.1.1"


def refuse_without_package() -> None:
    """Ends the process, with what to do, where the package is not installed."""
    if importlib.util.find_spec("roundpipe") is None:
        sys.exit(f"roundpipe is not installed: pip install roundpipe=={VERSION} beartype")


def parse() -> argparse.Namespace:
    from harness import parser

    arguments_of = parser(__doc__, rows=24, warm_up=5)  # its planner has no timings before the third step
    arguments_of.add_argument("--microbatches", type=int, default=3, help="of a step, all in one round")
    arguments_of.add_argument("--lora", type=int, default=0, help="rank; 0 trains every weight")
    arguments_of.add_argument("--workers", type=int, default=0, help="GPUs; 0: all")
    arguments_of.add_argument("--sync-step", action="store_true", help="no stale update: its exact mode")
    arguments_of.add_argument("--compile-layers", action="store_true")
    arguments = arguments_of.parse_args()
    if arguments.rows < arguments.microbatches:
        sys.exit(f"--rows {arguments.rows} are fewer than --microbatches {arguments.microbatches}")
    return arguments


def adapt_to_transformers_5() -> None:
    """It calls transformers' mask functions with the argument names of version 4."""
    from transformers import masking_utils

    def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
        known = inspect.signature(function).parameters

        def call(**arguments: Any) -> Any:
            if "inputs_embeds" in known and "input_embeds" in arguments:
                arguments["inputs_embeds"] = arguments.pop("input_embeds")
            return function(**{name: value for name, value in arguments.items() if name in known})

        return call

    for family in ("qwen3", "llama"):
        module = importlib.import_module(f"roundpipe.models.{family}")
        for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
            if hasattr(module, name):
                setattr(module, name, adapted(getattr(masking_utils, name)))


def random_model(preset: str, lora: int) -> Any:
    """The model with random weights on the CPU, tied weights tied; with ``lora`` only an adapter is trained."""
    import torch
    from harness import complete, draw, meta_model

    model = meta_model(preset)
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                value = torch.empty(parameter.shape, dtype=parameter.dtype)
                draw(value, torch.device("cuda", 0))
                made[parameter] = torch.nn.Parameter(value)
            module._parameters[name] = made[parameter]
    complete(model, torch.device("cpu"))
    for layer, kind in zip(model.model.layers, getattr(model.config, "layer_types", None) or [], strict=False):
        if not hasattr(layer, "attention_type"):  # gone from transformers' layers in version 5
            layer.attention_type = kind
    if lora:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel

        config = LoraConfig(
            r=lora, lora_alpha=2 * lora, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = LoraModel(model, config, "default").model  # put in place: the class stays the model's own
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    torch.cuda.empty_cache()
    return model


def compile_decoder_layers() -> None:
    import torch
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    torch._dynamo.config.recompile_limit = 256
    layers: list[Any] = [Qwen3DecoderLayer, LlamaDecoderLayer]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)


def no_autocast() -> Any:
    """The state of autocast in which its workers run; a compiled graph is looked up by it."""
    from contextlib import ExitStack

    import torch

    stack = ExitStack()
    for kind in ("cpu", "cuda"):
        stack.enter_context(torch.autocast(kind, enabled=False, dtype=torch.bfloat16, cache_enabled=False))
    return stack


def warm_up_compiled(model: Any, arguments: argparse.Namespace, devices: list[Any]) -> None:
    """Compiles loss and layers for each GPU from the main thread: its workers cannot trace at the same time."""
    import copy

    import torch
    from harness import DTYPE
    from roundpipe.models.function import ChunkedCompileLinearForCausalLMLoss

    config, many = model.config, arguments.microbatches
    sizes = {arguments.rows // many, -(-arguments.rows // many)}
    for device in devices:
        shape = {"device": device, "dtype": DTYPE}
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, **shape)
        head.requires_grad_(not arguments.lora)
        layer = copy.deepcopy(model.model.layers[0]).to(device)
        rotary = copy.deepcopy(model.model.rotary_emb).to(device)
        positions = torch.arange(arguments.sequence, device=device)[None]
        for rows in sizes:
            hidden = torch.randn(rows, arguments.sequence, config.hidden_size, **shape)
            labels = torch.randint(0, config.vocab_size, (rows, arguments.sequence), device=device)
            with no_autocast():
                ChunkedCompileLinearForCausalLMLoss(hidden.clone().requires_grad_(), head, labels)
            if not arguments.compile_layers:
                continue
            call = {"position_ids": positions, "position_embeddings": rotary(hidden, positions)}
            for grad, grad_hidden in ((True, True), (True, False), (False, True), (False, False)):
                with torch.set_grad_enabled(grad), no_autocast():
                    out = layer(hidden.detach().requires_grad_(grad_hidden), attention_mask=None, **call)
                    out = out[0] if isinstance(out, tuple) else out
                    if grad:
                        out.backward(torch.ones_like(out))
        torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def main() -> int:
    refuse_without_package()
    arguments = parse()
    if arguments.workers:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(arguments.workers)))
    import torch
    from harness import report, reset_peaks, timed

    if not torch.cuda.is_available():
        sys.exit("roundpipe needs a CUDA device, and torch sees none")
    from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
    from roundpipe.device import device_list
    from roundpipe.optim import Adam
    from roundpipe.optim_stream import synchronize_optim

    devices = [torch.device(device.device) for device in device_list]
    adapt_to_transformers_5()
    if arguments.compile_layers:
        compile_decoder_layers()
    inner = random_model(arguments.preset, arguments.lora)
    warm_up_compiled(inner, arguments, devices)
    many = arguments.microbatches
    model: Any = wrap_model_to_roundpipe(
        inner,
        optim_dtype=torch.float32,
        use_sequential_preset=True,
        pin_model="alloc",
        name=arguments.preset,
        model_run_config=RoundPipeRunConfig(
            num_microbatch=many, recompute_grain="stage", preserve_rng_state=False
        ),
    )
    optimizer = Adam(list(model.optim_parameters()), lr=1e-5)
    ids = torch.randint(0, inner.config.vocab_size, (arguments.rows, arguments.sequence))
    inputs = {"input_ids": ids, "labels": ids, "return_logits": False}

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        loss = model.forward_backward(input_kwargs=inputs, loss_fn=lambda output, _: output.loss / many)
        print(f"{loss.detach().item():.4f}", end=" ", flush=True)
        model.step(update, is_async=not arguments.sync_step)

    for _ in range(arguments.warm_up):
        step()
    synchronize_optim()
    model.model_timer.update_times()
    reset_peaks(devices)
    timing = timed(step, arguments.steps, devices, on_device=False, finish=synchronize_optim)
    print()
    case = ", ".join(
        [
            f"roundpipe {arguments.preset} {f'LoRA r{arguments.lora}' if arguments.lora else 'full'}",
            "exact" if arguments.sync_step else "stale",
            "layers compiled" if arguments.compile_layers else "as it comes",
            f"{len(devices)} GPU(s), {arguments.rows} x {arguments.sequence}, M = {many}",
        ]
    )
    report(case, ids.numel(), timing, devices, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
