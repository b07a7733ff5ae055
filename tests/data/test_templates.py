"""The templates that come with rpft print what their models expect, and mark what the assistant says."""

import re

import chat_kinds as kinds
import pytest
from chat_kinds import chat

from rpft.data.dataset import DataSettings, explain_row
from rpft.data.loader import DATE_PINNED, RowLoader
from rpft.data.report import SourceReport
from rpft.data.sources import Source, Unread
from rpft.data.templates import pin_date, read_template, shipped_templates
from rpft.errors import UserError

TWO_TURNS = chat("S Brief", "U Hi", "A Yo ", "U Ping", "A Pong")
GOLDEN = {
    "chatml": (
        "<|im_start|>system\nBrief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Yo"
        " <|im_end|>]\n<|im_start|>user\nPing<|im_end|>\n<|im_start|>assistant\n[Pong<|im_end|>]\n"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBrief<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[Yo<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\nPing<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[Pong<|eot_id|>]"
    ),
    "qwen3": (
        "<|im_start|>system\nBrief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[Yo <|im_end|>]\n<|im_start|>user\nPing<|im_end|>\n"
        "<|im_start|>assistant\n[<think>\n\n</think>\n\nPong<|im_end|>]\n"
    ),
    "gemma": (
        "<s><start_of_turn>user\nBrief\n\nHi<end_of_turn>\n<start_of_turn>model\n[Yo<end_of_turn>]\n"
        "<start_of_turn>user\nPing<end_of_turn>\n<start_of_turn>model\n[Pong<end_of_turn>]\n"
    ),
    "mistral": "<s>[INST] Brief\n\nHi[/INST][ Yo<|endoftext|>][INST] Ping[/INST][ Pong<|endoftext|>]",
    "phi": (
        "<|system|>\nBrief<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n[Yo <|end|>]\n"
        "<|user|>\nPing<|end|>\n<|assistant|>\n[Pong<|end|>]\n"
    ),
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def bracketed(row, tokenizer, **settings):
    """The text of a row with [ ] around what is trained."""
    text, _ = rendered(row, tokenizer, **settings)
    return text


def rendered(row, tokenizer, **settings):
    loader = RowLoader(tokenizer, DataSettings(2000, **settings))
    report = SourceReport("f")
    ((_, found),) = loader.rows([Unread("f:1", row)], 0, Source("f"), report)
    pieces, open_ = [], False
    for token, trained in zip(found.ids.tolist(), found.trained.tolist(), strict=True):
        if trained != open_:
            pieces.append("[" if trained else "]")
            open_ = trained
        pieces.append(loader.encoder.text_of(token))
    return "".join(pieces) + ("]" if open_ else ""), report


def test_every_shipped_template_has_a_golden_text():
    assert shipped_templates() == sorted(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_shipped_template_prints_and_marks_exactly_this(make_tokenizer, name):
    assert bracketed(TWO_TURNS, make_tokenizer(), chat_template=read_template(name)) == GOLDEN[name]


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("row", [TWO_TURNS, chat("U Hi", "A Yo")])
def test_the_marks_of_a_shipped_template_are_where_they_would_be_derived(make_tokenizer, name, row):
    marked = read_template(name)
    plain = re.sub(r"\{%-? (end)?generation -?%\}", "", marked)
    tokenizer = make_tokenizer()
    assert bracketed(row, tokenizer, chat_template=plain) == bracketed(row, tokenizer, chat_template=marked)


def test_reasoning_stays_after_the_last_question_only(make_tokenizer):
    row = chat("U Hi", "A <think>\nold\n</think>\n\nYo", "U Ping", "A Pong")
    row["messages"][3]["reasoning_content"] = "new"
    text, report = rendered(row, make_tokenizer(), chat_template=read_template("qwen3"))
    assert text.endswith("assistant\n[<think>\nnew\n</think>\n\nPong<|im_end|>]\n")
    assert "old" not in text
    assert report.notes == {"thinking blocks taken out by the chat template": 1}


def test_tools_and_calls_of_qwen3_and_llama3(make_tokenizer):
    row = chat("U Ping", "A ", "T 2", "A Two", tools=TOOLS)
    row["messages"][1] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    text = bracketed(row, make_tokenizer(), chat_template=read_template("qwen3"))
    assert '[<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>]' in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n" in text
    assert text.endswith("[<think>\n\n</think>\n\nTwo<|im_end|>]\n")
    text = bracketed(row, make_tokenizer(), chat_template=read_template("llama3"))
    assert '[{"name": "add", "parameters": {"x": 1}}<|eot_id|>]' in text
    assert "<|start_header_id|>ipython<|end_header_id|>\n\n2<|eot_id|>" in text


@pytest.mark.parametrize("name", ["gemma", "mistral", "phi", "chatml"])
def test_a_template_without_tools_refuses_them_by_row(make_tokenizer, write, name):
    row = chat("U Ping", "A ", "T 2", "A Two")
    row["messages"][1] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    path = write([row])
    settings = DataSettings(2000, chat_template=read_template(name))
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the chat template"):
        explain_row(Source(path), 0, make_tokenizer(), settings)


def test_a_name_that_is_no_template_suggests_one(tmp_path):
    with pytest.raises(UserError, match="did you mean llama3"):
        read_template("llama-3")
    with pytest.raises(UserError, match="There are chatml, gemma"):
        read_template(str(tmp_path / "none.jinja"))
    path = tmp_path / "mine.jinja"
    path.write_text("{{ 'é' }}", encoding="utf-8")
    assert read_template(str(path)) == "{{ 'é' }}"


def test_template_variables_reach_the_template(make_tokenizer):
    template = "{{ mood | default('none') }} " + kinds.CHATML
    assert bracketed(chat("U Hi", "A Yo"), make_tokenizer(template)).startswith("none ")
    text = bracketed(chat("U Hi", "A Yo"), make_tokenizer(template), template_kwargs={"mood": "glad"})
    assert text.startswith("glad ")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "tokenize"])
def test_what_rows_and_settings_give_cannot_be_a_template_variable(make_tokenizer, name):
    with pytest.raises(UserError, match=rf"data\.template_kwargs: {name}"):
        RowLoader(make_tokenizer(kinds.CHATML), DataSettings(99, template_kwargs={name: 1}))


DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}: "


def test_todays_date_is_pinned_and_said(make_tokenizer):
    text, report = rendered(chat("U Hi", "A Yo"), make_tokenizer(DATED + kinds.CHATML))
    assert text.startswith("26 Jul 2024: ")
    assert report.notes == {DATE_PINNED: 1}
    row = chat("U Hi", "A Yo")
    assert bracketed(row, make_tokenizer(DATED + kinds.CHATML), template_date="2025-01-02").startswith(
        "02 Jan 2025: "
    )


def test_a_date_whose_format_is_computed_is_refused():
    assert pin_date('{{ strftime_now( "%Y" ) }}', "2024-07-26") == ('{{ "2024" }}', True)
    assert pin_date("{{ messages }}", "2024-07-26") == ("{{ messages }}", False)
    with pytest.raises(UserError, match="today's date"):
        pin_date("{{ strftime_now(f) }}", "2024-07-26")
