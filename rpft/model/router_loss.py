"""The load-balancing loss of routers, of a layer and a microbatch at a time.

Switch Transformer, arXiv 2101.03961, eq. 4 to 6. Of a layer with E experts, of which each of T tokens picks k:

    loss = E * sum over experts e of  (picks of e) / T  *  mean over tokens of softmax(scores)[e]

which is k where the load is even, and what transformers' ``load_balancing_loss_func`` gives for that layer alone.
transformers multiplies the means over all layers of a model, which no layer by itself could; here, as in Megatron,
each layer has its loss, and their mean counts. A microbatch weighs as its trained tokens, as its cross-entropy
does; T is all of its tokens, padding included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from rpft.errors import UserError

LOSS, WEIGHT = "router loss", "router loss weight"
"""Among a block's gradient sums: a float32 scalar to which the weighted loss is added, and the weight."""


class Router(NamedTuple):
    """Where a block makes the scores of its experts."""

    path: str
    """Of the module, from the block."""
    index: int
    """Of the scores in what the module gives."""


def find_router(model: Any, block: nn.Module) -> Router | None:
    """The router of ``block``, which transformers knows by class; None where there is none, or more than one."""
    for owner in (model, model.base_model):
        entry = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits")
        for each in entry if isinstance(entry, list) else [entry]:
            kind, index = getattr(each, "target_class", each), getattr(each, "index", 0)
            found = [path for path, module in block.named_modules() if kind and isinstance(module, kind)]
            if len(found) == 1:
                return Router(found[0], index)
    return None


def chosen_coefficient(asked: float | str, config: Any) -> float:
    """What ``train.router_aux_loss`` comes to: itself, or the coefficient of the model's own config.

    UserError for a family that knows no such loss.
    """
    own = getattr(config.get_text_config(), "router_aux_loss_coef", None)
    if not asked:
        return 0.0
    if own is None:
        raise UserError(
            f"train.router_aux_loss {asked}: model {config.model_type!r} has no router that is trained with a"
            " load-balancing loss (no router_aux_loss_coef in its config); set it to 0"
        )
    return float(own if asked == "model" else asked)


def load_balancing_loss(scores: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """The loss of one layer, a float32 scalar, from ``scores`` [tokens, experts] and ``picked`` [tokens, k]."""
    scores, picked = scores.flatten(0, -2), picked.flatten()
    tokens, experts = scores.shape
    ones = torch.ones(picked.shape, dtype=torch.float32, device=scores.device)
    picks = torch.zeros(experts, dtype=torch.float32, device=scores.device).scatter_add(0, picked.long(), ones)
    return experts * (picks / tokens * torch.softmax(scores.float(), -1).mean(0)).sum()


def ends_of_backward(
    output: torch.Tensor,
    grad: torch.Tensor,
    loss: torch.Tensor | None,
    sums: Mapping[str, torch.Tensor],
    coefficient: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(What a block's backward begins at, their gradients): its output, and its ``loss`` where it has one.

    The loss is added to ``sums``, as much as they say that it counts. It has no gradient where what scores the
    experts is frozen up to the embedding, as with adapters behind the first router alone.
    """
    if loss is None:
        return [output], [grad]
    sums[LOSS].add_(loss.detach() * sums[WEIGHT])
    if not loss.requires_grad:
        return [output], [grad]
    return [output, loss], [grad, coefficient * sums[WEIGHT]]


class ScoreWatch:
    """Sees the scores that a block's router makes."""

    def __init__(self, block: nn.Module, router: Router) -> None:
        self._index, self._seen = router.index, list[torch.Tensor]()
        block.get_submodule(router.path).register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._seen[:] = [output[self._index] if isinstance(output, tuple) else output]

    def take(self) -> torch.Tensor:
        """The scores of the last run."""
        return self._seen.pop()
