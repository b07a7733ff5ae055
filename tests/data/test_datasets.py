"""What becomes of every row of a file: tokens, begin and end tokens, cuts, drops, and the report."""

import chat_kinds as kinds
import pytest
from chat_kinds import chat

from rpft.data.dataset import DataSettings, explain_row, load_dataset
from rpft.data.sources import Source
from rpft.errors import UserError

PAIR = chat("U Ping", "A Pong")


@pytest.fixture
def load(write):
    def load(content, tokenizer, max_seq_len=500, source=None, **settings):
        source = {"path": write(content), **(source or {})}
        return load_dataset([Source(**source)], tokenizer, DataSettings(max_seq_len, **settings))

    return load


@pytest.mark.parametrize("adds_begin", [False, True])
@pytest.mark.parametrize("template", [kinds.HEADERS, kinds.CHATML])
def test_the_begin_token_stands_once_at_index_0(make_tokenizer, load, template, adds_begin):
    tokenizer = make_tokenizer(template, adds_begin=adds_begin)
    ids = load([PAIR], tokenizer).rows[0].ids.tolist()
    wanted = adds_begin or template == kinds.HEADERS
    assert ids.count(tokenizer.bos_token_id) == wanted
    assert (ids[0] == tokenizer.bos_token_id) == wanted


@pytest.mark.parametrize("adds_begin", [False, True])
@pytest.mark.parametrize("text", ["Hello", "<s>Hello", "Hello<|endoftext|>"])
def test_a_text_row_has_one_begin_token_and_one_end_token(make_tokenizer, load, adds_begin, text):
    tokenizer = make_tokenizer(adds_begin=adds_begin)
    row = load([{"text": text}], tokenizer).rows[0]
    begin = [tokenizer.bos_token_id] if adds_begin or text.startswith("<s>") else []
    hello = tokenizer("Hello", add_special_tokens=False).input_ids
    assert row.ids.tolist() == [*begin, *hello, tokenizer.eos_token_id]
    assert row.trained.tolist() == [False] + [True] * (len(row.ids) - 1)


def test_text_rows_need_no_chat_template_and_chats_do(make_tokenizer, load):
    assert load([{"text": "Hello"}], make_tokenizer()).tokens > 0
    with pytest.raises(UserError, match=r"data\.chat_template"):
        load([PAIR], make_tokenizer())
    assert load([PAIR], make_tokenizer(), chat_template=kinds.CHATML).trained_tokens > 0


def test_a_template_from_the_settings_goes_before_the_tokenizers_own(make_tokenizer, load):
    given = load([PAIR], make_tokenizer(kinds.HEADERS), chat_template=kinds.CHATML).rows[0]
    own = load([PAIR], make_tokenizer(kinds.CHATML)).rows[0]
    assert given.ids.tolist() == own.ids.tolist()


def test_a_template_that_is_not_jinja_names_its_line(make_tokenizer, load):
    with pytest.raises(UserError, match="not valid jinja, line 2"):
        load([PAIR], make_tokenizer("\n{% for %}"))


def test_an_end_of_text_token_is_asked_for_by_text_rows_only(make_tokenizer, load):
    tokenizer = make_tokenizer(kinds.CHATML)
    tokenizer.eos_token = None
    assert load([PAIR], tokenizer).trained_tokens > 0
    with pytest.raises(UserError, match="eos_token"):
        load([{"text": "Hello"}], tokenizer)


def test_a_slow_tokenizer_is_refused(load):
    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="slow tokenizer"):
        load([{"text": "a"}], Slow())


def test_a_prompt_longer_than_the_limit_is_dropped_and_counted(make_tokenizer, load):
    long = chat("U " + "Ping " * 40, "A Pong")
    dataset = load([PAIR, long], make_tokenizer(kinds.CHATML), max_seq_len=40)
    report = dataset.reports[0]
    assert (report.rows, report.trained_rows, len(dataset.rows)) == (2, 1, 1)
    assert report.dropped == {"longer than max_seq_len": 1}


def test_a_run_without_a_trainable_row_is_refused_before_it_starts(make_tokenizer, load):
    with pytest.raises(UserError, match=r"2 dropped: longer than max_seq_len(.|\n)*raise data\.max_seq_len"):
        load([PAIR, PAIR], make_tokenizer(kinds.CHATML), max_seq_len=8)
    with pytest.raises(UserError, match="1 dropped: no assistant turn"):
        load([chat("U Ping")], make_tokenizer(kinds.CHATML))
    untrained = chat("U Ping", "A Pong")
    untrained["messages"][1]["train"] = False
    with pytest.raises(UserError, match="1 dropped: no trained token"):
        load([untrained], make_tokenizer(kinds.CHATML))


def test_a_mark_that_is_never_reached_trains_nothing_and_is_refused(make_tokenizer, load):
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'model' %}{% generation %}x{% endgeneration %}"
    )
    with pytest.raises(UserError, match="1 dropped: no trained token"):
        load([PAIR], make_tokenizer(template + "{% endif %}{% endfor %}"))


def test_a_row_as_long_as_the_limit_is_kept_whole(make_tokenizer, load):
    tokenizer = make_tokenizer(kinds.CHATML)
    length = load([PAIR], tokenizer).tokens
    assert load([PAIR], tokenizer, max_seq_len=length, truncation="error").tokens == length
    with pytest.raises(
        UserError, match=rf"rows\.jsonl:1: the row has {length} tokens.*max_seq_len is {length - 1}"
    ):
        load([PAIR], tokenizer, max_seq_len=length - 1, truncation="error")


def test_a_row_cut_on_the_right_is_not_taught_to_end_there(make_tokenizer, load):
    tokenizer = make_tokenizer(kinds.CHATML)
    row = [chat("U Ping", "A Pong Hello there Hello there")]
    whole = load(row, tokenizer).rows[0]
    limit = int(whole.trained.argmax()) + 3
    dataset = load(row, tokenizer, max_seq_len=limit, truncation="right")
    cut = dataset.rows[0]
    assert cut.ids.tolist() == whole.ids[:limit].tolist()
    assert cut.trained.tolist() == whole.trained[:limit].tolist()
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert not ends & set(cut.ids[cut.trained].tolist())
    assert dataset.reports[0].cut == 1


def test_a_cut_text_row_loses_its_end_token(make_tokenizer, load):
    tokenizer = make_tokenizer()
    row = load([{"text": "Hello there Hello there"}], tokenizer, max_seq_len=3, truncation="right").rows[0]
    assert len(row.ids) == 3
    assert tokenizer.eos_token_id not in row.ids


def test_a_cut_that_leaves_nothing_to_train_drops_the_row(make_tokenizer, load):
    tokenizer = make_tokenizer(kinds.CHATML)
    rows = [PAIR, chat("U " + "Ping " * 40, "A Pong")]
    report = load(rows, tokenizer, max_seq_len=30, truncation="right").reports[0]
    assert report.dropped == {"no trained token left after the cut": 1}


@pytest.mark.parametrize("adds_begin", [False, True])
def test_a_row_cut_on_the_left_keeps_its_begin_token_and_its_end(make_tokenizer, load, adds_begin):
    tokenizer = make_tokenizer(kinds.CHATML, adds_begin=adds_begin)
    row = [chat("U " + "Ping " * 40, "A Pong")]
    whole = load(row, tokenizer).rows[0]
    cut = load(row, tokenizer, max_seq_len=10, truncation="left").rows[0]
    kept = 9 if adds_begin else 10
    assert cut.ids[-kept:].tolist() == whole.ids[-kept:].tolist()
    assert cut.trained[-kept:].tolist() == whole.trained[-kept:].tolist()
    assert len(cut.ids) == 10
    assert (cut.ids[0] == tokenizer.bos_token_id) == adds_begin


def test_the_first_token_of_a_row_is_never_trained(make_tokenizer, load):
    row = load([{"text": "Hello there Hello"}], make_tokenizer(), max_seq_len=3, truncation="left").rows[0]
    assert row.trained.tolist() == [False, True, True]


def test_a_tail_after_the_last_answer_is_trimmed_and_counted(make_tokenizer, load):
    tokenizer = make_tokenizer(kinds.CHATML)
    dataset = load([chat("U Ping", "A Pong", "U Hello"), PAIR], tokenizer)
    assert dataset.rows[0].ids.tolist() == dataset.rows[1].ids.tolist()
    assert dataset.reports[0].trimmed == 1
    assert dataset.reports[0].trained_rows == 2


def test_an_empty_output_is_counted_and_a_null_input_renders_without_none(make_tokenizer, load):
    rows = [{"instruction": "a", "output": ""}, {"instruction": "a", "input": None, "output": "b"}]
    tokenizer = make_tokenizer(kinds.CHATML)
    dataset = load(rows, tokenizer)
    assert dataset.reports[0].dropped == {"empty answer": 1}
    assert "None" not in tokenizer.decode(dataset.rows[0].ids.tolist())


def test_the_report_counts_every_row_once(make_tokenizer, load):
    rows = [PAIR, chat("U Ping"), chat("U Ping", "A "), chat("U " + "Ping " * 99, "A Pong"), PAIR]
    dataset = load(rows, make_tokenizer(kinds.CHATML), max_seq_len=60)
    report = dataset.reports[0]
    assert report.format == "messages"
    assert report.rows == 5 == report.trained_rows + sum(report.dropped.values())
    assert report.dropped == {"no assistant turn": 1, "empty answer": 1, "longer than max_seq_len": 1}
    assert dataset.tokens == sum(len(row.ids) for row in dataset.rows)
    assert dataset.trained_tokens == sum(int(row.trained.sum()) for row in dataset.rows)


def test_sources_keep_their_order_and_their_own_formats(make_tokenizer, write):
    tokenizer = make_tokenizer(kinds.CHATML)
    alpaca = write([{"instruction": "Ping", "output": "Pong"}] * 300, "a.jsonl")
    text = write([{"text": "Hello"}, {"text": "Hi"}], "b.jsonl")
    dataset = load_dataset(
        [Source(text, max_rows=1), Source(alpaca), Source(text, format="text")], tokenizer, DataSettings(99)
    )
    assert [report.format for report in dataset.reports] == ["text", "alpaca", "text"]
    assert [report.rows for report in dataset.reports] == [1, 300, 2]
    assert len(dataset.rows) == 303
    assert dataset.rows[0].ids.tolist() == dataset.rows[301].ids.tolist()
    assert {tuple(row.ids.tolist()) for row in dataset.rows[1:301]} == {tuple(dataset.rows[1].ids.tolist())}


def test_a_later_row_of_another_format_is_an_error_with_its_line(make_tokenizer, load):
    with pytest.raises(UserError, match=r"rows\.jsonl:2: .*format text needs the key `text`"):
        load([{"text": "a"}, PAIR], make_tokenizer(kinds.CHATML))


def test_a_format_that_the_recipe_names_is_not_guessed(make_tokenizer, load):
    rows = [{**PAIR, "text": "Hello"}]
    tokenizer = make_tokenizer(kinds.CHATML)
    assert load(rows, tokenizer).reports[0].format == "messages"
    named = load(rows, tokenizer, source={"format": "text"})
    assert tokenizer.decode(named.rows[0].ids.tolist()) == "Hello<|endoftext|>"


def test_half_a_character_is_refused_by_line(make_tokenizer, load):
    with pytest.raises(UserError, match=r"rows\.jsonl:2: .*ud83d"):
        load(b'{"text":"\\ud83d\\ude00"}\n{"text":"\\ud83d"}\n', make_tokenizer())


def test_every_row_is_the_same_alone_and_among_others(make_tokenizer, load):
    tokenizer = make_tokenizer(kinds.HEADERS)
    rows = [chat("U " + "Hello " * i, "A " + "Pong " * (i % 5 + 1)) for i in range(300)]
    together = load(rows, tokenizer, max_seq_len=2000).rows
    for index in (0, 255, 256, 299):
        alone = load([rows[index]], tokenizer, max_seq_len=2000).rows[0]
        assert alone.ids.tolist() == together[index].ids.tolist()
        assert alone.trained.tolist() == together[index].trained.tolist()


def test_explain_row_shows_the_tokens_that_are_trained(make_tokenizer, write):
    tokenizer = make_tokenizer(kinds.CHATML)
    source = Source(write([chat("U Hello", "A Yo"), PAIR, chat("U Hi")]))
    tokens = explain_row(source, 1, tokenizer, DataSettings(99))
    row = load_dataset([source], tokenizer, DataSettings(99)).rows[1]
    assert [token for token, _, _ in tokens] == row.ids.tolist()
    assert [flag for _, _, flag in tokens] == row.trained.tolist()
    assert "".join(text for _, text, _ in tokens) == tokenizer.apply_chat_template(
        PAIR["messages"], tokenize=False
    )
    with pytest.raises(UserError, match="has 3 rows"):
        explain_row(source, 3, tokenizer, DataSettings(99))
    with pytest.raises(UserError, match="not trained on: no assistant turn"):
        explain_row(source, 2, tokenizer, DataSettings(99))
