"""How fast rows become tokens, against the bare tokenizer on texts rendered before; memory; the second start.

    python benchmarks/data.py MODEL --rows 1000000 --json benchmarks/results/data.json

MODEL is a folder with a tokenizer and a chat template, or a hub id.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record import machine, write_record

from rpft.data.dataset import DataSettings, Loading, load_dataset
from rpft.data.packing import pack_lengths, packing_efficiency
from rpft.data.rows import lengths_of
from rpft.data.sources import Source, read_rows
from rpft.host import available_cores

_BARE_ROWS = 50_000
_SYLLABLES = ("ta", "ne", "ri", "so", "lu", "ka", "men", "por", "the", "ing", "er", "an", "st", "qu", "is", "o")


def _write_rows(path: Path, count: int) -> None:
    """Chats of one to three questions; words by Zipf's law, lengths lognormal, as in sets of instructions."""
    rng = random.Random(0)
    words = ["".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 4))) for _ in range(20_000)]
    weights = [1 / (rank + 5) for rank in range(len(words))]
    salad = rng.choices(words, weights, k=1_000_000)

    def said(mean: float) -> str:
        length = max(3, int(rng.lognormvariate(mean, 0.8)))
        start = rng.randrange(len(salad) - length)
        return " ".join(salad[start : start + length])

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = []
            for _ in range(rng.choice((1, 1, 2, 3))):
                messages += [{"role": "user", "content": said(3.3)}, {"role": "assistant", "content": said(4.5)}]
            file.write(json.dumps({"messages": messages}) + "\n")


def _rendered(path: Path, tokenizer: Any, count: int) -> Iterator[list[str]]:
    """The texts of the first rows, a thousand at a time."""
    texts: list[str] = []
    for row in read_rows(Source(str(path), max_rows=count)):
        texts.append(tokenizer.apply_chat_template(row.value["messages"], tokenize=False))
        if len(texts) == 1000:
            yield texts
            texts = []
    if texts:
        yield texts


def _bare_rows_per_second(path: Path, tokenizer: Any, count: int) -> float:
    """Rows a second of the tokenizer alone, with its own threads on all cores."""
    batches = list(_rendered(path, tokenizer, min(count, _BARE_ROWS)))
    tokenizer(batches[0], add_special_tokens=False)
    begun = time.perf_counter()
    for texts in batches:
        tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
    return sum(map(len, batches)) / (time.perf_counter() - begun)


def _peak_bytes() -> tuple[int, int]:
    """(of this process, of the largest helping process that has ended), so far."""
    own, helpers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_maxrss * 1024, helpers.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=available_cores())
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    results: list[dict[str, Any]] = []

    def note(case: str, metric: str, value: float, unit: str) -> None:
        results.append({"case": case, "metric": metric, "value": round(value, 4), "unit": unit})
        print(f"{case}: {metric} {value:,.2f} {unit}", flush=True)

    with tempfile.TemporaryDirectory(prefix="rpft-data-") as folder:
        path = Path(folder) / "rows.jsonl"
        _write_rows(path, given.rows)
        note("data", "size", path.stat().st_size / 1e6, "MB")
        bare = _bare_rows_per_second(path, tokenizer, given.rows)
        note("bare tokenizer", "speed", bare, "rows/s")
        settings = DataSettings(given.max_seq_len)
        loading = Loading(given.processes, str(Path(folder) / "tokens"))
        before, _ = _peak_bytes()
        begun = time.perf_counter()
        data = load_dataset([Source(str(path))], tokenizer, settings, loading)
        seconds = time.perf_counter() - begun
        own, helper = _peak_bytes()
        case = f"first start, {given.processes} processes"
        note(case, "time", seconds, "s")
        note(case, "speed", given.rows / seconds, "rows/s")
        note(case, "speed", data.tokens / seconds, "tokens/s")
        note(case, "of the bare tokenizer", given.rows / seconds / bare, "ratio")
        note(case, "memory of the main process, growth of its peak", (own - before) / 2**20, "MiB")
        note(case, "peak memory of the largest helper", helper / 2**20, "MiB")
        begun = time.perf_counter()
        data = load_dataset([Source(str(path))], tokenizer, settings, loading)
        note("second start", "time", time.perf_counter() - begun, "s")
        begun = time.perf_counter()
        lengths = lengths_of(data.rows)
        packs = pack_lengths(lengths, given.max_seq_len)
        note("packing", "time", time.perf_counter() - begun, "s")
        note("packing", "filled", packing_efficiency(lengths, len(packs), given.max_seq_len), "ratio")
    if given.json is not None:
        write_record(given.json, "data", machine(["CPU"]), results)


if __name__ == "__main__":
    main()
