"""Keys of `engine`: where and how a step is computed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rpft.recipe.section import Expected, Section, bytes_or_null, listed


class Engine(Section):
    """Where and how a step is computed. The result does not depend on workers, plan or recompute."""

    device: Literal["auto", "cuda", "cpu"] = Field(
        default="auto",
        description="auto: cuda if there is a GPU, else cpu. cpu: stand-in workers on threads.",
    )
    workers: int | None = Field(
        default=None, ge=1, description="GPUs, or CPU stand-ins, to use. null: every GPU; 2 on the CPU."
    )
    num_microbatches: int | None = Field(
        default=None,
        ge=1,
        description="Microbatches that travel together in a round; must divide gradient_accumulation_steps. "
        "More fill the pipeline better and keep more boundary activations in host RAM. Another value changes "
        "the order of a sum. null: the planner's choice.",
    )
    recompute: Literal["auto", "stage", "layer"] = Field(
        default="auto",
        description="What the backward recomputes at once. stage: keeps only what crosses between stages; "
        "needs device memory for a stage's activations. layer: less device memory, and a boundary kept for "
        "every layer. auto: the planner's choice.",
    )
    kernels: Literal["auto", "eager", "trace", "compile"] = Field(
        default="auto",
        description="How layers run. eager: as torch runs the model's own code. trace: as graphs of its "
        "operations, without those that no gradient needs. compile: the same graphs compiled by Inductor, "
        "the fastest on GPUs; there it needs Triton and a C compiler. Each new shape of microbatch takes some "
        "seconds with either, so rows are padded to at most 8 lengths. Results differ by rounding. auto: eager "
        "on the CPU; on GPUs compile, or trace where something for that is missing.",
    )
    host_gradients: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Precision in which summed gradients wait in host RAM for the optimizer; over the "
        "microbatches of a round they are summed in float32 whatever is set. bfloat16: 2 bytes a trained "
        "parameter less and half the traffic; for a bfloat16 model whose step is one round (num_microbatches = "
        "gradient_accumulation_steps). float32: nothing is rounded, so a step's rounds change no result. auto: "
        "bfloat16 where it is possible.",
    )
    host_store: Literal["ram", "mmap", "auto"] = Field(
        default="ram",
        description="Where frozen weights lie, those under an adapter. ram: page-locked RAM. mmap: a file in "
        "output_dir, read in every step, which saves nearly all of their RAM; a step takes as long as the disk "
        "needs for them, which the plan says. No number depends on it. auto: mmap only where RAM is too short.",
    )
    vram_limit: Annotated[
        int | None,
        BeforeValidator(bytes_or_null),
        Expected("a size such as 24GiB, a number of bytes, or null"),
    ] = Field(
        default=None,
        description="Device memory that one worker may use, in bytes or with a unit (GiB = 1024^3, "
        "GB = 1000^3). A plan that needs more is refused before loading. null: what is free on the device.",
    )
    ram_limit: Annotated[
        int | None,
        BeforeValidator(bytes_or_null),
        Expected("a size such as 64GiB, a number of bytes, or null"),
    ] = Field(
        default=None,
        description="Host memory that the run may use, in bytes or with a unit. A plan that needs more is refused "
        "before loading. null: what the system reports as free.",
    )
    plan: str | None = Field(
        default=None,
        description="Path of a plan file (as written, relative to the current directory). "
        "null: planned at the start.",
    )
    cpu_threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of one operation on the CPU pool. Never derived from the number of workers: "
        "results may depend on it. null: the engine's choice, the same for any number of workers.",
    )
    deterministic: bool = Field(
        default=False, description="Use deterministic CUDA kernels: bitwise repeatable, and slower."
    )
    stall_seconds: float = Field(
        default=1800,
        gt=0,
        description="A run in which nothing gets done for so many seconds is ended, with a report of who waits"
        " for whom. More than the longest single task takes: compiling a layer, updating a whole model.",
    )
    inject_delays: int | None = Field(
        default=None,
        ge=0,
        description="Seed of random delays put into every stream and thread, to test that timing changes no "
        "result. Slow. null: none.",
    )
    emulate_link_gbps: float | None = Field(
        default=None,
        gt=0,
        description="For benchmarks only: slows each direction of every GPU's link down to this many gigabytes "
        "(10^9 bytes) a second, as of a card with less PCIe. null: the real link.",
    )

    trace_steps: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...], Expected("a list of steps from 1, such as [10, 11]")
    ] = listed(
        default=(),
        description="Steps of which a trace is left in output_dir/traces, for ui.perfetto.dev, with a picture and"
        " a table of what workers waited for. Numbers that follow one another share a trace. Such a step takes"
        " a little longer.",
    )
