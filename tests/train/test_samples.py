"""The questions that a run leaves: its first rows up to where they are trained, held-out ones if there are any."""

import json
from types import SimpleNamespace

import numpy as np

from rpft.data.rows import Row
from rpft.train.samples import read_samples, write_samples


def row(trained):
    """Tokens 0, 1, 2 ... of which those at ``trained`` are."""
    mask = np.zeros(trained[-1] + 3, dtype=bool)
    mask[trained] = True
    return Row(np.arange(len(mask), dtype=np.int32), mask)


def left(folder, train, held_out=None):
    eval_rows = None if held_out is None else SimpleNamespace(rows=held_out)
    write_samples(SimpleNamespace(train=SimpleNamespace(rows=train), eval=eval_rows), folder)
    return read_samples(folder)


def test_a_question_ends_where_the_first_answer_begins(tmp_path):
    (sample,) = left(tmp_path, [row([5, 6, 7, 10, 11])])
    assert (sample.prompt, sample.expected) == ([0, 1, 2, 3, 4], [5, 6, 7])
    assert (sample.held_out, sample.answered) == (False, False)


def test_a_text_is_asked_to_be_gone_on_with(tmp_path):
    short, long = left(tmp_path, [row(list(range(1, 20))), row(list(range(1, 2000)))])
    assert (len(short.prompt), short.expected[0]) == (11, 11)
    assert (len(long.prompt), len(long.expected)) == (32, 512)


def test_held_out_rows_go_before_and_long_questions_are_passed_over(tmp_path):
    rows = [row([2000]), *(row([n]) for n in range(5, 15))]
    samples = left(tmp_path, [row([3])], held_out=rows)
    assert [len(sample.prompt) for sample in samples] == [5, 6, 7, 8]
    assert all(sample.held_out for sample in samples)
    assert left(tmp_path, [row([2000])]) == []


def test_a_run_that_left_no_questions_has_none(tmp_path):
    assert read_samples(tmp_path) == []
    (tmp_path / "samples.json").write_text(json.dumps({}))
    assert read_samples(tmp_path) == []
