"""Machines that one need not have: descriptions, and what their datasheets let expect of a model's layers.

A description is a YAML file; some are shipped, a person can write others. From it come the rates of links and
optimizer and a profile for each layer, in the place of measurements, so that `choose_plan` works as it does for
the machine at hand.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rpft.errors import UserError
from rpft.model.graphs import KernelKind
from rpft.model.layout import LayerLayout
from rpft.model.moments import BLOCK, StateFormat, moments_bytes
from rpft.model.skeleton import Skeleton
from rpft.plan.bill import Workload
from rpft.plan.costs import layer_costs
from rpft.plan.profile import LayerProfile
from rpft.plan.rates import Rates
from rpft.recipe.section import Section, listed
from rpft.recipe.yaml_tree import Located, parse_yaml

ACHIEVED = 0.71
"""Share of a datasheet's products that large products reach, on an H200 and on an RTX 4090."""

_PASSES: dict[KernelKind, tuple[float, float]] = {"eager": (30, 5), "trace": (30, 5), "compile": (8, 3)}
"""How often what is no product reads or writes a hidden state, and a widened one, in a block's forward: norms,
rotary tables, residuals, activations. Rough: counted for the compiled ones; the others chosen so that published
times of 8B's and 32B's blocks come out about right (docs/planning.md)."""

_UPDATE_SHARE = 0.75
"""Of the host's memory bandwidth, what the optimizer's pass over a parameter's bytes reaches."""

_UPDATES_OF_A_CORE: dict[StateFormat, float] = {"fp32": 5e8, "bf16": 5e8, "8bit": 2.5e8}
"""Moments of 8 bits keep a core busy: a quarter of the rate of float32 ones on one core (benchmarks/README.md)."""

_KEPT_BY_CUDA = 0.06
"""Of a card's memory: context, libraries, what the allocator cannot use."""

_BESIDE_BACKWARD = 2.0
"""What is no product, of a backward over a forward."""

_ATTENTION_BACKWARD = 2.5
"""Products of attention's backward over those of its forward: five for two."""

Count = Annotated[int, Field(gt=0, le=1024)]
Amount = Annotated[float, Field(gt=0, le=1e9)]
"""Of bytes, operations or their rates, in the unit of its name; the bounds tell a slip from a machine."""


class Gpus(Section):
    """Cards of one kind."""

    name: str
    count: Count
    tflops: Amount
    """Of dense products in the precision of the run, by the datasheet."""
    memory_gib: Amount
    link_gbps: Amount
    """To host memory, each way, as copies of page-locked memory reach it."""
    memory_gbps: Amount | None = None
    """Of the card's own memory, by the datasheet; left out, what is no product takes no time."""


class SharedLink(Section):
    """A switch or socket through which the links of several cards go."""

    gpus: Count
    """Cards that share it: the first so many, the next so many."""
    gbps: Amount
    """Each way."""


class Host(Section):
    ram_gib: Amount
    memory_gbps: Amount
    """Of reads and writes together, as a program reaches it."""
    cores: Count
    disk_gbps: Amount | None = None
    """Of the disk of ``optimizer.offload``, read and written back at the same time; left out, it takes no time."""


class Machine(Section):
    """A machine as its file describes it."""

    gpus: tuple[Gpus, ...] = listed(min_length=1)
    shared_link: SharedLink | None = None
    host: Host

    @property
    def num_workers(self) -> int:
        return sum(kind.count for kind in self.gpus)

    @property
    def speeds(self) -> list[float] | None:
        """Of each worker, over the first's; None where all are alike."""
        speeds = [kind.tflops / self.gpus[0].tflops for kind in self.gpus for _ in range(kind.count)]
        return None if len(set(speeds)) == 1 else speeds

    @property
    def vram_bytes(self) -> int:
        """What a run may take on the smallest card."""
        return int(min(kind.memory_gib for kind in self.gpus) * 2**30 * (1 - _KEPT_BY_CUDA))

    @property
    def ram_bytes(self) -> int:
        return int(self.host.ram_gib * 2**30)

    @property
    def rates(self) -> Rates:
        """Of links, and of an optimizer with float32 moments."""
        return self.rates_with("fp32")

    def rates_with(self, state_format: StateFormat) -> Rates:
        """Of links and optimizer; where cards differ every link is as slow as the slowest.

        Copies beside an update keep their rate, and it waits while the host's memory takes their bytes.
        """
        link = min(kind.link_gbps for kind in self.gpus) * 1e9
        host, memory = self.host, self.host.memory_gbps * 1e9
        cores = _UPDATES_OF_A_CORE[state_format] * host.cores
        update = min(cores, _UPDATE_SHARE * memory / _update_bytes(state_format))
        shared = self.shared_link
        if shared is None or shared.gbps * 1e9 >= shared.gpus * link:
            return Rates(link, link, update, memory=memory)
        return Rates(link, link, update, shared.gpus, link / (shared.gbps * 1e9), memory)

    def with_workers(self, count: int) -> Machine:
        """This machine with its first ``count`` cards; UserError where it has fewer."""
        if count > self.num_workers:
            raise UserError(
                f"engine.workers is {count}, and the machine has {self.num_workers} GPUs; null takes them all"
            )
        kept = []
        for kind in self.gpus:
            taken = min(kind.count, count)
            count -= taken
            if taken:
                kept.append(kind.model_copy(update={"count": taken}))
        return self.model_copy(update={"gpus": tuple(kept)})


def machine_names() -> list[str]:
    """Names of the shipped descriptions, sorted."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def read_machine(name: str) -> Machine:
    """The machine of a shipped description, or of a YAML file; UserError names the file and the key at fault."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and name not in machine_names():
        close = difflib.get_close_matches(name.lower(), machine_names(), n=1, cutoff=0.4)
        advice = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(machine_names())}."
        raise UserError(f"no machine is called {name!r}; {advice} A file of your own ends in .yaml")
    if name in machine_names():
        path = _folder() / f"{name}.yaml"
    try:
        root, faults = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such machine file; docs/planning.md has its form, and shipped are"
            f" {', '.join(machine_names())}"
        ) from error
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"{path}: not a machine file: {error}") from error
    if root is None:
        raise UserError(f"{path}: not a machine: the file is empty. docs/planning.md has the form")
    try:
        machine = Machine.model_validate(root.plain())
    except ValidationError as error:
        faults += _faults(error, root)
    if faults:
        raise UserError(f"{path}: not a machine: {'; '.join(faults)}. docs/planning.md has the form")
    return machine


def datasheet_profiles(
    machine: Machine,
    layouts: Sequence[LayerLayout],
    skeleton: Skeleton,
    work: Workload,
    sequence: int,
    achieved: float = ACHIEVED,
) -> list[LayerProfile]:
    """What each layer should take on the first card of ``machine``, in the place of a `LayerMeter`.

    Products of weights and of causal attention over ``sequence`` tokens, at ``achieved`` of the datasheet's rate;
    what is no product, at that of the card's memory. Of bytes it says nothing: these are counted (plan/count.py).
    """
    rate = achieved * machine.gpus[0].tflops * 1e12
    tokens = work.max_tokens
    attention = attention_operations(skeleton.model.config.get_text_config(), sequence)
    bandwidth = 1e9 * (machine.gpus[0].memory_gbps or math.inf)
    by_block, by_experts = _bytes_beside_products(skeleton.model.config.get_text_config(), work)
    cut = {layout.number for layout in layouts if layout.experts is not None}
    profiles = []
    for layout, cost in zip(layouts, layer_costs(list(layouts), skeleton), strict=True):
        forward, backward = (2 * tokens * part / rate for part in (cost.forward, cost.with_recompute))
        if 0 < layout.layer < len(layouts) - 1:
            of_experts = layout.experts is not None
            products = 0.0 if of_experts else attention * tokens / rate
            if of_experts:  # whose results are added to the sum so far, which travels with the rest
                beside = by_experts / skeleton.num_groups + 2 * layout.extra_input_bytes
            else:
                beside = by_block + (0 if layout.number in cut else by_experts)
            moved = beside * tokens / bandwidth
            forward += products + moved
            backward += products * (1 + _ATTENTION_BACKWARD) + moved * (1 + _BESIDE_BACKWARD)
        profiles.append(LayerProfile(forward, backward, 0, 0))
    return profiles


def _update_bytes(state_format: StateFormat) -> float:
    """Memory traffic for a parameter's update: a bfloat16 gradient, a master in two halves, the moments."""
    return 10 + 2 * moments_bytes(state_format, BLOCK) / BLOCK


def _bytes_beside_products(config: Any, work: Workload) -> tuple[float, float]:
    """Of one token and block: what a forward reads and writes of the card's memory that is no product's.

    Of hidden states, and of widened ones.
    """
    hidden, widened = _PASSES[work.kernels]
    experts = getattr(config, "num_experts_per_tok", None) or 1
    width = getattr(config, "moe_intermediate_size", None) or work.shape.intermediate_size
    return work.shape.itemsize * hidden * work.shape.hidden_size, work.shape.itemsize * widened * experts * width


def attention_operations(config: Any, sequence: int) -> float:
    """Of one token and layer: queries by keys and weights by values, half of them masked."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2.0 * sequence * heads * head_dim


def _folder() -> Path:
    return Path(__file__).with_name("machines")


def _faults(error: ValidationError, root: Located) -> list[str]:
    """Every key that is wrong, with its line, what stands there, and why."""
    faults = error.errors()
    places = [fault["loc"] for fault in faults]
    lines = []
    for fault in faults:
        place, kind = fault["loc"], fault["type"]
        if any(other != place and other[: len(place)] == place for other in places):
            continue  # a list that fails in an element is called too short as well
        if kind == "extra_forbidden":
            section = {"gpus": Gpus, "shared_link": SharedLink, "host": Host}.get(str(place[0]), Machine)
            why = f"extra inputs are not permitted; there are {', '.join(section.model_fields)}"
        elif kind == "model_type":
            why = "should be a mapping of keys"
        else:
            why = fault["msg"].lower() + ("" if kind == "missing" else f", and is {fault['input']!r:.60}")
        line = _line(root, place)
        lines.append(f"{'.'.join(map(str, place)) or 'the file'}: {why} (line {line})")
    return lines


def _line(root: Located, place: Sequence[str | int]) -> str:
    """The line of what stands at ``place``, or of what it is missing in."""
    node = root
    for part in place:
        inside = node.value
        if isinstance(inside, dict) and part in inside:
            node = inside[str(part)]
        elif isinstance(inside, list) and isinstance(part, int):
            node = inside[part]
    return node.where.rpartition(":")[2]
