"""Seconds to allocate a host store, and GB/s of loading a checkpoint into it from the disk cache.

    python benchmarks/loading.py [PRESET] [--gb 16] [--lora 32] [--folder DIR] [--json FILE]

Writes a checkpoint of the preset's shape, with as many blocks as make about so many GB, and loads it twice into a
bfloat16 store of a full run (18 bytes of RAM for 2 of the file) or of LoRA. Memory is page-locked where there is a
CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from random_job import DTYPE, PRESETS, gpu_names, make_config
from record import machine, write_record
from safetensors.torch import save_file

from rpft.engine.device import make_pool
from rpft.model.adapters import LoraSettings, inject_lora
from rpft.model.build import build_model
from rpft.model.checkpoint import Checkpoint
from rpft.model.cut import cut
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.model.layout import TensorSpec
from rpft.model.load import load_checkpoint
from rpft.model.skeleton import Skeleton

GB = 1e9
SHARD_BYTES = 5 * GB


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", choices=PRESETS, default="qwen3-1.7b")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint, 1e9 bytes")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains every weight")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written, and left")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def make_skeleton(preset: str, num_blocks: int, lora_rank: int) -> Skeleton:
    config = make_config(preset)
    config.num_hidden_layers = num_blocks
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * num_blocks
    skeleton = cut(build_model(config, DTYPE, "auto"))
    if lora_rank:
        inject_lora(skeleton, LoraSettings(lora_rank, 2 * lora_rank, 0.0, "all-linear"), "random")
    return skeleton


def tensors_of(skeleton: Skeleton) -> list[TensorSpec]:
    """What a checkpoint of the model holds."""
    specs = [spec for layout in build_layers(skeleton, DTYPE) for spec, _ in layout.own.values()]
    return [spec for spec in specs if spec.checkpoint_name is not None]


def blocks_for(preset: str, num_bytes: float) -> int:
    """How many blocks of the preset make a checkpoint of about ``num_bytes``."""
    one, two = (sum(s.num_bytes for s in tensors_of(make_skeleton(preset, n, 0))) for n in (1, 2))
    return max(1, 1 + round((num_bytes - one) / (two - one)))


def write_checkpoint(folder: Path, specs: list[TensorSpec]) -> int:
    """Writes ``specs`` as shards of constant tensors into ``folder``; the bytes of the files."""
    shards: list[dict[str, TensorSpec]] = [{}]
    for spec in specs:
        if sum(s.num_bytes for s in shards[-1].values()) > SHARD_BYTES:
            shards.append({})
        shards[-1][str(spec.checkpoint_name)] = spec
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: torch.full(spec.shape, 0.02, dtype=spec.dtype) for name, spec in shard.items()}, file)
        weight_map.update(dict.fromkeys(shard, file.name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(file.stat().st_size for file in folder.glob("model-*.safetensors"))


def main() -> int:
    arguments = parse()
    devices = make_pool("auto", None, None)
    skeleton = make_skeleton(arguments.preset, blocks_for(arguments.preset, arguments.gb * GB), arguments.lora)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        file_bytes = write_checkpoint(folder, tensors_of(skeleton))
        layouts = build_layers(skeleton, DTYPE)
        started = time.perf_counter()
        store = HostStore(layouts, devices[0].allocate_host)
        allocating = time.perf_counter() - started
        loading = []
        for _ in range(2):
            started = time.perf_counter()
            load_checkpoint(Checkpoint(folder), skeleton, store)
            loading.append(time.perf_counter() - started)
    buffers = [t for x in store.layers for t in (x.weights, x.gradient, x.master, x.exp_avg, x.exp_avg_sq)]
    store_bytes = sum({t.data_ptr(): t.nbytes for t in buffers}.values())
    kind = "page-locked" if store.layers[0].weights.is_pinned() else "pageable"
    what = f"LoRA r{arguments.lora}" if arguments.lora else "full"
    case = f"{arguments.preset} {what}, checkpoint of {file_bytes / GB:.1f} GB, {kind} weights and gradients"
    figures = [
        ("store", store_bytes / 2**30, "GiB"),
        ("seconds to allocate the store", allocating, "s"),
        ("first load", file_bytes / loading[0] / GB, "GB/s"),
        ("second load", file_bytes / loading[1] / GB, "GB/s"),
    ]
    print(f"RESULT {case}: " + ", ".join(f"{metric} {value:.2f} {unit}" for metric, value, unit in figures))
    if arguments.json is not None:
        results = [
            {"case": case, "metric": m, "value": round(value, 3), "unit": unit} for m, value, unit in figures
        ]
        write_record(arguments.json, "loading", machine(gpu_names(devices)), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
