"""What libraries say goes to run.log; what a person must know, and crashes, still reach the terminal."""

import logging
import os
import pty
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rpft.console.run_log import RUN_LOG, RunLog

ROOT = Path(__file__).parents[2]
STAMPED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S")


def lines_of(folder):
    return (folder / RUN_LOG).read_text(encoding="utf-8").splitlines()


def test_warnings_and_log_lines_are_kept_with_their_times_and_only_ours_and_errors_are_shown(tmp_path, capsys):
    with RunLog(take_stderr=False) as log:
        logging.getLogger("torch._inductor").warning("online softmax is disabled")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("TensorFloat32 tensor cores available but not enabled", UserWarning, stacklevel=1)
            warnings.warn("CUDA initialization: the NVIDIA driver is too old", UserWarning, stacklevel=1)
        logging.getLogger("rpft.engine").warning("page-locking was refused")
        log.open(tmp_path)
        logging.getLogger("rpft.run").info("step 1/2")
        logging.getLogger("someone").error("the disk is on fire")
        logging.getLogger("someone").debug("not even there")
    lines = lines_of(tmp_path)
    assert all(STAMPED.match(line) for line in lines)
    said = "\n".join(lines)
    for text in ("online softmax", "TensorFloat32", "CUDA init", "page-locking", "step 1/2", "on fire"):
        assert text in said, text
    assert "not even there" not in said
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.partition("warning: ")[2] for line in shown.err.splitlines()][1:] == [
        "page-locking was refused",
        "someone: the disk is on fire",
    ]
    assert "CUDA initialization" in shown.err.splitlines()[0]


def test_a_library_with_a_handler_of_its_own_is_taken_over_and_given_back(tmp_path, capsys):
    logger = logging.getLogger("stubborn")
    own = logging.StreamHandler()
    logger.addHandler(own)
    logger.propagate = False
    try:
        with RunLog(take_stderr=False) as log:
            log.adopt()
            log.open(tmp_path)
            logger.warning("not enough SMs")
            logger.error("cannot compile")
        assert logger.handlers == [own]
    finally:
        logger.removeHandler(own)
        logger.propagate = True
    assert [line.split(": ")[-1] for line in lines_of(tmp_path)] == ["not enough SMs", "cannot compile"]
    assert capsys.readouterr().err == "warning: stubborn: cannot compile\n"


def test_everything_is_as_before_afterwards_and_a_run_that_goes_on_writes_behind(tmp_path):
    root, show = logging.getLogger(), warnings.showwarning
    before = (root.level, list(root.handlers))
    for text in ("first", "second"):
        with RunLog(take_stderr=False) as log:
            log.open(tmp_path)
            log.write(text)
    assert (root.level, root.handlers, warnings.showwarning) == (*before, show)
    assert [line.split(" ", 2)[2] for line in lines_of(tmp_path)] == ["first", "second"]


def test_a_refused_run_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunLog(take_stderr=False) as log:
        log.write("planning")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_no_run(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    (tmp_path / RUN_LOG).symlink_to("/dev/full")
    with RunLog(take_stderr=False) as log:
        log.write("before")
        log.open(tmp_path)
        log.write("after")


def on_a_terminal(code, folder):
    """What a terminal shows of ``code``, in a process of its own, and its exit status."""
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            block = os.read(master, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        shown += block
    os.close(master)
    return shown.decode().replace("\r\n", "\n"), process.wait(timeout=30)


NOISE = """
import os, sys
from pathlib import Path
from rpft.console.run_log import RunLog
with RunLog(take_stderr=True) as log:
    print("downloading 10%", file=sys.stderr)
    os.write(2, b"[W] a library's own words\\n")
    log.open(Path(sys.argv[1]))
    log.take_python_stderr()
    os.write(2, b"[W] and more\\n")
    sys.stderr.write("\\rloading 50%\\rloading 100%\\n")
    os.system("echo a child >&2")
    {end}
print("error: at the end", file=sys.stderr)
"""


def test_nothing_but_our_own_lines_reaches_a_terminal_with_a_display(tmp_path):
    shown, status = on_a_terminal(NOISE.format(end="pass"), tmp_path)
    assert (shown, status) == ("downloading 10%\nerror: at the end\n", 0)
    lines = [line.split(" ", 2)[2] if STAMPED.match(line) else line for line in lines_of(tmp_path)]
    assert lines == ["[W] a library's own words", "[W] and more", "loading 100%", "a child"]


OTHERS_ON_STDOUT = """
import os, sys
from pathlib import Path
from rpft.console.run_log import RunLog
with RunLog(take_stderr=True) as log:
    terminal = log.take_stdout()
    os.write(1, b"[W] a library's own words\\n")
    log.open(Path(sys.argv[1]))
    os.system("echo a child")
    print("the display", file=terminal, flush=True)
print("afterwards")
"""


def test_beside_a_display_nobody_else_writes_to_standard_output(tmp_path):
    shown, status = on_a_terminal(OTHERS_ON_STDOUT, tmp_path)
    assert (shown, status) == ("the display\nafterwards\n", 0)
    assert lines_of(tmp_path) == ["[W] a library's own words", "a child"]


def test_a_crash_says_on_the_terminal_where_it_was(tmp_path):
    shown, status = on_a_terminal(NOISE.format(end="os.abort()"), tmp_path)
    assert status < 0
    assert "Fatal Python error: Aborted" in shown
    assert "[W]" not in shown
