"""Checkpoints of tiny models, made once a session."""

import pytest
import torch
from support.models import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(family, **config changes) -> folder."""
    made = {}

    def make(family, **changes):
        key = (family, *sorted(changes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            tiny_checkpoint(made[key], family, **changes)
        return made[key]

    return make


@pytest.fixture(autouse=True, scope="module")
def one_thread_a_kernel():
    """Engine threads run side by side: kernels that each take all cores would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
