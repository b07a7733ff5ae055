"""A model that does not fit the GPU answers as one that does: accelerate streams its weights through."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.adapters import LORA, load_lora, randomise, save
from support.models import tiny_checkpoint
from support.quantised import write_quantised
from support.recipes import tiny_tokenizer

from rpft.train import used_experts
from rpft.train.asked_model import Loader
from rpft.train.generate import Speaker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3_moe"])
@pytest.mark.parametrize("adapted", [False, True], ids=["model", "adapter"])
def test_a_streamed_model_answers_as_one_on_the_gpu(
    family: str, adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.use_deterministic_algorithms(False)  # what transformers calls is not ours to choose
    folder = tmp_path / "base"
    tiny_checkpoint(folder, family)
    tiny_tokenizer().save_pretrained(folder)
    if adapted:
        loaded = load_lora(folder, LORA)
        randomise(loaded)
        folder = save(loaded, tmp_path / "adapter")
        tiny_tokenizer().save_pretrained(folder)
    whole = Speaker(folder)
    expected = whole.answer("one two three", max_new_tokens=12)
    assert next(whole._model.parameters()).is_cuda
    room = int(0.6 * sum(p.nbytes for p in whole._model.parameters()))  # for one or two of the four blocks
    monkeypatch.setattr(Loader, "_device_limits", lambda self, num_tokens: {0: room})
    streamed, brought = Speaker(folder), []
    some = used_experts._Used._some

    def recorded(stack: torch.Tensor, numbers: list[int], device: torch.device) -> torch.Tensor:
        brought.append(len(numbers))
        return some(stack, numbers, device)

    monkeypatch.setattr(used_experts._Used, "_some", staticmethod(recorded))
    assert streamed.answer("one two three", max_new_tokens=12).text == expected.text
    placed = set(streamed._model.hf_device_map.values())
    assert "cpu" in placed
    assert (min(brought, default=None) == 2) == (family == "qwen3_moe"), "of 4 experts a token is sent to 2"
    assert placed & {0, "cuda:0", torch.device("cuda", 0)}
    for speaker in (whole, streamed):
        speaker.close()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_what_ram_does_not_hold_is_merged_into_files_and_streamed_from_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a quantised checkpoint, which no library reads here; a run's adapter and masters go the same way."""
    torch.use_deterministic_algorithms(False)
    tiny_checkpoint(tmp_path / "base", family)
    write_quantised(tmp_path / "base", tmp_path / "nf4", nested=True, skip="experts")
    tiny_tokenizer().save_pretrained(tmp_path / "nf4")
    whole = Speaker(tmp_path / "nf4")
    expected = whole.answer("one two three", max_new_tokens=12)
    assert next(whole._model.parameters()).is_cuda
    room = int(0.4 * sum(p.nbytes for p in whole._model.parameters()))
    monkeypatch.setattr(Loader, "_device_limits", lambda self, num_tokens: {0: room})
    streamed = Speaker(tmp_path / "nf4", ram_bytes=150_000)
    assert streamed.answer("one two three", max_new_tokens=12).text == expected.text
    placed = set(streamed._model.hf_device_map.values())
    assert "disk" in placed
    assert placed & {0, "cuda:0", torch.device("cuda", 0)}
    for speaker in (whole, streamed):
        speaker.close()
    assert not list((tmp_path / "nf4").glob(".rpft-generate-*"))
