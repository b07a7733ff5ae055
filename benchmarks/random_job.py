"""Jobs of random weights and random tokens: what ``rpft train`` makes of a recipe, without checkpoint or data."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import torch

from rpft.data.batches import BatchOrder
from rpft.data.dataset import Dataset
from rpft.data.rows import Row
from rpft.engine.device import Device
from rpft.machine import device_names
from rpft.model.adapters import initialise_lora
from rpft.model.checkpoint import Checkpoint
from rpft.model.host_store import HostStore
from rpft.model.quant import PackedWeight, Parts
from rpft.plan.model_shapes import read_shape, shape_names
from rpft.recipe.schema import Recipe
from rpft.train.job import Job
from rpft.train.kernels import KernelChoice
from rpft.train.model_parts import model_parts
from rpft.train.prepare import Prepared
from rpft.train.rows import RunData
from rpft.train.weights import make_store

DTYPE = torch.bfloat16

_MANY_STEPS = 10**6
"""More than are ever run."""

SMALL = {
    # family, vocabulary, hidden, intermediate, blocks, heads, key-value heads, head size, tied
    "llama-45m": ("Llama", 16384, 512, 1536, 8, 8, 4, 64, False),
    "qwen3-80m": ("Qwen3", 16384, 768, 2304, 10, 12, 4, 64, True),
    "tiny": ("Llama", 512, 64, 192, 4, 4, 2, 16, False),
    "tiny-32": ("Llama", 512, 64, 192, 32, 4, 2, 16, False),
}
"""Models that nobody has, for small machines."""

PRESETS = sorted([*SMALL, *shape_names()])


def make_config(preset: str):
    """The transformers config of a preset."""
    import transformers

    if preset not in SMALL:
        config = read_shape(preset)
        config.max_position_embeddings = max(config.max_position_embeddings, 131072)
        return config
    family, vocabulary, hidden, intermediate, blocks, heads, kv_heads, head_size, tied = SMALL[preset]
    return getattr(transformers, f"{family}Config")(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        max_position_embeddings=131072,
        tie_word_embeddings=tied,
    )


def fill_randomly(store: HostStore, device: torch.device) -> None:
    """Normal(0, 0.02) matrices and unit norms, drawn where it is quick; the same in every process.

    Quantised weights of one shape are all the same draw, since to quantise each of a large model takes minutes.
    """
    generator = torch.Generator(device).manual_seed(0)
    quantised: dict[PackedWeight, Parts] = {}
    for layer in store.layers:
        for name, packed in layer.layout.packed.items():
            matrix = replace(packed, shape=packed.shape[-2:])
            if matrix not in quantised:
                drawn = torch.empty(matrix.shape, device=device).normal_(0, 0.02, generator=generator)
                quantised[matrix] = {p: torch.empty(s, dtype=d) for p, (s, d) in matrix.part_shapes().items()}
                matrix.quantize_into(drawn.cpu(), quantised[matrix])
            for part, target in store.parts(name).items():
                target.copy_(quantised[matrix][part].expand_as(target))
    parts = {part for layer in store.layers for part in layer.layout.parts}
    for name in (name for name in store.names() if name not in parts):
        target = store.tensor(name)
        if target.dim() < 2:
            store.write(name, torch.ones_like(target))
        else:
            drawn = torch.empty(target.shape, device=device, dtype=target.dtype)
            store.write(name, drawn.normal_(0, 0.02, generator=generator))


@dataclass(frozen=True)
class Step:
    """The shape of a step, and how many are timed."""

    rows: int
    sequence: int
    microbatches: int
    timed: int

    @property
    def size(self) -> int:
        """Rows of a microbatch."""
        return self.rows // self.microbatches

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence


def make_recipe(arguments: argparse.Namespace, step: Step, update: str, workers: int, link: float) -> Recipe:
    """The recipe of a run; ``arguments``: those of ``throughput.add_model_arguments``. 0 ``workers``: all."""
    rank = arguments.lora
    targets = arguments.targets if arguments.targets == "all-linear" else arguments.targets.split(",")
    return Recipe.model_validate(
        {
            "model": {"path": arguments.preset, "dtype": "bfloat16", "quantize": arguments.quantize},
            "data": {"train": ["random tokens"], "max_seq_len": step.sequence},
            "adapter": {"r": rank, "alpha": 2 * rank, "target_modules": targets} if rank else None,
            "train": {
                "learning_rate": 1e-5,
                "lr_scheduler": "constant",
                "warmup_ratio": 0.0,
                "micro_batch_size": step.size,
                "gradient_accumulation_steps": step.microbatches,
                "max_steps": _MANY_STEPS,
                "seed": 0,
            },
            "optimizer": {"update": update, "state": arguments.state},
            "engine": {
                "device": arguments.device,
                "workers": workers or None,
                "num_microbatches": step.microbatches,
                "recompute": arguments.recompute,
                "kernels": arguments.kernels,
                "vram_limit": int(arguments.vram_limit * 2**30),
                "ram_limit": None if arguments.ram_limit is None else int(arguments.ram_limit * 2**30),
                "deterministic": arguments.deterministic,
                "emulate_link_gbps": float(link) or None,
            },
            "checkpoint": {"keep_last": 1, "every_steps": getattr(arguments, "every", None)},
            "output_dir": str(getattr(arguments, "folder", None) or Path(gettempdir()) / "rpft-benchmark"),
        }
    )


def random_data(step: Step, vocabulary: int) -> RunData:
    """Rows for two steps, again and again; all but the first token of a row is trained."""
    drawn = np.random.default_rng(0).integers(0, vocabulary, (2 * step.rows, step.sequence), np.int32)
    trained = np.arange(step.sequence) > 0
    rows = [Row(ids, trained) for ids in drawn]
    items = [(number,) for number in range(len(rows))]
    order = BatchOrder(len(items), step.rows, 0, 1, _MANY_STEPS)
    return RunData(None, Dataset(rows, []), None, items, order, step.size, 0, [step.sequence], True, [])


def make_job(recipe: Recipe, step: Step, model: dict[str, Any] | None = None) -> Job:
    """The job of ``recipe``. ``model``: ``model_of`` another job of the same model, else it is built."""
    config = make_config(recipe.model.path)
    # Of no files: neither a config nor a weight is read from it.
    checkpoint = Checkpoint(Path(recipe.output_dir), weights=False)
    kernels = recipe.engine.kernels
    assert kernels != "auto"
    return Job(
        recipe=recipe,
        checkpoint=checkpoint,
        config=config,
        kernels=KernelChoice(kernels),
        data=random_data(step, config.vocab_size),
        given=None,
        num_microbatches=step.microbatches,
        gradient_dtype=DTYPE,
        open_rows=False,
        **(model or model_parts(recipe, config, checkpoint)),
    )


def model_of(job: Job) -> dict[str, Any]:
    """The parts of ``job`` that its model and adapter decide."""
    return {name: getattr(job, name) for name in ("skeleton", "peft_model", "layouts", "dtype")}


def random_store(prepared: Prepared) -> HostStore:
    """The host store of ``prepared``, filled with random weights."""
    store = make_store(prepared)
    fill_randomly(store, prepared.devices[0].torch_device)
    if prepared.peft_model is not None:
        initialise_lora(prepared.skeleton, store, 0)
    return store


def gpu_names(devices: list[Device]) -> list[str]:
    """What each worker runs on."""
    return device_names([device.torch_device for device in devices])
