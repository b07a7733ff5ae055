"""Rows of every format become the same chats; what does not fit is refused by line."""

from typing import Any

import pytest

from rpft.data.formats import Chat, Completion, Dropped, Pair, Tokens, detect_format, parse_row
from rpft.data.sources import RawRow
from rpft.errors import UserError


def parse(value, format: Any = "messages") -> Any:
    return parse_row(RawRow("rows.jsonl:7", value), format)


def refusal(value, format="messages"):
    with pytest.raises(UserError) as caught:
        parse(value, format)
    assert "rows.jsonl:7" in str(caught.value)
    return str(caught.value)


def one(**message):
    return {"messages": [{"role": "user", "content": "q"}, message]}


PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("value", "format"),
    [
        ({"messages": [], "text": "x"}, "messages"),
        ({"conversations": []}, "messages"),
        ({"instruction": "i", "output": "o"}, "alpaca"),
        ({"text": "x", "id": 3}, "text"),
    ],
)
def test_the_keys_tell_the_format(value, format):
    assert detect_format(RawRow("f:1", value)) == format


def test_unknown_keys_are_named():
    with pytest.raises(UserError, match=r"f:1: .*answer, question"):
        detect_format(RawRow("f:1", {"question": "x", "answer": "y"}))


def test_sharegpt_speakers_become_roles():
    row = {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"},
            {"from": "observation", "value": "o"},
            {"from": "tool", "value": "t"},
        ]
    }
    assert [message["role"] for message in parse(row).messages] == ["system", "user", "assistant", "tool", "tool"]
    assert all("from" not in message and "value" not in message for message in parse(row).messages)


def test_an_unknown_speaker_is_an_error_with_file_and_line():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "bing", "value": "b"}]}
    message = refusal(row)
    assert "'bing'" in message
    assert "conversations[1]" in message


def test_function_calls_of_sharegpt_are_refused_with_the_way_out():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{}"}]}
    assert "tool_calls" in refusal(row)


def test_messages_under_conversations_are_read_too():
    assert parse({"conversations": PAIR}).messages == PAIR


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"text": "x"}, "has the keys text"),
        ({"messages": []}, "not empty"),
        ({"messages": "hi"}, "list"),
        ({"messages": ["hi"]}, "must be an object"),
        ({"messages": PAIR, "tools": "x"}, "tools"),
        (one(role="Assistant", content="a"), "unknown role 'Assistant'"),
        (one(content="a"), "unknown role None"),
        (one(role="user", content=None), "must be text"),
        (one(role="assistant", content=5), "must be text, not int"),
        (one(role="assistant", content=["a"]), "must be text, not list"),
        (one(role="assistant", content="a", train="no"), "`train`"),
        (one(role="user", content="a", train=True), "train_on: all"),
        (one(role="user", content="a", tool_calls=[]), "tool_calls"),
        (one(role="assistant", tool_calls=["add"]), "tool_calls"),
    ],
)
def test_a_message_that_does_not_fit_is_refused(value, said):
    assert said in refusal(value)


def test_parts_of_text_are_joined_and_others_refused_by_name():
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse(one(role="assistant", content=text)).messages[1]["content"] == "ab"
    assert "image_url" in refusal(one(role="assistant", content=[*text, {"type": "image_url", "image_url": {}}]))
    assert "`text`" in refusal(one(role="assistant", content=[{"type": "text"}]))


def test_tool_calls_and_tool_answers_pass_through_unchanged():
    call = {"function": {"name": "add", "arguments": {"zip": "00701", "x": None, "when": "2024-01-02"}}}
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": {"sum": 2}, "name": "add"},
            {"role": "assistant", "content": "Two"},
        ],
        "tools": [{"name": "add"}],
    }
    chat = parse(row)
    assert isinstance(chat, Chat)
    assert chat.messages[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert chat.messages[2] == row["messages"][2]
    assert chat.tools == row["tools"]
    assert chat.trainable == [True, True, True, True]


def test_null_keys_of_a_message_are_absent():
    row = {
        "messages": [{**PAIR[0], "tool_calls": None, "train": None}, {**PAIR[1], "tool_calls": None, "name": None}]
    }
    assert parse(row).messages == PAIR


def test_train_false_is_kept_and_taken_out_of_the_message():
    chat = parse({"messages": [PAIR[0], {**PAIR[1], "train": False}, *PAIR]})
    assert chat.messages == [*PAIR, *PAIR]
    assert chat.trainable == [True, False, True, True]


def test_alpaca_becomes_a_pair():
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    assert [m["content"] for m in parse(row, "alpaca").messages] == ["Add\n\n1 2", "3"]


@pytest.mark.parametrize("row", [{"input": None}, {"input": ""}, {}])
def test_an_absent_input_leaves_the_instruction_alone(row):
    chat = parse({"instruction": "a", "output": "b", **row}, "alpaca")
    assert chat.messages[0] == {"role": "user", "content": "a"}


@pytest.mark.parametrize("output", ["", " \n", None])
def test_an_empty_output_is_dropped(output):
    assert parse({"instruction": "a", "output": output}, "alpaca") == Dropped("empty answer")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"instruction": "a"}, "needs the key `output`"),
        ({"output": "a"}, "needs the key `instruction`"),
        ({"instruction": 5, "output": "a"}, "must be text"),
        ({"instruction": "a", "input": ["x"], "output": "b"}, "must be text"),
    ],
)
def test_an_alpaca_row_that_does_not_fit_is_refused(row, said):
    assert said in refusal(row, "alpaca")


def test_rows_with_nothing_to_say_are_dropped():
    assert parse({"messages": PAIR[:1]}) == Dropped("no assistant turn")
    assert parse(one(role="assistant", content="")) == Dropped("empty answer")
    assert parse({"text": ""}, "text") == Dropped("empty text")
    assert parse({"text": None}, "text") == Dropped("empty text")


def test_an_empty_answer_among_others_is_not_trained():
    chat = parse({"messages": [PAIR[0], {"role": "assistant", "content": ""}, *PAIR]})
    assert chat.trainable == [True, False, True, True]


# --- prompt and completion, tokens, preference pairs

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("value", "format"),
    [
        ({"prompt": "p", "completion": "c"}, "prompt_completion"),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "preference"),
        ({"input_ids": [1], "text": "x"}, "tokens"),
    ],
)
def test_the_keys_tell_the_further_formats(value, format):
    assert detect_format(RawRow("f:1", value)) == format


def test_unknown_columns_are_told_how_they_can_be_named():
    with pytest.raises(UserError, match=r"columns.*instruction: question"):
        detect_format(RawRow("f:1", {"question": "x", "answer": "y"}))


def test_a_completion_of_texts_and_of_messages():
    assert parse({"prompt": "p", "completion": " c"}, "prompt_completion") == Completion("p", " c")
    assert parse({"prompt": None, "completion": "c"}, "prompt_completion") == Completion("", "c")
    chat = parse({"prompt": [*PAIR, USER], "completion": [ANSWER]}, "prompt_completion")
    assert chat.messages == [*PAIR, USER, ANSWER]
    assert chat.completion_from == 3


@pytest.mark.parametrize("completion", ["", " ", None, [USER], [{"role": "assistant", "content": ""}]])
def test_a_completion_that_says_nothing_is_dropped(completion):
    prompt = PAIR if isinstance(completion, list) else "p"
    assert isinstance(parse({"prompt": prompt, "completion": completion}, "prompt_completion"), Dropped)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "p"}, "`completion`"),
        ({"completion": "c"}, "`prompt`"),
        ({"prompt": "p", "completion": [ANSWER]}, "both be"),
        ({"prompt": 5, "completion": "c"}, "must be text"),
        ({"prompt": ["p"], "completion": [ANSWER]}, "prompt[0]"),
    ],
)
def test_a_completion_that_does_not_fit_is_refused(row, said):
    assert said in refusal(row, "prompt_completion")


def test_tokens_with_and_without_marks():
    assert parse({"input_ids": [1, 2]}, "tokens") == Tokens([1, 2], None)
    assert parse({"input_ids": [1, 2], "labels": [-100, 2]}, "tokens") == Tokens([1, 2], [False, True])
    assert parse({"input_ids": [1, 2], "completion_mask": [0, 1]}, "tokens") == Tokens([1, 2], [False, True])
    assert parse({"input_ids": []}, "tokens") == Dropped("empty text")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": [1, 2], "labels": [2, -100]}, "the shift by one is done here"),
        ({"input_ids": [1, 2], "labels": [2]}, "has 1 entries"),
        ({"input_ids": [1], "labels": [1], "completion_mask": [1]}, "both say"),
        ({"input_ids": [1.0]}, "whole numbers"),
        ({"input_ids": [True]}, "whole numbers"),
        ({"input_ids": "1"}, "whole numbers"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(row, said):
    assert said in refusal(row, "tokens")


def test_pairs_have_one_prompt_and_two_answers():
    pair = parse({"prompt": "p", "chosen": "c", "rejected": "r"}, "preference")
    assert pair == Pair(Completion("p", "c"), Completion("p", "r"))
    pair = parse({"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}]}, "preference")
    assert [side.completion_from for side in (pair.chosen, pair.rejected)] == [1, 1]
    whole = parse({"chosen": [*PAIR, USER, ANSWER], "rejected": [*PAIR, USER, ANSWER]}, "preference")
    assert whole.chosen.completion_from == 3
    assert isinstance(parse({"prompt": "p", "chosen": "c", "rejected": ""}, "preference"), Dropped)


def test_a_pair_of_texts_without_a_prompt_is_refused():
    assert "`prompt`" in refusal({"chosen": "c", "rejected": "r"}, "preference")


@pytest.mark.parametrize("key", ["images", "image", "audio", "videos"])
def test_rows_with_media_are_refused_by_name(key):
    assert f"`{key}`" in refusal({"messages": PAIR, key: ["a.png"]})
    assert parse({"messages": PAIR, key: None}).messages == PAIR
    assert parse({"messages": PAIR, key: []}).messages == PAIR


def test_function_calls_of_sharegpt_become_tool_calls():
    turn = {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1, "zip": "00701"}}'}
    chat = parse({"conversations": [{"from": "human", "value": "q"}, turn, {"from": "gpt", "value": "a"}]})
    assert chat.messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "zip": "00701"}}}
    ]
    assert chat.messages[1]["content"] is None


def test_the_system_of_an_alpaca_row_is_a_message():
    chat = parse({"system": "s", "instruction": "i", "output": "o"}, "alpaca")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]


def test_a_system_text_and_tools_as_text_beside_the_turns_are_read():
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat = parse(
        {
            "system": "s",
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            "tools": '[{"type": "function", "function": {"name": "add"}}]',
        }
    )
    assert chat.messages[0] == {"role": "system", "content": "s"}
    assert chat.tools == tools
    assert parse({"messages": PAIR, "system": "", "tools": ""}).messages == PAIR
    assert "keep one of them" in refusal({"messages": [{"role": "system", "content": "x"}, *PAIR], "system": "s"})
    assert "rows.jsonl:7, tools: not JSON" in refusal({"messages": PAIR, "tools": "add"})
