"""What a person sees of a run: plain lines that programs can cut up, and a live display that fits a terminal."""

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import threading
from pathlib import Path

import pytest
from rich.console import Console

from rpft.console import choose_console, make_reporter
from rpft.console.live import LiveReporter, Terminal
from rpft.console.plain import PlainReporter
from rpft.console.text import Pace
from rpft.train.metrics import EvalRecord, StepRecord


def record(step, **changes):
    values = {
        "step": step,
        "epoch": 0.1 * step,
        "loss": 2.34567,
        "learning_rate": 1.5e-5,
        "grad_norm": 1.25,
        "trained_tokens": 100,
        "tokens": 12345,
        "tokens_per_second": 12345.6,
        "step_seconds": 2.0,
        "skipped_steps": 0,
        "host_rss_bytes": 40 << 30,
        "devices": [{"name": "cuda:0", "peak_bytes": 20 << 30}, {"name": "cuda:1", "peak_bytes": 21 << 30}],
    }
    return StepRecord(**{**values, **changes})


LAST = record(1000, skipped_steps=1)


def play(reporter, last=LAST):
    """A whole run, with all that can come; a live display is sure to show the last step only."""
    reporter.say("plan for 2 worker(s) on cuda: forward [0..1]; fused [2..5]")
    for done in range(1, 41):
        reporter.loading(done, 40)
    reporter.begin(1, 1000)
    reporter.evaluated(EvalRecord(0, 2.5, 1000))
    for step in range(1, 8):
        reporter.stepped(record(step))
    reporter.stepped(record(8, loss=float("nan"), grad_norm=float("inf"), skipped_steps=1))
    reporter.saved(Path("out/checkpoints/step-00000008"))
    reporter.stepped(last)
    reporter.evaluated(EvalRecord(1000, 1.5, 1000))
    reporter.close()


def test_plain_lines_hold_every_figure_of_a_step(capsys):
    play(PlainReporter(1))
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in lines)
    steps = [line for line in lines if " step " in line and " | " in line]
    assert len(steps) == 9
    assert steps[0].endswith("ETA -")  # the first step, which compiles, says nothing of the others
    head, *rest = steps[2].split(" | ")
    assert head.endswith("step 3/1000")
    said = dict(part.rsplit(" ", 1) for part in rest if part.startswith(("loss", "lr", "grad norm", "ETA")))
    assert said == {"loss": "2.3457", "lr": "1.50e-05", "grad norm": "1.250", "ETA": "0:33:14"}
    assert "cuda:0 20.0 GiB cuda:1 21.0 GiB" in steps[2]
    assert "RAM 40.0 GiB" in steps[2]
    assert "skipped" not in steps[2]
    assert "skipped 1" in steps[-1]
    assert "saved out/checkpoints/step-00000008" in "\n".join(lines)
    assert "loss 1.5000 over 1000 tokens" in lines[-1]
    assert "\x1b" not in "".join(lines)


def test_plain_lines_come_every_so_many_steps_and_at_the_last(capsys):
    play(PlainReporter(4))
    said = re.findall(r" step (\d+)/1000 \|", capsys.readouterr().out)
    assert said == ["4", "8", "1000"]


def test_plain_loading_says_two_lines_however_many_tensors(capsys):
    reporter = PlainReporter(1)
    for done in range(1, 100_001):
        reporter.loading(done, 100_000)
    assert len(capsys.readouterr().out.splitlines()) == 2


def drawn(width=80, last=LAST, **settings):
    """What the live display writes to a terminal of ``width`` columns: (raw text, its lines without colours)."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, highlight=False, **settings)
    play(LiveReporter(console), last)
    raw = file.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).replace("\r", "\n")
    return raw, [line.rstrip() for line in plain.splitlines()]


def test_the_live_display_shows_every_figure_in_80_columns():
    _, lines = drawn()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    shown = [
        "1000/1000",
        "loss 2.3457",
        "lr 1.5e-05",
        "norm 1.25",
        "12346 tok/s",
        "21.0 GiB/worker",
        "RAM 40.0 GiB",
    ]
    for figure in [*shown, "ETA 0:00:00"]:
        assert figure in text, figure
    assert "skipped 1" in text
    assert "saved out/checkpoints/step-00000008" in text
    assert "evaluation after step 1000: loss 1.5000" in text
    assert "…" not in text


def test_a_step_that_is_not_finite_is_shown_as_it_is():
    _, lines = drawn(last=record(1000, loss=float("nan"), grad_norm=float("inf"), skipped_steps=3))
    assert any("loss nan" in line and "norm inf" in line for line in lines)
    assert "skipped 3" in "\n".join(lines)


@pytest.mark.parametrize("width", [20, 40, 200])
def test_the_live_display_survives_any_width(width):
    """Messages are left to the terminal to wrap, so that a command in one can be copied."""
    _, lines = drawn(width)
    display = [line for line in lines if not re.match(r"\d\d:\d\d:\d\d ", line)]
    assert display
    assert max(map(len, display)) <= width


def test_the_live_display_has_no_colour_when_the_environment_asks_for_none(monkeypatch):
    assert re.search(r"\x1b\[[0-9;]*3[0-7]m", drawn(color_system="standard")[0])
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", drawn(color_system="standard")[0])


def test_brackets_in_a_message_are_shown_and_not_taken_for_markup():
    file = io.StringIO()
    reporter = LiveReporter(Console(file=file, width=80, force_terminal=True, highlight=False))
    reporter.say("data [red]rows.jsonl[/red]: forward [0..1]")
    reporter.close()
    assert "data [red]rows.jsonl[/red]: forward [0..1]" in file.getvalue()


@pytest.mark.parametrize(
    ("console", "terminal", "ci", "expected"),
    [
        ("auto", True, "", LiveReporter),
        ("auto", True, "true", PlainReporter),
        ("auto", False, "", PlainReporter),
        ("plain", True, "", PlainReporter),
        ("rich", False, "true", LiveReporter),
    ],
)
def test_auto_is_live_on_a_terminal_and_plain_in_pipes_and_in_ci(console, terminal, ci, expected, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("CI", ci)
    reporter = make_reporter(console, 1)
    reporter.close()
    assert type(reporter) is expected


def test_the_time_left_follows_the_usual_step_and_not_the_slow_first_one():
    pace = Pace(101)
    assert pace.eta(record(1, step_seconds=60.0)) == "-"
    assert pace.eta(record(2, step_seconds=40.0)) == "1:06:00"  # the best that is known
    assert pace.eta(record(3, step_seconds=2.0)) == "0:03:16"  # two that compiled do not count
    for step in range(4, 11):
        eta = pace.eta(record(step, step_seconds=2.0))
    assert eta == "0:03:02"
    assert pace.eta(record(101, step_seconds=2.0)) == "0:00:00"


def test_the_time_left_follows_a_change_of_pace():
    pace = Pace(1000)
    for step in range(1, 101):
        pace.eta(record(step, step_seconds=1.0))
    for step in range(101, 121):
        eta = pace.eta(record(step, step_seconds=10.0))
    assert eta == "2:26:40"


def test_a_prediction_stands_in_until_there_are_steps_enough():
    pace = Pace(100, expected_seconds=3.0)
    assert pace.eta(record(1, step_seconds=20.0)) == "0:04:57"
    assert pace.eta(record(2, step_seconds=20.0)) == "0:04:54"
    for step in (3, 4, 5):
        eta = pace.eta(record(step, step_seconds=1.0))
    assert eta == "0:01:35"


def test_the_mean_rate_leaves_out_the_first_step():
    pace = Pace(10)
    pace.see(record(1, step_seconds=60.0, tokens=100))
    assert pace.tokens_per_second is None
    for step, seconds in ((2, 1.0), (3, 3.0)):
        pace.see(record(step, step_seconds=seconds, tokens=100))
    assert pace.tokens_per_second == 50.0


def test_warnings_come_above_the_display_and_on_standard_error_of_plain_lines(capsys):
    file = io.StringIO()
    live = LiveReporter(Console(file=file, width=80, force_terminal=True, highlight=False))
    live.warn("page-locking was refused")
    live.close()
    assert "warning: page-locking was refused" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    PlainReporter(1).warn("page-locking was refused")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith("warning: page-locking was refused\n")


def test_a_terminal_that_is_gone_ends_the_drawing_and_is_told_to_the_next_call():
    class Gone(io.StringIO):
        closed_at = None

        def write(self, text):
            if self.closed_at is not None:
                raise OSError(5, "Input/output error")
            return super().write(text)

    file = Gone()
    live = LiveReporter(Console(file=file, width=80, force_terminal=True, highlight=False))
    file.closed_at = 1
    live._thread.join(10.0)
    assert not live._thread.is_alive()
    with pytest.raises(OSError, match="Input/output error"):
        live.say("hello")


def test_a_new_width_clears_the_screen_and_the_display_is_drawn_for_it():
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=True, highlight=False)
    live = LiveReporter(console)
    live.begin(1, 10)
    live.stepped(record(1))
    console.width = 60
    live._draw()
    drawn_anew = file.getvalue().rpartition("\x1b[2J")[2]
    live.close()
    assert drawn_anew != file.getvalue()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn_anew).replace("\r", "\n").splitlines()
    assert any("step 1/10" in line for line in lines)
    assert max(len(line.rstrip()) for line in lines) <= 60


def test_the_display_has_the_size_of_its_own_terminal():
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    with os.fdopen(slave, "w") as file:
        assert tuple(Terminal(file=file).size) == (77, 33)
    os.close(master)
    assert Terminal(file=io.StringIO()).width > 0


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("CI", "")
    monkeypatch.setenv("TERM", "dumb")
    assert choose_console("auto") == "plain"
    monkeypatch.setenv("TERM", "xterm-256color")
    assert choose_console("auto") == "rich"


def test_figures_that_cannot_be_drawn_do_not_take_the_messages_with_them(caplog):
    file = io.StringIO()
    live = LiveReporter(Console(file=file, width=80, force_terminal=True, highlight=False))
    live._board.lines = lambda *size: 1 / 0
    live.say("one")
    live.say("two")
    live.close()
    assert "one" in file.getvalue()
    assert "two" in file.getvalue()
    assert [record.getMessage() for record in caplog.records] == ["the figures of the run can no longer be drawn"]


def test_a_terminal_that_is_halted_holds_up_nothing():
    class Halted(io.StringIO):
        halted, goes_on = threading.Event(), threading.Event()

        def write(self, text):
            if "hello" in text:
                self.halted.set()
                self.goes_on.wait(30)
            return super().write(text)

    file = Halted()
    live = LiveReporter(Console(file=file, width=80, force_terminal=True, highlight=False))
    live.begin(1, 10)
    live.say("hello")
    assert file.halted.wait(10)
    live.say("and more")
    live.stepped(record(1))
    file.goes_on.set()
    live.close()
    assert "and more" in file.getvalue()
