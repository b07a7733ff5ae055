"""Tokens kept on disk are those of exactly this data, tokenizer, template and rule; processes change nothing."""

import dataclasses
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import chat_kinds as kinds
import numpy as np
import psutil
import pytest
from chat_kinds import chat

from rpft.data import cache, dataset, pool
from rpft.data.dataset import DataSettings, Loading, load_dataset
from rpft.data.loader import RowLoader
from rpft.data.sources import Source, Unread, unread_rows
from rpft.errors import UserError

ROWS = [chat(f"U Ping {i}", "A " + "Pong " * (i % 4)) for i in range(40)]


@pytest.fixture
def made(monkeypatch):
    """How often tokens were made, instead of found."""
    counts = []
    load = RowLoader.load

    def counted(self, batch, first, source):
        counts.append(len(batch))
        return load(self, batch, first, source)

    monkeypatch.setattr(RowLoader, "load", counted)
    return counts


def content(data):
    return [(row.ids.tolist(), row.trained.tolist()) for row in data.rows]


def test_a_second_load_finds_the_tokens_and_the_counts(make_tokenizer, write, tmp_path, made):
    source, tokenizer = Source(write(ROWS)), make_tokenizer(kinds.CHATML)
    loading = Loading(cache=str(tmp_path / "kept"))
    plain = load_dataset([source], tokenizer, DataSettings(99))
    first = load_dataset([source], tokenizer, DataSettings(99), loading)
    assert made == [40, 40]
    again = load_dataset([source], make_tokenizer(kinds.CHATML), DataSettings(99), loading)
    assert made == [40, 40]
    assert content(plain) == content(first) == content(again)
    assert plain.reports == first.reports == again.reports
    assert plain.reports[0].dropped == {"empty answer": 10}
    assert [path.name[0] for path in (tmp_path / "kept").iterdir()] != ["."]


def test_everything_that_tokens_depend_on_is_in_the_key(make_tokenizer, write, tmp_path, monkeypatch):
    path = write(ROWS)
    source, tokenizer, settings = Source(path), make_tokenizer(kinds.CHATML), DataSettings(99)
    keys = {cache.cache_key(source, tokenizer, settings)}

    def is_new(source=source, tokenizer=tokenizer, settings=settings):
        key = cache.cache_key(source, tokenizer, settings)
        new = key not in keys
        keys.add(key)
        return new

    assert not is_new()
    assert not is_new(source=Source(path, weight=2.0))
    changes = {
        "max_seq_len": 98,
        "truncation": "left",
        "train_on": "all",
        "system_role": "merge",
        "chat_template": kinds.CHATML,
        "template_kwargs": {"a": 1},
        "template_date": "2025-01-01",
    }
    assert set(changes) == {field.name for field in dataclasses.fields(DataSettings)}
    for name, value in changes.items():
        assert is_new(settings=dataclasses.replace(settings, **{name: value})), name
    assert is_new(source=Source(path, format="messages"))
    assert is_new(source=Source(path, max_rows=3))
    assert is_new(source=Source(path, columns={"messages": "messages"}))
    assert is_new(tokenizer=make_tokenizer(kinds.HEADERS))
    assert is_new(tokenizer=make_tokenizer(kinds.CHATML, adds_begin=True))
    monkeypatch.setattr(cache, "_code_mark", lambda: ["another version"])
    assert is_new()


def test_a_changed_file_is_read_again_though_size_and_time_are_the_same(make_tokenizer, write, tmp_path, made):
    loading, tokenizer = Loading(cache=str(tmp_path / "kept")), make_tokenizer(kinds.CHATML)
    path = write([chat("U Hi", "A Yo")])
    stat = os.stat(path)
    old = load_dataset([Source(path)], tokenizer, DataSettings(99), loading)
    write([chat("U Hi", "A No")])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert os.stat(path).st_size == stat.st_size
    new = load_dataset([Source(path)], tokenizer, DataSettings(99), loading)
    assert content(new) != content(old)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    load_dataset([Source(path)], tokenizer, DataSettings(99), loading)
    assert made == [1, 1, 1]


@pytest.mark.parametrize(
    "name", ["ids.bin", "trained.bin", "lengths.bin", "ordinals.bin", "keys.bin", "report.json"]
)
def test_kept_tokens_that_are_not_whole_are_made_again(make_tokenizer, write, tmp_path, made, name):
    loading, tokenizer, source = (
        Loading(cache=str(tmp_path / "kept")),
        make_tokenizer(kinds.CHATML),
        Source(write(ROWS)),
    )
    first = content(load_dataset([source], tokenizer, DataSettings(99), loading))
    (place,) = (tmp_path / "kept").iterdir()
    (place / name).write_bytes((place / name).read_bytes()[:-8])
    assert content(load_dataset([source], tokenizer, DataSettings(99), loading)) == first
    assert made == [40, 40]
    assert content(load_dataset([source], tokenizer, DataSettings(99), loading)) == first
    assert made == [40, 40]


def test_a_load_that_fails_leaves_nothing(make_tokenizer, write, tmp_path):
    source = Source(write([*ROWS, {"messages": "x"}]))
    with pytest.raises(UserError, match=r"rows\.jsonl:41"):
        load_dataset(
            [source], make_tokenizer(kinds.CHATML), DataSettings(99), Loading(cache=str(tmp_path / "kept"))
        )
    assert list((tmp_path / "kept").iterdir()) == []


def test_only_large_files_are_kept_where_nothing_is_asked(make_tokenizer, write, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source, tokenizer, loading = Source(write(ROWS)), make_tokenizer(kinds.CHATML), Loading(cache="auto")
    load_dataset([source], tokenizer, DataSettings(99), loading)
    assert not (tmp_path / "rpft").exists()
    monkeypatch.setattr(cache, "CACHED_FROM_BYTES", 100)
    load_dataset([source], tokenizer, DataSettings(99), loading)
    assert len(list((tmp_path / "rpft" / "tokens").iterdir())) == 1


def test_a_hub_data_set_is_kept_at_a_commit_only(make_tokenizer):
    tokenizer, settings = make_tokenizer(kinds.CHATML), DataSettings(99)
    assert cache.cache_key(Source("hub:a/b", revision="main"), tokenizer, settings) is None
    assert cache.cache_key(Source("hub:a/b"), tokenizer, settings) is None
    assert cache.cache_key(Source("hub:a/b", revision="0" * 40), tokenizer, settings) is not None


def test_progress_says_rows_and_the_end(make_tokenizer, write):
    seen = []
    loading = Loading(progress=lambda source, rows, done: seen.append((rows, done)))
    load_dataset([Source(write(ROWS * 10))], make_tokenizer(kinds.CHATML), DataSettings(99), loading)
    assert seen == [(256, False), (400, False), (400, True)]


def test_a_process_that_is_killed_ends_the_others_and_is_told_with_the_way_out(make_tokenizer, write, monkeypatch):
    monkeypatch.setattr(pool, "_TASK_ROWS", 64)
    source = Source(write(ROWS * 40), "messages")
    before = set(multiprocessing.active_children())

    def load():
        with pool.TokenPool(make_tokenizer(kinds.CHATML), DataSettings(99), 2, alone_rows=1) as helpers:
            for _ in helpers.blocks(unread_rows(source), source):
                for process in set(multiprocessing.active_children()) - before:
                    process.kill()

    with pytest.raises(UserError, match=r"ended from outside.*data\.processes"):
        load()
    assert set(multiprocessing.active_children()) == before


def test_what_is_left_to_do_is_not_done_when_an_error_ends_the_work(make_tokenizer, monkeypatch):
    """In this process, as a helper does it."""
    monkeypatch.setattr(pool, "_loader", RowLoader(make_tokenizer(kinds.CHATML), DataSettings(99)))
    monkeypatch.setattr(pool, "_unwanted", threading.Event())
    rows = [Unread(f"x.jsonl:{n}", json.dumps(row).encode()) for n, row in enumerate(ROWS)]
    source = Source("x.jsonl", "messages")
    assert pool._load(rows, 0, source)[1].rows == len(ROWS)
    pool._unwanted.set()
    with pytest.raises(CancelledError):
        pool._load(rows, 0, source)


def test_a_helper_that_is_not_wanted_any_more_ends_whatever_it_is_at():
    context = multiprocessing.get_context("spawn")
    unwanted = context.Event()
    helper = context.Process(target=pool._end_with_the_run, args=(unwanted,))
    helper.start()
    helper.join(0.5)
    assert helper.is_alive()
    unwanted.set()
    helper.join(30)
    assert helper.exitcode == 1


PARENT = """
import pickle, sys, multiprocessing
from rpft.data import pool
from rpft.data.sources import Source, unread_rows

path, start_with = sys.argv[1], pickle.loads(bytes.fromhex(sys.argv[2]))
source = Source(path, "messages")
with pool.TokenPool(*start_with, 2, alone_rows=1) as helpers:
    for _ in helpers.blocks(unread_rows(source), source):
        started = multiprocessing.active_children()
        if started:
            print(*(process.pid for process in started), flush=True)
            sys.stdin.read()
"""


def test_helpers_end_with_the_process_that_started_them_though_it_is_killed(make_tokenizer, write):
    path = write(ROWS * 60)
    start_with = pickle.dumps((make_tokenizer(kinds.CHATML), DataSettings(99))).hex()
    command = [sys.executable, "-c", PARENT, path, start_with]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        helpers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert helpers
        parent.kill()
    left = psutil.wait_procs(helpers, timeout=30)[1]
    for process in left:
        process.kill()
    assert not left


def test_processes_change_neither_rows_nor_counts_and_their_errors_arrive(make_tokenizer, write, monkeypatch):
    monkeypatch.setattr(pool, "_TASK_ROWS", 64)
    tokenizer, settings = make_tokenizer(kinds.CHATML), DataSettings(99)
    source = Source(write([*ROWS * 15, {"messages": "x"}]))

    def load(processes):
        """Everything up to the row that cannot be read."""
        blocks, report, said = [], dataset.SourceReport(source.path), ""
        try:
            with pool.TokenPool(tokenizer, settings, processes, alone_rows=1) as helpers:
                for block, part in helpers.blocks(unread_rows(source), source):
                    blocks.append(block)
                    report.add(part)
        except UserError as error:
            said = str(error)
        assert "rows.jsonl:601: " in said
        return dataset.Rows(blocks), report, np.concatenate([block.ordinals for block in blocks]).tolist()

    (alone, report, ordinals), (shared, shared_report, shared_ordinals) = load(1), load(2)
    # What is lost with the error is less than a batch; the processes' batches are smaller.
    assert len(alone) > 300
    assert [row.ids.tolist() for row in alone] == [row.ids.tolist() for row in shared[: len(alone)]]
    assert [row.trained.tolist() for row in alone] == [row.trained.tolist() for row in shared[: len(alone)]]
    assert ordinals == shared_ordinals[: len(ordinals)]
    assert report.format == shared_report.format == "messages"
    assert shared_report.rows == shared_report.trained_rows + shared_report.dropped["empty answer"]
    assert shared_report.rows > report.rows
