"""A small product is added on top of a large one: fewer tensors, the same sum, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rpft.model.added_products import fuse_added_products

BF16 = torch.bfloat16


def projection(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """An adapter's way: the projection, and a small product beside it."""
    return torch.nn.functional.linear(x, weight) + torch.nn.functional.linear(x @ down.t(), up) * 2.0


def turned(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return 2.0 * torch.nn.functional.linear(x @ down.t(), up) + torch.nn.functional.linear(x, weight)


def used_twice(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    base = torch.nn.functional.linear(x, weight)
    return base + torch.nn.functional.linear(x @ down.t(), up) + base.sum()


def two_large_ones(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight) + torch.nn.functional.linear(x, weight.flip(0))


def scaled_base(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return 3.0 * torch.nn.functional.linear(x, weight) + torch.nn.functional.linear(x @ down.t(), up)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 5, 64), (48, 64), (4, 64), (48, 4)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def fused(function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[fx.GraphModule, int]:
    module = make_fx(function, tracing_mode="fake")(*inputs(dtype))
    fuse_added_products(module)
    count = sum(node.target is torch.ops.rpft.add_scaled_product.default for node in module.graph.nodes)
    return module, count


@pytest.mark.parametrize("function", [projection, turned])
def test_the_small_product_is_added_to_the_large_one(function: Callable[..., Tensor]) -> None:
    module, count = fused(function, BF16)
    assert count == 1
    assert not any(node.target is torch.ops.aten.add.Tensor for node in module.graph.nodes)
    exact = function(*(tensor.double() for tensor in inputs(BF16)))
    ours, theirs = module(*inputs(BF16)).double(), function(*inputs(BF16)).double()
    assert (ours - exact).norm() <= 1.05 * (theirs - exact).norm()
    assert (ours - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("function", [used_twice, two_large_ones, scaled_base])
def test_other_sums_stay_as_they_are(function: Callable[..., Tensor]) -> None:
    module, count = fused(function, BF16)
    assert count == 0
    assert torch.equal(module(*inputs(BF16)), function(*inputs(BF16)))


def test_float32_keeps_its_order_of_operations() -> None:
    module, count = fused(projection, torch.float32)
    assert count == 0
    assert torch.equal(module(*inputs(torch.float32)), projection(*inputs(torch.float32)))
