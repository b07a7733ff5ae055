"""metrics.jsonl has every line once, whatever the disk does in between."""

import errno
import json

import pytest

from rpft import files
from rpft.train.metrics import EvalRecord, MetricsFile


def steps(folder):
    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_a_line_that_a_full_disk_does_not_take_is_written_with_the_next(tmp_path, monkeypatch):
    metrics = MetricsFile(tmp_path)
    write, full = files.write, []

    def failing(file, data):
        if full:
            write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    monkeypatch.setattr(files, "write", failing)
    metrics.append(EvalRecord(1, 0.5, 3))
    full.append(True)
    metrics.append(EvalRecord(2, 0.5, 3))
    metrics.append(EvalRecord(3, 0.5, 3))
    assert steps(tmp_path) == [1]
    with pytest.raises(OSError, match="No space left"):
        metrics.sync()
    full.clear()
    metrics.append(EvalRecord(4, 0.5, 3))
    metrics.sync()
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_what_a_resumed_run_keeps_is_whole_lines_up_to_its_step_and_gaps_are_told(tmp_path):
    lines = [f'{{"step": {step}, "loss": 1.0}}\n' for step in (1, 2, 4, 5, 6)]
    (tmp_path / "metrics.jsonl").write_bytes("".join(lines).encode() + b'{"step": 7, "lo\xff')
    assert MetricsFile(tmp_path).keep_until(5) == [3]
    assert steps(tmp_path) == [1, 2, 4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_that_wait_for_a_full_disk_are_known_and_go_with_the_steps_that_a_run_goes_back_behind(
    tmp_path, monkeypatch
):
    metrics = MetricsFile(tmp_path)
    metrics.append(EvalRecord(1, 0.5, 3))

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        for step in (2, 3, 4):
            metrics.append(EvalRecord(step, 0.5, 3))
    assert metrics.has_evaluation(4)
    metrics.keep_until(2)
    assert not metrics.has_evaluation(4)
    metrics.append(EvalRecord(3, 0.25, 3))
    metrics.sync()
    assert steps(tmp_path) == [1, 2, 3]
