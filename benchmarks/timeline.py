"""Draws a trace of a run's streams, and says how much of the transfers hid behind compute.

    python benchmarks/timeline.py TRACE.json [--svg FILE] [--step N | --from MS --to MS]

TRACE.json is what ``Trace.write_chrome_trace`` wrote; Perfetto (ui.perfetto.dev) opens it too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rpft.engine.trace import Trace, read_chrome_trace
from rpft.engine.trace_svg import write_svg
from rpft.errors import UserError


def overlap_table(trace: Trace) -> str:
    """Two tables in Markdown: a line a worker, then a line a stream."""
    milliseconds = (trace.end_seconds - trace.start_seconds) * 1e3
    lines = [
        f"| worker, of {milliseconds:.0f} ms | compute busy | only transfers | idle | transfers | hidden |",
        "|---|---|---|---|---|---|",
        *(
            f"| {o.worker} | {o.compute_busy:.1%} | {o.only_transfers:.1%} | {o.idle:.1%}"
            f" | {o.transfer_seconds * 1e3:.0f} ms | {o.hidden:.1%} |"
            for o in trace.overlap()
        ),
        "",
        "| stream | tasks | busy | waiting | copied | rate |",
        "|---|---|---|---|---|---|",
    ]
    for use in trace.streams():
        copied, rate = "", ""
        if use.copied_bytes:
            copied = f"{use.copied_bytes / 1e9:.3f} GB"
            rate = f"{use.copied_bytes / 1e9 / use.transfer_seconds:.1f} GB/s"
        lines.append(
            f"| {use.worker} {use.stream} | {use.num_tasks} | {use.busy_seconds * 1e5 / milliseconds:.1f}%"
            f" | {use.waiting_seconds * 1e5 / milliseconds:.1f}% | {copied} | {rate} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--svg", type=Path, help="where to draw it")
    parser.add_argument("--step", type=int, help="only this step, from the end of one update to the next")
    parser.add_argument("--from", type=float, dest="first", metavar="MS", help="only from here on")
    parser.add_argument("--to", type=float, dest="last", metavar="MS", help="only up to here")
    arguments = parser.parse_args()
    trace = read_chrome_trace(arguments.trace)
    try:
        if arguments.step is not None:
            trace = trace.step(arguments.step)
    except UserError as error:
        sys.exit(str(error))
    first = trace.start_seconds if arguments.first is None else arguments.first / 1e3
    last = trace.end_seconds if arguments.last is None else arguments.last / 1e3
    if not first < last:
        sys.exit(f"--from and --to leave nothing between {first * 1e3:g} and {last * 1e3:g} ms")
    trace = trace.between(first, last)
    print(overlap_table(trace))
    if arguments.svg is not None:
        write_svg(trace, arguments.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
