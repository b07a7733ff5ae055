"""Sums of products are fused where the product is only summed, and stay the same sums."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rpft.model.gradient_sums import fuse_gradient_sums

LEFT, RIGHT = torch.randn(6, 5), torch.randn(5, 4)


def plain(total, left, right):
    total.add_(left @ right)
    return (left * 2,)


def turned(total, left, right):
    total.add_((left @ right).t())
    return (left * 2,)


def turned_twice(total, left, right):
    total.add_((left @ right).t().t())
    return (left * 2,)


def used_elsewhere(total, left, right):
    product = left @ right
    total.add_(product)
    return (product * 2,)


def no_product(total, left, right):
    total.add_(left[:, :4])
    return (left * 2,)


@pytest.mark.parametrize(
    ("function", "fused"),
    [(plain, True), (turned, True), (turned_twice, True), (used_elsewhere, False), (no_product, False)],
)
def test_a_sum_of_a_product_is_fused_and_gives_the_same(function, fused):
    shape = (4, 6) if function is turned else (6, 4)
    module = make_fx(function)(torch.zeros(shape), LEFT, RIGHT)
    fuse_gradient_sums(module)
    targets = [node.target for node in module.graph.nodes]
    assert (torch.ops.rpft.add_product.default in targets) is fused
    ours, theirs = torch.ones(shape), torch.ones(shape)
    assert torch.equal(module(ours, LEFT, RIGHT)[0], function(theirs, LEFT, RIGHT)[0])
    torch.testing.assert_close(ours, theirs)


def test_a_sum_in_the_working_precision_is_left_alone():
    total = torch.zeros(6, 4, dtype=torch.bfloat16)
    module = make_fx(plain)(total, LEFT.bfloat16(), RIGHT.bfloat16())
    fuse_gradient_sums(module)
    assert torch.ops.rpft.add_product.default not in [node.target for node in module.graph.nodes]


def in_three_parts(total, left, right):
    first, second, third = left.split(2)
    total.add_((first.t() @ right[:2] + second.t() @ right[2:4] + third.t() @ right[4:]).t())
    return (left * 2,)


def test_products_of_the_parts_of_a_matrix_are_added_one_by_one():
    left, right = torch.randn(6, 4), torch.randn(6, 5)
    module = make_fx(in_three_parts)(torch.zeros(5, 4), left, right)
    fuse_gradient_sums(module)
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(torch.ops.rpft.add_product.default) == 3
    assert torch.ops.aten.add.Tensor not in targets
    ours, theirs = torch.ones(5, 4), torch.ones(5, 4)
    assert torch.equal(module(ours, left, right)[0], in_three_parts(theirs, left, right)[0])
    torch.testing.assert_close(ours, theirs)
