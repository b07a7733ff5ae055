"""What a tensor has of some experts: cut out of the whole, and put back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.adapters import EXPERTS
from support.models import load

from rpft.model.adapters import LoraSettings
from rpft.model.slices import ExpertSlice, slice_of


@pytest.mark.parametrize(
    ("shape", "last"), [((6, 3, 5), False), ((6, 4), False), ((12, 5), False), ((5, 12), True)]
)
def test_slices_are_cut_out_of_a_whole_and_put_together_to_it(shape: tuple[int, ...], last: bool) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    again = torch.zeros_like(whole)
    for experts in (range(2), range(2, 6)):
        one = ExpertSlice(experts, 6, last)
        own = one.cut_out(whole)
        assert own.shape == one.shape(shape) == one.resized(shape, lambda size: size)
        assert one.whole_shape(own.shape) == shape
        one.put_into(again, own)
    assert torch.equal(again, whole)


def test_other_sizes_are_asked_for_whatever_is_not_of_one_expert_or_another() -> None:
    assert ExpertSlice(range(2), 6, last=False).resized((12, 5, 3), lambda size: 10 * size) == (4, 50, 30)
    assert ExpertSlice(range(2), 6, last=True).resized((5, 12), lambda size: 10 * size) == (50, 4)


def test_a_factor_of_an_adapter_is_of_its_experts_as_peft_has_them(checkpoint: Callable[..., Path]) -> None:
    from peft.tuners.lora.layer import ParamWrapper

    model = load(
        checkpoint("gpt_oss"), lora=LoraSettings(4, 8.0, 0.0, [], target_parameters=EXPERTS)
    ).skeleton.model
    wrapper = next(module for module in model.modules() if isinstance(module, ParamWrapper))
    generator = torch.Generator().manual_seed(2)
    factors = {}
    for part in ("lora_A", "lora_B"):
        linear = getattr(wrapper, part)["default"]
        factors[part] = torch.randn(linear.weight.shape, generator=generator)
        linear.weight = torch.nn.Parameter(factors[part])
    wrapper.get_base_layer().to_empty(device="cpu")
    whole = wrapper.get_delta_weight("default").detach()
    for experts in (range(2), range(2, 4)):
        a, b = (
            slice_of(f"{part}.default.weight", experts, 4).cut_out(factor).view(*view)
            for (part, factor), view in zip(factors.items(), [(2, 4, -1), (-1, 4, 2)], strict=True)
        )
        made = torch.einsum("ore,eri->eio", b, a) * wrapper.scaling["default"]
        expected = whole[experts.start : experts.stop]
        assert torch.allclose(made if made.shape == expected.shape else made.mT, expected, atol=1e-5)
