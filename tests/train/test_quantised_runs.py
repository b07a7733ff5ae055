"""`rpft train` and `rpft plan` with a quantised base: bills, checkpoints, what is refused."""

import json

import pytest
from support.recipes import crash_at, run_rpft

import rpft.train.machinery
from rpft.plan.estimate import estimated_bytes
from rpft.recipe.load import load_recipe
from rpft.train.prepare import prepare

LORA = {"adapter": {"r": 4}}
NF4 = "model.quantize=nf4"


@pytest.fixture(scope="module")
def made(project):
    return project("quantised", "llama", sections=LORA)


@pytest.fixture(scope="module")
def unbroken(made):
    return made.train_well("unbroken", NF4, "checkpoint.every_steps=2")


def test_four_steps_equal_two_steps_a_save_and_two_steps(made, unbroken, monkeypatch):
    with monkeypatch.context() as patch:
        crash_at(3, patch)
        assert made.train("broken", NF4, "checkpoint.every_steps=2").code == 1
    resumed = made.train_well("broken", NF4, "checkpoint.every_steps=2", "--resume", "engine.workers=2")
    assert resumed.numbers == unbroken.numbers
    assert resumed.result == unbroken.result


def test_a_checkpoint_holds_the_adapter_only(made, unbroken):
    layouts = prepare(load_recipe(made.recipe, [NF4])).layouts
    trained = sum(layout.num_trained for layout in layouts)
    files = list((unbroken.folder / "checkpoints" / "step-00000004").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) <= 1.1 * 12 * trained + 4096 * len(files)


def test_quantisation_is_part_of_what_a_resumed_run_must_have(made, unbroken):
    ran = made.train("unbroken", "model.quantize=int8", "--resume")
    assert ran.code == 2
    assert "model.quantize was nf4 and is int8" in ran.err


def test_the_run_learns_and_evaluates(unbroken):
    assert unbroken.losses[-1] < unbroken.losses[0]
    assert unbroken.evaluations[4] < unbroken.evaluations[0]


def test_training_every_weight_of_a_quantised_model_is_refused_by_name(project):
    full = project("full to be refused", "llama")
    ran = full.train("out", NF4)
    assert ran.code == 2
    assert "model.quantize is nf4 and there is no adapter: quantised weights cannot be trained" in ran.err


def test_an_unknown_kind_is_refused_with_the_known_ones(made):
    ran = made.train("out", "model.quantize=int4")
    assert ran.code == 2
    assert "nf4" in ran.err
    assert "int8" in ran.err


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_the_bill_is_that_of_the_bytes_that_are_kept_and_uploaded(kind, made, monkeypatch):
    words = [
        f"model.quantize={kind}",
        "engine.workers=2",
        "model.dtype=bfloat16",
        f"output_dir={made.folder / kind}",
    ]
    bare, packed = (
        prepare(load_recipe(made.recipe, [*words, *more])) for more in (["model.quantize=none"], words[:1])
    )
    seen = {}

    class Engine(rpft.train.machinery.Engine):
        def close(self):
            seen["devices"] = self.devices
            return super().close()

    monkeypatch.setattr(rpft.train.machinery, "Engine", Engine)
    (made.folder / kind).mkdir()
    trainer = rpft.train.loop.Trainer(packed, Silent())
    trainer.run(None)
    parts = packed.bill.device_parts
    fixed = parts["weight, gradient and hidden-state buffers"]
    assert [device.peak_bytes() for device in seen["devices"]] == [fixed, fixed]
    largest = max(p.num_bytes for layout in packed.layouts for p in layout.packed.values())
    plain, dequantised = (
        [profile.forward_bytes for profile in estimated_bytes(layouts, packed.shape, packed.max_tokens)]
        for layouts in (bare.layouts, packed.layouts)
    )
    assert [b - a for a, b in zip(plain, dequantised, strict=True)][1:-1] == [largest] * (len(plain) - 2)
    assert largest == 64 * 96 * 2
    assert packed.bill.device_parts["activations"] >= max(dequantised)
    kept = sum(layer.weights.numel() for layer in trainer._store.layers)
    assert kept == sum(layout.host_bytes for layout in packed.layouts)
    saved = sum(p.num_bytes for layout in packed.layouts for p in layout.packed.values())
    saved *= {"nf4": 0.5, "int8": 0.4, "fp8": 0.4}[kind]  # of tiny matrices scales and look-ups take a part
    assert packed.memory["host_bytes"] < bare.memory["host_bytes"] - saved
    assert all(
        p.region_bytes < b.region_bytes for p, b in zip(packed.layouts[1:-1], bare.layouts[1:-1], strict=True)
    )
    assert sum(y.num_parameters for y in packed.layouts) == sum(y.num_parameters for y in bare.layouts)


class Silent:
    """A reporter that nobody reads."""

    def __getattr__(self, name):
        return lambda *arguments: None


def test_a_plan_says_less_memory_and_the_same_products(made):
    plans = []
    for kind in ("none", "nf4"):
        ran = run_rpft("plan", str(made.recipe), f"model.quantize={kind}", "--machine", "8x4090", "--json")
        assert ran.code == 0, ran.err
        plans.append(json.loads(ran.out))
    assert plans[1]["memory"]["host_bytes"] < plans[0]["memory"]["host_bytes"]
    assert plans[1]["predicted"]["tokens_per_second"] >= 0.99 * plans[0]["predicted"]["tokens_per_second"]


def test_too_little_ram_is_answered_with_quantisation(project):
    large = project("large base", "llama", sections=LORA, intermediate_size=4096, hidden_size=256)
    words = ["model.dtype=bfloat16", "engine.workers=1"]
    weights = sum(layout.host_bytes for layout in prepare(load_recipe(large.recipe, words)).layouts)
    ran = large.train(
        "out", *words, f"engine.ram_limit={(3 << 29) + weights}"
    )  # what the process takes, and these
    assert ran.code == 2
    assert "model.quantize=nf4" in ran.err


def test_a_checkpoint_quantised_otherwise_is_refused_by_name(fresh):
    made = fresh("llama", sections=LORA)
    path = made.folder / "base" / "config.json"
    config = json.loads(path.read_text())
    for settings, message in (
        ({"quant_method": "gptq", "bits": 4}, r"the checkpoint is quantised (gptq)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "the checkpoint is quantised (bitsandbytes)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "the checkpoint is quantised to fp4"),
    ):
        path.write_text(json.dumps({**config, "quantization_config": settings}))
        ran = made.train("out")
        assert ran.code == 2
        assert message in ran.err
