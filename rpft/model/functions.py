"""The pure functions that a worker runs: embedding, block and head, over weights given from outside.

One ``LayerFunctions`` lives on each worker's device. It holds templates, modules without weights, one a kind of
block, and the model's own code around them (trunk.py): which weights a call uses is an argument, so that no
module is copied and no weight is owned.

Shapes: hidden state [rows, sequence, hidden]; ids, labels and positions [rows, sequence].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from rpft.model.block_backward import EagerKept, Kept, Weights
from rpft.model.blocks import Block, BlockCall
from rpft.model.device_batch import DeviceBatch
from rpft.model.dropout import mix, placed_dropout
from rpft.model.expert_groups import example_input, kinds_of_parts, template_of
from rpft.model.graphs import KernelKind, Kernels
from rpft.model.head import HeadLoss
from rpft.model.kept import FromForward
from rpft.model.packed_attention import NAME as PACKED
from rpft.model.probe import Probe
from rpft.model.skeleton import Skeleton
from rpft.model.token_chunks import run_mlps_in_parts, tokens_left_whole
from rpft.model.trunk import Trunk, attend_by, placed

_NOTHING = BlockCall((), {})
"""What experts are given beside their input."""


class LayerFunctions:
    """The layers 0 (embedding), 1..L (blocks) and L + 1 (head) of one model as functions, on one device."""

    def __init__(
        self,
        skeleton: Skeleton,
        device: torch.device,
        dtype: torch.dtype,
        kernels: KernelKind = "eager",
        deterministic: bool = False,
        make_kernels: Callable[[KernelKind, torch.device, bool], Kernels] = Kernels,
    ) -> None:
        """``deterministic``: only kernels that give the same bits every time."""
        self.device, self.dtype = device, dtype
        self.num_blocks = skeleton.num_blocks
        self._hidden_size: int = skeleton.model.config.get_text_config().hidden_size
        self._parts = skeleton.parts
        self._prefixes = [f"{skeleton.blocks_path}.{part.block}." for part in self._parts]
        self._kinds = kinds_of_parts(skeleton)
        first_of_kind = [self._parts[self._kinds.index(kind)] for kind in range(max(self._kinds) + 1)]
        self._templates = [placed(template_of(skeleton, part), device) for part in first_of_kind]
        self._tokens_left_whole = min(tokens_left_whole(each, dtype.itemsize) for each in self._templates)
        self._kernels = shared = make_kernels(kernels, device, deterministic)
        self._block_kinds = [
            Block(
                f"block {part.block}{part.mark}",
                template,
                shared,
                {part.own_name(name): packed for name, packed in skeleton.quantized_in(part).items()},
                skeleton.choices[part.block] if part.experts is None else (),
                skeleton.routers[part.block] if part.experts is None and skeleton.router_loss else None,
                skeleton.router_loss,
                self.input_width(1 + self._parts.index(part) + 1),
            )
            for part, template in zip(first_of_kind, self._templates, strict=True)
        ]
        self.balanced = frozenset(
            layer
            for layer, part in enumerate(self._parts, start=1)
            if part.experts is None and skeleton.balanced_at(part.block)
        )
        """Layers with a load-balancing loss of their router: they add to ``router_loss.LOSS`` among the sums."""
        self._trunk = Trunk(skeleton, device, dtype)
        self.head = HeadLoss(self._trunk, shared)
        self._own_names: dict[tuple[int, str], str] = {}
        self.train(True)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden state."""
        return self._hidden_size

    @property
    def head_layer(self) -> int:
        """The number of the last layer."""
        return len(self._parts) + 1

    def input_width(self, layer: int) -> int:
        """Elements a token of what ``layer`` is given by the one below."""
        if layer == self.head_layer:
            return self._hidden_size
        return self._hidden_size + self._parts[layer - 1].extra_elements(self._hidden_size)

    def example_input(self, layer: int, rows: int, sequence: int) -> torch.Tensor:
        """Something that ``layer`` could be given: random hidden states, and an even load of experts."""
        hidden = torch.randn(rows, sequence, self._hidden_size, device=self.device, dtype=self.dtype)
        part = self._parts[layer - 1] if 0 < layer < self.head_layer else None
        return hidden if part is None or part.experts is None else example_input(hidden, part)

    def kind_of(self, layer: int) -> int:
        """A number that layers of the same code and shapes share; embedding and head have their own."""
        return {0: -1, self.head_layer: -2}.get(layer) or self._kinds[layer - 1]

    def expect(self, num_tokens: int, untried: bool = False) -> None:
        """To be called before microbatches of up to ``num_tokens`` come, while the device has room to try MLPs.

        Those that would be large run in parts from then on; see model/token_chunks.py. ``untried``: they are
        taken to treat every token by itself.
        """
        if num_tokens > self._tokens_left_whole:
            self._tokens_left_whole = math.inf
            for template in self._templates:
                run_mlps_in_parts(template, self._hidden_size, self.device, self.dtype, untried)

    def train(self, mode: bool) -> None:
        """Switches dropout on or off in every template."""
        if mode == self._trunk.training:
            return
        self._trunk.train(mode)
        for template in self._templates:
            template.train(mode)

    # -- attention -----------------------------------------------------------------------------------------

    @property
    def attention(self) -> str:
        """What transformers knows the attention of the model by."""
        return self._trunk.attention

    @property
    def takes_row_starts(self) -> bool:
        """Whether packed rows attend by ``DeviceBatch.row_starts``; otherwise they are not read."""
        return self.attention == PACKED

    def attend_by(self, name: str) -> None:
        """Makes all blocks attend by what transformers knows by ``name``."""
        self._trunk.attend_by(name)
        for template in self._templates:
            attend_by(template, name)

    def sample_blocks(self, batch: DeviceBatch) -> list[torch.Tensor]:
        """For each kind of block what it makes of a random hidden state with random weights; the same every time.

        Of a front without the experts.

        float32 [rows, sequence, hidden].
        """
        probe, outputs = Probe(self.device, self.dtype), []
        hidden, calls = probe.normal(*batch.input_ids.shape, self.hidden_size), self.context(batch)
        for kind, (block, template) in enumerate(zip(self._block_kinds, self._templates, strict=True)):
            part = self._parts[self._kinds.index(kind)]
            if part.experts is not None:  # they attend to nothing
                continue
            with torch.no_grad():
                output = block.run(hidden, probe.weights(template), calls[part.block])
            outputs.append(output[..., : self._hidden_size].float())
        return outputs

    def context(self, batch: DeviceBatch) -> list[BlockCall]:
        """For each block the arguments that the model gives it beside the hidden state."""
        return self._trunk.context(batch)

    # -- the layers ----------------------------------------------------------------------------------------

    def forward(
        self, layer: int, hidden: torch.Tensor | None, weights: Weights, batch: DeviceBatch, key: int | None
    ) -> torch.Tensor:
        """The output of layer 0..L, without what a gradient needs.

        ``hidden`` is None for layer 0; ``key`` places the dropout (None: off).
        """
        place = self._place_of(layer, key)
        if layer == 0 and place is None:
            return self._embed_as_graph(weights, batch)
        if layer == 0:
            with placed_dropout(place):
                return self._trunk.embed(weights, batch)
        assert hidden is not None
        block, own, call = self._block(layer, weights, batch)
        return block.forward(hidden, own, call, place)

    def keep(
        self,
        layer: int,
        hidden: torch.Tensor | None,
        weights: Weights,
        batch: DeviceBatch,
        key: int | None,
        trained: frozenset[str],
        with_grad_hidden: bool,
        with_output: bool,
        given: FromForward | None = None,
    ) -> tuple[torch.Tensor | None, Kept]:
        """Layer 0..L for a backward: (its output, what it keeps); see ``Block.keep``.

        ``trained``: names of the weights that get gradients. ``with_grad_hidden``: whether a layer below needs the
        gradient of ``hidden``. ``given``: what its ``forward_keeping`` kept.
        """
        place = self._place_of(layer, key)
        if layer == 0:
            leaves = {n: w.detach().requires_grad_() for n, w in weights.items() if n in trained}
            with torch.enable_grad(), placed_dropout(place):
                output = self._trunk.embed({**weights, **leaves}, batch)
            return output, EagerKept(output, None, leaves)
        assert hidden is not None
        block, own, call = self._block(layer, weights, batch)
        output, kept = block.keep(hidden, own, call, place, with_grad_hidden, with_output, given)
        return output, _Renamed(kept, lambda name: self._own_name(layer, name))

    def forward_keeping(
        self,
        layer: int,
        hidden: torch.Tensor,
        weights: Weights,
        batch: DeviceBatch,
        key: int | None,
        with_grad_hidden: bool,
        budget_bytes: int,
    ) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]:
        """As ``forward`` for a block, with what it keeps for its backward; see ``Block.forward_keeping``."""
        block, own, call = self._block(layer, weights, batch)
        place = self._place_of(layer, key)
        return block.forward_keeping(hidden, own, call, place, with_grad_hidden, budget_bytes)

    def keep_options(
        self, layer: int, hidden: torch.Tensor, weights: Weights, batch: DeviceBatch
    ) -> list[tuple[int, float]]:
        """What keeping more of a block saves; see ``Block.keep_options``."""
        block, own, call = self._block(layer, weights, batch)
        return block.keep_options(hidden, own, call)

    def _block(self, layer: int, weights: Weights, batch: DeviceBatch) -> tuple[Block, Weights, BlockCall]:
        part, block = self._parts[layer - 1], self._block_kinds[self._kinds[layer - 1]]
        own = {self._own_name(layer, name): weight for name, weight in weights.items()}
        return block, own, self.context(batch)[part.block] if part.experts is None else _NOTHING

    def _own_name(self, layer: int, name: str) -> str:
        """What the module that runs ``layer``, a block or a part of one, calls a tensor of it."""
        own = self._own_names.get((layer, name))
        if own is None:
            own = self._parts[layer - 1].own_name(name.removeprefix(self._prefixes[layer - 1]))
            self._own_names[layer, name] = own
        return own

    def _place_of(self, layer: int, key: int | None) -> int | None:
        """Places the dropout of a layer: by its block, however that is cut."""
        return None if key is None else mix(key, self._parts[layer - 1].block + 1 if layer else 0)

    def _embed_as_graph(self, weights: Weights, batch: DeviceBatch) -> torch.Tensor:
        """As the trunk embeds, without all that it makes for its blocks on the way there."""
        others = batch.inputs

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor]:
            ids, *positions = tensors[: len(others)]
            own = dict(zip(weights, tensors[len(others) :], strict=True))
            return (self._trunk.embed(own, DeviceBatch(ids, positions[0] if positions else None, ids, ids)),)

        key = len(others), tuple(weights), self._trunk.training
        tensors = [*others, *weights.values()]
        with torch.no_grad():
            return self._kernels.call("the embedding", key, run, tensors, len(others), compiled=False)[0]

    def logits(self, hidden: torch.Tensor, weights: Weights, batch: DeviceBatch) -> torch.Tensor:
        """Logits [rows, sequence, vocabulary] of the last block's output: for checks on a few tokens."""
        return self._trunk.logits(hidden, weights, batch)


class _Renamed(NamedTuple):
    """What a block keeps, with the sums under the full names of the layer's weights."""

    kept: Kept
    own_name: Callable[[str], str]

    def backward(self, grad: torch.Tensor, sums: Weights) -> torch.Tensor | None:
        """See ``Kept``."""
        return self.kept.backward(grad, {self.own_name(name): total for name, total in sums.items()})
