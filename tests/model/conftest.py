"""Settings for the tests of the model: tiny tensors are slower on many threads than on one."""

from collections.abc import Iterator

import pytest
import torch
from support.fixtures import checkpoint, choices_seen_once

__all__ = ["checkpoint", "choices_seen_once"]


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
