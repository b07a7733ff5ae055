"""Tensors of a training checkpoint, read as slices other than those that they were saved in, or whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from rpft.model.layout import TensorSpec
from rpft.model.slices import ExpertSlice, slice_of

_MARK = re.compile(r"\[(\d+):(\d+)\]$")


class _Piece(NamedTuple):
    """A tensor of a file."""

    handle: Any
    key: str
    experts: range | None
    """Those that it is of; None where it is whole."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(self.key).get_shape())

    def read(self, own: ExpertSlice, wanted: range) -> torch.Tensor:
        """What it has of the experts ``wanted``, ``own`` being what it is."""
        inside = range(wanted.start - own.experts.start, wanted.stop - own.experts.start)
        if own.last:
            within = ExpertSlice(inside, len(own.experts), last=True)
            return within.cut_out(self.handle.get_tensor(self.key))
        rows = self.shape[0] // len(own.experts)
        return self.handle.get_slice(self.key)[inside.start * rows : inside.stop * rows]


class SavedTensors:
    """What some files hold that are of one block, or of embedding or head."""

    def __init__(self, handles: list[Any]) -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        """By name without what marks a slice."""
        for handle in handles:
            for key in handle.keys():  # noqa: SIM118
                mark = _MARK.search(key)
                experts = None if mark is None else range(int(mark[1]), int(mark[2]))
                self._pieces.setdefault(_MARK.sub("", key), []).append(_Piece(handle, key, experts))

    def dtype(self, kind: str) -> str | None:
        """What safetensors calls the type of the tensors of that ``kind``; None where there are none."""
        found = (pieces[0] for name, pieces in self._pieces.items() if name.partition(".")[0] == kind)
        return next((piece.handle.get_slice(piece.key).get_dtype() for piece in found), None)

    def read(self, kind: str, spec: TensorSpec) -> torch.Tensor | None:
        """The tensor of ``kind`` that belongs to ``spec``; None where there is none, or not of all its experts."""
        pieces = self._pieces.get(f"{kind}.{spec.whole_name}", [])
        same = [piece for piece in pieces if piece.key == f"{kind}.{spec.name}"]
        return same[0].handle.get_tensor(same[0].key) if same else _put_together(pieces, spec)

    def cut_otherwise(self, kind: str, spec: TensorSpec) -> ExpertSlice | None:
        """Which slice ``read`` makes of others; None where it has no need to."""
        pieces = self._pieces.get(f"{kind}.{spec.whole_name}", [])
        if any(piece.key == f"{kind}.{spec.name}" for piece in pieces):
            return None
        return _wanted(pieces, spec)


@contextmanager
def saved_tensors(path: Path, number: int) -> Iterator[SavedTensors]:
    """What the checkpoint ``path`` holds of block ``number``, counted as in ``LayerLayout.number``."""
    with ExitStack() as stack:
        files = sorted(path.glob(f"layer-{number:05d}*.safetensors"))
        yield SavedTensors([stack.enter_context(safe_open(file, framework="pt")) for file in files])


def _put_together(pieces: list[_Piece], spec: TensorSpec) -> torch.Tensor | None:
    whole = _wanted(pieces, spec)
    wanted, result, missing = whole.experts, None, len(whole.experts)
    for piece in pieces:
        own = slice_of(spec.whole_name, piece.experts or range(whole.of), whole.of)
        both = range(max(own.experts.start, wanted.start), min(own.experts.stop, wanted.stop))
        if not both:
            continue
        part = piece.read(own, both)
        inside = range(both.start - wanted.start, both.stop - wanted.start)
        place = ExpertSlice(inside, len(wanted), own.last)
        if result is None:
            result = part.new_empty(place.whole_shape(part.shape))
        place.put_into(result, part)
        missing -= len(both)
    return None if missing else result


def _wanted(pieces: list[_Piece], spec: TensorSpec) -> ExpertSlice:
    """What ``spec`` is of the tensor that ``pieces`` are of."""
    saved = range(max((piece.experts.stop for piece in pieces if piece.experts is not None), default=0))
    return spec.slice or slice_of(spec.whole_name, saved, len(saved))
