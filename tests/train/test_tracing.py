"""engine.trace_steps leaves traces of the steps it names, with what workers waited for, and changes no number."""

import json

import pytest

from rpft.engine.idle import CAUSES
from rpft.engine.trace import HOST, TASK, WAIT, read_chrome_trace

PURPOSES = ["compute", "weights up", "activations up", "activations down", "gradients down"]


@pytest.fixture(scope="module")
def runs(project):
    made = project("tracing", "llama", sections={"engine": {"workers": 2}, "train": {"max_steps": 5}})
    plain = made.train_well("plain")
    ran = made.train("traced", "engine.trace_steps=[1, 3, 4, 9]")
    assert ran.code == 0, ran.err
    return plain, made.outcome("traced"), ran


def test_a_traced_run_gives_the_same_numbers_and_a_file_a_group_of_steps(runs):
    plain, traced, ran = runs
    assert traced.numbers == plain.numbers
    assert traced.result == plain.result
    names = sorted(path.name for path in (traced.folder / "traces").iterdir())
    assert names == [
        f"step-{steps}{suffix}" for steps in ("1", "3-4") for suffix in (".idle.json", ".json", ".svg")
    ]
    assert not (plain.folder / "traces").exists()
    assert "the run ends with step 5, so there is no trace of 9" in ran.out


def test_the_trace_holds_every_stream_its_waits_and_the_optimizers_work(runs):
    _, traced, _ = runs
    trace = read_chrome_trace(traced.folder / "traces" / "step-3-4.json")
    busy = {(s.worker, s.stream) for s in trace.spans if s.nature == TASK}
    assert busy == {(w, p) for w in ("cpu:0", "cpu:1") for p in PURPOSES} | {(HOST, "optimizer")}
    assert [s for s in trace.spans if s.nature == WAIT and not s.cause] == []
    updates = [s.what for s in trace.spans if s.stream == "optimizer" and s.nature == TASK]
    assert {"the update of step 3", "the update of step 4"} <= set(updates)
    assert any(s.copied_bytes for s in trace.spans)
    for span in trace.spans:
        assert trace.start_seconds - 1e-6 < span.start_seconds <= span.end_seconds < trace.end_seconds + 1e-6


def test_the_waits_of_each_step_sum_to_the_step_and_stand_in_the_log(runs):
    _, traced, ran = runs
    accounts = json.loads((traced.folder / "traces" / "step-3-4.idle.json").read_text())
    assert accounts["causes"] == CAUSES
    assert [step["step"] for step in accounts["steps"]] == [3, 4]
    for step in accounts["steps"]:
        assert [worker["worker"] for worker in step["workers"]] == ["cpu:0", "cpu:1"]
        for worker in step["workers"]:
            total = worker["busy_seconds"] + sum(worker["idle_seconds"].values())
            assert total == pytest.approx(worker["window_seconds"])
            assert worker["busy_seconds"] > 0.0
    log = (traced.folder / "run.log").read_text()
    for text in (ran.out, log):
        assert "step 3, " in text
        assert text.count("worker    busy") == 3  # a table a step
        assert "traces/step-3-4.json" in text
