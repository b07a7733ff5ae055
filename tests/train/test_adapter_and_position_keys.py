"""The recipe's keys of adapters and positions, by the command: they train, are saved, and go on after a break."""

from __future__ import annotations

import json
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.checkpoints import rewritten
from support.recipes import run_rpft
from transformers import AutoModelForCausalLM

from rpft.train.checkpoint import read_state

KEYS = {
    "r": 4,
    "alpha": 8,
    "target_modules": ["q_proj", "o_proj"],
    "modules_to_save": ["norm"],
    "rslora": True,
    "dora": True,
    "lr_ratio_b": 4.0,
}


def test_a_run_with_every_key_of_the_adapter_is_one_run_whether_broken_or_not(project: Any) -> None:
    made = project("adapter keys", "llama", sections={"adapter": KEYS, "checkpoint": {"every_steps": 2}})
    whole = made.train_well("whole")
    broken = made.train("whole", "--resume", str(whole.folder / "checkpoints" / "step-00000002"))
    assert broken.code == 0, broken.err
    again = made.outcome("whole")
    assert again.losses == whole.losses
    assert again.result == whole.result
    names = load_file(whole.folder / "adapter" / "adapter_model.safetensors").keys()
    assert {name.rpartition("lora_")[2] for name in names if "lora_" in name} == {
        "A.weight",
        "B.weight",
        "magnitude_vector",
    }
    assert any(name.endswith("model.norm.weight") for name in names)
    config = json.loads((whole.folder / "adapter" / "adapter_config.json").read_text())
    assert (config["use_dora"], config["use_rslora"], config["modules_to_save"]) == (True, True, ["norm"])
    base = AutoModelForCausalLM.from_pretrained(made.folder / "base")
    PeftModel.from_pretrained(base, str(whole.folder / "adapter"))
    slower = made.train_well("slower", "adapter.lr_ratio_b=1.0")
    assert slower.losses[0] == whole.losses[0]
    assert slower.losses[1:] != whole.losses[1:]


def test_a_checkpoint_from_before_the_keys_goes_on_with_their_defaults(project: Any) -> None:
    made = project("older checkpoint", "llama", sections={"adapter": {"r": 4}, "checkpoint": {"every_steps": 2}})
    outcome = made.train_well("out")
    path = outcome.folder / "checkpoints" / "step-00000002"
    now = read_state(path).run
    with rewritten(path / "state.json") as content:
        del content["run"]["model"]["rope_scaling"]
        for key in ("rslora", "dora", "lr_ratio_b", "modules_to_save", "target_parameters"):
            del content["run"]["adapter"][key]
    assert read_state(path).run == now
    assert made.train("out", "--resume", str(path)).code == 0


def test_rows_beyond_the_positions_are_refused_with_the_key_that_scales_them(fresh: Any) -> None:
    made = fresh("llama", max_position_embeddings=32)
    refused = made.train("out")
    assert refused.code == 2
    assert "the model has 32 positions" in refused.err
    assert "set data.max_seq_len to at most 32, or scale its positions: " in refused.err
    words = refused.err.rpartition("positions: ")[2].split()
    assert words == ["model.rope_scaling.type=yarn", "model.rope_scaling.factor=2"]
    outcome = made.train_well("out", *words)
    config = json.loads((outcome.folder / "model" / "config.json").read_text())
    assert config["max_position_embeddings"] == 64
    assert config["rope_parameters"] | {"rope_theta": 0} == {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 0,
    }
    folder = made.folder / "exported"
    assert run_rpft("export", str(outcome.folder), "--out", str(folder)).code == 0
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == config["rope_parameters"]
    ids = torch.arange(5, 55).view(1, -1)
    logits = [AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (folder, outcome.folder / "model")]
    assert torch.equal(*logits)


def test_a_model_of_learned_positions_is_not_offered_the_key(fresh: Any) -> None:
    made = fresh("gpt2", n_positions=32)
    refused = made.train("out")
    assert refused.code == 2
    assert "the model has 32 positions" in refused.err
    assert "rope_scaling" not in refused.err
