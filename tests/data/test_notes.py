"""What is unusual about rows that are kept is counted, with places; tokens and pairs meet the same checks."""

import chat_kinds as kinds
import pytest
from chat_kinds import chat

from rpft.data.dataset import DataSettings, find_row, load_dataset, load_pairs
from rpft.data.sources import Source
from rpft.errors import UserError

USER = {"role": "user", "content": "Ping"}


def answer(text):
    return {"role": "assistant", "content": text}


def pair(chosen, rejected):
    return {"prompt": [USER], "chosen": [answer(chosen)], "rejected": [answer(rejected)]}


def test_dropped_and_cut_rows_are_listed_by_place_up_to_a_few(make_tokenizer, write):
    path = write([chat("U Hi", "A Yo"), *[chat("U Ping", "A ")] * 7, chat("U Ping", "A " + "Pong " * 30)])
    settings = DataSettings(40, truncation="right")
    report = load_dataset([Source(path)], make_tokenizer(kinds.CHATML), settings).reports[0]
    assert report.dropped == {"empty answer": 7}
    assert report.places == {"empty answer": [f"{path}:{i}" for i in range(2, 7)], "cut": [f"{path}:9"]}


def test_text_that_writes_a_special_token_is_counted(make_tokenizer, write):
    path = write([chat("U Hi", "A Yo"), chat("U Hi<|im_end|>", "A <|im_start|>"), chat("U <|im|>", "A Yo")])
    report = load_dataset([Source(path)], make_tokenizer(kinds.CHATML), DataSettings(99)).reports[0]
    assert list(report.notes.values()) == [2]
    assert list(report.places.values()) == [[f"{path}:2"]]


def test_rows_of_tokens_are_taken_as_they_are(make_tokenizer, write):
    tokenizer = make_tokenizer()
    rows = [{"input_ids": [9, 8, 7]}, {"input_ids": [9, 8, 7], "labels": [-100, -100, 7]}, {"input_ids": [5]}]
    data = load_dataset([Source(write(rows))], tokenizer, DataSettings(99))
    assert [row.ids.tolist() for row in data.rows] == [[9, 8, 7], [9, 8, 7]]
    assert [row.trained.tolist() for row in data.rows] == [[False, True, True], [False, False, True]]
    assert data.reports[0].dropped == {"no trained token": 1}
    assert data.reports[0].format == "tokens"


@pytest.mark.parametrize("wrong", [-1, 100_000, 2**40])
def test_tokens_of_another_tokenizer_are_refused_by_line(make_tokenizer, write, wrong):
    path = write([{"input_ids": [1]}, {"input_ids": [1, wrong]}])
    with pytest.raises(UserError, match=rf"rows\.jsonl:2: input_ids holds {wrong}.*another tokenizer"):
        load_dataset([Source(path)], make_tokenizer(), DataSettings(99))


def test_tokens_and_texts_may_stand_beside_each_other(make_tokenizer, write):
    texts, tokens = write([{"text": "Hi"}], "a.jsonl"), write([{"input_ids": [1, 2]}], "b.jsonl")
    data = load_dataset([Source(texts), Source(tokens)], make_tokenizer(), DataSettings(99))
    assert [report.format for report in data.reports] == ["text", "tokens"]
    assert len(data.rows) == 2


def test_both_sides_of_a_pair_train_their_answer_after_the_same_prompt(make_tokenizer, write):
    tokenizer = make_tokenizer(kinds.CHATML)
    source = Source(write([pair("Pong", "Hello there"), {**pair("a", "b"), "rejected": [answer("")]}]))
    ((chosen, rejected),) = load_pairs([source], tokenizer, DataSettings(99))
    prompt = int(chosen.trained.argmax())
    assert rejected.trained.argmax() == prompt
    assert chosen.ids[:prompt].tolist() == rejected.ids[:prompt].tolist()
    assert tokenizer.decode(chosen.ids[chosen.trained].tolist()) == "Pong<|im_end|>"
    assert tokenizer.decode(rejected.ids[rejected.trained].tolist()) == "Hello there<|im_end|>"


def test_a_pair_is_dropped_whole_and_counted_once(make_tokenizer, write):
    source = Source(write([pair("Pong", "Pong " * 50), pair("Pong", "Yo")]))
    data = load_dataset([source], make_tokenizer(kinds.CHATML), DataSettings(40))
    report = data.reports[0]
    assert (report.rows, report.trained_rows, report.dropped) == (2, 1, {"longer than max_seq_len": 1})
    assert len(data.rows) == 2
    assert report.tokens == sum(len(row.ids) for row in data.rows)
    assert len(find_row(source, 1, make_tokenizer(kinds.CHATML), DataSettings(40))[1]) == 2


def test_other_rows_are_no_pairs(make_tokenizer, write):
    with pytest.raises(UserError, match="not preference pairs"):
        list(load_pairs([Source(write([chat("U Hi", "A Yo")]))], make_tokenizer(kinds.CHATML), DataSettings(99)))
