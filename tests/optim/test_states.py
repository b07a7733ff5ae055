"""Moments of fewer bytes: a plain loop's numbers to the bit, a fair rounding, a library's own 8-bit numbers."""

import importlib.util
import math
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.eight_bits import in_eight_bits

from rpft.model import dynamic_map
from rpft.model.dropout import draws, halves
from rpft.model.moments import BLOCK, moments_bytes, moments_in, stored_parts
from rpft.model.split_float import join, split_into
from rpft.optim import one_pass
from rpft.optim.kernels import SQUARES_ROW, Weights
from rpft.optim.one_pass import CompiledPass, FusedPass

NARROW = ["bf16", "8bit"]
BETAS, EPS, RATE, DECAY = (0.9, 0.95), 1e-8, 0.01, 0.1
LENGTHS = [1, BLOCK, BLOCK + 1, 5 * BLOCK + 37]
WAYS = [pytest.param(CompiledPass, marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"))]
WAYS += [FusedPass]


def zeros(state, count):
    return moments_in(torch.zeros(moments_bytes(state, count), dtype=torch.uint8), state, count)


def random(length, seed, spread=1.0):
    """Normal numbers over many magnitudes; every hundredth is zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=generator) * torch.exp(
        spread * torch.randn(length, generator=generator)
    )
    return values * (torch.arange(length) % 100 != 99)


def update(kernels, weights, moments, gradients, step, key=0):
    kernels.adamw_pass(
        gradients,
        weights,
        moments,
        learning_rate=RATE,
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY,
        updates_before=step,
        gradient_divisor=4.0,
        rounding_key=key,
    )


class Plain:
    """The same arithmetic in lines of torch, a moment as float32 between two updates."""

    def __init__(self, state, values):
        self.state, self.values = state, values.clone()
        self.first, self.second = torch.zeros_like(values), torch.zeros_like(values)

    def update(self, gradients, step, key):
        gradient = sum(g.float() for g in gradients) * torch.tensor(0.25)
        self.first = self.first + (gradient - self.first) * torch.tensor(1 - BETAS[0])
        self.second = self.second * torch.tensor(BETAS[1]) + gradient * gradient * torch.tensor(1 - BETAS[1])
        size = torch.tensor(RATE / (1 - BETAS[0] ** (step + 1)))
        root = torch.from_numpy(np.sqrt(self.second.numpy()))  # exact, as torch's need not be
        root = root * torch.tensor(1 / math.sqrt(1 - BETAS[1] ** (step + 1))) + torch.tensor(EPS)
        self.values = self.values * torch.tensor(1 - RATE * DECAY) - size * self.first / root
        if self.state == "bf16":
            drawn = draws(torch.arange(len(self.values)), halves(key))
            self.first, self.second = rounded(self.first, drawn & 0xFFFF), rounded(self.second, drawn >> 16)
        else:
            self.first, self.second = in_eight_bits(self.first, True), in_eight_bits(self.second, False)


def rounded(values, drawn):
    """To the bfloat16 away from zero where the draw is above what is left to it."""
    bits = values.view(torch.int32).long()
    return ((bits + drawn) >> 16 << 16).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("state", NARROW)
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_compiled_pass_is_a_plain_loop_to_the_bit(state, length, uses):
    kernels, moments = CompiledPass(state), zeros(state, length)
    values = random(length, 0)
    working, remainder = torch.zeros(length, dtype=torch.bfloat16), torch.zeros(length, dtype=torch.int16)
    split_into(working, remainder, values)
    plain = Plain(state, values)
    for step in range(6):
        gradients = [random(length, 10 * step + use, 3.0).bfloat16() for use in range(1, uses + 1)]
        key = 0x1234567890ABCDEF * (step + 1) & (2**64 - 1)
        update(kernels, Weights(working, working, remainder), moments, gradients, step, key)
        plain.update(gradients, step, key)
        first, second = moments.read()
        assert torch.equal(first, plain.first)
        assert torch.equal(second, plain.second)
        assert torch.equal(join(working, remainder), plain.values)


@pytest.mark.parametrize("state", NARROW)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_torchs_fused_kernel_stores_the_same_moments_but_for_its_own_roundings(state, monkeypatch):
    monkeypatch.setattr(one_pass, "_FUSED_BLOCK", 2 * SQUARES_ROW)
    length, outcomes = 5 * SQUARES_ROW + 37, []
    for way in (CompiledPass, FusedPass):
        kernels, moments, master = way(state), zeros(state, length), random(length, 0)
        for step in range(4):
            gradient = random(length, step + 1)
            update(kernels, Weights(master, master, None), moments, [gradient], step, key=step)
        outcomes.append((master, *moments.read()))
    step_of = {"bf16": 2**-7, "8bit": 0.15}[state]
    for mine, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=step_of, atol=1e-3)
        assert (mine == theirs).float().mean() > 0.5
        assert float((mine - theirs).abs().mean()) < 1e-4 * float(mine.abs().mean())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", NARROW)
def test_a_layer_in_parts_and_on_any_threads_is_the_same_layer(state, way):
    length, cut = 40 * BLOCK, 13 * BLOCK
    outcomes = []
    for parts, threads in (((0, length), 1), ((0, cut, length), 3)):
        kernels, moments, master = way(state), zeros(state, length), random(length, 0)
        kernels.num_threads = threads
        for step in range(3):
            gradient = random(length, step + 1)
            for start, stop in pairwise(parts):
                part = slice(start, stop)
                weights = Weights(master[part], master[part], None)
                update(kernels, weights, moments[part], [gradient[part]], step, key=9)
        outcomes.append([master, *(getattr(moments, stored.name) for stored in stored_parts(state))])
    for mine, theirs in zip(*outcomes, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_rounding_by_chance_is_right_in_the_mean_and_to_a_neighbour():
    count, value = 1 << 16, 1.0 + 2**-7 * 0.3  # 0.3 of the way from 1 to the next
    moments = zeros("bf16", count)
    for key in (1, 2**63 + 5):
        moments.write(torch.full((count,), value), torch.full((count,), value), key)
        for stored in (moments.exp_avg, moments.exp_avg_sq):
            assert set(stored.tolist()) == {1.0, 1.0 + 2**-7}
            assert float((stored.float() > 1).float().mean()) == pytest.approx(0.3, abs=0.01)
        both = (moments.exp_avg > 1) & (moments.exp_avg_sq > 1)
        assert float(both.float().mean()) == pytest.approx(
            0.09, abs=0.01
        )  # the two draws know nothing of each other


def test_a_place_draws_alike_whatever_lies_before_it_and_otherwise_with_another_key():
    values = random(8 * BLOCK, 0)
    outcomes = []
    for start, key in ((0, 7), (3 * BLOCK, 7), (0, 8)):
        moments = zeros("bf16", 8 * BLOCK)[start:]
        moments.write(values[start:], values[start:].abs(), key)
        outcomes.append(moments.exp_avg[-5 * BLOCK :])
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])


def test_what_is_not_finite_stays_so_and_nothing_becomes_so():
    values = torch.tensor([float("inf"), 3.3e38, 0.0, 1e-40])
    moments = zeros("bf16", 4)
    moments.write(values, values, 2**40 - 1)
    assert moments.exp_avg[0] == float("inf")
    assert not moments.exp_avg.isnan().any()
    moments = zeros("8bit", 4)
    moments.write(values[1:].repeat(2)[:4], values, 0)
    assert all(moment.isfinite().all() for moment in moments.read())


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_has_its_values_in_order_and_each_is_its_own_nearest(signed):
    values = dynamic_map.values(signed)
    assert len(values) == dynamic_map.NUM_VALUES
    rising = torch.cat([values[129:], values[:129]]) if signed else values
    assert bool((rising[1:] > rising[:-1]).all())
    assert values[0] == 0
    assert rising[-1] == 1
    assert dynamic_map.nearest(values, signed).tolist() == list(range(dynamic_map.NUM_VALUES))


def test_a_second_moment_that_is_not_zero_is_not_taken_for_zero():
    moments = zeros("8bit", BLOCK)
    second = torch.full((BLOCK,), 1e-12)
    second[0], second[1] = 1.0, 0.0
    moments.write(torch.zeros(BLOCK), second, 0)
    assert (moments.read()[1] > 0).tolist() == (second > 0).tolist()


@pytest.mark.parametrize("state", ["fp32", *NARROW])
def test_bytes_of_moments_are_those_of_their_parts(state):
    moments = zeros(state, 12 * BLOCK)
    parts = [getattr(moments, stored.name) for stored in stored_parts(state)]
    assert [part.dtype for part in parts] == [stored.dtype for stored in stored_parts(state)]
    assert sum(part.nbytes for part in parts) == moments_bytes(state, 12 * BLOCK)
    assert moments_bytes(state, BLOCK) / BLOCK == {"fp32": 8, "bf16": 4, "8bit": 2 + 8 / BLOCK}[state]


def test_moments_of_another_format_than_the_pass_was_made_for_are_refused():
    master = torch.zeros(BLOCK)
    with pytest.raises(AssertionError):
        update(FusedPass("bf16"), Weights(master, master, None), zeros("fp32", BLOCK), [master], 0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("way", WAYS)
def test_eight_bits_are_those_of_torchao_but_where_it_loses_a_second_moment(way):
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

    length = 64 * BLOCK
    parameter = torch.nn.Parameter(random(length, 0))
    library = AdamW8bit([parameter], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    kernels, moments, master = way("8bit"), zeros("8bit", length), parameter.detach().clone()
    kept = torch.ones(length, dtype=torch.bool)
    for step in range(5):
        gradient = torch.randn(length, generator=torch.Generator().manual_seed(step)) * 4
        update(kernels, Weights(master, master, None), moments, [gradient], step)
        parameter.grad = gradient / 4
        with torch.compiler.set_stance("force_eager"):
            library.step()
        theirs = library.state[parameter]
        kept &= theirs["exp_avg_sq"].dequantize() > 0
        first, second = moments.read()
        for mine, reference in ((first, theirs["exp_avg"]), (second, theirs["exp_avg_sq"])):
            same = (mine - reference.dequantize())[kept].abs() < 1e-6 * mine[kept].abs().max()
            assert float(same.float().mean()) > 0.999
        torch.testing.assert_close(master[kept], parameter.detach()[kept], rtol=1e-4, atol=RATE / 50)
    assert float(kept.float().mean()) > 0.99
