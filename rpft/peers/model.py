"""The transformers model of the work, as its users train it: checkpointed blocks, a loss that holds few logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rpft.model.graphs import attention_kernels
from rpft.peers.work import IGNORED, Placed, Work

CHUNK_TOKENS = 4096
"""Tokens whose logits exist at once."""

_SMALLEST_CHUNK_TOKENS = 128
"""Compiled, the last chunk is filled up to a power of two, so that there are few shapes."""

_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of families that do something with logits, which only their own forward knows."""

_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def load_model(work: Work, device: torch.device, checkpointed: bool = True) -> Any:
    """The model on ``device``, in training mode; of an adapter's model the adapter's weights alone are trained.

    ``checkpointed``: whether each block keeps its input only and is run again in the backward.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(work.config)
    config.use_cache = False
    how: dict[str, Any] = {"dtype": getattr(torch, work.dtype), "attn_implementation": work.attention}
    if work.weights is not None:
        model: Any = AutoModelForCausalLM.from_pretrained(work.weights, config=config, **how)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **how)
        _draw_weights(model, device, work.seed)
    if work.adapter is not None:
        model = _with_adapter(model, Path(work.adapter))
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.to(device)


def _draw_weights(model: Any, device: torch.device, seed: int) -> None:
    """Gives a meta model weights on ``device``: matrices normal(0, 0.02), vectors one, tied ones tied."""
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                value = torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
                if parameter.dim() > 1:
                    value.normal_(0.0, 0.02, generator=generator)
                made[parameter] = nn.Parameter(value)
            module._parameters[name] = made[parameter]
    for path, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):  # rotary frequencies
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, type(module)(config=model.config))


def _with_adapter(model: Any, folder: Path) -> Any:
    """``model`` itself with the adapter in it, its base frozen."""
    from peft import PeftConfig, PeftModel, get_peft_model

    if any((folder / name).exists() for name in _ADAPTER_FILES):
        made = PeftModel.from_pretrained(model, str(folder), is_trainable=True, autocast_adapter_dtype=False)
    else:
        made = get_peft_model(model, PeftConfig.from_pretrained(str(folder)), autocast_adapter_dtype=False)
    return made.get_base_model()


def blocks_of(model: Any) -> nn.ModuleList:
    """Its decoder blocks."""
    wanted = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == wanted]
    return lists[0]


def buffers_to(model: Any, device: torch.device) -> None:
    """Moves what is no parameter: rotary frequencies and the like."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def compile_blocks(model: Any) -> None:
    """Has each block compiled when it first runs, once for every shape."""
    torch._dynamo.config.recompile_limit = 256
    for block in blocks_of(model):
        block.compile(dynamic=False)


def attention_of(work: Work) -> AbstractContextManager[Any]:
    """Which attention kernels sdpa may choose from: as the run does, unless the work says torch's own choice."""
    if "torch-attention" in work.options:
        return nullcontext()
    return attention_kernels(torch.device(work.device), work.deterministic)


class LossSum(nn.Module):
    """A model as a function of rows to the sum of cross-entropy over their trained tokens, float32 scalar."""

    def __init__(self, model: Any, compiled: bool, head_as_module: bool = False) -> None:
        """``head_as_module``: whether the head must be called, since something hooks into that."""
        super().__init__()
        self.model = model
        self._compiled, self._as_module = compiled, head_as_module
        config = model.config.get_text_config()
        self._whole = any(getattr(config, name, None) not in (None, 1.0) for name in _AFTER_THE_HEAD)

    def forward(self, rows: Placed) -> Tensor:
        arguments = {"input_ids": rows.input_ids, "position_ids": rows.position_ids, "use_cache": False}
        if self._whole:
            return _of_logits(self.model(**arguments).logits.flatten(0, 1)[rows.at], rows.targets)
        hidden = self.model.base_model(**arguments).last_hidden_state.flatten(0, 1)
        score = self._score()
        # Where nothing is trained the backward still has to run: other processes wait for its gradients.
        total = torch.zeros((), device=hidden.device) if len(rows.at) else 0.0 * hidden.float().sum()
        for chunk, target in self._chunks(hidden[rows.at], rows.targets):
            total = total + checkpoint(score, chunk, target, use_reentrant=False)
        return total

    def _score(self) -> Callable[[Tensor, Tensor], Tensor]:
        head = self.model.get_output_embeddings()
        if type(head) is nn.Linear and head.bias is None and not self._as_module:
            run = _compiled_cross_entropy if self._compiled else _cross_entropy
            return lambda chunk, target: run(chunk, head.weight, target)
        return lambda chunk, target: _of_logits(head(chunk), target)

    def _chunks(self, hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk, target in zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
            if not len(target):
                return
            size = _SMALLEST_CHUNK_TOKENS if self._compiled else len(target)
            while size < len(target):
                size *= 2
            if missing := size - len(target):
                chunk, target = F.pad(chunk, (0, 0, 0, missing)), F.pad(target, (0, missing), value=IGNORED)
            yield chunk, target


def _of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=IGNORED)


def _cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return _of_logits(F.linear(hidden, weight), targets)


_compiled_cross_entropy = torch.compile(_cross_entropy, dynamic=False)
