"""What was measured of a model on a machine, as one value and as a file; and the cache of such files."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rpft import files, host
from rpft.errors import UserError
from rpft.plan.profile import LayerProfile
from rpft.plan.rates import Rates

PROFILE_VERSION = 3

_SWITCHED = 0.95
"""Share of its own rate below which a link, with all others busy, is taken to share a switch."""


@dataclass(frozen=True)
class KindProfile:
    """Layers of one code and the same shapes, of which one was measured."""

    name: str
    """embedding, block or head."""
    layers: tuple[int, ...]
    weight_bytes: int
    """Uploaded for a slot."""
    gradient_bytes: int
    """Downloaded after a backward slot."""
    num_trained: int
    """Parameters that the optimizer updates."""
    measured: LayerProfile


@dataclass(frozen=True)
class OtherLength:
    """Lines of another length: a profile for each kind, in order."""

    sequence: int
    kinds: tuple[LayerProfile, ...]


@dataclass(frozen=True)
class Beside:
    """The optimizer's update and copies both ways on all links, at the same time; a second."""

    updates: float
    """Parameters, while copies run."""
    copied: float
    """Bytes of all copies, while the optimizer updates."""
    copied_alone: float
    """While it rests."""


@dataclass(frozen=True)
class Profile:
    """All that was measured. Rates are bytes, or parameters, a second."""

    conditions: dict[str, Any]
    """Machine, model, precision, kernels, shapes and versions: where one differs, nothing else holds."""
    kinds: tuple[KindProfile, ...]
    links: tuple[tuple[float, float], ...]
    """(up, down) of each GPU while the others rest; of the CPU pool, of a copy in RAM."""
    links_together: tuple[tuple[float, float], ...]
    """The same while all GPUs copy; empty for one."""
    updates: float
    """Parameters that the optimizer updates while nothing is copied."""
    beside: Beside
    slowdown: float = 1.0
    """How many times as long a layer takes while all workers compute: of the CPU pool, which shares cores."""
    speeds: tuple[float, ...] = ()
    """Of each GPU, over the first's, where they are not all of one kind."""
    host_memory: float | None = None
    """Read and written together; None where it was not measured."""
    lengths: tuple[OtherLength, ...] = ()
    checks: dict[int, LayerProfile] = field(default_factory=dict)
    """Layers of a kind that were measured beside its first one, to see that they take as long."""

    @property
    def sequence(self) -> int:
        """Tokens of a line that ``kinds`` were measured with."""
        return int(self.conditions["sequence"])

    @property
    def layers(self) -> list[LayerProfile]:
        """One a layer."""
        return self._by_layer([kind.measured for kind in self.kinds])

    def at(self, sequence: float) -> list[LayerProfile]:
        """One a layer, times for lines of ``sequence`` tokens.

        Between lengths that were measured times are interpolated, below them they go with the length.
        """
        lengths = [*self.lengths, OtherLength(self.sequence, tuple(kind.measured for kind in self.kinds))]
        lengths.sort(key=lambda length: length.sequence)
        known = [length.sequence for length in lengths]
        below = min(1.0, sequence / known[0])

        def between(kind: int, name: str) -> float:
            values = [getattr(length.kinds[kind], name) for length in lengths]
            return below * float(np.interp(sequence, known, values))

        changed = [
            replace(
                kind.measured,
                forward_seconds=between(number, "forward_seconds"),
                backward_seconds=between(number, "backward_seconds"),
                kept_seconds=None if kind.measured.kept_seconds is None else between(number, "kept_seconds"),
            )
            for number, kind in enumerate(self.kinds)
        ]
        return self._by_layer(changed)

    def rates(self) -> Rates:
        """Of the slowest link and the optimizer; of a switch too, where links hold one another up.

        And of the memory that copies and updates share, so that both have by the simulator the rates that they
        were measured with at the same time.
        """
        up, down = (min(link[way] for link in self.links) for way in (0, 1))
        share, workers = 0.0, len(self.links)
        beside = self.beside
        taken = 1 - beside.updates / self.updates
        memory = beside.copied / taken if taken > 0 else math.inf
        kept = min(1.0, beside.copied / beside.copied_alone)
        if self.links_together:
            # Both ways have one share in the simulator, the one that holds up more.
            shares = [
                rate / statistics.mean(link[way] for link in self.links_together) / workers
                for way, rate in ((0, up), (1, down))
            ]
            share = max(shares)
        if share * workers * _SWITCHED <= 1:
            return Rates(up, down, self.updates, memory=memory, copies_beside=kept)
        return Rates(up, down, self.updates, workers, share, memory, kept)

    def to_json(self) -> str:
        """The profile file's text."""
        return json.dumps({"version": PROFILE_VERSION, **asdict(self)}, indent=1)

    def _by_layer(self, profiles: Sequence[LayerProfile]) -> list[LayerProfile]:
        found = {layer: p for kind, p in zip(self.kinds, profiles, strict=True) for layer in kind.layers}
        return [found[layer] for layer in range(len(found))]


def read_profile(path: Path) -> Profile:
    """Reads a profile file; UserError naming the file and the fault."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.pop("version")
        if version != PROFILE_VERSION:
            raise UserError(f"{path}: profile version {version} is not {PROFILE_VERSION}; make it again")
        kinds = tuple(_kind(kind) for kind in data.pop("kinds"))
        lengths = tuple(
            OtherLength(int(length["sequence"]), tuple(_layer(layer) for layer in length["kinds"]))
            for length in data.pop("lengths")
        )
        checks = data.pop("checks")
        links, together = (
            tuple((float(up), float(down)) for up, down in data.pop(key)) for key in ("links", "links_together")
        )
        profile = Profile(
            speeds=tuple(float(speed) for speed in data.pop("speeds")),
            kinds=kinds,
            lengths=lengths,
            links=links,
            links_together=together,
            beside=Beside(**data.pop("beside")),
            checks={int(layer): _layer(measured) for layer, measured in checks.items()},
            **data,
        )
        whole = sorted(layer for kind in kinds for layer in kind.layers)
        if whole != list(range(len(whole))) or not whole or not links or profile.sequence < 1:
            raise ValueError("layers or links are missing")
        return profile
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such profile file") from error
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a profile file ({type(error).__name__}: {error})") from error


def _kind(data: dict[str, Any]) -> KindProfile:
    return KindProfile(
        **{**data, "layers": tuple(int(layer) for layer in data["layers"]), "measured": _layer(data["measured"])}
    )


def _layer(data: dict[str, Any]) -> LayerProfile:
    options = tuple((int(size), float(share)) for size, share in data["keep_options"])
    return LayerProfile(**{**data, "keep_options": options})


# ---- the cache


def cache_folder() -> Path:
    """Where profiles are kept for the next run."""
    return host.cache_folder("profiles")


def cached_path(conditions: dict[str, Any]) -> Path:
    """Where the profile of ``conditions`` is kept."""
    text = json.dumps(conditions, sort_keys=True)
    return cache_folder() / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"


def find_cached(conditions: dict[str, Any]) -> tuple[Profile | None, str | None]:
    """The cached profile of ``conditions``, and why one that is there is not taken."""
    path = cached_path(conditions)
    if not path.exists():
        return None, None
    try:
        profile = read_profile(path)
    except UserError as error:
        return None, f"{error}; it is not used"
    if profile.conditions != json.loads(json.dumps(conditions)):
        return None, f"{path}: of something else; it is not used"
    return profile, None


def keep_cached(profile: Profile) -> str | None:
    """Puts ``profile`` into the cache; why not, where the disk does not take it: a run goes on without."""
    path = cached_path(profile.conditions)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, profile.to_json())
    except OSError as error:
        return f"{path}: the measurement could not be kept ({error.strerror})"
    return None
