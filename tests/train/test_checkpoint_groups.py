"""A checkpoint of experts in groups is read into other groups, or whole blocks, bit for bit, and so back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.adapters import EXPERTS
from support.models import skeleton_of

from rpft.errors import UserError
from rpft.model.adapters import LoraSettings, inject_lora
from rpft.model.cut_experts import cut_experts
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.model.layout import TensorSpec
from rpft.model.moments import StateFormat, stored_parts
from rpft.train.checkpoint_layers import layer_file, restore, write_layer

ON_EXPERTS = LoraSettings(4, 8.0, 0.0, [], target_parameters=EXPERTS)
Checkpoints = Callable[..., Path]


def store_in(groups: int, folder: Path, lora: LoraSettings | None, **settings: object) -> HostStore:
    skeleton = skeleton_of(folder, torch.bfloat16)
    if lora is not None:
        inject_lora(skeleton, lora, str(folder))
    skeleton = cut_experts(skeleton, groups, torch.bfloat16)
    return HostStore(build_layers(skeleton, torch.bfloat16), **settings)  # type: ignore[arg-type]


def filled(store: HostStore) -> HostStore:
    """``store`` with other bits in whatever is trained."""
    generator = torch.Generator().manual_seed(1)
    for layer in store.layers:
        trained = layer.weights[: layer.layout.num_trained * layer.dtype.itemsize]
        for buffer in (trained, layer.second, layer.master.view(torch.uint8), layer.state):
            buffer.copy_(torch.randint(100, buffer.shape, dtype=torch.uint8, generator=generator))
    return store


def saved(store: HostStore, folder: Path, lagging: bool) -> Path:
    folder.mkdir()
    for layer in (layer.layout for layer in store.layers):
        if layer.num_trained:
            file = folder / layer_file(layer)
            write_layer(
                store, lagging, layer.layer, file, lambda size: None, lambda piece: nullcontext(piece.stored())
            )
    return folder


def contents(store: HostStore, lagging: bool) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by kind and name in the model, whatever slices it lies in."""
    found: dict[str, torch.Tensor] = {}

    def add(kind: str, spec: TensorSpec, value: torch.Tensor) -> None:
        if spec.slice is None:
            found[f"{kind}.{spec.name}"] = value.flatten()
            return
        key = f"{kind}.{spec.whole_name}"
        shape = spec.whole_shape if value.numel() == spec.num_elements else spec.slice.whole_shape(value.shape)
        spec.slice.put_into(found.setdefault(key, torch.zeros(shape, dtype=value.dtype)), value)

    for layer in store.layers:
        for spec, offset in layer.layout.own.values():
            if not spec.trained:
                continue
            add("master", spec, store.master(spec.name))
            if lagging:
                add("working", spec, store.lagging_tensor(spec.name))
            first = offset // spec.dtype.itemsize
            for part in stored_parts(store.state_format):
                stop = (first + spec.num_elements) // part.block
                add(part.name, spec, layer.state_part(part.name, first // part.block, stop))
    return {name: value.flatten() for name, value in found.items()}


def differences(one: HostStore, other: HostStore, lagging: bool) -> list[str]:
    """Names of what the two do not have alike."""
    mine, theirs = contents(one, lagging), contents(other, lagging)
    assert mine.keys() == theirs.keys()
    return [name for name, value in mine.items() if not torch.equal(value, theirs[name])]


@pytest.mark.parametrize(
    ("family", "lora", "state", "lagging"),
    [
        ("gpt_oss", None, "fp32", True),
        ("gpt_oss", ON_EXPERTS, "bf16", False),
        ("qwen3_moe", None, "8bit", False),
    ],
    ids=["in full, delayed", "adapters, bfloat16 moments", "8-bit moments"],
)
def test_groups_are_read_from_others(
    family: str,
    lora: LoraSettings | None,
    state: StateFormat,
    lagging: bool,
    checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    count = {"num_local_experts" if family == "gpt_oss" else "num_experts": 8}
    folder = checkpoint(family, **count, num_hidden_layers=1)
    settings = {"state_format": state, "two_copies": lagging}
    first = written = filled(store_in(1, folder, lora, **settings))
    for turn, groups in enumerate((2, 4, 2, 1)):
        read = store_in(groups, folder, lora, **settings)
        restore(saved(written, tmp_path / f"{turn}", lagging), read, lagging)
        assert differences(read, first, lagging) == [], f"in {groups} groups"
        written = read


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_8_bit_moments_of_which_experts_share_a_scale_stay_in_their_groups(
    before: int, after: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = checkpoint("gpt_oss", num_local_experts=8, num_hidden_layers=1)
    written = filled(store_in(before, folder, None, state_format="8bit"))
    path = saved(written, tmp_path / "step", False)
    with pytest.raises(
        UserError, match=r"8-bit moments of \S+ were saved for other groups of experts .* share a scale"
    ):
        restore(path, store_in(after, folder, None, state_format="8bit"), False)
    same = store_in(before, folder, None, state_format="8bit")
    restore(path, same, False)
    files = [sorted(each.glob("*")) for each in (path, saved(same, tmp_path / "again", False))]
    assert [one.name for one in files[0]] == [one.name for one in files[1]]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


def test_a_group_that_is_not_there_is_named(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe")
    path = saved(store_in(2, folder, None), tmp_path / "step", False)
    (path / "layer-00002-experts-2-4.safetensors").unlink()
    for groups, found in ((1, r"\(2, 64, 64\)"), (2, "None")):
        with pytest.raises(UserError, match=rf"layer-00002.*: master\.\S+\.mlp\.experts\.\S+ is {found}, and the"):
            restore(path, store_in(groups, folder, None), False)
