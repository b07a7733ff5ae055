"""Reads a Hugging Face checkpoint into the host store, tensor by tensor, in several threads.

Peak memory is the store plus, where experts lie one by one and the model stacks them, one expert a thread: what
else is read is a view of the file. Names that changed between the file and the model are converted by the mapping
of transformers. A weight that the store keeps quantised is quantised as it comes: the model in working precision
never exists.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from rpft.errors import UserError
from rpft.model.host_store import HostStore
from rpft.model.quant import PackedWeight, Parts
from rpft.model.quant_files import check_config, find_stored, read_dequantized, read_parts
from rpft.model.skeleton import Skeleton

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_THREADS = 8
"""Threads that read at most: enough for the rate of RAM, few enough to bound the fused tensors held at once."""


class Expert(NamedTuple):
    """One of the weights that are stacked in a tensor."""

    number: int
    value: torch.Tensor


ReadTensors = Callable[[], Mapping[str, torch.Tensor | Parts | Expert]]
"""Gives tensors by name, one expert of a stack, or the parts of one that stays quantised as it is."""

_HUB_WEIGHTS = "*.safetensors"
_HUB_FILES = ["*.json", _HUB_WEIGHTS, "*.jinja", "*.txt", "*.model", "tokenizer*"]


def refuse_no_model(path: str) -> None:
    """UserError where ``path`` is neither a folder nor could be a hub id."""
    if Path(path).is_dir():
        return
    if Path(path).is_file():
        raise UserError(f"model.path {path!r}: that is a file; the folder that it is in may be the checkpoint")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"model.path {path!r}: no such folder, and not a hub id of the form owner/name")


def resolve_checkpoint(path: str, revision: str | None, weights: bool = True) -> Path:
    """The local folder of a checkpoint: ``path`` itself, or the hub's snapshot, with or without weights."""
    refuse_no_model(path)
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
        """What of it is quantised."""

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
        return (name for name in self._file_of if name not in self.stored.parts)

    def files(self) -> set[Path]:
        """The safetensors files."""
        return set(self._file_of.values())

    def read(self, name: str) -> torch.Tensor:
        """One tensor, a view of the mapped file; a quantised one dequantised, in float32."""
        if name in self.stored.weights:
            return read_dequantized(name, self._read, self._file_of, str(self._file_of[name]))
        return self._read(name)

    def read_parts(self, name: str, packed: PackedWeight) -> Parts:
        """The parts of a quantised tensor, which must be as ``packed`` says."""
        return read_parts(name, packed, self._read, self._file_of, str(self._file_of[name]))

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


def load_checkpoint(
    checkpoint: Checkpoint,
    skeleton: Skeleton,
    store: HostStore,
    progress: Callable[[int, int], None] = lambda done, total: None,
    num_threads: int | None = None,
) -> None:
    """Fills ``store`` with every tensor that a checkpoint of the base model holds, and seals it.

    Frozen weights that lie in a file which is whole are there already: of the checkpoint only what is trained is
    read.

    ``progress`` is told (tensors done, tensors in all), by the calling thread. Raises UserError for a tensor
    that is missing or has another shape, the first in the order of the files; tensors that the model does not
    have are named in one warning. ``num_threads`` None: as many as torch uses, up to 8.
    """
    targets = {
        spec.checkpoint_name: spec.name
        for layer in store.layers
        for spec, _ in layer.layout.own.values()
        if spec.checkpoint_name is not None and (spec.trained or not store.frozen_is_sealed)
    }
    if store.frozen_is_sealed and not targets:
        return
    buffers = {n: b for n, b in skeleton.model.named_buffers() if n in store and not store.frozen_is_sealed}
    for name, buffer in buffers.items():
        store.write(name, buffer)  # the model's own value, until the file has another
    packed = {name: p for name, target in targets.items() if (p := store.packed(target)) is not None}
    sources, unexpected = plan_reads(checkpoint, skeleton, targets, packed)
    loaded: set[str] = set()

    def store_read(read: ReadTensors) -> list[str]:
        return _store_tensors(checkpoint.folder, read, targets, store)

    with (
        ThreadPoolExecutor(num_threads or min(_THREADS, torch.get_num_threads()), "loader") as pool,
        _one_thread_an_operation(),
    ):
        # Reads start in their order and are waited for in it: the first error in order is the one that is
        # raised, whichever comes first in time, and the reads that have not started then never do.
        for done, stored in enumerate(pool.map(store_read, sources.values()), start=1):
            loaded.update(stored)
            progress(done, len(sources))
    missing = sorted(n for n, name in targets.items() if n not in loaded and name not in buffers)
    if missing:
        raise UserError(
            f"{checkpoint.folder}: {len(missing)} tensor(s) of the model are not in the checkpoint:"
            f" {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
        )
    if unexpected:
        logger.warning(
            "%d tensor(s) of the checkpoint are not used by %s: %s",
            len(unexpected),
            type(skeleton.model).__name__,
            ", ".join(sorted(unexpected)[:5]),
        )
    store.seal()


@contextmanager
def _one_thread_an_operation() -> Iterator[None]:
    """Threads that start inside run each operation of torch alone: the loaders are as many as there are cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _store_tensors(folder: Path, read: ReadTensors, targets: dict[str, str], store: HostStore) -> list[str]:
    """Stores what one read gives and returns the names stored; nothing of it is held afterwards."""
    stored = []
    for name, value in read().items():
        if name not in targets:
            continue
        stored.append(name)
        number = None
        if isinstance(value, Expert):
            number, value = value
        if isinstance(value, dict):
            for suffix, part in store.parts(targets[name]).items():
                part.copy_(value[suffix])
            continue
        wanted = store.shape(targets[name])[0 if number is None else 1 :]
        if tuple(value.shape) != wanted:
            raise UserError(
                f"{folder}: tensor {name} has shape {list(value.shape)}, the config asks for {list(wanted)}"
            )
        store.write(targets[name], value, number)
    return stored


def plan_reads(
    checkpoint: Checkpoint, skeleton: Skeleton, targets: dict[str, str], packed: dict[str, PackedWeight]
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
    converted: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    reads: dict[str, ReadTensors] = {}
    unexpected: set[str] = set()
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

    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
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
