"""Of an offloaded mixture of experts only the picked ones are brought up, and the answer is the same."""

from __future__ import annotations

import accelerate
import pytest
import torch
from support.models import tiny_model

from rpft.train import used_experts
from rpft.train.used_experts import upload_only_used_experts

IDS = torch.tensor([[5, 6, 7, 9, 11, 14]])
TOKENS = 6


def offloaded(family: str) -> torch.nn.Module:
    model = tiny_model(family).eval()
    return accelerate.cpu_offload(model, torch.device("cpu"))


def said(model: torch.nn.Module) -> list[int]:
    return model.generate(IDS, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)[0].tolist()  # type: ignore[operator]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "deepseek_v3"])
def test_a_token_brings_up_only_the_experts_it_is_sent_to(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    brought: list[list[int]] = []
    some = used_experts._Used._some

    def recorded(stack: torch.Tensor, numbers: list[int], device: torch.device) -> torch.Tensor:
        brought.append(numbers)
        return some(stack, numbers, device)

    monkeypatch.setattr(used_experts._Used, "_some", staticmethod(recorded))
    model = offloaded(family)
    expected = said(model)
    stacks = upload_only_used_experts(model)
    assert len(stacks) == (3 if family == "deepseek_v3" else 4)
    assert said(model) == expected
    weights = len(list(stacks[0].parameters()))
    behind_the_prompt = brought[-(TOKENS - 1) * len(stacks) * weights :]
    assert [len(numbers) for numbers in behind_the_prompt] == [2] * len(behind_the_prompt)
    assert len({tuple(numbers) for numbers in behind_the_prompt}) > 1


def test_a_dense_model_is_left_as_it_is() -> None:
    assert upload_only_used_experts(offloaded("llama")) == []


def test_a_model_that_is_where_it_computes_is_left_as_it_is() -> None:
    assert upload_only_used_experts(tiny_model("qwen3_moe")) == []
