"""Reading a configuration of LLaMA-Factory: what its keys are called here, and which have no place here."""

from __future__ import annotations

from typing import Any

from rpft.errors import UserError
from rpft.recipe.importing.draft import Draft, Fate, Rule, lost, ours, shown, to, unquoted
from rpft.recipe.importing.llama_factory_rows import datasets, names_in, read_with_dataset
from rpft.recipe.importing.trainer import NO_TRACKER, REMAINING, held_out, optimizer, quantize, scheduler
from rpft.recipe.yaml_tree import Located

_TEMPLATES = ("chatml", "gemma", "llama3", "mistral", "phi")
_KERNELS = "engine.kernels: auto compiles layers where it can; the loss is computed in chunks"
_OF_VISION = ("freeze_vision_tower", "freeze_multi_modal_projector")
_ONE_METHOD = "adapter: {type: lora} or all weights are what there is"


def defaults(draft: Draft) -> dict[str, Any]:
    """What LLaMA-Factory does without being told, where a recipe would do something else."""
    found: dict[str, Any] = {
        "cutoff_len": 2048,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 5e-5,
        "lr_scheduler_type": "linear",
        "finetuning_type": "lora",
    }
    if draft.get("finetuning_type") in (None, "lora"):
        rank = draft.get("lora_rank") or 8
        found |= {"lora_rank": rank, "lora_alpha": 2 * rank, "lora_target": "all"}
    if not draft.get("warmup_steps"):
        found["warmup_ratio"] = 0.0
    if (draft.get("max_steps") or 0) <= 0:
        found["num_train_epochs"] = 3.0
    return found


def _stage(draft: Draft, key: str, node: Located) -> None:
    stage = node.plain()
    if stage == "pt":
        draft.note(Fate.CHANGED, key, node, "rows are read as text, and every token is trained")
    elif stage == "sft":
        draft.note(Fate.CARRIED, key, node, "is what a run does: answers are trained")
    else:
        raise UserError(
            f"{node.where}: stage is {shown(stage)}, and rpft trains on rows with a loss on their tokens only: sft"
            " and pt. Keep that run where it is"
        )


def _method(draft: Draft, key: str, node: Located) -> None:
    name = node.plain()
    if name not in ("lora", "full"):
        raise UserError(
            f"{node.where}: finetuning_type is {shown(name)}; rpft has lora and full. Change it to one of them"
        )
    if name == "lora":
        draft.set("adapter.type", "lora", node.where)
    draft.note(Fate.CARRIED, key, node, "is adapter.type" if name == "lora" else "is a recipe without adapter")


def _of_lora(rule: Rule) -> Rule:
    def checked(draft: Draft, key: str, node: Located) -> None:
        if (draft.get("finetuning_type") or "lora") != "lora":
            draft.note(Fate.LOST, key, node, "there is no adapter, so it says nothing")
        else:
            rule(draft, key, node)

    return checked


def _quantization(draft: Draft, key: str, node: Located) -> None:
    bits = unquoted(node.plain())
    bnb = draft.get("quantization_method") in (None, "bnb", "bitsandbytes")
    if bits in (4, 8) and bnb and draft.get("quantization_type") in (None, "nf4"):
        quantize(draft, key, node, bits)
    else:
        draft.note(
            Fate.LOST, key, node, "model.quantize has nf4, int8 and fp8, as bitsandbytes and torchao do them"
        )


def _quantization_method(draft: Draft, key: str, node: Located) -> None:
    if node.plain() in ("bnb", "bitsandbytes"):
        draft.note(Fate.CARRIED, key, node, "is model.quantize with quantization_bit")
    else:
        draft.note(
            Fate.LOST, key, node, "model.quantize has nf4, int8 and fp8, as bitsandbytes and torchao do them"
        )


def _target(draft: Draft, key: str, node: Located) -> None:
    names = names_in(node.plain())
    draft.set("adapter.target_modules", "all-linear" if names == ["all"] else names, node.where)
    draft.note(Fate.CARRIED, key, node, "is adapter.target_modules")


def _packing(draft: Draft, key: str, node: Located) -> None:
    if unquoted(node.plain()) is not True:
        draft.off(key)
        return
    draft.set("data.packing", True, node.where)
    if key == "packing" and draft.get("neat_packing") is not True:
        draft.note(Fate.CHANGED, key, node, "is data.packing; rows of a pack do not see each other here")
    else:
        draft.note(Fate.CARRIED, key, node, "is data.packing")


def _flag(path: str, value: Any) -> Rule:
    def rule(draft: Draft, key: str, node: Located) -> None:
        if unquoted(node.plain()) is not True:
            draft.off(key)
            return
        draft.set(path, value, node.where)
        draft.note(Fate.CARRIED, key, node, f"is {path}: {value}")

    return rule


def _template(draft: Draft, key: str, node: Located) -> None:
    name = str(node.plain())
    if name in _TEMPLATES:
        draft.set("data.chat_template", name, node.where)
        text = f"data.chat_template: {name} is rpft's own; null is the tokenizer's"
    else:
        text = "data.chat_template: null, the tokenizer's own, is used; look at `rpft data`"
    draft.note(Fate.CHANGED, key, node, text)


def _attention(draft: Draft, key: str, node: Located) -> None:
    if node.plain() == "disabled":
        draft.set("model.attention", "eager", node.where)
        draft.note(Fate.CARRIED, key, node, "is model.attention: eager")
    else:
        ours("model.attention: auto takes the fastest there is")(draft, key, node)


def _scheduler_settings(draft: Draft, key: str, node: Located) -> None:
    values = node.plain() if isinstance(node.value, dict) else {}
    if set(values) == {"min_lr_rate"}:
        draft.set("train.min_lr_ratio", values["min_lr_rate"], node.where)
        draft.note(Fate.CARRIED, key, node, "is train.min_lr_ratio")
    else:
        draft.note(Fate.LOST, key, node, "train.min_lr_ratio and train.decay_ratio are what there is")


def _revision(draft: Draft, key: str, node: Located) -> None:
    if node.plain() == "main":
        draft.off(key)
    else:
        to("model.revision", str)(draft, key, node)


def _thinking(draft: Draft, key: str, node: Located) -> None:
    draft.set("data.template_kwargs", {"enable_thinking": unquoted(node.plain())}, node.where)
    draft.note(Fate.CHANGED, key, node, "is a variable of the chat template, data.template_kwargs")


RULES: dict[str, Rule] = {
    "model_name_or_path": to("model.path", str),
    "model_revision": _revision,
    "stage": _stage,
    "finetuning_type": _method,
    "lora_rank": _of_lora(to("adapter.r")),
    "lora_alpha": _of_lora(to("adapter.alpha")),
    "lora_dropout": _of_lora(to("adapter.dropout")),
    "lora_target": _of_lora(_target),
    "dataset": datasets("data.train"),
    "eval_dataset": datasets("data.eval"),
    "dataset_dir": ours("the paths in data.train say where the files are"),
    "max_samples": read_with_dataset,
    "template": _template,
    "enable_thinking": _thinking,
    "cutoff_len": to("data.max_seq_len"),
    "packing": _packing,
    "neat_packing": _packing,
    "train_on_prompt": _flag("data.train_on", "all"),
    "mask_history": _flag("data.train_on", "last_assistant"),
    "val_size": held_out,
    "preprocessing_num_workers": to("data.processes"),
    "streaming": ours("data.train.0.streaming is set where the rows come from the hub"),
    "per_device_train_batch_size": to("train.micro_batch_size"),
    "num_train_epochs": to("train.num_epochs"),
    "lr_scheduler_type": scheduler,
    "lr_scheduler_kwargs": _scheduler_settings,
    "optim": optimizer,
    "bf16": _flag("model.dtype", "bfloat16"),
    "pure_bf16": _flag("model.dtype", "bfloat16"),
    "fp16": _flag("model.dtype", "float16"),
    "flash_attn": _attention,
    "do_train": ours("`rpft train` trains"),
    "do_eval": ours("evaluation is made where there are rows for it"),
    "do_predict": lost("rpft trains; transformers, peft or a server answer with the result"),
    "predict_with_generate": lost("rpft trains; transformers, peft or a server answer with the result"),
    "per_device_eval_batch_size": ours("evaluation takes train.micro_batch_size rows at once"),
    "overwrite_cache": ours("what is kept of tokens goes by the content, so it is never stale"),
    "tokenized_path": ours("tokens are kept where data.token_cache says"),
    "preprocessing_batch_size": ours("rows are tokenised in bounded memory"),
    "buffer_size": ours("the order of the rows is drawn over all of them"),
    "plot_loss": ours("OUTPUT_DIR/metrics.jsonl has a line a step"),
    "enable_liger_kernel": ours(_KERNELS),
    "use_unsloth": ours(_KERNELS),
    "use_unsloth_gc": ours("engine.recompute: auto"),
    "disable_gradient_checkpointing": ours("engine.recompute: auto keeps what there is room for"),
    "use_reentrant_gc": ours("engine.recompute: auto"),
    "upcast_layernorm": ours("norms are computed as the model's own code does, and their masters are float32"),
    "use_fast_tokenizer": ours("the tokenizer is the one in the model's folder"),
    "include_num_input_tokens_seen": ours("metrics.jsonl has the tokens of a step"),
    "include_effective_tokens_per_second": ours("metrics.jsonl has tokens a second"),
    "ignore_pad_token_for_loss": ours("padding is never trained"),
    "create_new_adapter": ours("a run starts from a new adapter"),
    "cache_dir": lost("set HF_HOME for where the hub's files are kept"),
    "adapter_name_or_path": lost("a run starts from a new adapter; merge the old one into the model first"),
    "additional_target": _of_lora(to("adapter.modules_to_save", names_in)),
    "use_rslora": _of_lora(to("adapter.rslora")),
    "use_dora": _of_lora(to("adapter.dora")),
    "loraplus_lr_ratio": _of_lora(to("adapter.lr_ratio_b")),
    "quantization_bit": _of_lora(_quantization),
    "quantization_method": _quantization_method,
    "quantization_type": ours("model.quantize: nf4 is what there is in 4 bits"),
    "double_quantization": ours("nf4 has the scales of its blocks in 8 bits"),
    "quantization_device_map": ours("every GPU takes its turn"),
    "rope_scaling": lost(
        "model.rope_scaling needs a type and a factor: positions wanted over positions there are"
    ),
    "mix_strategy": lost("data.train.0.weight says how often a row of that entry stands in an epoch"),
    "interleave_probs": lost("data.train.0.weight says how often a row of that entry stands in an epoch"),
    "eval_on_each_dataset": lost("one evaluation loss over all evaluation rows"),
    "compute_accuracy": lost("evaluation is the loss"),
    "disable_shuffling": lost("every epoch has an order of its own, drawn by train.seed"),
    "early_stopping_steps": lost(REMAINING),
    "resize_vocab": lost("the vocabulary is not extended; add tokens to model and tokenizer first"),
    "add_tokens": lost("the vocabulary is not extended; add tokens to model and tokenizer first"),
    "add_special_tokens": lost("the vocabulary is not extended; add tokens to model and tokenizer first"),
    "tool_format": lost("tools are written by the chat template"),
    "default_system": lost("rows are not changed; write it into them, or into a template file"),
    "train_from_scratch": lost("a run starts from a checkpoint"),
    "shift_attn": lost("attention is the model's own"),
    "moe_aux_loss_coef": to("train.router_aux_loss"),
    "use_dft_loss": lost("the loss is plain cross-entropy"),
    "use_muon": lost("adamw is what there is; choose its learning rate"),
    "use_adam_mini": lost("adamw is what there is; its moments lie in RAM"),
    "use_llama_pro": lost(_ONE_METHOD),
    "mixture_of_depths": lost(_ONE_METHOD),
    "media_dir": lost("rows are text"),
}

PATTERNS: tuple[tuple[str, Rule], ...] = (
    ("pissa_*", lost("adapters start as plain LoRA")),
    ("use_galore", lost("adamw is what there is; its moments lie in RAM")),
    ("use_apollo", lost("adamw is what there is; its moments lie in RAM")),
    ("use_badam", lost("adamw is what there is; its moments lie in RAM")),
    ("galore_*", lost("adamw is what there is; its moments lie in RAM")),
    ("apollo_*", lost("adamw is what there is; its moments lie in RAM")),
    ("badam_*", lost("adamw is what there is; its moments lie in RAM")),
    *((name, ours("rows are text, so there is nothing else to freeze")) for name in _OF_VISION),
    ("freeze_*", lost(_ONE_METHOD)),
    ("swanlab_*", lost(NO_TRACKER)),
    ("use_swanlab", lost(NO_TRACKER)),
    ("image_*", lost("rows are text")),
    ("video_*", lost("rows are text")),
    ("ray_*", lost("a run is one process on one machine")),
    ("*_hub_token", lost("set HF_TOKEN in the environment")),
    ("export_*", lost("it belongs to another command than training")),
    ("infer_*", lost("it belongs to another command than training")),
)
