"""Spans by the bytes of tokens are those by offsets, and where bytes do not add up offsets are asked."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rpft.data.encode import Encoder, _overlaps
from rpft.data.token_bytes import TokenBytes

TEXTS = ["Hello there", " the  answer\n is", "é😀漢 ° ｅ́", "<|im_start|>user\nHi<|im_end|>\n", "a<s>b", "\t\t"]


def spans_of(text):
    return [(1, min(3, len(text))), (len(text) // 2 + 1, len(text))] if len(text) > 6 else [(0, len(text))]


def blank_tokenizer():
    """As Gemma's: blanks stand as U+2581, and unknown characters as bytes."""
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁theanswriHlouko", "th", "the", "▁the", "▁▁"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁")]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    core = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


@pytest.mark.parametrize("kind", ["byte level", "blanks"])
def test_bytes_and_offsets_give_the_same_tokens(make_tokenizer, kind):
    core = make_tokenizer().backend_tokenizer if kind == "byte level" else blank_tokenizer()
    table = TokenBytes.of(core)
    assert table is not None
    known = 0
    for text in TEXTS:
        encoding = core.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        found = table.trained(np.array(encoding.ids, dtype=np.int32), text, spans_of(text))
        if found is not None:
            known += 1
            assert found.tolist() == _overlaps(offsets, spans_of(text)).tolist(), text
    assert known >= 4


def test_a_text_that_loses_characters_is_not_counted_in_bytes(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<|wide|>", lstrip=True, rstrip=True, special=True)], special_tokens=True)
    core = tokenizer.backend_tokenizer
    text = "a <|wide|> b"
    table = TokenBytes.of(core)
    assert table is not None
    assert table.trained(np.array(core.encode(text).ids), text, [(0, 1)]) is None
    core.normalizer = normalizers.NFC()
    table = TokenBytes.of(core)
    assert table is not None
    assert table.trained(np.array(core.encode("e\u0301").ids), "e\u0301", [(0, 1)]) is None
    for other in (normalizers.Lowercase(), normalizers.Prepend("x")):
        core.normalizer = other
        assert TokenBytes.of(core) is None
    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert TokenBytes.of(core) is None


def test_texts_that_add_up_and_others_give_their_rows_in_order(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<|wide|>", lstrip=True, special=True)], special_tokens=True)
    texts = [*TEXTS, "the <|wide|> answer"]
    rows = Encoder(tokenizer).encode(texts, [spans_of(text) for text in texts], [False] * len(texts))
    for text, row in zip(texts, rows, strict=True):
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        assert row.ids.tolist() == encoding.ids
        assert row.trained.tolist()[1:] == _overlaps(offsets, spans_of(text)).tolist()[1:], text
