"""Keys of `adapter`: what is trained in the place of the whole model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rpft.recipe.section import Expected, Section, list_as_tuple, listed


class Adapter(Section):
    """LoRA adapters; without this section (or with `adapter: null`) every weight is trained."""

    type: Literal["lora"] = Field(
        default="lora",
        description="Kind of adapter. The base weights stay frozen, so they need no gradient, master weight "
        "or moment.",
    )
    r: int = Field(
        default=16,
        ge=1,
        description="Rank. A higher rank can learn more; memory and traffic of the adapter grow with it.",
    )
    alpha: int = Field(default=32, ge=1, description="The adapter's output is scaled by alpha / r.")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Probability that an input element of the adapter is dropped in training. Must be 0 for"
        " experts, which all-linear and names such as down_proj reach, too.",
    )
    target_modules: Annotated[
        str | tuple[str, ...],
        BeforeValidator(list_as_tuple),
        Expected("all-linear, a module name, or a list of module names"),
    ] = Field(
        default="all-linear",
        description="Modules that get an adapter: names, a regular expression on the full name, or all-linear for "
        "every linear layer but the head. Fewer modules train faster and learn less.",
    )
    target_parameters: Annotated[tuple[str, ...], Expected("a list of parameter names")] = listed(
        default=(),
        description="Parameters that get an adapter and are no module's weight, by the end of their names: fused "
        "experts, as in [mlp.experts.gate_up_proj]. `target_modules: []` leaves it at these. Dropout must be 0.",
    )
    modules_to_save: Annotated[tuple[str, ...], Expected("a list of module names")] = listed(
        default=(),
        description="Modules that are trained whole and saved with the adapter, such as [embed_tokens, lm_head]."
        " They take the memory of full training.",
    )
    rslora: bool = Field(
        default=False,
        description="Scale by alpha / sqrt(r) instead of alpha / r, so that a high rank learns as much.",
    )
    dora: bool = Field(
        default=False,
        description="Train the length of each weight row beside its direction (DoRA). Slower: each step computes"
        " the lengths of all adapted weights. Not for experts, target_parameters or a quantised base.",
    )
    lr_ratio_b: float = Field(
        default=1.0,
        gt=0,
        description="LoRA+: the learning rate of each adapter's second factor, which starts at zero, and of "
        "trained vectors, over train.learning_rate. Usual: 1 to 16, with a lower train.learning_rate.",
    )
