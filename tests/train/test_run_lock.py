"""One run an output directory, and a crash leaves nothing locked."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from rpft.errors import UserError
from rpft.train.run_lock import LOCK_FILE, RunLock

HOLD = """
import sys, time
from pathlib import Path
from rpft.train.run_lock import RunLock
RunLock(Path(sys.argv[1])).take()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_with_the_process_that_holds_the_directory(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.take()
    first.take()
    with pytest.raises(UserError, match=r"in use by a run \(process \d+ on .+\)"):
        second.take()
    first.release()
    second.take()
    second.release()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        lock = RunLock(tmp_path)
        with pytest.raises(UserError, match=f"process {process.pid} "):
            lock.take()
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert (tmp_path / LOCK_FILE).exists()
    lock.take()
    lock.release()


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=LOCK_FILE):
        RunLock(tmp_path).take()
    assert (tmp_path / "target").read_text() == "mine"


def test_train_refuses_a_directory_in_use_and_lets_go_of_its_own(project):
    made = project("lock", "llama", sections={"train": {"max_steps": 2}})
    folder = made.folder / "out"
    folder.mkdir()
    lock = RunLock(folder)
    lock.take()
    ran = made.train("out")
    assert ran.code == 2
    assert "is in use by a run (process" in ran.err
    assert not (folder / "metrics.jsonl").exists()
    lock.release()
    made.train_well("out", "checkpoint.every_steps=1")
    lock.take()
    for words in ([], ["--resume"]):
        assert "is in use" in made.train("out", *words).err
    lock.release()
    made.train_well("out", "--resume")


@pytest.mark.parametrize("call", ["flock", "ftruncate"])
def test_a_disk_that_fails_leaves_the_directory_to_the_next_run(tmp_path, monkeypatch, call):
    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    lock = RunLock(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl if call == "flock" else os, call, fail)
        opened = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="Input/output"):
            lock.take()
    lock.release()
    assert len(os.listdir("/proc/self/fd")) == opened
    RunLock(tmp_path).take()
