"""Tiny tokenizers built in code, and files written from rows."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>"]
CORPUS = [
    "user assistant system tool",
    "Hello there, how are you?",
    "Ping Pong Hi Yo [INST] [/INST]",
    " the answer is",
]


def _train(trim_offsets):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=330,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=SPECIALS,
            show_progress=False,
        ),
    )
    core.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return core


@pytest.fixture
def make_tokenizer():
    """make_tokenizer(template, adds_begin=..., trim_offsets=...): pad id equals the end-of-text id."""

    def make(template=None, *, adds_begin=False, trim_offsets=False):
        core = _train(trim_offsets)
        if adds_begin:
            core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
        )
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[2:]})
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def write(tmp_path):
    """write(rows or bytes, name=...) -> path of a .jsonl file."""

    def write(content, name="rows.jsonl"):
        path = tmp_path / name
        if not isinstance(content, bytes):
            content = "".join(json.dumps(row) + "\n" for row in content).encode()
        path.write_bytes(content)
        return str(path)

    return write
