"""Keys of `model`: what is fine-tuned, and how its weights are read and kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rpft.recipe.section import Section


class RopeScaling(Section):
    """Rotary positions beyond those of config.json, for longer rows; the result's config.json has them too."""

    type: Literal["config", "yarn", "linear"] = Field(
        default="config",
        description="config: as config.json has it. yarn: slow rotations are slowed down and fast ones kept "
        "(arXiv 2309.00071). linear: every position is divided by the factor.",
    )
    factor: float = Field(
        default=1.0,
        ge=1,
        description="Times as many positions as the model was trained on: 4 makes 131072 of 32768. Not read by "
        "config.",
    )


class Model(Section):
    """The model to fine-tune."""

    path: str = Field(
        min_length=1,
        description="Checkpoint folder (as written, relative to the current directory) or hub id. "
        "Weights are read from safetensors files only.",
    )
    dtype: Literal["bfloat16", "float32", "float16"] = Field(
        default="bfloat16",
        description="Working precision of weights and activations. bfloat16: 2 bytes a parameter. float32: "
        "twice the memory and traffic, for exact comparisons. float16: overflows more easily; a step that "
        "overflows is skipped. Master weights of trained parameters are float32 whatever is set.",
    )
    attention: Literal["auto", "sdpa", "eager"] = Field(
        default="auto",
        description="Attention implementation. auto: sdpa where the model family has it. eager: slower, "
        "with memory quadratic in the sequence length, and works with every family.",
    )
    quantize: Literal["none", "nf4", "int8", "fp8"] = Field(
        default="none",
        description="How frozen linear layers of the blocks are kept in RAM and go to the workers, which "
        "dequantise them to `dtype` where they are used; for adapters only. nf4: 4.1 bits a weight, a quarter of "
        "the RAM and traffic of bfloat16, as in QLoRA. int8, fp8: half of it, and closer to the weights. A "
        "checkpoint that bitsandbytes has quantised to nf4 is taken as it is with nf4. none: as they are.",
    )
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of a hub id. null: the default branch, which may move.",
    )
    rope_scaling: RopeScaling = Field(default_factory=RopeScaling, description=RopeScaling.__doc__)
