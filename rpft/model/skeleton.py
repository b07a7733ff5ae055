"""A model without its weights, as layers; and the stubs that stand for its modules while its own code runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from rpft.model.parts import Part, Stack, parts_of
from rpft.model.quant import PackedWeight
from rpft.model.router_loss import Router
from rpft.model.routing import Choices


class StopForward(Exception):
    """Ends a forward pass of the model early, carrying what was wanted from it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class BlockStub(nn.Module):
    """Stands in the place of block ``index``: records what the model passes to it and hands the hidden state on.

    ``action`` decides what comes back: it gets (index, hidden, args, kwargs) and returns the next hidden state.
    """

    def __init__(self, index: int, shell: ShellState, attributes: dict[str, Any]) -> None:
        super().__init__()
        self.index = index
        self.shell = shell
        for name, value in attributes.items():  # families read e.g. `layer.attention_type` from outside
            if not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        out = self.shell.action(self.index, hidden, args, kwargs)
        return (out,) if self.shell.returns_tuple else out


class EmbeddingStub(nn.Module):
    """Stands in the place of a module with parameters outside the blocks; yields zeros of the right shape.

    ``calls``, where given, collects the names of the stubs in the order in which they are called; the zeros
    then require a gradient, so that what the model makes of them can be told from the rest.
    """

    def __init__(self, name: str, module: nn.Module, dtype: torch.dtype, calls: list[str] | None = None) -> None:
        super().__init__()
        self.name, self.calls, self.dtype = name, calls, dtype
        self.is_embedding = hasattr(module, "embedding_dim")
        self.out_features = getattr(module, "embedding_dim", None) or getattr(module, "out_features", None)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.calls is not None:
            self.calls.append(self.name)
        if self.out_features is None:
            return x
        looks_up = self.is_embedding or not x.is_floating_point()  # an adapter's wrapper is no embedding itself
        leading = x.shape if looks_up else x.shape[:-1]
        dtype = self.dtype if looks_up else x.dtype
        zero = torch.zeros(1, dtype=dtype, device=x.device, requires_grad=self.calls is not None)
        return zero.expand(*leading, self.out_features)


class ShellState:
    """What the block stubs of one shell share: the current action, and whether blocks return tuples."""

    def __init__(self, returns_tuple: bool = False) -> None:
        self.returns_tuple = returns_tuple
        self.action: Any = None


class BlockInput(NamedTuple):
    """What the model gives a block: for some rows of PROBE_TOKENS tokens, of no meaning."""

    hidden: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Skeleton:
    """A causal language model on the meta device and the way it is cut into layers."""

    model: Any
    """The transformers model: parameters on meta, buffers real."""
    blocks_path: str
    """Dotted path of the ModuleList of blocks, from the model."""
    returns_tuple: bool
    embedding_modules: tuple[str, ...]
    """Modules with parameters that run before the first block, by full name."""
    head_modules: tuple[str, ...]
    checkpoint_names: dict[int, str] = field(default_factory=dict)
    """id of a parameter or buffer -> its name in the model's own state dict, before adapters."""
    state_names: tuple[str, ...] = ()
    """All names of that state dict, tied ones included."""
    quantized: dict[str, PackedWeight] = field(default_factory=dict)
    """Frozen weights of the blocks that are stored in fewer bits, by full name."""
    choices: tuple[Choices, ...] = ()
    """For each block what its routers pick."""
    routers: tuple[Router | None, ...] = ()
    """For each block its router, where it is known."""
    router_loss: float = 0.0
    """Coefficient of the load-balancing loss of routers; 0: none."""
    inputs: tuple[BlockInput, ...] = ()
    """What each block was given when the model was cut into layers."""
    stacks: tuple[Stack | None, ...] = ()
    """For each block its experts, where they are layers of their own, in ``num_groups`` groups."""
    num_groups: int = 1

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.get_submodule(self.blocks_path)

    @property
    def trunk_path(self) -> str:
        """Dotted path of the module that holds the blocks: embedding to final norm, without the head."""
        return self.blocks_path.rpartition(".")[0]

    @property
    def trunk(self) -> nn.Module:
        return self.model.get_submodule(self.trunk_path)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def parts(self) -> list[Part]:
        """What each layer between embedding and head is of the blocks."""
        return parts_of(self.stacks or [None] * self.num_blocks, self.num_groups)

    def balanced_at(self, block: int) -> bool:
        """Whether the router of ``block`` has a load-balancing loss."""
        return bool(self.router_loss) and bool(self.routers) and self.routers[block] is not None

    def quantized_in(self, part: Part) -> dict[str, PackedWeight]:
        """The quantised weights of a part of a block, by their names in the block."""
        prefix, found = f"{self.blocks_path}.{part.block}.", {}
        for full, packed in self.quantized.items():
            name = full.removeprefix(prefix)
            if full.startswith(prefix) and part.holds(name):
                found[name] = packed if part.experts is None else packed.of_experts(part.experts)
        return found


def replace_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Puts ``module`` at dotted ``path`` under ``root``."""
    parent, _, leaf = path.rpartition(".")
    setattr(root.get_submodule(parent), leaf, module)


def stub_blocks(model: nn.Module, blocks_path: str, state: ShellState) -> None:
    """Replaces every block of ``model`` by a stub that shares ``state``."""
    blocks = model.get_submodule(blocks_path)
    assert isinstance(blocks, nn.ModuleList)
    stubs = [BlockStub(i, state, _plain_attributes(block)) for i, block in enumerate(blocks)]
    replace_module(model, blocks_path, nn.ModuleList(stubs))


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name != "training"
        and isinstance(value, int | float | str | bool | type(None))
    }


def persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Named buffers that a state dict holds."""
    kept = set(module.state_dict(keep_vars=True))
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]


def structure(module: nn.Module) -> tuple:
    """What makes two blocks run the same function: classes, plain settings, shapes and values of buffers.

    ``layer_idx`` only addresses a key-value cache, which training does not have, and is left out.
    """
    settings = tuple(sorted((k, str(v)) for k, v in _plain_attributes(module).items() if k != "layer_idx"))
    parameters = tuple((n, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters(recurse=False))
    persistent = {name for name, _ in persistent_buffers(module)}
    buffers = tuple(
        (n, tuple(b.shape), None if n in persistent else tuple(b.flatten().tolist()))
        for n, b in module.named_buffers(recurse=False)
    )
    children = tuple((n, structure(child)) for n, child in module.named_children())
    return (type(module).__qualname__, settings, parameters, buffers, children)


def kinds_of_blocks(skeleton: Skeleton) -> list[int]:
    """For each block the number of its kind; blocks of one kind share a template on every worker."""
    known: dict[tuple, int] = {}
    quantized = [tuple(skeleton.quantized_in(Part(i)).items()) for i in range(skeleton.num_blocks)]
    keys = [(structure(block), packed) for block, packed in zip(skeleton.blocks, quantized, strict=True)]
    return [known.setdefault(key, len(known)) for key in keys]


def has_dropout(model: nn.Module) -> bool:
    """Whether any part of the model draws dropout in training."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return True
        for name, value in _plain_attributes(module).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return True
    return False
