"""Groups of experts on a GPU make what whole blocks make, no plan changes a bit, and a small card will do."""

from __future__ import annotations

import pytest
import torch
from support.adapters import randomise
from support.engines import plan_of, run_engine
from support.layers import batch_of, put_together, random_ids, relative_error
from support.models import load
from support.recipes import make_project

from rpft.model.adapters import LoraSettings, initialise_lora
from rpft.model.functions import LayerFunctions
from rpft.recipe.load import load_recipe
from rpft.train.prepare import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
LORA = LoraSettings(4, 8.0, 0.0, ["q_proj", "o_proj", "kv_b_proj"])
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ON_EXPERTS = LoraSettings(4, 8.0, 0.0, ["q_proj"], target_parameters=STACKS)
EXPERTS = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts", "deepseek_v3": "n_routed_experts"}
LIMIT_MIB = 384


@pytest.mark.parametrize("kernels", ["eager", "trace", "compile"])
@pytest.mark.parametrize(
    ("family", "lora"),
    [*((family, LORA) for family in EXPERTS), ("gpt_oss", None), ("qwen3_moe", None), ("qwen3_moe", ON_EXPERTS)],
    ids=[*EXPERTS, "gpt_oss in full", "qwen3_moe in full", "adapters of experts"],
)
def test_groups_make_what_whole_blocks_make(kernels, family, lora, checkpoint):
    """As near to the exact gradient as bfloat16 lets the whole be."""
    device, batch = torch.device("cuda", 0), batch_of(random_ids(2, 128).to("cuda:0"))
    folder = checkpoint(family, **{EXPERTS[family]: 8, "num_experts_per_tok": 4})
    grad = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(1)).to(device)

    def gradients(groups, dtype, kind):
        loaded = load(folder, dtype, lora, None, groups)
        if lora is not None:
            initialise_lora(loaded.skeleton, loaded.store, 3)
            randomise(loaded)
        functions = LayerFunctions(loaded.skeleton, device, dtype, kind)
        layouts = [layer.layout for layer in loaded.store.layers]
        hidden, kept, found = None, [], {}
        for layout in layouts[:-1]:
            weights = {n: w.to(device).data for n, w in loaded.store.layer_weights(layout.layer).items()}
            bindings = [b for b in layout.bindings if b.grad_offset is not None]
            sums = {b.name: torch.zeros(b.shape, device=device) for b in bindings}
            if layout.layer == 0:  # what trains it is not looked at
                hidden = functions.forward(0, None, weights, batch, None)
                continue
            hidden, left = functions.keep(layout.layer, hidden, weights, batch, None, frozenset(sums), True, True)
            hidden = hidden.detach()
            kept.append((left, sums))
            found |= sums
        store, others = loaded.store, [layouts[0], layouts[-1]]
        back = grad.to(dtype)
        for left, sums in reversed(kept):
            back = left.backward(back, sums)
        found |= {b.name: back.new_zeros(1) for x in others for b in x.bindings}
        ours = put_together(found, store)
        return torch.cat([*(ours[name].flatten() for name in sorted(ours)), back.flatten().float()])

    exact = gradients(1, torch.float32, "eager")
    whole, cut = (gradients(groups, BF16, kernels) for groups in (1, 4))
    assert relative_error(cut, exact) < max(0.03, 2 * relative_error(whole, exact))


@pytest.mark.parametrize("kernels", ["eager", "trace", "compile"])
@pytest.mark.parametrize(
    "trained",
    [{"lora": LORA, "quantize": "nf4"}, {"lora": None}, {"lora": ON_EXPERTS, "quantize": "nf4"}],
    ids=["adapters of attention", "in full", "adapters of experts"],
)
def test_no_plan_or_timing_changes_a_bit(kernels, trained, checkpoint, make_device):
    settings = {"dtype": BF16, "kernels": kernels, "make_device": make_device, "steps": 2, "groups": 2, **trained}
    whole = plan_of([(0, 12)], [(13, 13), (0, 12)], 4, "layer")
    split = plan_of([(0, 2), (3, 5), (6, 9)], [(10, 13), (8, 9), (3, 7), (0, 2)], 4, "layer")
    one = run_engine(checkpoint("qwen3_moe"), whole, 1, **settings)
    # Compiled, a forward and its recompute may round differently, and so may plans.
    other = whole if kernels == "compile" else split
    assert run_engine(checkpoint("qwen3_moe"), other, 2, delays_seed=1, **settings).differences(one) == []


@pytest.mark.parametrize(
    ("limit_mib", "adapter"),
    [(LIMIT_MIB, {"r": 4, "target_modules": ["q_proj"]}), (2 * LIMIT_MIB, None)],
    ids=["adapters", "in full"],
)
def test_a_run_that_fits_in_groups_only_takes_no_more_than_it_may(limit_mib, adapter, tmp_path):
    """Two buffers for a block, and in full two for its gradient, would take the whole limit."""
    sections = {
        **({} if adapter is None else {"adapter": adapter}),
        "model": {"dtype": "bfloat16"},
        "engine": {"device": "cuda", "kernels": "eager"},
    }
    sizes = {"num_experts": 64, "moe_intermediate_size": 8192, "num_hidden_layers": 2}
    made = make_project(tmp_path, "qwen3_moe", sections=sections, **sizes)
    limit = f"engine.vram_limit={limit_mib}MiB"
    prepared = prepare(load_recipe(made.recipe, [limit]))
    assert prepared.skeleton.num_groups == 2 if adapter else prepared.skeleton.num_groups >= 2
    del prepared
    cut = made.train_well("cut", limit)
    assert max(device["peak_bytes"] for line in cut.steps for device in line["devices"]) <= limit_mib << 20
    whole = made.train_well("whole", "engine.vram_limit=8GiB")
    assert cut.losses == pytest.approx(whole.losses, rel=0.02)
