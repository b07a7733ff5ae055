"""MLPs in parts are the MLPs: the same outputs, the same gradient sums, and less memory at once."""

from __future__ import annotations

import pytest
import torch
from support.layers import batch_of, functions_of, random_ids, relative_error
from support.models import load

from rpft.model import joint_graph, token_chunks
from rpft.model.functions import LayerFunctions
from rpft.model.graph_nodes import flops
from rpft.model.token_chunks import num_parts


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 8 tokens of an MLP that is 96 wide in float32."""
    monkeypatch.setattr(token_chunks, "_MOST_BYTES", 8 * 96 * 4)
    monkeypatch.setattr(token_chunks, "_PART_BYTES", 8 * 96 * 4)


def backward(functions: LayerFunctions, loaded, with_output: bool) -> dict[str, torch.Tensor]:
    batch = batch_of(random_ids(2, 16))
    generator = torch.Generator().manual_seed(1)
    hidden, grad = (torch.randn(2, 16, 64, generator=generator) for _ in range(2))
    weights = loaded.store.layer_weights(1)
    sums = {name: torch.zeros_like(w) for name, w in weights.items()}
    output, kept = functions.keep(1, hidden, weights, batch, None, frozenset(sums), True, with_output)
    grad_hidden = kept.backward(grad, sums)
    assert grad_hidden is not None
    return {**sums, "hidden": grad_hidden} | ({} if output is None else {"output": output.detach()})


def test_few_tokens_are_left_whole_and_many_go_in_parts():
    assert num_parts(32768, 14336, 2) == 1
    assert num_parts(65536, 14336, 2) == 4


@pytest.mark.parametrize("with_output", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *((name, "eager") for name in ("llama", "phi3", "gpt_neox")),
        *((name, "trace") for name in ("gemma3", "gpt2")),
        pytest.param("llama", "compile", marks=pytest.mark.slow),
    ],
)
def test_parts_give_the_outputs_and_gradients_of_the_whole(family, kernels, with_output, checkpoint, monkeypatch):
    loaded = load(checkpoint(family))
    whole = backward(functions_of(loaded), loaded, with_output)
    monkeypatch.setattr(token_chunks, "_MOST_BYTES", 0)
    monkeypatch.setattr(token_chunks, "_PART_BYTES", 8 * 96 * 4)
    functions = functions_of(loaded, kernels=kernels)
    functions.expect(32)
    assert all("forward" in vars(template.mlp) for template in functions._templates)
    parts = backward(functions, loaded, with_output)
    assert parts.keys() >= whole.keys() - {"output"}
    for name in whole.keys() & parts.keys():
        assert relative_error(parts[name], whole[name]) < 1e-5, name


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "opt"])
def test_what_is_no_mlp_of_its_own_is_left_whole(family, checkpoint, small_parts):
    functions = functions_of(load(checkpoint(family)))
    functions.expect(32)
    for template in functions._templates:
        assert not any("forward" in vars(child) for child in template.children())


def test_nothing_is_tried_for_few_tokens(checkpoint, small_parts, monkeypatch):
    monkeypatch.setattr("rpft.model.functions.run_mlps_in_parts", None)
    functions_of(load(checkpoint("llama"))).expect(8)


def test_attention_is_never_cut(checkpoint, small_parts):
    for family in ("llama", "gpt2", "gemma3", "cohere"):
        functions = functions_of(load(checkpoint(family)))
        functions.expect(32)
        for template in functions._templates:
            cut = [name for name, child in template.named_children() if "forward" in vars(child)]
            assert cut == ["mlp"], family


@pytest.mark.parametrize("kernels", ["trace", "compile"])
def test_a_part_is_recomputed_right_before_its_backward_and_added_right_after(kernels, checkpoint, small_parts):
    """So that what one part makes is gone when the next is made."""
    loaded = load(checkpoint("llama"))
    functions = functions_of(loaded, kernels=kernels)
    functions.expect(32)
    batch, hidden = batch_of(random_ids(2, 16)), torch.randn(2, 16, 64)
    block, own, call = functions._block(1, loaded.store.layer_weights(1), batch)
    traced = block._traced(hidden, own, call, None, True)
    assert traced is not None
    nodes = list(traced.joint.backward([]).graph.nodes)
    wide = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].shape[-1:] == (96,)]
    wide = [n for n in wide if n.meta["val"].numel() == 8 * 96]
    place = {node: number for number, node in enumerate(nodes)}
    alive = [
        sum(place[n] <= at < max(map(place.get, n.users)) for n in wide if n.users) for at in range(len(nodes))
    ]
    assert len(wide) > 4 * max(alive) > 0


def test_what_to_keep_of_many_parts_is_chosen_with_each_operation_counted_once(checkpoint, monkeypatch):
    """Counting is what takes long: of 28 parts it was done a million times."""
    counted: list[object] = []
    monkeypatch.setattr(joint_graph, "flops", lambda node: counted.append(node) or flops(node))
    monkeypatch.setattr(token_chunks, "_MOST_BYTES", 0)
    monkeypatch.setattr(token_chunks, "_PART_BYTES", 8 * 96 * 4)
    loaded = load(checkpoint("llama"))
    functions = functions_of(loaded, kernels="trace")
    functions.expect(32)
    backward(functions, loaded, with_output=True)
    products = [node for node in counted if getattr(node, "target", None) is torch.ops.aten.mm.default]
    assert len(products) >= 4 * 3 * 3  # parts, products of each, forward and both gradients
    assert len(counted) == len(set(counted))
