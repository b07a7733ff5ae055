"""Quantised weights as they lie in checkpoints that bitsandbytes has written: names, parts, what describes them.

Beside NAME, uint8 with two elements a byte, such a file has NAME.absmax, NAME.quant_map, with double quantisation
NAME.nested_absmax and NAME.nested_quant_map, and NAME.quant_state.bitsandbytes__nf4: JSON as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rpft.errors import UserError
from rpft.model.float_files import is_read
from rpft.model.quant import BLOCK, NESTED_BLOCK, PackedWeight, Parts
from rpft.model.quant_weight import open_weights

_STATE = ".quant_state.bitsandbytes__"
_SUFFIXES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")

ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class StoredWeights:
    """The quantised weights of a checkpoint, by name, and which of its tensors are only parts of them."""

    weights: frozenset[str]
    parts: frozenset[str]

    @property
    def nested(self) -> bool:
        """Whether their largest values are themselves quantised."""
        return any(part.endswith(".nested_absmax") for part in self.parts)


def find_stored(names: Iterable[str]) -> StoredWeights:
    """What of ``names`` is a weight quantised by bitsandbytes to 4 bits."""
    every = frozenset(names)
    weights = frozenset(name.partition(_STATE)[0] for name in every if _STATE in name)
    parts = {name for name in every if _STATE in name}
    parts |= {weight + suffix for weight in weights for suffix in _SUFFIXES} & every
    return StoredWeights(weights, frozenset(parts))


def check_config(settings: Any, where: str) -> None:
    """UserError where ``quantization_config`` of a checkpoint is of a kind that is not read."""
    values = settings if isinstance(settings, dict) else settings.to_dict()
    if is_read(values):
        return
    method, kind = values.get("quant_method"), values.get("bnb_4bit_quant_type", "fp4")
    if method != "bitsandbytes" or not values.get("load_in_4bit"):
        raise UserError(
            f"{where}: the checkpoint is quantised ({method or 'in some way'}); of quantised ones those in nf4 by"
            " bitsandbytes, in FP8 with factors for blocks and in MXFP4 are read. Give one of these, or one in"
            " bfloat16 or float32, which model.quantize can quantise"
        )
    if kind != "nf4":
        raise UserError(f"{where}: the checkpoint is quantised to {kind}; of 4 bits nf4 is read")


def read_parts(name: str, packed: PackedWeight, read: ReadTensor, names: Iterable[str], where: str) -> Parts:
    """The parts of ``name`` as ``packed`` asks for them; UserError where the file's are others."""
    state = _read_state(name, read, names, where)
    nested = "nested_blocksize" in state
    told = (tuple(state["shape"]), state["blocksize"], nested, state.get("nested_blocksize", NESTED_BLOCK))
    if told != (packed.shape, BLOCK, packed.nested, NESTED_BLOCK):
        raise UserError(
            f"{where}: {name} is {list(told[0])} in blocks of {told[1]}{', nested' if nested else ''}; the model"
            f" asks for {list(packed.shape)} in blocks of {BLOCK}{', nested' if packed.nested else ''}"
        )
    parts = {"": read(name).view(torch.uint8).flatten()}
    parts |= {suffix: read(name + suffix) for suffix in _SUFFIXES if suffix in packed.part_shapes()}
    if nested:
        parts[".nested_offset"] = torch.tensor([float(state["nested_offset"])])
    return parts


def read_dequantized(name: str, read: ReadTensor, names: Iterable[str], where: str) -> torch.Tensor:
    """The weight ``name`` in float32."""
    state = _read_state(name, read, names, where)
    packed = PackedWeight("nf4", tuple(state["shape"]), torch.float32, "nested_blocksize" in state)
    parts = read_parts(name, packed, read, names, where)
    weights, _ = open_weights({name + suffix: part for suffix, part in parts.items()}, {name: packed})
    return weights[name].dequantized()  # type: ignore[attr-defined]


def _read_state(name: str, read: ReadTensor, names: Iterable[str], where: str) -> dict[str, Any]:
    key = next(each for each in (name + _STATE + "nf4", name + _STATE + "fp4") if each in names)
    try:
        state = json.loads(bytes(read(key).tolist()))
        kind, _, _ = (state[key] for key in ("quant_type", "shape", "blocksize"))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: {key} does not describe a quantised weight ({error})") from error
    if kind != "nf4":
        raise UserError(f"{where}: {name} is quantised to {kind}; of 4 bits nf4 is read")
    return state
