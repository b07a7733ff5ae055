"""The file of a layer in a training checkpoint: what it holds, its writing, and the host store filled from it.

For each trained tensor NAME it holds master.NAME, exp_avg.NAME and exp_avg_sq.NAME (with 8 bits exp_avg_scale.NAME
and its like), and working.NAME where working weights lag behind their masters. Of a group of experts NAME ends in
[first:last]. Whether a file is whole is known to checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from rpft.errors import UserError
from rpft.model.host_layer import HostLayer
from rpft.model.host_store import HostStore
from rpft.model.layout import LayerLayout, TensorSpec
from rpft.model.moments import BLOCK, Moments, StateFormat, moments_bytes, moments_in, stored_parts
from rpft.model.pages import zeroed_pages
from rpft.model.slices import ExpertSlice
from rpft.train.saved_tensors import SavedTensors, saved_tensors
from rpft.train.shards import FileRecord, Piece, Take, TensorEntry, pieces, shard_bytes, write_shard

LAYER_FILE = re.compile(r"layer-\d{5}(-experts-\d+-\d+)?\.safetensors")
_FORMATS: dict[str, StateFormat] = {"F32": "fp32", "BF16": "bf16", "U8": "8bit"}
"""Of moments, by what safetensors calls their type."""


def layer_file(layout: LayerLayout) -> str:
    """The name of the file of a layer: by its block, and by its experts where it is a group of them."""
    experts = "" if layout.experts is None else f"-experts-{layout.experts.start}-{layout.experts.stop}"
    return f"layer-{layout.number:05d}{experts}.safetensors"


def _entries(
    layout: LayerLayout,
    lagging: bool,
    state_format: StateFormat,
    layer: HostLayer | None = None,
    moments: Moments | None = None,
) -> Iterator[TensorEntry]:
    """What the file of ``layer`` holds. Without it entries are good for sizes only. ``moments``: not its own."""

    def stored(kind: str, offset: int, first: int, stop: int) -> Sequence[torch.Tensor]:
        assert layer is not None
        first, stop = offset + first, offset + stop
        if kind == "master":
            return layer.stored_masters(first, stop)
        if kind == "working":
            return [layer.lagging[first:stop]]
        return [layer.state_part(kind, first, stop) if moments is None else getattr(moments, kind)[first:stop]]

    for name, (spec, byte_offset) in layout.own.items():
        if not spec.trained:
            continue
        offset = byte_offset // spec.dtype.itemsize
        yield TensorEntry(f"master.{name}", torch.float32, spec.shape, partial(stored, "master", offset))
        for kind, dtype, block in stored_parts(state_format):
            shape = spec.shape if block == 1 else (-(-spec.num_elements // block),)
            yield TensorEntry(f"{kind}.{name}", dtype, shape, partial(stored, kind, offset // block))
        if lagging:
            yield TensorEntry(f"working.{name}", spec.dtype, spec.shape, partial(stored, "working", offset))


def layer_file_bytes(layout: LayerLayout, lagging: bool, state_format: StateFormat) -> int:
    """Bytes that the file of a layer takes on the disk, rounded up a little."""
    return shard_bytes(list(_entries(layout, lagging, state_format))) + 4096


def piece_sizes(layout: LayerLayout, lagging: bool, state_format: StateFormat) -> list[int]:
    """Bytes of each of the pieces that the file of a layer is written in."""
    return [piece.num_bytes for piece in pieces(list(_entries(layout, lagging, state_format)))]


def layer_pieces(store: HostStore, lagging: bool, layer: int) -> list[Piece]:
    """What ``write_layer`` asks ``take`` for, in its order."""
    held = store.layers[layer]
    return list(pieces(list(_entries(held.layout, lagging, store.state_format, held))))


def write_layer(
    store: HostStore, lagging: bool, layer: int, path: Path, go_on: Callable[[int], None], take: Take
) -> FileRecord:
    """Writes masters and moments of ``layer``, ``lagging`` its working weights too. The rest: see write_shard."""
    held = store.layers[layer]
    entries = _entries(held.layout, lagging, store.state_format, held)
    return write_shard(path, list(entries), go_on, take)


def restore(path: Path, store: HostStore, lagging: bool) -> None:
    """Fills masters, moments and working weights of ``store``; UserError for tensors of another shape.

    Moments of another format are taken over where that is exact: into float32. Experts may be in other groups now.
    """
    trained = (layer for layer in store.layers if layer.layout.num_trained)
    for number, layers in groupby(trained, lambda layer: layer.layout.number):
        with saved_tensors(path, number) as saved:
            for layer in layers:
                _restore_layer(layer, saved, path / layer_file(layer.layout), store, lagging)


def _restore_layer(layer: HostLayer, saved: SavedTensors, file: Path, store: HostStore, lagging: bool) -> None:
    state_format = _FORMATS[saved.dtype("exp_avg") or "F32"]
    moments = _moments_for(layer, state_format, file)
    for entry in _entries(layer.layout, lagging, state_format, layer, moments):
        kind, _, name = entry.name.partition(".")
        spec = layer.layout.own[name][0]
        if state_format == "8bit":
            _refuse_shared_scales(saved.cut_otherwise(kind, spec), spec, file)
        value = saved.read(kind, spec)
        if value is None or tuple(value.shape) != entry.shape:
            found = None if value is None else tuple(value.shape)
            raise UserError(f"{file}: {entry.name} is {found}, and the model now has {entry.shape}")
        if kind == "master":
            store.write(name, value)
        elif kind == "working":
            store.lagging_tensor(name).copy_(value)
        elif moments is None:
            store.write_state(name, kind, value)
        else:
            entry.read(0, entry.num_elements).copy_(value.flatten())
    if moments is not None:
        for kind, values in zip(("exp_avg", "exp_avg_sq"), moments.read(), strict=True):
            layer.write_state(kind, 0, values)


def _refuse_shared_scales(cut: ExpertSlice | None, spec: TensorSpec, file: Path) -> None:
    """UserError where 8-bit moments are ``cut`` otherwise now, and one expert's share a scale with another's."""
    if cut is not None and cut.experts and (cut.last or spec.num_elements % (len(cut.experts) * BLOCK)):
        raise UserError(
            f"{file}: 8-bit moments of {spec.whole_name} were saved for other groups of experts than the plan now"
            " has, and several experts share a scale: go on with the plan that the run had (engine.plan)"
        )


def _moments_for(layer: HostLayer, state_format: StateFormat, file: Path) -> Moments | None:
    """As many as ``layer`` has of another ``state_format``, to become the layer's; None where it is the same.

    UserError where they would be rounded.
    """
    if state_format == layer.state_format:
        return None
    if layer.state_format != "fp32":
        raise UserError(
            f"{file}: its moments are {state_format}, and optimizer.state is {layer.state_format}, which would"
            f" round them: set optimizer.state to {state_format}, or to fp32, which takes them over as they are"
        )
    count = layer.layout.num_trained
    return moments_in(zeroed_pages(moments_bytes(state_format, count)), state_format, count)
