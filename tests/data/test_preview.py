"""`rpft data` shows rows as the model sees them, counts what was lost, and its JSON keeps its form."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml
from support.pages import assert_whole_and_alone, in_browser, needs_browser
from support.pages import visible as text_of_page
from support.recipes import chats, encode_chat, run_rpft, tiny_tokenizer, write_jsonl

from rpft.data.preview import runs_of
from rpft.data.rows import Row
from rpft.data.show import shorten, visible
from rpft.draw.page import page


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def preview(tmp_path, tokenizer_folder):
    """preview(rows, *words, **data) -> what `rpft data` gave."""

    def run(rows, *words, **data):
        path = write_jsonl(tmp_path / "rows.jsonl", rows)
        recipe = {
            "model": {"path": str(tokenizer_folder)},
            "data": {"train": [str(path)], "max_seq_len": 64, **data},
            "output_dir": str(tmp_path / "out"),
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        return run_rpft("data", str(tmp_path / "recipe.yaml"), *words)

    return run


def said(user, answer):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]}


ROWS = [*chats(30), said("yes", ""), {"messages": [{"role": "user", "content": "no"}]}, said("one " * 80, "two")]


def test_the_json_of_the_counts_has_exactly_the_promised_keys(preview, tmp_path):
    ran = preview(ROWS, "--json")
    assert ran.code == 0, ran.err
    pairs = [encode_chat(tiny_tokenizer(), row) for row in ROWS[:30]]
    assert json.loads(ran.out) == {
        "sources": [
            {
                "path": str(tmp_path / "rows.jsonl"),
                "rows": 33,
                "trained_rows": 30,
                "dropped": {"empty answer": 1, "no assistant turn": 1, "longer than max_seq_len": 1},
            }
        ],
        "tokens": sum(len(ids) for ids, _ in pairs),
        "trained_tokens": sum(label >= 0 for _, labels in pairs for label in labels),
    }


@pytest.mark.parametrize("index", [0, 7])
def test_the_json_of_a_row_is_its_tokens(preview, index):
    ran = preview(ROWS, "--row", str(index), "--json")
    ids, labels = encode_chat(tiny_tokenizer(), ROWS[index])
    tokens = json.loads(ran.out)
    assert list(tokens) == ["tokens"]
    assert all(set(token) == {"id", "text", "trained"} for token in tokens["tokens"])
    assert [token["id"] for token in tokens["tokens"]] == ids
    assert [token["trained"] for token in tokens["tokens"]] == [label >= 0 for label in labels]
    assert "".join(token["text"] for token in tokens["tokens"]) == tiny_tokenizer().decode(ids)


def test_a_row_that_is_not_there_or_not_trained_is_bad_input(preview):
    ran = preview(ROWS, "--row", "33")
    assert ran.code == 2
    assert "has 33 rows; the last one is row 32" in ran.err
    ran = preview(ROWS, "--row", "30")
    assert ran.code == 2
    assert "rows.jsonl:31: this row is not trained on: empty answer" in ran.err


def test_a_row_shows_what_is_trained_and_its_special_tokens(preview):
    ran = preview([said("the", "yes\nno")], "--row", "0")
    assert ran.code == 0, ran.err
    assert "<|im_start|>user↵\nthe<|im_end|>↵\n<|im_start|>assistant↵\n[[yes↵\nno]][[<|im_end|>]]↵" in ran.out


def test_the_preview_says_counts_lengths_packing_repeats_and_strange_rows(preview):
    rows = [*ROWS, ROWS[0], said("yes", "never " * 10)]
    ran = preview(rows)
    assert ran.code == 0, ran.err
    for text in (
        "(messages): 32 of 35 rows trained on",
        "1 empty answer (",
        "rows.jsonl:31)",
        "1 longer than max_seq_len (",
        "tokens a row",
        "packs, ",
        "% of them filled",
        "1 rows have the tokens of an earlier row",
        "the strangest of 32 rows",
        "the longest: ",
    ):
        assert text in ran.out, text
    assert ran.out.index("[[") < ran.out.index("rows trained on"), "a row comes first"
    strangest = ran.out[ran.out.index("the strangest") :]
    assert 3 <= len(set(re.findall(r"rows\.jsonl:\d+(?=: the )", strangest))) <= 5


def test_evaluation_rows_that_are_trained_on_are_counted(preview, tmp_path):
    held_out = write_jsonl(tmp_path / "eval.jsonl", [*ROWS[:2], said("blue", "green")])
    ran = preview(ROWS, eval=[str(held_out)])
    assert "2 of 3 evaluation rows are also training rows" in ran.out
    assert "(messages): 3 of 3 rows trained on" in ran.out
    assert preview(ROWS, "--html", str(tmp_path / "a.html"), eval=[str(held_out)]).code == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "2 of 3 evaluation rows are also training rows" in page


def test_rows_that_are_held_out_and_stand_among_the_training_rows_too_are_counted(preview):
    rows = [said("the", "yes")] * 4
    ran = preview(rows, eval_rows=1)
    assert "1 of 4 rows are held out for evaluation" in ran.out
    assert "1 of 1 evaluation rows are also training rows" in ran.out


def test_settings_of_the_recipe_and_changes_reach_the_rows(preview):
    ran = preview([said("the", "yes")], "data.train_on=all", "data.chat_template=phi", "--row", "0")
    assert "user|>↵\nthe<|end|>↵\n<|assistant|>↵\nyes<|end|>↵" in ran.out
    assert ran.out.count("]]") == 2, "the legend's, and one for the whole row but its first token"
    assert preview([said("the", "yes")], "data.chat_template=qwen").code == 2


def test_preference_pairs_can_be_looked_at_and_not_trained_on(preview):
    row = {"prompt": "the ", "chosen": "yes", "rejected": "no"}
    ran = preview([row, row])
    assert ran.code == 0, ran.err
    assert "(preference): 2 of 2 rows" in ran.out
    ran = preview([row], "--row", "0")
    assert "chosen " in ran.out
    assert "the[[ no]]" in ran.out


class _Text(HTMLParser):
    def __init__(self):
        super().__init__()
        self.trained, self.tags, self.links, self.stack = "", set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for key, value in attrs if key in ("src", "href")]
        if tag == "span":
            self.stack.append(dict(attrs).get("class", ""))

    def handle_endtag(self, tag):
        if tag == "span":
            self.stack.pop()

    def handle_data(self, data):
        if self.stack and self.stack[-1].split()[:1] == ["t"]:
            self.trained += data


def test_the_page_needs_no_other_file_and_runs_nothing_of_the_data(preview, tmp_path):
    ran = preview(
        [said("<script>alert(1)</script>", "</pre><img src=x>"), *ROWS], "--html", str(tmp_path / "a.html")
    )
    assert ran.code == 0, ran.err
    page = _Text()
    page.feed((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert "</pre><img src=x><|im_end|>" in page.trained
    assert not page.tags & {"script", "img", "link"}
    assert page.links == []
    assert preview(ROWS, "--html", str(tmp_path / "none" / "a.html")).code == 2
    assert preview(ROWS, "--html", "a.html", "--json").code == 2


def page_of(preview, tmp_path):
    """The page of rows with an evaluation and a row that is lost."""
    path = tmp_path / "page.html"
    rows = [*chats(40), said("one " * 40, "two " * 40)]
    assert preview(rows, "--html", str(path), eval_fraction=0.1).code == 0
    return path.read_text(encoding="utf-8")


def test_the_page_looks_as_the_other_pages_do(preview, tmp_path):
    text = page_of(preview, tmp_path)
    assert_whole_and_alone(text)
    assert page("", []).split("</style>")[0].split("<style>")[1] in text
    seen = text_of_page(text)
    for part in (
        "rows 40 ",
        "tokens a row",
        "packs of 64",
        "1 longer than max_seq_len",
        "First rows",
        "Strangest of",
    ):
        assert part in seen, part


_WIDTHS = """
document.title = JSON.stringify({page: document.documentElement.scrollWidth, window: innerWidth,
  trained: getComputedStyle(document.querySelector('pre .t')).backgroundColor,
  card: getComputedStyle(document.querySelector('section')).backgroundColor});
"""


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (600, True)])
def test_in_a_browser_the_page_fits_and_what_is_trained_stands_out(width, dark, preview, tmp_path):
    text = page_of(preview, tmp_path).replace("</body>", f"<script>{_WIDTHS}</script></body>")
    found = in_browser(text, tmp_path, width, dark)
    assert found["page"] <= found["window"] + 1
    assert found["trained"] == ("rgb(31, 81, 48)" if dark else "rgb(191, 232, 197)")
    assert found["card"] == ("rgb(27, 31, 36)" if dark else "rgb(255, 255, 255)")


def test_text_of_the_data_moves_no_cursor():
    assert visible("a\x1b[2Jb\r\n\u202e\tc") == "a\\x1b[2Jb\\r↵\n\\u202e\tc"


def test_runs_give_back_the_text_with_characters_of_several_tokens():
    tokenizer = tiny_tokenizer()
    ids = np.array(tokenizer("é😀 the<|im_end|>\nno", add_special_tokens=False).input_ids, dtype=np.int32)
    whole = runs_of(Row(ids, np.ones(len(ids), bool)), tokenizer)
    assert [(run.text, run.special) for run in whole] == [
        ("é😀 the", False),
        ("<|im_end|>", True),
        ("\nno", False),
    ]
    trained = np.arange(len(ids)) >= 6
    assert [(run.text, run.trained) for run in runs_of(Row(ids, trained), tokenizer)][:2] == [
        ("é😀", False),
        (" the", True),
    ]


def test_a_long_row_is_shown_with_its_begin_and_its_end():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("the answer " * 100 + "<|im_end|>", add_special_tokens=False).input_ids
    runs = runs_of(Row(np.array(ids, dtype=np.int32), np.arange(len(ids)) > 50), tokenizer)
    short = shorten(runs, 60)
    text = "".join(run.text for run in short)
    assert len(text) == 60 + len(" … ")
    assert text.startswith("the answer")
    assert text.endswith("answer <|im_end|>")
    assert shorten(runs, 10_000) == runs
