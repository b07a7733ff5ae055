"""Runs a loaded model layer by layer through LayerFunctions, with gradients, as plainly as can be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rpft.model.device_batch import DeviceBatch
from rpft.model.functions import LayerFunctions
from rpft.model.graphs import KernelKind
from rpft.model.host_store import HostStore
from support.models import Loaded


def batch_of(ids: torch.Tensor, skip: int = 0, positions: torch.Tensor | None = None) -> DeviceBatch:
    """A microbatch of ``ids`` [rows, sequence] that trains every next token after the first ``skip``."""
    targets = torch.full_like(ids, -100)
    targets[:, skip:-1] = ids[:, skip + 1 :]
    at = (targets.flatten() >= 0).nonzero().flatten()
    return DeviceBatch(ids, positions, at, targets.flatten()[at])


def random_ids(rows: int = 2, sequence: int = 16, seed: int = 0) -> torch.Tensor:
    """Ids [rows, sequence] below 320, none of them a special one."""
    return torch.randint(3, 320, (rows, sequence), generator=torch.Generator().manual_seed(seed))


def functions_of(
    loaded: Loaded, dtype: torch.dtype = torch.float32, train: bool = False, kernels: KernelKind = "eager"
) -> LayerFunctions:
    functions = LayerFunctions(loaded.skeleton, torch.device("cpu"), dtype, kernels)
    functions.train(train)
    return functions


def logits_of(
    loaded: Loaded,
    ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    functions: LayerFunctions | None = None,
) -> torch.Tensor:
    """Logits [rows, sequence, vocabulary] of the model in the host store, without dropout."""
    functions = functions or functions_of(loaded)
    batch, hidden = batch_of(ids, positions=positions), None
    last = len(loaded.store.layers) - 1
    with torch.no_grad():
        for layer in range(last):
            hidden = functions.forward(layer, hidden, loaded.store.layer_weights(layer), batch, None)
        assert hidden is not None
        return functions.logits(hidden, loaded.store.layer_weights(last), batch)


@dataclass
class Passed:
    """What a forward and backward pass gives: the loss sum, and gradients by the owner's name."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def forward_and_backward(
    functions: LayerFunctions,
    store: HostStore,
    batch: DeviceBatch,
    key: int | None = None,
    with_output: bool = False,
) -> Passed:
    """All layers forward, then each recomputed and run backward from its input alone, as the engine does.

    ``with_output``: the recompute is run apart from the backward, as in the middle of a segment.
    """
    last = len(store.layers) - 1
    inputs: list[torch.Tensor | None] = [None]
    with torch.no_grad():
        for layer in range(last):
            inputs.append(functions.forward(layer, inputs[-1], store.layer_weights(layer), batch, key))
    gradients: dict[str, torch.Tensor] = {}

    def add(layer: int, sums: dict[str, torch.Tensor]) -> None:
        lent = {b.name: b for b in store.layers[layer].layout.bindings}
        for name, gradient in sums.items():
            owner = name if name in store else _owner(store, layer, lent[name].byte_offset)
            gradients[owner] = gradients[owner] + gradient if owner in gradients else gradient

    hidden = inputs[last]
    assert hidden is not None
    sums = zero_sums(store, last)
    grad: torch.Tensor | None
    loss, grad = functions.head.loss_and_gradients(hidden, store.layer_weights(last), batch, sums, key)
    add(last, sums)
    for layer in reversed(range(last)):
        sums = zero_sums(store, layer)
        if not sums and layer == 0:  # the embedding of an adapter
            break
        assert grad is not None
        # `data` as on a worker: what sets a weight to itself (peft does) is not to count as writing the others.
        weights = {name: weight.data for name, weight in store.layer_weights(layer).items()}
        _, kept = functions.keep(
            layer, inputs[layer], weights, batch, key, frozenset(sums), layer > 0, with_output=with_output
        )
        grad = kept.backward(grad, sums)
        add(layer, sums)
    return Passed(loss, gradients)


def put_together(gradients: dict[str, torch.Tensor], store: HostStore) -> dict[str, torch.Tensor]:
    """Gradients of all that is trained, by names in the model, those of groups of experts as one."""
    found: dict[str, torch.Tensor] = {}
    for spec in (spec for layer in store.layers for spec, _ in layer.layout.own.values() if spec.trained):
        value = gradients[spec.name]
        if spec.slice is None:
            found[spec.name] = value
            continue
        whole = found.setdefault(spec.whole_name, value.new_full(spec.whole_shape, torch.nan))
        spec.slice.put_into(whole, value)
    return found


def zero_sums(store: HostStore, layer: int) -> dict[str, torch.Tensor]:
    """A float32 gradient sum of zero for every trained tensor that ``layer`` uses."""
    bindings = store.layers[layer].layout.bindings
    return {b.name: torch.zeros(b.shape) for b in bindings if b.grad_offset is not None}


def _owner(store: HostStore, layer: int, byte_offset: int) -> str:
    layout = store.layers[layer].layout
    piece = next(p for p in layout.weight_pieces if 0 <= byte_offset - p.region_offset < p.length)
    at = piece.start + byte_offset - piece.region_offset
    return next(name for name, (_, start) in store.layers[piece.layer].layout.own.items() if start == at)


def summed_cross_entropy(logits: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
    """The plain loss that ``loss_and_gradients`` must give, in float32."""
    return F.cross_entropy(logits.flatten(0, 1)[batch.trained_at].float(), batch.targets, reduction="sum")


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The norm of the difference by the norm of ``theirs``; 0 where both are zero."""
    difference = (ours - theirs).norm().item()
    return difference / theirs.norm().item() if difference else 0.0
