"""Weights, held-out rows and duplicates: each a function of the seed, counted, and said."""

import collections

import numpy as np
import pytest

from rpft.data.rows import Block, ChosenRows, Row, Rows, lengths_of
from rpft.data.selection import count_repeated, count_shared, hold_out, weigh


def rows(*ids):
    return [Row(np.array(row, dtype=np.int32), np.array([i > 0 for i in range(len(row))])) for row in ids]


def block(*ids, first=0):
    return Block.of(rows(*ids), range(first, first + len(ids)))


def test_held_out_rows_are_drawn_by_the_seed():
    train, held_out = hold_out(100, 10, seed=1)
    assert len(held_out) == 10
    assert sorted([*train, *held_out]) == list(range(100))
    assert hold_out(100, 10, seed=1)[1].tolist() == held_out.tolist()
    assert hold_out(100, 10, seed=2)[1].tolist() != held_out.tolist()
    assert hold_out(100, 20, seed=1)[1].tolist() != list(range(20))


def test_the_rows_of_a_seed_are_pinned():
    # A resumed run depends on them.
    assert hold_out(10, 3, seed=42)[1].tolist() == [1, 6, 7]
    assert weigh(np.zeros(6, int), [0.5], seed=42).tolist() == [3, 4, 5]


def test_a_weight_is_how_often_a_row_stands():
    source_of = np.array([0] * 10 + [1] * 10 + [2] * 10)
    taken = weigh(source_of, [1.0, 2.5, 0.2], seed=3)
    times = collections.Counter(taken.tolist())
    assert [times[i] for i in range(10)] == [1] * 10
    assert sorted(times[i] for i in range(10, 20)) == [2] * 5 + [3] * 5
    assert sum(times[i] for i in range(20, 30)) == 2
    assert taken.tolist() == sorted(taken)
    assert weigh(source_of, [1.0, 2.5, 0.2], seed=3).tolist() == taken.tolist()
    assert weigh(source_of, [1.0, 2.5, 0.2], seed=4).tolist() != taken.tolist()


def test_a_small_weight_leaves_one_row_and_a_source_without_rows_none():
    assert len(weigh(np.zeros(3, int), [0.001, 5.0], seed=0)) == 1


def test_rows_of_the_data_in_the_evaluation_are_counted():
    train = Rows([block([1, 2, 3], [4, 5]), block([6])])
    held_out = rows([3, 2, 1], [4, 5], [6], [4, 5], [7])
    assert count_shared(train, held_out) == 3
    assert count_shared(ChosenRows(train, np.array([0, 2])), held_out) == 1
    assert count_shared(train, rows([1, 2])) == 0


def test_repeated_rows_are_counted_but_the_first():
    assert count_repeated(Rows([block([1, 2], [2, 1], [1, 2]), block([1, 2], [3])])) == 2
    assert count_repeated(Rows([block([1], [2])])) == 0


@pytest.mark.parametrize("seed", range(3))
def test_repeats_are_those_of_a_plain_count(seed):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 3, size=rng.integers(1, 4)).tolist() for _ in range(60)]
    expected = len(ids) - len({tuple(row) for row in ids})
    assert count_repeated(Rows([block(*ids[:20]), block(*ids[20:])])) == expected
    assert count_repeated(rows(*ids)) == expected


def test_rows_of_blocks_are_one_sequence_with_their_origins():
    both = Rows([block([1, 2], [3], first=4), block(), block([4, 5, 6])])
    assert [row.ids.tolist() for row in both] == [[1, 2], [3], [4, 5, 6]]
    assert both[-1].trained.tolist() == [False, True, True]
    assert [row.ids.tolist() for row in both[1:]] == [[3], [4, 5, 6]]
    assert [both.origin(i) for i in range(3)] == [(0, 4), (0, 5), (2, 0)]
    assert both.lengths.tolist() == lengths_of(list(both)).tolist() == [2, 1, 3]
    with pytest.raises(IndexError):
        both[3]
    chosen = ChosenRows(both, np.array([2, 0]))
    assert [row.ids.tolist() for row in chosen] == [[4, 5, 6], [1, 2]]
    assert lengths_of(chosen).tolist() == [3, 2]
