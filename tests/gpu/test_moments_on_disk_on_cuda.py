"""On CUDA moments that lie on the disk change no bit."""

from __future__ import annotations

import pytest
import torch
from support.engines import plan_of, run_engine

from rpft.model import moments_file
from rpft.model.adapters import LoraSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "layer")
LORA = LoraSettings(4, 8.0, 0.1, "all-linear")


@pytest.mark.parametrize("update_lag", [0, 1])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "LoRA"])
def test_the_numbers_are_those_of_ram(lora, update_lag, make_device, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(moments_file, "PIECE_PARAMETERS", 4096)
    settings = {"lora": lora, "make_device": make_device, "dtype": torch.bfloat16, "update_lag": update_lag}
    in_ram = run_engine(checkpoint("llama"), PLAN, **settings)
    for workers, seed in ((1, None), (2, 1)):
        on_disk = run_engine(checkpoint("llama"), PLAN, workers, moments_in=tmp_path, delays_seed=seed, **settings)
        assert on_disk.differences(in_ram) == []
