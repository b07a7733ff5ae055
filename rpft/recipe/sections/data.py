"""Keys of `data`: the rows, and how they become tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rpft.recipe.section import Expected, Section, day, frozen_mapping, listed


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
        "Less padding and more tokens a second, but rows a step vary. Refused for families that do not keep packed"
        " rows apart, as GPT-OSS and Qwen3-Next.",
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
