"""What a person sees of a whole run: quiet lines, the live display with the engine behind it, and run.log."""

import re

import pytest

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def made(project):
    sections = {"train": {"max_steps": 4}, "engine": {"workers": 2}, "checkpoint": {"every_steps": 2}}
    return project("watching", "llama", sections=sections)


def test_a_quiet_run_says_steps_evaluations_and_saves_and_the_log_says_all(made):
    ran = made.train("quiet", "--quiet", "logging.console=rich")
    assert (ran.code, ran.err) == (0, "")
    assert "\x1b" not in ran.out
    said = [line.split(" ", 1)[1] for line in ran.out.splitlines()]
    kinds = ("training: steps", "step ", "evaluation after", "saved ", "loading weights", "GiB", "MiB")
    assert [line for line in said if not any(kind in line for kind in kinds)] == []
    assert [line.split(" | ")[0] for line in said if " | " in line] == [f"step {n}/4" for n in (1, 2, 3, 4)]
    log = (made.folder / "quiet" / "run.log").read_text()
    for text in ("plan for 2 worker(s)", "memory, RAM", "step 4/4 | loss", "evaluation after step 4", "saved "):
        assert text in log, text


def test_a_live_run_shows_the_engines_workers_and_its_figures(made):
    ran = made.train("live", "logging.console=rich")
    assert (ran.code, ran.err) == (0, "")
    text = CODES.sub("", ran.out).replace("\r", "\n")
    last = text[text.rindex("step 4/4") :]
    assert "100.0%" in last
    assert "ETA 0:00:00" in last
    assert "TFLOP/s a worker" in last
    assert re.search(r"optimizer \S+ s behind", last)
    assert re.search(r"cpu:0 +\S+ +[\d.<]+/[\d.<]+/-", last)
    # In so short a run nobody may have looked while it was at a slot.
    assert re.search(r"cpu:1 +\S+ +\S+ +\S+ +(- waits|\d+ (forward|fused|backward|loss) \[\d+\.\.\d+\])", last)
    assert "saved model just now" in last
    assert "loading weights:" not in text, "a line for logs"


def test_a_resumed_run_writes_its_log_behind_that_of_the_first(made):
    made.train_well("resumed")
    before = (made.folder / "resumed" / "run.log").read_text()
    ran = made.train("resumed", "--resume")
    assert ran.code == 0, ran.err
    after = (made.folder / "resumed" / "run.log").read_text()
    assert after.startswith(before)
    assert "resuming from" in after[len(before) :]


def test_the_optimizers_time_behind_the_workers_is_in_the_metrics(made):
    outcome = made.train_well("metrics")
    assert all(0.0 < line["optimizer_seconds"] < line["step_seconds"] + 60 for line in outcome.steps)
