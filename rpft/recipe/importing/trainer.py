"""Keys that axolotl and LLaMA-Factory both hand on to the Trainer of transformers, which mean the same in both."""

from __future__ import annotations

from typing import Any

from rpft.recipe.importing.draft import Draft, Fate, Rule, lost, ours, shown, to, unquoted
from rpft.recipe.yaml_tree import Located

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")
_SCHEDULERS = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "cosine_with_min_lr": "cosine",
}

_BY_STEPS = "rpft counts in steps; set {ours} to the steps between two"
REMAINING = "one run of rpft has a fixed number of steps: set train.num_epochs or train.max_steps"


ONE_RATE = "there is one learning rate, and adapter.lr_ratio_b"


NO_TRACKER = "logging has tensorboard, wandb, mlflow and a port for Prometheus"


def as_list(value: Any) -> list[str]:
    """Names in a list, or one alone."""
    return value if isinstance(value, list) else [value]


def optimizer(draft: Draft, key: str, node: Located) -> None:
    name = str(node.plain())
    if name in _ADAMW:
        draft.set("optimizer.name", "adamw", node.where)
        draft.note(Fate.CARRIED, key, node, "is optimizer.name")
    elif "adamw" in name and "schedule_free" not in name:
        draft.set("optimizer.name", "adamw", node.where)
        draft.note(
            Fate.CHANGED,
            key,
            node,
            f"{name} saves VRAM; here moments lie in RAM, so plain adamw it is (optimizer.state: 8bit saves RAM)",
        )
    else:
        draft.note(Fate.LOST, key, node, f"{name} is not there; adamw is used, so choose its learning rate")


def scheduler(draft: Draft, key: str, node: Located) -> None:
    name = str(node.plain())
    if name in _SCHEDULERS:
        draft.set("train.lr_scheduler", _SCHEDULERS[name], node.where)
        draft.note(Fate.CARRIED, key, node, "is train.lr_scheduler")
    else:
        draft.note(Fate.LOST, key, node, f"{name} is not there; train.lr_scheduler stays at cosine")


def warmup_steps(draft: Draft, key: str, node: Located) -> None:
    """A count there, a share of the steps here."""
    steps, total = unquoted(node.plain()), draft.get("max_steps")
    if isinstance(steps, (int, float)) and 0 <= steps < 1:  # newer Trainers read a share here too
        draft.set("train.warmup_ratio", steps, node.where)
        draft.note(Fate.CARRIED, key, node, "is train.warmup_ratio")
    elif isinstance(steps, int) and isinstance(total, int) and total > steps:
        draft.set("train.warmup_ratio", steps / total, node.where)
        draft.note(Fate.CARRIED, key, node, "is train.warmup_ratio, as a share of max_steps")
    else:
        draft.note(
            Fate.LOST,
            key,
            node,
            f"the warm-up is a share of the steps here: set train.warmup_ratio to {shown(steps)} / steps"
            " (`rpft train RECIPE --dry-run` says how many)",
        )


def every(path: str, *strategies: str) -> Rule:
    """So many steps between two, or that share of all; ``strategies``: keys that may switch the thing off."""

    def rule(draft: Draft, key: str, node: Located) -> None:
        steps, total = unquoted(node.plain()), draft.get("max_steps")
        if isinstance(steps, float) and steps < 1 and isinstance(total, int):
            steps = max(1, round(steps * total))
        if steps in (0, -1, False) or any(draft.get(name) in ("no", False, "epoch") for name in strategies):
            draft.off(key)
        elif isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
            draft.set(path, steps, node.where)
            draft.note(Fate.CARRIED, key, node, f"is {path}")
        else:
            draft.note(Fate.LOST, key, node, _BY_STEPS.format(ours=path))

    return rule


def strategy(path: str) -> Rule:
    """Whether a thing happens by steps, by epochs or not at all; the steps themselves stand in another key."""

    def rule(draft: Draft, key: str, node: Located) -> None:
        how = unquoted(node.plain())
        if how in ("no", False):
            draft.off(key)
        elif how == "steps":
            draft.note(Fate.CARRIED, key, node, f"is {path}")
        else:
            draft.note(Fate.LOST, key, node, _BY_STEPS.format(ours=path))

    return rule


def by_steps(path: str) -> Rule:
    """A thing that happens so many times an epoch there."""
    return lost(_BY_STEPS.format(ours=path))


def accumulation(draft: Draft, key: str, node: Located) -> None:
    """Of each GPU there, of all of them together here."""
    steps = unquoted(node.plain())
    if isinstance(steps, int):
        draft.set("train.gradient_accumulation_steps", steps * draft.num_gpus, node.where)
    draft.note(
        Fate.CHANGED,
        key,
        node,
        "counts the microbatches of each GPU there, and of all together here (train.gradient_accumulation_steps):"
        f" written for {draft.num_gpus} GPU{'s' if draft.num_gpus > 1 else ''}; --gpus says how many it ran on",
    )


def best_at_end(draft: Draft, key: str, node: Located) -> None:
    if unquoted(node.plain()) is not True:
        draft.off(key)
        return
    draft.note(
        Fate.LOST,
        key,
        node,
        "checkpoint.keep_best keeps the best checkpoint; the result is of the last step (set it with"
        " train.eval_every and evaluation rows)",
    )


def limit(draft: Draft, key: str, node: Located) -> None:
    """A number of steps, or -1 for none."""
    steps = unquoted(node.plain())
    if steps in (-1, 0):
        draft.off(key)
    else:
        draft.set("train.max_steps", steps, node.where)
        draft.note(Fate.CARRIED, key, node, "is train.max_steps")


def beta(position: int) -> Rule:
    def rule(draft: Draft, key: str, node: Located) -> None:
        both = [draft.get("adam_beta1"), draft.get("adam_beta2")]
        values = [default if value is None else value for value, default in zip(both, (0.9, 0.999), strict=True)]
        draft.set("optimizer.betas", values, node.where)
        draft.note(Fate.CARRIED, key, node, f"is optimizer.betas.{position}")

    return rule


def held_out(draft: Draft, key: str, node: Located) -> None:
    """A share of the rows below 1, else a number of them."""
    value: Any = unquoted(node.plain())
    if value in (0, 0.0, False):
        draft.off(key)
    elif isinstance(value, (int, float)) and value >= 1:
        draft.set("data.eval_rows", int(value), node.where)
        draft.note(Fate.CARRIED, key, node, "is data.eval_rows")
    else:
        draft.set("data.eval_fraction", value, node.where)
        draft.note(Fate.CARRIED, key, node, "is data.eval_fraction")


def quantize(draft: Draft, key: str, node: Located, bits: int) -> None:
    """A base that bitsandbytes quantises, to so many bits."""
    kind = {4: "nf4", 8: "int8"}[bits]
    draft.set("model.quantize", kind, node.where)
    if bits == 4:
        draft.note(Fate.CARRIED, key, node, "is model.quantize: nf4")
    else:
        text = "is model.quantize: int8, of weights only; there activations are rounded to 8 bits too"
        draft.note(Fate.CHANGED, key, node, text)


def trackers(draft: Draft, key: str, node: Located) -> None:
    """Services that are told; where one asks for the name of a project, a person has to give it."""
    names = [str(name) for name in as_list(node.plain()) if name not in ("none", "", None)]
    if not names:
        draft.off(key)
    for name in names:
        if name == "tensorboard":
            draft.set("logging.tensorboard", True, node.where)
            draft.note(Fate.CARRIED, key, node, "is logging.tensorboard")
        elif name in ("wandb", "mlflow"):
            what = {"wandb": "project", "mlflow": "experiment"}[name]
            draft.note(Fate.LOST, key, node, f"{name} needs a name: set logging.{name}.{what}")
        else:
            draft.note(Fate.LOST, key, node, f"{shown(name)}: {NO_TRACKER}")


def remote_code(draft: Draft, key: str, node: Located) -> None:
    if unquoted(node.plain()) is not True:
        draft.off(key)
    else:
        draft.note(Fate.LOST, key, node, "rpft runs no code that comes with a model")


def resume(draft: Draft, key: str, node: Located) -> None:
    if unquoted(node.plain()) in (False, ""):
        draft.off(key)
    else:
        draft.note(
            Fate.LOST,
            key,
            node,
            "a checkpoint of another program is not read; model.path may be a folder it saved",
        )


_KERNELS = "engine.kernels: auto compiles layers where it can"
_SHARDS = "weights and optimizer state lie in RAM and are sent to every GPU in turn: nothing is sharded"

RULES: dict[str, Rule] = {
    "learning_rate": to("train.learning_rate"),
    "warmup_ratio": to("train.warmup_ratio"),
    "warmup_steps": warmup_steps,
    "gradient_accumulation_steps": accumulation,
    "max_steps": limit,
    "max_grad_norm": to("train.max_grad_norm"),
    "seed": to("train.seed"),
    "weight_decay": to("optimizer.weight_decay"),
    "adam_beta1": beta(0),
    "adam_beta2": beta(1),
    "adam_epsilon": to("optimizer.eps"),
    "output_dir": to("output_dir", str),
    "logging_steps": every("logging.every_steps"),
    "eval_steps": every("train.eval_every", "eval_strategy", "evaluation_strategy"),
    "save_steps": every("checkpoint.every_steps", "save_strategy"),
    "eval_strategy": strategy("train.eval_every"),
    "evaluation_strategy": strategy("train.eval_every"),
    "save_strategy": strategy("checkpoint.every_steps"),
    "save_total_limit": to("checkpoint.keep_last"),
    "load_best_model_at_end": best_at_end,
    "resume_from_checkpoint": resume,
    "trust_remote_code": remote_code,
    "tf32": ours("products are in the precision of model.dtype"),
    "gradient_checkpointing": ours("engine.recompute: auto"),
    "gradient_checkpointing_kwargs": ours("engine.recompute: auto"),
    "torch_compile": ours(_KERNELS),
    "deepspeed": ours(_SHARDS),
    "fsdp": ours(_SHARDS),
    "low_cpu_mem_usage": ours("weights are read tensor by tensor"),
    "group_by_length": ours("a step's rows are put into microbatches of like length"),
    "length_column_name": ours("a step's rows are put into microbatches of like length"),
    "remove_unused_columns": ours("columns that a format does not name are left alone"),
    "ddp": ours("one process drives all GPUs"),
    "save_safetensors": ours("what is saved is always safetensors"),
    "include_tokens_per_second": ours("metrics.jsonl has tokens a second"),
    "overwrite_output_dir": ours("a run into a folder with another run's files is refused; --resume goes on"),
    "metric_for_best_model": ours("the best checkpoint is the one with the lowest evaluation loss"),
    "greater_is_better": ours("the best checkpoint is the one with the lowest evaluation loss"),
    "save_only_model": lost("checkpoints are for going on, and hold the optimizer's state"),
    "neftune_noise_alpha": lost("noise on embeddings is not there"),
    "label_smoothing_factor": lost("the loss is plain cross-entropy"),
    "auto_find_batch_size": ours("train.micro_batch_size: auto lets the planner choose"),
    "loraplus_lr_embedding": lost("factors of embeddings keep train.learning_rate"),
    "early_stopping_patience": lost(REMAINING),
    "push_to_hub": lost("rpft uploads nothing"),
    "report_to": trackers,
    "run_name": lost("a run is named by output_dir; logging.wandb.name and logging.mlflow.name say otherwise"),
    "optim_args": lost("optimizer.betas, optimizer.eps and optimizer.weight_decay are what there is"),
}

PATTERNS: tuple[tuple[str, Rule], ...] = (
    ("torch_compile_*", ours(_KERNELS)),
    ("fsdp_*", ours(_SHARDS)),
    ("ddp_*", ours("one process drives all GPUs")),
    ("dataloader_*", ours("rows are tokenised before the run and made into microbatches behind it")),
    ("hub_*", lost("rpft uploads nothing")),
)
