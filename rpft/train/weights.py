"""The host store of a run: made as its plan has it, and filled from its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rpft.model.adapters import initialise_lora
from rpft.model.frozen_file import FrozenFile
from rpft.model.host_store import HostStore
from rpft.model.load import load_checkpoint
from rpft.model.moments_file import MomentsFile
from rpft.model.verify import verify_head
from rpft.train.prepare import Prepared


def make_store(prepared: Prepared, frozen_file: FrozenFile | None = None) -> HostStore:
    """The store that ``prepared`` was planned with, all zeros. ``frozen_file``: see ``HostStore``.

    UserError where the disk has no room for moments that are to lie there.
    """
    offload = prepared.offload
    return HostStore(
        prepared.layouts,
        prepared.devices[0].allocate_host,
        two_copies=prepared.delayed,
        whole_masters=prepared.target.whole_masters,
        gradient_dtype=prepared.gradient_dtype,
        frozen_file=frozen_file,
        state_format=prepared.state_format,
        moments_file=offload and MomentsFile(offload, prepared.layouts, prepared.state_format),
    )


def load_weights(prepared: Prepared, folder: Path, loading: Callable[[int, int], None]) -> HostStore:
    """A store with the weights of the checkpoint, and new ones where an adapter has any.

    ``folder``: where the file of frozen weights lies, if the plan has them on the disk. ``loading``: see
    ``load_checkpoint``. UserError where the checkpoint lacks a weight, or its head is another.
    """
    on_disk = FrozenFile(folder, prepared.layouts, prepared.checkpoint.files()) if prepared.on_disk else None
    store = make_store(prepared, on_disk)
    load_checkpoint(prepared.checkpoint, prepared.skeleton, store, loading)
    if prepared.peft_model is not None:
        initialise_lora(prepared.skeleton, store, prepared.recipe.train.seed)
    verify_head(prepared.skeleton, store, prepared.dtype)
    return store
