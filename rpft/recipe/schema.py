"""Every key of a recipe: its name, type, default, bounds and meaning, each said once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rpft.recipe.checks import find_conflicts
from rpft.recipe.section import (
    Expected,
    Section,
    bytes_or_null,
    day,
    frozen_mapping,
    list_as_tuple,
    listed,
    no_yaml_1_1_boolean,
)


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


class Source(Section):
    """One entry of rows; a plain string is short for its path."""

    path: str = Field(
        min_length=1,
        description="File, folder or pattern (*, **), as written, relative to the current directory; or "
        "hub:owner/name. Files end in .jsonl, .json, .csv, .tsv, .txt (a row a line), each also with .gz or .zst, "
        "or in .parquet or .arrow.",
    )
    format: Literal["auto", "messages", "alpaca", "prompt_completion", "text", "tokens", "preference"] = Field(
        default="auto",
        description="Shape of a row. messages: chat turns with roles. alpaca: instruction, input, output. "
        "prompt_completion: two texts, or two lists of turns. text: plain text. tokens: input_ids, and labels"
        " where not all are trained. preference: chosen and rejected, for `rpft data` only. auto: by the keys of"
        " the first row.",
    )
    max_rows: int | None = Field(
        default=None, ge=1, description="Rows to read from the start of the entry. null: every row."
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="Times that each row stands in an epoch. Of a fraction, so large a share of the rows stands"
        " once (more), drawn once by train.seed. Not read for evaluation rows.",
    )
    columns: Annotated[
        dict[str, str] | None,
        AfterValidator(frozen_mapping),
        Expected("a mapping of keys to column names, or null"),
    ] = Field(
        default=None,
        description="Key of the format: name that it has in the data, as in {instruction: question, output:"
        " answer}.",
    )
    config: str | None = Field(default=None, description="Configuration of a hub data set.")
    split: str = Field(default="train", min_length=1, description="Split of a hub data set.")
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of a hub data set. Only of a commit are tokens kept on disk.",
    )
    streaming: bool = Field(default=False, description="Read a hub data set without downloading it whole.")

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class Data(Section):
    """The rows, and how they become tokens."""

    train: tuple[Source, ...] = listed(min_length=1, description="Training rows, read in order.")
    eval: tuple[Source, ...] = listed(
        default=(), description="Evaluation rows. Empty: see eval_fraction and eval_rows."
    )
    eval_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the training rows held out for evaluation when `eval` is empty. 0: no evaluation.",
    )
    eval_rows: int | None = Field(
        default=None,
        ge=1,
        description="The same as a number of rows, drawn by train.seed. null: see eval_fraction.",
    )
    max_seq_len: int = Field(
        default=2048,
        ge=2,
        description="Tokens of the longest row, and of a pack. Activation memory and traffic grow with it.",
    )
    packing: bool = Field(
        default=False,
        description="Put several rows into one sequence of max_seq_len tokens; rows do not see each other. "
        "Less padding and more tokens a second, but rows a step vary.",
    )
    truncation: Literal["drop", "left", "right", "error"] = Field(
        default="drop",
        description="What to do with a row longer than max_seq_len. drop: leave it out and count it. "
        "left: cut its beginning. right: cut its end, and do not teach it to end there. "
        "error: stop and name the row.",
    )
    train_on: Literal["assistant", "last_assistant", "all", "completion"] = Field(
        default="assistant",
        description="Tokens that the loss counts. assistant: every assistant turn. last_assistant: the last "
        "one only. completion: every assistant turn after the last user turn, or after the prompt of a row that"
        " has one. all: every token, prompts included.",
    )
    chat_template: str | None = Field(
        default=None,
        description="Path of a Jinja chat template (as written, relative to the current directory), or one that"
        " comes with rpft: chatml, gemma, llama3, mistral, phi, qwen3. null: the tokenizer's own.",
    )
    template_kwargs: Annotated[
        dict[str, Any] | None, AfterValidator(frozen_mapping), Expected("a mapping of names to values, or null")
    ] = Field(
        default=None,
        description="Variables for the chat template, such as {enable_thinking: false}.",
    )
    template_date: Annotated[str, AfterValidator(day), Expected("a date such as 2024-07-26")] = Field(
        default="2024-07-26",
        description="What a chat template that prints today's date prints, so that rows are the same every day.",
    )
    system_role: Literal["error", "merge"] = Field(
        default="error",
        description="A system message that the chat template refuses. error: stop and name the row. "
        "merge: put it in front of the first user turn.",
    )
    processes: int | None = Field(
        default=None,
        ge=1,
        description="Processes that tokenise large data; the rows are the same. null: as many as there are cores,"
        " at most 16.",
    )
    token_cache: str = Field(
        default="auto",
        min_length=1,
        description="Where tokens are kept, so that the next start need not make them. auto: those of files from"
        " 16 MiB, in ~/.cache/rpft/tokens. off: nowhere. A folder: those of all files, there. What is kept may be"
        " deleted at any time.",
    )


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
        description="Probability that an input element of the adapter is dropped in training.",
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
        " the lengths of all adapted weights. Not with target_parameters.",
    )
    lr_ratio_b: float = Field(
        default=1.0,
        gt=0,
        description="LoRA+: the learning rate of each adapter's second factor, which starts at zero, and of "
        "trained vectors, over train.learning_rate. Usual: 1 to 16, with a lower train.learning_rate.",
    )


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


class Checkpoint(Section):
    """Checkpoints from which a run can go on."""

    every_steps: int | None = Field(
        default=None, ge=1, description="Steps between checkpoints. null: not by steps."
    )
    every_minutes: float | None = Field(
        default=None,
        gt=0,
        description="Minutes between checkpoints, taken at the next step's end. null: not by time.",
    )
    keep_last: int = Field(
        default=2,
        ge=1,
        description="Checkpoints kept; older ones are deleted. Each holds the trained weights and moments.",
    )
    keep_best: bool = Field(
        default=False,
        description="Also keep the checkpoint with the lowest evaluation loss. Needs evaluation rows and "
        "train.eval_every.",
    )
    make_room: bool = Field(
        default=False,
        description="true: when the disk is too full for a checkpoint, the oldest goes first, however many"
        " keep_last keeps; the newest and the best stay. false: the checkpoint is left out, which is said.",
    )
    spike_deviations: float | None = Field(
        default=None,
        gt=0,
        description="A guard against a loss that jumps: spike_steps steps in a row with a loss so many robust "
        "deviations above the median of the last 64 send the run back to the last checkpoint before them; when it "
        "comes to these steps again it passes them over. 10 or more is safe for most data. null: no guard.",
    )
    spike_steps: int = Field(
        default=3, ge=1, description="Steps in a row that make a spike. Not read without spike_deviations."
    )
    most_rewinds: int = Field(
        default=3,
        ge=0,
        description="How often a run goes back; the next spike ends it. Not read without spike_deviations.",
    )

    @property
    def regular(self) -> bool:
        """Whether checkpoints are written on the way, and not only when a run is interrupted."""
        return self.every_steps is not None or self.every_minutes is not None


class Wandb(Section):
    """Figures go to Weights & Biases, too, when a project is named. Needs the package wandb."""

    project: str | None = Field(default=None, min_length=1, description="Its project. null: nothing goes there.")
    entity: str | None = Field(default=None, description="User or team. null: the one of the login.")
    name: str | None = Field(default=None, description="Name of the run. null: that of output_dir.")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: files in output_dir/wandb, for `wandb sync`."
    )


class Mlflow(Section):
    """Figures go to MLflow, too, when an experiment is named. Needs the package mlflow."""

    experiment: str | None = Field(
        default=None, min_length=1, description="Its experiment. null: nothing goes there."
    )
    tracking_uri: str | None = Field(
        default=None, description="Server or folder. null: what MLFLOW_TRACKING_URI says, or MLflow's own choice."
    )
    name: str | None = Field(default=None, description="Name of the run. null: that of output_dir.")


class Logging(Section):
    """What a person sees, and where else figures go; metrics.jsonl and run.log are written whatever is set."""

    console: Literal["auto", "rich", "plain"] = Field(
        default="auto",
        description="rich: a live display. plain: lines. auto: rich on a terminal, else plain.",
    )
    every_steps: int = Field(default=1, ge=1, description="Steps between lines of the plain console.")
    tensorboard: bool = Field(
        default=False,
        description="true: figures go to output_dir/tensorboard, too. Needs the package tensorboard.",
    )
    wandb: Wandb = Field(default_factory=Wandb, description=Wandb.__doc__)
    mlflow: Mlflow = Field(default_factory=Mlflow, description=Mlflow.__doc__)
    prometheus_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Port of this machine (127.0.0.1 only) at which /metrics has the last step's figures for"
        " Prometheus. null: none.",
    )


class Recipe(Section):
    """One run. ``Recipe(**sections)`` checks as strictly as a file; ``load_recipe`` explains its errors."""

    model: Model
    data: Data
    adapter: Adapter | None = None
    train: Train = Field(default_factory=Train)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    engine: Engine = Field(default_factory=Engine)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    logging: Logging = Field(default_factory=Logging)
    output_dir: str = Field(
        min_length=1,
        description="Folder for metrics, checkpoints and the result (as written, relative to the current "
        "directory).",
    )

    @model_validator(mode="after")
    def _no_conflicts(self) -> Recipe:
        sections = self.model, self.data, self.adapter, self.train, self.engine, self.checkpoint
        conflicts = list(find_conflicts(*sections, has_adapter=self.adapter is not None))
        if conflicts:
            raise PydanticCustomError("conflicts", "{text}", {"text": "; ".join(c.message for c in conflicts)})
        return self

    def with_values(self, section: str, **values: Any) -> Recipe:
        """This recipe with other values in one of its sections; they are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})
