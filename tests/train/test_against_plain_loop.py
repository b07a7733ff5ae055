"""Twenty steps through the command give the losses, norms and weights of plain PyTorch on the same rows."""

import math

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.models import load
from support.plain_loop import plain_loop
from support.recipes import encode_chat, plain_loss_sum, read_jsonl, tiny_tokenizer

from rpft.engine.slot import HostBatch
from rpft.model.adapters import LoraSettings, initialise_lora

STEPS, ROWS_A_STEP, RATE, DECAY, CLIP, SEED = 20, 4, 3e-3, 0.1, 0.5, 42
TRAIN = {"learning_rate": RATE, "max_steps": STEPS, "max_grad_norm": CLIP, "warmup_ratio": 0.0}


def rows_of_steps(made):
    """The rows of each step: epoch after epoch in the order that the seed gives, four at a time."""
    rows = read_jsonl(made.folder / "train.jsonl")
    stream = []
    while len(stream) < STEPS * ROWS_A_STEP:
        words = np.random.Philox(key=np.array([SEED, len(stream) // len(rows)], dtype=np.uint64))
        stream += [rows[i] for i in np.argsort(words.random_raw(len(rows)), kind="stable")]
    return [stream[at : at + ROWS_A_STEP] for at in range(0, STEPS * ROWS_A_STEP, ROWS_A_STEP)]


def batch_of(row):
    """One row alone, unpadded, in the shape that the plain loop takes."""
    ids, labels = encode_chat(tiny_tokenizer(), row)
    targets = torch.tensor([*labels[1:], -100])
    at = (targets >= 0).nonzero().flatten()
    return HostBatch(torch.tensor([ids]), None, at, targets[at])


@pytest.mark.parametrize(("family", "update"), [("llama", "sync"), ("qwen3", "sync"), ("llama", "delayed")])
def test_full_fine_tuning_equals_a_plain_loop(family, update, project):
    made = project(f"plain loop {family}", family, sections={"train": {**TRAIN, "lr_scheduler": "constant"}})
    words = ("engine.workers=2", "engine.num_microbatches=2", "train.micro_batch_size=2")
    outcome = made.train_well(update, *words, "train.gradient_accumulation_steps=2", f"optimizer.update={update}")
    steps = rows_of_steps(made)
    plain = plain_loop(
        made.folder / "base",
        STEPS,
        lambda step: [batch_of(row) for row in steps[step - 1]],
        learning_rate=RATE,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        delayed=update == "delayed",
    )
    sums = [line["loss"] * line["trained_tokens"] for line in outcome.steps]
    assert sums == pytest.approx(plain.loss_sums, rel=1e-5)
    assert [line["grad_norm"] for line in outcome.steps] == pytest.approx(plain.grad_norms, rel=1e-5)
    assert max(plain.grad_norms) > CLIP
    saved = load_file(outcome.folder / "model" / "model.safetensors")
    assert saved.keys() == plain.weights.keys()
    for name, weight in plain.weights.items():
        assert torch.allclose(saved[name], weight, rtol=0, atol=1e-4 * float(weight.abs().max())), name


def cosine_with_warmup(step, warmup):
    if step <= warmup:
        return RATE * step / warmup
    return RATE * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (STEPS + 1 - warmup)))


def test_lora_with_warmup_and_cosine_equals_a_plain_peft_loop(project):
    train = {**TRAIN, "lr_scheduler": "cosine", "warmup_ratio": 0.2}
    made = project("plain loop LoRA", "llama", sections={"train": train, "adapter": {"r": 4, "alpha": 8}})
    outcome = made.train_well("out", "engine.workers=3")
    start = load(made.folder / "base", lora=LoraSettings(4, 8, 0.0, "all-linear"))
    initialise_lora(start.skeleton, start.store, SEED)
    base = type(start.skeleton.model).from_pretrained(made.folder / "base")
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(start.store.tensor(name.removeprefix("base_model.model.")))
    optimizer = torch.optim.AdamW(trained.values(), weight_decay=DECAY)
    tokenizer, losses = tiny_tokenizer(), []
    for step, rows in enumerate(rows_of_steps(made), start=1):
        optimizer.param_groups[0]["lr"] = cosine_with_warmup(step, warmup=4)
        total, count = plain_loss_sum(model, tokenizer, rows)
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        losses.append(float(total.detach()) / count)
    assert outcome.losses == pytest.approx(losses, rel=1e-5)
    rates = [line["learning_rate"] for line in outcome.steps]
    assert rates == pytest.approx([cosine_with_warmup(step, warmup=4) for step in range(1, STEPS + 1)])
