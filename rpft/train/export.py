"""From a run to a folder that other programs load: one whole model, or an adapter as peft has it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpft import files
from rpft.errors import UserError
from rpft.model.adapters import names_in_adapter, save_adapter
from rpft.model.merge import Drift, Tensors
from rpft.model.save import SHARD_BYTES, write_config, write_layers, written_whole
from rpft.plan.bill import RESULT_EXTRAS_BYTES, gib
from rpft.train.card import model_card
from rpft.train.run_folder import LATEST, RunFolder, TrainedFolder, asked_as_trained, read_json
from rpft.train.trained_model import Merged, TrainedModel, open_trained

PROBE_TEXT = (
    "The committee met on Tuesday to decide how the river should be crossed. Three of its members wanted a bridge"
    " of stone; the fourth asked what 17 * 23 is, wrote `print(17 * 23)` on the board, and answered: 391. Nobody"
    " disagreed, so the minutes were closed and the lamps put out."
)
"""What base and adapter, and the merged model, are compared on."""

_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
"""Files of a base model that go where its weights go."""

_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class ExportSettings:
    """What is to be made of a run."""

    out: Path
    checkpoint: str = LATEST
    """See ``RunFolder.find``."""
    dtype: torch.dtype | None = None
    """None: the run's."""
    shard_bytes: int = SHARD_BYTES
    adapter_only: bool = False
    base: str | None = None
    """Where the base model is now; None: where the recipe says."""


@dataclass(frozen=True)
class Exported:
    """What was made. ``drift`` is of a merged adapter."""

    folder: Path
    trained: TrainedFolder
    drift: Drift | None


def export_run(run: RunFolder, settings: ExportSettings, say: Callable[[str], None]) -> Exported:
    """Writes ``settings.out``, whole or not at all; UserError for what a person can change.

    RAM: a layer, its merged copy, the float32 copy of one weight, and a shard twice.
    """
    _refuse_target(settings.out)
    if settings.adapter_only and run.recipe.adapter is None:
        raise UserError(f"--adapter-only: {run.path} trained every weight and has no adapter; leave it out")
    trained = run.find(settings.checkpoint)
    say(f"exporting {trained.described} of {run.path}")
    if settings.adapter_only and trained.state is None:
        return _copy_adapter(run, trained, settings.out)
    model = open_trained(run, trained, settings.base, original=not settings.adapter_only)
    with written_whole(settings.out) as fresh:
        drift = None
        if settings.adapter_only:
            write_adapter(model, settings.out, fresh)
        else:
            drift = _write_model(run, trained, model, settings, fresh, say)
        tokenizer, _ = asked_as_trained(run, trained, model.base)
        tokenizer.save_pretrained(fresh)
        for pattern in _LICENCES:
            for path in model.base.glob(pattern):
                shutil.copyfile(path, fresh / path.name)
        card = model_card(run, trained, model.base, drift, settings.adapter_only)
        (fresh / "README.md").write_text(card, encoding="utf-8")
    return Exported(settings.out, trained, drift)


def _copy_adapter(run: RunFolder, trained: TrainedFolder, out: Path) -> Exported:
    """The result of an adapter's run is what peft loads already, and asks for no base model."""
    paths = list(trained.path.iterdir())
    _refuse_full_disk(out, sum(path.stat().st_size for path in paths))
    with written_whole(out) as fresh:
        for path in paths:
            shutil.copyfile(path, fresh / path.name)
        card = model_card(run, trained, Path(run.recipe.model.path), None, adapter_only=True)
        (fresh / "README.md").write_text(card, encoding="utf-8")
    return Exported(out, trained, None)


def _refuse_target(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: it is there and not an empty folder; give another, or empty it first")
    try:  # on a disk that takes nothing this is better known before the weights are read
        with tempfile.TemporaryDirectory(prefix=".rpft-", dir=files.existing_folder(out.absolute().parent)):
            pass
    except OSError as error:
        raise UserError(
            f"--out {out}: nothing can be written there: {error.strerror}; name another folder"
        ) from error


def _refuse_full_disk(out: Path, num_bytes: int) -> None:
    need, free = num_bytes + RESULT_EXTRAS_BYTES, files.free_bytes(out)
    if need > free:
        raise UserError(
            f"--out {out}: {gib(need)} are to be written and {gib(free)} are free on that disk; make room, or give"
            " a folder on another disk"
        )


def write_adapter(model: TrainedModel, out: Path, fresh: Path) -> None:
    """Writes the adapter into ``fresh``, which is to become ``out``; UserError where the disk is too small."""
    dtype = model.skeleton.model.dtype
    specs = [spec for layout in model.layouts for spec, _ in layout.own.values() if spec.trained]
    _refuse_full_disk(out, sum(spec.num_elements for spec in specs) * dtype.itemsize)
    tensors, reader = {name: tensor.to(dtype) for name, tensor in model.tensors.items()}, model.reader()
    for layer, layout in enumerate(model.layouts):
        buffers = [name for name in names_in_adapter(layout) if name not in tensors]
        base = reader.read(layer) if buffers else {}
        for name in buffers:
            kept = layout.own[name][0].checkpoint_name
            assert kept is not None
            tensors[name] = base[kept]
    save_adapter(model.peft_model, tensors, fresh)


def _write_model(
    run: RunFolder,
    trained: TrainedFolder,
    model: TrainedModel,
    settings: ExportSettings,
    fresh: Path,
    say: Callable[[str], None],
) -> Drift | None:
    dtype = settings.dtype or model.skeleton.model.dtype
    merged = Merged(model, dtype)
    if merged.unties:
        say("embedding and head were tied and get weights of their own: an adapter stands at one of them")
    _refuse_full_disk(settings.out, merged.num_bytes)
    tokenizer, asking = asked_as_trained(run, trained, model.base)
    positions = getattr(merged.config.get_text_config(), "max_position_embeddings", None)
    ids = None if model.peft_model is None else torch.tensor([tokenizer(PROBE_TEXT).input_ids[:positions]])
    drifts: list[Drift | None] = []

    def layers() -> Iterator[Tensors]:
        for layer, (tensors, drift) in enumerate(merged.layers(ids)):
            _refuse_overflow(tensors, layer, dtype)
            drifts.append(drift)
            yield tensors

    write_config(merged.config, dtype, fresh)
    write_layers(merged.skeleton, layers(), fresh, settings.shard_bytes)
    content = generation_config(model.base, merged.config, asking.end_ids())
    (fresh / _GENERATION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return drifts[-1]


def _refuse_overflow(tensors: Tensors, layer: int, dtype: torch.dtype) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float16 and dtype == torch.float16 and not torch.isfinite(tensor).all():
            raise UserError(
                f"layer {layer}: {name} has values beyond what float16 holds; export with --dtype bf16 or fp32"
            )


def generation_config(base: Path, config: Any, end_ids: list[int]) -> dict[str, Any]:
    """The base model's generation settings, with the tokens that end an answer of the trained one as ends, too.

    A base model whose answers were trained to end with a turn's token would go on behind it otherwise.
    """
    content = read_json(base / _GENERATION)
    text = config.get_text_config()
    ends = content.get("eos_token_id", text.eos_token_id)
    known = [] if ends is None else ends if isinstance(ends, list) else [ends]
    for key in ("bos_token_id", "pad_token_id"):
        value = getattr(text, key, None)
        if value is not None:
            content.setdefault(key, value)
    return {**content, "eos_token_id": list(dict.fromkeys([*known, *end_ids]))}
