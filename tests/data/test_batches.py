"""Steps take every item once an epoch, and microbatches keep every label with its row."""

import itertools

import numpy as np
import pytest
import torch

from rpft.data.batches import IGNORE_INDEX, BatchOrder, make_microbatches
from rpft.data.dataset import Dataset
from rpft.data.packing import pack_lengths
from rpft.data.rows import Row


def row(*ids, trained=None):
    flags = [True] * len(ids) if trained is None else trained
    return Row(np.array(ids, dtype=np.int32), np.array([False, *flags[1:]]))


def dataset(*rows):
    return Dataset(list(rows), [])


def order(num_items, items_per_step, num_epochs=1, max_steps=None, seed=0):
    return BatchOrder(num_items, items_per_step, seed, num_epochs, max_steps)


def microbatches(data, groups, micro_batch_size, pad_id=0, multiple=1):
    """Lines as long as they are, or padded to a multiple."""
    return make_microbatches(data, groups, micro_batch_size, pad_id, range(multiple, 999, multiple))


def steps(batches):
    return [batches.items(step) for step in range(batches.num_steps)]


# --- which rows a step takes


@pytest.mark.parametrize(
    ("num_items", "per_step", "epochs", "num_steps", "last"),
    [(10, 2, 3, 15, 2), (5, 2, 3, 8, 1), (3, 8, 1, 1, 3), (10, 4, 1.5, 4, 3), (10, 1, 0.3, 3, 1), (2, 8, 3, 1, 6)],
)
def test_epochs_follow_one_another_and_nothing_is_left_out(num_items, per_step, epochs, num_steps, last):
    taken = steps(order(num_items, per_step, epochs))
    assert len(taken) == num_steps
    assert [len(step) for step in taken[:-1]] == [per_step] * (num_steps - 1)
    assert len(taken[-1]) == last
    stream = list(itertools.chain(*taken))
    for first in range(0, len(stream) - num_items + 1, num_items):
        assert sorted(stream[first : first + num_items]) == list(range(num_items))


def test_every_epoch_has_its_own_order_and_every_seed_too():
    taken = steps(order(50, 50, 2))
    assert taken[0] != taken[1]
    assert taken[0] != list(range(50))
    assert taken[0] != order(50, 50, seed=1).items(0)
    assert order(50, 50, seed=-1).items(0) != taken[0]


def test_a_step_is_a_function_of_seed_and_step_alone():
    whole = steps(order(7, 3, 9, seed=5))
    backwards = order(7, 3, 9, seed=5)
    assert [backwards.items(step) for step in reversed(range(backwards.num_steps))] == whole[::-1]


def test_the_order_of_a_seed_is_pinned():
    # A resumed run depends on it: this may not change with a version of numpy or of the program.
    assert steps(order(6, 3, 2, seed=42)) == [[1, 4, 3], [5, 0, 2], [4, 5, 3], [0, 2, 1]]


def test_max_steps_cuts():
    cut = order(10, 2, 3, max_steps=7)
    assert steps(cut) == steps(order(10, 2, 3))[:7]


def test_max_steps_draws_further_epochs_of_full_steps():
    longer = order(5, 2, 1, max_steps=10)
    assert [len(step) for step in steps(longer)] == [2] * 10
    assert steps(longer)[:2] == steps(order(5, 2, 1))[:2]
    assert sorted(itertools.chain(*steps(longer)[:5])) == sorted([*range(5), *range(5)])


def test_a_step_beyond_the_last_is_refused():
    with pytest.raises(IndexError):
        order(4, 2).items(2)


def test_epochs_are_counted_by_items_seen():
    batches = order(5, 2, 3)
    assert batches.steps_per_epoch == 3
    assert [batches.epoch(step) for step in (0, 1, 7)] == [0.4, 0.8, 3.0]


# --- packs


def test_packing_is_first_fit_decreasing_with_ties_by_index():
    assert pack_lengths([3, 7, 5, 5, 2, 8], 10) == [(5, 4), (1, 0), (2, 3)]


@pytest.mark.parametrize("seed", range(5))
def test_packs_hold_every_row_once_and_are_those_of_the_plain_algorithm(seed):
    lengths = np.random.default_rng(seed).integers(1, 65, size=200).tolist()
    plain: list[list[int]] = []
    for index in sorted(range(200), key=lambda i: (-lengths[i], i)):
        for pack in plain:
            if sum(lengths[i] for i in pack) + lengths[index] <= 64:
                pack.append(index)
                break
        else:
            plain.append([index])
    assert pack_lengths(lengths, 64) == [tuple(pack) for pack in plain]


def test_no_rows_give_no_packs():
    assert pack_lengths([], 8) == []


# --- microbatches


def test_labels_are_shifted_inside_the_row():
    batch = microbatches(dataset(row(5, 6, 7, 8, trained=[False, False, True, True])), [(0,)], 1, 0)[0]
    assert batch.input_ids.tolist() == [[5, 6, 7, 8]]
    assert batch.labels.tolist() == [[-100, 7, 8, -100]]
    assert batch.position_ids is None
    assert (batch.trained_tokens, batch.tokens) == (2, 4)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert IGNORE_INDEX == -100


def test_rows_keep_their_end_label_when_the_pad_id_is_the_end_id():
    end = 9
    batch = microbatches(dataset(row(1, 2, end), row(1, 2, 3, 4, end)), [(0,), (1,)], 2, pad_id=end)[0]
    assert batch.labels.tolist() == [[2, end, -100, -100, -100], [2, 3, 4, end, -100]]
    assert batch.input_ids.tolist() == [[1, 2, end, end, end], [1, 2, 3, 4, end]]
    assert (batch.trained_tokens, batch.tokens) == (6, 8)


def test_microbatches_keep_the_order_and_the_last_may_be_smaller():
    data = dataset(*(row(*range(i, i + 2 + i)) for i in range(5)))
    batches = microbatches(data, [(4,), (0,), (3,), (1,), (2,)], 2, pad_id=0)
    assert [batch.input_ids[:, 0].tolist() for batch in batches] == [[4, 0], [3, 1], [2]]
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(2, 6), (2, 5), (1, 4)]


def test_lines_are_padded_to_the_smallest_length_that_holds_the_longest_of_them():
    data = dataset(row(1, 2, 3), row(1, 2, 3, 4), row(1, 2, 3, 4, 5))
    batches = make_microbatches(data, [(0,), (1,), (2,), (0,), (0,)], 2, 0, pad_lengths=[2, 4, 7])
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(2, 4), (2, 7), (1, 4)]
    assert (batches[2].trained_tokens, batches[2].tokens) == (2, 3)


def test_positions_restart_in_packs_and_no_label_crosses():
    data = dataset(row(1, 2, 3), row(4, 5), row(6))
    packed = microbatches(data, [(0, 1), (2,)], 2, pad_id=0, multiple=4)[0]
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 0, 0, 0, 0, 0, 0, 0]]
    assert packed.labels.tolist() == [[2, 3, -100, 5, -100, -100, -100, -100], [-100] * 8]
    assert packed.position_ids is not None
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert (packed.trained_tokens, packed.tokens) == (3, 6)


def test_all_microbatches_of_a_step_have_positions_when_any_line_is_a_pack():
    data = dataset(row(1, 2), row(3), row(4))
    batches = microbatches(data, [(0,), (1, 2)], 1, 0)
    assert all(batch.position_ids is not None for batch in batches)


def test_trained_ids_are_the_same_packed_and_unpacked():
    rng = np.random.default_rng(0)
    rows = [
        row(*rng.integers(1, 99, size=n).tolist(), trained=(rng.random(n) < 0.5).tolist())
        for n in rng.integers(1, 20, size=40)
    ]
    data = dataset(*rows)

    def trained_ids(groups):
        batches = microbatches(data, groups, 3, pad_id=0)
        labels = [batch.labels[batch.labels != IGNORE_INDEX].tolist() for batch in batches]
        assert [len(ids) for ids in labels] == [batch.trained_tokens for batch in batches]
        return list(itertools.chain(*labels))

    packs = pack_lengths([len(r.ids) for r in rows], 32)
    assert trained_ids(packs) == trained_ids([(index,) for pack in packs for index in pack])
    assert len(trained_ids(packs)) == sum(int(r.trained.sum()) for r in rows)


def test_logits_of_a_packed_row_are_its_logits_alone():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    batch = microbatches(dataset(row(1, 2, 3), row(4, 5)), [(0, 1)], 1, pad_id=0, multiple=8)[0]
    alone = microbatches(dataset(row(4, 5)), [(0,)], 1, pad_id=0, multiple=8)[0]
    with torch.no_grad():
        packed = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[0, 3:5]
        single = model(input_ids=alone.input_ids, use_cache=False).logits[0, :2]
        bare = model(input_ids=torch.tensor([[4, 5]]), use_cache=False).logits[0]
    torch.testing.assert_close(packed, bare, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(single, bare, rtol=1e-5, atol=1e-6)
