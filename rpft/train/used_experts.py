"""Brings up only those experts of an offloaded model that its routers pick, where that is not all of them.

accelerate uploads a module's weights before it is called, of a mixture of experts whole stacks. Behind a prompt
one token is computed at a time, and it is sent to a few: of 128 experts of which 8 are picked a sixteenth moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rpft.model.parts import is_stack


def upload_only_used_experts(model: nn.Module) -> list[nn.Module]:
    """Changes how those stacks of experts of ``model`` run whose weights accelerate brings up; gives them."""
    found = []
    for module in model.modules():
        weights = _brought_up(module)
        if weights is not None and is_stack(module):
            found.append(module)
            whole: Callable[..., Any] = module.forward
            module.forward = _Used(module, weights, whole)  # type: ignore[method-assign]
    return found


def _brought_up(module: nn.Module) -> Any:
    """What accelerate takes the weights of ``module`` from, by name, when it is called; None where it does not."""
    hook: Any = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])  # of several hooks in a row
    return next((each.weights_map for each in hooks if getattr(each, "offload", False)), None)


class _Used:
    """The forward of a stack of experts; given are hidden states, indices [tokens, picked] and their weights."""

    def __init__(self, module: Any, weights: Any, whole: Callable[..., Any]) -> None:
        """``whole``: brings the whole stack up, and runs it."""
        self._module, self._weights, self._whole = module, weights, whole

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 3 or args[1].is_floating_point():  # in another order than is known here
            return self._whole(*args, **kwargs)
        hidden, indices, scores = args
        module, count = self._module, self._module.num_experts
        used = indices.unique()
        if len(used) == count:
            return self._whole(hidden, indices, scores)
        stacks = dict(module.named_parameters(recurse=False))
        for name in stacks:
            some = self._some(self._weights[name], used.tolist(), hidden.device)
            setattr(module, name, nn.Parameter(some, requires_grad=False))
        module.num_experts = len(used)
        try:
            return module._old_forward(hidden, torch.searchsorted(used, indices), scores)
        finally:
            module.num_experts = count
            for name, stack in stacks.items():
                setattr(module, name, stack)

    @staticmethod
    def _some(stack: torch.Tensor, numbers: list[int], device: torch.device) -> torch.Tensor:
        """Those of ``stack`` on ``device``; of a file's mapping the others are not even read."""
        some = torch.empty(len(numbers), *stack.shape[1:], dtype=stack.dtype, device=device)
        for place, number in enumerate(numbers):
            some[place].copy_(stack[number])
        return some
