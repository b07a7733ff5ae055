"""Tokens a second of full or LoRA training of a model of real size, random weights, random tokens.

    python benchmarks/throughput.py qwen3-1.7b --rows 24 --sequence 4096 --microbatches 3 --steps 10
        [--lora R] [--targets q_proj,v_proj] [--quantize nf4] [--workers 2,1] [--update sync,delayed]
        [--state 8bit] [--vram-limit 24] [--trace FOLDER] [--json FILE]

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
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
from hiding import by_the_rule, hidden_from
from random_job import PRESETS, Step, gpu_names, make_job, make_recipe, model_of, random_store
from record import machine, write_record
from timeline import overlap_table

from rpft.engine.device import Device
from rpft.engine.engine import Engine
from rpft.engine.failure import Failure
from rpft.engine.slot import HostBatch
from rpft.engine.tracer import Tracer
from rpft.errors import UserError
from rpft.model.cut_experts import cut_experts
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.optim.host_optimizer import UpdateResult
from rpft.optim.one_pass import OnePass
from rpft.plan.bill import available_host_bytes, gib
from rpft.plan.profile_file import Profile
from rpft.plan.simulate import update_seconds
from rpft.train.bench import allocation_retries, idle_machinery, timed_steps
from rpft.train.flight import Flight
from rpft.train.measuring import Workbench
from rpft.train.prepare import Prepared, make_devices, plan_here, workbench


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--rows", type=numbers, default=[24], help="rows of a step")
    parser.add_argument("--sequence", type=numbers, default=[4096])
    parser.add_argument("--microbatches", type=numbers, default=[3], help="of a step, all in one round")
    parser.add_argument("--steps", type=numbers, default=[5], help="timed, drained at both ends")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those that are timed")
    parser.add_argument("--update", type=lambda text: text.split(","), default=["sync"])
    parser.add_argument("--emulate-link", type=numbers, default=[0], help="GB/s each way, of GPUs; 0: as it is")
    parser.add_argument("--trace", type=Path, help="folder for a Chrome trace of three more steps of each")
    parser.add_argument("--expert-groups", type=int, default=1, help="layers of its own for a block's experts")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``Model`` reads."""
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains every weight")
    parser.add_argument("--targets", default="all-linear", help="modules with an adapter, between commas")
    parser.add_argument(
        "--quantize", choices=["none", "nf4", "int8", "fp8"], default="none", help="of a LoRA base"
    )
    add_engine_arguments(parser)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``Model`` reads beside the model."""
    parser.add_argument("--workers", type=numbers, default=[0], help="0: all")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--vram-limit", type=float, default=24.0, help="GiB a worker")
    parser.add_argument("--ram-limit", type=float, help="GiB; default: what is free")
    parser.add_argument("--kernels", choices=["eager", "trace", "compile"], default="compile")
    parser.add_argument("--recompute", choices=["auto", "stage", "layer"], default="auto")
    parser.add_argument("--state", choices=["fp32", "bf16", "8bit"], default="fp32", help="of the moments")
    parser.add_argument("--deterministic", action="store_true", help="the same bits every time, slower")


def numbers(text: str) -> list[int]:
    """Whole numbers between commas."""
    return [int(word) for word in text.split(",")]


def steps_of(arguments: argparse.Namespace) -> list[Step]:
    """The steps that --rows, --sequence, --microbatches and --steps give."""
    columns = [arguments.rows, arguments.sequence, arguments.microbatches, arguments.steps]
    count = max(map(len, columns))
    if any(len(column) not in (1, count) for column in columns):
        sys.exit("--rows, --sequence, --microbatches and --steps: one number each, or the same count of numbers")
    return [Step(*row) for row in zip(*(column * (count // len(column)) for column in columns), strict=True)]


class Model:
    """A model with random weights: what all combinations share."""

    def __init__(
        self, arguments: argparse.Namespace, step: Step, quiet: bool = False, expert_groups: int = 1
    ) -> None:
        """``step``: any of those that will be run. ``quiet``: whether profiles are not printed."""
        self.arguments, self._quiet = arguments, quiet
        most = max(arguments.workers) if all(arguments.workers) else 0
        torch.use_deterministic_algorithms(arguments.deterministic)
        recipe = make_recipe(arguments, step, "sync", most, 0)
        job = make_job(recipe, step)
        if expert_groups > 1:
            skeleton = cut_experts(job.skeleton, expert_groups, job.dtype)
            job = replace(job, skeleton=skeleton, layouts=build_layers(skeleton, job.dtype))
        self.bench = workbench(job, make_devices(recipe.engine))
        self._profiles: dict[tuple[Step, int], Profile] = {}
        self._store: HostStore | None = None

    @property
    def store(self) -> HostStore:
        """There is one from the first run on."""
        assert self._store is not None
        return self._store

    def store_for(self, prepared: Prepared) -> HostStore:
        """The store, made and filled for the first run; delayed updates add what they need."""
        if self._store is None:
            self._store = random_store(prepared)
        elif prepared.delayed:
            add_copies(self._store, prepared.devices[0])
        return self._store

    def workbench(self, step: Step, update: str, workers: int, link: float) -> Workbench:
        """One combination on its workers. What runs the layers is compiled once for all combinations."""
        recipe = make_recipe(self.arguments, step, update, workers, link)
        if recipe.engine.ram_limit is None:  # the store is there already
            ram = available_host_bytes() + psutil.Process().memory_info().rss
            recipe = recipe.with_values("engine", ram_limit=ram)
        devices = make_devices(recipe.engine)
        job = make_job(recipe, step, model_of(self.bench.job))
        return replace(self.bench, job=job, devices=devices, functions=self.bench.functions[: len(devices)])

    def profile(self, step: Step, workers: int) -> Profile:
        """What layers, links and optimizer take at the shape of ``step``, measured once."""
        key = step, workers
        if key not in self._profiles:
            bench = self.workbench(step, "sync", workers, 0)
            self._profiles[key] = bench.measure(bench.conditions(), lambda line: None)
            if not self._quiet:
                _print_profile(self._profiles[key], bench.one_pass)
        return self._profiles[key]

    def prepare(self, step: Step, update: str, workers: int, link: float, measured: bool) -> Prepared:
        """Plans one combination as ``rpft train`` does; ends the process where it does not fit."""
        profile = with_link(self.profile(step, workers), link) if measured else None
        prepared = plan_here(self.workbench(step, update, workers, link), profile)
        if prepared.memory_short:
            bill = prepared.bill
            sys.exit(f"the smallest plan takes {gib(bill.device)} of VRAM, {gib(bill.host)} of RAM")
        return prepared


def with_link(profile: Profile, link: float) -> Profile:
    """``profile`` with every link slowed down to ``link`` GB/s each way; 0: as it is."""

    def slowed(links: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
        return tuple((min(up, link * 1e9), min(down, link * 1e9)) for up, down in links)

    if not link:
        return profile
    return replace(profile, links=slowed(profile.links), links_together=slowed(profile.links_together))


class Run:
    """One combination: its plan and its engine, ready to step."""

    def __init__(
        self, model: Model, step: Step, update: str, workers: int, link: float = 0, steps_before: int = 0
    ) -> None:
        """``steps_before``: those that the store has had."""
        self.model, self.step, self.update, self.link = model, step, update, link
        measured = model.arguments.kernels != "eager"
        self.prepared = model.prepare(step, update, workers, link, measured)
        self.plan, self.bill, self.devices = self.prepared.plan, self.prepared.bill, self.prepared.devices
        self.predicted_seconds = self.prepared.full_step_seconds if measured else None
        self.failure = Failure()
        store = model.store_for(self.prepared)
        self.machinery = idle_machinery(self.prepared, store, self.failure, steps_before)
        self.update_seconds: list[float] = []
        """From the arrival of a step's last gradient to the last layer's update."""

    @property
    def follows_the_rule(self) -> bool:
        """Whether all weights are trained and every token meets all of them; see hiding.py."""
        return not self.model.arguments.lora and not any(self.prepared.skeleton.choices)

    def start(self) -> None:
        """Builds the engine."""
        self.machinery.start()

    def batches(self, step: int) -> list[HostBatch]:
        """The microbatches of ``step``: of one or the other of two, in turn."""
        return Flight(step, self.prepared.data.step(1 + step % 2)).host_batches()

    def steps(self, first: int, count: int) -> list[float]:
        """Runs ``count`` steps, each queued while the one before computes, drained at both ends; their seconds."""

        def told(result: UpdateResult, seconds: float) -> None:
            loss = result.loss_sum / (self.step.rows * (self.step.sequence - 1))
            print(f"{result.step}: {loss:.4f} {seconds:.2f} s", end="; ", flush=True)
            self.update_seconds.append(result.update_seconds)

        seconds = timed_steps(self.machinery, range(first, first + count), self.batches, told)
        print()
        return seconds

    def trace(self, first: int, count: int, path: Path) -> None:
        """Traces ``count`` steps into ``path`` and prints what of the transfers compute hid."""
        tracer = Tracer(self.machinery.streams())
        tracer.start()
        self.steps(first, count)
        trace = tracer.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.write_chrome_trace(path)
        print(overlap_table(trace))

    def close(self) -> None:
        self.machinery.close()


def add_copies(store: HostStore, device: Device) -> None:
    """What delayed updates need of a store that was made for exact ones."""
    for layer in store.layers:
        if not layer.second.numel():
            layer.second = device.allocate_host(layer.working.nbytes)


def _print_profile(profile: Profile, one_pass: OnePass) -> None:
    rates, layers = profile.rates(), profile.layers
    print(
        f"link {rates.up / 1e9:.0f} GB/s up, {rates.down / 1e9:.0f} down;"
        f" optimizer {rates.update / 1e9:.2f} G parameters/s on {one_pass.num_threads} threads"
    )
    beside = profile.beside
    print(
        f"all links both ways: {beside.copied_alone / 1e9:.0f} GB/s, and {beside.copied / 1e9:.0f} beside the"
        f" optimizer, which then does {beside.updates / 1e9:.2f} G parameters/s"
    )
    for name, p in (("embedding", layers[0]), ("block", layers[1]), ("head", layers[-1])):
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
    Engine.settle()
    for device in run.devices:
        device.reset_peak()
    retries = allocation_retries(run.devices)
    seconds = run.steps(1 + arguments.warm_up, run.step.timed)
    retries = allocation_retries(run.devices) - retries
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
            *([arguments.quantize] if arguments.quantize != "none" else []),
            *([f"{arguments.state} moments"] if arguments.state != "fp32" else []),
            *([f"{arguments.expert_groups} groups of experts"] if arguments.expert_groups > 1 else []),
            f"{run.update}, {len(peaks)} worker(s), {step.rows} x {step.sequence}, M = {step.microbatches}",
            *([f"(link emulated at {run.link} GB/s)"] if run.link else []),
        ]
    )
    print(
        f"RESULT {case}: {median:.0f} tok/s by the median step, {drained:.0f} drained;"
        f" peak VRAM {' '.join(map(gib, peaks))} (reserved {gib(reserved)}, {retries} allocation retries)"
        f" of {gib(run.bill.device)} by the bill;"
        f" RAM {gib(rss)} of {gib(run.bill.host)}",
        flush=True,
    )
    figures = [
        ("tokens a second, median step", median, "tok/s"),
        ("tokens a second, drained", drained, "tok/s"),
        ("peak VRAM, allocated", max(peaks) / 2**30, "GiB"),
        ("peak VRAM, reserved", reserved / 2**30, "GiB"),
        ("VRAM by the bill", run.bill.device / 2**30, "GiB"),
        ("allocation retries", retries, "times"),
        ("RAM, resident", rss / 2**30, "GiB"),
        ("RAM by the bill", run.bill.host / 2**30, "GiB"),
        ("update behind the last gradient", statistics.median(run.update_seconds[-step.timed :]), "s"),
    ]
    if run.predicted_seconds is not None:
        figures += _predicted(run, tokens / run.predicted_seconds)
    if arguments.trace is not None:
        name = f"{arguments.preset}_{step.rows}x{step.sequence}_{run.update}_{len(peaks)}.json"
        run.trace(1 + arguments.warm_up + step.timed, 3, arguments.trace / name)
    return [{"case": case, "metric": m, "value": round(value, 4), "unit": unit} for m, value, unit in figures]


def _predicted(run: Run, tokens_per_second: float) -> list[tuple[str, float, str]]:
    """What was predicted, and the rates of the memory that it comes from."""
    usual, profile = run.prepared.usual_step(), run.prepared.profile
    assert usual is not None
    assert profile is not None
    seconds = update_seconds(usual.plan, usual.shape, run.prepared.rates)
    print(
        f"predicted {tokens_per_second:.0f} tok/s; update {seconds:.3f} s,"
        f" and {statistics.median(run.update_seconds[-run.step.timed :]):.3f} measured",
        flush=True,
    )
    beside, rates, shape = profile.beside, run.prepared.rates, usual.shape
    hidden = hidden_from(shape, rates, usual.plan.resident)
    print(
        f"compute hides uploads from {hidden.forward:.0f} tokens a forward slot on and {hidden.backward:.0f} a"
        f" backward slot, the update from {hidden.update:.0f} a step"
    )
    all_hidden = [("tokens a step that hide all", hidden.step(shape.rounds), "tokens")]
    if run.follows_the_rule:
        rule = by_the_rule(shape, rates)
        print(f"by the rule of thumb from {rule.forward:.0f}, {rule.backward:.0f} and {rule.update:.0f}")
        all_hidden += [("the same by the rule of thumb", rule.step(shape.rounds), "tokens")]
    return [
        *all_hidden,
        ("tokens a second, predicted", tokens_per_second, "tok/s"),
        ("update, predicted", seconds, "s"),
        ("optimizer alone", profile.updates / 1e9, "G parameters/s"),
        ("optimizer beside copies", beside.updates / 1e9, "G parameters/s"),
        ("copies both ways on all links", beside.copied_alone / 1e9, "GB/s"),
        ("the same beside the optimizer", beside.copied / 1e9, "GB/s"),
    ]


def main() -> int:
    try:
        return run_all(parse())
    except UserError as error:
        sys.exit(str(error))


def run_all(arguments: argparse.Namespace) -> int:
    """Measures every combination; the exit code."""
    started = time.perf_counter()
    steps = steps_of(arguments)
    model = Model(arguments, steps[0], expert_groups=arguments.expert_groups)
    print(f"ready after {time.perf_counter() - started:.0f} s", flush=True)
    results, names = [], []
    updates = sorted(set(arguments.update), reverse=True)  # sync first: a delayed one changes the store
    for update, step, workers, link in product(updates, steps, arguments.workers, arguments.emulate_link):
        run = Run(model, step, update, workers, link)
        run.start()
        results += measure(run)
        run.close()
        names = names or gpu_names(run.devices)
        if arguments.json is not None:
            write_record(arguments.json, "throughput", machine(names), results)
        del run
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
