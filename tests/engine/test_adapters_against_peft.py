"""Every kind of adapter, trained by the engine on one and two workers, is what a plain peft loop makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from support.engines import Outcome, plan_of, random_batches, run_engine
from support.models import load
from transformers import AutoModelForCausalLM

from rpft.model.adapters import LoraSettings, initialise_lora
from rpft.optim.adamw import AdamW

STEPS, RATE, DECAY, CLIP, SEED, MICROBATCHES = 3, 1e-2, 0.1, 1.0, 3, 2
PLAN = plan_of([(0, 1), (2, 2)], [(3, 5), (2, 2), (0, 1)], MICROBATCHES, "stage")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def settings(targets: Any = "all-linear", **more: Any) -> LoraSettings:
    return LoraSettings(r=4, alpha=8.0, dropout=0.0, target_modules=targets, **more)


KINDS: dict[str, tuple[str, LoraSettings]] = {
    "LoRA by a regular expression": ("llama", settings(r".*layers\.[13]\.(self_attn|mlp)\..*_proj")),
    "rsLoRA": ("llama", settings(rslora=True)),
    "DoRA": ("llama", settings(["q_proj", "down_proj", "lm_head"], dora=True)),
    "DoRA of transposed weights": ("gpt2", settings(["c_attn", "c_fc"], dora=True)),
    "embedding and head": ("llama", settings(["embed_tokens", "lm_head", "o_proj"])),
    "embedding and head trained whole": (
        "llama",
        settings(["q_proj"], modules_to_save=("embed_tokens", "lm_head")),
    ),
    "tied embedding trained whole": ("llama_tied", settings(["q_proj"], modules_to_save=("embed_tokens",))),
    "norms trained whole": ("qwen3", settings(["q_proj"], modules_to_save=("norm", "input_layernorm"))),
    "fused experts alone": ("qwen3_moe", settings([], target_parameters=EXPERTS)),
    "experts by their old names, and the router": ("mixtral", settings(["w1", "w2", "w3", "gate"])),
}

QUICK = ("DoRA", "embedding and head", "tied embedding trained whole", "fused experts alone")
ALL_KINDS = [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in KINDS]
NO_DROPOUT = {"gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}}


@dataclass
class Plain:
    """What the loop leaves: loss sums, gradient norms, and trained weights by the names of the host store."""

    loss_sums: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


def peft_loop(folder: Path, lora: LoraSettings, decay: float = DECAY, fast_ratio: float = 1.0) -> Plain:
    """Trains ``lora`` in plain peft, from the weights that rpft starts with."""
    start = load(folder, lora=lora)
    initialise_lora(start.skeleton, start.store, SEED)
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = LoraConfig(
        r=lora.r,
        lora_alpha=int(lora.alpha),
        target_modules=lora.target_modules,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        modules_to_save=list(lora.modules_to_save) or None,
        target_parameters=list(lora.target_parameters) or None,
        ensure_weight_tying=base.config.tie_word_embeddings and bool(lora.modules_to_save),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config).eval()
    trained = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters() if p.requires_grad}
    assert set(trained) == {
        s.name for layer in start.store.layers for s, _ in layer.layout.own.values() if s.trained
    }
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_A" in name or "lora_embedding" in name:  # drawn at random
                parameter.copy_(start.store.tensor(name))
            else:
                assert torch.allclose(parameter, start.store.tensor(name), rtol=1e-6), name
    if fast_ratio == 1.0:
        groups = [
            {"params": [p for p in trained.values() if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in trained.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer: Any = torch.optim.AdamW(groups, lr=RATE)
    else:
        optimizer = create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=fast_ratio, loraplus_weight_decay=decay
        )
    sums, norms = [], []
    for step in range(1, STEPS + 1):
        total, count = torch.zeros(()), 0
        for batch in random_batches(MICROBATCHES, step):
            logits = model(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.trained_at]
            total = total + F.cross_entropy(logits, batch.targets, reduction="sum")
            count += batch.targets.numel()
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        optimizer.step()
        sums.append(float(total.detach()))
    return Plain(sums, norms, {name: p.detach() for name, p in trained.items()})


def train(
    folder: Path,
    lora: LoraSettings,
    workers: int,
    decay: float = DECAY,
    fast_ratio: float = 1.0,
    kernels: Any = "eager",
) -> Outcome:
    return run_engine(
        folder,
        PLAN,
        workers,
        steps=STEPS,
        microbatches=MICROBATCHES,
        lora=lora,
        learning_rate=RATE,
        max_grad_norm=CLIP,
        algorithm=AdamW(weight_decay=decay, fast_ratio=fast_ratio),
        seed=SEED,
        kernels=kernels,
    )


def assert_equal(outcome: Outcome, plain: Plain) -> None:
    assert [r.loss_sum for r in outcome.results] == pytest.approx(plain.loss_sums, rel=1e-5)
    assert [r.grad_norm for r in outcome.results] == pytest.approx(plain.grad_norms, rel=1e-5)
    for name, weight in plain.weights.items():
        difference = (outcome.store.master(name) - weight).abs().max().item()
        # Adam divides a small gradient, and its rounding, by its own size.
        assert difference <= 1e-3 * weight.abs().max().item(), name


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_an_adapter_equals_a_plain_peft_loop_on_one_and_two_workers(
    kind: str, checkpoint: Callable[..., Path]
) -> None:
    family, lora = KINDS[kind]
    folder = checkpoint(family, **NO_DROPOUT.get(family, {}))
    plain = peft_loop(folder, lora)
    one = train(folder, lora, workers=1)
    assert_equal(one, plain)
    assert not one.differences(train(folder, lora, workers=2))


@pytest.mark.parametrize(
    ("lora", "decay"),
    [
        (settings(), DECAY),
        # peft decays a Llama's norms, rpft no vector
        pytest.param(settings(["q_proj"], modules_to_save=("norm",)), 0.0, marks=pytest.mark.slow),
    ],
    ids=["factors", "vectors"],
)
def test_lora_plus_equals_peft_s_own_optimizer(
    lora: LoraSettings, decay: float, checkpoint: Callable[..., Path]
) -> None:
    folder = checkpoint("llama")
    plain = peft_loop(folder, lora, decay, fast_ratio=4.0)
    assert_equal(train(folder, lora, 2, decay, fast_ratio=4.0), plain)
    slow = train(folder, lora, 1, decay)
    assert [r.loss_sum for r in slow.results] != pytest.approx(plain.loss_sums, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DoRA", "embedding and head trained whole", "norms trained whole"])
def test_layers_as_graphs_train_the_same_adapter(kind: str, checkpoint: Callable[..., Path]) -> None:
    family, lora = KINDS[kind]
    eager, graphs = (train(checkpoint(family), lora, 1, kernels=kernels) for kernels in ("eager", "trace"))
    assert [r.loss_sum for r in graphs.results] == pytest.approx([r.loss_sum for r in eager.results], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_only_trained_parameters_have_gradients_masters_and_moments(
    kind: str, checkpoint: Callable[..., Path]
) -> None:
    family, lora = KINDS[kind]
    for layer in load(checkpoint(family), lora=lora).store.layers:
        specs = [spec for spec, _ in layer.layout.own.values() if spec.trained]
        most = sum(spec.num_elements + 255 for spec in specs)  # each starts at a multiple of 256
        assert layer.exp_avg.numel() == layer.exp_avg_sq.numel() == layer.layout.num_trained <= most
        borrowed = sum(piece.length + 127 for piece in layer.layout.borrowed_gradients)
        assert layer.gradient.numel() <= most + borrowed
        assert layer.master.numel() <= most
