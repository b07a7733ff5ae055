"""What roundpipe 0.1.1 needs around it: transformers of version 4, and compiled code before its workers start."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from rpft.peers.model import blocks_of
from rpft.peers.work import Work


class WarmUp:
    """Has loss and layer compiled for each GPU from the main thread: its workers cannot trace at the same time."""

    def __init__(self, model: Any, work: Work, devices: Sequence[torch.device], layers: bool) -> None:
        """``model``: before it is wrapped. ``layers``: whether they are compiled, beside the loss."""
        self._model, self._work, self._devices, self._compiled = model, work, devices, layers
        self._first = copy.deepcopy(blocks_of(model)[0])
        self._warmed: set[tuple[int, int]] = set()

    def once(self, rows: int, sequence: int) -> None:
        """Compiles them for microbatches of this shape, if that was not done before."""
        from roundpipe.models.function import ChunkedCompileLinearForCausalLMLoss

        if (rows, sequence) in self._warmed:
            return
        self._warmed.add((rows, sequence))
        config = self._model.config
        for device in self._devices:
            how = {"device": device, "dtype": getattr(torch, self._work.dtype)}
            head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **how)
            head.requires_grad_(self._work.adapter is None)
            hidden = torch.randn(rows, sequence, config.hidden_size, **how)
            labels = torch.randint(0, config.vocab_size, (rows, sequence), device=device)
            with _no_autocast():
                ChunkedCompileLinearForCausalLMLoss(hidden.clone().requires_grad_(), head, labels)
            if self._compiled:
                self._layer(hidden)
            torch.cuda.synchronize(device)
        torch.cuda.empty_cache()

    def _layer(self, hidden: Tensor) -> None:
        layer = copy.deepcopy(self._first).to(hidden.device)
        rotary = type(self._model.model.rotary_emb)(config=self._model.config).to(hidden.device)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        call = {"position_ids": positions, "position_embeddings": rotary(hidden, positions)}
        for grad, grad_hidden in ((True, True), (True, False), (False, True), (False, False)):
            with torch.set_grad_enabled(grad), _no_autocast():
                out = layer(hidden.detach().requires_grad_(grad_hidden), attention_mask=None, **call)
                out = out[0] if isinstance(out, tuple) else out
                if out.requires_grad:
                    out.backward(torch.ones_like(out))


def adapt_to_transformers_5(model: Any) -> None:
    """It calls transformers' mask functions with the argument names of version 4, and reads what layers lost."""
    from transformers import masking_utils

    def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
        known = inspect.signature(function).parameters

        def call(**arguments: Any) -> Any:
            if "inputs_embeds" in known and "input_embeds" in arguments:
                arguments["inputs_embeds"] = arguments.pop("input_embeds")
            return function(**{name: value for name, value in arguments.items() if name in known})

        return call

    family = model.config.model_type
    try:
        module = importlib.import_module(f"roundpipe.models.{family}")
    except ModuleNotFoundError:
        raise RuntimeError(f"roundpipe has no preset for models of type {family}") from None
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        if hasattr(module, name):
            setattr(module, name, adapted(getattr(masking_utils, name)))
    for layer, kind in zip(blocks_of(model), getattr(model.config, "layer_types", None) or [], strict=False):
        if not hasattr(layer, "attention_type"):
            layer.attention_type = kind


def _no_autocast() -> ExitStack:
    """The state of autocast in which its workers run; a compiled graph is looked up by it."""
    stack = ExitStack()
    for kind in ("cpu", "cuda"):
        stack.enter_context(torch.autocast(kind, enabled=False, dtype=torch.bfloat16, cache_enabled=False))
    return stack
