"""Reading a configuration of axolotl: what its keys are called here, and which have no place here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpft.errors import UserError
from rpft.recipe.importing.axolotl_rows import OWN_TEMPLATE, sources
from rpft.recipe.importing.draft import Draft, Fate, Rule, lost, ours, shown, to, unquoted
from rpft.recipe.importing.trainer import (
    NO_TRACKER,
    ONE_RATE,
    as_list,
    by_steps,
    held_out,
    optimizer,
    quantize,
    scheduler,
)
from rpft.recipe.yaml_tree import Located

_TEMPLATES = {
    "chatml": "chatml",
    "llama3": "llama3",
    "gemma": "gemma",
    "qwen3": "qwen3",
    "phi_3": "phi",
    "phi_35": "phi",
    "mistral_v1": "mistral",
    "mistral_v2v3": "mistral",
    "mistral_v3_tekken": "mistral",
}
_ATTENTION = "engine.kernels and model.attention: auto take the fastest there is"
_PACKED = "data.packing packs the whole set, rows do not see each other"


def _reward(draft: Draft, key: str, node: Located) -> None:
    if unquoted(node.plain()) is False:
        draft.off(key)
        return
    raise UserError(
        f"{node.where}: {key} is {shown(node.plain())}, and rpft trains on rows with a loss on their tokens only:"
        " no preferences, rewards or reinforcement. Keep that run where it is"
    )


def _adapter(draft: Draft, key: str, node: Located) -> None:
    name = node.plain()
    if name not in ("lora", "qlora"):
        raise UserError(
            f"{node.where}: adapter is {shown(name)}; rpft has lora, and all weights where adapter is left out"
        )
    draft.set("adapter.type", "lora", node.where)
    draft.note(Fate.CARRIED, key, node, "is adapter.type")


def _of_adapter(path: str, value: Callable[[Any], Any] = unquoted) -> Rule:
    """A key that counts only where there is an adapter."""
    carried = to(f"adapter.{path}", value)

    def rule(draft: Draft, key: str, node: Located) -> None:
        if draft.get("adapter") is None:
            draft.note(Fate.LOST, key, node, "there is no adapter, so it says nothing")
        else:
            carried(draft, key, node)

    return rule


def _target_linear(draft: Draft, key: str, node: Located) -> None:
    if unquoted(node.plain()) is not True or draft.get("adapter") is None:
        draft.off(key)
        return
    draft.set("adapter.target_modules", "all-linear", node.where)
    draft.note(Fate.CARRIED, key, node, "is adapter.target_modules: all-linear")


def _target_modules(draft: Draft, key: str, node: Located) -> None:
    if draft.get("lora_target_linear") is True:
        draft.note(Fate.CARRIED, key, node, "is among the linear layers of lora_target_linear")
    else:
        _of_adapter("target_modules")(draft, key, node)


def _quantized(bits: int) -> Rule:
    def rule(draft: Draft, key: str, node: Located) -> None:
        if unquoted(node.plain()) is not True or draft.get("adapter") is None:
            draft.off(key)
        else:
            quantize(draft, key, node, bits)

    return rule


def _precision(name: str, otherwise: str | None) -> Rule:
    """bf16, fp16 and their kin: one of them is on."""

    def rule(draft: Draft, key: str, node: Located) -> None:
        value = unquoted(node.plain())
        if value in (True, "auto", "full"):
            draft.set("model.dtype", name, node.where)
            draft.note(Fate.CARRIED, key, node, f"is model.dtype: {name}")
        elif otherwise and not any(draft.get(other) for other in ("fp16", "float16", "bfloat16")):
            draft.set("model.dtype", otherwise, node.where)
            draft.note(Fate.CHANGED, key, node, f"off, so model.dtype is {otherwise}")
        else:
            draft.off(key)

    return rule


def _batch_size(draft: Draft, key: str, node: Located) -> None:
    rows, microbatch = unquoted(node.plain()), draft.get("micro_batch_size") or 1
    if isinstance(rows, int) and rows % microbatch == 0:
        draft.set("train.gradient_accumulation_steps", rows // microbatch, node.where)
        draft.note(Fate.CARRIED, key, node, "is train.gradient_accumulation_steps x micro_batch_size")
    else:
        draft.note(Fate.LOST, key, node, "no multiple of micro_batch_size; set train.gradient_accumulation_steps")


def _attention(draft: Draft, key: str, node: Located) -> None:
    if unquoted(node.plain()) in (True, "eager"):
        draft.set("model.attention", "eager", node.where)
        draft.note(Fate.CARRIED, key, node, "is model.attention: eager")
    else:
        ours(_ATTENTION)(draft, key, node)


def _wandb_mode(draft: Draft, key: str, node: Located) -> None:
    mode = node.plain()
    if mode in ("online", "offline"):
        draft.set("logging.wandb.mode", mode, node.where)
        draft.note(Fate.CARRIED, key, node, "is logging.wandb.mode")
    else:
        draft.note(Fate.LOST, key, node, f"{shown(mode)} is not there; leave logging.wandb out")


def _too_long(draft: Draft, key: str, node: Located) -> None:
    names = {"drop": "drop", "truncate": "right", "raise": "error"}
    name = names.get(str(node.plain()))
    if name is None:
        draft.note(Fate.LOST, key, node, f"{shown(node.plain())} is not there; data.truncation stays at drop")
        return
    draft.set("data.truncation", name, node.where)
    draft.note(Fate.CARRIED, key, node, f"is data.truncation: {name}")


def _train_on_inputs(draft: Draft, key: str, node: Located) -> None:
    draft.set("data.train_on", "all" if unquoted(node.plain()) else "assistant", node.where)
    draft.note(Fate.CARRIED, key, node, "is data.train_on")


def _chat_template(draft: Draft, key: str, node: Located) -> None:
    name = str(node.plain())
    if name == "jinja":
        draft.note(Fate.CARRIED, key, node, "is what chat_template_jinja says")
    elif name == OWN_TEMPLATE:
        draft.note(Fate.CARRIED, key, node, "is data.chat_template: null, the tokenizer's own")
    elif name in _TEMPLATES:
        draft.set("data.chat_template", _TEMPLATES[name], node.where)
        text = f"data.chat_template: {_TEMPLATES[name]} is rpft's own; null is the tokenizer's"
        draft.note(Fate.CHANGED, key, node, text)
    else:
        text = f"{name} does not come with rpft: the tokenizer's own is used, or a file in data.chat_template"
        draft.note(Fate.LOST, key, node, text)


def _jinja(draft: Draft, key: str, node: Located) -> None:
    text = str(node.plain())
    if draft.get("chat_template") not in (None, "jinja"):
        draft.note(Fate.LOST, key, node, "chat_template names another one")
    elif "{" in text:
        draft.note(Fate.LOST, key, node, "write the template into a file and name that in data.chat_template")
    else:
        draft.set("data.chat_template", text, node.where)
        draft.note(Fate.CARRIED, key, node, "is data.chat_template")


def _overridden_config(draft: Draft, key: str, node: Located) -> None:
    values = node.plain() if isinstance(node.value, dict) else {}
    scaling = values.get("rope_scaling")
    scaling = scaling if isinstance(scaling, dict) else {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if set(values) == {"rope_scaling"} and kind in ("yarn", "linear") and "factor" in scaling:
        draft.set("model.rope_scaling", {"type": kind, "factor": scaling["factor"]}, node.where)
        draft.note(Fate.CARRIED, key, node, "is model.rope_scaling")
    else:
        draft.note(Fate.LOST, key, node, "edit config.json in a copy of the model's folder")


def defaults(draft: Draft) -> dict[str, Any]:
    """What axolotl does without being told, where a recipe would do something else."""
    found: dict[str, Any] = {"sequence_len": 512, "output_dir": "./model-out"}
    return found if draft.get("batch_size") else found | {"gradient_accumulation_steps": 1}


RULES: dict[str, Rule] = {
    "base_model": to("model.path", str),
    "revision_of_model": to("model.revision", str),
    "bf16": _precision("bfloat16", "float32"),
    "bfloat16": _precision("bfloat16", None),
    "fp16": _precision("float16", None),
    "float16": _precision("float16", None),
    "float32": _precision("float32", None),
    "datasets": sources("data.train"),
    "test_datasets": sources("data.eval"),
    "pretraining_dataset": sources("data.train", "text"),
    "val_set_size": held_out,
    "sequence_len": to("data.max_seq_len"),
    "sample_packing": to("data.packing"),
    "excess_length_strategy": _too_long,
    "train_on_inputs": _train_on_inputs,
    "chat_template": _chat_template,
    "chat_template_jinja": _jinja,
    "dataset_processes": to("data.processes"),
    "dataset_num_proc": to("data.processes"),
    "adapter": _adapter,
    "lora_r": _of_adapter("r"),
    "lora_alpha": _of_adapter("alpha"),
    "lora_dropout": _of_adapter("dropout"),
    "lora_target_linear": _target_linear,
    "lora_target_modules": _target_modules,
    "micro_batch_size": to("train.micro_batch_size"),
    "batch_size": _batch_size,
    "num_epochs": to("train.num_epochs"),
    "lr_scheduler": scheduler,
    "cosine_min_lr_ratio": to("train.min_lr_ratio"),
    "optimizer": optimizer,
    "evals_per_epoch": by_steps("train.eval_every"),
    "saves_per_epoch": by_steps("checkpoint.every_steps"),
    "eager_attention": _attention,
    "attn_implementation": _attention,
    "attention": _attention,
    "gpu_memory_limit": to("engine.vram_limit"),
    "overrides_of_model_config": _overridden_config,
    "rl": _reward,
    "reward_model": _reward,
    "process_reward_model": _reward,
    "auto_resume_from_checkpoints": ours("`rpft train RECIPE --resume` goes on from the newest checkpoint"),
    "dataset_prepared_path": ours("tokens are kept where data.token_cache says"),
    "eval_sample_packing": ours(_PACKED),
    "pad_to_sequence_len": ours("a pack is as long as data.max_seq_len; unpacked rows are padded to few lengths"),
    "shuffle_merged_datasets": ours("every epoch has an order of its own, drawn by train.seed"),
    "eval_batch_size": ours("evaluation takes train.micro_batch_size rows at once"),
    "device_map": ours("every GPU takes its turn"),
    "model_type": ours("config.json says what the model is"),
    "tokenizer_type": ours("the tokenizer is the one in the model's folder"),
    "tokenizer_use_fast": ours("the tokenizer is the one in the model's folder"),
    "tokenizer_config": lost("the tokenizer is the one in the model's folder: copy the other one there"),
    "base_model_config": lost("config.json is the one in the model's folder"),
    "strict": ours("an unknown key is always an error"),
    "flash_optimum": ours(_ATTENTION),
    "load_in_4bit": _quantized(4),
    "load_in_8bit": _quantized(8),
    "bnb_config_kwargs": lost("nf4 has blocks of 64 and double quantisation, as QLoRA"),
    "gptq": lost("of quantised checkpoints, nf4 of bitsandbytes is read (model.quantize)"),
    "lora_model_dir": lost("a run starts from a new adapter; merge the old one into the model first"),
    "lora_modules_to_save": _of_adapter("modules_to_save"),
    "lora_target_parameters": _of_adapter("target_parameters", as_list),
    "lora_fan_in_fan_out": ours("the shape of a layer says it"),
    "peft_use_dora": _of_adapter("dora"),
    "peft_use_rslora": _of_adapter("rslora"),
    "loraplus_lr_ratio": _of_adapter("lr_ratio_b"),
    "embedding_lr": lost(ONE_RATE),
    "embedding_lr_scale": lost(ONE_RATE),
    "lr_groups": lost(ONE_RATE),
    "unfrozen_parameters": lost("all weights are trained, or an adapter"),
    "special_tokens": lost("tokens are those of the tokenizer (padding goes by length and needs none)"),
    "tokens": lost("the vocabulary is not extended; add tokens to model and tokenizer first"),
    "added_tokens_overrides": lost("the vocabulary is not extended; add tokens to model and tokenizer first"),
    "eot_tokens": lost("what an answer ends with is found in the chat template"),
    "default_system_message": lost(
        "rows are not changed; put the system message into them, or into a template file"
    ),
    "dataset_exact_deduplication": lost("rows are trained as often as they stand there"),
    "min_sample_len": lost("rows that are short are trained too"),
    "sequence_parallel_degree": ours("a row is computed on one GPU at a time; long rows fit by recompute"),
    "context_parallel_size": ours("a row is computed on one GPU at a time; long rows fit by recompute"),
    "tensor_parallel_size": ours("a layer is computed on one GPU at a time"),
    "plugins": lost("there are none; fused kernels come from engine.kernels"),
    "loss_watchdog_threshold": lost("checkpoint.spike_deviations guards against a loss that jumps"),
    "loss_watchdog_patience": lost("checkpoint.spike_steps says how many steps make a jump"),
    "use_tensorboard": to("logging.tensorboard"),
    "wandb_project": to("logging.wandb.project", str),
    "wandb_entity": to("logging.wandb.entity", str),
    "wandb_name": to("logging.wandb.name", str),
    "wandb_mode": _wandb_mode,
    "use_wandb": ours("naming logging.wandb.project is enough"),
    "mlflow_experiment_name": to("logging.mlflow.experiment", str),
    "mlflow_tracking_uri": to("logging.mlflow.tracking_uri", str),
    "mlflow_run_name": to("logging.mlflow.name", str),
    "use_mlflow": ours("naming logging.mlflow.experiment is enough"),
    "activation_offloading": ours("what is kept between stages lies in RAM"),
    "batch_flattening": ours(_PACKED),
    "max_memory": ours("engine.vram_limit and engine.ram_limit bound what is used"),
    "fp8": lost("products are in the precision of model.dtype"),
    "qat": lost("products are in the precision of model.dtype"),
    "quantization": lost("it belongs to another command than training"),
    "lr_scheduler_kwargs": lost("train.min_lr_ratio and train.decay_ratio are what there is"),
    "lr_quadratic_warmup": lost("the warm-up is linear"),
    "cosine_constant_lr_ratio": lost("train.lr_scheduler: wsd stays at the peak before it falls"),
    "eval_sequence_len": lost("evaluation rows are as long as data.max_seq_len allows"),
    "curriculum_sampling": lost("every epoch has an order of its own, drawn by train.seed"),
    "save_first_step": lost("checkpoints go by checkpoint.every_steps and every_minutes"),
    "profiler_steps": lost("benchmarks/timeline.py draws a step of a trace"),
}

PATTERNS: tuple[tuple[str, Rule], ...] = (
    ("lora_*_kernel", ours("engine.kernels: auto compiles layers where it can")),
    ("*_attention", ours(_ATTENTION)),
    ("flash_attn_*", ours(_ATTENTION)),
    ("unsloth_*", ours("engine.kernels: auto compiles layers where it can")),
    ("liger_*", ours("engine.kernels: auto compiles layers where it can; the loss is computed in chunks")),
    ("cut_cross_entropy", ours("the loss is computed in chunks, logits are never whole")),
    ("sample_packing_*", ours(_PACKED)),
    ("is_*_derived_model", ours("config.json says what the model is")),
    ("dataset_shard_*", lost("data.train.0.max_rows takes the first rows")),
    ("*_embeddings*", lost("the vocabulary is as large as the checkpoint has it")),
    ("eval_table_*", lost("evaluation is the loss")),
    ("eval_causal_lm_*", lost("evaluation is the loss")),
    ("do_*_eval", lost("evaluation is the loss")),
    ("*pose*", lost("positions are the model's own")),
    ("wandb_*", lost("figures go there (logging.wandb), and nothing else")),
    ("*mlflow_*", lost("figures go there (logging.mlflow), and nothing else")),
    ("*comet*", lost(NO_TRACKER)),
    ("peft_*", lost("adapters are those of docs/adapters.md")),
    ("relora*", lost("adapters are those of docs/adapters.md")),
    ("lisa_*", lost("all weights are trained, or an adapter")),
)
