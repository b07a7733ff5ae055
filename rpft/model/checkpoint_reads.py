"""What has to be read of a checkpoint for which tensor of the model.

Names that changed between the file and the model, and tensors that the model stacks or fuses, are converted by the
mapping of transformers; where experts lie one by one, each is a read of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch

from rpft.errors import UserError
from rpft.model.checkpoint import Checkpoint
from rpft.model.quant import PackedWeight, Parts
from rpft.model.skeleton import Skeleton


class Expert(NamedTuple):
    """One of the weights that are stacked in a tensor."""

    number: int
    value: torch.Tensor


ReadTensors = Callable[[], Mapping[str, torch.Tensor | Parts | Expert]]
"""Gives tensors by name, one expert of a stack, or the parts of one that stays quantised as it is."""


def plan_reads(
    checkpoint: Checkpoint, skeleton: Skeleton, packed: dict[str, PackedWeight]
) -> tuple[dict[str, ReadTensors], set[str]]:
    """(first target of a read -> what reads it, names in the file that the model has no place for).

    ``packed``: the targets that are stored quantised.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    model = skeleton.model
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known: dict[str, Any] = dict.fromkeys(skeleton.state_names, True)

    def read_expert(target: str, key: str, number: int) -> dict[str, Expert]:
        return {target: Expert(number, checkpoint.read_expert(key, number))}

    converted: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    reads: dict[str, ReadTensors] = {}
    unexpected: set[str] = set()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for key in checkpoint.names():
        prefix = model.base_model_prefix
        target, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if target not in known and key in known:
            target, pattern = key, None
        if target not in known:
            ignored = model._keys_to_ignore_on_load_unexpected or []
            if not any(re.search(p, key) for p in ignored) and not key.endswith("rotary_emb.inv_freq"):
                unexpected.add(key)
        elif pattern is None and key in checkpoint.stored.weights and _is_nf4(packed.get(target)):
            reads[target] = lambda key=key, target=target: {target: checkpoint.read_parts(key, packed[target])}
        elif pattern is None and key in checkpoint.floats.mxfp4:
            count, wanted = checkpoint.num_experts(key), shapes[target][0]
            if count != wanted:
                raise UserError(f"{checkpoint.folder}: {key} has {count} experts, the config asks for {wanted}")
            for number in range(count):
                reads[f"{target}[{number}]"] = partial(read_expert, target, key, number)
        elif pattern is None:
            reads[target] = lambda key=key, target=target: {target: checkpoint.read(key)}
        else:
            fresh: tuple[Any, list[tuple[str, str]]] = (deepcopy(by_pattern[pattern]), [])
            converted.setdefault(target, fresh)[1].append((key, pattern))

    def convert(target: str, converter: Any, parts: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
        for key, pattern in parts:
            converter.add_tensor(target, key, pattern, lambda key=key: checkpoint.read(key))
        try:
            made = converter.convert(target, model=model, config=model.config)
        except (RuntimeError, ValueError, IndexError) as error:
            raise UserError(
                f"{checkpoint.folder}: {target} cannot be made of its {len(parts)} tensor(s) in the checkpoint,"
                f" {parts[0][0]} ...: {str(error).splitlines()[0]}"
            ) from error
        if isinstance(made, tuple):  # transformers 5.0 gives (tensors, errors)
            made = made[0]
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def convert_expert(
        target: str, number: int, converter: Any, parts: list[tuple[str, str]]
    ) -> dict[str, Expert]:
        (made,) = convert(target, converter, parts).values()
        return {target: Expert(number, made[0])}

    for target, (converter, parts) in converted.items():
        parts.sort(key=lambda part: _natural(part[0]))
        experts = _experts_apart(converter, parts, shapes.get(target))
        for number, some in enumerate(experts):
            reads[f"{target}[{number}]"] = partial(convert_expert, target, number, deepcopy(converter), some)
        if not experts:
            reads[target] = partial(convert, target, converter, parts)
    return reads, unexpected


def _experts_apart(
    converter: Any, parts: list[tuple[str, str]], shape: torch.Size | None
) -> list[list[tuple[str, str]]]:
    """Of the (key, pattern) that make a tensor of ``shape``, those of each expert; none if it is no plain stack.

    A converter that stacks and then does nothing across experts makes a stack of one of the parts of one.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    by_pattern: dict[str, list[tuple[str, str]]] = {}
    for part in parts:
        by_pattern.setdefault(part[1], []).append(part)
    first, *others = converter.operations
    counts = {len(keys) for keys in by_pattern.values()}
    if shape is None or not isinstance(first, MergeModulelist) or first.dim != 0 or counts != {shape[0]}:
        return []
    if not all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others):
        return []
    return [list(some) for some in zip(*by_pattern.values(), strict=True)]


def _is_nf4(packed: PackedWeight | None) -> bool:
    return packed is not None and packed.kind == "nf4"


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key under which expert 10 follows expert 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
