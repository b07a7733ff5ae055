"""Answers from a run or a model folder, of any size: transformers generates, accelerate streams what does not fit.

Where the model fits on a GPU it lies there. Where it does not, accelerate's hooks bring each module's weights up
when it is called and let them go behind it; hidden states and the key-value cache stay on the GPU. Every token
then moves all weights that stay in RAM over the link once, from pageable memory, and nothing is computed then; of
a mixture of experts only those that the token is sent to (used_experts.py).
For a large model that is seconds a token: enough to look at a result. Where RAM is too small as well, weights are
read from the model's own safetensors files, at the rate of the disk.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpft.data.asking import Asking
from rpft.data.loader import DataSettings
from rpft.errors import UserError
from rpft.model.adapters import adapts_parameters
from rpft.model.build import build_model
from rpft.model.checkpoint import Checkpoint, read_config
from rpft.model.cut import cut
from rpft.model.merge import Merge
from rpft.plan.bill import available_host_bytes, gib
from rpft.train.export import base_folder, generation_config, open_trained, write_adapter
from rpft.train.model_parts import read_scaled_config
from rpft.train.rows import load_tokenizer
from rpft.train.run_folder import BASE, LATEST, TrainedFolder, asked_as_trained, open_run, read_json
from rpft.train.used_experts import upload_only_used_experts

_RAM_SHARE = 0.9
"""Of the RAM that is free, for weights."""

_DEVICE_RESERVE = 2 << 30
"""Of a GPU's memory, for what is neither weights nor key-value cache."""


@dataclass(frozen=True)
class Answer:
    """What the model said, and how."""

    text: str
    prompt_tokens: int
    tokens: int
    """Generated, the ending one included."""
    ended: bool
    """Whether the model ended the answer itself."""
    seconds: float


@dataclass(frozen=True)
class _Source:
    """What is to be loaded."""

    described: str
    folder: Path
    """Of a whole model in transformers' format, or of the base of ``adapter``."""
    config: Any
    dtype: torch.dtype | None
    tokenizer: Any
    asking: Asking
    adapter: Path | None = None
    masters: TrainedFolder | None = None
    """A checkpoint that holds every weight of the model."""


class Speaker:
    """A model that answers. Close it to remove what it wrote for itself."""

    def __init__(
        self, path: Path, checkpoint: str = LATEST, base: str | None = None, ram_bytes: int | None = None
    ) -> None:
        """``path``: a run, a model or an adapter for peft. ``base``: where its base model is now.

        ``ram_bytes``: RAM for weights, None: what is free.
        """
        self._cleanup = ExitStack()
        self._path, self._checkpoint, self._base = path, checkpoint, base
        self._ram_bytes = int(_RAM_SHARE * available_host_bytes()) if ram_bytes is None else ram_bytes
        self._source = self._find()
        self.described = self._source.described
        self._model: Any = None

    def close(self) -> None:
        self._model = None
        self._cleanup.close()

    def answer(
        self,
        prompt: str,
        *,
        system: str | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        write: Callable[[str], None] = lambda text: None,
    ) -> Answer:
        """Answers ``prompt``; ``write`` is given the text as it comes.

        ``temperature`` 0: always the likeliest token. UserError where the model has too few positions.
        """
        ids = self._source.asking.ids(prompt, system)
        if len(ids) + max_new_tokens > self._positions():
            raise UserError(
                f"the prompt has {len(ids)} tokens and --max-new-tokens is {max_new_tokens}; the model has"
                f" {self._positions()} positions in all: shorten the prompt, or give a smaller --max-new-tokens"
            )
        return self.answer_ids(ids, max_new_tokens=max_new_tokens, temperature=temperature, write=write)

    def answer_ids(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        write: Callable[[str], None] = lambda text: None,
    ) -> Answer:
        """As ``answer``, of a prompt that is already tokens; the answer is shorter where positions end."""
        source, ids = self._source, list(ids)
        max_new_tokens = min(max_new_tokens, self._positions() - len(ids))
        if self._model is None:
            self._model = self._load(len(ids) + max_new_tokens)
        ends = generation_config(source.folder, source.config, source.asking.end_ids())["eos_token_id"]
        began = time.monotonic()
        with torch.no_grad():
            output = self._model.generate(
                input_ids=torch.tensor([ids], device=self._device()),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self._device()),
                generation_config=_settings(self._model.generation_config, temperature, max_new_tokens, ends),
                streamer=_streamer(source.tokenizer, write),
            )
        said = output[0, len(ids) :].tolist()
        ended = bool(said) and said[-1] in ends
        text = source.tokenizer.decode(said, skip_special_tokens=True)
        return Answer(text, len(ids), len(said), ended, time.monotonic() - began)

    def text(self, ids: Sequence[int], special: bool = False) -> str:
        """What ``ids`` say; ``special``: special tokens, too."""
        return self._source.tokenizer.decode(list(ids), skip_special_tokens=not special)

    def _positions(self) -> int:
        found = getattr(self._source.config.get_text_config(), "max_position_embeddings", None)
        return sys.maxsize if found is None else found

    def _device(self) -> torch.device:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    # -- what there is -------------------------------------------------------------------------------------

    def _find(self) -> _Source:
        path = self._path
        if (path / "recipe.yaml").is_file():
            return self._find_run()
        if (path / "adapter_config.json").is_file():
            named = self._base or read_json(path / "adapter_config.json").get("base_model_name_or_path") or ""
            folder = Path(named)
            if not (folder / "config.json").is_file():
                raise UserError(f"{path}: its base model {named!r} is no folder here; give it with --base")
            return self._plain(f"the adapter {path}", folder, path)
        if (path / "config.json").is_file():
            return self._plain(f"the model {path}", path, None)
        if not path.is_dir():
            raise UserError(
                f"{path}: {'that is a file' if path.exists() else 'no such folder'}; give the output"
                " directory of a run, or the folder of a model or of an adapter"
            )
        raise UserError(f"{path}: neither a run (recipe.yaml), a model (config.json) nor an adapter in it")

    def _plain(self, described: str, folder: Path, adapter: Path | None) -> _Source:
        tokenizer = load_tokenizer(folder if adapter is None else adapter)
        asking = Asking(tokenizer, DataSettings(max_seq_len=1))
        return _Source(described, folder, read_config(folder), None, tokenizer, asking, adapter)

    def _find_run(self) -> _Source:
        run = open_run(self._path)
        recipe = run.recipe
        if self._checkpoint == BASE:
            folder = base_folder(run, self._base)
            tokenizer, asking = asked_as_trained(run, None, folder)
            config, dtype = read_scaled_config(recipe, folder), getattr(torch, recipe.model.dtype)
            return _Source(f"the base model of {run.path}", folder, config, dtype, tokenizer, asking)
        trained = run.find(self._checkpoint)
        whole = recipe.adapter is None and trained.state is None
        folder = trained.path if whole else base_folder(run, self._base)
        config = read_config(folder) if whole else read_scaled_config(recipe, folder)
        tokenizer, asking = asked_as_trained(run, trained, folder)
        adapter = None
        if recipe.adapter is not None:
            adapter = trained.path
            if trained.state is not None:
                adapter = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rpft-adapter-")))
                write_adapter(open_trained(run, trained, self._base, original=False), adapter, adapter)
        return _Source(
            described=f"{trained.described} of {run.path}",
            folder=folder,
            config=config,
            dtype=getattr(torch, recipe.model.dtype),
            tokenizer=tokenizer,
            asking=asking,
            adapter=adapter,
            masters=trained if adapter is None and not whole else None,
        )

    # -- loading -------------------------------------------------------------------------------------------

    def _load(self, num_tokens: int) -> Any:
        source = self._source
        if source.masters is not None:
            return self._place(self._from_masters(), num_tokens).eval()
        if _model_bytes(source.folder, source.config, source.dtype) > self._ram_bytes:
            return self._from_disk(num_tokens).eval()
        model = self._from_pretrained()
        if source.adapter is not None:
            from peft import PeftModel

            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=FutureWarning)  # between peft and transformers
                model = PeftModel.from_pretrained(model, str(source.adapter), autocast_adapter_dtype=False)
        return self._place(model, num_tokens).eval()

    def _from_pretrained(self, **settings: Any) -> Any:
        from transformers import AutoModelForCausalLM

        source = self._source
        dtype = "auto" if source.dtype is None else source.dtype
        return AutoModelForCausalLM.from_pretrained(
            source.folder, config=copy.deepcopy(source.config), dtype=dtype, **settings
        )

    def _from_masters(self) -> Any:
        """The model of a full run's checkpoint, whole in RAM."""
        source = self._source
        assert source.masters is not None
        assert source.dtype is not None
        trained = open_trained(open_run(self._path), source.masters, self._base)
        model = build_model(copy.deepcopy(source.config), source.dtype, "auto")
        layers = Merge(trained.skeleton, trained.layouts).run(
            cut(copy.deepcopy(model)), trained.reader(), trained.tensors, source.dtype
        )
        state = {name: tensor.clone() for tensors, _ in layers for name, tensor in tensors.items()}
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

    def _from_disk(self, num_tokens: int) -> Any:
        """The model with what RAM does not hold read from its files at every use."""
        if self._source.adapter is not None:  # peft would copy the whole base model into the current directory
            raise UserError(
                f"{self._source.folder} takes more than the {gib(self._ram_bytes)} of RAM that are free, and an"
                " adapter cannot stand beside weights that are read from the disk: merge it with `rpft export` and"
                " generate from that folder"
            )
        folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rpft-offload-"))
        limits = self._device_limits(num_tokens) if torch.cuda.is_available() else {}
        model = self._from_pretrained(
            device_map="auto", max_memory={**limits, "cpu": self._ram_bytes}, offload_folder=folder
        )
        upload_only_used_experts(model)
        return model


def _model_bytes(folder: Path, config: Any, dtype: torch.dtype | None) -> int:
    """What the weights in ``folder`` take in RAM."""
    stored = sum(file.stat().st_size for file in {*Checkpoint(folder).files()})
    if dtype is None or config.dtype is None:
        return stored
    return stored * dtype.itemsize // config.dtype.itemsize


def _settings(own: Any, temperature: float, max_new_tokens: int, ends: list[int]) -> Any:
    settings = copy.deepcopy(own)
    settings.max_new_tokens, settings.max_length = max_new_tokens, None
    settings.eos_token_id, settings.pad_token_id = ends or None, ends[0] if ends else 0
    settings.do_sample, settings.use_cache = temperature > 0, True
    settings.temperature = temperature if temperature > 0 else None
    if temperature == 0:
        settings.top_p = settings.top_k = None
    return settings


def _streamer(tokenizer: Any, write: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Writing(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    return Writing(tokenizer, skip_prompt=True, skip_special_tokens=True)
