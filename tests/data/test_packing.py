"""Packs are full, microbatches cost alike, and every line is in exactly one."""

import random

import numpy as np
import pytest

from rpft.data.packing import choose_microbatches, pack_lengths, packing_efficiency

MULTIPLES = range(8, 4097, 8)


def cost(lengths, group, pad_lengths=MULTIPLES):
    width = min(size for size in pad_lengths if size >= max(lengths[i] for i in group))
    return len(group) * width * (1 + width / 16_384)


@pytest.mark.parametrize(("mean", "spread"), [(5.0, 1.0), (6.0, 0.7), (4.0, 1.4)])
def test_packs_of_lengths_as_chats_have_them_are_filled(mean, spread):
    lengths = np.clip(np.random.default_rng(0).lognormal(mean, spread, 4000).astype(int), 4, 2048)
    packs = pack_lengths(lengths, 2048)
    assert sorted(i for pack in packs for i in pack) == list(range(4000))
    assert packing_efficiency(lengths, len(packs), 2048) >= 0.97


def test_rows_that_fill_a_pack_and_rows_of_one_token():
    assert pack_lengths([4, 4, 1, 1], 4) == [(0,), (1,), (2, 3)]
    assert pack_lengths([1] * 9, 4) == [(0, 1, 2, 3), (4, 5, 6, 7), (8,)]
    assert packing_efficiency([4, 4, 1, 1], 3, 4) == 10 / 12


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("same_rows", [False, True])
def test_every_line_is_in_one_microbatch_and_none_holds_too_much(seed, same_rows):
    rng = random.Random(seed)
    rows, longest = rng.randint(1, 6), 512
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 40))]
    pad_lengths = range(8, longest + 1, 8)
    groups = choose_microbatches(lengths, rows, pad_lengths, same_rows)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert len(groups) == -(-len(lengths) // rows)
    for group in groups:
        width = min(size for size in pad_lengths if size >= max(lengths[i] for i in group))
        assert len(group) * width <= rows * longest
    if same_rows:
        assert all(len(group) == rows for group in groups[:-1])


def smallest_largest_cost(lengths, count, most_tokens):
    """By trying every way to cut the sorted lines into ``count`` groups."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    best = {0: 0.0}
    for _ in range(count):
        best = {
            end: min(
                max(best[start], cost(lengths, order[start:end]))
                for start in best
                if start < end and (end - start) * -(-lengths[order[start]] // 8) * 8 <= most_tokens
            )
            for end in range(1, len(order) + 1)
            if any(
                start < end and (end - start) * -(-lengths[order[start]] // 8) * 8 <= most_tokens for start in best
            )
        }
    return best[len(order)]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_of_the_sorted_lines_has_a_smaller_largest_cost(seed):
    rng = random.Random(seed)
    lengths = [min(2048, int(rng.lognormvariate(5, 1.2)) + 1) for _ in range(rng.randint(2, 24))]
    rows = rng.randint(2, 5)
    pad_lengths = range(8, -(-max(lengths) // 8) * 8 + 1, 8)
    groups = choose_microbatches(lengths, rows, pad_lengths, False)
    largest = max(cost(lengths, group) for group in groups)
    assert largest == pytest.approx(smallest_largest_cost(lengths, len(groups), rows * pad_lengths[-1]))
    assert [cost(lengths, group) for group in groups] == sorted((cost(lengths, g) for g in groups), reverse=True)


def test_a_long_line_stands_alone_and_short_ones_together():
    lengths = [1000, 10, 20, 30, 990, 40, 50, 60]
    groups = choose_microbatches(lengths, 2, MULTIPLES, False)
    assert [0] in groups
    assert [4] in groups
    plain = [lengths[i : i + 2] for i in range(0, 8, 2)]
    padded = sum(len(line) * max(line) for line in plain)
    assert sum(len(group) * max(lengths[i] for i in group) for group in groups) < 0.6 * padded


def test_one_line_a_microbatch_keeps_the_order_of_the_step():
    assert choose_microbatches([5, 900, 7], 1, MULTIPLES, False) == [[0], [1], [2]]
