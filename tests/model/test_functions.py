"""Layers called one by one give the logits, loss and gradients of transformers' own model, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import FAMILIES, MORE_FAMILIES, load, tiny_checkpoint

import rpft.model.functions as functions_module
from model.through_layers import (
    batch_of,
    forward_and_backward,
    functions_of,
    logits_of,
    random_ids,
    relative_error,
    summed_cross_entropy,
)
from rpft.model.functions import DeviceBatch

TOLERANCE = 1e-5


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_logits_loss_and_every_gradient_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = tiny_checkpoint(tmp_path, family).eval()
    loaded = load(tmp_path)
    ids = random_ids()
    batch = batch_of(ids, skip=3)

    expected = theirs(input_ids=ids).logits
    loss = summed_cross_entropy(expected, batch)
    loss.backward()
    passed = forward_and_backward(functions_of(loaded), loaded.store, batch)

    assert relative_error(logits_of(loaded, ids), expected) < TOLERANCE
    assert relative_error(passed.loss, loss) < TOLERANCE
    parameters = {name: p for name, p in theirs.named_parameters() if p.grad is not None}
    assert set(passed.gradients) == set(parameters)
    errors = {name: relative_error(passed.gradients[name], p.grad) for name, p in parameters.items()}
    assert max(errors.values()) < TOLERANCE, errors
