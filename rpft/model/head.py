"""The loss of the last layer: final norm, LM head and cross-entropy, in chunks of tokens.

The logits of a whole microbatch never exist. Only where a token is trained is a logit computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from rpft.model.block_backward import Weights
from rpft.model.device_batch import DeviceBatch
from rpft.model.dropout import mix, placed_dropout
from rpft.model.graphs import KernelKind, Kernels
from rpft.model.trunk import Trunk

HEAD_CHUNK_TOKENS: dict[KernelKind, int] = {"eager": 1024, "trace": 1024, "compile": 4096}
"""Tokens whose logits exist at once; compiled, a logit takes 4 bytes and not 14."""

_SMALLEST_CHUNK_TOKENS = 128
"""Graphs are made for a few sizes of chunk: the last one of a microbatch is filled up to a power of two."""

_IGNORED = -100
"""The target of a token that fills up a chunk."""


class HeadLoss:
    """Loss and gradients of the head layer that follows the blocks of ``trunk``."""

    def __init__(self, trunk: Trunk, kernels: Kernels) -> None:
        self._trunk, self._kernels = trunk, kernels
        self._chunk_tokens = HEAD_CHUNK_TOKENS[kernels.kind]

    def loss(self, hidden: torch.Tensor, weights: Weights, batch: DeviceBatch) -> torch.Tensor:
        """The sum of cross-entropy over the trained tokens, float32 scalar; no gradient is kept."""
        _, outer = self._split(weights)

        def chunk_loss(chunk: torch.Tensor, target: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor]:
            return (self._cross_entropy(chunk, target, dict(zip(outer, values, strict=True))),)

        with torch.no_grad():
            scored = self._finish(hidden, weights, batch, None)[batch.trained_at]
            total = torch.zeros((), device=hidden.device)
            for chunk, target, _ in self._chunks(scored, batch.targets):
                tensors = [chunk, target, *outer.values()]
                total += self._kernels.call("the loss", tuple(outer), chunk_loss, tensors, 2)[0]
        return total

    def loss_and_gradients(
        self, hidden: torch.Tensor, weights: Weights, batch: DeviceBatch, sums: Weights, key: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss sum, its gradient for ``hidden``); weight gradients are added to ``sums``, float32, by name."""
        place = None if key is None else mix(key, self._trunk.num_blocks + 1)
        with torch.no_grad():
            scored = self._finish(hidden, weights, batch, place)
            shape = scored.shape
            scored = scored[batch.trained_at]
        _, outer = self._split(weights)
        _, outer_sums = self._split(sums)

        def step(chunk: torch.Tensor, target: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own = dict(zip(outer, rest[: len(outer)], strict=True))
            chunk = chunk.detach().requires_grad_()
            own |= {name: own[name].detach().requires_grad_() for name in outer_sums}
            with torch.enable_grad():
                loss = self._cross_entropy(chunk, target, own)
                grads = torch.autograd.grad(loss, [chunk, *(own[n] for n in outer_sums)], allow_unused=True)
            for total, grad in zip(rest[len(outer) :], grads[1:], strict=True):
                if grad is not None:
                    total.add_(grad)
            return loss.detach(), grads[0]

        total = torch.zeros((), device=hidden.device)
        grad_final = torch.zeros(shape, dtype=scored.dtype, device=hidden.device)
        grads_scored = []
        for chunk, target, count in self._chunks(scored, batch.targets):
            tensors = [chunk, target, *outer.values(), *outer_sums.values()]
            named = (tuple(outer), tuple(outer_sums))
            with torch.no_grad():
                loss, grad = self._kernels.call("the loss and its gradient", named, step, tensors, 2)
            grads_scored.append(grad[:count])
            total += loss
        if grads_scored:
            grad_final.index_copy_(0, batch.trained_at, torch.cat(grads_scored))
        return total, self._finish_backward(hidden, weights, batch, place, grad_final, sums)

    # -- what follows the blocks, up to the head -----------------------------------------------------------

    def _finish(
        self, hidden: torch.Tensor, weights: Weights, batch: DeviceBatch, place: int | None
    ) -> torch.Tensor:
        """Final hidden states [tokens, hidden]."""
        inner, _ = self._split(weights)
        others = batch.inputs

        def run(hidden: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor]:
            return (self._run_finish(hidden, rest[: len(others)], inner, rest[len(others) :], place),)

        key = (len(others), tuple(inner), self._trunk.training)
        tensors = [hidden, *others, *inner.values()]
        if place is not None:
            return run(*tensors)[0]
        return self._kernels.call("the norm", key, run, tensors, 1 + len(others))[0]

    def _finish_backward(
        self,
        hidden: torch.Tensor,
        weights: Weights,
        batch: DeviceBatch,
        place: int | None,
        grad_final: torch.Tensor,
        sums: Weights,
    ) -> torch.Tensor:
        """The gradient for ``hidden``; what it follows the blocks with is run again, it is little."""
        inner, _ = self._split(weights)
        inner_sums, _ = self._split(sums)
        others = batch.inputs
        weights_end = 2 + len(others) + len(inner)

        def run(grad: torch.Tensor, hidden: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor]:
            values = dict(zip(inner, rest[len(others) : weights_end - 2], strict=True))
            values |= {name: values[name].detach().requires_grad_() for name in inner_sums}
            hidden = hidden.detach().requires_grad_()
            with torch.enable_grad():
                final = self._run_finish(hidden, rest[: len(others)], inner, tuple(values.values()), place)
                wanted = [hidden, *(values[n] for n in inner_sums)]
                grads = torch.autograd.grad(final, wanted, grad, allow_unused=True)
            for total, value in zip(rest[weights_end - 2 :], grads[1:], strict=True):
                if value is not None:
                    total.add_(value)
            return (grads[0],)

        key = (len(others), tuple(inner), tuple(inner_sums), self._trunk.training)
        tensors = [grad_final, hidden, *others, *inner.values(), *inner_sums.values()]
        with torch.no_grad():
            if place is not None:
                return run(*tensors)[0]
            return self._kernels.call("the norm's gradient", key, run, tensors, 2 + len(others))[0]

    def _run_finish(
        self,
        hidden: torch.Tensor,
        others: tuple[torch.Tensor, ...],
        inner: Weights,
        values: tuple[torch.Tensor, ...],
        place: int | None,
    ) -> torch.Tensor:
        ids, positions = others[0], others[1] if len(others) > 1 else None
        with placed_dropout(place):
            return self._trunk.finish(hidden, dict(zip(inner, values, strict=True)), ids, positions)

    # -- chunks --------------------------------------------------------------------------------------------

    def _split(self, named: Weights) -> tuple[Weights, Weights]:
        """(what belongs to the trunk, what belongs to the LM head), each by name."""
        prefix = self._trunk.prefix
        inner = {name: tensor for name, tensor in named.items() if name.startswith(prefix)}
        return inner, {name: tensor for name, tensor in named.items() if name not in inner}

    def _chunks(
        self, scored: torch.Tensor, targets: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """(tokens, targets, how many of them are real)."""
        for chunk, target in zip(scored.split(self._chunk_tokens), targets.split(self._chunk_tokens), strict=True):
            count = target.numel()
            missing = _filled_up(count, self._chunk_tokens) - count if self._kernels.graphs and count else 0
            if missing:
                chunk = F.pad(chunk, (0, 0, 0, missing))
                target = F.pad(target, (0, missing), value=_IGNORED)
            if count:
                yield chunk, target, count

    def _cross_entropy(self, chunk: torch.Tensor, target: torch.Tensor, weights: Weights) -> torch.Tensor:
        logits = self._trunk.head_logits(chunk, weights)
        return F.cross_entropy(logits.float(), target, reduction="sum", ignore_index=_IGNORED)


def _filled_up(count: int, most: int) -> int:
    size = min(_SMALLEST_CHUNK_TOKENS, most)
    while size < count:
        size *= 2
    return min(size, most)
