"""The live display's lines fit their terminal, say every figure, and draw the last traced step."""

import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from rpft.console.board import Board
from rpft.console.history import History, sparkline
from rpft.console.timeline import cells
from rpft.train.metrics import StepRecord
from rpft.train.watched import SeenStep, SeenWorker, WorkerNow

GIB = 1 << 30


def record(step, **changes):
    values = {
        "step": step,
        "epoch": 0.25,
        "loss": 3.0 - step / 100,
        "learning_rate": 1.5e-5,
        "grad_norm": 1.25,
        "trained_tokens": 100,
        "tokens": 98304,
        "tokens_per_second": 38000.0,
        "step_seconds": 2.5,
        "skipped_steps": 0,
        "host_rss_bytes": 40 * GIB,
        "devices": [{"name": "cuda:0", "peak_bytes": 20 * GIB}],
        "optimizer_seconds": 0.31,
    }
    return StepRecord(**{**values, **changes})


def seen(workers=2):
    blocks = [("forward", 0.0, 0.4), ("fused", 0.4, 0.6), ("backward", 0.7, 1.0)]
    names = [f"cuda:{i}" for i in range(workers)]
    rows = [*((name, blocks) for name in names), ("optimizer", [("optimizer", 0.5, 1.0)])]
    return SeenStep(20, 2.5, [SeenWorker(name, 0.9, 11.2e9, 8.1e9) for name in names], rows, [])


def watched(workers=2, tasks=("slot 12 (backward stage [3..4]) microbatch 1", "a wait")):
    now = [WorkerNow(f"cuda:{i}", tasks[i % len(tasks)], 12 * GIB, 15 * GIB, 22 * GIB) for i in range(workers)]
    return SimpleNamespace(
        workers=lambda: now,
        tasks_done=lambda: 100,
        num_workers=workers,
        ram_bytes=62 * GIB,
        predicted_rate=40000.0,
        predicted_seconds=2.4,
        roof_rate=41000.0,
        flops_per_token=1e10,
        worker_word="GPU",
        seen=seen(workers),
    )


def board_after(steps=30, run=None, **changes):
    board = Board(now=lambda: 1000.0)
    board.begin(1, 300, watched() if run is None else run)
    for step in range(1, steps + 1):
        board.stepped(record(step, **changes))
    board.saved("step-00000020")
    return board


def text_of(lines, width):
    """The lines as a terminal of ``width`` columns has them."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        for line in lines:
            console.print(line)
    return capture.get()


@pytest.mark.parametrize("width", [80, 140])
def test_every_figure_is_there_from_80_columns_up(width):
    text = text_of(board_after(skipped_steps=1).lines(width, 30), width)
    for figure in (
        "step 30/300",
        "10.0%",
        "ETA 0:11:15",
        "loss 2.7000",
        "lr 1.5e-05",
        "grad norm 1.25",
        "38000 tok/s",
        "mean 39322",
        "98% of predicted",
        "96% of roof",
        "2.5 s a step",
        "197 TFLOP/s a GPU",
        "RAM 40.0 of 62.0 GiB",
        "optimizer 0.31 s behind",
        "skipped 1",
        "saved step-00000020 just now",
        "90%",
        "12.0/15.0/22.0",
        "11.2/8.1",
        "12 backward [3..4] mb 1",
        "step 20, 2.5 s",
        "FFFF",
        "LLLL",
        "BBBB",
        "UUUU",
    ):
        assert figure in text, figure
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) == len(board_after().lines(width, 30)), "no line is broken"


def test_no_line_is_broken_on_80_columns_hours_later():
    clock = iter([1000.0, 1000.0, 9_000.0, 9_000.0, 9_000.0])
    board = Board(now=lambda: next(clock, 9_000.0))
    board.begin(1, 9000, watched())
    board.stepped(record(1))
    board.saved("step-00001000")
    board.stepped(record(1240, host_rss_bytes=400 * GIB, tokens_per_second=138_000.0, skipped_steps=12))
    lines = board.lines(80, 30)
    assert "h ago" in text_of(lines, 80)
    assert len(text_of(lines, 80).splitlines()) == len(lines)


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("height", [1, 5, 12, 24, 60])
def test_no_more_lines_than_the_terminal_has(workers, height):
    lines = board_after(run=watched(workers)).lines(80, height)
    assert len(lines) <= height
    assert lines[0].plain.startswith("step 30/300")
    if height == 60:
        assert len(lines) == 4 + (1 + workers) + (2 + workers)


def test_a_worker_that_waits_shows_the_slot_it_was_last_at():
    tasks = ["slot 12 (backward stage [3..4]) microbatch 1"]
    run = watched(1, tasks)
    board = board_after(run=run)
    assert "12 backward [3..4] mb 1" in text_of(board.lines(80, 30), 80)
    run.workers = lambda: [WorkerNow("cuda:0", "a wait", 12 * GIB, 15 * GIB, None)]
    assert "12 backward [3..4] waits" in text_of(board.lines(80, 30), 80)


def test_before_the_first_step_the_display_says_that_it_takes_longer():
    board = Board(now=iter(float(n) for n in range(0, 1000, 65)).__next__)
    board.loading(10, 40)
    assert "10/40" in board.lines(80, 24)[0].plain
    board.begin(1, 300, watched())
    text = board.lines(80, 24)[0].plain
    assert "the first step takes longer: 0:01:05 so far" in text
    assert "ETA" not in text


def test_only_ascii_where_the_terminal_has_no_other_characters():
    lines = board_after().lines(80, 30, ascii_only=True)
    assert all(line.plain.isascii() for line in lines)


def test_a_sparkline_goes_from_the_lowest_to_the_highest_and_keeps_its_width():
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 10) == "▁"
    assert sparkline([0.0, 1.0, 2.0, 7.0], 10) == "▁▂▃█"
    assert sparkline([float(n) for n in range(1000)], 8) == "▁▂▃▄▅▆▇█"


def test_a_history_keeps_its_size_its_order_and_its_mean_however_long_a_run_is():
    history = History(most=16)
    for number in range(1000):
        history.add(float(number))
    history.add(math.nan)
    assert len(history.values) <= 16
    assert history.values == sorted(history.values)
    assert history.values[0] < 64
    assert history.values[-1] > 900


def test_a_stretch_shows_what_filled_most_of_it():
    blocks = [("forward", 0.0, 0.30), ("backward", 0.30, 0.55), ("backward", 0.9, 1.0)]
    step = SeenStep(1, 1.0, [], [("cuda:0", blocks)], [])
    assert cells(step, 4) == [("cuda:0", ["forward", "backward", "", ""])]
    assert cells(step, 10)[0][1] == ["forward"] * 3 + ["backward"] * 2 + ["backward"] + [""] * 3 + ["backward"]
