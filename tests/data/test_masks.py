"""Exactly what the assistant says is trained, whatever the kind of chat template."""

import chat_kinds as kinds
import pytest
from chat_kinds import chat
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from rpft.data.dataset import DataSettings, explain_row, load_dataset
from rpft.data.formats import parse_row
from rpft.data.mask import _derive, render_with_spans
from rpft.data.render import ChatRenderer
from rpft.data.sources import RawRow, Source
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
        (kinds.ALWAYS_PROMPTS, ["Yo there<|im_end|>", "Pong<|im_end|>"]),
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


def test_a_call_beside_a_null_is_printed_by_a_template_that_wants_text_there(make_tokenizer, trained):
    template = kinds.CHATML_TOOLS.replace("(message.content or '')", "message.content | trim")
    template = template.replace(
        "{{ '<|im_start|>", "{% if '</think>' in message.content %}{% endif %}{{ '<|im_start|>"
    )
    row = chat("U Ping", "A ", "T 2", "A Two")
    row["messages"][1] = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    assert trained(row, make_tokenizer(template))[0] == ['<call>{"name": "add"}</call><|im_end|>', "Two<|im_end|>"]


def test_blanks_that_a_special_token_takes_from_an_answer_do_not_train_it(make_tokenizer, trained):
    tokenizer = make_tokenizer(
        kinds.CHATML.replace("'<|im_start|>' + message['role'] + '\n'", "'<|' + message['role'] + '|>\n'")
    )
    header = AddedToken("<|assistant|>", rstrip=True, special=True, normalized=False)
    tokenizer.add_tokens([header], special_tokens=True)
    assert trained(chat("U Hi", "A  Yo"), tokenizer)[0] == ["Yo<|im_end|>"]


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


# --- completions, arguments as text, what a template leaves out


def test_a_completion_is_all_that_is_said_after_the_last_question(make_tokenizer, trained):
    row = chat("U Hello", "A Yo", "U Ping", "A Pong", "T 2", "A Two")
    pieces, _ = trained(row, make_tokenizer(kinds.CHATML), train_on="completion")
    assert pieces == ["Pong<|im_end|>", "Two<|im_end|>"]


def test_a_row_with_a_completion_of_its_own_says_where_it_starts(make_tokenizer, trained):
    messages = chat("U Hello", "A Yo", "U Ping", "A Pong")["messages"]
    row = {"prompt": messages[:1], "completion": messages[1:]}
    tokenizer = make_tokenizer(kinds.CHATML)
    assert trained(row, tokenizer, train_on="completion")[0] == ["Yo<|im_end|>", "Pong<|im_end|>"]
    row = {"prompt": messages[:3], "completion": messages[3:]}
    assert trained(row, tokenizer, train_on="completion")[0] == ["Pong<|im_end|>"]
    assert trained(row, tokenizer)[0] == ["Yo<|im_end|>", "Pong<|im_end|>"]


def test_the_completion_of_plain_texts_is_trained_with_its_end(make_tokenizer, trained):
    row = {"prompt": "Ping", "completion": " Pong"}
    tokenizer = make_tokenizer()
    assert trained(row, tokenizer)[0] == [" Pong<|endoftext|>"]
    assert trained(row, tokenizer)[1] == "Ping Pong<|endoftext|>"
    assert trained(row, tokenizer, train_on="all")[1] == "Ping Pong<|endoftext|>"
    assert trained({**row, "prompt": "Hi Ping"}, tokenizer, train_on="all")[0][0].endswith(
        " Ping Pong<|endoftext|>"
    )


@pytest.mark.parametrize("arguments", ['{"x": 1, "é": "q\\"q"}', '{"zip": "00701"}'])
def test_arguments_that_are_json_text_are_not_encoded_twice(make_tokenizer, trained, arguments):
    row = chat("U Ping", "A ", "T 2", "A Two")
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    row["messages"][1] = {"role": "assistant", "content": None, "tool_calls": [call]}
    pieces, _ = trained(row, make_tokenizer(kinds.CHATML_TOOLS))
    assert pieces[0] == f'<call>{{"name": "add", "arguments": {arguments}}}</call><|im_end|>'


def test_arguments_stay_text_where_the_template_prints_them_so(make_tokenizer, trained):
    template = kinds.CHATML_TOOLS.replace("call.function | tojson", "call.function.name + call.function.arguments")
    row = chat("U Ping", "A ")
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x":1}'}}
    row["messages"][1] = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert trained(row, make_tokenizer(template))[0] == ['<call>add{"x":1}</call><|im_end|>']


def test_an_answer_that_the_template_leaves_out_is_refused(make_tokenizer, refusal):
    template = "{% for m in messages %}<|im_start|>{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
    template += "{% else %}{{ m.content[:4] }}{% endif %}<|im_end|>{% endfor %}"
    tokenizer = make_tokenizer(template)
    assert "leaves out or changes what the assistant says" in refusal(chat("U Hi", "A Hello"), tokenizer)
    row = chat("U Hi", "A Yo")
    row["messages"][1]["tool_calls"] = [{"function": {"name": "add", "arguments": {}}}]
    assert "beside a tool call" in refusal(row, tokenizer)


# --- long chats: most turns are found by what stands around the first two


def derived(row, tokenizer, template):
    """The spans of a long chat, those that a prefix for every turn gives, and the renderings of the former."""
    parsed = parse_row(RawRow("f:1", row), "messages")
    renderer = ChatRenderer(tokenizer, template)
    specials = [token.content for token in tokenizer.added_tokens_decoder.values()]
    count = 0
    render = renderer.render

    def counted(*words, **keys):
        nonlocal count
        count += 1
        return render(*words, **keys)

    renderer.render = counted
    text, spans = render_with_spans(parsed, "assistant", renderer, specials, "f:1")
    taken = count
    answers = [i for i, m in enumerate(parsed.messages) if m["role"] == "assistant" and parsed.trainable[i]]
    return spans, [_derive(i, text, parsed, renderer, specials, "f:1") for i in answers], taken


@pytest.mark.parametrize(
    "template", [kinds.CHATML, kinds.HEADERS, kinds.NO_SYSTEM, kinds.THINKING, kinds.END_AT_END, kinds.CHANNELS]
)
def test_the_turns_of_a_long_chat_are_found_with_few_renderings(make_tokenizer, template):
    turns = [f"{'UA'[i % 2]} {['Ping', ' Pong ', 'user', 'é'][i % 4]} {i}" for i in range(40)]
    spans, exact, taken = derived(chat(*turns), make_tokenizer(), template)
    assert spans == exact
    assert len(spans) == 20
    assert taken <= 10


def test_turns_of_one_role_in_a_row_and_answers_left_out_need_few_renderings(make_tokenizer):
    turns = [f"{'UUUAAUAUUA'[i % 10]} said {i}" for i in range(200)] + ["A said last"]
    row = chat(*turns)
    for message in row["messages"][3::30]:
        if message["role"] == "assistant":
            message["train"] = False
    spans, exact, taken = derived(row, make_tokenizer(), kinds.CHATML)
    assert spans == exact
    assert taken <= 20


@given(
    said=st.lists(
        st.sampled_from(["a", " a ", "user", "<|im_end|>", "<|im_end|>\n<|im_start|>user\na", "\n"]),
        min_size=8,
        max_size=14,
    ),
    template=st.sampled_from([kinds.CHATML, kinds.HEADERS, kinds.END_AT_END, kinds.LINES]),
    data=st.data(),
)
@settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_text_that_looks_like_a_turn_does_not_mislead(make_tokenizer, said, template, data):
    """Messages that hold the template's own words, and tool turns among them."""
    assume(any(text.strip() for text in said[1::2]))  # else there is nothing to learn, and the chat is dropped
    turns = [f"{'UA'[i % 2]} {text}" for i, text in enumerate(said)]
    if data.draw(st.booleans()):
        turns.insert(1, "U b")
        turns.insert(data.draw(st.integers(2, len(turns) - 1)), "A b")
    if data.draw(st.booleans()):
        turns.insert(data.draw(st.integers(1, len(turns) - 1)), "T 2")
    spans, exact, _ = derived(chat(*turns), _one_tokenizer(make_tokenizer), template)
    assert spans == exact


@pytest.mark.parametrize("template", [kinds.CHATML, kinds.LINES])
def test_an_answer_that_is_the_text_of_the_end_token_ends_where_others_do(make_tokenizer, template):
    turns = ["U a", "A a", "U a", "A a", "U a", "A <|im_end|>", "U a", "A a"]
    spans, exact, _ = derived(chat(*turns), make_tokenizer(), template)
    assert spans == exact
    lengths = [end - start for start, end in spans]
    assert lengths[2] - lengths[1] == len("<|im_end|>") - len("a")


_made = []


def _one_tokenizer(make_tokenizer):
    if not _made:
        _made.append(make_tokenizer())
    return _made[0]
