"""Weights as they are once quantised, and checkpoints that hold them so, as bitsandbytes writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rpft.engine.cpu import CpuDevice
from rpft.model.adapters import LoraSettings, inject_lora
from rpft.model.checkpoint import Checkpoint
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.model.load import load_checkpoint
from rpft.model.quant import BLOCK, PackedWeight, QuantKind
from rpft.model.quant_choice import quantize_base
from rpft.model.quant_weight import open_weights
from support.models import skeleton_of


def as_dequantised(model: Any, kind: QuantKind) -> None:
    """Gives the blocks' matrices the values that they have once they were quantised."""
    for module in model.model.layers.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not (isinstance(module, nn.Linear) and name == "weight") and parameter.dim() != 3:
                continue
            packed = PackedWeight(kind, tuple(parameter.shape), parameter.dtype)
            parts = {s: torch.zeros(shape, dtype=dtype) for s, (shape, dtype) in packed.part_shapes().items()}
            packed.quantize_into(parameter.data, parts)
            weights, _ = open_weights({f"w{suffix}": part for suffix, part in parts.items()}, {"w": packed})
            parameter.data = weights["w"].dequantized()  # type: ignore[attr-defined]


def quantised_store(
    folder: Path, kind: QuantKind, dtype: torch.dtype = torch.float32, nested: bool = True
) -> HostStore:
    """The store of the checkpoint in ``folder`` with a base of ``kind``."""
    skeleton, checkpoint = skeleton_of(folder, dtype), Checkpoint(folder)
    inject_lora(skeleton, LoraSettings(4, 8.0, 0.0, ["q_proj", "k_proj", "v_proj", "o_proj"]), str(folder))
    stored = checkpoint.stored.weights or None
    quantize_base(skeleton, kind, dtype, only=stored, nested=checkpoint.stored.nested if stored else nested)
    store = HostStore(build_layers(skeleton, dtype), CpuDevice(0).allocate_host)
    load_checkpoint(checkpoint, skeleton, store)
    return store


def write_quantised(folder: Path, target: Path, nested: bool, skip: str = "nothing") -> HostStore:
    """Writes ``folder`` as bitsandbytes does, with weights of names that hold ``skip`` left as they are."""
    shutil.copytree(folder, target)
    store = quantised_store(folder, "nf4", nested=nested)
    tensors = load_file(folder / "model.safetensors")
    for layer in store.layers:
        for name, packed in layer.layout.packed.items():
            plain_name = name.replace(".base_layer", "")
            if skip in plain_name:
                continue
            parts = store.parts(name)
            state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "float32", "shape": list(packed.shape)}
            if nested:
                offset = float(parts[".nested_offset"])
                state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors[plain_name] = parts[""].clone().view(-1, 1)
            kept = set(parts) - {"", ".nested_offset"}
            tensors |= {plain_name + suffix: parts[suffix].clone() for suffix in kept}
            text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
            tensors[f"{plain_name}.quant_state.bitsandbytes__nf4"] = text
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
    }
    (target / "config.json").write_text(json.dumps(config))
    return store
