"""A Hugging Face checkpoint: its folder here or on the hub, its config, and its tensors as the files hold them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rpft.errors import UserError
from rpft.model.float_files import (
    BLOCKS,
    SCALES,
    dequantize_fp8,
    dequantize_mxfp4,
    find_float_weights,
    scale_of,
)
from rpft.model.quant import PackedWeight, Parts
from rpft.model.quant_files import check_config, find_stored, read_dequantized, read_parts

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HUB_WEIGHTS = "*.safetensors"
_HUB_FILES = ["*.json", _HUB_WEIGHTS, "*.jinja", "*.txt", "*.model", "tokenizer*"]


def _refuse_no_model(path: str) -> None:
    """UserError where ``path`` is neither a folder nor could be a hub id."""
    if Path(path).is_dir():
        return
    if Path(path).is_file():
        raise UserError(f"model.path {path!r}: that is a file; the folder that it is in may be the checkpoint")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"model.path {path!r}: no such folder, and not a hub id of the form owner/name")


def resolve_checkpoint(path: str, revision: str | None, weights: bool = True) -> Path:
    """The local folder of a checkpoint: ``path`` itself, or the hub's snapshot, with or without weights."""
    _refuse_no_model(path)
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = [pattern for pattern in _HUB_FILES if weights or pattern != _HUB_WEIGHTS]
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UserError(
            f"model.path {path!r}: no such folder here, and the hub did not give it"
            f" ({type(error).__name__}: {str(error).splitlines()[0]}). Check the name, the network, and for a"
            " gated model your access token; or download it and give the folder."
        ) from error


def read_config(folder: Path) -> Any:
    """The model's config; UserError for a folder without one, or quantised in a way that is not read."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise UserError(f"model.path {folder}: no config.json in it; a Hugging Face checkpoint folder is needed")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / 'config.json'}: {str(error).splitlines()[0]}") from error
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        check_config(settings, f"model.path {folder}")
        # The model is built as if it were not quantised: how weights are kept is the store's business.
        delattr(config, "quantization_config")
    return config


class Checkpoint:
    """The safetensors files of a folder. Everything that can be missing is checked when it is opened."""

    def __init__(self, folder: Path, weights: bool = True) -> None:
        """``weights``: whether some will be read; else there may be none."""
        self.folder = folder
        self._file_of = self._read_index() if weights or any(folder.glob(_HUB_WEIGHTS)) else {}
        self._open = threading.local()
        self.stored = find_stored(self._file_of)
        """What of it is quantised by bitsandbytes."""
        self.floats = find_float_weights(self._file_of)
        """What of it is in FP8 or MXFP4."""

    def _read_index(self) -> dict[str, Path]:
        index, single = self.folder / _INDEX, self.folder / _SINGLE
        if index.is_file():
            try:
                weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                shards = set(weight_map.values())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{index}: not a safetensors index ({error})") from error
            missing = sorted(name for name in shards if not (self.folder / name).is_file())
            if missing:
                raise UserError(
                    f"{index} names {len(missing)} file(s) that are not there: {', '.join(missing[:5])}."
                    " Download the checkpoint again, all shards of it."
                )
            files = {self.folder / name for name in shards}
        elif single.is_file():
            files = {single}
        else:
            pickled = sorted(p.name for p in self.folder.glob("*.bin")) + sorted(
                p.name for p in self.folder.glob("*.pt*")
            )
            advice = (
                f"it has {pickled[0]}, a pickle file, which can run code when it is read: convert it with"
                " `AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)` on a machine you can spare"
                if pickled
                else "a full model folder is needed, not an adapter or a tokenizer alone"
            )
            raise UserError(f"model.path {self.folder}: no safetensors file in it; {advice}")
        return {name: file for file in sorted(files) for name in _names_in(file)}

    def names(self) -> Iterable[str]:
        """Tensor names as they stand in the files, file by file; of a quantised weight its own."""
        for name in self._file_of:
            if name not in self.stored.parts and name not in self.floats.parts:
                yield name
            elif name.endswith(BLOCKS) and name.removesuffix(BLOCKS) in self.floats.mxfp4:
                yield name.removesuffix(BLOCKS)

    def files(self) -> set[Path]:
        """The safetensors files."""
        return set(self._file_of.values())

    def read(self, name: str) -> torch.Tensor:
        """One tensor, a view of the mapped file; a quantised one dequantised, in float32. No stack in MXFP4."""
        if name in self.stored.weights:
            return read_dequantized(name, self._read, self._file_of, str(self._file_of[name]))
        if name in self.floats.fp8:
            where = f"{self._file_of[name]}: {name}"
            return dequantize_fp8(self._read(name), self._read(scale_of(name)), self._fp8_block, where)
        return self._read(name)

    def num_experts(self, name: str) -> int:
        """Of a stack in MXFP4."""
        return len(self._read(name + BLOCKS))

    def read_expert(self, name: str, number: int) -> torch.Tensor:
        """One expert of a stack in MXFP4, dequantised, in float32."""
        return dequantize_mxfp4(self._read(name + BLOCKS)[number], self._read(name + SCALES)[number])

    def read_parts(self, name: str, packed: PackedWeight) -> Parts:
        """The parts of a quantised tensor, which must be as ``packed`` says."""
        return read_parts(name, packed, self._read, self._file_of, str(self._file_of[name]))

    @cached_property
    def _fp8_block(self) -> tuple[int, int]:
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        rows, columns = config["quantization_config"]["weight_block_size"]
        return rows, columns

    def _read(self, name: str) -> torch.Tensor:
        """What stands in a file. Every thread has one file open, the one it read last."""
        file = self._file_of[name]
        if getattr(self._open, "file", None) != file:
            self._open.file, self._open.handle = file, safe_open(file, framework="pt")
        return self._open.handle.get_tensor(name)


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except Exception as error:  # safetensors raises a type of its own that it does not export
        raise UserError(f"{file}: not a whole safetensors file ({error}); download or copy it again") from error
