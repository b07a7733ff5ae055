"""Runs a tiny model through the engine and the optimizer, below the command line, for tests of the protocol."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpft.engine.cpu import CpuDevice
from rpft.engine.device import Device
from rpft.engine.engine import Engine
from rpft.engine.failure import Failure
from rpft.engine.slot import HostBatch
from rpft.engine.streams import Delays
from rpft.model.adapters import LoraSettings, initialise_lora, inject_lora
from rpft.model.build import build_model
from rpft.model.checkpoint import Checkpoint, read_config
from rpft.model.cut import cut
from rpft.model.cut_experts import cut_experts
from rpft.model.frozen_file import FrozenFile
from rpft.model.functions import LayerFunctions
from rpft.model.graphs import KernelKind
from rpft.model.host_layer import HostLayer
from rpft.model.host_store import HostStore
from rpft.model.layers import build_layers
from rpft.model.load import load_checkpoint
from rpft.model.moments import StateFormat, stored_parts
from rpft.model.moments_file import MomentsFile
from rpft.model.quant import QuantKind
from rpft.model.quant_choice import quantize_base
from rpft.optim.adamw import AdamW
from rpft.optim.host_optimizer import HostOptimizer, UpdateResult
from rpft.optim.one_pass import FusedPass, OnePass
from rpft.optim.schedule import Schedule
from rpft.plan.plan import Plan, Stage

SEQUENCE = 12
HANG_SECONDS = 600.0
"""A run that takes longer fails; on a quiet machine the longest takes 15 seconds, in which layers are compiled."""
ALGORITHM = AdamW(weight_decay=0.1)


def plan_of(
    forward: Sequence[tuple[int, int]], backward: Sequence[tuple[int, int]], m: int, recompute: str
) -> Plan:
    """A plan from pairs of layer numbers."""
    return Plan(tuple(Stage(*s) for s in forward), tuple(Stage(*s) for s in backward), m, recompute)


def random_batches(count: int, seed: int, rows: int = 2, vocabulary: int = 320) -> list[HostBatch]:
    """Microbatches [rows, SEQUENCE] of random tokens, each with another number of trained ones."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(count):
        ids = torch.randint(3, vocabulary, (rows, SEQUENCE), generator=generator)
        labels = torch.full((rows, SEQUENCE), -100)
        labels[:, 3 + i % 4 : -1] = ids[:, 4 + i % 4 :]
        flat = labels.flatten()
        trained_at = (flat >= 0).nonzero().flatten()
        batches.append(HostBatch(ids, None, trained_at, flat[trained_at]))
    return batches


@dataclass
class Outcome:
    """What a run leaves behind, comparable bit for bit."""

    results: list[UpdateResult]
    eval_loss_sums: list[float]
    """Of the evaluations on the way, then of the one at the end."""
    store: HostStore
    boundary_buffers: int

    @property
    def numbers(self) -> list[tuple[float, float]]:
        """(loss sum, gradient norm) of each step."""
        return [(r.loss_sum, r.grad_norm) for r in self.results]

    def differences(self, other: Outcome) -> list[str]:
        """What differs in losses, norms, evaluations, or any byte of weights, masters and moments."""
        found = []
        for mine, theirs in zip(self.results, other.results, strict=True):
            if mine != theirs:
                found.append(f"{mine} != {theirs}")
        if self.eval_loss_sums != other.eval_loss_sums:
            found.append(f"evaluation {self.eval_loss_sums} != {other.eval_loss_sums}")
        for a, b in zip(self.store.layers, other.store.layers, strict=True):
            found += [
                f"{kind} of layer {a.layout.layer}"
                for kind in ("trained weights", "frozen", "second", "master", "state")
                if not torch.equal(_of(a, kind), _of(b, kind))
            ]
        return found


def _of(layer: HostLayer, kind: str) -> torch.Tensor:
    if kind == "trained weights":
        return layer.run(0, 0, layer.layout.frozen_start)
    if kind == "state":  # which may lie in a file
        parts = ((part.name, layer.layout.num_trained // part.block) for part in stored_parts(layer.state_format))
        return torch.cat([layer.state_part(name, 0, count).view(torch.uint8) for name, count in parts])
    return getattr(layer, kind)


def random_plan(rng: random.Random, num_layers: int, num_microbatches: int) -> Plan:
    """Any legal plan: the fused stage from the head alone to the whole model, both partitions cut anywhere."""
    head = num_layers - 1
    fused_first = rng.randint(0, head)

    def cuts() -> list[Stage]:
        often = rng.random()
        starts = [i for i in range(fused_first) if i == 0 or rng.random() < often]
        return [Stage(a, b - 1) for a, b in zip(starts, [*starts[1:], fused_first], strict=False)]

    return Plan(
        tuple(cuts()),
        (Stage(fused_first, head), *reversed(cuts())),
        num_microbatches,
        rng.choice(["stage", "layer"]),
    )


def run_engine(
    folder: Path,
    plan: Plan,
    workers: int = 1,
    *,
    steps: int = 3,
    microbatches: int = 4,
    lora: LoraSettings | None = None,
    delays_seed: int | None = None,
    update_lag: int = 0,
    dtype: torch.dtype = torch.float32,
    max_grad_norm: float | None = 1.0,
    learning_rate: float = 1e-2,
    algorithm: AdamW = ALGORITHM,
    seed: int = 3,
    make_device: Callable[[int], Device] = CpuDevice,
    batches_of: Callable[[int], list[HostBatch]] | None = None,
    before_run: Callable[[Engine, HostOptimizer], Any] | None = None,
    evaluate_every: int = 0,
    kernels: KernelKind = "eager",
    gradient_dtype: torch.dtype = torch.float32,
    one_pass: OnePass | None = None,
    state: StateFormat = "fp32",
    quantize: QuantKind | None = None,
    frozen_in: Path | None = None,
    moments_in: Path | None = None,
    router_loss: float = 0.0,
    groups: int = 1,
) -> Outcome:
    """Trains the checkpoint in ``folder`` for ``steps`` steps; raises the engine's fault, if any.

    ``groups``: of the experts of each block, every one a layer of the plan's.
    ``frozen_in`` and ``moments_in``: the folder of a file in which frozen weights, or moments, lie, None for RAM.
    """
    config = read_config(folder)
    skeleton = cut(build_model(config, dtype, "auto"))
    skeleton.router_loss = router_loss
    if lora is not None:
        inject_lora(skeleton, lora, str(folder))
    checkpoint = Checkpoint(folder)
    if quantize is not None:
        quantize_base(skeleton, quantize, dtype, nested=checkpoint.stored.nested or not checkpoint.stored.weights)
    skeleton = cut_experts(skeleton, groups, dtype)
    devices = [make_device(i) for i in range(workers)]
    layouts = build_layers(skeleton, dtype)
    store = HostStore(
        layouts,
        devices[0].allocate_host,
        two_copies=update_lag == 1,
        gradient_dtype=gradient_dtype,
        state_format=state,
        frozen_file=None if frozen_in is None else FrozenFile(frozen_in, layouts, checkpoint.files()),
        moments_file=None if moments_in is None else MomentsFile(moments_in, layouts, state),
    )
    load_checkpoint(checkpoint, skeleton, store)
    if lora is not None:
        initialise_lora(skeleton, store, seed)
    failure, delays = Failure(), Delays(delays_seed)
    schedule = Schedule("constant", learning_rate, steps)
    kernels_of_update = one_pass or FusedPass(state)
    optimizer = HostOptimizer(
        store, algorithm, schedule, max_grad_norm, failure, delays, kernels=kernels_of_update
    )
    engine = Engine(
        skeleton,
        store,
        plan,
        devices,
        functions=[LayerFunctions(skeleton, d.torch_device, dtype, kernels) for d in devices],
        max_tokens=2 * SEQUENCE,
        seed=seed,
        update_lag=update_lag,
        send_update=optimizer.submit,
        failure=failure,
        delays=delays,
    )
    batches_of = batches_of or (lambda step: random_batches(microbatches, step))
    evaluations: list[float] = []
    watchdog = threading.Timer(HANG_SECONDS, lambda: failure.set(TimeoutError("the engine hangs")))
    watchdog.daemon = True
    watchdog.start()
    try:
        if before_run is not None:
            before_run(engine, optimizer)
        for step in range(1, steps + 1):
            engine.submit_step(step, batches_of(step))
            if evaluate_every and step % evaluate_every == 0:
                evaluations.append(engine.evaluate(random_batches(3, seed=99)))
        engine.flush()
        results = [optimizer.wait(step) for step in range(1, steps + 1)]
        evaluations.append(engine.evaluate(random_batches(3, seed=99)))
    finally:
        watchdog.cancel()
        still_running = engine.close()
        optimizer.close()
        ended = optimizer.join(5.0)
    assert not still_running, still_running
    assert ended
    return Outcome(results, evaluations, store, engine.boundary_buffers)
