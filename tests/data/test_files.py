"""Compressed files, tables, folders, patterns and hub data sets give the same rows, or say what is wrong where."""

import gzip
import json
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rpft.data.sources import Source, read_rows
from rpft.errors import UserError

ROWS = [{"text": "é\u2028x", "n": 1}, {"text": "b", "n": None}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def values(path, **keys):
    return [row.value for row in read_rows(Source(str(path), **keys))]


def places(path):
    return [row.where for row in read_rows(Source(str(path)))]


def refusal(path, **keys):
    with pytest.raises(UserError) as caught:
        values(path, **keys)
    return str(caught.value)


def write_arrow(path, stream):
    table = pa.Table.from_pylist(ROWS)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.ndjson": lambda path: path.write_bytes(LINES),
    "a.json": lambda path: path.write_text(json.dumps(ROWS), encoding="utf-8"),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES[:20]) + gzip.compress(LINES[20:])),
    "a.JSON.GZ": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "a.jsonl.zst": lambda path: path.write_bytes(pa.Codec("zstd").compress(LINES, asbytes=True)),
    "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "file.arrow": lambda path: write_arrow(path, stream=False),
    "stream.arrow": lambda path: write_arrow(path, stream=True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_values(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert values(tmp_path / name) == ROWS
    assert all(str(tmp_path / name) in where for where in places(tmp_path / name))


def test_cells_of_a_table_stay_text(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfzip,when,said\r\n00701,2024-01-02,"a ""b"",\nc"\r\n\r\n5,,NaN\r\n')
    assert values(path) == [
        {"zip": "00701", "when": "2024-01-02", "said": 'a "b",\nc'},
        {"zip": "5", "when": "", "said": "NaN"},
    ]
    assert places(path) == [f"{path}:2", f"{path}:5"]
    tabs = tmp_path / "a.tsv"
    tabs.write_text("q\ta\nx, y\tz\n")
    assert values(tabs) == [{"q": "x, y", "a": "z"}]


def test_a_cell_may_be_longer_than_the_csv_modules_limit(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "x" * 200_000 + "\n")
    assert len(values(path)[0]["text"]) == 200_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n1,2,3\n", "a.csv:3: 3 cells where the header has 2"),
        (b'a,b\n1,2\n"1,2\n3\n', "a.csv:3: not a row of a table"),
        (b"a,b\n1,2\n\xff,2\n", "a.csv:3: byte 0xff"),
        (b"a,a\n1,2\n", "a.csv:1: the first line must name every column"),
        (b"a,\n1,2\n", "a.csv:1: the first line must name every column"),
        (b"a,b\n", "holds no rows"),
    ],
)
def test_a_broken_table_names_its_line(tmp_path, content, said):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    assert said in refusal(path)


def test_text_is_a_row_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  two \n")
    assert values(path) == [{"text": "one"}, {"text": "  two "}]
    assert places(path) == [f"{path}:1", f"{path}:3"]
    path.write_bytes(b"one\n\xff\n")
    assert "a.txt:2: byte 0xff" in refusal(path)


@pytest.mark.parametrize("kind", ["cut.jsonl.gz", "cut.jsonl.zst", "cut.parquet", "cut.arrow"])
def test_a_file_that_is_cut_off_is_named(tmp_path, kind):
    whole = tmp_path / kind.replace("cut", "a" if "arrow" not in kind else "file")
    WRITERS[whole.name](whole)
    path = tmp_path / kind
    path.write_bytes(whole.read_bytes()[:-15])
    assert kind in refusal(path)


@pytest.mark.parametrize("name", ["text.jsonl.gz", "text.jsonl.zst", "text.parquet", "text.arrow"])
def test_a_file_of_another_kind_than_its_name_says_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(LINES)
    assert name in refusal(path)


def test_a_bad_line_in_a_compressed_file_has_its_number(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES + b"{bad}\n"))
    assert f"{path}:3: not JSON" in refusal(path)


def test_a_folder_gives_all_its_files_by_name_and_no_others(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, text in (("b/2.jsonl", "two"), ("1.txt", "one"), (".hidden/3.txt", "no"), ("README.md", "no")):
        content = json.dumps({"text": text}) if name.endswith("jsonl") else text
        (tmp_path / name).write_text(content)
    assert values(tmp_path) == [{"text": "one"}, {"text": "two"}]
    assert values(tmp_path, max_rows=1) == [{"text": "one"}]
    assert values(tmp_path / "**" / "*.jsonl") == [{"text": "two"}]
    assert "no file matches" in refusal(tmp_path / "*.csv")


def test_a_file_whose_name_looks_like_a_pattern_is_read(tmp_path):
    path = tmp_path / "a[1].jsonl"
    path.write_bytes(LINES)
    assert values(path) == ROWS


def test_columns_get_the_names_of_the_format(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": "a", "output": "old", "id": 1}\n')
    columns = {"instruction": "question", "output": "answer"}
    assert values(path, columns=columns) == [{"instruction": "q", "output": "a", "id": 1}]
    message = refusal(path, columns={"output": "reply"})
    assert f"{path}:1: no column reply" in message
    assert "answer, id, output, question" in message


def test_a_hub_data_set_is_asked_for_as_the_source_says(monkeypatch):
    asked = []

    def load_dataset(*words, **keys):
        asked.append((words, keys))
        return iter(ROWS)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    source = Source("hub:owner/name", config="small", split="test", revision="abc", streaming=True, max_rows=1)
    rows = list(read_rows(source))
    assert [row.value for row in rows] == ROWS[:1]
    assert rows[0].where == "hub:owner/name (test), row 1"
    assert asked == [(("owner/name", "small"), {"split": "test", "revision": "abc", "streaming": True})]


def test_a_hub_data_set_that_is_not_got_says_what_to_check(monkeypatch):
    def load_dataset(*words, **keys):
        raise ValueError("Unknown split 'tset'\nmore")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert "Unknown split 'tset'). Check its name" in refusal("hub:owner/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refusal("hub:owner/name")


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "a.jsonl.zst"])
def test_without_pyarrow_its_files_say_what_to_install(tmp_path, monkeypatch, name):
    WRITERS[name](tmp_path / name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in refusal(tmp_path / name)
