"""Keys of `train`: steps, their rows, the learning rate, evaluations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rpft.recipe.section import Expected, Section, no_yaml_1_1_boolean


class Train(Section):
    """The training loop."""

    learning_rate: float = Field(
        default=2e-5,
        gt=0,
        description="Peak learning rate. Usual: 1e-5 to 5e-5 for full fine-tuning, 1e-4 to 1e-3 for LoRA.",
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine",
        description="Learning rate after the warm-up. linear and cosine fall over all steps. wsd stays at "
        "the peak and falls linearly over the last decay_ratio, so its length can be changed later.",
    )
    warmup_ratio: float = Field(
        default=0.03,
        ge=0,
        lt=1,
        description="Share of the steps in which the learning rate rises from 0 to its peak.",
    )
    min_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Learning rate at the end, as a share of the peak. Not read by constant.",
    )
    decay_ratio: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Share of the steps in the final decay of wsd. Not read by the others.",
    )
    micro_batch_size: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"], Expected("a whole number >= 1, or auto")
    ] = Field(
        default=1,
        description="Rows (or packs) of one microbatch. Larger: fewer, better filled kernels and more "
        "activation memory on the device. auto: the planner divides the rows of a step, then "
        "gradient_accumulation_steps in all, so that a step is fastest; that changes results by rounding only.",
    )
    gradient_accumulation_steps: int = Field(
        default=8,
        ge=1,
        description="Microbatches of one step, all workers together: a step has micro_batch_size x "
        "gradient_accumulation_steps rows however many workers there are. More microbatches hide more of the "
        "transfers and of the optimizer, and give fewer steps.",
    )
    num_epochs: float | None = Field(
        default=1,
        gt=0,
        description="Passes over the training rows; may be a fraction. Not read when max_steps is set.",
    )
    max_steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps in all, repeating the rows where needed. null: num_epochs decides.",
    )
    max_grad_norm: float | None = Field(
        default=1.0,
        ge=0,
        description="Gradients are scaled down to this global norm. null or 0: no clipping, and a layer can "
        "be updated as soon as its gradient is there.",
    )
    router_aux_loss: Annotated[
        Annotated[float, Field(ge=0)] | Literal["model"], Expected("a number >= 0, or model")
    ] = Field(
        default=0.0,
        description="Coefficient of the load-balancing loss of mixtures of experts: its gradient is added, its "
        "value is logged apart from the loss. model: router_aux_loss_coef of the model's config. 0: none.",
    )
    seed: int = Field(
        default=42,
        ge=0,
        lt=2**63,
        description="Seed of the row order, of new adapter weights and of dropout.",
    )
    eval_every: int | None = Field(
        default=None, ge=1, description="Steps between evaluations. null: only at the start and at the end."
    )
    resume_from_checkpoint: Annotated[
        bool | str, BeforeValidator(no_yaml_1_1_boolean), Expected("true, false or the path of a checkpoint")
    ] = Field(
        default=False,
        description="true: go on from the newest checkpoint in output_dir, an error if there is none. "
        "A path: go on from that checkpoint.",
    )

    @property
    def microbatch_rows(self) -> int:
        """``micro_batch_size``; 1 where the planner has yet to choose it."""
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size
