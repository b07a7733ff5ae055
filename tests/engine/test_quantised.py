"""LoRA over a quantised base trains like plain peft over the weights that the library makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import peft_change
from support.engines import Outcome, plan_of, random_batches, run_engine
from support.models import load
from support.plain_loop import PlainOutcome, plain_loop
from support.quantised import as_dequantised, quantised_store, write_quantised

from rpft.errors import UserError
from rpft.model.adapters import LoraSettings
from rpft.model.quant import QuantKind
from rpft.model.quant_weight import open_weights
from rpft.optim.adamw import AdamW

LORA = LoraSettings(4, 8.0, 0.0, ["q_proj", "k_proj", "v_proj", "o_proj"])
PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 4, "stage")
ALGORITHM = AdamW(weight_decay=0.1, eps=1e-6)
SEED = 3
FAMILIES = ("llama", "qwen3", "mixtral")


def batches_of(step: int) -> list[Any]:
    return random_batches(4, step)


def plain(folder: Path, dtype: torch.dtype, steps: int, prepare: Callable[[Any], Any]) -> PlainOutcome:
    return plain_loop(
        folder,
        steps,
        batches_of,
        learning_rate=1e-2,
        weight_decay=ALGORITHM.weight_decay,
        eps=ALGORITHM.eps,
        max_grad_norm=1.0,
        dtype=dtype,
        change=peft_change(folder, LORA, SEED, prepare, dtype),
    )


def engine(folder: Path, kind: QuantKind, workers: int = 2, **settings: Any) -> Outcome:
    settings = {"batches_of": batches_of, "algorithm": ALGORITHM, "lora": LORA, "seed": SEED, **settings}
    return run_engine(folder, PLAN, workers, quantize=kind, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_over_nf4_are_those_of_plain_peft(family: str, checkpoint: Any) -> None:
    folder = checkpoint(family)
    ours = engine(folder, "nf4", steps=3)
    theirs = plain(folder, torch.float32, 3, lambda model: as_dequantised(model, "nf4"))
    assert [r.loss_sum for r in ours.results] == pytest.approx(theirs.loss_sums, rel=1e-5)
    assert [r.grad_norm for r in ours.results] == pytest.approx(theirs.grad_norms, rel=1e-4)
    for name, weight in theirs.weights.items():
        master = ours.store.master(name.removeprefix("base_model.model."))
        assert float((master - weight).norm() / weight.norm()) < 1e-4, name


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_steps_over_int8_and_fp8_are_those_of_plain_peft(kind: QuantKind, checkpoint: Any) -> None:
    folder = checkpoint("llama")
    ours = engine(folder, kind, steps=2)
    theirs = plain(folder, torch.float32, 2, lambda model: as_dequantised(model, kind))
    assert [r.loss_sum for r in ours.results] == pytest.approx(theirs.loss_sums, rel=1e-5)
    assert [r.grad_norm for r in ours.results] == pytest.approx(theirs.grad_norms, rel=1e-4)


@pytest.mark.parametrize("family", ["mixtral"])
def test_in_bfloat16_they_are_the_same_but_for_rounding(family: str, checkpoint: Any) -> None:
    folder = checkpoint(family)
    ours = engine(folder, "nf4", steps=2, dtype=torch.bfloat16)
    theirs = plain(folder, torch.bfloat16, 2, lambda model: as_dequantised(model, "nf4"))
    assert [r.loss_sum for r in ours.results] == pytest.approx(theirs.loss_sums, rel=1e-3)
    assert ours.results[0].grad_norm == pytest.approx(theirs.grad_norms[0], rel=0.02)


def test_the_loss_is_not_that_of_the_unquantised_model(checkpoint: Any) -> None:
    """Else the tests above would say nothing."""
    folder = checkpoint("llama")
    unquantised = plain(folder, torch.float32, 1, lambda model: None).loss_sums[0]
    for kind in ("nf4", "int8", "fp8"):
        loss = engine(folder, kind, steps=1).results[0].loss_sum
        assert loss == pytest.approx(unquantised, rel=1e-2)
        assert loss != pytest.approx(unquantised, rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_workers_and_delays_change_no_bit(family: str, checkpoint: Any) -> None:
    folder = checkpoint(family)
    one = engine(folder, "nf4", workers=1, steps=1)
    assert engine(folder, "nf4", workers=2, steps=1, delays_seed=5).differences(one) == []


SLOW_PAIRS = [(family, kind) for family in FAMILIES for kind in ("nf4", "int8", "fp8")][1:]


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "nf4"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_PAIRS)]
)
def test_traced_graphs_give_the_bits_of_eager(family: str, kind: QuantKind, checkpoint: Any) -> None:
    folder = checkpoint(family)
    eager = engine(folder, kind, steps=1)
    assert engine(folder, kind, steps=1, kernels="trace").differences(eager) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_compiled_graphs_differ_by_rounding(kind: QuantKind, checkpoint: Any) -> None:
    folder = checkpoint("llama")
    eager, compiled = (engine(folder, kind, steps=2, kernels=kernels) for kernels in ("eager", "compile"))
    for ours, theirs in zip(compiled.results, eager.results, strict=True):
        assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)


@pytest.mark.parametrize("family", ["mixtral"])
def test_adapters_of_every_linear_layer_and_of_experts_train(family: str, checkpoint: Any) -> None:
    outcome = engine(checkpoint(family), "nf4", steps=2, lora=LoraSettings(4, 8, 0.0, "all-linear"))
    assert outcome.eval_loss_sums[-1] < 249 * 5.7
    assert all(result.grad_norm > 0.1 for result in outcome.results)


# -- checkpoints that are quantised already ------------------------------------------------------------------


@pytest.mark.parametrize("nested", [True, False])
def test_a_checkpoint_of_bitsandbytes_is_taken_as_it_is(nested: bool, checkpoint: Any, tmp_path: Path) -> None:
    before = write_quantised(checkpoint("llama"), tmp_path / "nf4", nested)
    after = quantised_store(tmp_path / "nf4", "nf4")
    assert list(after.names()) == list(before.names())
    for name in after.names():
        if "lora" not in name:
            assert torch.equal(after.tensor(name), before.tensor(name)), name


def test_what_such_a_checkpoint_left_as_it_was_stays_so(checkpoint: Any, tmp_path: Path) -> None:
    write_quantised(checkpoint("llama"), tmp_path / "nf4", True, skip="layers.1.mlp.down_proj")
    store = quantised_store(tmp_path / "nf4", "nf4")
    skipped = "model.layers.1.mlp.down_proj.weight"
    assert store.packed(skipped) is None
    assert torch.equal(store.tensor(skipped), load_file(checkpoint("llama") / "model.safetensors")[skipped])
    assert store.packed("model.layers.2.mlp.down_proj.weight") is not None
    outcomes = [engine(tmp_path / "nf4", "nf4", workers, steps=1) for workers in (1, 2)]
    assert outcomes[0].differences(outcomes[1]) == []


def test_an_unquantised_run_of_it_has_the_dequantised_weights(checkpoint: Any, tmp_path: Path) -> None:
    before = write_quantised(checkpoint("llama"), tmp_path / "nf4", True)
    store = load(tmp_path / "nf4", torch.float32, LORA).store
    for layer in before.layers:
        for name, packed in layer.layout.packed.items():
            weights, _ = open_weights({name + s: p for s, p in before.parts(name).items()}, {name: packed})
            assert torch.equal(store.tensor(name), weights[name].dequantized())  # type: ignore[attr-defined]


def test_other_quantisations_and_torn_states_are_refused_by_name(checkpoint: Any, tmp_path: Path) -> None:
    write_quantised(checkpoint("llama"), tmp_path / "nf4", True)
    file = tmp_path / "nf4" / "model.safetensors"
    tensors = load_file(file)
    key = next(name for name in tensors if "quant_state" in name)
    save_file({**tensors, key: tensors[key][:-9].clone()}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.safetensors: .*quant_state.* does not describe"):
        quantised_store(tmp_path / "nf4", "nf4")
    shorter = bytes(tensors[key].tolist()).replace(b'"blocksize": 64', b'"blocksize": 32')
    save_file({**tensors, key: torch.tensor(list(shorter), dtype=torch.uint8)}, file, {"format": "pt"})
    with pytest.raises(UserError, match="in blocks of 32, nested; the model asks for"):
        quantised_store(tmp_path / "nf4", "nf4")


@pytest.mark.parametrize("family", ["gpt2"])
def test_a_family_without_linear_layers_is_refused_by_name(family: str, checkpoint: Any) -> None:
    with pytest.raises(UserError, match=r"no block of GPT2LMHeadModel has a frozen linear layer"):
        engine(checkpoint(family), "nf4", lora=LoraSettings(4, 8, 0.0, ["c_attn"]))
