"""Tokens a second of full or LoRA training of a model of real size, random weights, random tokens.

    python benchmarks/throughput.py qwen3-1.7b --rows 24 --sequence 4096 --microbatches 3 --steps 10
        [--lora R] [--workers 2,1] [--update sync,delayed] [--vram-limit 24] [--trace FOLDER] [--json FILE]

No checkpoint and no data are needed. For every combination of steps, --update, --workers and --emulate-link: the
rate of the median step and over all timed steps, drained at both ends. Several steps are given by several numbers,
as --rows 24,1 --sequence 4096,65536 --microbatches 3,1 --steps 10,2; a single number holds for all.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import psutil
import torch
from record import machine, write_record
from timeline import overlap_table

from rpft.engine.device import Device, make_pool
from rpft.engine.engine import Engine
from rpft.engine.failure import Failure
from rpft.engine.slot import HostBatch
from rpft.engine.streams import Delays
from rpft.engine.tracer import Tracer
from rpft.model.adapters import LoraSettings, initialise_lora, inject_lora
from rpft.model.functions import LayerFunctions
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.model.skeleton import build_model, cut
from rpft.optim.adamw import AdamW
from rpft.optim.host_optimizer import HostOptimizer
from rpft.optim.one_pass import OnePass, measured_rate, prepare
from rpft.optim.schedule import Schedule
from rpft.plan.bill import Workload, available_host_bytes, gib, make_bill
from rpft.plan.choose import choose_plan, model_shape, step_shape
from rpft.plan.costs import measured_costs
from rpft.plan.profile import LayerMeter, LayerProfile, layers_by_kind, measure_link
from rpft.plan.simulate import ASSUMED_RATES, Rates, step_seconds

DTYPE = torch.bfloat16

PRESETS = {
    # family, vocabulary, hidden, intermediate, blocks, heads, key-value heads, head size, tied
    "qwen3-1.7b": ("Qwen3", 151936, 2048, 6144, 28, 16, 8, 128, True),
    "llama-8b": ("Llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
    "qwen3-32b": ("Qwen3", 151936, 5120, 25600, 64, 64, 8, 128, False),
    "tiny": ("Llama", 512, 64, 192, 4, 4, 2, 16, False),
}


def make_config(preset: str):
    """The transformers config of a preset."""
    import transformers

    family, vocabulary, hidden, intermediate, blocks, heads, kv_heads, head_size, tied = PRESETS[preset]
    return getattr(transformers, f"{family}Config")(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        max_position_embeddings=131072,
        tie_word_embeddings=tied,
    )


def fill_randomly(store: HostStore, device: torch.device) -> None:
    """Normal(0, 0.02) matrices and unit norms, drawn where it is quick."""
    for name in store.names():
        target = store.tensor(name)
        if target.dim() < 2:
            store.write(name, torch.ones_like(target))
        else:
            store.write(name, torch.empty(target.shape, device=device, dtype=target.dtype).normal_(0, 0.02))


def random_step(rows: int, sequence: int, microbatches: int, vocabulary: int, seed: int) -> list[HostBatch]:
    """``microbatches`` of rows / microbatches rows; all but the last position of a row is trained."""
    generator = torch.Generator().manual_seed(seed)
    size = rows // microbatches
    at = torch.arange(size * sequence).view(size, sequence)[:, :-1].flatten()
    batches = []
    for _ in range(microbatches):
        ids = torch.randint(0, vocabulary, (size, sequence), generator=generator)
        batches.append(HostBatch(ids, None, at, ids[:, 1:].flatten()))
    return batches


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--rows", type=numbers, default=[24], help="rows of a step")
    parser.add_argument("--sequence", type=numbers, default=[4096])
    parser.add_argument("--microbatches", type=numbers, default=[3], help="of a step, all in one round")
    parser.add_argument("--steps", type=numbers, default=[5], help="timed, drained at both ends")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those that are timed")
    parser.add_argument("--update", type=lambda text: text.split(","), default=["sync"])
    parser.add_argument("--emulate-link", type=numbers, default=[0], help="GB/s each way; 0: the link as it is")
    parser.add_argument("--trace", type=Path, help="folder for a Chrome trace of three more steps of each")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``Model`` reads."""
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains every weight")
    parser.add_argument("--workers", type=numbers, default=[0], help="0: all")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--vram-limit", type=float, default=24.0, help="GiB a worker")
    parser.add_argument("--ram-limit", type=float, help="GiB; default: what is free")
    parser.add_argument("--kernels", choices=["eager", "trace", "compile"], default="compile")
    parser.add_argument("--recompute", choices=["auto", "stage", "layer"], default="auto")
    parser.add_argument("--deterministic", action="store_true", help="the same bits every time, slower")


def numbers(text: str) -> list[int]:
    """Whole numbers between commas."""
    return [int(word) for word in text.split(",")]


@dataclass(frozen=True)
class Step:
    """The shape of a step, and how many are timed."""

    rows: int
    sequence: int
    microbatches: int
    timed: int

    @property
    def size(self) -> int:
        """Rows of a microbatch."""
        return self.rows // self.microbatches

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence


def steps_of(arguments: argparse.Namespace) -> list[Step]:
    """The steps that --rows, --sequence, --microbatches and --steps give."""
    columns = [arguments.rows, arguments.sequence, arguments.microbatches, arguments.steps]
    count = max(map(len, columns))
    if any(len(column) not in (1, count) for column in columns):
        sys.exit("--rows, --sequence, --microbatches and --steps: one number each, or the same count of numbers")
    return [Step(*row) for row in zip(*(column * (count // len(column)) for column in columns), strict=True)]


class Model:
    """A model with random weights: what all combinations share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.vram_limit = int(arguments.vram_limit * 2**30)
        devices = self.pool(max(arguments.workers) if all(arguments.workers) else 0, 0)
        config = make_config(arguments.preset)
        self.vocabulary = config.vocab_size
        self.skeleton = cut(build_model(config, DTYPE, "auto"))
        if arguments.lora:
            settings = LoraSettings(arguments.lora, 2 * arguments.lora, 0.0, "all-linear")
            inject_lora(self.skeleton, settings, "random")
        self.layouts = build_layers(self.skeleton, DTYPE)
        kernels, exact = arguments.kernels, arguments.deterministic
        torch.use_deterministic_algorithms(exact)
        self.functions = [LayerFunctions(self.skeleton, d.torch_device, DTYPE, kernels, exact) for d in devices]
        self.shape = model_shape(config, DTYPE.itemsize)
        self.rates = ASSUMED_RATES
        self.store = HostStore(self.layouts, devices[0].allocate_host, gradient_dtype=DTYPE)
        fill_randomly(self.store, devices[0].torch_device)
        if arguments.lora:
            initialise_lora(self.skeleton, self.store, 0)
        self.one_pass = prepare(spare_cores=2 + 2 * len(devices))
        if kernels != "eager":
            self.rates = measure_rates(devices[0], self.one_pass)

    def profiles(self, step: Step) -> list[LayerProfile] | None:
        """What each layer takes at the shape of ``step``; None with eager kernels."""
        if self.arguments.kernels == "eager":
            return None
        functions, found = self.functions[0], {}
        meter = LayerMeter(functions, self.layouts, step.size, step.sequence, self.vocabulary)
        for layers in layers_by_kind(functions, len(self.layouts)):
            found |= dict.fromkeys(layers, meter.measure(layers[0]))
        if functions.device.type == "cuda":
            torch.cuda.empty_cache()
        profiles = [found[layer] for layer in range(len(self.layouts))]
        _print_profiles(profiles)
        return profiles

    def pool(self, workers: int, link: int) -> list[Device]:
        return make_pool(self.arguments.device, workers or None, self.vram_limit, link or None)


def measure_rates(device: Device, one_pass: OnePass) -> Rates:
    """The link of ``device`` and the optimizer's rate, from a short measurement of each."""
    rate = measured_rate(one_pass)
    up, down = measure_link(device.torch_device, device.allocate_host)
    print(
        f"link {up / 1e9:.0f} GB/s up, {down / 1e9:.0f} down;"
        f" optimizer {rate / 1e9:.2f} G parameters/s on {one_pass.num_threads} threads"
    )
    return Rates(up, down, rate)


class Run:
    """One combination: its plan and its engine, ready to step."""

    def __init__(
        self,
        model: Model,
        step: Step,
        profiles: list[LayerProfile] | None,
        update: str,
        workers: int,
        link: int,
        steps_before: int = 0,
        before_update: Callable[[int, int], None] = lambda step, layer: None,
    ) -> None:
        """``steps_before``: those that the store has had. ``before_update``: see ``HostOptimizer``."""
        self.model, self.step, self.update, self.link = model, step, update, link
        arguments, limit = model.arguments, model.vram_limit
        self.devices = model.pool(workers, link)
        delayed = update == "delayed"
        if delayed:
            add_copies(model.store, self.devices[0])
        max_tokens = step.size * step.sequence
        work = Workload(model.shape, max_tokens, step.microbatches, delayed, arguments.kernels, DTYPE, profiles)
        rates = model.rates
        if link:
            rates = replace(rates, up=min(rates.up, link * 1e9), down=min(rates.down, link * 1e9))
        used = psutil.Process().memory_info().rss
        ram = available_host_bytes() + used if arguments.ram_limit is None else int(arguments.ram_limit * 2**30)
        self.plan = choose_plan(
            model.layouts,
            model.skeleton,
            work,
            len(self.devices),
            step.microbatches,
            arguments.recompute,
            limit,
            ram,
            rates,
        )
        self.bill = make_bill(self.plan, model.layouts, work)
        if self.bill.device > limit or self.bill.host > ram:
            sys.exit(f"the smallest plan takes {gib(self.bill.device)} of VRAM, {gib(self.bill.host)} of RAM")
        self.predicted_seconds = None
        if profiles is not None:
            costs = measured_costs(profiles, self.plan.keep_bytes_per_token)
            shape = step_shape(model.layouts, work, costs, len(self.devices), 1)
            self.predicted_seconds = step_seconds(self.plan, shape, rates)
        self.failure, delays = Failure(), Delays(None)
        self.optimizer = HostOptimizer(
            model.store,
            AdamW(),
            Schedule("constant", 1e-5, 10**6),
            1.0,
            self.failure,
            delays,
            updates_applied=steps_before,
            kernels=model.one_pass,
            before_update=before_update,
            last_step=steps_before,
        )
        self.engine = Engine(
            model.skeleton,
            model.store,
            self.plan,
            self.devices,
            functions=model.functions[: len(self.devices)],
            max_tokens=max_tokens,
            seed=0,
            update_lag=int(delayed),
            send_update=self.optimizer.submit,
            failure=self.failure,
            delays=delays,
            lagging=delayed and steps_before > 0,
        )

    def steps(self, first: int, count: int) -> list[float]:
        """Runs ``count`` steps, each queued while the one before computes, drained at both ends; their seconds."""
        marks = [time.perf_counter()]
        for step in range(first, first + count + 1):
            if step < first + count:
                shape = self.step.rows, self.step.sequence, self.step.microbatches
                batches = random_step(*shape, self.model.vocabulary, step % 2)
                self.engine.submit_step(step, batches)
            else:
                self.engine.flush()
            if step > first:
                result = self.optimizer.wait(step - 1)
                marks.append(time.perf_counter())
                loss = result.loss_sum / (self.step.rows * (self.step.sequence - 1))
                print(f"{step - 1}: {loss:.4f} {marks[-1] - marks[-2]:.2f} s", end="; ", flush=True)
        print()
        return [after - before for before, after in pairwise(marks)]

    def trace(self, first: int, count: int, path: Path) -> None:
        """Traces ``count`` steps into ``path`` and prints what of the transfers compute hid."""
        tracer = Tracer([*self.engine.streams, self.optimizer.stream])
        tracer.start()
        self.steps(first, count)
        trace = tracer.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.write_chrome_trace(path)
        print(overlap_table(trace))

    def close(self) -> None:
        self.engine.close()
        self.optimizer.close()


def add_copies(store: HostStore, device: Device) -> None:
    """What delayed updates need of a store that was made for exact ones."""
    for layer in store.layers:
        if not layer.second.numel():
            layer.second = device.allocate_host(layer.working.nbytes)


def _print_profiles(profiles: list[LayerProfile]) -> None:
    for name, p in (("embedding", profiles[0]), ("block", profiles[1]), ("head", profiles[-1])):
        print(
            f"{name}: forward {p.forward_seconds * 1e3:.2f} ms, recompute and backward"
            f" {p.backward_seconds * 1e3:.2f} ms; {gib(p.forward_bytes)} and {gib(p.backward_bytes)},"
            f" kept {gib(p.kept_bytes)} + {gib(p.kept_backward_bytes)}"
        )


def measure(run: Run) -> list[dict[str, Any]]:
    """Warms up, times, prints; the figures for the record."""
    arguments = run.model.arguments
    stages = " ".join(map(str, run.plan.forward)), " ".join(map(str, run.plan.backward))
    print(
        f"plan: forward {stages[0]}; backward {stages[1]}; recompute by {run.plan.recompute},"
        f" {run.plan.keep_bytes_per_token} bytes a token kept, {len(run.plan.resident)} layers resident",
        flush=True,
    )
    run.steps(1, arguments.warm_up)
    run.engine.settle()
    for device in run.devices:
        device.reset_peak()
    seconds = run.steps(1 + arguments.warm_up, run.step.timed)
    peaks = [device.peak_bytes() for device in run.devices]
    cuda = [d.torch_device for d in run.devices if d.torch_device.type == "cuda"]
    reserved = max((torch.cuda.max_memory_reserved(device) for device in cuda), default=0)
    step, tokens = run.step, run.step.tokens
    median, drained = tokens / statistics.median(seconds), tokens * len(seconds) / sum(seconds)
    rss = psutil.Process().memory_info().rss
    case = " ".join(
        [
            arguments.preset,
            f"LoRA r{arguments.lora}" if arguments.lora else "full",
            f"{run.update}, {len(peaks)} worker(s), {step.rows} x {step.sequence}, M = {step.microbatches}",
            *([f"(link emulated at {run.link} GB/s)"] if run.link else []),
        ]
    )
    print(
        f"RESULT {case}: {median:.0f} tok/s by the median step, {drained:.0f} drained;"
        f" peak VRAM {' '.join(map(gib, peaks))} (reserved {gib(reserved)}) of {gib(run.bill.device)} by the bill;"
        f" RAM {gib(rss)} of {gib(run.bill.host)}",
        flush=True,
    )
    figures = [
        ("tokens a second, median step", median, "tok/s"),
        ("tokens a second, drained", drained, "tok/s"),
        ("peak VRAM, allocated", max(peaks) / 2**30, "GiB"),
        ("peak VRAM, reserved", reserved / 2**30, "GiB"),
        ("VRAM by the bill", run.bill.device / 2**30, "GiB"),
        ("RAM, resident", rss / 2**30, "GiB"),
        ("RAM by the bill", run.bill.host / 2**30, "GiB"),
    ]
    if run.predicted_seconds is not None:
        figures.append(("tokens a second, predicted", tokens / run.predicted_seconds, "tok/s"))
    if arguments.trace is not None:
        name = f"{arguments.preset}_{step.rows}x{step.sequence}_{run.update}_{len(peaks)}.json"
        run.trace(1 + arguments.warm_up + step.timed, 3, arguments.trace / name)
    return [{"case": case, "metric": m, "value": round(value, 2), "unit": unit} for m, value, unit in figures]


def main() -> int:
    arguments = parse()
    started = time.perf_counter()
    steps = steps_of(arguments)
    model = Model(arguments)
    print(f"ready after {time.perf_counter() - started:.0f} s", flush=True)
    results, names = [], []
    updates = sorted(set(arguments.update), reverse=True)  # sync first: a delayed one changes the store
    profiles = {step: model.profiles(step) for step in steps}
    for update, step, workers, link in product(updates, steps, arguments.workers, arguments.emulate_link):
        run = Run(model, step, profiles[step], update, workers, link)
        results += measure(run)
        run.close()
        names = names or gpu_names(run.devices)
        if arguments.json is not None:
            write_record(arguments.json, "throughput", machine(names), results)
        del run
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def gpu_names(devices: list[Device]) -> list[str]:
    """What each worker runs on."""
    cuda = devices[0].torch_device.type == "cuda"
    return [torch.cuda.get_device_name(d.torch_device) if cuda else "CPU worker" for d in devices]


if __name__ == "__main__":
    sys.exit(main())
