"""A checkpoint is read whole into the store, a tensor a thread; what is wrong with it is said by name."""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import FAMILIES, load, skeleton_of, tiny_checkpoint, tiny_model

import rpft.model.load
from rpft.errors import UserError
from rpft.model.adapters import LoraSettings, inject_lora
from rpft.model.checkpoint import Checkpoint, read_config, resolve_checkpoint
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.model.load import load_checkpoint
from rpft.model.quant_choice import quantize_base

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Rewrites the one file of ``folder`` with tensors replaced, added, or (None) left out."""
    tensors: dict[str, Any] = {**load_file(folder / SINGLE), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / SINGLE, {"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_store_is_the_model_s(family: str, tmp_path: Path) -> None:
    state = tiny_checkpoint(tmp_path, family).state_dict()
    store = load(tmp_path).store
    assert set(store.names()) <= set(state)
    for name in store.names():
        assert torch.equal(store.tensor(name), state[name]), name


def test_shards_are_read_as_one_file_is(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = load(tmp_path / "one").store, load(tmp_path / "many").store
    assert all(torch.equal(a.weights, b.weights) for a, b in zip(one.layers, many.layers, strict=True))


def nearest_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """A tie goes away from zero; torch's own conversion takes the even neighbour."""
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000
    return torch.where(ties, values * (1 + 2**-10), values).bfloat16()


def test_a_bf16_store_keeps_the_unrounded_value_of_an_fp32_file_as_master(tmp_path: Path) -> None:
    state = tiny_checkpoint(tmp_path, "qwen3").state_dict()
    store = load(tmp_path, torch.bfloat16).store
    for name in store.names():
        assert store.tensor(name).dtype == torch.bfloat16
        assert torch.equal(store.tensor(name), nearest_bfloat16(state[name])), name
        assert torch.equal(store.master(name), state[name]), name
    embedding = "model.embed_tokens.weight"
    assert not torch.equal(store.tensor(embedding).float(), state[embedding])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_base_model_s_file_without_the_head_s_prefix_loads(family: str, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, family, tie_word_embeddings=True)
    tensors = load_file(tmp_path / SINGLE)
    prefix = model.base_model_prefix + "."
    (tmp_path / SINGLE).unlink()
    save_file({n.removeprefix(prefix): t for n, t in tensors.items()}, tmp_path / SINGLE, {"format": "pt"})
    state, store = model.state_dict(), load(tmp_path).store
    assert all(torch.equal(store.tensor(name), state[name]) for name in store.names())


def store_read_by(
    num_threads: int,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> HostStore:
    """The checkpoint in ``folder`` in a store, read by so many threads."""
    skeleton = skeleton_of(folder, dtype)
    store = HostStore(build_layers(skeleton, dtype))
    load_checkpoint(Checkpoint(folder), skeleton, store, progress, num_threads)
    return store


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_eight_threads_read_what_one_reads(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path, max_shard_size="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    one, eight = (store_read_by(n, tmp_path, torch.bfloat16) for n in (1, 8))
    for a, b in zip(one.layers, eight.layers, strict=True):
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.master, b.master)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_loading_holds_one_tensor_a_thread(
    family: str, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path, family)
    assert most_held_at_once(num_threads, tmp_path, monkeypatch) <= num_threads


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_loading_fused_experts_holds_one_expert_a_thread(
    family: str, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path, family)
    assert most_held_at_once(num_threads, tmp_path, monkeypatch) <= 2 * num_threads  # gate, up


@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "olmoe"])
def test_experts_are_written_to_their_places_as_they_are_read(
    family: str, quantize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stack of experts ever exists beside the store, and what the store holds is what the model has."""
    model = tiny_checkpoint(tmp_path, family)
    written: dict[str, list[int]] = {}
    write = HostStore.write

    def watched(self: HostStore, name: str, value: torch.Tensor, expert: int | None = None) -> None:
        written.setdefault(name, []).append(value.untyped_storage().nbytes())
        write(self, name, value, expert)

    monkeypatch.setattr(HostStore, "write", watched)
    skeleton = skeleton_of(tmp_path)
    if quantize is not None:
        inject_lora(skeleton, LoraSettings(4, 8.0, 0.0, ["o_proj"]), str(tmp_path))
        quantize_base(skeleton, quantize, torch.float32)
    store = HostStore(build_layers(skeleton, torch.float32))
    load_checkpoint(Checkpoint(tmp_path), skeleton, store)
    experts = {name: each for name, each in model.named_parameters() if ".experts." in name}
    assert experts
    for name, weight in experts.items():
        assert written[name] == [weight[0].numel() * 4] * len(weight)
        packed = store.packed(name)
        if packed is None:
            assert torch.equal(store.tensor(name), weight)
            continue
        expected = {suffix: torch.zeros(s, dtype=d) for suffix, (s, d) in packed.part_shapes().items()}
        packed.quantize_into(weight.detach(), expected)
        assert all(torch.equal(part, expected[suffix]) for suffix, part in store.parts(name).items())


def most_held_at_once(num_threads: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most tensors read from files that were alive at any time of loading."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    lock = threading.Lock()
    read = Checkpoint.read

    def watched(self: Checkpoint, name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(self, name)
        with lock:
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", watched)
    store_read_by(num_threads, folder)
    assert alive
    return most


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_no_file_stays_mapped_after_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path, "llama")
    mapped: list[bool] = []
    read = Checkpoint.read

    def watched(self: Checkpoint, name: str) -> torch.Tensor:
        tensor = read(self, name)
        mapped.append(str(tmp_path) in Path("/proc/self/maps").read_text())
        return tensor

    monkeypatch.setattr(Checkpoint, "read", watched)
    skeleton, checkpoint = skeleton_of(tmp_path), Checkpoint(tmp_path)
    load_checkpoint(checkpoint, skeleton, HostStore(build_layers(skeleton, torch.float32)), num_threads=3)
    assert all(mapped)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("num_threads", [1, 8])
def test_progress_counts_up_to_all_in_the_calling_thread(num_threads: int, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "mixtral")
    told: list[tuple[int, int]] = []
    threads: set[int] = set()

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.get_ident())

    store_read_by(num_threads, tmp_path, progress=progress)
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, total in told} == {len(told)}
    assert threads == {threading.get_ident()}


def test_loaders_run_operations_on_one_thread_each_and_leave_the_process_s_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path, "llama")
    seen: set[int] = set()
    read = Checkpoint.read

    def watched(self: Checkpoint, name: str) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "read", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        store_read_by(2, tmp_path)
        with ThreadPoolExecutor(1) as pool:
            after = torch.get_num_threads(), pool.submit(torch.get_num_threads).result()
    finally:
        torch.set_num_threads(before)
    assert seen == {1}
    assert after == (3, 3)


def test_of_two_faults_the_first_in_order_is_raised_though_the_other_comes_first_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path, "llama")
    names = sorted(n for n in load_file(tmp_path / SINGLE) if n.endswith("norm.weight"))
    order = [name for name in Checkpoint(tmp_path).names() if name in names]
    change_tensors(tmp_path, **{order[0]: torch.ones(63), order[1]: torch.ones(63)})
    other_failed = threading.Event()
    store_tensors = rpft.model.load._store_tensors

    def in_reverse(*arguments: Any) -> list[str]:
        try:
            return store_tensors(*arguments)
        except UserError as error:
            if order[0] in str(error):
                assert other_failed.wait(30)
            other_failed.set()
            raise

    monkeypatch.setattr("rpft.model.load._store_tensors", in_reverse)
    with pytest.raises(UserError, match=f"tensor {order[0]} has shape"):
        store_read_by(8, tmp_path)
    assert other_failed.is_set()


def test_tensors_that_the_model_does_not_have_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_checkpoint(tmp_path, "llama")
    change_tensors(
        tmp_path,
        **{"model.extra.weight": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
    )
    with caplog.at_level(logging.WARNING, "rpft"):
        load(tmp_path)
    assert "1 tensor(s) of the checkpoint are not used by LlamaForCausalLM: model.extra.weight" in caplog.text


def test_a_tied_head_that_the_file_holds_too_is_no_surprise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_checkpoint(tmp_path, "qwen3")
    change_tensors(tmp_path, **{"lm_head.weight": model.lm_head.weight.detach().clone()})
    with caplog.at_level(logging.WARNING, "rpft"):
        store = load(tmp_path).store
    assert caplog.text == ""
    assert torch.equal(store.tensor("model.embed_tokens.weight"), model.lm_head.weight)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    change_tensors(tmp_path, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(UserError, match=r"1 tensor\(s\).*model.layers.1.mlp.up_proj.weight"):
        load(tmp_path)


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "mixtral")
    name = next(n for n in load_file(tmp_path / SINGLE) if "layers.2" in n and "experts.3." in n)
    change_tensors(tmp_path, **{name: None})
    with pytest.raises(UserError, match=r"layers\.2\."):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    change_tensors(tmp_path, **{"model.norm.weight": torch.ones(63)})
    with pytest.raises(UserError, match=r"model.norm.weight has shape \[63\],.*asks for \[64\]"):
        load(tmp_path)


def test_a_shard_that_the_index_names_and_is_missing_is_found_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    monkeypatch.setattr("rpft.model.checkpoint.safe_open", lambda *a, **k: pytest.fail("opened a shard"))
    with pytest.raises(UserError, match=f"names 1 file.*{gone.name}.*all shards"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UserError, match=f"{INDEX}: not a safetensors index"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 50_000])
def test_a_file_cut_short_is_named_before_anything_is_allocated(keep: int, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    whole = (tmp_path / SINGLE).read_bytes()
    assert len(whole) > 50_000
    (tmp_path / SINGLE).write_bytes(whole[:keep])
    with pytest.raises(UserError, match=f"{SINGLE}: not a whole safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_files_are_refused_with_advice_and_never_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"not even a pickle")
    with pytest.raises(UserError, match=rf"no safetensors file in it; it has {name}, a pickle.*save_pretrained"):
        Checkpoint(tmp_path)


def test_a_folder_with_an_adapter_alone_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="a full model folder is needed, not an adapter"):
        Checkpoint(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json in it"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "no_such_family"}'])
def test_a_config_that_transformers_cannot_read_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    change_config(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(UserError, match="the checkpoint is quantised"):
        read_config(tmp_path)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "nowhere"])
def test_a_path_that_is_neither_folder_nor_hub_id_is_refused(path: str) -> None:
    with pytest.raises(UserError, match="no such folder, and not a hub id"):
        resolve_checkpoint(path, None)


def test_a_hub_id_that_cannot_be_had_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"'nobody/nothing'.*the hub did not give it"):
        resolve_checkpoint("nobody/nothing", None)


@pytest.mark.parametrize("weights", [True, False])
def test_weights_are_asked_of_the_hub_only_where_they_will_be_read(weights, tmp_path, monkeypatch) -> None:
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda path, **more: asked.update(more) or str(tmp_path)
    )
    assert resolve_checkpoint("somebody/something", None, weights) == tmp_path
    assert "*.json" in asked["allow_patterns"]
    assert ("*.safetensors" in asked["allow_patterns"]) == weights


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(tmp_path), None) == tmp_path
