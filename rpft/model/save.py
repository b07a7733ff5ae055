"""Writes what a run has made as a folder that transformers or peft load, tensor by tensor from the host store."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rpft import files
from rpft.model.adapters import save_lora
from rpft.model.host_store import HostStore
from rpft.model.skeleton import Skeleton
from rpft.model.whole_tensors import WholeTensors

SHARD_BYTES = 2 << 30
"""A shard is held in memory once more while it is written."""

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust, safetensors and tokenizers among them, end the message of a system call that failed."""


def save_model(
    skeleton: Skeleton, store: HostStore, config: Any, folder: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes config.json and the weights, in the working dtype and the family's usual names, into ``folder``.

    ``config`` is the checkpoint's, as read; its generation_config.json is copied as it is. A tied weight is
    written once, under its first name, as transformers does.
    """
    write_config(config, skeleton.model.dtype, folder)
    generation = Path(config.name_or_path) / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, folder / generation.name)
    write_layers(skeleton, _layers_of(store), folder, shard_bytes)


def write_config(config: Any, dtype: torch.dtype, folder: Path) -> None:
    """Writes ``config`` as that of weights in ``dtype``."""
    config = copy.deepcopy(config)
    config.dtype = dtype
    config.save_pretrained(folder)


def write_shards(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, shard_bytes: int) -> None:
    """Writes ``tensors``, by name, as safetensors files of at most ``shard_bytes``, or one tensor, with an index.

    A single file has no index. One shard of them is held at a time.
    """
    shards: list[tuple[Path, list[str]]] = []
    total = 0
    for held in _shards(tensors, shard_bytes):
        path = folder / f"model-{len(shards) + 1:05d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, path, {"format": "pt"})
        total += sum(t.numel() * t.element_size() for t in held.values())
        shards.append((path, list(held)))
    if len(shards) == 1:
        shards[0][0].rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, (path, names) in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def write_layers(
    skeleton: Skeleton, layers: Iterable[dict[str, torch.Tensor]], folder: Path, shard_bytes: int
) -> None:
    """Writes ``layers`` into ``folder``, as ``write_shards`` does, under the names that the family's files have.

    Each layer is given by its tensors' names in the plain model.
    """
    from transformers.core_model_loading import revert_weight_conversion

    named = (pair for own in layers for pair in revert_weight_conversion(skeleton.model, own).items())
    write_shards(named, folder, shard_bytes)


def _layers_of(store: HostStore) -> Iterator[dict[str, torch.Tensor]]:
    """Of embedding, each block and head what a checkpoint has; of a block in parts its stacks are copies."""
    wholes = WholeTensors(store)
    for _, layers in groupby((layer.layout for layer in store.layers), lambda layout: layout.number):
        specs = [spec for layout in layers for spec, _ in layout.own.values()]
        names = {spec.checkpoint_name: spec.whole_name for spec in specs if spec.checkpoint_name is not None}
        yield {name: wholes[whole] for name, whole in names.items()}


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += num_bytes
    yield shard


def save_result(
    folder: Path, skeleton: Skeleton, store: HostStore, config: Any, tokenizer: Any, peft_model: Any | None
) -> None:
    """Writes the trained model (with ``peft_model``: the adapter) and the tokenizer; replaces ``folder`` whole."""
    with written_whole(folder) as fresh:
        if peft_model is None:
            save_model(skeleton, store, config, fresh)
        else:
            save_lora(peft_model, store, fresh)
        tokenizer.save_pretrained(fresh)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of ``folder`` when all went well.

    What stood there is whole until the new one is; of one that fails nothing is left. OSError where the disk is
    the reason, also of writers that have errors of their own.
    """
    fresh = folder.with_name(folder.name + ".partial")
    files.remove_tree(fresh)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        _replace(fresh, folder)
    except BaseException as error:
        files.remove_tree(fresh)
        number = _SYSTEM_ERROR.search(str(error))
        if isinstance(error, OSError) or number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


def _replace(fresh: Path, folder: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for path in fresh.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)  # safetensors makes its files readable by their owner only
            files.sync(path)
    old = folder.with_name(folder.name + ".old")
    files.remove_tree(old)
    if folder.exists():
        files.rename(folder, old)
    files.sync(fresh)
    files.rename(fresh, folder)
    files.remove_tree(old)
