"""What this machine has for fine-tuning, looked at and measured, and what each finding costs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from rpft import files
from rpft.draw.figures import duration
from rpft.engine.device import Device, cuda_available, make_pool
from rpft.errors import UserError
from rpft.host import available_cores, processor
from rpft.machine import device_names, versions
from rpft.model.scratch_file import lies_in_ram
from rpft.optim.one_pass import FusedPass, prepare
from rpft.peers import PEERS
from rpft.plan.bill import available_host_bytes, gib
from rpft.plan.disk_rate import turnover_rate
from rpft.plan.profile import measure_host_memory, measure_link, measure_links_together
from rpft.train.beside import measured_rate
from rpft.train.kernels import choose_kernels
from rpft.train.sinks import missing_packages

Grade = Literal["good", "note", "fault"]

EXAMPLE_PARAMETERS = 8e9
"""Of the model by which costs are told: an 8B, trained in full."""

_MORE_PACKAGES = ("peft", "safetensors", "numpy")
_SLOW_LINK, _FAST_ENOUGH_DISK = 10e9, 5e8
_LITTLE_RAM_BYTES = 16 << 30
_TRIED_BYTES = 1 << 28
"""Written to the disk, and page-locked, to see how that goes."""

_BYTES_TRAINED, _BYTES_SAVED, _BYTES_OF_MOMENTS = 16, 12, 8
"""Of RAM, of a checkpoint, and of both moments, for a trained parameter."""

_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    grade: Grade
    """note: it costs something; fault: training as it should be is not possible."""
    cost: str = ""
    """What it costs, or what to do."""
    figures: dict[str, Any] = field(default_factory=dict)
    """For programs; bytes, bytes a second, parameters a second."""


def examine(folder: Path) -> Iterator[Finding]:
    """Looks at all that a run depends on, the disk of ``folder`` among it; measures for seconds."""
    yield _machine()
    yield _versions()
    yield _optional_packages()
    yield from _gpus()
    yield _kernels()
    yield _ram()
    yield _memory_rate()
    yield _optimizer()
    yield _disk(folder)


def _machine() -> Finding:
    cores, system = available_cores(), f"{platform.system()} {platform.release()}"
    return Finding("machine", f"{processor()}, {cores} cores; {system}", "good", "", {"cores": cores})


def _versions() -> Finding:
    found = versions() | {name: importlib.metadata.version(name) for name in _MORE_PACKAGES}
    return Finding(
        "versions", ", ".join(f"{name} {version}" for name, version in found.items()), "good", "", found
    )


def _optional_packages() -> Finding:
    services = missing_packages()
    peers = {f"rpft bench --peers {p.name}": p.install for p in PEERS.values() if p.missing() is not None}
    missing = services | peers
    if not missing:
        return Finding("optional packages", "all installed", "good", "", {"missing": {}})
    cost = "not to be had without: " + ", ".join(f"{what} (pip install {name})" for what, name in missing.items())
    found = f"{len(missing)} not installed"
    return Finding("optional packages", found, "note", cost, {"missing": missing})


def _gpus() -> Iterator[Finding]:
    driver = _NVIDIA.read_text(encoding="utf-8").splitlines()[0] if _NVIDIA.is_file() else None
    if not cuda_available():
        if driver is None:
            yield Finding(
                "GPU", "none", "note", "the CPU pool trains, for trying out and small models", {"devices": []}
            )
        else:
            built = torch.version.cuda or torch.version.hip
            why = (
                f"torch is built for CUDA {built}, which the driver may be too old for"
                if built
                else ("this torch is built without CUDA")
            )
            advice = f"{why}: install the torch build that suits the driver ({driver})"
            yield Finding("GPU", "there is a driver, and torch sees no GPU", "fault", advice, {"devices": []})
        return
    if driver is not None:
        yield Finding("driver", driver, "good", f"torch is built for CUDA {torch.version.cuda}")
    try:
        devices = make_pool("cuda", None, None)
    except (UserError, RuntimeError) as error:
        yield Finding("GPU", f"cannot be used: {error}", "fault", "free it, or set engine.device=cpu")
        return
    names = device_names([device.torch_device for device in devices])
    for number, (name, device) in enumerate(zip(names, devices, strict=True)):
        free, total = torch.cuda.mem_get_info(number)
        taken = total - free
        yield Finding(
            f"GPU {number}",
            f"{name}, {gib(total)}, {gib(free)} free",
            "note" if taken > total // 10 else "good",
            f"others hold {gib(taken)}, which stages cannot use" if taken > total // 10 else "",
            {"total_bytes": total, "free_bytes": free, "usable_bytes": device.memory_bytes()},
        )
    yield from _links(devices)
    yield _page_locking(devices[0])


def _links(devices: list[Device]) -> Iterator[Finding]:
    alone = [measure_link(device.torch_device, device.allocate_host) for device in devices]
    for number, (up, down) in enumerate(alone):
        seconds = 2 * 2 * EXAMPLE_PARAMETERS / (up * len(devices))
        yield Finding(
            f"link of GPU {number}",
            f"{up / 1e9:.1f} GB/s up, {down / 1e9:.1f} down",
            "note" if min(up, down) < _SLOW_LINK else "good",
            f"the weights of an 8B, up twice a round, take it {duration(seconds)}"
            + ("; look whether the card has all lanes of its slot" if min(up, down) < _SLOW_LINK else ""),
            {"up": up, "down": down},
        )
    if len(devices) > 1:
        places = [device.torch_device for device in devices]
        together = measure_links_together(places, devices[0].allocate_host)
        up, down = (sum(link[way] for link in together) for way in (0, 1))
        shared = up < 0.9 * sum(link[0] for link in alone)
        yield Finding(
            "all links at once",
            f"{up / 1e9:.1f} GB/s up, {down / 1e9:.1f} down",
            "note" if shared else "good",
            "they share a switch or socket; plans count that" if shared else "",
            {"up": up, "down": down},
        )


def _page_locking(device: Device) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    known = None if limit == resource.RLIM_INFINITY else limit
    locked = device.allocate_host(_TRIED_BYTES).is_pinned()
    figures = {"allowed": locked, "limit_bytes": known}
    said = f"{'allowed' if locked else 'refused'}; ulimit -l: {'unlimited' if known is None else gib(known)}"
    if locked:
        return Finding("page-locking", said, "good", "", figures)
    return Finding(
        "page-locking",
        said,
        "note",
        "copies run from pageable memory, several times slower; raise the limit: ulimit -l unlimited",
        figures,
    )


def _kernels() -> Finding:
    device = "cuda" if cuda_available() else "cpu"
    try:
        chosen = choose_kernels("auto" if device == "cuda" else "compile", device)
        missing = chosen.missing
    except UserError as error:
        missing = str(error)
    if missing is None:
        return Finding("compiled layers", "can be built", "good", "", {"compile": True})
    return Finding("compiled layers", missing, "note", "layers run slower without", {"compile": False})


def _ram() -> Finding:
    import psutil

    total, free = psutil.virtual_memory().total, available_host_bytes()
    largest = free / _BYTES_TRAINED / 1e9
    return Finding(
        "RAM",
        f"{gib(total)}, {gib(free)} free",
        "note" if free < _LITTLE_RAM_BYTES else "good",
        f"holds about {largest:.2g} G trained parameters in bfloat16, or {8 * largest:.2g} G frozen ones",
        {"total_bytes": total, "free_bytes": free},
    )


def _memory_rate() -> Finding:
    rate = measure_host_memory()
    return Finding("memory bandwidth", f"{rate / 1e9:.1f} GB/s read and written", "good", "", {"rate": rate})


def _optimizer() -> Finding:
    one_pass = prepare()
    rate = measured_rate(one_pass)
    fused = isinstance(one_pass, FusedPass)
    cost = f"an update of an 8B takes {duration(EXAMPLE_PARAMETERS / rate)}"
    if fused:
        cost += "; its kernel was not compiled: slower, and 2 bytes a parameter more RAM. Install g++ or set $CXX"
    kind = "torch's fused kernel" if fused else "one pass"
    found = f"{rate / 1e9:.2f} G parameters/s ({kind})"
    return Finding("optimizer", found, "note" if fused else "good", cost, {"updates": rate, "compiled": not fused})


def _disk(folder: Path) -> Finding:
    place = files.existing_folder(folder)
    free = files.free_bytes(place)
    if free < 2 * _TRIED_BYTES:
        return Finding("disk", f"{gib(free)} free in {place}", "fault", "no room for a result; make some")
    try:
        rate = _written_rate(place / f".rpft-doctor-{os.getpid()}")
    except OSError as error:
        return Finding("disk", f"{place} cannot be written: {error.strerror}", "fault", "give another --folder")
    checkpoint = _BYTES_SAVED * EXAMPLE_PARAMETERS
    cost = f"a checkpoint of an 8B, {gib(int(checkpoint))}, takes {duration(checkpoint / rate)}"
    slow = rate < _FAST_ENOUGH_DISK
    figures = {"free_bytes": free, "write": rate}
    turnover = None if lies_in_ram(place) else turnover_rate(place, 2 * _TRIED_BYTES)
    if turnover is not None:
        figures["turnover"] = turnover
        seconds = _BYTES_OF_MOMENTS * EXAMPLE_PARAMETERS / turnover
        cost += f"; its moments, read and written back (optimizer.offload), take {duration(seconds)} a step"
    found = f"{gib(free)} free, {rate / 1e9:.2f} GB/s written, in {place}"
    return Finding("disk", found, "note" if slow else "good", cost, figures)


def _written_rate(path: Path) -> float:
    """Bytes a second that are on the disk when they are said to be."""
    block = memoryview(os.urandom(1 << 24))
    started = time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(_TRIED_BYTES // len(block)):
                files.write(file, block)
            os.fsync(file.fileno())
        return _TRIED_BYTES / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)
