"""Views of a stage's tensors lie where the stage's uploads and sums go, and are made once."""

from __future__ import annotations

import torch
from support.adapters import LORA
from support.models import load, tiny_checkpoint

from rpft.engine.places import Places
from rpft.plan.plan import Stage
from rpft.plan.sizes import region_starts


def test_weights_and_sums_lie_in_the_buffers_and_are_made_once_for_each(tmp_path):
    tiny_checkpoint(tmp_path, "llama")
    layouts = [layer.layout for layer in load(tmp_path).store.layers]
    places, stage = Places(layouts, {}), Stage(1, 2)
    num_bytes, num_elements = region_starts(layouts, Stage(1, 3))[3]
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)]
    flat = torch.zeros(num_elements)

    first, second = (places.weights(stage, buffer) for buffer in buffers)
    assert places.weights(Stage(1, 2), buffers[0]) is first
    assert places.sums(stage, flat) is places.sums(stage, flat)
    assert set(first) == {1, 2}
    starts = region_starts(layouts, stage)
    for layer in stage.layers:
        for number, binding in enumerate(layouts[layer].bindings):
            at = starts[layer][0] + binding.byte_offset
            buffers[1][at : at + binding.num_bytes] = number
            assert (second[layer][binding.name].flatten().view(torch.uint8) == number).all()
            assert not first[layer][binding.name].any()
            if binding.grad_offset is not None:
                places.sums(stage, flat)[layer][binding.name].fill_(layer)
    assert flat.sum() == sum(
        layer * binding.num_elements
        for layer in stage.layers
        for binding in layouts[layer].bindings
        if binding.grad_offset is not None
    )


def test_frozen_weights_that_stay_are_found_where_they_stay(tmp_path):
    tiny_checkpoint(tmp_path, "llama")
    layouts = [layer.layout for layer in load(tmp_path, lora=LORA).store.layers]
    stays = torch.ones(layouts[1].frozen_bytes, dtype=torch.uint8)
    stage = Stage(1, 1)
    buffer = torch.zeros(region_starts(layouts, Stage(1, 2))[2][0], dtype=torch.uint8)
    weights = Places(layouts, {1: stays}).weights(stage, buffer)[1]
    for binding in layouts[1].bindings:
        content = weights[binding.name].flatten().view(torch.uint8)
        assert bool(content.any()) is layouts[1].is_frozen(binding)
