"""How fast rows become tokens, against the bare tokenizer on texts rendered before; memory; the second start.

    python benchmarks/data.py MODEL --rows 1000000 --json benchmarks/results/data.json

MODEL is a folder with a tokenizer and a chat template, or a hub id. Rows stand in several files, and the bare
tokenizer is timed before each and after the last, while nothing else of the benchmark runs: other work on the
machine then slows both alike. Where it comes and goes faster than that, CPU time compares them: rows become tokens
without waiting for anything.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from record import machine, write_record

from rpft.data.dataset import DataSettings, Loading, load_dataset
from rpft.data.packing import pack_lengths, packing_efficiency
from rpft.data.rows import lengths_of
from rpft.data.sources import Source, read_rows
from rpft.host import available_cores

_FILES = 4
_BARE_ROWS = 20_000
_SYLLABLES = ("ta", "ne", "ri", "so", "lu", "ka", "men", "por", "the", "ing", "er", "an", "st", "qu", "is", "o")


def _write_rows(paths: Sequence[Path], count: int, words: tuple[int, int]) -> None:
    """Chats of one to three questions; words by Zipf's law, lengths lognormal, as in sets of instructions.

    ``words``: the medians of a question's and of an answer's number of words.
    """
    rng = random.Random(0)
    known = ["".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 4))) for _ in range(20_000)]
    weights = [1 / (rank + 5) for rank in range(len(known))]
    salad = rng.choices(known, weights, k=1_000_000)

    def said(median: int) -> str:
        length = max(3, int(rng.lognormvariate(math.log(median), 0.8)))
        start = rng.randrange(len(salad) - length)
        return " ".join(salad[start : start + length])

    for number, path in enumerate(paths):
        with path.open("w", encoding="utf-8") as file:
            for _ in range(count // len(paths) + (number < count % len(paths))):
                messages = []
                for _ in range(rng.choice((1, 1, 2, 3))):
                    messages.append({"role": "user", "content": said(words[0])})
                    messages.append({"role": "assistant", "content": said(words[1])})
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


def _bare(batches: Sequence[list[str]], tokenizer: Any) -> tuple[float, float]:
    """(seconds, CPU seconds) a row of the tokenizer alone, with its own threads on all cores."""
    begun, cpu = time.perf_counter(), time.process_time()
    for texts in batches:
        tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
    count = sum(map(len, batches))
    return (time.perf_counter() - begun) / count, (time.process_time() - cpu) / count


def _cpu_seconds() -> float:
    """Of this process and of the helping ones that have ended."""
    used = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in used)


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
    parser.add_argument("--question-words", type=int, default=10, help="median; rows of 230 tokens with SmolLM2")
    parser.add_argument("--answer-words", type=int, default=30, help="median")
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
        paths = [Path(folder) / f"rows-{number}.jsonl" for number in range(_FILES)]
        _write_rows(paths, given.rows, (given.question_words, given.answer_words))
        sources = [Source(str(path)) for path in paths]
        note("data", "size", sum(path.stat().st_size for path in paths) / 1e6, "MB")
        batches = list(_rendered(paths[0], tokenizer, min(given.rows, _BARE_ROWS)))
        tokenizer(batches[0], add_special_tokens=False)
        bare = [_bare(batches, tokenizer)]
        seconds: list[float] = []
        begun = time.perf_counter()

        def after_a_file(_source: Source, _rows: int, done: bool) -> None:
            nonlocal begun
            if done:
                seconds.append(time.perf_counter() - begun)
                bare.append(_bare(batches, tokenizer))
                begun = time.perf_counter()

        settings = DataSettings(given.max_seq_len)
        cache = str(Path(folder) / "tokens")
        before, _ = _peak_bytes()
        cpu = _cpu_seconds()
        begun = time.perf_counter()
        data = load_dataset(sources, tokenizer, settings, Loading(given.processes, cache, after_a_file))
        cpu = _cpu_seconds() - cpu - sum(part for _, part in bare[1:]) * sum(map(len, batches))
        own, helper = _peak_bytes()
        rows = [report.rows for report in data.reports]
        ratios = [
            statistics.mean(wall for wall, _ in bare[i : i + 2]) * count / part
            for i, (count, part) in enumerate(zip(rows, seconds, strict=True))
        ]
        bare_cpu = statistics.mean(part for _, part in bare)
        note("bare tokenizer", "speed, median", 1 / statistics.median(wall for wall, _ in bare), "rows/s")
        note("bare tokenizer", "speed, slowest", 1 / max(bare)[0], "rows/s")
        note("bare tokenizer", "speed, fastest", 1 / min(bare)[0], "rows/s")
        note("bare tokenizer", "CPU time", 1e6 * bare_cpu, "us/row")
        case = f"first start, {given.processes} processes"
        note(case, "time", sum(seconds), "s")
        note(case, "speed", given.rows / sum(seconds), "rows/s")
        note(case, "speed", data.tokens / sum(seconds), "tokens/s")
        note(case, "CPU time of all processes", 1e6 * cpu / given.rows, "us/row")
        note(case, "of the bare tokenizer, by CPU time", bare_cpu / (cpu / given.rows), "ratio")
        note(case, "of the bare tokenizer beside each file, median", statistics.median(ratios), "ratio")
        note(case, "of the bare tokenizer, lowest", min(ratios), "ratio")
        note(case, "of the bare tokenizer, highest", max(ratios), "ratio")
        note(case, "memory of the main process, growth of its peak", (own - before) / 2**20, "MiB")
        note(case, "peak memory of the largest helper", helper / 2**20, "MiB")
        note("data", "mean length", data.tokens / len(data.rows), "tokens")
        begun = time.perf_counter()
        data = load_dataset(sources, tokenizer, settings, Loading(given.processes, cache))
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
