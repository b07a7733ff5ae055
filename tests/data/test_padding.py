"""The lengths that lines are padded to: as few as asked, none better, every line fits."""

import itertools
import random

import pytest

from rpft.data.padding import choose_pad_lengths


def padded_tokens(lengths, chosen):
    return sum(min(size for size in chosen if size >= length) for length in lengths)


def fewest_padded_tokens(lengths, multiple, most):
    """By trying every choice of multiples that holds the longest line."""
    longest = -(-max(lengths) // multiple) * multiple
    below = range(multiple, longest, multiple)
    choices = itertools.chain(*(itertools.combinations(below, count) for count in range(most)))
    return min(padded_tokens(lengths, [*choice, longest]) for choice in choices)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_of_as_many_lengths_pads_less(seed):
    rng = random.Random(seed)
    multiple, most = rng.choice([1, 4, 8]), rng.randint(1, 4)
    longest = rng.randint(1, 12 * multiple)
    lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 30))]
    chosen = choose_pad_lengths(lengths, multiple, most)
    assert len(chosen) <= most
    assert padded_tokens(lengths, chosen) == fewest_padded_tokens(lengths, multiple, most)


@pytest.mark.parametrize("most", [1, 2, 8])
def test_every_line_fits_and_the_last_length_is_that_of_the_longest(most):
    rng = random.Random(most)
    lengths = [int(rng.lognormvariate(6, 1)) + 1 for _ in range(2000)]
    chosen = choose_pad_lengths(lengths, 64, most)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == most
    assert all(size % 64 == 0 for size in chosen)
    assert chosen[-1] - 64 < max(lengths) <= chosen[-1]


def test_lengths_that_no_line_needs_are_left_out():
    assert choose_pad_lengths([3, 64, 65, 500], 64, 8) == [64, 128, 512]
    assert choose_pad_lengths([7], 8, 8) == [8]


def test_a_few_long_lines_do_not_lengthen_the_many_short_ones():
    assert choose_pad_lengths([100] * 1000 + [190] * 1000 + [4000, 4090], 64, 3) == [128, 192, 4096]


def test_the_order_of_the_lines_does_not_matter():
    rng = random.Random(0)
    lengths = [rng.randint(1, 3000) for _ in range(500)]
    assert choose_pad_lengths(lengths, 64, 8) == choose_pad_lengths(sorted(lengths), 64, 8)
