"""Keys of `optimizer`: AdamW, its moments, and when an update is applied."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rpft.recipe.section import Expected, Section

_Rate = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Section):
    """The optimizer, which runs on the CPU."""

    name: Literal["adamw"] = Field(default="adamw", description="AdamW with float32 master weights.")
    state: Literal["fp32", "bf16", "8bit"] = Field(
        default="fp32",
        description="How the two moments of a trained parameter are kept in RAM. fp32: 8 bytes, exact. bf16: 4 "
        "bytes, rounded by chance, the same in every run of a seed. 8bit: 2.03 bytes, in blocks of 256 with a "
        "scale each; more work for the CPU. Checkpoints shrink as much. Master weights stay exact.",
    )
    update: Literal["sync", "delayed"] = Field(
        default="sync",
        description="sync: exact. delayed: a gradient is applied one step late, while the next step "
        "computes; it hides more of the update and changes the result.",
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decoupled weight decay. Norms and biases are never decayed."
    )
    betas: Annotated[tuple[_Rate, _Rate], Field(strict=False), Expected("a list of two numbers >= 0 and < 1")] = (
        Field(default=(0.9, 0.999), description="Decay rates of the first and the second moment.")
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator of the update.")
    offload: str | None = Field(
        default=None,
        min_length=1,
        description="Folder on a fast disk (NVMe) in which the moments lie, in a file without a name, instead of"
        " in RAM. All of them are read and written in every update, which the plan counts. No number depends on"
        " it. null: RAM.",
    )
