"""Quantised weights are those of bitsandbytes and torchao, to the bit, and so is what a layer makes of them.

The vectors were made by the libraries (scripts/make_quant_vectors.py); where these are installed they are asked
again.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef

from rpft.model.quant import PackedWeight, Parts, QuantKind, is_packable, nested_levels, nf4_levels
from rpft.model.quant_weight import OpenedWeights, QuantizedWeight, open_weights

VECTORS = Path(__file__).parent / "vectors" / "quantised.safetensors"
CASES = ("24x64", "20x128", "12x64", "260x64")
KINDS: tuple[QuantKind, ...] = ("nf4", "int8", "fp8")


@pytest.fixture(scope="module")
def vectors() -> dict[str, torch.Tensor]:
    with safe_open(VECTORS, framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118


def empty_parts(packed: PackedWeight) -> Parts:
    return {suffix: torch.zeros(shape, dtype=dtype) for suffix, (shape, dtype) in packed.part_shapes().items()}


def quantized(kind: QuantKind, value: torch.Tensor, nested: bool = True) -> tuple[PackedWeight, Parts]:
    packed = PackedWeight(kind, tuple(value.shape), value.dtype, nested)
    parts = empty_parts(packed)
    packed.quantize_into(value, parts)
    return packed, parts


def opened(packed: PackedWeight, parts: Parts) -> tuple[QuantizedWeight, OpenedWeights]:
    weights, notes = open_weights({f"w{suffix}": part for suffix, part in parts.items()}, {"w": packed})
    weight = weights["w"]
    assert isinstance(weight, QuantizedWeight)
    return weight, notes


def stored(
    vectors: dict[str, torch.Tensor], case: str, kind: QuantKind, nested: bool
) -> tuple[PackedWeight, Parts]:
    """What the library made of the weight of ``case``."""
    weight = vectors[f"{case}.weight"]
    packed = PackedWeight(kind, tuple(weight.shape), weight.dtype, nested)
    prefix = f"{case}.{kind}{'.nested' if kind == 'nf4' and nested else ''}"
    parts = {suffix: vectors[f"{prefix}{suffix or '.packed'}"] for suffix in packed.part_shapes()}
    return packed, parts


BOTH: list[tuple[QuantKind, bool]] = [("nf4", True), ("nf4", False), ("int8", False), ("fp8", False)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "nested"), BOTH)
def test_a_weight_is_quantised_to_the_library_s_bits(
    kind: QuantKind, nested: bool, case: str, vectors: dict[str, torch.Tensor]
) -> None:
    _, ours = quantized(kind, vectors[f"{case}.weight"], nested)
    _, theirs = stored(vectors, case, kind, nested)
    for suffix, part in theirs.items():
        if suffix == ".absmax" and nested:
            # Between two levels bitsandbytes's CPU kernel sometimes takes the one that is farther by a hair.
            exact = vectors[f"{case}.nf4.absmax"] - theirs[".nested_offset"]
            scale = theirs[".nested_absmax"].repeat_interleave(256)[: part.numel()]
            mine, other = ((nested_levels()[index.int()] * scale - exact).abs() for index in (ours[suffix], part))
            assert (mine <= other + 1e-9).all()
            assert (ours[suffix].int() - part.int()).abs().max() <= 1
        else:
            assert torch.equal(ours[suffix].float(), part.float().view(ours[suffix].shape)), suffix


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "nested"), BOTH)
def test_the_library_s_bits_are_dequantised_as_by_the_library(
    kind: QuantKind, nested: bool, case: str, vectors: dict[str, torch.Tensor]
) -> None:
    weight, _ = opened(*stored(vectors, case, kind, nested))
    prefix = f"{case}.{kind}{'.nested' if kind == 'nf4' and nested else ''}"
    assert torch.equal(weight.dequantized(), vectors[f"{prefix}.dequantised"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "nested"), BOTH)
def test_a_layer_gives_the_library_s_output_and_gradient(
    kind: QuantKind, nested: bool, case: str, vectors: dict[str, torch.Tensor]
) -> None:
    weight, notes = opened(*stored(vectors, case, kind, nested))
    hidden, grad = vectors[f"{case}.hidden"].requires_grad_(), vectors[f"{case}.grad"]
    with notes.made_again():
        output = F.linear(hidden, weight)
    (grad_hidden,) = torch.autograd.grad(output, hidden, grad)
    prefix = f"{case}.{kind}{'.nested' if kind == 'nf4' and nested else ''}"
    # Products are summed in another order on another processor.
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[hidden.dtype]
    for ours, theirs in ((output, vectors[f"{prefix}.output"]), (grad_hidden, vectors[f"{prefix}.grad_hidden"])):
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding * float(theirs.abs().max()))


def test_the_levels_are_those_of_the_vectors(vectors: dict[str, torch.Tensor]) -> None:
    assert torch.equal(nf4_levels(), vectors["24x64.nf4.nested.quant_map"])
    assert torch.equal(nested_levels(), vectors["24x64.nf4.nested.nested_quant_map"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_or_block_of_zeros_stays_zero(kind: QuantKind) -> None:
    value = torch.randn(4, 64)
    value[2] = 0
    weight, _ = opened(*quantized(kind, value, nested=False))
    assert torch.equal(weight.dequantized()[2], torch.zeros(64))
    assert torch.isfinite(weight.dequantized()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_weight_is_quantised_in_chunks_that_change_nothing(
    kind: QuantKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.randn(70, 192)
    _, whole = quantized(kind, value)
    monkeypatch.setattr("rpft.model.quant._CHUNK_ELEMENTS", 640)
    monkeypatch.setattr("rpft.model.quant_kernels._CHUNK_ELEMENTS", 640)
    packed, parts = quantized(kind, value)
    for suffix, part in whole.items():
        assert torch.equal(part.float(), parts[suffix].float()), suffix
    cut = opened(packed, parts)[0].dequantized()
    monkeypatch.undo()
    assert torch.equal(cut, opened(packed, parts)[0].dequantized())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [2, torch.tensor(2)], ids=["number", "tensor"])
def test_an_expert_is_the_weight_that_it_would_be_alone(kind: QuantKind, number: Any) -> None:
    value = torch.randn(3, 48, 64)
    weight, _ = opened(*quantized(kind, value))
    alone, _ = opened(*quantized(kind, value[2]))
    chosen = weight[number]
    assert isinstance(chosen, QuantizedWeight)
    assert torch.equal(chosen.dequantized(), alone.dequantized())
    assert torch.equal(weight.dequantized()[2], alone.dequantized())
    assert torch.equal(weight.transpose(1, 2)[2], alone.dequantized().t())


def test_nf4_takes_a_quarter_of_bfloat16_and_int8_a_half() -> None:
    expected: dict[QuantKind, float] = {"nf4": 4.127, "int8": 8.01, "fp8": 8.01}
    for kind, bits in expected.items():
        packed = PackedWeight(kind, (4096, 4096), torch.bfloat16)
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in packed.part_shapes().values()]
        assert 8 * sum(sizes) / packed.num_elements == pytest.approx(bits, rel=1e-3)


def test_only_whole_blocks_can_be_packed() -> None:
    assert is_packable("nf4", (3, 64))
    assert not is_packable("nf4", (3, 32))
    assert is_packable("int8", (3, 32))
    assert is_packable("nf4", (5, 2, 32))
    assert not is_packable("nf4", (2, 1, 32))
    assert not is_packable("int8", (64,))


class TwoLayers(nn.Module):
    """A layer whose weight is used as it is, and one whose weight is used turned, as in a grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 48, bias=True, device="meta")
        self.second = nn.Parameter(torch.empty(48, 64, device="meta"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.silu(self.first(hidden)) @ self.second


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_in_working_precision_lives_from_forward_to_backward(
    kind: QuantKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"first.weight": torch.randn(48, 64), "second": torch.randn(48, 64)}
    weights: dict[str, torch.Tensor] = {"first.bias": torch.randn(48)}
    packed = {}
    for name, value in values.items():
        packed[name], parts = quantized(kind, value)
        weights |= {name + suffix: part for suffix, part in parts.items()}
    made: list[StorageWeakRef] = []
    note = OpenedWeights.note

    def noting(self: OpenedWeights, make: Any) -> torch.Tensor:
        tensor = note(self, make)
        made.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(OpenedWeights, "note", noting)
    hidden = torch.randn(5, 64, requires_grad=True)
    whole, notes = open_weights(weights, packed)
    with notes.made_again():
        output = functional_call(TwoLayers(), whole, (hidden,))
    assert len(made) == 2
    assert all(reference.expired() for reference in made)
    (grad,) = torch.autograd.grad(output.sum(), hidden)

    plain = {name: w.dequantized() if isinstance(w, QuantizedWeight) else w for name, w in whole.items()}
    expected = functional_call(TwoLayers(), plain, (hidden,))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)  # int8 scales after the product
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), hidden)[0], rtol=1e-4, atol=1e-3)


needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_itself_reads_what_was_quantised_here(dtype: torch.dtype, nested: bool) -> None:
    import bitsandbytes.functional as library  # type: ignore[import-not-found]

    packed, parts = quantized("nf4", (0.03 * torch.randn(130, 256)).to(dtype), nested)
    state2 = offset = None
    if nested:
        state2 = library.QuantState(
            absmax=parts[".nested_absmax"], code=parts[".nested_quant_map"], blocksize=256, dtype=torch.float32
        )
        offset = parts[".nested_offset"][0]
    state = library.QuantState(
        absmax=parts[".absmax"],
        shape=torch.Size(packed.shape),
        code=parts[".quant_map"],
        blocksize=64,
        quant_type="nf4",
        dtype=dtype,
        offset=offset,
        state2=state2,
    )
    theirs = library.dequantize_4bit(parts[""].view(-1, 1), state)
    assert torch.equal(opened(packed, parts)[0].dequantized(), theirs)


@needs_bitsandbytes
def test_a_layer_of_bitsandbytes_gives_the_same_forward_and_gradient() -> None:
    import bitsandbytes as library  # type: ignore[import-not-found]

    linear = library.nn.Linear4bit(128, 96, bias=True, compute_dtype=torch.bfloat16, quant_type="nf4")
    linear.load_state_dict({"weight": 0.05 * torch.randn(96, 128), "bias": torch.randn(96)})
    linear = linear.to(torch.bfloat16).to("cpu")
    hidden, grad = torch.randn(7, 128).bfloat16().requires_grad_(), torch.randn(7, 96).bfloat16()
    theirs = linear(hidden)
    state = linear.weight.quant_state
    told = state.as_dict()
    packed = PackedWeight("nf4", (96, 128), torch.bfloat16)
    parts = {suffix: told[suffix[1:]] for suffix in packed.part_shapes() if suffix and suffix != ".nested_offset"}
    parts |= {"": linear.weight.data.flatten(), ".nested_offset": state.offset.view(1)}
    weight, notes = opened(packed, parts)
    with notes.made_again():
        ours = F.linear(hidden, weight, linear.bias)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(each, hidden, grad)[0] for each in (ours, theirs)))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_layer_of_torchao_gives_the_same_forward_and_gradient(kind: QuantKind, dtype: torch.dtype) -> None:
    from torchao.quantization.granularity import PerRow  # type: ignore[import-not-found]
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import (  # type: ignore[import-not-found]
        Float8Tensor,
    )
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import (  # type: ignore[import-not-found]
        Int8Tensor,
    )

    value, bias = (0.05 * torch.randn(300, 768)).to(dtype), torch.randn(300).to(dtype)
    hidden, grad = torch.randn(5, 768).to(dtype).requires_grad_(), torch.randn(5, 300).to(dtype)
    library = {"int8": Int8Tensor, "fp8": Float8Tensor}[kind].from_hp(value, granularity=PerRow())
    weight, notes = opened(*quantized(kind, value))
    theirs = F.linear(hidden, library, bias)
    with notes.made_again():
        ours = F.linear(hidden, weight, bias)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(each, hidden, grad)[0] for each in (ours, theirs)))
