"""Over generated chats: what is trained is what the assistant says, all of it, and nothing else."""

import chat_kinds as kinds
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpft.data.encode import _overlaps, _trained
from rpft.data.loader import DataSettings, RowLoader
from rpft.data.report import SourceReport
from rpft.data.sources import Source, Unread
from rpft.data.templates import read_template
from rpft.data.token_bytes import TokenBytes

# What is said stands between « and », which no generated text holds.
WORDS = st.text(
    alphabet=st.sampled_from("ab é漢😀\n\t.<|>/[]{}\"'\\0 \u2028\u00a0"), min_size=1, max_size=12
).filter(lambda text: text.strip())


ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<think>\n\n</think>")


@st.composite
def chats(draw):
    """Turns of user and assistant in any number, some with a system message, some marked not to be trained."""
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": "«" + draw(WORDS) + "»"})
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": "«" + draw(WORDS) + "»"})
        answer = {"role": "assistant", "content": "«" + draw(WORDS) + "»"}
        if draw(st.integers(0, 3)) == 0:
            answer["train"] = False
        messages.append(answer)
    return messages


@pytest.fixture
def loaders(make_tokenizer):
    """Loaders by template, with the tokenizer of the other tests."""
    templates = {
        "marked": kinds.MARKED,
        "headers": kinds.HEADERS,
        "chatml": kinds.CHATML,
        "end at end": kinds.END_AT_END,
        **{name: read_template(name) for name in ("llama3", "gemma", "mistral", "phi", "qwen3")},
    }
    tokenizer = make_tokenizer()
    return {
        (name, train_on): RowLoader(tokenizer, DataSettings(5000, train_on=train_on, chat_template=template))
        for name, template in templates.items()
        for train_on in ("assistant", "last_assistant", "completion", "all")
    }


@pytest.mark.parametrize(
    "name", ["marked", "headers", "chatml", "end at end", "llama3", "gemma", "mistral", "phi", "qwen3"]
)
@given(messages=chats(), train_on=st.sampled_from(["assistant", "last_assistant", "completion", "all"]))
@settings(
    max_examples=25, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_character_of_a_trained_answer_is_trained_and_no_other_one(loaders, name, messages, train_on):
    loader = loaders[name, train_on]
    answers = [m for m in messages if m["role"] == "assistant"]
    asked = answers if train_on in ("assistant", "all") else answers[-1:]
    expected = [m["content"] for m in asked if m.get("train") is not False]
    if train_on == "all":
        left_out = [m["content"] for m in messages if m.get("train") is False]
        expected = [m["content"] for m in messages if m["content"] not in left_out]
        if len({m["content"] for m in messages}) < len(messages):
            return  # equal texts cannot be told apart in the rendering
    report = SourceReport("f")
    kept = loader.rows([Unread("f:1", {"messages": messages})], 0, Source("f"), report)
    if not expected:
        assert kept == []
        assert report.dropped == {"no trained token": 1}
        return
    ((_, row),) = kept
    decode = loader.encoder._tokenizer.decode
    trained = decode(row.ids[row.trained].tolist(), clean_up_tokenization_spaces=False)
    untrained = decode(row.ids[~row.trained].tolist(), clean_up_tokenization_spaces=False)
    said = ["«" + piece.partition("»")[0] + "»" for piece in trained.split("«")[1:]]
    assert said == expected
    assert untrained.count("«") == len(messages) - len(expected)
    if train_on != "all":
        beside = "".join(piece.rpartition("»")[2] for piece in ("»" + trained).split("«"))
        for end in ENDS:
            beside = beside.replace(end, "")
        assert beside.strip(" \n") == ""


@given(messages=chats())
@settings(
    max_examples=25, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_text_of_a_row_is_that_of_the_template(loaders, messages):
    loader = loaders["headers", "assistant"]
    tokenizer = loader.encoder._tokenizer
    kept = loader.rows([Unread("f:1", {"messages": messages})], 0, Source("f"), SourceReport("f"))
    bare = [{key: m[key] for key in ("role", "content")} for m in messages]
    text = tokenizer.apply_chat_template(bare, chat_template=kinds.HEADERS, tokenize=False)
    for _, row in kept:
        assert tokenizer.decode(row.ids.tolist(), clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("trim_offsets", [False, True])
@given(text=WORDS, data=st.data())
@settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_token_is_trained_when_one_of_its_characters_is(make_tokenizer, trim_offsets, text, data):
    """Asking for the ends of spans, and counting bytes of tokens, give what looking at all offsets gives."""
    core = tokenizer_of(make_tokenizer, trim_offsets).backend_tokenizer
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    encoding = core.encode(text, add_special_tokens=False)
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    expected = _overlaps(offsets, [span for span in spans if span[0] < span[1]])
    assert _trained(encoding, len(encoding.ids), spans).tolist() == expected.tolist()
    # Trimmed offsets do not say that a token starts with a blank; bytes do.
    whole = tokenizer_of(make_tokenizer, False).backend_tokenizer.encode(text, add_special_tokens=False)
    offsets = np.array(whole.offsets, dtype=np.int64).reshape(-1, 2)
    table = TokenBytes.of(core)
    assert table is not None
    counted = table.trained(np.array(encoding.ids, dtype=np.int32), text, spans)
    if not text:
        return
    assert counted is not None
    assert counted.tolist() == _overlaps(offsets, [span for span in spans if span[0] < span[1]]).tolist()


_made = {}


def tokenizer_of(make_tokenizer, trim_offsets):
    if trim_offsets not in _made:
        _made[trim_offsets] = make_tokenizer(trim_offsets=trim_offsets)
    return _made[trim_offsets]
