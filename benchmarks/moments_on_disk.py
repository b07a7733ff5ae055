"""What an update takes with moments on a disk (optimizer.offload), beside what the plan expects of it.

    python benchmarks/moments_on_disk.py /mnt/nvme --params 1000 --json benchmarks/results/moments_on_disk.json

Layers of bfloat16 weights and gradients, masters in two halves, moments in a file in the folder given, without a
step around it. The plan expects the slower of the pass with moments in RAM and the disk; taken is the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import machine, write_record

from rpft.engine.failure import Failure
from rpft.engine.streams import Delays
from rpft.model.host_store import HostStore
from rpft.model.layout import TensorSpec, build_layouts
from rpft.model.moments_file import MomentsFile
from rpft.optim.adamw import AdamW
from rpft.optim.moments_window import MomentsWindow
from rpft.optim.one_pass import prepare
from rpft.plan.disk_rate import turnover_rate
from rpft.train.beside import measured_rate

_LAYERS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--params", type=float, default=200, help="millions of parameters, of 6 bytes of RAM each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    kernels, turnover = prepare(), turnover_rate(arguments.folder)
    if turnover is None:
        parser.error(f"{arguments.folder}: no room for a measurement")
    updates = measured_rate(kernels)
    rows = int(arguments.params * 1e6 / _LAYERS / 1024)
    layers = [[TensorSpec(f"w{n}", (rows, 1024), torch.bfloat16, True, True, f"w{n}")] for n in range(_LAYERS)]
    layouts = build_layouts(layers, {})
    file = MomentsFile(arguments.folder, layouts, "fp32")
    store = HostStore(layouts, gradient_dtype=torch.bfloat16, moments_file=file)
    window, algorithm = MomentsWindow(file, store.update_order, Failure(), Delays(None)), AdamW()

    def update(step: int) -> None:
        for number, layer in enumerate(store.layers):
            for piece in window.pieces(number):
                algorithm.update(kernels, layer, [], 1e-3, step, 1.0, piece=piece)
        window.settle()

    update(0)  # the file is written for the first time
    seconds = statistics.median(_timed(update, step) for step in range(1, arguments.repeats + 1))
    window.close(60.0)
    file.close()
    expected = max(store.num_trained / updates, file.num_bytes / turnover)
    where = machine(["CPU"])
    figures = [
        ("the pass with moments in RAM", store.num_trained / updates, "s"),
        ("reading and writing, by the plan's measurement", file.num_bytes / turnover, "s"),
        ("expected by the plan", expected, "s"),
        ("taken", seconds, "s"),
        ("read and written at once", file.num_bytes / seconds / 1e9, "GB/s each way"),
    ]
    print(f"{where}\n{store.num_trained / 1e6:.0f} M parameters, moments in {arguments.folder}")
    for name, value, unit in figures:
        print(f"{name:48} {value:8.3f} {unit}")
    if arguments.json is not None:
        results = [
            {
                "case": f"{store.num_trained / 1e6:.0f} M parameters",
                "metric": name,
                "value": round(value, 4),
                "unit": u,
            }
            for name, value, u in figures
        ]
        write_record(arguments.json, "moments_on_disk", where, results)
    return 0


def _timed(work: Callable[[int], None], step: int) -> float:
    started = time.perf_counter()
    work(step)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
