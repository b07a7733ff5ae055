"""What a recipe may say of every feature, and which two settings exclude each other."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.covering import Row
from support.engines import random_plan
from support.recipes import Project, chats, tiny_tokenizer, write_jsonl

STEPS = 4
DENSE = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "mistral", "granite")
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next")
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
"""What changes of a family's tiny config: its linear attention is slow in plain torch."""
_WHOLE = {"gpt2": "[wte, lm_head]"}
_SOME = {"gpt2": "[c_attn]", "deepseek_v3": "[q_a_proj, kv_b_proj]", "qwen3_next": "[q_proj, out_proj]"}
_FEW = "adapter.target_modules=<few>"
_PARTS = "[mlp.experts.gate_up_proj, mlp.experts.down_proj]"

FACTORS: dict[str, dict[str, list[str]]] = {
    "family": {name: [] for name in (*DENSE, *MIXTURES)},
    "dtype": {name: [f"model.dtype={name}"] for name in ("float32", "bfloat16", "float16")},
    "adapter": {
        "none": [],
        "LoRA": ["adapter.r=4"],
        "rsLoRA, dropout": ["adapter.r=4", "adapter.rslora=true", "adapter.dropout=0.2", _FEW],
        "DoRA": ["adapter.r=4", "adapter.dora=true", _FEW],
        "few, LoRA+": ["adapter.r=4", "adapter.lr_ratio_b=4", _FEW],
        "embedding and head whole": ["adapter.r=4", "adapter.modules_to_save=<whole>"],
        "experts": ["adapter.r=4", "adapter.target_modules=[]", f"adapter.target_parameters={_PARTS}"],
    },
    "quantize": {name: [f"model.quantize={name}"] for name in ("none", "nf4", "int8", "fp8")},
    "frozen": {name: [f"engine.host_store={name}"] for name in ("ram", "mmap")},
    "moments": {name: [f"optimizer.state={name}"] for name in ("fp32", "bf16", "8bit")},
    "moments lie": {"ram": [], "disk": ["optimizer.offload=<folder>"]},
    "update": {name: [f"optimizer.update={name}"] for name in ("sync", "delayed")},
    "pass": {"compiled": [], "torch": []},
    "kernels": {name: [f"engine.kernels={name}"] for name in ("eager", "trace")},
    "plan": {
        "by stage": ["engine.recompute=stage"],
        "by layer": ["engine.recompute=layer"],
        "of a file": ["engine.plan=<plan>"],
        "keeps more": ["engine.plan=<plan>"],
        "experts in groups": ["engine.plan=<plan>"],
    },
    "round": {"auto": [], "one": ["engine.num_microbatches=1"], "two": ["engine.num_microbatches=2"]},
    "gradients": {name: [f"engine.host_gradients={name}"] for name in ("auto", "float32")},
    "rows": {
        name: [f"data.train=[{{path: <folder>/train-{name}.jsonl, weight: <weight>}}]"]
        for name in ("messages", "text", "prompt_completion", "alpaca", "tokens")
    },
    "weight": {"1": [], "0.6": [], "2": []},
    "packing": {name: [f"data.packing={name}"] for name in ("false", "true")},
    "lengths": {
        "all": ["data.max_seq_len=64", "data.truncation=left"],
        "cut": ["data.max_seq_len=24", "data.truncation=right"],
        "dropped": ["data.max_seq_len=32", "data.truncation=drop"],
    },
    "trained": {name: [f"data.train_on={name}"] for name in ("assistant", "all", "last_assistant", "completion")},
    "batch": {
        "1 x 4": ["train.gradient_accumulation_steps=4"],
        "2 x 2": ["train.micro_batch_size=2", "train.gradient_accumulation_steps=2"],
    },
    "evaluation": {
        "rows": ["data.eval=[<folder>/eval-<rows>.jsonl]", "train.eval_every=2"],
        "none": ["data.eval=[]"],
        "a share": ["data.eval=[]", "data.eval_fraction=0.2"],
        "keeps the best": ["data.eval=[]", "data.eval_rows=4", "train.eval_every=1", "checkpoint.keep_best=true"],
    },
    "router loss": {name: [f"train.router_aux_loss={name}"] for name in ("0", "0.05", "model")},
    "positions": {
        "config": [],
        "yarn": ["model.rope_scaling.type=yarn", "model.rope_scaling.factor=2"],
        "linear": ["model.rope_scaling.type=linear", "model.rope_scaling.factor=2"],
    },
    "attention": {name: [f"model.attention={name}"] for name in ("auto", "eager")},
    "clipping": {name: [f"train.max_grad_norm={name}"] for name in ("1.0", "null")},
    "products": {name: [f"engine.deterministic={name}"] for name in ("false", "true")},
    "MLPs": {"whole": [], "in parts": []},
    "traced": {"none": [], "2 and 3": ["engine.trace_steps=[2, 3]"]},
    "trouble": {"crash": [], "interrupt": [], "memory": [], "spike": []},
}
"""Factor: value: what the command line has for it. The first values are the plainest, and go with all others."""

QUANTISED, SCALED, BALANCED = ("nf4", "int8", "fp8"), ("yarn", "linear"), ("0.05", "model")
EXCLUDED = (
    ("adapter", ("none",), "quantize", QUANTISED, "model.quantize"),
    ("adapter", ("none",), "frozen", ("mmap",), "engine.host_store"),
    ("adapter", ("DoRA",), "quantize", QUANTISED, "adapter.dora"),
    ("family", DENSE, "adapter", ("experts",), "target_parameters"),
    ("family", (*DENSE, "deepseek_v3"), "router loss", BALANCED, "train.router_aux_loss"),
    ("family", DENSE, "plan", ("experts in groups",), "cannot be in 2 groups"),
    ("family", ("gpt2", "gemma3", "gpt_oss"), "positions", SCALED, "model.rope_scaling"),
    ("family", ("gpt2",), "quantize", QUANTISED, "model.quantize"),
    ("family", ("gpt_oss", "qwen3_next"), "packing", ("true",), "data.packing"),
)
"""(factor, values, other factor, its values, what is said): no value of the one stands beside one of the other."""

_PAIRS = {
    each
    for one, values, other, others, _ in EXCLUDED
    for x in values
    for y in others
    for each in ((one, x, other, y), (other, y, one, x))
}


def allowed(a: str, x: str, b: str, y: str) -> bool:
    """Whether the two values can stand in one recipe."""
    return (a, x, b, y) not in _PAIRS


# -- the recipe of a row -----------------------------------------------------------------------------------


def rows_of(kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of format ``kind``, all of them made from chats."""
    made, tokenizer = chats(count, seed), tiny_tokenizer()
    if kind == "messages":
        return made
    pairs = [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in made]
    if kind == "text":
        return [{"text": f"{asked} {said}"} for asked, said in pairs]
    if kind == "alpaca":
        return [{"instruction": asked, "input": "", "output": said} for asked, said in pairs]
    if kind == "prompt_completion":
        return [{"prompt": asked, "completion": " " + said} for asked, said in pairs]
    rows = []
    for asked, said in pairs:
        before, behind = (tokenizer(text, add_special_tokens=False).input_ids for text in (asked, said))
        rows.append({"input_ids": before + behind, "labels": [-100] * len(before) + behind})
    return rows


def write_rows(folder: Path) -> None:
    """Leaves training and evaluation rows of every format in ``folder``."""
    for kind in FACTORS["rows"]:
        write_jsonl(folder / f"train-{kind}.jsonl", rows_of(kind, 24, 0))
        write_jsonl(folder / f"eval-{kind}.jsonl", rows_of(kind, 4, 99))


def words_of(row: Row, made: Project, number: int) -> list[str]:
    """The recipe's changes for ``row``. ``number``: seeds what else is drawn for it."""
    rng = random.Random(number)
    known = {
        "folder": str(made.folder),
        "few": _SOME.get(row["family"], "[q_proj, o_proj]"),
        "whole": _WHOLE.get(row["family"], "[embed_tokens, lm_head]"),
        "rows": row["rows"],
        "weight": row["weight"],
        "plan": str(made.folder / f"plan-{number}.json"),
    }
    words = [word for factor, value in row.items() for word in FACTORS[factor][value]]
    words = [_filled(word, known) for word in words]
    if any(word.startswith("engine.plan=") for word in words):
        words = [word for word in words if not word.startswith("engine.num_microbatches")]
        Path(known["plan"]).write_text(_plan(row, rng), encoding="utf-8")
    return [*words, f"train.max_steps={STEPS}", f"train.lr_scheduler={rng.choice(['cosine', 'wsd', 'linear'])}"]


def _filled(word: str, known: dict[str, str]) -> str:
    for name, value in known.items():
        word = word.replace(f"<{name}>", value)
    return word


def _plan(row: Row, rng: random.Random) -> str:
    groups = 2 if row["plan"] == "experts in groups" else 1
    dense, blocks = int(row["family"] == "deepseek_v3"), CONFIGS.get(row["family"], {}).get("num_hidden_layers", 4)
    layers = 2 + dense + (blocks - dense) * (1 if groups == 1 else 1 + groups)
    in_round = {"auto": 4, "one": 1, "two": 2}[row["round"]]
    plan = random_plan(rng, layers, in_round)
    if row["plan"] == "keeps more":
        plan = replace(plan, recompute="layer", keep_bytes_per_token=rng.choice([256, 1024, 1 << 20]))
    if rng.random() < 0.5:
        plan = replace(plan, dispatch=tuple(rng.randrange(3) for _ in range(rng.randint(1, 4))))
    if row["adapter"] != "none" and rng.random() < 0.5:
        plan = replace(plan, resident=tuple(sorted(rng.sample(range(layers), 2))))
    return plan.to_json(expert_groups=groups)
