"""The memory bill of a plan against what a run of it really allocates."""

import gc
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.engines import plan_of, random_plan
from support.models import load

import rpft.train.loop
from rpft.engine.cpu import CpuDevice
from rpft.model.adapters import LoraSettings
from rpft.model.host_store import store_bytes
from rpft.model.pages import map_pages
from rpft.model.whole_tensors import WholeTensors
from rpft.plan.bill import RESULT_EXTRAS_BYTES, available_host_bytes, gib
from rpft.recipe.load import load_recipe
from rpft.train.checkpoint import checkpoint_bytes
from rpft.train.planned import COPIES
from rpft.train.prepare import prepare
from rpft.train.spare_memory import SpareMemory

LORA = LoraSettings(r=4, alpha=8.0, dropout=0.0, target_modules="all-linear")
ON_EXPERTS = (
    "adapter.target_modules=[]",
    "adapter.target_parameters=[experts.gate_up_proj, experts.down_proj]",
)


def bytes_of(store):
    """RAM of the buffers of a host store."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in store.layers
        for tensor in (layer.weights, layer.second, layer.gradient, layer.master, layer.exp_avg, layer.exp_avg_sq)
        if tensor.numel()
    }
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "LoRA"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_store_takes_the_bytes_that_were_billed_to_the_last_one(family, lora, dtype, project):
    store = load(project(f"bill {family}", family).folder / "base", dtype, lora).store
    assert bytes_of(store) == store_bytes([layer.layout for layer in store.layers])


@pytest.mark.parametrize("adapter", [[], ["adapter.r=4"]], ids=["full", "LoRA"])
@pytest.mark.parametrize("seed", range(5))
def test_a_run_allocates_no_more_than_the_bill_of_its_plan(seed, adapter, project, monkeypatch):
    made = project("bill qwen3", "qwen3")
    rng = random.Random(seed)
    path = made.folder / f"{seed}{len(adapter)}.json"
    path.write_text(random_plan(rng, 6, rng.choice([1, 2, 4])).to_json())
    output = made.folder / f"run {seed} {adapter}"
    words = [f"output_dir={output}", f"engine.plan={path}", "engine.workers=2", "train.max_steps=2", *adapter]
    words += ["train.gradient_accumulation_steps=8", "optimizer.update=delayed"]
    seen = SimpleNamespace()

    class Engine(rpft.train.machinery.Engine):
        def close(self, *arguments):
            seen.buffers, seen.devices = self.boundary_buffers, self.devices
            return super().close(*arguments)

    output.mkdir()
    monkeypatch.setattr(rpft.train.machinery, "Engine", Engine)
    prepared = prepare(load_recipe(made.recipe, words))
    rpft.train.loop.Trainer(prepared, Silent()).run(None)
    bill = prepared.bill
    boundary = prepared.data.longest * 64 * 4
    assert seen.buffers * boundary == bill.host_parts["hidden states between stages"]
    fixed = bill.device_parts["weight, gradient and hidden-state buffers"]
    assert [device.peak_bytes() for device in seen.devices] == [fixed, fixed]
    assert bill.host == sum(bill.host_parts.values())
    assert bill.host_parts["memory of the workers"] == 2 * bill.device  # they have no other
    assert bill.device == sum(bill.device_parts.values())
    saved = sum(f.stat().st_size for f in output.rglob("*.safetensors"))
    assert bill.result >= saved


ACCOUNTED = {
    "full": ("llama", []),
    "LoRA": ("llama", ["adapter.r=8"]),
    "packed": ("llama", ["data.packing=true"]),
    "tied": ("qwen3", ["train.gradient_accumulation_steps=8"]),
    "delayed": ("llama", ["optimizer.update=delayed", "model.dtype=bfloat16"]),
    "in rounds": ("qwen3", ["model.dtype=bfloat16", "engine.num_microbatches=1"]),
}


@pytest.mark.parametrize("name", ACCOUNTED)
def test_no_part_of_the_bill_is_under_what_a_run_takes_or_much_above_it(name, project, monkeypatch):
    """Of the planner's own plan; the interpreter, and what autograd holds in a task, are estimates."""
    family, words = ACCOUNTED[name]
    made = project(f"accounts {family}", family)
    output = made.folder / name
    output.mkdir()
    words = [f"output_dir={output}", "engine.workers=2", "train.max_steps=2", "checkpoint.every_steps=1", *words]
    seen = SimpleNamespace()

    class Engine(rpft.train.machinery.Engine):
        def close(self):
            seen.boundary_bytes, seen.devices = self.boundary_buffers, self.devices
            seen.store = bytes_of(trainer._store)
            return super().close()

    monkeypatch.setattr(rpft.train.machinery, "Engine", Engine)
    prepared = prepare(load_recipe(made.recipe, words))
    trainer = rpft.train.loop.Trainer(prepared, Silent())
    take = SpareMemory.take

    def noted(memory, *given):
        take(memory, *given)
        memory.wait()
        seen.copies = memory.ready_bytes

    monkeypatch.setattr(SpareMemory, "take", noted)
    trainer.run(None)
    bill, parts = prepared.bill, prepared.host_parts
    assert sum(parts.values()) == prepared.memory["host_bytes"]
    boundary = prepared.max_tokens * 64 * prepared.dtype.itemsize
    checkpoint = max(sum(f.stat().st_size for f in c.iterdir()) for c in (output / "checkpoints").iterdir())
    accounts = {
        "store": (seen.store, parts["weights, gradients, optimizer state"]),
        "hidden states": (seen.boundary_bytes * boundary, parts["hidden states between stages"]),
        "buffers": (
            max(device.peak_bytes() for device in seen.devices),
            bill.device_parts["weight, gradient and hidden-state buffers"],
        ),
        "checkpoint": (checkpoint, prepared.checkpoint_bytes),
        "copies": (seen.copies, parts[COPIES]),
    }
    print(accounts)
    for part, (taken, billed) in accounts.items():
        slack = 140_000 if part == "checkpoint" else 0  # heads of files, which grow with no model
        assert taken <= billed <= 1.1 * taken + slack, part


@pytest.mark.parametrize("trained", [[], [*ON_EXPERTS]], ids=["in full", "adapters of experts"])
def test_a_result_joined_of_groups_takes_less_ram_than_the_gradients_that_are_given_back(
    trained, project, monkeypatch
):
    made = project("bill groups", "qwen3_moe", num_hidden_layers=2)
    path = made.folder / "plan.json"
    path.write_text(plan_of([(0, 4)], [(5, 7), (0, 4)], 4, "stage").to_json(expert_groups=2))
    output = made.folder / f"run {trained}"
    output.mkdir()
    words = [f"output_dir={output}", f"engine.plan={path}", "train.max_steps=1", "model.dtype=bfloat16", *trained]
    held, joined, seen = [], [], SimpleNamespace()

    def allocate_host(self, num_bytes):
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        mapping = map_pages(num_bytes)
        held.append((num_bytes, weakref.ref(mapping)))
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def in_ram():
        gc.collect()
        return sum(num_bytes for num_bytes, mapping in held if mapping() is not None)

    def close(self, *arguments):
        seen.gradients = sum(layer.gradient.nbytes for layer in trainer._store.layers)
        seen.training = in_ram()
        return closed(self, *arguments)

    def whole(self, name):
        tensor = as_it_was(self, name)
        joined.extend([tensor.nbytes] if self._specs[name][0].slice is not None else [])
        return tensor

    def save_result(*given):
        seen.saving = in_ram()
        return saved(*given)

    saved, closed = rpft.train.loop.save_result, rpft.train.machinery.Engine.close
    as_it_was = WholeTensors.__getitem__
    monkeypatch.setattr(CpuDevice, "allocate_host", allocate_host)
    monkeypatch.setattr(WholeTensors, "__getitem__", whole)
    monkeypatch.setattr(rpft.train.machinery.Engine, "close", close)
    monkeypatch.setattr(rpft.train.loop, "save_result", save_result)
    trainer = rpft.train.loop.Trainer(prepare(load_recipe(made.recipe, words)), Silent())
    trainer.run(None)
    assert seen.gradients <= seen.training - seen.saving
    assert 0 < sum(joined) <= seen.gradients


class Silent:
    """A reporter that nobody reads."""

    def __getattr__(self, name):
        return lambda *arguments: None


def test_the_bill_of_the_disk_holds_for_the_result_and_one_checkpoint(project):
    made = project("bill llama", "llama")
    for adapter in ([], ["adapter.r=8"]):
        words = [*adapter, "checkpoint.every_steps=4", "model.dtype=bfloat16"]
        outcome = made.train_well(f"disk {adapter}", *words)
        prepared = prepare(load_recipe(made.recipe, words))
        checkpoint = outcome.folder / "checkpoints" / "step-00000004"
        files = [file for file in outcome.folder.rglob("*.safetensors") if checkpoint not in file.parents]
        contents = [file.read_bytes() for file in files]
        saved = sum(len(content) for content in contents)
        headers = sum(8 + int.from_bytes(content[:8], "little") for content in contents)
        assert saved - headers <= prepared.bill.result - RESULT_EXTRAS_BYTES <= 1.3 * saved
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
        assert size <= checkpoint_bytes(prepared.layouts, lagging=False) <= size + 140_000


def test_sizes_read_in_the_unit_that_suits_them():
    assert gib(5 << 20) == "5 MiB"
    assert gib(3 << 29) == "1.5 GiB"


def test_what_the_system_has_free_is_found():
    assert available_host_bytes() > 1 << 20
