"""Answers from a run or a model folder, of any size: what is to be asked, how, and until when."""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rpft.data.asking import Asking
from rpft.data.loader import DataSettings
from rpft.errors import UserError
from rpft.model.checkpoint import read_config
from rpft.plan.bill import available_host_bytes
from rpft.train.asked_model import AskedModel, Loader
from rpft.train.export import generation_config, write_adapter
from rpft.train.model_parts import read_scaled_config
from rpft.train.rows import load_tokenizer
from rpft.train.run_folder import BASE, LATEST, asked_as_trained, open_run, read_json
from rpft.train.trained_model import base_folder, open_trained

_RAM_SHARE = 0.9
"""Of the RAM that is free, for weights."""


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
    """What is to be asked, and how."""

    described: str
    model: AskedModel
    tokenizer: Any
    asking: Asking


class Speaker:
    """A model that answers. Close it to remove what it wrote for itself."""

    def __init__(
        self,
        path: Path,
        checkpoint: str = LATEST,
        base: str | None = None,
        ram_bytes: int | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """``path``: a run, a model or an adapter for peft. ``base``: where its base model is now.

        ``ram_bytes``: RAM for weights, None: what is free. ``say``: is told what takes long.
        """
        self._cleanup = ExitStack()
        self._path, self._checkpoint, self._base = path, checkpoint, base
        ram_bytes = int(_RAM_SHARE * available_host_bytes()) if ram_bytes is None else ram_bytes
        self._source = self._find()
        self._loader = Loader(self._source.model, ram_bytes, path, self._cleanup, say)
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
            self._model = self._loader.load(len(ids) + max_new_tokens)
        model = source.model
        ends = generation_config(model.folder, model.config, source.asking.end_ids())["eos_token_id"]
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
        found = getattr(self._source.model.config.get_text_config(), "max_position_embeddings", None)
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
        asking, config = Asking(tokenizer, DataSettings(max_seq_len=1)), read_config(folder)
        return _Source(described, AskedModel(folder, config, None, adapter), tokenizer, asking)

    def _find_run(self) -> _Source:
        run = open_run(self._path)
        recipe, dtype = run.recipe, getattr(torch, run.recipe.model.dtype)
        if self._checkpoint == BASE:
            folder = base_folder(run, self._base)
            config = read_scaled_config(recipe, folder)
            model, trained = AskedModel(folder, config, dtype), None
            described = f"the base model of {run.path}"
        else:
            trained = run.find(self._checkpoint)
            whole = recipe.adapter is None and trained.state is None
            folder = trained.path if whole else base_folder(run, self._base)
            config = read_config(folder) if whole else read_scaled_config(recipe, folder)
            opened, adapter = partial(open_trained, run, trained, self._base, original=False), None
            if recipe.adapter is not None:
                adapter = trained.path
                if trained.state is not None:
                    adapter = Path(
                        self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rpft-adapter-"))
                    )
                    write_adapter(opened(), adapter, adapter)
            trained_whole = recipe.adapter is None and not whole
            model = AskedModel(folder, config, dtype, adapter, opened, trained_whole)
            described = f"{trained.described} of {run.path}"
        tokenizer, asking = asked_as_trained(run, trained, folder)
        return _Source(described, model, tokenizer, asking)


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
