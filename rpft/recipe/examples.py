"""Examples of the keys whose value is not a plain word or number, for the reference; a test loads each."""

from __future__ import annotations

EXAMPLES: dict[str, str] = {
    "model.path": "model: {path: Qwen/Qwen3-1.7B}",
    "model.revision": "model: {path: Qwen/Qwen3-1.7B, revision: 0123456789abcdef0123456789abcdef01234567}",
    "model.rope_scaling": "model: {path: Qwen/Qwen3-1.7B, rope_scaling: {type: yarn, factor: 4}}",
    "data.train": "data:\n"
    "  train:\n"
    "    - chats.jsonl\n"
    "    - {path: books/, format: text, weight: 0.2}\n"
    '    - {path: "hub:owner/name", split: train}',
    "data.train.0.columns": "data: {train: [{path: qa.csv, columns: {instruction: question, output: answer}}]}",
    "data.template_kwargs": "data: {train: [chats.jsonl], template_kwargs: {enable_thinking: false}}",
    "data.eval": "data: {train: [chats.jsonl], eval: [held-out.jsonl]}",
    "adapter": "adapter: {type: lora, r: 16, alpha: 32}",
    "adapter.target_modules": "adapter: {target_modules: [q_proj, k_proj, v_proj, o_proj]}",
    "adapter.target_parameters": "adapter: {target_modules: [], target_parameters: [mlp.experts.gate_up_proj]}",
    "adapter.modules_to_save": "adapter: {modules_to_save: [embed_tokens, lm_head]}",
    "train.gradient_accumulation_steps": "train: {micro_batch_size: 2, gradient_accumulation_steps: 16}"
    "  # 32 rows a step",
    "train.resume_from_checkpoint": "train: {resume_from_checkpoint: out/mine/checkpoints/step-00000200}",
    "optimizer.betas": "optimizer: {betas: [0.9, 0.95]}",
    "engine.num_microbatches": "train: {gradient_accumulation_steps: 16}\n"
    "engine: {num_microbatches: 8}  # two rounds a step",
    "engine.vram_limit": "engine: {vram_limit: 20GiB}",
    "engine.ram_limit": "engine: {ram_limit: 200GiB}",
    "engine.trace_steps": "engine: {trace_steps: [10, 11]}",
    "logging.wandb": "logging: {wandb: {project: support, mode: offline}}",
    "logging.mlflow": "logging: {mlflow: {experiment: support}}",
    "checkpoint.every_minutes": "checkpoint: {every_minutes: 30, keep_last: 2}",
}
"""Dotted key: YAML that sets it, with what else it needs."""
