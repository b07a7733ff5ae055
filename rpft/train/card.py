"""The model card of an export: what was trained, on what, how, and what came of it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from rpft.machine import versions
from rpft.model.merge import Drift
from rpft.recipe.dump import dump_recipe
from rpft.train.run_folder import RunFolder, TrainedFolder


def model_card(run: RunFolder, trained: TrainedFolder, base: Path, drift: Drift | None, adapter_only: bool) -> str:
    """README.md as the hub reads it: front matter, then text."""
    recipe = run.recipe
    front = {
        "base_model": recipe.model.path,
        **licence_of(base),
        "library_name": "peft" if adapter_only else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rpft", "lora" if recipe.adapter else "full-fine-tuning"],
    }
    lines = ["---", yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip(), "---", ""]
    lines += [f"# {run.path.absolute().name}", "", _what(run, adapter_only), ""]
    if "license" not in front:
        lines += ["The base model's card names no licence here; what it allows holds for these weights too.", ""]
    lines += ["## Trained on", "", *_data(run, trained), "", "## How it went", "", *_losses(run, trained), ""]
    if drift is not None:
        lines += ["## Merging", "", *_merging(drift), ""]
    lines += ["## Made with", "", *_versions(trained), ""]
    lines += ["## Recipe", "", "```yaml", dump_recipe(recipe).strip(), "```", ""]
    return "\n".join(lines)


def licence_of(base: Path) -> dict[str, Any]:
    """What the front matter of the base model's card says of its licence; nothing where it has none."""
    card = base / "README.md"
    if not card.is_file():
        return {}
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        front = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    if not isinstance(front, dict):
        return {}
    return {key: front[key] for key in ("license", "license_name", "license_link") if key in front}


def _what(run: RunFolder, adapter_only: bool) -> str:
    recipe, adapter = run.recipe, run.recipe.adapter
    model = f"`{recipe.model.path}`" + (f" at revision `{recipe.model.revision}`" if recipe.model.revision else "")
    if adapter is None:
        text = f"{model}, every weight of it trained."
    else:
        kind = ("DoRA" if adapter.dora else "LoRA") + (", rank-stabilised" if adapter.rslora else "")
        where = "an adapter for" if adapter_only else "merged into"
        text = f"{kind} of rank {adapter.r} and alpha {adapter.alpha}, {where} {model}."
    scaling = recipe.model.rope_scaling
    if scaling.type != "config":
        text += f" Its positions are scaled ({scaling.type}, factor {scaling.factor:g})"
        text += "; give the base model's config the same." if adapter_only else ", as config.json says."
    return text


def _data(run: RunFolder, trained: TrainedFolder) -> list[str]:
    data = run.recipe.data
    lines = [
        f"* `{entry.path}` ({entry.format}"
        + (f", weight {entry.weight:g}" if entry.weight != 1 else "")
        + (f", at most {entry.max_rows} rows" if entry.max_rows else "")
        + ")"
        for entry in data.train
    ]
    kept = trained.state.run["data"] if trained.state else None
    if kept is not None:
        lines.append(f"* in all {kept['tokens']:,} tokens, {kept['trained_tokens']:,} of them trained")
    lines.append(
        f"* rows up to {data.max_seq_len} tokens, trained on: {data.train_on}; chat template:"
        f" {data.chat_template or 'that of the base model'}"
        + (f", with {dict(data.template_kwargs)}" if data.template_kwargs else "")
    )
    return lines


def _losses(run: RunFolder, trained: TrainedFolder) -> list[str]:
    last = trained.state.step if trained.state else None
    lines = [line for line in run.metrics() if last is None or line["step"] <= last]
    steps = [line for line in lines if line.get("loss") is not None]
    evaluations = [line for line in lines if line.get("eval_loss") is not None]
    told = []
    if steps:
        tokens = sum(line["trained_tokens"] for line in steps)
        told.append(
            f"* {steps[-1]['step']} steps, {tokens:,} trained tokens; training loss {steps[0]['loss']:.4f} at step"
            f" {steps[0]['step']}, {steps[-1]['loss']:.4f} at step {steps[-1]['step']}"
        )
    told += [f"* evaluation loss {line['eval_loss']:.4f} after step {line['step']}" for line in _some(evaluations)]
    return told or ["* no step is on record in metrics.jsonl"]


def _some(evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first, the lowest and the last."""
    if not evaluations:
        return []
    lowest = min(evaluations, key=lambda line: line["eval_loss"])
    kept = {line["step"]: line for line in (evaluations[0], lowest, evaluations[-1])}
    return [kept[step] for step in sorted(kept)]


def _merging(drift: Drift) -> list[str]:
    return [
        "The adapter was added to the base weights in float32 and the sum rounded once. On a text of"
        f" {drift.tokens} tokens the logits differ from those of base and adapter side by side by"
        f" {drift.max_abs:.3g} at most and {drift.mean_abs:.3g} on average (largest logit {drift.largest:.3g});"
        f" the likeliest next token is the same after {drift.top1_agreement:.1%} of them."
    ]


def _versions(trained: TrainedFolder) -> list[str]:
    now = {**versions(), "peft": version("peft")}
    lines = [f"* exported: {', '.join(f'{name} {number}' for name, number in now.items())}"]
    if trained.state is not None:
        then = trained.state.about["versions"]
        lines.insert(0, f"* trained: {', '.join(f'{name} {number}' for name, number in then.items())}")
    return lines
