"""``benchmarks/predictions.py``: a case is a run that is planned, predicted and timed; records say the load."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    """The folder's scripts can be imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def arguments(**changes):
    given = {
        "preset": "tiny",
        "lora": 0,
        "targets": "all-linear",
        "quantize": "none",
        "state": "fp32",
        "workers": [2],
        "device": "cpu",
        "vram_limit": 24.0,
        "ram_limit": None,
        "kernels": "eager",
        "recompute": "auto",
        "deterministic": False,
    }
    return argparse.Namespace(**{**given, **changes})


def test_a_record_has_every_case_with_its_error_and_the_load(benchmarks, monkeypatch, tmp_path, capsys):
    import predictions

    file = tmp_path / "predictions.json"
    # A full round of the garbage collector over all that a session has imported takes longer than a tiny run.
    monkeypatch.setattr("rpft.engine.engine.gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))
    words = "tiny --lora 0,4 --sequence 16 --rows 2 --microbatches 2 --windows 1 --workers 1 --device cpu"
    monkeypatch.setattr(sys, "argv", ["predictions.py", *words.split(), "--json", str(file)])
    assert predictions.main() == 0
    results = json.loads(file.read_text())["results"]
    cases = list(dict.fromkeys(result["case"] for result in results))
    assert cases == [f"tiny {kind}, sync, 1 worker(s), 2 x 16" for kind in ("full", "LoRA r4")]
    values = {(result["case"], result["metric"]): result["value"] for result in results}
    for case in cases:
        measured = values[case, "tokens a second, measured"]
        predicted = values[case, "tokens a second, predicted"]
        error = values[case, "predicted over measured, tokens a second"]
        assert error == pytest.approx(100 * (predicted / measured - 1), abs=0.1)
        assert values[case, "load average before"] >= 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("of 2 cases")


def test_random_weights_are_those_of_every_other_process(benchmarks):
    from random_job import Step
    from throughput import Model

    step = Step(2, 16, 2, 0)

    def weights(seed):
        torch.manual_seed(seed)
        model = Model(arguments(), step)
        store = model.store_for(model.prepare(step, "sync", 2, 0, measured=False))
        return {name: store.tensor(name) for name in store.names()}

    first, second = weights(1), weights(2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_slower_link_is_in_the_plan_of_its_run(benchmarks):
    from random_job import Step
    from throughput import Model, with_link

    step = Step(2, 16, 2, 0)
    profile = Model(arguments(), step, quiet=True).profile(step, 2)
    assert with_link(profile, 0) == profile
    rates = with_link(profile, 1e-3).rates()
    assert (rates.up, rates.down) == (1e6, 1e6)
