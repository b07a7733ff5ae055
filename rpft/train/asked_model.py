"""Loads a model of any size so that transformers generates with it: accelerate streams what does not fit.

Where the model fits on a GPU it lies there. Where it does not, accelerate's hooks bring each module's weights up
when it is called and let them go behind it; hidden states and the key-value cache stay on the GPU. Every token
then moves all weights that stay in RAM over the link once, from pageable memory, and nothing is computed then; of
a mixture of experts only those that the token is sent to (used_experts.py).
For a large model that is seconds a token: enough to look at a result. Where RAM is too small as well, weights are
read from safetensors files, at the rate of the disk: from the model's own, or, where these are not yet what is
asked, from files that are merged for it and removed behind it.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rpft import files
from rpft.errors import UserError
from rpft.model.adapters import adapts_parameters
from rpft.model.build import build_model
from rpft.model.checkpoint import Checkpoint
from rpft.model.parts import is_stack
from rpft.model.save import SHARD_BYTES, write_config, write_shards
from rpft.plan.bill import gib
from rpft.train.trained_model import Merged, TrainedModel, open_untrained, quantised_by
from rpft.train.used_experts import upload_only_used_experts

_DEVICE_RESERVE = 2 << 30
"""Of a GPU's memory, for what is neither weights nor key-value cache."""


@dataclass(frozen=True)
class AskedModel:
    """What is to be loaded."""

    folder: Path
    """Of a whole model in transformers' format, or of the base of ``adapter``."""
    config: Any
    dtype: torch.dtype | None
    """None: as the files have it."""
    adapter: Path | None = None
    open_trained: Callable[[], TrainedModel] | None = None
    """What a run trained; None for what is no run's."""
    trained_whole: bool = False
    """Whether every weight is in a checkpoint, and none in ``folder`` counts."""

    def opened(self) -> TrainedModel:
        """With all that was trained; of what is no run's the model in ``folder``."""
        return self.untrained() if self.open_trained is None else self.open_trained()

    def untrained(self) -> TrainedModel:
        """The model in ``folder``."""
        return open_untrained(self.folder, self.config, self.computed_dtype)

    @property
    def computed_dtype(self) -> torch.dtype:
        return self.dtype or self.config.dtype or torch.float32


class Loader:
    """Loads one model."""

    def __init__(
        self,
        source: AskedModel,
        ram_bytes: int,
        path: Path,
        cleanup: ExitStack,
        say: Callable[[str], None],
    ) -> None:
        """``ram_bytes``: for weights. ``path``: on whose disk files may be written, which ``cleanup`` removes."""
        self._source, self._ram_bytes, self._path = source, ram_bytes, path
        self._cleanup, self._say = cleanup, say
        self._quantised = quantised_by(source.folder) is not None
        """So that transformers does not read it without the library that made it."""

    def load(self, num_tokens: int) -> Any:
        """The model; ``num_tokens``: for so many a key-value cache finds room beside it."""
        source = self._source
        if self._model_bytes() > self._ram_bytes:
            return self._from_disk(num_tokens).eval()
        if source.trained_whole:
            model = self._in_ram(Merged(source.opened(), source.computed_dtype))
        elif self._quantised:
            model = self._in_ram(self._untrained)
        else:
            model = self._from_pretrained(source.folder, source.config)
        if source.adapter is not None:
            from peft import PeftModel

            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=FutureWarning)  # between peft and transformers
                model = PeftModel.from_pretrained(model, str(source.adapter), autocast_adapter_dtype=False)
        return self._place(model, num_tokens).eval()

    def _model_bytes(self) -> int:
        """What the weights take in RAM."""
        source = self._source
        if self._quantised:
            return self._untrained.num_bytes
        stored = sum(file.stat().st_size for file in {*Checkpoint(source.folder).files()})
        if source.dtype is None or source.config.dtype is None:
            return stored
        return stored * source.dtype.itemsize // source.config.dtype.itemsize

    def _from_pretrained(self, folder: Path, config: Any, **settings: Any) -> Any:
        from transformers import AutoModelForCausalLM

        dtype = "auto" if self._source.dtype is None else self._source.dtype
        return AutoModelForCausalLM.from_pretrained(folder, config=copy.deepcopy(config), dtype=dtype, **settings)

    @cached_property
    def _untrained(self) -> Merged:
        """The model in the source's folder; to build it takes seconds."""
        return Merged(self._source.untrained(), self._source.computed_dtype)

    def _in_ram(self, merged: Merged) -> Any:
        """What rpft reads itself, whole in RAM."""
        model = build_model(copy.deepcopy(merged.config), self._source.computed_dtype, "auto")
        state = {name: tensor.clone() for tensors, _ in merged.layers() for name, tensor in tensors.items()}
        model.load_state_dict(state, strict=False, assign=True)  # a tied head is not among them
        model.tie_weights()
        model.config.use_cache = True
        return model

    def _place(self, model: Any, num_tokens: int) -> Any:
        """Puts a model that is in RAM on the GPUs, or has it streamed through them."""
        if not torch.cuda.is_available():
            return model
        from accelerate import dispatch_model, infer_auto_device_map

        on_devices = self._device_limits(num_tokens)
        size = sum(parameter.nbytes for parameter in model.parameters())
        if size <= on_devices[0]:
            return model.to("cuda:0")
        if adapts_parameters(model):
            # An adapter of fused experts computes with the weight itself, which is not there while it is in RAM.
            model = model.merge_and_unload()
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        limits: dict[int | str, int | str] = {**on_devices, "cpu": 2 * size}
        placed = infer_auto_device_map(model, limits, no_split_module_classes=list(base._no_split_modules or []))
        model = dispatch_model(model, placed, main_device=torch.device("cuda", 0))
        upload_only_used_experts(model)
        return model

    def _device_limits(self, num_tokens: int) -> dict[int, int]:
        """Bytes of weights that each GPU may hold. The first one holds what is streamed, too."""
        config = self._source.config.get_text_config()
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        cache = 2 * config.num_hidden_layers * heads * head_size * num_tokens * 4
        return {
            number: max(0, torch.cuda.mem_get_info(number)[0] - _DEVICE_RESERVE - cache)
            for number in range(torch.cuda.device_count())
        }

    # -- from the disk -------------------------------------------------------------------------------------

    def _from_disk(self, num_tokens: int) -> Any:
        """The model with what RAM does not hold read from files at every use."""
        source = self._source
        folder, config = source.folder, source.config
        if source.adapter is not None or source.trained_whole or self._quantised:
            folder, config = self._merged_on_disk()
        limits = self._device_limits(num_tokens) if torch.cuda.is_available() else {}
        model = self._from_pretrained(
            folder,
            config,
            device_map="auto",
            max_memory={**limits, "cpu": self._ram_bytes},
            offload_folder=self._scratch_folder(self._stacked_bytes() if folder == source.folder else 0),
        )
        upload_only_used_experts(model)
        return model

    def _merged_on_disk(self) -> tuple[Path, Any]:
        """A folder with what is asked as one plain model, and its config.

        An adapter cannot stand beside weights that are read from the disk: peft would copy all of these.
        """
        source = self._source
        if source.adapter is not None and source.open_trained is None:
            raise UserError(
                f"{source.folder} takes more than the {gib(self._ram_bytes)} of RAM that are free, and an adapter"
                " that is no run's cannot stand beside weights that are read from the disk: merge it first, with"
                " `rpft export` if a run made it"
            )
        merged = Merged(source.opened(), source.computed_dtype)
        folder = self._scratch_folder(merged.num_bytes)
        self._say(f"merging {gib(merged.num_bytes)} into {folder}, since RAM does not hold them")
        write_config(merged.config, source.computed_dtype, folder)
        # By the names of the model itself: experts are stacked then, and need not be written once more.
        tensors = (pair for layer, _ in merged.layers() for pair in layer.items())
        write_shards(tensors, folder, SHARD_BYTES)
        return folder, merged.config

    def _stacked_bytes(self) -> int:
        """Of stacks of experts, which transformers writes anew where the files hold the experts one by one."""
        source = self._source
        model = build_model(copy.deepcopy(source.config), source.computed_dtype, "auto")
        there = set(Checkpoint(source.folder).names())
        stacks = (path for path, module in model.named_modules() if is_stack(module))
        weights = (named for path in stacks for named in model.get_submodule(path).named_parameters(prefix=path))
        return sum(parameter.nbytes for name, parameter in weights if name not in there)

    def _scratch_folder(self, num_bytes: int) -> Path:
        """A folder that goes with the speaker; UserError where its disk has no room for ``num_bytes``."""
        place = self._path if os.access(self._path, os.W_OK) else Path(tempfile.gettempdir())
        free = files.free_bytes(place)
        if num_bytes > free:
            raise UserError(
                f"{self._source.folder} takes more than the {gib(self._ram_bytes)} of RAM that are free, and to"
                f" read it from the disk {gib(num_bytes)} are to be written into {place}, where {gib(free)} are"
                " free: make room, or `rpft export --out` a folder on another disk and generate from that"
            )
        return self._cleanup.enter_context(files.scratch_folder(place, ".rpft-generate-"))
