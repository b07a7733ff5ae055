"""The model without its weights: built from the config, cut into embedding, blocks and head by watching it run.

Nothing here knows a model family by name. A recording stub stands in the place of each block; the model's
own code before the first block is the first layer and its own code after the last block is the last layer.
Which parameters belong to which end is seen from the order in which their modules are called.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from rpft.errors import UserError
from rpft.model.parts import Part, Stack, parts_of
from rpft.model.quant import PackedWeight
from rpft.model.refuse import refuse_encoder, refuse_settings, refuse_side_inputs
from rpft.model.router_loss import Router, find_router
from rpft.model.routing import PROBE_TOKENS, Choices, find_choices

logger = logging.getLogger(__name__)


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


def build_model(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """The model of ``config`` with its parameters on meta and its buffers real, in training mode.

    ``attention``: sdpa, eager, or auto (sdpa where the family has it). Raises UserError for a family that
    is not a causal language model, lacks the attention asked for, or draws noise that is no dropout.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    refuse_settings(config)
    config.use_cache = False
    config.return_dict = True
    text_config = config.get_text_config()
    for extra in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if getattr(text_config, extra, False):
            logger.warning("%s = true in config.json is not followed: the loss is cross-entropy alone", extra)
            setattr(text_config, extra, False)
    if getattr(text_config, "attn_logit_softcapping", None):
        if attention == "sdpa":  # some versions of transformers take it and leave the soft-capping out
            raise UserError(
                f"model {config.model_type!r} caps its attention scores, which model.attention=sdpa cannot;"
                " use eager or auto"
            )
        attention = "eager"
    kwargs = {} if attention == "auto" else {"attn_implementation": attention}
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
    except ValueError as error:
        raise UserError(
            f"model {config.model_type!r} cannot be built for causal language modelling"
            f" with model.attention={attention}: {str(error).splitlines()[0]}"
        ) from error
    if attention == "auto" and model.config._attn_implementation not in ("sdpa", "eager"):
        return build_model(config, dtype, "sdpa")
    model.tie_weights()
    return model.train()


def find_blocks(model: Any) -> str:
    """The dotted path of the one ModuleList that holds the decoder blocks, or UserError by name."""
    config = model.config.get_text_config()
    wanted = getattr(config, "num_hidden_layers", None)
    name = type(model).__name__
    lists = [path for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == wanted]
    lists = [p for p in lists if not any(p.startswith(q + ".") for q in lists)]
    if getattr(config, "is_encoder_decoder", False) or len(lists) != 1:
        raise UserError(
            f"{name} is not supported: rpft needs a decoder-only model whose {wanted} blocks stand in one"
            f" ModuleList, and found {lists or 'none'}"
        )
    return lists[0]


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


def outer_modules(model: nn.Module, blocks_path: str) -> list[str]:
    """Names of the modules outside the blocks that own parameters themselves."""
    return [
        name
        for name, module in model.named_modules()
        if not (name + ".").startswith(blocks_path + ".")
        and any(True for _ in module.named_parameters(recurse=False))
    ]


def cut(model: Any) -> Skeleton:
    """Finds where ``model`` divides into embedding, blocks and head; UserError by name where it does not.

    One pass over a shell of the model, every parameter-owning module outside the blocks replaced by a stub of
    zeros, so that no weight is needed and no product computed.
    """
    import copy

    name = type(model).__name__
    blocks_path = find_blocks(model)
    outer = outer_modules(model, blocks_path)
    for path in outer:
        if any(True for _ in model.get_submodule(path).children()):
            raise UserError(f"{name} is not supported: {path or 'the model'} owns parameters beside its children")
    blocks = model.get_submodule(blocks_path)
    refuse_encoder(model, blocks)
    count = len(blocks)
    errors: list[str] = []
    for returns_tuple in (False, True):
        shell, state, calls = copy.deepcopy(model), ShellState(returns_tuple), []
        stub_blocks(shell, blocks_path, state)
        for path in outer:
            replace_module(shell, path, EmbeddingStub(path, model.get_submodule(path), torch.float32, calls))
        seen: list[tuple[torch.Tensor, Any, Any]] = []

        def action(index: int, hidden: Any, args: Any, kwargs: Any, seen: Any = seen, calls: Any = calls) -> Any:
            if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or index != len(seen):
                raise ValueError(f"block {index} was called as number {len(seen)}, or without a hidden state")
            refuse_side_inputs(model, args, kwargs)
            seen.append((hidden, args, kwargs))
            calls.append("<block>")
            return hidden

        state.action = action
        try:
            with torch.enable_grad():
                shell(input_ids=torch.zeros(2, PROBE_TOKENS, dtype=torch.long), use_cache=False)
        except UserError:
            raise
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        if len(seen) == count and len({hidden.shape for hidden, _, _ in seen}) == 1:
            break
    else:
        raise UserError(
            f"{name} is not supported: its blocks are not called once each, in order, with one hidden state"
            + (f" ({errors[0]})" if errors else "")
        )

    first, last = calls.index("<block>"), len(calls) - 1 - calls[::-1].index("<block>")
    before = tuple(dict.fromkeys(calls[:first]))
    after = tuple(dict.fromkeys(calls[last + 1 :]))
    between = [c for c in calls[first:last] if c != "<block>"]
    unused = [path for path in outer if path not in before and path not in after]
    for problem, paths in (("run between its blocks", between), ("never run", unused)):
        if paths:
            raise UserError(f"{name} is not supported: modules with parameters {problem}: {', '.join(paths)}")
    skeleton = Skeleton(model, blocks_path, returns_tuple, before, after, state_names=tuple(model.state_dict()))
    skeleton.inputs = tuple(BlockInput(hidden.detach(), args, kwargs) for hidden, args, kwargs in seen)
    skeleton.choices = _choices(skeleton)
    found = zip(blocks, skeleton.choices, strict=True)  # type: ignore[call-overload]
    skeleton.routers = tuple(find_router(model, block) if picks else None for block, picks in found)
    tensors = [*model.named_parameters(remove_duplicate=False), *persistent_buffers(model)]
    for tensor_name, tensor in tensors:
        skeleton.checkpoint_names.setdefault(id(tensor), tensor_name)
    return skeleton


def _choices(skeleton: Skeleton) -> tuple[Choices, ...]:
    """For each block what its routers pick."""
    kinds, known = kinds_of_blocks(skeleton), dict[int, Choices]()
    for kind, block, given in zip(kinds, skeleton.blocks, skeleton.inputs, strict=True):
        if kind not in known:
            known[kind] = find_choices(block, *given)
            if not known[kind] and any(p.dim() == 3 and min(p.shape[:2]) > 1 for p in block.parameters()):
                logger.warning(
                    "%s: how a block chooses its experts was not seen; a recompute that rounds otherwise may"
                    " choose others",
                    type(skeleton.model).__name__,
                )
    return tuple(known[kind] for kind in kinds)


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
