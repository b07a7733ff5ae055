"""Layouts place every tensor once, apart and aligned; the store allocates just that and gives views of it."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.models import FAMILIES, load, skeleton_of, tiny_checkpoint, tiny_config

from rpft.errors import UserError
from rpft.model.adapters import LoraSettings
from rpft.model.build import build_model
from rpft.model.cut import cut
from rpft.model.host_store import HostStore, store_bytes
from rpft.model.layers import build_layers, freeze_all, layer_names
from rpft.model.layout import ALIGNMENT_BYTES, ALIGNMENT_ELEMENTS, Borrow, TensorSpec, build_layouts
from rpft.model.moments import StateFormat

LORA = LoraSettings(r=4, alpha=8.0, dropout=0.0, target_modules="all-linear")
FLAT = ("second", "gradient", "master", "exp_avg", "exp_avg_sq")


def spec(name: str, *shape: int, trained: bool = True, decay: bool = True, dtype: torch.dtype = torch.bfloat16):
    return TensorSpec(name, shape, dtype, trained, decay, name)


MIXED = [
    [
        spec("frozen", 3, 5, trained=False),
        spec("bias", 7, decay=False),
        spec("matrix", 33, 5),
        spec("buffer", 3, trained=False, dtype=torch.int64),
        spec("scalar", decay=False),
        spec("other", 128),
    ],
    [spec("block", 64, 2)],
    [spec("norm", 5, decay=False), spec("frozen.only", 9, trained=False)],
]
BORROWS = {2: [Borrow("head", 0, "matrix"), Borrow("again", 0, "frozen")]}


def test_trained_tensors_come_first_decayed_ones_before_the_others() -> None:
    first = build_layouts(MIXED, BORROWS)[0]
    assert list(first.own) == ["matrix", "other", "bias", "scalar", "frozen", "buffer"]
    assert first.num_decayed == 256 + 256
    assert first.num_trained == 256 + 256 + 256 + 256
    assert first.own["frozen"][1] == first.num_trained * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_tensors_are_aligned_and_apart(
    family: str, lora: LoraSettings | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, family)
    loaded = load(tmp_path, dtype, lora)
    for layer in loaded.store.layers:
        layout, end = layer.layout, 0
        for name, (tensor, offset) in layout.own.items():
            assert offset >= end, name
            unit = ALIGNMENT_ELEMENTS * dtype.itemsize if tensor.trained else ALIGNMENT_BYTES
            assert offset % unit == 0, name
            end = offset + tensor.num_bytes
            inside = offset < layout.num_trained * dtype.itemsize
            assert inside == tensor.trained, name
            if tensor.trained:
                assert (offset // dtype.itemsize < layout.num_decayed) == tensor.decay, name
        assert end <= layout.host_bytes
        places = sorted(
            (b.byte_offset, b.byte_offset + math.prod(b.shape) * dtype.itemsize) for b in layout.bindings
        )
        assert all(stop <= start for (_, stop), (start, _) in pairwise(places))
        assert not places or places[-1][1] <= layout.region_bytes
        gradients = sorted(
            (b.grad_offset, b.grad_offset + math.prod(b.shape))
            for b in layout.bindings
            if b.grad_offset is not None
        )
        assert all(stop <= start for (_, stop), (start, _) in pairwise(gradients))
        assert not gradients or gradients[-1][1] <= layout.grad_elements


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_decay_and_norms_and_biases_do_not(family: str) -> None:
    skeleton = cut(build_model(tiny_config(family), torch.float32, "auto"))
    specs = {n: s for layout in build_layers(skeleton, torch.float32) for n, (s, _) in layout.own.items()}
    shapes = {n: tuple(p.shape) for n, p in skeleton.model.named_parameters()}
    assert {n: s.shape for n, s in specs.items() if s.trained} == shapes
    for name, tensor in specs.items():
        plain = "norm" in name.lower() or ".ln_" in name or name.endswith(("bias", "sinks"))
        assert tensor.decay != plain, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "lora"), [("llama", None), ("qwen3", None), ("gpt_oss", None), ("gpt2", LORA), ("llama_tied", LORA)]
)
def test_store_bytes_is_what_a_store_allocates(
    family: str, lora: LoraSettings | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, family)
    store = load(tmp_path, dtype, lora).store
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in store.layers
        for tensor in (layer.weights, *(getattr(layer, flat) for flat in FLAT))
        if tensor.numel()
    }
    assert sum(storages.values()) == store_bytes([layer.layout for layer in store.layers])


@pytest.mark.parametrize(
    ("dtype", "gradients", "two_copies", "whole_masters", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, False, False, 14),
        (torch.bfloat16, torch.bfloat16, True, False, 16),
        (torch.bfloat16, torch.float32, False, False, 16),
        (torch.bfloat16, torch.bfloat16, False, True, 16),
        (torch.float16, torch.float32, False, False, 18),
        (torch.float32, torch.float32, False, False, 16),
        (torch.float32, torch.float32, True, True, 20),
    ],
    ids=str,
)
def test_bytes_a_trained_parameter_of_a_layer_without_padding(
    dtype: torch.dtype, gradients: torch.dtype, two_copies: bool, whole_masters: bool, expected: int
) -> None:
    layouts = build_layouts([[spec("w", 128, 128, dtype=dtype)]], {})
    choices = {"two_copies": two_copies, "whole_masters": whole_masters}
    assert store_bytes(layouts, gradients, **choices) == expected * 128 * 128
    (layer,) = HostStore(layouts, gradient_dtype=gradients, **choices).layers
    buffers = (layer.weights, *(getattr(layer, flat) for flat in FLAT))
    assert sum(tensor.nbytes for tensor in buffers) == expected * 128 * 128


@pytest.mark.parametrize(("state", "moments"), [("fp32", 8 * 256), ("bf16", 4 * 256), ("8bit", 2 * 256 + 8)])
def test_bytes_of_a_block_of_parameters_with_each_format_of_moments(state: StateFormat, moments: int) -> None:
    layouts = build_layouts([[spec("w", 256, 3), spec("short", 5, decay=False)]], {})
    rest = 4 * 256 * (2 + 2 + 4)  # weights, what masters have beyond them, gradients; the short one fills a block
    assert store_bytes(layouts, state_format=state) == rest + 4 * moments
    (layer,) = HostStore(layouts, state_format=state).layers
    assert layer.state.nbytes == 4 * moments
    assert len(layer.moments) == layer.layout.num_trained == 4 * 256


def test_a_layer_of_two_copies_gives_each_with_the_frozen_tensors_that_they_share() -> None:
    specs = [spec("w", 128, 2), spec("frozen", 128, 3, trained=False)]
    store = HostStore(build_layouts([specs], {}), two_copies=True)
    (layer,) = store.layers
    store.write("frozen", torch.full((128, 3), 7.0))
    for number, value in enumerate((1.0, 2.0)):
        layer.latest = number
        store.write("w", torch.full((128, 2), value))
    for number, value in enumerate((1.0, 2.0)):
        layer.latest = number
        assert bool((store.tensor("w") == value).all())
        assert bool((store.layer_weights(0)["w"] == value).all())
        assert bool((store.lagging_tensor("w") == 3.0 - value).all())
        whole = torch.zeros(layer.layout.host_bytes, dtype=torch.uint8)
        for offset, part in layer.pieces(number, 0, len(whole)):
            whole[offset : offset + len(part)] = part
        assert whole[:512].view(torch.bfloat16).tolist() == [value] * 256
        assert whole[512 : 512 + 768].view(torch.bfloat16).tolist() == [7.0] * 384
        (part,) = layer.pieces(number, 520, 600)
        assert part[0] == 0
        assert torch.equal(part[1], layer.weights[520:600])


def test_frozen_weights_take_their_working_copy_alone() -> None:
    layouts = build_layouts([[spec("w", 128, 128, trained=False)]], {})
    assert store_bytes(layouts) == 2 * 128 * 128


def test_buffers_that_cross_the_link_come_from_the_allocator_at_their_exact_size() -> None:
    asked: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    layouts = build_layouts(MIXED, BORROWS)
    HostStore(layouts, allocate)
    assert sorted(asked) == sorted(n for x in layouts for n in (x.host_bytes, 4 * x.grad_elements))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_written_comes_back_through_every_view_and_touches_no_neighbour(dtype: torch.dtype) -> None:
    specs = [[TensorSpec(s.name, s.shape, dtype, s.trained, s.decay, s.name) for s in layer] for layer in MIXED]
    store = HostStore(build_layouts(specs, BORROWS))
    values = {s.name: torch.randn(s.shape) for layer in specs for s in layer}
    for name, value in values.items():
        store.write(name, value)
    for layer in specs:
        for s in layer:
            torch.testing.assert_close(store.tensor(s.name).float(), values[s.name], rtol=2**-8, atol=0)
            assert s.trained or torch.equal(store.tensor(s.name), values[s.name].to(dtype))
            if s.trained:
                assert torch.equal(store.master(s.name), values[s.name]), s.name
    head = store.layer_weights(2)
    assert head["head"].data_ptr() == store.tensor("matrix").data_ptr()
    assert torch.equal(head["again"], store.tensor("frozen"))
    assert store.num_trained == sum(s.num_elements for layer in specs for s in layer if s.trained)
    assert store.num_parameters == sum(s.num_elements for layer in specs for s in layer)
    for number, flat in enumerate(("gradient", "exp_avg", "exp_avg_sq")):
        for layer in specs:
            for s in layer:
                if s.trained:
                    store.trained_view(s.name, flat).fill_(number + 1)
        filled = sum(int(getattr(layer, flat).count_nonzero()) for layer in store.layers)
        assert filled == store.num_trained, flat


def test_working_is_the_trained_part_and_in_float32_its_own_master() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        specs = [
            [TensorSpec(s.name, s.shape, dtype, s.trained, s.decay, s.name) for s in layer] for layer in MIXED
        ]
        for layer in HostStore(build_layouts(specs, {})).layers:
            assert layer.working.dtype == dtype
            assert layer.master.shape == (layer.working.shape if dtype == torch.bfloat16 else (0,))
            layer.working.fill_(3)
            assert layer.master_is_split == (dtype == torch.bfloat16)
            assert bool((layer.master_values() == 3).all())


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "gpt2", "gemma2", "cohere"])
def test_a_tied_weight_is_stored_once_and_the_head_borrows_it_with_a_gradient_of_its_own(
    family: str, tmp_path: Path
) -> None:
    model = tiny_checkpoint(tmp_path, family)
    store = load(tmp_path).store
    assert store.num_parameters == sum(p.numel() for p in model.parameters())
    first, head = store.layers[0], store.layers[-1]
    embedding = next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    assert "lm_head.weight" not in store
    assert store.layer_of(embedding) == 0
    assert (
        store.layer_weights(len(store.layers) - 1)["lm_head.weight"].data_ptr()
        == store.tensor(embedding).data_ptr()
    )
    (piece,) = head.layout.borrowed_gradients
    offset = first.layout.own[embedding][1] // 4
    assert (piece.layer, piece.start, piece.length) == (0, offset, 320 * 64)
    assert piece.region_offset == head.layout.num_trained
    assert head.gradient.numel() >= head.layout.num_trained + 320 * 64


def test_a_frozen_tied_weight_is_borrowed_without_a_gradient(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama_tied")
    store = load(tmp_path, lora=LORA).store
    head = store.layers[-1]
    assert head.layout.borrowed_gradients == ()
    assert "lm_head.weight" in store.layer_weights(len(store.layers) - 1)
    assert head.gradient.numel() == head.layout.num_trained


def test_layers_are_embedding_blocks_and_head_by_name(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    skeleton = skeleton_of(tmp_path)
    names = layer_names(skeleton)
    assert names == ["embedding", "block 0", "block 1", "block 2", "block 3", "head"]
    assert len(build_layers(skeleton, torch.float32)) == len(names)


def test_a_model_with_nothing_to_train_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    skeleton = skeleton_of(tmp_path)
    freeze_all(skeleton.model)
    with pytest.raises(UserError, match="nothing to train"):
        build_layers(skeleton, torch.float32)


def test_buffers_that_a_checkpoint_holds_are_stored_frozen_and_loaded(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert name in model.state_dict()
    with torch.no_grad():
        model.state_dict()[name].fill_(0.25)
    model.save_pretrained(tmp_path)
    store = load(tmp_path, torch.bfloat16).store
    layout = store.layers[store.layer_of(name)].layout
    assert not layout.own[name][0].trained
    assert torch.equal(store.tensor(name), torch.full_like(store.tensor(name), 0.25))
