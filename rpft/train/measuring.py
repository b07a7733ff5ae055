"""What a job's layers, links and optimizer take on the machine at hand: measured, or as it was measured before."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rpft
from rpft.engine.device import Device
from rpft.errors import UserError
from rpft.files import digest
from rpft.host import available_cores, others_cores
from rpft.machine import device_names, machine_of, unlike_others, versions
from rpft.model.functions import LayerFunctions
from rpft.model.layout import align
from rpft.optim.one_pass import OnePass
from rpft.plan.profile import (
    LayerMeter,
    LayerProfile,
    layers_by_kind,
    measure_host_memory,
    measure_link,
    measure_links_together,
    measure_slowdown,
)
from rpft.plan.profile_file import KindProfile, OtherLength, Profile, cached_path, find_cached, keep_cached
from rpft.train.beside import measure_beside
from rpft.train.job import Job
from rpft.train.rows import PAD_TO_MULTIPLE

Say = Callable[[str], None]
"""Takes a line for the person who waits."""

_CPU_LINK_BYTES = 1 << 25
"""What is copied to measure the CPU pool's way to its stand-ins: more than caches hold."""

_BUSY = 0.2
"""Share of the cores that others keep busy from which on no later run is to trust what is measured."""

_CHECKED = (0.5, 1.0)
"""Where among the blocks of the most common kind others are measured too."""


class LayerTooLarge(UserError):
    """A worker has not the memory for one layer."""


@dataclass(frozen=True)
class Workbench:
    """A job on the workers at hand."""

    job: Job
    devices: list[Device]
    functions: list[LayerFunctions]
    """What runs the layers, one a device."""
    one_pass: OnePass
    """What updates them."""

    @property
    def on_cuda(self) -> bool:
        return self.devices[0].torch_device.type == "cuda"

    @property
    def _places(self) -> list[torch.device]:
        return [device.torch_device for device in self.devices]

    @property
    def _row_tokens(self) -> int | None:
        """Of packed rows."""
        return self.job.data.typical_row_tokens if self.job.recipe.data.packing else None

    def find_profile(self, say: Say, needed: bool, lengths: bool = False) -> Profile | None:
        """The cached profile; or a new one if ``needed``, which the cache then gets; or None.

        ``lengths``: see ``measure``.
        """
        conditions = self.conditions()
        cached, fault = find_cached(conditions)
        if fault is not None:
            say(fault)
        if cached is not None:
            say(f"layers as they were measured before ({cached_path(conditions)})")
            return cached
        if not needed:
            return None
        return self.measure_and_keep(say, lengths=lengths)

    def measure_and_keep(self, say: Say, lengths: bool = False, thorough: bool = False) -> Profile:
        """A new profile, which the cache gets too unless others work on the machine; see ``measure``."""
        busy, cores = others_cores(), available_cores()
        profile = self.measure(self.conditions(), say, lengths, thorough)
        if busy is not None and busy > _BUSY * cores:
            say(
                f"warning: others work on this machine: as the measurement began they kept {busy:.1f} cores busy,"
                f" where this run has {cores}. It is less certain than on a quiet one, and it is not kept"
            )
            return profile
        fault = keep_cached(profile)
        if fault is not None:
            say(fault)
        return profile

    def conditions(self) -> dict[str, Any]:
        """All that a measurement depends on."""
        job, engine = self.job, self.job.recipe.engine
        config = job.skeleton.model.config
        return {
            "machine": machine_of(self._places),
            "unlike_others": unlike_others(self._places),
            "model": type(job.skeleton.model).__name__,
            "layers": _digest(job),
            "attention": getattr(config, "_attn_implementation", None),
            "adapter": job.recipe.adapter and job.recipe.adapter.model_dump(mode="json"),
            "dtype": str(job.dtype).removeprefix("torch."),
            "gradients": str(job.gradient_dtype).removeprefix("torch."),
            "state": job.recipe.optimizer.state,
            "kernels": job.kernels.kind,
            "deterministic": engine.deterministic,
            "rows": job.rows,
            "sequence": job.data.longest,
            "packed_rows": self._row_tokens,
            "cpu_threads": engine.cpu_threads,
            "emulate_link_gbps": engine.emulate_link_gbps,
            "versions": {**versions(), "code": _code_mark()},
        }

    def measure(
        self, conditions: dict[str, Any], say: Say, lengths: bool = False, thorough: bool = False
    ) -> Profile:
        """Measures layers, links and optimizer; UserError where one layer alone is too much.

        ``lengths``: also lines of two other lengths, for which layers may have to be compiled once more.
        ``thorough``: also some positions, and the host's memory.
        """
        job, functions = self.job, self.functions[0]
        sequence = job.data.longest
        kinds = layers_by_kind(functions, len(job.layouts))
        firsts = [layers[0] for layers in kinds]
        compiled = "; they are compiled for it first" if job.kernels.kind == "compile" else ""
        say(f"measuring the layers with {job.rows} x {sequence} tokens on {functions.device}{compiled}")
        with self._enough_memory(sequence):
            meter = self._meter(functions, sequence)
            measured = [meter.measure(layer) for layer in firsts]
            checks = {layer: meter.measure(layer) for layer in _positions(kinds)} if thorough else {}
            slowdown = self._slowdown(sequence, kinds[1][0])
            del meter
            speeds = self._speeds(sequence, kinds[1][0], measured[1])
        others = []
        for other in self._other_lengths() if lengths else ():
            say(f"and with {job.rows} x {other} tokens")
            with self._enough_memory(other):
                meter = self._meter(functions, other)
                others.append(OtherLength(other, tuple(meter.measure(layer) for layer in firsts)))
                del meter
        if self.on_cuda:
            torch.cuda.empty_cache()
        links, together = self._links()
        updates, beside = measure_beside(self.devices, self.one_pass)
        return Profile(
            conditions=conditions,
            kinds=tuple(map(self._kind, kinds, measured)),
            links=links,
            links_together=together,
            updates=updates,
            beside=beside,
            slowdown=slowdown,
            speeds=speeds,
            host_memory=measure_host_memory() if thorough else None,
            lengths=tuple(others),
            checks=checks,
        )

    def _meter(self, functions: LayerFunctions, sequence: int) -> LayerMeter:
        job = self.job
        return LayerMeter(
            functions,
            job.layouts,
            job.rows,
            sequence,
            job.shape.vocab_size,
            dropout=job.has_dropout,
            row_tokens=self._row_tokens,
        )

    def _slowdown(self, sequence: int, block: int) -> float:
        """How many times as long a block takes while all workers compute: those of the CPU pool share cores."""
        if self.on_cuda or len(self.functions) == 1:
            return 1.0
        # More of them than cores only wait for one another, and each would make graphs of its own.
        some = self.functions[: max(2, available_cores())]
        meters = [self._meter(functions, sequence) for functions in some]
        return measure_slowdown(meters, block) * len(self.functions) / len(some)

    def _speeds(self, sequence: int, block: int, measured: LayerProfile) -> tuple[float, ...]:
        """Of each GPU, over the first's, by the time that a block takes; empty where all are of one kind."""
        names = device_names(self._places)
        if len(set(names)) == 1:
            return ()
        found = {names[0]: measured}
        for name, functions in zip(names, self.functions, strict=True):
            if name not in found:
                found[name] = self._meter(functions, sequence).measure(block)
        times = {name: profile.forward_seconds + profile.backward_seconds for name, profile in found.items()}
        return tuple(times[names[0]] / times[name] for name in names)

    def _kind(self, layers: tuple[int, ...], measured: LayerProfile) -> KindProfile:
        first, last = layers[0], len(self.job.layouts) - 1
        layout = self.job.layouts[first]
        name = {0: "embedding", last: "head"}.get(first, "block")
        gradient_bytes = layout.grad_elements * self.job.gradient_dtype.itemsize
        return KindProfile(name, layers, layout.region_bytes, gradient_bytes, layout.num_trained, measured)

    def _links(self) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[float, float], ...]]:
        """(each GPU's link alone, each with all the others); of the CPU pool one copy in RAM stands for all."""
        if not self.on_cuda:
            device = self.devices[0]
            return (measure_link(device.torch_device, device.allocate_host, _CPU_LINK_BYTES),), ()
        alone = [measure_link(device.torch_device, device.allocate_host) for device in self.devices]
        together = []
        if len(self.devices) > 1:
            together = measure_links_together(self._places, self.devices[0].allocate_host)
        emulated = self.job.recipe.engine.emulate_link_gbps
        most = float("inf") if emulated is None else emulated * 1e9
        alone, together = ([(min(up, most), min(down, most)) for up, down in some] for some in (alone, together))
        return tuple(alone), tuple(together)

    def _other_lengths(self) -> list[int]:
        """Two lengths of about half and a quarter, to which some lines of the data are padded if any are."""
        data, found = self.job.data, []
        for part in (2, 4):
            wanted = align(max(1, data.longest // part), PAD_TO_MULTIPLE)
            near = min(data.pad_lengths, key=lambda length: abs(length - wanted))
            length = wanted if near in (*found, data.longest) else near
            if length < data.longest and length not in found:
                found.append(length)
        return found

    @contextmanager
    def _enough_memory(self, sequence: int) -> Iterator[None]:
        device, rows = self.functions[0].device, self.job.rows
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise LayerTooLarge(
                f"a single layer with a microbatch of {rows} x {sequence} tokens needs more memory than {device}"
                " has or engine.vram_limit allows. Less is needed with a smaller train.micro_batch_size or"
                f" data.max_seq_len ({str(error).splitlines()[0]})"
            ) from error


def _positions(kinds: list[tuple[int, ...]]) -> list[int]:
    """Blocks other than the measured one of the most common kind."""
    layers = max(kinds[1:-1], key=len)
    return sorted({layers[round(share * (len(layers) - 1))] for share in _CHECKED} - {layers[0]})


def _digest(job: Job) -> str:
    """Of the model's config and of every tensor's shape, precision and training; not of its name."""
    config = job.skeleton.model.config.to_dict()
    told = {key: value for key, value in config.items() if not key.startswith("_")}
    told.pop("transformers_version", None)
    tensors = [
        [(list(b.shape), str(b.dtype), b.grad_offset is not None) for b in layout.bindings]
        for layout in job.layouts
    ]
    text = json.dumps([told, tensors], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@functools.cache
def _code_mark() -> str:
    """A digest of the code that runs the layers, the optimizer and the measurement."""
    package = Path(rpft.__file__).parent
    folders = [sorted((package / name).iterdir()) for name in ("model", "optim")]
    sources = [path for path in (*folders[0], *folders[1]) if path.suffix in (".py", ".cpp")]
    return digest([*sources, package / "plan" / "profile.py", package / "train" / "beside.py"])
