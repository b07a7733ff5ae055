"""Fixtures that the tests of the engine share, on the CPU pool and on GPUs; a conftest imports what it offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rpft.model import cut
from rpft.model.functions import LayerFunctions
from rpft.model.skeleton import structure
from support import engines
from support.engines import Outcome, run_engine
from support.models import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(family, **config changes) -> folder of a tiny model, made once."""
    made: dict[Any, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = (family, *sorted(changes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            tiny_checkpoint(made[key], family, **changes)
        return made[key]

    return make


@pytest.fixture(autouse=True, scope="module")
def one_thread_a_kernel() -> Iterator[None]:
    """Engine threads run side by side: kernels that each take all cores would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_KNOWN_CHOICES: dict[Any, Any] = {}


@pytest.fixture(autouse=True, scope="module")
def choices_seen_once() -> Iterator[None]:
    """What the routers of alike blocks of equal configs pick is found once: that takes as long as three steps.

    tests/model/test_routing.py, which is about that, does without this.
    """
    known, find = _KNOWN_CHOICES, cut.find_choices

    def seen(block: torch.nn.Module, hidden: torch.Tensor, args: Any, kwargs: Any) -> Any:
        configs = {m.config.to_json_string() for m in block.modules() if hasattr(m, "config")}
        key = (structure(block), frozenset(configs), hidden.shape, hidden.dtype)
        if not configs or key not in known:
            known[key] = find(block, hidden, args, kwargs)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "find_choices", seen)
        yield


class SharedFunctions:
    """``LayerFunctions`` of equal models, devices and kernels are one object, so that a graph is made once."""

    def __init__(self, deterministic: bool = False) -> None:
        self._known: dict[Any, LayerFunctions] = {}
        self._deterministic = deterministic
        self._skeleton: Any = None
        self._handed_out = 0

    def __call__(self, skeleton: Any, device: torch.device, dtype: torch.dtype, kernels: Any) -> LayerFunctions:
        if skeleton is not self._skeleton:
            self._skeleton, self._handed_out = skeleton, 0
        model = skeleton.model
        trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        # By number, since workers that share a device must not share functions.
        packed = skeleton.num_groups, *skeleton.quantized.items()
        key = (model.config.to_json_string(), trained, packed, str(device), dtype, kernels, self._handed_out)
        self._handed_out += 1
        if key not in self._known:
            self._known[key] = LayerFunctions(skeleton, device, dtype, kernels, self._deterministic)
        return self._known[key]


@pytest.fixture(scope="module")
def functions_made_once() -> Iterator[None]:
    """Runs of equal models in a module share graphs. Adapters of equal names in it must have equal settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "LayerFunctions", SharedFunctions())
        yield


def remembered(
    checkpoint: Callable[..., Path], runs: dict[str, tuple[str, dict[str, Any]]], plan: Any, microbatches: int
) -> Callable[[str], Outcome]:
    """of(name) -> the outcome of ``runs[name]``, (family, settings), run once by torch on one worker."""
    known: dict[str, Outcome] = {}

    def of(name: str) -> Outcome:
        if name not in known:
            family, settings = runs[name]
            known[name] = run_engine(checkpoint(family), plan, microbatches=microbatches, **settings)
            assert not any(result.skipped for result in known[name].results)
        return known[name]

    return of
