"""Packed rows by variable lengths are packed rows with masks, with any kernel that attends as it is told to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.layers import functions_of, logits_of, random_ids
from support.models import load

from rpft.model import packed_attention
from rpft.model.device_batch import DeviceBatch
from rpft.model.packed_attention import NAME, row_starts
from rpft.model.packed_trial import adopt

LENGTHS = ((9, 4, 3), (2, 14))
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in line]) for line in LENGTHS])


def attend_by_rows(query, key, value, starts, longest, scale, window):
    """What the kernel does, in float32 on the CPU, from the starts alone."""
    assert longest in (16, 64)
    at = torch.arange(len(query))
    row = torch.searchsorted(starts.long(), at, right=True)
    seen = (row[:, None] == row[None, :]) & (at[None, :] <= at[:, None])
    if window is not None:
        seen &= at[:, None] - at[None, :] < window
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True).transpose(0, 1)


@pytest.fixture
def reference_kernel(monkeypatch):
    packed_attention.register()
    monkeypatch.setattr(packed_attention, "varlen_attention", attend_by_rows)


def packed_batch(ids):
    nothing = torch.empty(0, dtype=torch.long)
    return DeviceBatch(ids, POSITIONS, nothing, nothing, row_starts(POSITIONS))


def test_rows_start_where_positions_do_and_the_rest_is_empty_rows():
    assert row_starts(POSITIONS).tolist() == [0, 9, 13, 16, 18, 32, 32, 32, 32]
    assert row_starts(POSITIONS).dtype == torch.int32


def test_the_number_of_starts_is_the_same_for_most_microbatches():
    many = torch.arange(4096).remainder(100).view(2, -1)
    few = torch.arange(4096).view(2, -1).remainder(2048)
    assert len(row_starts(few)) == 33
    assert len(row_starts(many)) == 65


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "cohere", "qwen3_moe"])
def test_blocks_give_the_same_by_starts_as_by_masks(family, checkpoint, reference_kernel):
    functions = functions_of(load(checkpoint(family)))
    batch = packed_batch(random_ids())
    masked = functions.sample_blocks(batch)
    assert adopt(functions) is None
    assert functions.attention == NAME
    assert not any(t.dim() > 3 for call in functions.context(batch) for t in call.tensors), "a mask was made"
    for a, b in zip(functions.sample_blocks(batch), masked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_lines_of_one_row_are_as_before(family, checkpoint, reference_kernel):
    loaded = load(checkpoint(family))
    functions, ids = functions_of(loaded), random_ids()
    before = logits_of(loaded, ids, functions=functions)
    assert adopt(functions) is None
    torch.testing.assert_close(logits_of(loaded, ids, functions=functions), before, rtol=0, atol=0)


def test_a_kernel_that_lets_rows_see_each_other_is_not_used(checkpoint, monkeypatch):
    def attend_to_all(query, key, value, starts, longest, scale, window):
        one_row = torch.full_like(starts, len(query))
        one_row[0] = 0
        return attend_by_rows(query, key, value, one_row, longest, scale, window)

    packed_attention.register()
    monkeypatch.setattr(packed_attention, "varlen_attention", attend_to_all)
    functions = functions_of(load(checkpoint("llama")))
    assert "kind 0" in str(adopt(functions))
    assert functions.attention == "sdpa"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_where_there_is_no_such_kernel_masks_are_kept(family, checkpoint):
    functions = functions_of(load(checkpoint(family)))
    batch, before = packed_batch(random_ids()), functions.attention
    masked = functions.sample_blocks(batch)
    assert adopt(functions)
    assert functions.attention == before
    for a, b in zip(functions.sample_blocks(batch), masked, strict=True):
        assert torch.equal(a, b)
