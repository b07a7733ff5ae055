"""`rpft bench RECIPE`: what is measured, how it is counted, what is said of what cannot be; nothing is written."""

import json
import os
from dataclasses import replace

import pytest
import torch
from support.pools import NoProcesses
from support.recipes import run_rpft

from rpft.model.host_store import HostStore
from rpft.recipe.load import load_recipe
from rpft.train import bench_workers
from rpft.train.bench import Measured, measure
from rpft.train.bench_report import table
from rpft.train.bench_workers import Failed, bench_here, not_quiet
from rpft.train.prepare import prepare
from rpft.train.weights import load_weights

STEPS = 2


@pytest.fixture(scope="module")
def made(project):
    return project("bench", "qwen3", eval_rows=0)


@pytest.fixture(scope="module")
def prepared(made):
    return prepare(load_recipe(made.recipe, ["engine.workers=2"]), measured=True)


def weights(store: HostStore):
    return {name: store.tensor(name).clone() for name in store.names()}


@pytest.fixture(scope="module")
def measured(prepared, made):
    """(what was measured, weights before, weights after)."""
    store = load_weights(prepared, made.folder, lambda done, total: None)
    before = weights(store)
    return measure(prepared, store, STEPS, windows=3), before, weights(store)


@pytest.fixture
def in_this_process(monkeypatch):
    """A process for each number of workers costs seconds of imports."""

    class Here(NoProcesses):
        def submit(self, work, *arguments):
            class Done:
                def result(self):
                    return work(*arguments)

            return Done()

    monkeypatch.setattr(bench_workers, "ProcessPoolExecutor", Here)


@pytest.fixture
def results(monkeypatch, measured):
    """bench_here gives what was measured, and no worker beyond the second works."""

    def here(recipe, workers, num_steps):
        if workers > 2:
            return Failed(workers, "this machine has 2 of them")
        return replace(measured[0], workers=workers)

    monkeypatch.setattr(bench_workers, "bench_here", here)


def test_a_result_has_every_window_and_its_shares_are_shares(measured, prepared):
    found = measured[0]
    assert found.workers == 2
    assert len(found.windows) == len(found.steady) == 3
    assert min(found.windows + found.steady) > 0
    assert sum(found.idle.values()) == pytest.approx(found.bubble, abs=1e-6)
    assert 0 <= found.bubble < 1
    assert found.hidden is not None
    assert 0 <= found.hidden <= 1
    assert found.skipped_steps == 0
    assert found.losses == []
    assert found.share_of_roof == found.steady_tokens_per_second / found.roof_tokens_per_second
    assert found.vram_bill_bytes == prepared.bill.device
    assert 0 < found.vram_peak_bytes <= found.vram_bill_bytes


def test_the_prediction_is_the_one_of_the_plan(measured, prepared):
    found, prediction = measured[0], prepared.prediction()
    assert found.predicted_tokens_per_second == prediction.tokens_per_second
    assert found.predicted_bubble == prediction.bubble
    assert found.limited_by == prediction.limited_by


def test_an_error_is_of_the_long_run_and_medians_are_of_windows(measured):
    found = replace(
        measured[0], windows=[1.0, 90.0, 100.0], steady=[80.0, 100.0, 500.0], predicted_tokens_per_second=110.0
    )
    assert found.tokens_per_second == 90
    assert found.steady_tokens_per_second == 100
    assert found.error == pytest.approx(0.1)
    assert found.as_dict()["prediction_error"] == pytest.approx(0.1)


def test_repeating_steps_leaves_the_weights_as_good_as_they_were(measured):
    _, before, after = measured
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)


def test_a_bench_writes_the_json_file_and_nothing_else(made, results, in_this_process, tmp_path):
    file, before = tmp_path / "bench.json", sorted(os.listdir(made.folder))
    ran = run_rpft("bench", str(made.recipe), "--workers", "1,2,3", "--json", str(file), "train.seed=7")
    assert ran.code == 0, ran.err
    told = json.loads(file.read_text())
    assert told["overrides"] == ["train.seed=7"]
    assert [result["workers"] for result in told["results"]] == [1, 2, 3]
    assert told["results"][2] == {"workers": 3, "failed": "this machine has 2 of them"}
    assert "3 worker(s): this machine has 2 of them" in ran.out
    for said in ("2 workers", "tokens/s, drained", "predicted", "transfers hidden", "RAM of bill", "limited by"):
        assert said in ran.out
    assert sorted(os.listdir(made.folder)) == before
    assert os.listdir(tmp_path) == ["bench.json"]


def test_json_alone_is_printed_without_a_table(made, results, in_this_process):
    ran = run_rpft("bench", str(made.recipe), "--workers", "1", "--json", "train.seed=7")
    assert ran.code == 0, ran.err
    assert [result["workers"] for result in json.loads(ran.out)["results"]] == [1]


def test_a_number_of_workers_that_fails_is_a_result(made, monkeypatch):
    recipe = load_recipe(made.recipe, ["engine.ram_limit=1MiB"])
    found = bench_here(recipe, 1, STEPS)
    assert isinstance(found, Failed)
    assert "of RAM" in found.reason

    def broken(*arguments, **more):
        raise OSError("no such luck")

    monkeypatch.setattr(bench_workers, "prepare", broken)
    assert bench_here(recipe, 1, STEPS) == Failed(1, "OSError: no such luck")


def test_nothing_measured_is_bad_input(made, results, in_this_process):
    ran = run_rpft("bench", str(made.recipe), "--workers", "3")
    assert ran.code == 2
    assert "this machine has 2 of them" in ran.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give a recipe"),
        (("RECIPE", "--simulate", "8x4090"), "RECIPE cannot be had with --simulate"),
        (("--simulate", "8x4090", "--steps", "3"), "--steps cannot be had with --simulate"),
        (("--simulate", "8x4090", "--json", "a.json"), "--json takes a file with a recipe only"),
        (("RECIPE", "--sequence", "64", "--rows", "2"), "--sequence and --rows can be had with --simulate only"),
        (("RECIPE", "--workers", "1,none"), "--workers 1,none: numbers of workers"),
        (("RECIPE", "--workers", "0"), "--workers 0: numbers of workers"),
        (("RECIPE", "--json", "no/such/folder.json"), "there is no folder no/such"),
    ],
)
def test_what_contradicts_itself_is_refused(words, said, made):
    ran = run_rpft("bench", *(str(made.recipe) if word == "RECIPE" else word for word in words))
    assert ran.code == 2
    assert said in ran.err


def test_workers_by_default_double_up_to_all(made):
    def counts(workers):
        return bench_workers.default_workers(load_recipe(made.recipe, [f"engine.workers={workers}"]))

    assert [counts(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


def test_a_machine_with_other_work_is_said_to_have_it():
    assert not_quiet(None) is None
    assert not_quiet(0.0) is None
    assert "50.0 processes" in not_quiet(50.0)


def test_the_table_leaves_out_what_failed(measured):
    heading, *rows = table([Failed(1, "no"), measured[0]])
    assert heading == ["", "2 workers"]
    assert all(len(row) == 2 for row in rows)
    assert isinstance(measured[0], Measured)


def test_the_table_says_how_often_memory_was_found_at_the_second_try_only(measured):
    first = measured[0]
    assert not any("retries" in text for row in table([first]) for text in row)
    assert any(
        "7 allocation retries" in text for row in table([replace(first, allocation_retries=7)]) for text in row
    )


@pytest.mark.slow
def test_each_number_of_workers_has_a_process_of_its_own(made):
    ran = run_rpft("bench", str(made.recipe), "--workers", "1,2", "--steps", "2", "--json")
    assert ran.code == 0, ran.err
    first, second = json.loads(ran.out)["results"]
    assert [first["workers"], second["workers"]] == [1, 2]
    assert len(first["windows"]) == 5
