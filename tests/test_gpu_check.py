"""``scripts/gpu_check.py``: every case ends in the table and the record, whatever became of its process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import gpu_check
import pytest
from gpu_check import Case, Check

from rpft.peers import PEERS

TINY = "benchmarks/throughput.py tiny --rows 2 --sequence 16 --microbatches 2 --steps 1 --warm-up 1 --device cpu"
WRITES = """
import json, os, signal, sys
path = sys.argv[sys.argv.index("--json") + 1]
figures = [("tokens a second, median step", 1234.5, "tok/s"), ("RAM, taken", 7.0, "GiB")]
results = [{"case": "half of it", "metric": m, "value": v, "unit": u} for m, v, u in figures]
json.dump({"results": results}, open(path, "w"))
"""


@pytest.fixture
def check(tmp_path):
    return Check(tmp_path, ["GPU", "GPU"], "abc1234")


@pytest.fixture
def script(tmp_path):
    """script(text) -> the words that run it."""

    def write(text):
        path = tmp_path / "case.py"
        path.write_text(text)
        return str(path)

    return write


def ended(pid):
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def record(check):
    check.write()
    return json.loads((check.folder / "gpu_check.json").read_text())


def test_one_call_measures_and_writes_a_record_of_the_agreed_form(tmp_path, monkeypatch, capfd):
    case = Case("tiny", f"{TINY} --kernels eager --update sync,delayed --workers {{gpus}}", ("small",))
    monkeypatch.setattr(gpu_check, "CASES", [case, Case("other", "no_such_file.py")])
    monkeypatch.setattr(gpu_check, "gpu_names", list)
    assert gpu_check.main(["--skip-tests", "--only", "small", "--out", str(tmp_path), "--commit", "abc1234"]) == 0
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert set(written) >= {"name", "date", "machine", "command", "commit", "results"}
    assert written["commit"] == "abc1234"
    assert written["failed"] == []
    assert all(set(result) == {"case", "metric", "value", "unit"} for result in written["results"])
    cases = list(dict.fromkeys(result["case"] for result in written["results"]))
    assert [case.split(", 1 worker")[0] for case in cases] == ["tiny full sync", "tiny full delayed"]
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[-2:]] == ["tiny full sync", "tiny full delayed"]


def test_what_a_killed_case_has_written_counts(check, script):
    text = WRITES + "os.kill(os.getpid(), signal.SIGKILL)"
    outcome = check.run_case(Case("killed", script(text)))
    assert outcome.failure.startswith(f"exit code {-signal.SIGKILL}")
    assert [result["value"] for result in record(check)["results"]] == [1234.5, 7.0]
    assert [f["case"] for f in record(check)["failed"]] == ["killed"]
    header, measured, failed = gpu_check.table(check.outcomes).splitlines()
    columns = ["case", "median", "drained", "predicted", "VRAM", "bill", "RAM", "RAM bill"]
    columns += ["hides all", "by the rule", "loading", "of one"]
    assert re.split(r"  +", header) == columns
    assert measured.split() == ["half", "of", "it", "1,234", "7"]
    assert failed.startswith("FAILED killed: exit code")


def test_a_row_of_more_workers_says_how_many_times_as_fast_they_are_as_one():
    def result(case, rate):
        return {"case": case, "metric": gpu_check.MEDIAN, "value": rate, "unit": "tok/s"}

    names = [f"tiny full {update}, {n} worker(s), 4 x 8" for update in ("sync", "delayed") for n in (4, 2, 1)]
    results = [result(name, rate) for name, rate in zip(names, [380, 195, 100, 400, 220, 110], strict=True)]
    alone = result("tiny full sync, 2 worker(s), 8 x 8", 195)
    table = gpu_check.table([gpu_check.Outcome("scaling", [*results, alone])])
    last = [line.split()[-1] for line in table.splitlines()[1:]]
    assert last == ["3.80", "1.95", "100", "3.64", "2.00", "110", "195"]


def test_a_case_that_takes_too_long_is_ended_with_the_processes_that_it_started(check, script, tmp_path):
    pids = tmp_path / "pids"
    text = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
with open({str(pids)!r} + ".new", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename({str(pids)!r} + ".new", {str(pids)!r})
time.sleep(1000)
"""

    class AtOnce(subprocess.Popen):
        """Its time is up as soon as its child runs, however long that takes."""

        def wait(self, timeout=None):
            while timeout is not None:
                if pids.exists():
                    raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", AtOnce)
        outcome = check.run_case(Case("slow", script(text), seconds=7))
    assert outcome.failure == "ended after 7 s"
    own, child = map(int, pids.read_text().split())
    assert ended(own)
    while not ended(child):  # it was killed with its parent, which does not wait for it
        os.sched_yield()


def test_a_failed_case_says_why_in_one_line(check, script):
    outcome = check.run_case(Case("bad", script("print('starting')\nraise ValueError('no room')\n")))
    assert outcome.failure == "exit code 1: ValueError: no room"
    text = "print('[rank1]: torch.OutOfMemoryError: of 24 GiB')\nraise OSError('ChildFailedError')"
    outcome = check.run_case(Case("child", script(text)))
    assert outcome.failure == "exit code 1: [rank1]: torch.OutOfMemoryError: of 24 GiB"
    outcome = check.run_case(Case("silent", script("")))
    assert outcome.failure == "it wrote no record"


def test_a_peer_that_is_not_installed_says_so(check, monkeypatch):
    """Without site packages, so that it is not installed whatever this machine has."""
    case = next(case for case in gpu_check.CASES if case.name == "roundpipe-8b")
    outcome = check.run_case(Case(case.name, f"-S {case.words}"))
    assert outcome.failure == ("exit code 1: roundpipe is not installed: pip install roundpipe==0.1.1 beartype")


def test_peers_come_when_asked_for_by_option_or_by_name():
    def names(only, peers=False):
        return [case.name for case in gpu_check.choose(only, peers)]

    assert names(["8b", "1.7b"]) == ["1.7b", "8b"]
    assert names(["links"]) == ["links-1.7b", "links-8b"]
    assert names(["8b-small"], peers=True) == ["8b-small", "roundpipe-8b-small"]
    assert names(["roof-8b"]) == ["roof-8b"]
    assert names(["roof"]) == [f"roof-{n}{s}" for n in ("1.7b", "8b", "8b-lora") for s in ("", "-cudnn")]
    assert not any(case.peer for case in gpu_check.choose([], False))
    assert gpu_check.choose([], True) == gpu_check.CASES


def test_a_name_that_is_none_is_refused_with_those_that_are():
    with pytest.raises(SystemExit, match=r"no case or group 8B; there are 1\.7b, 1\.7b-one, 14b, "):
        gpu_check.choose(["8B"], False)


@pytest.mark.parametrize(("gpus", "words"), [(1, "1 1"), (2, "2 2,1"), (4, "2 4,2,1")])
def test_workers_are_no_more_than_the_gpus(gpus, words, check, script, tmp_path):
    check.gpus = ["GPU"] * gpus
    text = "import sys; print(*sys.argv[1:3]); sys.exit(1)"
    outcome = check.run_case(Case("counts", f"{script(text)} {{gpus}} {{counts}}"))
    assert outcome.failure == f"exit code 1: {words}"


def test_every_case_names_a_file_and_options_that_exist():
    for case in gpu_check.CASES:
        words = case.arguments(2)
        (file,) = [word for word in words if word.endswith(".py")]
        text = (gpu_check.ROOT / file).read_text()
        for option in words[words.index(file) :]:
            if option.startswith("--"):
                assert f'"{option}"' in text, f"{case.name}: {option}"
        if case.peer:
            peer = PEERS[words[words.index(file) + 1]]
            asked = {word for before, word in pairwise(words) if before == "--option"}
            assert asked <= set(peer.options), case.name
    assert len({case.name for case in gpu_check.CASES}) == len(gpu_check.CASES)
