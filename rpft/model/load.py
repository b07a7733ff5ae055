"""Fills the host store from a checkpoint, tensor by tensor, in several threads.

Peak memory is the store plus, where experts lie one by one and the model stacks them, one expert a thread: what
else is read is a view of the file. A weight that the store keeps quantised is quantised as it comes: the model in
working precision never exists.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from rpft.errors import UserError
from rpft.model.checkpoint import Checkpoint
from rpft.model.checkpoint_reads import Expert, ReadTensors, plan_reads
from rpft.model.host_store import HostStore
from rpft.model.layout import TensorSpec
from rpft.model.quant import Parts
from rpft.model.skeleton import Skeleton

logger = logging.getLogger(__name__)

_THREADS = 8
"""Threads that read at most: enough for the rate of RAM, few enough to bound the fused tensors held at once."""


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
    targets: dict[str, list[TensorSpec]] = {}
    for spec in (spec for layer in store.layers for spec, _ in layer.layout.own.values()):
        if spec.checkpoint_name is not None and (spec.trained or not store.frozen_is_sealed):
            targets.setdefault(spec.checkpoint_name, []).append(spec)
    if store.frozen_is_sealed and not targets:
        return
    buffers = {n: b for n, b in skeleton.model.named_buffers() if n in store and not store.frozen_is_sealed}
    for name, buffer in buffers.items():
        store.write(name, buffer)  # the model's own value, until the file has another
    packed = {}
    for name, specs in targets.items():
        if (one := store.packed(specs[0].name)) is not None:
            packed[name] = replace(one, shape=_shape(specs, store))
    sources, unexpected = plan_reads(checkpoint, skeleton, packed)
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
    missing = sorted(n for n, specs in targets.items() if n not in loaded and specs[0].name not in buffers)
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


def _store_tensors(
    folder: Path, read: ReadTensors, targets: dict[str, list[TensorSpec]], store: HostStore
) -> list[str]:
    """Stores what one read gives and returns the names stored; nothing of it is held afterwards."""
    stored = []
    for name, value in read().items():
        if name not in targets:
            continue
        stored.append(name)
        number = None
        if isinstance(value, Expert):
            number, value = value
        wanted = _shape(targets[name], store)[0 if number is None else 1 :]
        if not isinstance(value, dict) and tuple(value.shape) != wanted:
            raise UserError(
                f"{folder}: tensor {name} has shape {list(value.shape)}, the config asks for {list(wanted)}"
            )
        for spec in targets[name]:
            _store_part(spec, value, number, store)
    return stored


def _store_part(spec: TensorSpec, value: torch.Tensor | Parts, number: int | None, store: HostStore) -> None:
    """Stores what ``spec`` has of ``value``, a tensor of the checkpoint; with a ``number``, one of its experts."""
    some = spec.slice
    if isinstance(value, dict):
        packed = store.packed(spec.name)
        assert packed is not None
        given = value if some is None else packed.parts_of_experts(some.experts, value)
        for suffix, part in store.parts(spec.name).items():
            part.copy_(given[suffix])
    elif number is None:
        store.write(spec.name, value if some is None else some.cut_out(value))
    elif some is None or number in some.experts:
        store.write(spec.name, value, number - (0 if some is None else some.experts.start))


def _shape(specs: list[TensorSpec], store: HostStore) -> tuple[int, ...]:
    """Of the tensor of the checkpoint that is stored as ``specs``."""
    shape, some = store.shape(specs[0].name), specs[0].slice
    return shape if some is None else some.whole_shape(shape)
