"""What cannot run is refused with exit code 2 and one line that names the cause, before weights are read."""

import json

import pytest
import torch
from support.recipes import chats, write_jsonl, write_plan

from rpft import files
from rpft.model.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def llama(project):
    return project("refusals", "llama")


def check_refused(made, said, *words, output="refused"):
    ran = made.train(output, *words)
    assert ran.code == 2, ran
    assert ran.err.startswith("error: ")
    assert len(ran.err.splitlines()) == 1
    for part in said:
        assert part in ran.err
    assert not (made.folder / output).exists()


@pytest.fixture(autouse=True)
def no_weight_is_read(monkeypatch):
    def read(self, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "read", read)


REFUSED = {
    "unknown key": (["data.packng=true"], ["packng", "did you mean", "packing"]),
    "missing model folder": (["model.path=./nowhere"], ["model.path", "./nowhere"]),
    "missing data file": (["data.train=[nowhere.jsonl]"], ["nowhere.jsonl", "does not exist"]),
    "missing plan": (["engine.plan=nowhere.json"], ["nowhere.json", "engine.plan"]),
    "no such module": (["adapter.target_modules=[no_proj]"], ["adapter.target_modules", "no_proj"]),
    "too little RAM": (
        ["engine.ram_limit=1GiB"],
        ["RAM", "1.0 GiB", "weights, gradients, optimizer state", "process"],
    ),
    "an emulated link of the CPU pool": (["engine.emulate_link_gbps=12"], ["engine.emulate_link_gbps", "cpu"]),
    "gradients rounded in two rounds": (
        [
            "model.dtype=bfloat16",
            "engine.host_gradients=bfloat16",
            "train.gradient_accumulation_steps=32",
            "engine.num_microbatches=16",
        ],
        ["engine.host_gradients", "engine.num_microbatches is 16", "engine.num_microbatches to 32"],
    ),
    "M does not divide": (["engine.num_microbatches=3"], ["engine.num_microbatches", "divide"]),
    "missing chat template": (["data.chat_template=nowhere.jinja"], ["data.chat_template", "nowhere.jinja"]),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("dry", [False, True], ids=["run", "dry run"])
def test_bad_input_is_refused_in_one_line(name, dry, llama):
    words, said = REFUSED[name]
    check_refused(llama, said, *words, *["--dry-run"][:dry])


def test_cuda_is_refused_on_a_machine_without(llama, monkeypatch):
    monkeypatch.setattr("rpft.engine.device.cuda_available", lambda: False)
    check_refused(llama, ["engine.device", "no CUDA device"], "engine.device=cuda")


def test_an_emulated_link_is_refused_where_no_gpu_is_found(llama, monkeypatch):
    monkeypatch.setattr("rpft.engine.device.cuda_available", lambda: False)
    words = ("engine.device=auto", "engine.emulate_link_gbps=12.5")
    check_refused(llama, ["engine.emulate_link_gbps", "no GPU is found"], *words)


def test_rounded_gradients_are_refused_with_a_plan_of_several_rounds(llama):
    path = write_plan(llama.folder / "rounds.json", [[0, 2]], [[3, 5], [0, 2]], 3)
    words = (f"engine.plan={path}", "model.dtype=bfloat16", "engine.host_gradients=bfloat16")
    check_refused(llama, ["engine.host_gradients", "rounds.json is 3"], *words)


def test_compiled_kernels_are_refused_where_there_is_no_compiler(llama, monkeypatch):
    monkeypatch.setenv("PATH", str(llama.folder))
    monkeypatch.delenv("CXX", raising=False)
    said = ["engine.kernels is compile", "no C++ compiler", "engine.kernels to trace"]
    check_refused(llama, said, "engine.kernels=compile")


def test_a_plan_of_another_model_is_refused_with_its_file(llama):
    path = write_plan(llama.folder / "small.json", [[0, 2]], [[3, 3], [0, 2]], 2)
    check_refused(llama, ["small.json", "layers 0 to 5", "base"], f"engine.plan={path}")


def test_a_plan_with_a_gap_is_refused(llama):
    path = write_plan(llama.folder / "gap.json", [[0, 1], [3, 4]], [[5, 5], [0, 4]], 2)
    check_refused(llama, ["gap.json", "[3..4]", "layer 2"], f"engine.plan={path}")


def test_a_row_longer_than_the_models_positions_is_refused_with_the_length_to_set(llama):
    row = {"messages": [{"role": "user", "content": "one " * 300}, {"role": "assistant", "content": "two"}]}
    path = write_jsonl(llama.folder / "long.jsonl", [row])
    words = (f"data.train=[{path}]", "data.max_seq_len=2000")
    check_refused(llama, ["longest row", "128 positions", "data.max_seq_len to at most 128"], *words)


def test_sdpa_is_refused_by_name_for_a_family_without_it(project):
    made = project("gemma2", "gemma2")
    check_refused(made, ["gemma2", "model.attention=sdpa"], "model.attention=sdpa")


def test_packing_is_refused_by_name_for_a_family_that_would_mix_the_rows(project):
    made = project("gpt_oss", "gpt_oss")
    check_refused(made, ["data.packing", "GptOssForCausalLM"], "data.packing=true")


def test_a_missing_shard_is_refused_before_anything_is_allocated(fresh, monkeypatch):
    made = fresh("llama")
    base = made.folder / "base"
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (base / "model.safetensors").rename(base / names[0])
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("ab", names, strict=True))})
    )
    monkeypatch.setattr("rpft.train.weights.HostStore", None)
    check_refused(made, ["model.safetensors.index.json", names[1]])


def test_a_folder_without_a_tokenizer_is_refused(fresh):
    made = fresh("llama")
    for file in (made.folder / "base").glob("tokenizer*"):
        file.unlink()
    check_refused(made, ["tokenizer", "base"])


def test_a_disk_too_small_for_the_result_is_refused_with_what_it_takes(llama, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda folder: 1 << 20)
    check_refused(llama, ["output_dir", "1 MiB are free", "checkpoint"])


def test_rows_without_an_answer_are_refused_with_their_count(llama):
    rows = [{"messages": [{"role": "user", "content": "one"}]}] * 3
    path = write_jsonl(llama.folder / "no answer.jsonl", rows)
    ran = llama.train("refused", f"data.train=[{path}]")
    assert ran.code == 2
    assert "3 rows, 3 dropped" in ran.err


def test_a_model_whose_ends_the_layers_do_not_reproduce_is_refused_before_training(fresh, monkeypatch):
    """The chunked loss would leave out what this model does behind its head."""
    monkeypatch.undo()
    made = fresh("llama", rows=chats(4))
    from rpft.model.trunk import Trunk

    logits = Trunk.head_logits
    monkeypatch.setattr(Trunk, "head_logits", lambda *args: torch.tanh(logits(*args)))
    ran = made.train("refused")
    assert ran.code == 2
    assert "LlamaForCausalLM is not supported" in ran.err
    assert not (made.folder / "refused" / "metrics.jsonl").exists()
