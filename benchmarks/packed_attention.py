"""Milliseconds of a block over packed rows, with masks and by variable lengths.

    python benchmarks/packed_attention.py qwen3-1.7b --lines 8,1 --sequence 4096,32768 --row 500 [--json FILE]

Random weights and tokens; every line holds rows of about --row tokens. Forward, and recompute and backward as one
graph, compiled, of one microbatch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from random_job import DTYPE, PRESETS, make_config
from record import machine, write_record
from throughput import numbers

from rpft.machine import device_names
from rpft.model.build import build_model
from rpft.model.cut import cut
from rpft.model.functions import LayerFunctions
from rpft.model.layers import build_layers
from rpft.model.packed_trial import adopt
from rpft.plan.bill import gib
from rpft.plan.profile import LayerMeter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--lines", type=numbers, default=[8, 1], help="of a microbatch")
    parser.add_argument("--sequence", type=numbers, default=[4096, 32768], help="tokens of a line")
    parser.add_argument("--row", type=int, default=500, help="tokens of a row")
    parser.add_argument("--kernels", choices=["eager", "trace", "compile"], default="compile")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    config = make_config(arguments.preset)
    skeleton = cut(build_model(config, DTYPE, "auto"))
    layouts = build_layers(skeleton, DTYPE)
    functions = LayerFunctions(skeleton, device, DTYPE, arguments.kernels)
    results = []
    for way in ("masks", "variable lengths"):
        if way != "masks":
            reason = adopt(functions)
            if reason is not None:
                sys.exit(f"variable lengths are not to be had: {reason}")
        for lines, sequence in zip(arguments.lines, arguments.sequence, strict=True):
            meter = LayerMeter(functions, layouts, lines, sequence, config.vocab_size, row_tokens=arguments.row)
            case = f"{arguments.preset}, {lines} x {sequence}, rows of {arguments.row}, {way}"
            try:
                found = meter.measure(1)
            except torch.cuda.OutOfMemoryError:
                print(f"RESULT {case}: out of memory", flush=True)
                continue
            print(
                f"RESULT {case}: forward {found.forward_seconds * 1e3:.2f} ms, recompute and backward"
                f" {found.backward_seconds * 1e3:.2f} ms in {gib(found.backward_bytes)}",
                flush=True,
            )
            results += [
                {"case": case, "metric": "forward", "value": round(found.forward_seconds * 1e3, 3), "unit": "ms"},
                {
                    "case": case,
                    "metric": "recompute and backward",
                    "value": round(found.backward_seconds * 1e3, 3),
                    "unit": "ms",
                },
            ]
            del meter
            torch.cuda.empty_cache()
    if arguments.json is not None:
        write_record(arguments.json, "packed_attention", machine(device_names([device])), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
