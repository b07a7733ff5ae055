"""How long a short copy waits where a long one goes the same way on another CUDA stream.

    python benchmarks/copy_engine.py [--parts 128,64,32] [--json FILE]

4 GiB go between page-locked memory and the GPU in parts, all issued at once (`none`), each when the one before is
done (`host`), with events between them that another stream answers (`event`), or with a kernel that does nothing
between them (`kernel`, as the engine does it). Meanwhile 32 MiB are copied every 4 ms on a stream of their own.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from record import machine, write_record

LONG_BYTES, SHORT_BYTES = 4 << 30, 32 << 20
PAUSE_SECONDS = 0.004
WAYS = ("none", "host", "event", "kernel")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: [int(n) for n in text.split(",")], default=[128, 64, 32])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Copies:
    """A long and a short copy, up or down."""

    def __init__(self, up: bool) -> None:
        self.long, self.short = (self._pair(size, up) for size in (LONG_BYTES, SHORT_BYTES))
        self.dot = torch.zeros(1, device="cuda")

    @staticmethod
    def _pair(num_bytes: int, up: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(target, source)."""
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        return (there, host) if up else (host, there)

    def run(self, part_bytes: int, way: str, beside: bool) -> tuple[float, list[float]]:
        """(bytes a second of all copies, seconds of each short one); ``beside``: whether there are short ones."""
        stream, other, own = (torch.cuda.Stream() for _ in range(3))
        torch.cuda.synchronize()
        over: list[float] = []

        def copy_long() -> None:
            started = time.perf_counter()
            parts = zip(*(tensor.split(part_bytes) for tensor in self.long), strict=True)
            for target, source in parts:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
                    if way == "kernel":
                        self.dot.add_(1)
                if way == "host":
                    stream.record_event().synchronize()
                elif way == "event":
                    other.wait_event(stream.record_event())
                    stream.wait_event(other.record_event())
            stream.synchronize()
            over.append(time.perf_counter() - started)

        thread = threading.Thread(target=copy_long)
        thread.start()
        waited: list[float] = []
        with torch.cuda.stream(own):
            while beside and not over:
                time.sleep(PAUSE_SECONDS)
                started = time.perf_counter()
                self.short[0].copy_(self.short[1], non_blocking=True)
                own.synchronize()
                waited.append(time.perf_counter() - started)
        thread.join()
        return (LONG_BYTES + SHORT_BYTES * len(waited[:-1])) / over[0], waited


def main() -> int:
    arguments = parse()
    if not torch.cuda.is_available():
        sys.exit("copy engines are a GPU's, and there is none")
    results: list[dict[str, Any]] = []
    print(
        "| | GB/s alone | GB/s with short copies | a short copy takes, ms, mean | longest |\n|---|---|---|---|---|"
    )
    for up in (True, False):
        copies = Copies(up)
        for way in WAYS:
            for part in arguments.parts[: 1 if way == "none" else None]:
                copies.run(part << 20, way, True)  # warm
                alone, _ = copies.run(part << 20, way, False)
                both, waited = copies.run(part << 20, way, True)
                case = f"{'up' if up else 'down'}, {way}, parts of {part} MiB"
                mean, most = 1e3 * sum(waited) / len(waited), 1e3 * max(waited)
                print(f"| {case} | {alone / 1e9:.1f} | {both / 1e9:.1f} | {mean:.2f} | {most:.2f} |", flush=True)
                for name, value, unit in (
                    ("long copy alone", alone / 1e9, "GB/s"),
                    ("all copies", both / 1e9, "GB/s"),
                    ("a short copy, mean", mean, "ms"),
                    ("a short copy, longest", most, "ms"),
                ):
                    results.append({"case": case, "metric": name, "value": round(value, 3), "unit": unit})
    if arguments.json is not None:
        write_record(arguments.json, "copy_engine", machine([torch.cuda.get_device_name()]), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
