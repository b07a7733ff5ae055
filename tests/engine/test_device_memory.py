"""A cap on a GPU's memory is that of the device made last, on what torch keeps for the whole process."""

from types import SimpleNamespace

import pytest
import torch

from rpft.engine import cuda


@pytest.fixture
def shares(monkeypatch):
    """The share of each GPU's 1,000 bytes that torch was told to keep to, of those that it was told."""
    told = {}
    monkeypatch.setattr(cuda, "_limited", set())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: told.update({index: share})
    )
    return told


def test_a_device_without_a_limit_is_not_held_to_that_of_one_before(shares):
    cuda.limit_memory(0, 250)
    cuda.limit_memory(1, 500)
    cuda.limit_memory(0, None)
    assert shares == {0: 1.0, 1: 0.5}


def test_a_cap_that_somebody_else_has_set_stays(shares):
    cuda.limit_memory(0, None)
    assert shares == {}
    cuda.limit_memory(0, 250)
    cuda.limit_memory(0, None)
    shares[0] = 0.75
    cuda.limit_memory(0, None)
    assert shares == {0: 0.75}


def test_a_limit_above_what_the_device_has_is_all_of_it(shares):
    cuda.limit_memory(0, 4000)
    assert shares == {0: 1.0}
