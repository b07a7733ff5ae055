"""Files are read line by line, whatever the locale, and every fault names its line."""

import os
import subprocess
import sys

import pytest

from rpft.data.sources import Source, read_rows
from rpft.errors import UserError


def values(path, **keys):
    return [row.value for row in read_rows(Source(path, **keys))]


def refusal(path):
    with pytest.raises(UserError) as caught:
        values(path)
    return str(caught.value)


BOM_FILE = b'\xef\xbb\xbf{"text":"\xc3\xa9"}\r\n\n{"text":"b"}'


def test_begin_mark_windows_ends_and_blank_lines_give_two_rows(write):
    assert values(write(BOM_FILE)) == [{"text": "é"}, {"text": "b"}]


def test_the_locale_changes_nothing(write):
    code = (
        "import sys; from rpft.data.sources import Source, read_rows\n"
        "print([ascii(row.value) for row in read_rows(Source(sys.argv[1]))])"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code, write(BOM_FILE)],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str([ascii({"text": "é"}), ascii({"text": "b"})])


def test_reading_rows_imports_neither_torch_nor_transformers():
    code = "import sys, rpft.data.dataset; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_values_reach_the_reader_unchanged(write):
    lines = [
        '{"a":{"zip":"00701"}}',
        '{"a":{"zip":5}}',
        '{"a":"2024-01-02"}',
        '{"a":"123"}',
        '{"a":[1.50, null, true, NaN]}',
        '{"a":1,"a":2}',
    ]
    read = values(write("\n".join(lines).encode()))
    assert read[:4] == [{"a": {"zip": "00701"}}, {"a": {"zip": 5}}, {"a": "2024-01-02"}, {"a": "123"}]
    assert read[4]["a"][:3] == [1.5, None, True]
    assert read[4]["a"][3] != read[4]["a"][3]
    assert read[5] == {"a": 2}


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_line_separators_inside_a_string_do_not_split_it(write, separator):
    if separator < " ":  # JSON wants control characters escaped
        line = f'{{"text":"a\\u{ord(separator):04x}b"}}'
    else:
        line = f'{{"text":"a{separator}b"}}'
    assert values(write(line.encode() + b"\n")) == [{"text": f"a{separator}b"}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text":"\xff"}', "0xff"),
        (b'{"text":"a",}', "not JSON"),
        (b'{"text":"a"} {"text":"b"}', "Extra data"),
        (b"[1,2]", "a list"),
        (b'"a"', "text"),
        (b"null", "null"),
        (b'{"text":' + b"[" * 200_000, "cannot be read"),
        (b'{"n":' + b"1" * 5000 + b"}", "cannot be read"),
    ],
)
def test_a_bad_line_is_named(write, line, said):
    path = write(b'{"text":"ok"}\n\n' + line + b"\n")
    message = refusal(path)
    assert f"{path}:3" in message
    assert said in message


def test_rows_before_a_bad_line_are_not_needed_when_max_rows_ends_there(write):
    assert values(write(b'{"text":"a"}\nbad'), max_rows=1) == [{"text": "a"}]


def test_a_json_file_is_one_list_of_objects(write):
    assert values(write(b'\xef\xbb\xbf[{"text":"a"},\n{"text":"b"}]', "rows.json")) == [
        {"text": "a"},
        {"text": "b"},
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text":"a"}', "[ ]"),
        (b'{"text":"a"}\n{"text":"b"}', ".jsonl"),
        (b'[{"text":"a"}, 5]', "item 2"),
        (b'[{"text":"a"},\n{"text":"\xff"}]', "line 2"),
        (b"[]", "no rows"),
        (b"", "no rows"),
    ],
)
def test_a_json_file_of_another_kind_is_refused_with_advice(write, content, said):
    assert said in refusal(write(content, "rows.json"))


def test_missing_empty_and_folder_are_refused_with_advice(tmp_path, write):
    assert "does not exist" in refusal(str(tmp_path / "none.jsonl"))
    assert "is a folder" in refusal(str(tmp_path))
    assert "no rows" in refusal(write(b""))
    assert "no rows" in refusal(write(b"\xef\xbb\xbf\n \r\n"))
