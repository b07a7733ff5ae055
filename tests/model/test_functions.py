"""Layers called one by one give the logits, loss and gradients of transformers' own model, for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.layers import (
    batch_of,
    forward_and_backward,
    functions_of,
    logits_of,
    random_ids,
    relative_error,
    summed_cross_entropy,
)
from support.models import FAMILIES, MORE_FAMILIES, load, tiny_checkpoint

from rpft.errors import UserError
from rpft.model.device_batch import DeviceBatch
from rpft.model.dropout import mix, placed_dropout
from rpft.model.head import HEAD_CHUNK_TOKENS
from rpft.model.trunk import _CONTEXTS_KEPT, Trunk
from rpft.model.verify import verify_packing

TOLERANCE = 1e-5
PACKING_NEEDS_A_NEWER_TRANSFORMERS = {"falcon", "stablelm", "gptj"}


def compare_with_transformers(folder: Path, theirs: Any, ids: torch.Tensor) -> None:
    theirs.eval()
    loaded = load(folder)
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


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_logits_loss_and_every_gradient_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    compare_with_transformers(tmp_path, tiny_checkpoint(tmp_path, family), random_ids())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5}),
        ("gemma3", {"final_logit_softcapping": 0.5}),
        ("cohere", {"logit_scale": 7.0}),
        ("granite", {"logits_scaling": 0.1}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("gpt_neox", {"tie_word_embeddings": True}),
        ("qwen3_moe", {"output_router_logits": True}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("opt", {"_remove_final_layer_norm": True}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("falcon", {"alibi": True}),
    ],
    ids=str,
)
def test_settings_that_change_head_ties_or_blocks_are_followed(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    compare_with_transformers(tmp_path, tiny_checkpoint(tmp_path, family, **changes), random_ids())


def test_soft_capping_at_a_sharp_cap_really_changes_the_logits(tmp_path: Path) -> None:
    ids = random_ids()
    tiny_checkpoint(tmp_path / "capped", "gemma2", final_logit_softcapping=0.5)
    tiny_checkpoint(tmp_path / "plain", "gemma2", final_logit_softcapping=None)
    capped, plain = (logits_of(load(tmp_path / name), ids) for name in ("capped", "plain"))
    assert plain.abs().max() > 0.5 > capped.abs().max()
    assert relative_error(capped, plain) > 0.01


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_packed_rows_give_the_logits_of_each_alone_or_packing_is_refused(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    loaded = load(checkpoint(family))
    first, second = random_ids(1, 11, seed=1), random_ids(1, 6, seed=2)
    positions = torch.cat([torch.arange(11), torch.arange(6)]).unsqueeze(0)
    packed = logits_of(loaded, torch.cat([first, second], 1), positions)
    alone = torch.cat([logits_of(loaded, first), logits_of(loaded, second)], 1)
    if relative_error(packed, alone) < TOLERANCE:
        verify_packing(loaded.skeleton, torch.float32)
    else:
        older = Version(transformers.__version__) < Version("5.24")
        refused = {"gpt_oss", "opt", "bloom", "qwen3_next"}
        assert family in (refused | PACKING_NEEDS_A_NEWER_TRANSFORMERS if older else refused)
        with pytest.raises(UserError, match=r"data\.packing is not possible with \w+ForCausalLM"):
            verify_packing(loaded.skeleton, torch.float32)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_head_never_holds_more_logits_than_one_chunk_and_chunks_change_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path, family)
    loaded = load(tmp_path)
    batch = batch_of(random_ids())
    whole = forward_and_backward(functions_of(loaded), loaded.store, batch)
    rows: list[int] = []
    head_logits = Trunk.head_logits

    def watched(self: Any, hidden: torch.Tensor, weights: Any) -> torch.Tensor:
        logits = head_logits(self, hidden, weights)
        rows.append(logits.shape[0])
        return logits

    monkeypatch.setattr(Trunk, "head_logits", watched)
    monkeypatch.setitem(HEAD_CHUNK_TOKENS, "eager", 7)
    chunked = forward_and_backward(functions_of(loaded), loaded.store, batch)
    assert rows == [7, 7, 7, 7, 2]
    assert relative_error(chunked.loss, whole.loss) < TOLERANCE
    errors = {n: relative_error(chunked.gradients[n], g) for n, g in whole.gradients.items()}
    assert max(errors.values()) < TOLERANCE, errors


def test_the_loss_without_gradients_is_the_loss_with_them(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "gemma2")
    loaded = load(tmp_path)
    batch, functions, hidden = batch_of(random_ids()), functions_of(loaded), torch.randn(2, 16, 64)
    head = len(loaded.store.layers) - 1
    weights = loaded.store.layer_weights(head)
    with_gradients, _ = functions.head.loss_and_gradients(hidden, weights, batch, {}, None)
    loss = functions.head.loss(hidden, weights, batch)
    assert torch.equal(loss, with_gradients)
    assert not loss.requires_grad


def test_a_microbatch_without_trained_tokens_has_loss_and_gradients_of_zero(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama_tied")
    loaded = load(tmp_path)
    batch = batch_of(random_ids(), skip=15)
    assert batch.targets.numel() == 0
    passed = forward_and_backward(functions_of(loaded), loaded.store, batch)
    assert passed.loss == 0
    assert passed.gradients
    assert not any(gradient.any() for gradient in passed.gradients.values())


def test_only_targets_and_places_given_are_scored(tmp_path: Path) -> None:
    theirs = tiny_checkpoint(tmp_path, "qwen2").eval()
    loaded = load(tmp_path)
    ids = random_ids(2, 5)
    batch = DeviceBatch(ids, None, torch.tensor([7]), torch.tensor([42]))
    expected = -theirs(input_ids=ids).logits[1, 2].log_softmax(-1)[42]
    passed = forward_and_backward(functions_of(loaded), loaded.store, batch)
    assert relative_error(passed.loss, expected) < TOLERANCE


def test_shapes_that_take_turns_get_their_own_masks_and_few_are_remembered(tmp_path: Path) -> None:
    theirs = tiny_checkpoint(tmp_path, "gemma3").eval()
    loaded = load(tmp_path)
    functions = functions_of(loaded)
    for sequence in (9, 16, 9, 12, 11, 10, 8, 16, 9):
        ids = random_ids(1, sequence, seed=sequence)
        ours = logits_of(loaded, ids, functions=functions)
        assert relative_error(ours, theirs(input_ids=ids).logits) < TOLERANCE
    assert len(functions._trunk._contexts) <= _CONTEXTS_KEPT


def test_packs_of_one_shape_that_take_turns_get_their_own_masks(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    loaded = load(tmp_path)
    functions = functions_of(loaded)
    for first in (3, 9, 3, 12, 5, 7, 9, 4):
        parts = [random_ids(1, length, seed=length) for length in (first, 16 - first)]
        positions = torch.cat([torch.arange(first), torch.arange(16 - first)]).unsqueeze(0)
        packed = logits_of(loaded, torch.cat(parts, 1), positions, functions)
        alone = torch.cat([logits_of(loaded, part) for part in parts], 1)
        assert relative_error(packed, alone) < TOLERANCE
        whole = logits_of(loaded, torch.cat(parts, 1), None, functions)
        assert relative_error(packed, whole) > 100 * TOLERANCE


def test_functions_own_no_weight_and_alike_blocks_share_a_template(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "gemma3")
    functions = functions_of(load(tmp_path))
    assert functions._kinds == [0, 1, 0, 1]
    trunk = functions._trunk
    modules = [trunk._front, trunk._back, trunk._causal, *functions._templates]
    assert len(functions._templates) == 2
    assert all(parameter.is_meta for module in modules for parameter in module.parameters())


DROPOUT = {
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "phi3": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attention_dropout": 0.3},
    "llama_tied": {"attention_dropout": 0.3},
    "gpt_oss": {"attention_dropout": 0.3},
    "falcon": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "opt": {"dropout": 0.3, "attention_dropout": 0.3},
}


@pytest.mark.parametrize("family", list(DROPOUT))
def test_dropout_is_drawn_the_same_by_every_worker_and_in_every_recompute(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family, **DROPOUT[family])
    loaded = load(tmp_path)
    batch = batch_of(random_ids())
    passes = []
    for key, noise in ((5, 0), (5, 1), (6, 0)):
        torch.manual_seed(noise)
        passes.append(forward_and_backward(functions_of(loaded, train=True), loaded.store, batch, key))
    one, again, other = passes
    assert torch.equal(one.loss, again.loss)
    assert all(torch.equal(gradient, again.gradients[name]) for name, gradient in one.gradients.items())
    assert not torch.equal(one.loss, other.loss)
    off = forward_and_backward(functions_of(loaded, train=False), loaded.store, batch, 5)
    assert not torch.equal(one.loss, off.loss)


@pytest.mark.parametrize("family", ["gpt2", "phi3", "llama_tied", "falcon"])
def test_gradients_under_dropout_are_those_of_one_pass_that_keeps_its_activations(
    family: str, tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, family, **DROPOUT[family])
    loaded = load(tmp_path)
    functions, batch, key = functions_of(loaded, train=True), batch_of(random_ids()), 11
    recomputed = forward_and_backward(functions, loaded.store, batch, key)

    last = len(loaded.store.layers) - 1
    weights = [loaded.store.layer_weights(layer) for layer in range(last + 1)]
    leaves = {n: w.requires_grad_() for layer in weights[:-1] for n, w in layer.items() if n in loaded.store}
    hidden = None
    with placed_dropout(mix(key, 0)):
        hidden = functions._trunk.embed(weights[0], batch)
    for layer in range(1, last):
        block, own, call = functions._block(layer, weights[layer], batch)
        with placed_dropout(mix(key, layer)):
            hidden = block.run(hidden, own, call)
    loss, grad = functions.head.loss_and_gradients(hidden.detach(), weights[last], batch, {}, key)
    grads = torch.autograd.grad(hidden, list(leaves.values()), grad)
    tied = loaded.store.layer_weights(0).keys() if loaded.store.layers[-1].layout.borrowed_gradients else set()
    assert torch.equal(loss, recomputed.loss)
    for (name, _), gradient in zip(leaves.items(), grads, strict=True):
        if name not in tied:  # the head's part of the gradient is apart
            assert torch.equal(gradient, recomputed.gradients[name]), name
