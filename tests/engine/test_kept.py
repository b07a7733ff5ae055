"""What a forward keeps for its backward changes no bit, wherever it goes and however much it is."""

import pytest
import torch
from support.engines import plan_of, run_engine

from rpft.errors import UserError
from rpft.model.adapters import LoraSettings
from rpft.model.device_batch import DeviceBatch
from rpft.plan.plan import Plan, Stage

FORWARD, BACKWARD = [(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)]
LORA = LoraSettings(4, 8.0, 0.1, r".*(q_proj|down_proj)")
EVERYWHERE = LoraSettings(4, 8.0, 0.1, "all-linear")
"""As ``LORA``, but with graphs so large that choosing what to keep of them takes seconds."""
PER_TOKEN = [300, 10**6]

pytestmark = pytest.mark.usefixtures("functions_made_once")


def keeping(num_bytes):
    plan = plan_of(FORWARD, BACKWARD, 2, "layer")
    return Plan(plan.forward, plan.backward, 2, "layer", num_bytes)


@pytest.fixture(scope="module")
def nothing_kept(checkpoint):
    known = {}

    def of(family, **settings):
        key = (family, *settings.values())
        if key not in known:
            known[key] = run_engine(checkpoint(family), keeping(0), kernels="trace", **settings)
        return known[key]

    return of


@pytest.mark.parametrize("num_bytes", PER_TOKEN)
@pytest.mark.parametrize(
    ("family", "lora"),
    [("qwen3", None), ("gpt2", None), ("llama", LORA), pytest.param("llama", EVERYWHERE, marks=pytest.mark.slow)],
    ids=str,
)
def test_any_budget_gives_the_bits_of_none(family, lora, num_bytes, checkpoint, nothing_kept):
    outcome = run_engine(
        checkpoint(family), keeping(num_bytes), 3, lora=lora, kernels="trace", delays_seed=num_bytes
    )
    assert outcome.differences(nothing_kept(family, lora=lora)) == []


@pytest.mark.parametrize("update_lag", [0, 1], ids=["sync", "delayed"])
def test_bfloat16_in_several_rounds_too(update_lag, checkpoint, nothing_kept):
    settings = {"dtype": torch.bfloat16, "update_lag": update_lag, "microbatches": 6}
    outcome = run_engine(checkpoint("llama"), keeping(500), 2, kernels="trace", **settings)
    assert outcome.differences(nothing_kept("llama", **settings)) == []


def test_layers_that_torch_runs_itself_keep_nothing_and_are_right(checkpoint, nothing_kept):
    outcome = run_engine(checkpoint("qwen3"), keeping(1000), 2)
    assert outcome.differences(nothing_kept("qwen3", lora=None)) == []


def test_a_larger_budget_really_keeps_more_and_recomputes_less(checkpoint):
    options = []

    def look(engine, optimizer):
        functions = engine._workers[0]._functions
        store = engine._controller._store
        hidden = torch.randn(2, 12, functions.hidden_size)
        ids = torch.zeros(2, 12, dtype=torch.long)
        batch = DeviceBatch(ids, None, ids[0, :0], ids[0, :0])
        options.extend(functions.keep_options(1, hidden, store.layer_weights(1), batch))

    run_engine(checkpoint("qwen3"), keeping(0), steps=1, kernels="trace", before_run=look)
    sizes, shares = zip(*options, strict=True)
    assert list(sizes) == sorted(set(sizes))
    assert list(shares) == sorted(set(shares), reverse=True)
    assert sizes[0] == 0
    assert shares[0] == 1.0
    assert shares[-1] < 0.8


def test_a_plan_that_keeps_needs_recompute_by_layer():
    plan = Plan((Stage(0, 3),), (Stage(4, 5), Stage(0, 3)), 2, "stage", 100)
    with pytest.raises(UserError, match="keep_bytes_per_token"):
        plan.check(6)
