"""Exactly what the assistant says is trained, whatever the kind of chat template."""

import chat_kinds as kinds
import pytest
from chat_kinds import chat

from rpft.data.dataset import DataSettings, explain_row, load_dataset
from rpft.data.sources import Source
from rpft.errors import UserError


@pytest.fixture
def trained(write):
    """trained(row, tokenizer, **settings): the trained pieces of text, and the whole text."""

    def trained(row, tokenizer, **settings):
        rows = load_dataset([Source(write([row]))], tokenizer, DataSettings(max_seq_len=500, **settings)).rows
        pieces, before = [], False
        for token, flag in zip(rows[0].ids.tolist(), rows[0].trained.tolist(), strict=True):
            if flag and not before:
                pieces.append([])
            if flag:
                pieces[-1].append(token)
            before = flag
        return [tokenizer.decode(piece) for piece in pieces], tokenizer.decode(rows[0].ids.tolist())

    return trained


@pytest.fixture
def refusal(write):
    def refusal(row, tokenizer, **settings):
        path = write([chat("U fine", "A fine"), row])
        with pytest.raises(UserError) as caught:
            load_dataset([Source(path)], tokenizer, DataSettings(max_seq_len=500, **settings))
        assert f"{path}:2" in str(caught.value)
        return str(caught.value)

    return refusal


TWO_TURNS = chat("U Hello", "A Yo there", "U Ping", "A Pong")


def test_chatml_without_marks_trains_answers_and_their_end_token(make_tokenizer, trained):
    pieces, text = trained(TWO_TURNS, make_tokenizer(kinds.CHATML))
    assert pieces == ["Yo there<|im_end|>", "Pong<|im_end|>"]
    assert text.endswith("Pong<|im_end|>\n")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (kinds.MARKED, ["Yo there<|im_end|>", "Pong<|im_end|>"]),
        (kinds.HEADERS, ["Yo there<|im_end|>", "Pong<|im_end|>"]),
        (kinds.NO_SYSTEM, [" Yo there<|endoftext|>", " Pong<|endoftext|>"]),
        (kinds.THINKING, ["Yo there<|im_end|>", "<think>\n\n</think>\n\nPong<|im_end|>"]),
        (kinds.END_AT_END, ["Yo there<|im_end|>", "Pong<|im_end|>\n<|endoftext|>"]),
        (kinds.CHANNELS, ["<|/head|>final:Yo there<|im_end|>", "<|/head|>final:Pong<|endoftext|>"]),
        (kinds.LINES, ["Yo there\n", "Pong\n"]),
    ],
)
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_every_kind_of_template_trains_its_answers(make_tokenizer, trained, template, expected, trim_offsets):
    pieces, _ = trained(TWO_TURNS, make_tokenizer(template, trim_offsets=trim_offsets))
    assert pieces == expected


@pytest.mark.parametrize("template", [kinds.CHATML, kinds.MARKED, kinds.HEADERS, kinds.THINKING])
def test_only_the_last_answer_when_asked(make_tokenizer, trained, template):
    pieces, _ = trained(TWO_TURNS, make_tokenizer(template), train_on="last_assistant")
    assert [piece.split("\n")[-1] for piece in pieces] == ["Pong<|im_end|>"]


@pytest.mark.parametrize("template", [kinds.CHATML, kinds.MARKED, kinds.THINKING])
def test_train_false_leaves_one_answer_out(make_tokenizer, trained, template):
    row = chat("U Hello", "A Yo there", "U Ping", "A Pong")
    row["messages"][3]["train"] = False
    pieces, text = trained(row, make_tokenizer(template))
    assert pieces == ["Yo there<|im_end|>"]
    assert "train" not in text
    assert "Pong" in text


def test_train_on_all_trains_everything_but_the_first_token(make_tokenizer, trained):
    row = chat("S Hi", "U Ping", "A Pong", "U the")
    pieces, text = trained(row, make_tokenizer(kinds.CHATML), train_on="all")
    assert ["<|im_start|>" + piece for piece in pieces] == [text]
    row["messages"][2]["train"] = False
    assert "Pong" not in "".join(trained(row, make_tokenizer(kinds.CHATML), train_on="all")[0])


def test_train_false_on_a_user_message_cannot_be_meant_with_train_on_all(make_tokenizer, refusal):
    row = chat("U Ping", "A Pong")
    row["messages"][0]["train"] = False
    assert "train: false" in refusal(row, make_tokenizer(kinds.CHATML), train_on="all")


def test_blanks_of_an_answer_belong_to_it(make_tokenizer, trained):
    pieces, _ = trained(chat("U Hello", "A  Yo \n", "U Hi", "A Pong\n"), make_tokenizer(kinds.CHATML))
    assert pieces == [" Yo \n<|im_end|>", "Pong\n<|im_end|>"]


def test_an_answer_that_the_template_trims_is_still_found(make_tokenizer, trained):
    pieces, _ = trained(chat("U Hello", "A  Yo \n", "U Hi", "A Pong\n"), make_tokenizer(kinds.HEADERS))
    assert pieces == ["Yo<|im_end|>", "Pong<|im_end|>"]


def test_reasoning_that_the_template_takes_out_of_an_earlier_turn(make_tokenizer, trained):
    thought = "<think>\nthe\n</think>\n\n"
    row = chat("U Hello", f"A {thought}Yo", "U Hi", f"A {thought}Pong")
    pieces, text = trained(row, make_tokenizer(kinds.THINKING))
    assert pieces == ["Yo<|im_end|>", f"{thought}Pong<|im_end|>"]
    assert text.count("<think>") == 1


def test_a_turn_that_repeats_an_earlier_one_is_found_at_its_own_place(make_tokenizer, trained):
    row = chat("U Pong", "A Pong", "U Pong", "A Pong", "U Pong", "A Pong")
    for template in (kinds.CHATML, kinds.THINKING, kinds.END_AT_END):
        pieces, text = trained(row, make_tokenizer(template))
        assert len(pieces) == 3
        assert text.count("Pong") == 6


def test_characters_of_several_tokens_are_trained_whole(make_tokenizer, trained):
    pieces, _ = trained(chat("U 😀", "A é😀漢"), make_tokenizer(kinds.CHATML))
    assert pieces == ["é😀漢<|im_end|>"]


def test_a_token_over_the_border_is_trained(make_tokenizer, write):
    # The template's blank and the answer make one token, " the".
    template = "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}{{ ' ' }}{% generation %}"
    template += "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    tokens = explain_row(Source(write([chat("U Hi", "A the")])), 0, make_tokenizer(template), DataSettings(99))
    assert [text for _, text, flag in tokens if flag] == [" the"]


def test_a_blank_at_the_end_of_a_span_is_trained_when_offsets_are_trimmed(make_tokenizer, trained):
    template = "{% for m in messages %}{{ '<|im_start|>' }}{% if m.role == 'assistant' %}{% generation %}"
    template += "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    for trim_offsets in (False, True):
        tokenizer = make_tokenizer(template, trim_offsets=trim_offsets)
        assert trained(chat("U Hi ", "A Yo "), tokenizer)[0] == ["Yo "]


def test_marks_inside_a_macro_and_with_blank_control(make_tokenizer, trained):
    template = """{% macro say(m) %}
  {% generation -%}
    {{ m.content }}<|im_end|>
  {%- endgeneration %}

{% endmacro %}
{% for m in messages %}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{{ say(m) }}{% else %}{{ m.content }}
{% endif %}
{% endfor %}"""
    tokenizer = make_tokenizer(template)
    pieces, text = trained(TWO_TURNS, tokenizer)
    assert pieces == ["Yo there<|im_end|>", "Pong<|im_end|>"]
    assert text == tokenizer.apply_chat_template(TWO_TURNS["messages"], tokenize=False)


def test_marks_agree_with_the_mask_of_transformers(make_tokenizer, write):
    tokenizer = make_tokenizer(kinds.MARKED)
    expected = tokenizer.apply_chat_template(
        TWO_TURNS["messages"], return_assistant_tokens_mask=True, return_dict=True
    )
    row = load_dataset([Source(write([TWO_TURNS]))], tokenizer, DataSettings(500)).rows[0]
    assert row.ids.tolist() == expected["input_ids"]
    assert row.trained.tolist() == [bool(flag) for flag in expected["assistant_masks"]]


def test_single_messages_cannot_be_chosen_from_marks_that_do_not_match_them(make_tokenizer, refusal):
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% generation %}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    message = refusal(TWO_TURNS, make_tokenizer(template), train_on="last_assistant")
    assert "marks" in message


def test_tool_calls_are_trained_and_tool_answers_are_not(make_tokenizer, trained):
    call = {"function": {"name": "add", "arguments": {"x": 1, "zip": "00701"}}}
    row = chat("U Ping", "A ", "T 2", "A Two")
    row["messages"][1] = {"role": "assistant", "content": None, "tool_calls": [call]}
    pieces, _ = trained(row, make_tokenizer(kinds.CHATML_TOOLS))
    printed = '{"name": "add", "arguments": {"x": 1, "zip": "00701"}}'
    assert pieces == [f"<call>{printed}</call><|im_end|>", "Two<|im_end|>"]


@pytest.mark.parametrize("content", [None, ""])
def test_a_template_that_does_not_print_tool_calls_is_refused(make_tokenizer, refusal, content):
    row = chat("U Ping", "A ", "T 2", "A Two")
    row["messages"][1] = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "add"}}]}
    assert "Tool calls need a template" in refusal(row, make_tokenizer(kinds.CHATML))


def test_tools_of_a_row_reach_the_template(make_tokenizer, trained):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + kinds.CHATML
    row = chat("U Ping", "A Pong", tools=[{"type": "function", "function": {"name": "add"}}])
    assert '"name": "add"' in trained(row, make_tokenizer(template))[1]


def test_a_system_message_that_the_template_refuses_names_the_row(make_tokenizer, refusal):
    message = refusal(chat("S Brief", "U Hi", "A Yo"), make_tokenizer(kinds.NO_SYSTEM))
    assert "System role not supported" in message
    assert "data.system_role: merge" in message


def test_a_system_message_is_merged_when_asked(make_tokenizer, trained):
    row = chat("S Brief", "U Hi", "A Yo")
    pieces, text = trained(row, make_tokenizer(kinds.NO_SYSTEM), system_role="merge")
    assert text == "[INST] Brief\n\nHi [/INST] Yo<|endoftext|>"
    assert pieces == [" Yo<|endoftext|>"]


def test_a_system_message_with_no_user_after_it_cannot_be_merged(make_tokenizer, refusal):
    row = chat("U Hi", "A Yo", "S Brief")
    assert "no user message" in refusal(row, make_tokenizer(kinds.NO_SYSTEM), system_role="merge")


def test_a_template_that_drops_what_it_does_not_know_is_refused(make_tokenizer, refusal):
    no_system = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    assert "leaves the system message out" in refusal(chat("S Brief", "U Hi", "A Yo"), make_tokenizer(no_system))


def test_a_chat_that_starts_with_the_assistant_or_holds_only_a_system_message_before(make_tokenizer, trained):
    fussy = "{% if messages[-1].role == 'system' %}{{ raise_exception('no user') }}{% endif %}" + kinds.CHATML
    tokenizer = make_tokenizer(fussy)
    assert trained(chat("A Yo", "U Hi", "A Pong"), tokenizer)[0] == ["Yo<|im_end|>", "Pong<|im_end|>"]
    assert trained(chat("S the", "A Yo"), tokenizer)[0] == ["Yo<|im_end|>"]


def test_a_system_message_that_the_template_prints_with_the_next_turn_is_not_trained(make_tokenizer, trained):
    template = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.text = m.content %}"
        "{% else %}{{ '<|head|>' + ns.text + '<|/head|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    assert trained(chat("S the", "A Yo"), make_tokenizer(template))[0] == ["Yo<|im_end|>"]


def test_a_header_that_depends_on_the_answer_is_refused(make_tokenizer, refusal):
    template = (
        "{% if messages | length > 2 %}{{ messages | length }}{% endif %}"
        "{% for m in messages %}{{ m.content | length }}{{ '<|head|>' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    assert "cannot be found exactly" in refusal(TWO_TURNS, make_tokenizer(template))


def test_a_template_whose_answers_cannot_be_told_is_refused_with_a_way_out(make_tokenizer, refusal):
    # A longer chat has its length in front, so that no prefix of the chat is a prefix of its text, and no
    # end-of-turn token says where an answer ends.
    template = (
        "{% if messages | length > 2 %}{{ messages | length }}{% endif %}"
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    )
    message = refusal(TWO_TURNS, make_tokenizer(template))
    assert "message 1 cannot be found exactly" in message
    assert "{% generation %}" in message
