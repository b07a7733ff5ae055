"""The embedding as a graph gives the bits of the model's own code, of every family, and nothing for the blocks."""

from __future__ import annotations

import logging

import pytest
import torch
from support.layers import batch_of, functions_of, random_ids
from support.models import FAMILIES, MORE_FAMILIES, load


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_the_embedding_as_a_graph_has_the_bits_of_the_models_own_code(family, checkpoint, caplog):
    loaded = load(checkpoint(family), torch.bfloat16)
    weights = loaded.store.layer_weights(0)
    eager, graphs = (functions_of(loaded, torch.bfloat16, kernels=kind) for kind in ("eager", "trace"))
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for ids in (random_ids(), random_ids(3, 8), random_ids(seed=1)):
            for positions in (None, torch.arange(ids.shape[1]).flip(0).expand_as(ids).contiguous()):
                batch = batch_of(ids, positions=positions)
                own = eager.forward(0, None, weights, batch, None)
                assert torch.equal(graphs.forward(0, None, weights, batch, None), own)
    assert not [record for record in caplog.records if "cannot be traced" in record.message]


def test_the_graph_of_an_embedding_holds_next_to_nothing_but_the_look_up(checkpoint, monkeypatch):
    """Rotary tables and masks, which the trunk makes before its first block, take long to issue."""
    loaded = load(checkpoint("gemma2"), torch.bfloat16)  # which scales what it has looked up
    functions, traced = functions_of(loaded, torch.bfloat16, kernels="trace"), []
    trace = functions._kernels.trace
    monkeypatch.setattr(functions._kernels, "trace", lambda *words: traced.append(trace(*words)) or traced[-1])
    functions.forward(0, None, loaded.store.layer_weights(0), batch_of(random_ids()), None)
    (module,) = traced
    calls = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert len(calls) <= 3
    assert "aten.embedding.default" in calls
