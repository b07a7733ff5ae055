"""A peer of `rpft bench` on a model of random weights and random tokens: no checkpoint and no data are needed.

    python benchmarks/peer.py roof qwen3-1.7b --rows 8 --sequence 4096 [--lora 32] [--option torch-attention]
    python benchmarks/peer.py fsdp2 qwen3-1.7b --rows 24 --microbatches 6 [--workers 2] [--option resident]
    python benchmarks/peer.py roundpipe llama-3.1-8b --rows 24 --microbatches 3 [--update delayed]
        [--option as-it-comes] [--json FILE]

Names are those of `rpft bench --peers`; rpft/peers says what each is. --rows are those of a step, all workers
together. The same shapes by rpft: benchmarks/throughput.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout, too

from rpft.peers import PEERS

if TYPE_CHECKING:
    from rpft.peers.harness import Result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("preset", help="a model of benchmarks/random_job.py")
    parser.add_argument("--rows", type=int, default=24, help="rows of a step")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=1, help="of a step")
    parser.add_argument("--steps", type=int, default=10, help="timed, drained at both ends")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains every weight")
    parser.add_argument("--update", choices=["sync", "delayed"], default="sync", help="where a peer has both")
    parser.add_argument("--kernels", choices=["compile", "eager"], default="compile")
    parser.add_argument("--option", action="append", default=[], help="a way to run it: see Peer.options")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    peer = PEERS[arguments.peer]
    unknown = set(arguments.option) - set(peer.options)
    if unknown:
        sys.exit(f"--option {', '.join(unknown)}: {peer.name} has {', '.join(peer.options) or 'none'}")
    if arguments.rows % arguments.microbatches:
        sys.exit(f"--rows {arguments.rows} cannot be divided into --microbatches {arguments.microbatches}")
    return arguments


def write_work(arguments: argparse.Namespace, folder: Path) -> None:
    """One window of the steps that are timed, all of the same two batches in turn."""
    import torch
    from random_job import PRESETS, Step, make_config, random_data

    from rpft.peers.work import Rows, Work

    if arguments.preset not in PRESETS:
        sys.exit(f"{arguments.preset}: no such model; there are {', '.join(PRESETS)}")
    config, adapter = make_config(arguments.preset), folder / "adapter"
    config.save_pretrained(folder / "config")
    if arguments.lora:
        from peft import LoraConfig

        rank = arguments.lora
        LoraConfig(
            r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        ).save_pretrained(str(adapter))
    data = random_data(
        Step(arguments.rows, arguments.sequence, arguments.microbatches, arguments.steps), config.vocab_size
    )
    steps = {n: [Rows(b.input_ids, b.labels, b.position_ids) for b in data.step(n)] for n in (1, 2)}
    Work(
        config=str(folder / "config"),
        weights=None,
        adapter=str(adapter) if arguments.lora else None,
        dtype="bfloat16",
        attention="sdpa",
        compile=arguments.kernels == "compile",
        device="cuda" if torch.cuda.is_available() else "cpu",
        deterministic=False,
        learning_rate=1e-5,
        timed_learning_rate=1e-5,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        lr_ratio_b=1.0,
        max_grad_norm=1.0,
        delayed=arguments.update == "delayed",
        seed=0,
        vram_limit_bytes=None,
        cpu_threads=None,
        compared=(),
        window=tuple(1 + n % 2 for n in range(arguments.steps)),
        window_tokens=(arguments.rows * arguments.sequence,) * arguments.steps,
        windows=1,
        warm_up=arguments.warm_up,
        options=tuple(arguments.option),
    ).save(folder, steps)


def report(arguments: argparse.Namespace, found: Result) -> None:
    """Prints the RESULT line and writes the record."""
    from record import machine, write_record

    from rpft.machine import device_names, places

    tokens, seconds = arguments.rows * arguments.sequence, found.windows[0]
    figures = [
        ("tokens a second, median step", tokens / statistics.median(seconds), "tok/s"),
        ("tokens a second, drained", tokens * len(seconds) / found.drained[0], "tok/s"),
        ("peak VRAM, allocated", found.vram_bytes / 2**30, "GiB"),
        ("peak VRAM, reserved", found.vram_reserved_bytes / 2**30, "GiB"),
        ("RAM, taken", found.ram_bytes / 2**30, "GiB"),
    ]
    shape = f"{arguments.rows} x {arguments.sequence}, M = {arguments.microbatches}"
    case = ", ".join(
        [
            f"{arguments.peer} {arguments.preset} {f'LoRA r{arguments.lora}' if arguments.lora else 'full'}",
            *arguments.option,
            *([arguments.update] if arguments.peer == "roundpipe" else []),
            *(["layers not compiled"] if arguments.kernels != "compile" else []),
            f"{arguments.workers} worker(s), {shape}",
        ]
    )
    told = "; ".join(f"{name} {value:,.1f} {unit}" for name, value, unit in figures)
    print(f"RESULT {case}: {told}", flush=True)
    if arguments.json is not None:
        results = [
            {"case": case, "metric": m, "value": round(value, 2), "unit": unit} for m, value, unit in figures
        ]
        write_record(arguments.json, "peer", machine(device_names(places(arguments.workers))), results)


def main() -> int:
    arguments = parse()
    missing = PEERS[arguments.peer].missing()
    if missing is not None:
        sys.exit(missing)
    import torch

    from rpft.peers.start import run_peer

    with TemporaryDirectory(prefix="rpft-peer-") as name:
        folder = Path(name)
        write_work(arguments, folder)
        log = folder / "log"
        found = run_peer(arguments.peer, folder, arguments.workers, log, torch.cuda.is_available())
        if isinstance(found, str):
            print(log.read_text(encoding="utf-8") if log.exists() else "", flush=True)
            sys.exit(found)
    report(arguments, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
