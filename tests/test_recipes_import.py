"""`rpft recipes import`: what becomes of each key of another program's file; nothing is dropped without a word."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from support.recipes import run_rpft

from rpft.errors import UserError
from rpft.recipe.importing.draft import Draft, Fate, located
from rpft.recipe.importing.run import PROGRAMS, Imported, import_recipe
from rpft.recipe.keys import field_at
from rpft.recipe.load import load_recipe
from rpft.recipe.schema import Recipe

AXOLOTL = """\
base_model: meta-llama/Llama-3.1-8B-Instruct
model_type: LlamaForCausalLM
load_in_8bit: false
strict: false
datasets:
  - path: data/support.jsonl
    type: chat_template
    field_messages: dialogue
    message_property_mappings: {role: from, content: value}
    roles_to_train: [assistant]
    train_on_eos: turn
  - path: someone/instructions
    type: alpaca
    name: short
    split: train
    shards: 4
  - path: books.jsonl
    type: completion
    field: body
    colour: green
val_set_size: 0.02
output_dir: ./outputs/lora
sequence_len: 4096
sample_packing: yes
pad_to_sequence_len: true
excess_length_strategy: truncate
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_target_modules: [q_proj]
wandb_project: support
wandb_entity:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_8bit
adam_beta2: 0.95
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
eval_steps: 50
save_steps: 0.1
max_steps: 200
logging_steps: 1
deepspeed: configs/zero3.json
special_tokens: {pad_token: "<|end_of_text|>"}
frobnicate: 7
"""
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-8B
trust_remote_code: false
stage: sft
do_train: true
finetuning_type: lora
lora_target: q_proj,v_proj
dataset: support, qa
template: qwen3
max_samples: 1000
overwrite_cache: true
output_dir: saves/qwen3-8b
logging_steps: 10
save_steps: 500
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
bf16: true
ddp_timeout: 180000000
val_size: 200
eval_strategy: steps
eval_steps: 500
wobble: [1]
"""
DATASET_INFO = {
    "support": {
        "file_name": "support.json",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "images": "pictures"},
        "tags": {"user_tag": "customer"},
        "converter": "mine",
    },
    "qa": {"hf_hub_url": "someone/qa", "subset": "ko", "columns": {"prompt": "question", "response": "answer"}},
    "pairs": {"file_name": "pairs.json", "ranking": True},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
    return tmp_path


def imported(text: str, num_gpus: int = 1) -> tuple[Imported, Recipe]:
    """What is made of a file, and the recipe that its text loads as."""
    path = Path("config.yaml")
    path.write_text(text, encoding="utf-8")
    found = import_recipe(path, num_gpus)
    Path("recipe.yaml").write_text(found.text("recipe.yaml"), encoding="utf-8")
    return found, load_recipe("recipe.yaml")


def keys_with(found: Imported, fate: Fate) -> set[str]:
    return {note.key for note in found.notes if note.fate is fate}


def test_an_axolotl_file_becomes_a_recipe_that_loads(folder: Path) -> None:
    _, recipe = imported(AXOLOTL, num_gpus=4)
    assert recipe.model.path == "meta-llama/Llama-3.1-8B-Instruct"
    assert recipe.adapter is not None
    adapter = recipe.adapter
    assert (adapter.r, adapter.alpha, adapter.dropout, adapter.target_modules) == (32, 16, 0.05, "all-linear")
    support, instructions, books = recipe.data.train
    assert (support.path, support.format, support.columns) == (
        "data/support.jsonl",
        "messages",
        {"messages": "dialogue"},
    )
    assert (instructions.path, instructions.format, instructions.config) == (
        "hub:someone/instructions",
        "alpaca",
        "short",
    )
    assert (books.path, books.format, books.columns) == ("books.jsonl", "text", {"text": "body"})
    assert recipe.data.packing
    assert recipe.data.truncation == "right"
    assert recipe.data.eval_fraction == 0.02
    train = recipe.train
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == (2, 16)
    assert (train.learning_rate, train.warmup_ratio, train.max_steps) == (2e-4, 0.05, 200)
    assert (train.eval_every, recipe.checkpoint.every_steps) == (50, 20)
    assert recipe.optimizer.betas == (0.9, 0.95)
    assert recipe.logging.wandb.project == "support"


def test_every_key_of_the_file_is_accounted_for(folder: Path) -> None:
    for text in (AXOLOTL, LLAMA_FACTORY):
        found, _ = imported(text)
        keys = [line.partition(":")[0] for line in text.splitlines() if line[0] not in " -"]
        said = {note.key for note in found.notes if "[" not in note.key and " " not in note.key}
        assert sorted(keys) == sorted({*said, *found.off_keys} - set(found.defaults))
        assert not said & set(found.off_keys)


def test_what_is_on_there_and_here_is_not_called_off(folder: Path) -> None:
    text = f"{LLAMA_FACTORY}freeze_vision_tower: true\nfreeze_trainable_layers: 2\n"
    found, _ = imported(text)
    assert not {"stage", "eval_strategy"} & set(found.off_keys)
    assert keys_with(found, Fate.CARRIED) >= {"stage", "eval_strategy"}
    assert "freeze_vision_tower" in keys_with(found, Fate.OURS)
    assert "freeze_trainable_layers" in keys_with(found, Fate.LOST)


def test_every_key_of_both_programs_has_a_rule_that_says_something(folder: Path) -> None:
    """Whatever stands there: a rule either notes its key or counts it as off, and never fails on odd values."""
    for program in PROGRAMS:
        for key, rule in program.rules.items():
            for value in (True, False, 3, 0.5, "word", ["a"], {"a": "b"}):
                draft = Draft({key: located(value, "here")}, "config.yaml")
                with suppress(UserError):
                    rule(draft, key, draft.source[key])
                    assert draft.notes or draft.off_keys == [key], (key, value)


def test_what_has_no_place_is_named_with_its_line_and_why(folder: Path) -> None:
    found, _ = imported(AXOLOTL)
    assert keys_with(found, Fate.LOST) == {
        *("datasets[1].shards", "evals_per_epoch", "special_tokens"),
    }
    assert keys_with(found, Fate.UNKNOWN) == {"datasets[2].colour", "frobnicate"}
    assert keys_with(found, Fate.CHANGED) == {"gradient_accumulation_steps", "optimizer"}
    assert {"gradient_checkpointing", "flash_attention", "deepspeed", "model_type"} <= keys_with(found, Fate.OURS)
    assert "config.yaml:54: frobnicate: is 7" in found.report()
    for note in found.notes:
        if note.fate in (Fate.LOST, Fate.UNKNOWN):
            assert f"# {note.fate.value}: {note.key}: " in found.text("recipe.yaml")


def test_a_llama_factory_file_becomes_a_recipe_with_that_programs_defaults(folder: Path) -> None:
    found, recipe = imported(LLAMA_FACTORY)
    assert recipe.adapter is not None
    assert (recipe.adapter.r, recipe.adapter.alpha) == (8, 16)
    assert recipe.adapter.target_modules == ("q_proj", "v_proj")
    train = recipe.train
    assert (train.num_epochs, train.lr_scheduler, train.warmup_ratio) == (3.0, "linear", 0.0)
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == (1, 8)
    assert recipe.data.max_seq_len == 2048
    assert recipe.data.eval_rows == 200
    support, qa = recipe.data.train
    assert (support.path, support.format, support.max_rows) == ("data/support.json", "messages", 1000)
    assert support.columns == {"messages": "talk"}
    assert (qa.path, qa.config, qa.columns) == (
        "hub:someone/qa",
        "ko",
        {"instruction": "question", "output": "answer"},
    )
    assert {"dataset support.columns.images", "dataset support.tags.user_tag"} == keys_with(found, Fate.LOST)
    assert {"dataset support.converter", "wobble"} == keys_with(found, Fate.UNKNOWN)
    assert "written with LLaMA-Factory's default: cutoff_len" in found.report()


def test_a_full_run_has_no_adapter(folder: Path) -> None:
    _, recipe = imported("model_name_or_path: m\nfinetuning_type: full\ndataset: qa\noutput_dir: o\n")
    assert recipe.adapter is None
    assert recipe.train.micro_batch_size == 8
    _, recipe = imported("base_model: m\ndatasets: [{path: a.jsonl}]\nlearning_rate: 1e-5\noutput_dir: o\n")
    assert recipe.adapter is None
    assert (recipe.data.max_seq_len, recipe.train.gradient_accumulation_steps) == (512, 1)


def test_a_quantised_base_is_carried_over(folder: Path) -> None:
    rows = "datasets: [{path: a.jsonl}]\noutput_dir: o\n"
    for text, kind in (
        (f"base_model: m\nadapter: qlora\nload_in_4bit: true\n{rows}", "nf4"),
        (f"base_model: m\nadapter: lora\nload_in_8bit: true\n{rows}", "int8"),
        (f"base_model: m\nload_in_4bit: true\n{rows}", "none"),
        (
            "model_name_or_path: m\nquantization_bit: 4\nquantization_method: bnb\ndataset: qa\noutput_dir: o\n",
            "nf4",
        ),
        (
            "model_name_or_path: m\nquantization_bit: 2\nquantization_method: hqq\ndataset: qa\noutput_dir: o\n",
            "none",
        ),
        (
            "model_name_or_path: m\nquantization_bit: 4\nquantization_type: fp4\ndataset: qa\noutput_dir: o\n",
            "none",
        ),
    ):
        found, recipe = imported(text)
        assert recipe.model.quantize == kind
        assert ("quantization_bit" in keys_with(found, Fate.LOST)) == (kind == "none" and "quantization" in text)


def test_trackers_are_carried_over_where_they_have_a_name(folder: Path) -> None:
    rows = "datasets: [{path: a.jsonl}]\noutput_dir: o\n"
    trackers = "use_tensorboard: true\nwandb_project: p\nwandb_mode: offline\nmlflow_experiment_name: e\n"
    found, recipe = imported(f"base_model: m\n{trackers}wandb_watch: all\nuse_comet: true\n{rows}")
    logging = recipe.logging
    assert (logging.tensorboard, logging.wandb.project, logging.wandb.mode) == (True, "p", "offline")
    assert logging.mlflow.experiment == "e"
    assert keys_with(found, Fate.LOST) == {"wandb_watch", "use_comet"}
    found, recipe = imported(
        "model_name_or_path: m\nreport_to: [tensorboard, wandb]\ndataset: qa\noutput_dir: o\n"
    )
    assert recipe.logging.tensorboard
    assert "report_to: wandb needs a name: set logging.wandb.project" in found.report()


def test_kinds_of_adapters_are_carried_over(folder: Path) -> None:
    rows = "datasets: [{path: a.jsonl}]\noutput_dir: o\n"
    kinds = "peft_use_rslora: true\npeft_use_dora: true\nloraplus_lr_ratio: 16\nlora_modules_to_save: [lm_head]\n"
    scaling = "overrides_of_model_config: {rope_scaling: {type: yarn, factor: 4.0}}\n"
    _, recipe = imported(f"base_model: m\nadapter: lora\n{kinds}{scaling}{rows}")
    adapter = recipe.adapter
    assert adapter is not None
    assert (adapter.rslora, adapter.dora, adapter.lr_ratio_b) == (True, True, 16)
    assert adapter.modules_to_save == ("lm_head",)
    assert (recipe.model.rope_scaling.type, recipe.model.rope_scaling.factor) == ("yarn", 4.0)
    kinds = "use_rslora: true\nuse_dora: true\nloraplus_lr_ratio: 16\nadditional_target: embed_tokens,lm_head\n"
    _, recipe = imported(f"model_name_or_path: m\n{kinds}dataset: qa\noutput_dir: o\n")
    assert recipe.adapter is not None
    assert (recipe.adapter.rslora, recipe.adapter.dora, recipe.adapter.lr_ratio_b) == (True, True, 16)
    assert recipe.adapter.modules_to_save == ("embed_tokens", "lm_head")


def test_a_data_set_that_is_not_described_is_left_to_the_person(folder: Path) -> None:
    (folder / "data" / "dataset_info.json").unlink()
    found, recipe = imported(LLAMA_FACTORY)
    assert [source.path for source in recipe.data.train] == ["FILL-IN-support", "FILL-IN-qa"]
    assert "to be done: replace the paths that begin with FILL-IN" in found.report()


def test_steps_between_evaluations_go_where_no_row_is_held_out(folder: Path) -> None:
    found, recipe = imported("base_model: m\ndatasets: [{path: a.jsonl}]\neval_steps: 5\noutput_dir: o\n")
    assert recipe.train.eval_every is None
    assert keys_with(found, Fate.LOST) == {"eval_steps"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base_model: m\nrl: dpo\n", r"config.yaml:2: rl is dpo, and rpft trains on rows with a loss"),
        ("base_model: m\nadapter: llama-adapter\n", r"config.yaml:2: adapter is llama-adapter; rpft has lora"),
        ("model_name_or_path: m\nstage: dpo\n", r"config.yaml:2: stage is dpo"),
        ("model_name_or_path: m\nfinetuning_type: freeze\n", r"config.yaml:2: finetuning_type is freeze"),
        ("model_name_or_path: m\ndataset: pairs\n", r"config.yaml:2: pairs is a set of preferences"),
        ("model_name_or_path: m\ndataset: nope\n", r"config.yaml:2: nope is not in data.dataset_info.json"),
        ("model: {path: m}\n", r"it looks like a recipe of rpft"),
        ("model: {_component_: a.b}\n", r"it looks like torchtune's"),
        ("a: 1\n", r"a file of neither axolotl nor LLaMA-Factory"),
        ("base_model: m\nmodel_name_or_path: m\n", r"has keys of both"),
        ("- a\n", r"config.yaml: holds no keys"),
        ("", r"config.yaml: holds no keys"),
        (
            "base_model: m\ndatasets: [{path: a}]\noutput_dir: o\nlearning_rate: quick\n",
            r"config.yaml:4: train.learning_rate: expected a number > 0; found the text 'quick'",
        ),
        ("base_model: m\noutput_dir: o\n", r"config.yaml: names no rows: datasets is missing"),
    ],
)
def test_what_cannot_become_a_recipe_is_refused_by_line(folder: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        imported(text)


def test_a_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UserError, match=r"nowhere.yml: cannot be read"):
        import_recipe(Path("nowhere.yml"))


def test_every_key_that_a_rule_sets_is_one_of_the_schema(folder: Path) -> None:
    for program in PROGRAMS:
        for key, rule in program.rules.items():
            path = next((cell.cell_contents for cell in rule.__closure__ or () if rule.__name__ == "rule"), None)
            if isinstance(path, str) and path.count(".") == 1 and " " not in path:
                assert field_at(tuple(path.split("."))) is not None, key


def test_the_command_writes_once_and_says_the_rest(folder: Path) -> None:
    Path("config.yml").write_text(AXOLOTL, encoding="utf-8")
    ran = run_rpft("recipes", "import", "config.yml", "--out", "mine.yaml", "--gpus", "2")
    assert ran.code == 0
    assert ran.out.startswith("config.yml: read as a file of axolotl, which has base_model\n")
    assert ran.out.endswith("mine.yaml: look at the rows first: rpft data mine.yaml\n")
    assert Path("mine.yaml").read_text(encoding="utf-8").startswith("# rpft train mine.yaml\n")
    assert load_recipe("mine.yaml").train.gradient_accumulation_steps == 8
    again = run_rpft("recipes", "import", "config.yml", "--out", "mine.yaml")
    assert (again.code, "is already there and is not overwritten" in again.err) == (2, True)


def test_without_out_the_recipe_alone_is_on_standard_output(folder: Path) -> None:
    Path("config.yml").write_text(AXOLOTL, encoding="utf-8")
    ran = run_rpft("recipes", "import", "config.yml")
    Path("piped.yaml").write_text(ran.out, encoding="utf-8")
    assert load_recipe("piped.yaml").output_dir == "./outputs/lora"
    assert "frobnicate" in ran.err
