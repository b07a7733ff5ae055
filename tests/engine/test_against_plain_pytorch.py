"""The engine trains like a plain PyTorch loop over the same microbatches.

``eps`` is 1e-6 rather than 1e-8: with less, Adam turns the rounding noise of a gradient that is zero in exact
arithmetic, such as that of GPT-2's key bias, into updates of full size.
"""

import pytest
import torch
import torch.nn.functional as F
from support.engines import plan_of, random_batches, run_engine
from support.plain_loop import plain_loop
from transformers import AutoModelForCausalLM

from rpft.engine.slot import HostBatch
from rpft.optim.adamw import AdamW

STEPS = 20
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
MODELS = {"llama": ("llama", {}), "qwen3, tied": ("qwen3", {}), "gpt2": ("gpt2", NO_DROPOUT)}
PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 3, "stage")
ALGORITHM = AdamW(weight_decay=0.1, eps=1e-6)


def batches_of(step):
    return random_batches(4, step)


@pytest.fixture
def both(checkpoint):
    """both(name, ...) -> (outcome of the engine, outcome of the plain loop)."""

    def run(name, dtype=torch.float32, delayed=False, steps=STEPS, max_grad_norm=1.0):
        family, changes = MODELS[name]
        folder = checkpoint(family, **changes)
        if dtype == torch.bfloat16:  # both loops start from the same weights: a tie is rounded in two ways
            rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            folder = folder / "bfloat16"
            rounded.save_pretrained(folder)
        outcome = run_engine(
            folder,
            PLAN,
            2,
            steps=steps,
            batches_of=batches_of,
            dtype=dtype,
            update_lag=int(delayed),
            algorithm=ALGORITHM,
            learning_rate=1e-3,
            max_grad_norm=max_grad_norm,
        )
        plain = plain_loop(
            folder,
            steps,
            batches_of,
            learning_rate=1e-3,
            weight_decay=ALGORITHM.weight_decay,
            eps=ALGORITHM.eps,
            max_grad_norm=max_grad_norm,
            dtype=dtype,
            delayed=delayed,
        )
        return outcome, plain

    return run


def distances(outcome, plain):
    """For each tensor |ours - theirs| / |theirs|, of masters."""
    return {
        name: float((outcome.store.master(name) - weight).norm() / weight.norm())
        for name, weight in plain.weights.items()
    }


@pytest.mark.parametrize(
    ("name", "delayed"),
    [("llama", False), ("llama", True), ("qwen3, tied", False), ("qwen3, tied", True), ("gpt2", False)],
)
def test_twenty_steps_agree_within_1e_5_and_gradient_norms_within_1e_6(name, delayed, both):
    outcome, plain = both(name, delayed=delayed)
    assert [r.loss_sum for r in outcome.results] == pytest.approx(plain.loss_sums, rel=1e-5)
    assert [r.grad_norm for r in outcome.results] == pytest.approx(plain.grad_norms, rel=1e-6)
    worst = max(distances(outcome, plain).items(), key=lambda item: item[1])
    assert worst[1] < 1e-5, worst


@pytest.mark.parametrize("name", ["llama", "qwen3, tied"])
def test_the_clipped_update_is_that_of_clip_grad_norm(name, both):
    clipped, plain = both(name, steps=1, max_grad_norm=0.05)
    assert clipped.results[0].grad_norm > 0.5
    assert clipped.results[0].grad_norm == pytest.approx(plain.grad_norms[0], rel=1e-6)
    for tensor, weight in plain.weights.items():
        ours = clipped.store.master(tensor)
        torch.testing.assert_close(ours, weight, rtol=1e-6, atol=1e-6 * float(weight.abs().max()), msg=tensor)
    unclipped, _ = both(name, steps=1, max_grad_norm=1e9)
    ratio = clipped.store.layers[1].exp_avg.norm() / unclipped.store.layers[1].exp_avg.norm()
    assert float(ratio) == pytest.approx(0.05 / plain.grad_norms[0], rel=1e-5)


def test_delayed_is_another_trajectory_than_sync(both):
    """Else the agreement of the delayed mode would say nothing."""
    sync, _ = both("llama", steps=3)
    delayed, plain = both("llama", steps=3, delayed=True)
    losses = [r.loss_sum for r in delayed.results]
    assert losses[0] == sync.results[0].loss_sum
    assert losses[1:] == pytest.approx(plain.loss_sums[1:], rel=1e-6)
    assert losses[1:] != pytest.approx([r.loss_sum for r in sync.results[1:]], rel=1e-4)


def test_delayed_applies_the_last_gradient_at_the_flush(both, checkpoint):
    delayed, plain = both("llama", steps=1, delayed=True)
    assert max(distances(delayed, plain).values()) < 1e-5
    before = AutoModelForCausalLM.from_pretrained(checkpoint("llama")).get_parameter("lm_head.weight")
    assert not torch.equal(delayed.store.tensor("lm_head.weight"), before)


@pytest.mark.parametrize(("name", "delayed"), [("llama", False), ("qwen3, tied", True), ("gpt2", False)])
def test_bf16_follows_a_loop_in_bf16_with_fp32_masters(name, delayed, both):
    outcome, plain = both(name, steps=10, dtype=torch.bfloat16, delayed=delayed)
    assert [r.loss_sum for r in outcome.results] == pytest.approx(plain.loss_sums, rel=1e-3)
    assert outcome.results[0].grad_norm == pytest.approx(plain.grad_norms[0], rel=1e-4)
    assert [r.grad_norm for r in outcome.results] == pytest.approx(plain.grad_norms, rel=0.03)
    matrices = {n: d for n, d in distances(outcome, plain).items() if not n.endswith("bias")}
    assert max(matrices.values()) < 0.02, matrices
    for layer in outcome.store.layers:
        assert layer.master_is_split == (layer.layout.num_trained > 0)
        torch.testing.assert_close(layer.working.float(), layer.master_values(), rtol=2**-8, atol=0)


def one_and_nine(checkpoint):
    """Two rows as two microbatches and as one, with 1 and 9 trained tokens, and the mean loss of each row."""
    folder = checkpoint("llama")
    ids = torch.randint(3, 320, (2, 12), generator=torch.Generator().manual_seed(7))
    places = torch.tensor([5]), torch.arange(1, 10)
    targets = [ids[row, at + 1] for row, at in enumerate(places)]
    apart = [HostBatch(ids[r : r + 1], None, places[r], targets[r]) for r in range(2)]
    together = [HostBatch(ids, None, torch.cat([places[0], 12 + places[1]]), torch.cat(targets))]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=ids).logits
    means = [float(F.cross_entropy(logits[r, at], targets[r])) for r, at in enumerate(places)]
    return folder, apart, together, means


def test_microbatches_of_1_and_9_tokens_weigh_by_their_tokens(checkpoint):
    folder, apart, together, (a, b) = one_and_nine(checkpoint)
    outcomes = [
        run_engine(folder, PLAN, 2, steps=2, batches_of=lambda step, batches=batches: batches)
        for batches in (apart, together)
    ]
    first = outcomes[0].results[0]
    assert first.loss_sum / 10 == pytest.approx((a + 9 * b) / 10, rel=1e-6)
    assert first.loss_sum / 10 != pytest.approx((a + b) / 2, rel=1e-3)
    for split, whole in zip(outcomes[0].results, outcomes[1].results, strict=True):
        assert split.loss_sum == pytest.approx(whole.loss_sum, rel=1e-5)
        assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)


def test_a_microbatch_without_a_trained_token_adds_nothing(checkpoint):
    nothing = torch.zeros(0, dtype=torch.long)
    batches = random_batches(2, seed=1)
    empty = HostBatch(batches[0].input_ids, None, nothing, nothing)
    with_it, without = (
        run_engine(checkpoint("qwen3"), PLAN, 2, batches_of=lambda step, given=given: given)
        for given in ([batches[0], empty, batches[1]], batches)
    )
    assert with_it.results == without.results
    assert with_it.eval_loss_sums == without.eval_loss_sums
