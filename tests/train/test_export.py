"""`rpft export` makes of any run, finished or interrupted, a folder that gives the logits of what was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.recipes import Project, Ran, run_rpft
from transformers import AutoModelForCausalLM, AutoTokenizer

from rpft import files
from rpft.train.export import PROBE_TEXT

SAVING = {"checkpoint": {"every_steps": 2}, "train": {"max_steps": 4, "eval_every": 2}}
LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj", "embed_tokens"]}
IDS = torch.arange(5, 45).view(1, -1)


@pytest.fixture(scope="module")
def full(project: Any) -> Project:
    """A finished full run with checkpoints of steps 2 and 4, on a tied model whose card has a licence."""
    made = project("export full", "llama_tied", sections=SAVING)
    (made.folder / "base" / "README.md").write_text("---\nlicense: llama3.1\nx: 1\n---\n# Base\n")
    (made.folder / "base" / "LICENSE.txt").write_text("terms")
    made.train_well("out", "data.chat_template=chatml")
    return made


@pytest.fixture(scope="module")
def lora(project: Any) -> Project:
    """A finished bfloat16 LoRA run with checkpoints of steps 2 and 4."""
    sections = {**SAVING, "adapter": LORA, "model": {"dtype": "bfloat16"}}
    made = project("export lora", "llama", sections=sections)
    made.train_well("out")
    return made


@pytest.fixture(scope="module")
def experts(project: Any) -> Project:
    """A finished LoRA run of a mixture of experts, whose checkpoint holds them one by one."""
    adapter = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj"]}
    made = project("export experts", "qwen3_moe", sections={**SAVING, "adapter": adapter})
    made.train_well("out")
    return made


def export(run: Path, *words: str) -> Ran:
    return run_rpft("export", str(run), *words)


def export_well(run: Path, out: Path, *words: str) -> Path:
    ran = export(run, "--out", str(out), *words)
    assert ran.code == 0, ran.err
    return out


def logits(folder: Path, adapter: Path | None = None, **settings: Any) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **settings)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def test_a_finished_full_run_is_exported_as_its_result(full: Project, tmp_path: Path) -> None:
    run = full.folder / "out"
    folder = export_well(run, tmp_path / "model")
    result, exported = (load_file(f / "model.safetensors") for f in (run / "model", folder))
    assert exported.keys() == result.keys()
    assert all(torch.equal(exported[name], result[name]) for name in result)
    assert torch.equal(logits(folder), logits(run / "model"))
    assert "lm_head.weight" not in exported


def test_an_interrupted_full_run_is_exported_from_its_newest_checkpoint(full: Project, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(full.folder / "out", run)
    shutil.rmtree(run / "model")
    folder = export_well(run, tmp_path / "model")
    assert torch.equal(logits(folder), logits(full.folder / "out" / "model"))
    earlier = export_well(run, tmp_path / "earlier", "--checkpoint", "step-00000002")
    assert not torch.equal(logits(earlier), logits(folder))
    by_path = str(run / "checkpoints" / "step-00000002")
    again = export_well(run, tmp_path / "again", "--checkpoint", by_path, "--max-shard-size", "60KB")
    assert torch.equal(logits(earlier), logits(again))
    assert len(list(again.glob("model-*-of-*.safetensors"))) > 2
    assert (again / "model.safetensors.index.json").is_file()


def test_an_adapter_is_merged_in_float32_and_rounded_once(lora: Project, tmp_path: Path) -> None:
    run, base = lora.folder / "out", lora.folder / "base"
    ran = export(run, "--out", str(tmp_path / "fp32"), "--dtype", "fp32")
    assert ran.code == 0, ran.err
    assert "merged: logits on" in ran.out
    whole = load_file(tmp_path / "fp32" / "model.safetensors")
    folder = export_well(run, tmp_path / "model")
    rounded = load_file(folder / "model.safetensors")
    assert rounded.keys() == whole.keys()
    assert all(torch.equal(whole[name].bfloat16(), rounded[name]) for name in whole)
    beside = logits(base, run / "adapter", dtype=torch.float32)
    assert torch.allclose(logits(tmp_path / "fp32"), beside, atol=1e-4 * beside.abs().max().item())
    assert not torch.allclose(beside, logits(base), atol=1e-2 * beside.abs().max().item())
    halves = load_file(export_well(run, tmp_path / "fp16", "--dtype", "fp16") / "model.safetensors")
    assert all(torch.equal(whole[name].half(), halves[name]) for name in whole)
    assert json.loads((tmp_path / "fp16" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize("checkpoint", ["latest", "step-00000002"])
def test_experts_that_lie_one_by_one_are_in_the_export(checkpoint: str, experts: Project, tmp_path: Path) -> None:
    run, base = experts.folder / "out", experts.folder / "base"
    adapter = export_well(run, tmp_path / "adapter", "--adapter-only", "--checkpoint", checkpoint)
    folder = export_well(run, tmp_path / "model", "--dtype", "fp32", "--checkpoint", checkpoint)
    beside = logits(base, adapter)
    assert torch.allclose(logits(folder), beside, atol=1e-4 * beside.abs().max().item())
    assert not torch.allclose(logits(folder), logits(base), atol=1e-4 * beside.abs().max().item())


def test_buffers_of_what_is_trained_whole_are_in_the_adapter_of_a_run_and_of_its_checkpoint(
    fresh: Any, tmp_path: Path
) -> None:
    adapter = {"r": 4, "target_modules": ["q_a_proj"], "modules_to_save": ["mlp.gate"]}
    made = fresh("deepseek_v3", sections={"adapter": adapter, "train": {"max_steps": 1}})
    made.train_well("out", "checkpoint.every_steps=1")
    run = made.folder / "out"
    folder = export_well(run, tmp_path / "adapter", "--adapter-only", "--checkpoint", "step-00000001")
    base, *found = (
        load_file(f)
        for f in (
            made.folder / "base" / "model.safetensors",
            *(f / "adapter_model.safetensors" for f in (run / "adapter", folder)),
        )
    )
    for tensors in found:
        (name,) = [name for name in tensors if name.endswith("layers.2.mlp.gate.e_score_correction_bias")]
        assert torch.equal(tensors[name], base["model.layers.2.mlp.gate.e_score_correction_bias"])
        assert tensors[name].any()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    beside = logits(made.folder / "base", folder)
    assert torch.allclose(
        logits(export_well(run, tmp_path / "model")), beside, atol=1e-4 * beside.abs().max().item()
    )


def test_a_model_with_fewer_positions_than_the_probe_text_has_tokens_is_merged(fresh: Any, tmp_path: Path) -> None:
    made = fresh("gpt2", sections={"adapter": {"r": 4, "target_modules": ["c_attn"]}, "train": {"max_steps": 1}})
    made.train_well("out")
    assert len(AutoTokenizer.from_pretrained(made.folder / "base")(PROBE_TEXT).input_ids) > 128
    export_well(made.folder / "out", tmp_path / "model")


def test_a_merge_of_the_best_checkpoint_is_of_that_step(lora: Project, tmp_path: Path) -> None:
    ran = export(lora.folder / "out", "--out", str(tmp_path / "best"), "--checkpoint", "best")
    assert ran.code == 0, ran.err
    assert "the checkpoint of step 2" in ran.out  # the last step's evaluation comes after its checkpoint


@pytest.mark.parametrize("checkpoint", ["latest", "step-00000004"])
def test_the_adapter_alone_is_what_peft_loads(checkpoint: str, lora: Project, tmp_path: Path) -> None:
    run = lora.folder / "out"
    folder = export_well(run, tmp_path / "adapter", "--adapter-only", "--checkpoint", checkpoint)
    result, exported = (load_file(f / "adapter_model.safetensors") for f in (run / "adapter", folder))
    assert exported.keys() == result.keys()
    assert all(torch.equal(exported[name], result[name]) for name in result)
    base = lora.folder / "base"
    assert torch.equal(logits(base, folder), logits(base, run / "adapter"))
    assert "library_name: peft" in (folder / "README.md").read_text()


def test_tokenizer_template_and_end_of_answer_go_with_the_model(full: Project, tmp_path: Path) -> None:
    folder = export_well(full.folder / "out", tmp_path / "model", "--checkpoint", "step-00000004")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shipped = Path(files.__file__).parent / "data" / "templates" / "chatml.jinja"
    assert tokenizer.chat_template == shipped.read_text()
    assert AutoTokenizer.from_pretrained(full.folder / "out" / "model").chat_template == shipped.read_text()
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|im_end|>"]
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == ends


def test_the_model_card_says_what_was_trained(full: Project, lora: Project, tmp_path: Path) -> None:
    folder = export_well(full.folder / "out", tmp_path / "full", "--checkpoint", "step-00000004")
    card = (folder / "README.md").read_text()
    outcome = full.outcome("out")
    for said in (
        "license: llama3.1",
        f"base_model: {full.folder / 'base'}",
        "every weight of it trained",
        str(full.folder / "train.jsonl"),
        f"{outcome.losses[0]:.4f} at step 1, {outcome.losses[-1]:.4f} at step 4",
        f"evaluation loss {outcome.evaluations[4]:.4f} after step 4",
        f"torch {torch.__version__}",
        "learning_rate: 0.01",
        "trained tokens",
    ):
        assert said in card, said
    assert (folder / "LICENSE.txt").read_text() == "terms"
    card = (export_well(lora.folder / "out", tmp_path / "lora") / "README.md").read_text()
    assert "LoRA of rank 4 and alpha 8, merged into" in card
    assert "likeliest next token" in card
    assert "names no licence" in card


# ---- what a person can change


def refused(run: Path, *words: str) -> str:
    ran = export(run, *words)
    assert ran.code == 2, ran.out
    return ran.err


def test_a_folder_that_is_no_run_is_refused(full: Project) -> None:
    assert "no recipe.yaml in it" in refused(full.folder / "base")


def test_a_run_without_anything_saved_is_refused(full: Project, tmp_path: Path) -> None:
    shutil.copy(full.folder / "out" / "recipe.yaml", tmp_path)
    assert "nothing of this run is saved yet" in refused(tmp_path)
    assert "no such checkpoint" in refused(tmp_path, "--checkpoint", "step-00000007")


def test_a_torn_checkpoint_is_named_and_the_one_before_is_taken(full: Project, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(full.folder / "out", run)
    shutil.rmtree(run / "model")
    torn = run / "checkpoints" / "step-00000004" / "layer-00002.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    assert "layer-00002.safetensors has another size" in refused(run, "--checkpoint", "step-00000004")
    ran = export(run)
    assert ran.code == 0, ran.err
    assert "the checkpoint of step 2" in ran.out
    assert (run / "export" / "model.safetensors").is_file()


def test_a_target_with_something_in_it_is_refused(full: Project, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    assert "not an empty folder" in refused(full.folder / "out", "--out", str(tmp_path))
    assert "not an empty folder" in refused(full.folder / "out", "--out", str(tmp_path / "note"))


def test_a_base_model_that_has_moved_is_found_with_base(lora: Project, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(lora.folder / "out", run)
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace(str(lora.folder / "base"), str(tmp_path / "gone")))
    assert "give its folder with --base" in refused(run)
    assert not (run / "export").exists()
    folder = export_well(run, tmp_path / "model", "--base", str(lora.folder / "base"))
    whole = export_well(lora.folder / "out", tmp_path / "whole")
    assert torch.equal(logits(folder), logits(whole))
    export_well(run, tmp_path / "adapter", "--adapter-only")  # needs none


def test_an_adapter_is_not_merged_into_a_quantised_base(lora: Project, tmp_path: Path) -> None:
    base = tmp_path / "quantised"
    shutil.copytree(lora.folder / "base", base)
    config = json.loads((base / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (base / "config.json").write_text(json.dumps(quantised))
    said = refused(lora.folder / "out", "--base", str(base), "--out", str(tmp_path / "model"))
    assert "belongs into the original" in said
    assert "--base" in said


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    full: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    said = refused(full.folder / "out", "--out", str(tmp_path / "model"))
    assert "are free on that disk" in said
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--adapter-only"], "has no adapter"),
        (["--max-shard-size", "big"], "--max-shard-size: expected a size"),
    ],
)
def test_options_that_make_no_sense_are_refused(words: list[str], message: str, full: Project) -> None:
    assert message in refused(full.folder / "out", *words)


def test_weights_beyond_float16_are_refused(full: Project, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(full.folder / "out", run)
    model: Any = AutoModelForCausalLM.from_pretrained(run / "model")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e6
    model.save_pretrained(run / "model")
    said = refused(run, "--dtype", "fp16", "--out", str(tmp_path / "half"))
    assert "layer 2: model.layers.1.mlp.up_proj.weight has values beyond what float16 holds" in said
    assert not list(tmp_path.glob("half*"))
