"""What a bench found: as JSON and as tables of text, the run alone and beside its peers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from rpft.machine import machine_of, places, versions
from rpft.plan.bill import gib
from rpft.train.bench import WINDOWS, Measured
from rpft.train.bench_peers import PeerFailed, PeerMeasured, PeerOutcome, largest_difference, title_of
from rpft.train.bench_workers import Failed

_VERSION = 2
"""Of the JSON."""

OWN = "rpft"
"""The name of the run among its peers."""

ROOF = "roof"
"""The peer that does all but the optimizer's work, by whose speed others are held."""


def as_json(about: dict[str, Any], results: Sequence[Measured | Failed], peers: Sequence[PeerOutcome] = ()) -> str:
    """``results`` for programs. ``about``: what else the text says of how they came about."""
    told = {
        "version": _VERSION,
        **about,
        "windows": WINDOWS,
        "machine": machine_of(places()),
        "versions": versions(),
    }
    own = {result.workers: result for result in results if isinstance(result, Measured)}
    found = {"results": [result.as_dict() for result in results], "peers": []}
    for peer in peers:
        row = {**peer.as_dict(), "title": title_of(peer.peer)}
        apart = _apart(peer, own.get(peer.workers)) if isinstance(peer, PeerMeasured) else None
        if apart is not None:
            row["largest_loss_difference"], row["at_step"] = apart
        found["peers"].append(row)
    return json.dumps(_numbers_only({**told, **found}), indent=1)


def _numbers_only(value: Any) -> Any:
    """``value`` with null for what is no number: JSON has no word for it."""
    if isinstance(value, dict):
        return {key: _numbers_only(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers_only(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(results: Sequence[Measured | Failed]) -> list[list[str]]:
    """Rows of text: a row a figure, a column a number of workers; the first row is the heading."""
    measured = [result for result in results if isinstance(result, Measured)]
    rows: list[tuple[str, Callable[[Measured], str]]] = [
        ("tokens/s, drained", lambda m: f"{m.tokens_per_second:,.0f} ({_spread(m.windows)})"),
        ("tokens/s, long run", lambda m: f"{m.steady_tokens_per_second:,.0f} ({_spread(m.steady)})"),
        ("predicted", lambda m: f"{m.predicted_tokens_per_second:,.0f} ({m.error:+.1%})"),
        ("seconds a step", lambda m: f"{m.step_seconds:.3g}"),
        ("of the roof, own layers", lambda m: f"{m.share_of_roof:.1%}"),
        ("workers idle", lambda m: f"{m.bubble:.1%}"),
        ("predicted", lambda m: f"{m.predicted_bubble:.1%}"),
        ("idle for", _causes),
        ("transfers hidden", lambda m: "-" if m.hidden is None else f"{m.hidden:.1%}"),
        ("VRAM, peak of bill", _vram),
        ("RAM of bill", lambda m: f"{gib(m.ram_bytes)} of {gib(m.ram_bill_bytes)}"),
        ("limited by", lambda m: m.limited_by),
    ]
    heading = ["", *(f"{m.workers} worker{'s' if m.workers > 1 else ''}" for m in measured)]
    return [heading, *([name, *map(tell, measured)] for name, tell in rows)]


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):,.0f} to {max(values):,.0f}"


def _vram(m: Measured) -> str:
    peak = f"{gib(m.vram_peak_bytes)} of {gib(m.vram_bill_bytes)}"
    return f"{peak}\n{m.allocation_retries} allocation retries" if m.allocation_retries else peak


def _causes(m: Measured) -> str:
    """The causes that took a hundredth of the time or more, the longest first."""
    found = sorted(((share, cause) for cause, share in m.idle.items() if share >= 0.01), reverse=True)
    return "\n".join(f"{cause} {share:.1%}" for share, cause in found) or "-"


def peer_table(results: Sequence[Measured | Failed], peers: Sequence[PeerOutcome]) -> list[list[str]]:
    """Rows of text, the first of them the heading: the run and its peers, a row for each number of workers."""
    rows, roof = [], _plain_roof(peers)
    for own, found in _by_workers(results, peers):
        for name, one in found:
            speed = one.steady_tokens_per_second
            apart = _apart(one, own) if isinstance(one, PeerMeasured) else None
            rows.append(
                [
                    name,
                    str(one.workers),
                    f"{one.tokens_per_second:,.0f}",
                    f"{speed:,.0f}\n({_spread(one.steady)})",
                    "-" if own is None else f"{speed / own.steady_tokens_per_second:.0%}",
                    "-" if roof is None else f"{speed / (roof * one.workers):.0%}",
                    gib(one.vram_peak_bytes) if _on_cuda(one) else "-",
                    gib(one.ram_bytes),
                    "-" if apart is None else f"{apart[0]:.1e}\nstep {apart[1]}",
                ]
            )
    heading = [
        "",
        "on",
        "tokens/s,\ndrained",
        "tokens/s,\nlong run",
        "of rpft",
        "of roof",
        "VRAM",
        "RAM",
        "loss\napart",
    ]
    return [heading, *rows]


def loss_table(results: Sequence[Measured | Failed], peers: Sequence[PeerOutcome]) -> list[list[str]]:
    """Losses step by step, a column a program and number of workers; nothing where none was compared."""
    columns = [(f"{name}, {one.workers}", one.losses) for name, one in trained(results, peers)]
    if not columns:
        return []
    steps = max(len(losses) for _, losses in columns)
    told = [[f"{losses[n]:.5f}" if n < len(losses) else "" for _, losses in columns] for n in range(steps)]
    return [["step", *(name for name, _ in columns)], *([str(n + 1), *row] for n, row in enumerate(told))]


def trained(
    results: Sequence[Measured | Failed], peers: Sequence[PeerOutcome]
) -> list[tuple[str, Measured | PeerMeasured]]:
    """All whose losses can be compared, with their short names; not the roof, which has no optimizer."""
    return [
        (name, one)
        for _, found in _by_workers(results, peers)
        for name, one in found
        if one.losses and name != ROOF
    ]


def _by_workers(
    results: Sequence[Measured | Failed], peers: Sequence[PeerOutcome]
) -> list[tuple[Measured | None, list[tuple[str, Measured | PeerMeasured]]]]:
    """For each number of workers the run, where it was measured, and all that were, the run first, by name."""
    told = []
    for workers in dict.fromkeys(one.workers for one in (*results, *peers)):
        own = next((r for r in results if isinstance(r, Measured) and r.workers == workers), None)
        found: list[tuple[str, Measured | PeerMeasured]] = [] if own is None else [(OWN, own)]
        found += [(p.peer, p) for p in peers if isinstance(p, PeerMeasured) and p.workers == workers]
        told.append((own, found))
    return told


def _on_cuda(one: Measured | PeerMeasured) -> bool:
    return one.on_cuda if isinstance(one, Measured) else one.vram_peak_bytes > 0


def _plain_roof(peers: Sequence[PeerOutcome]) -> float | None:
    """Tokens a second of one worker in plain PyTorch, without an optimizer; None where that did not run."""
    found = [p.steady_tokens_per_second for p in peers if isinstance(p, PeerMeasured) and p.peer == ROOF]
    return found[0] if found else None


def _apart(peer: PeerMeasured, own: Measured | None) -> tuple[float, int] | None:
    """See ``largest_difference``; None for the roof, which does not train."""
    return None if own is None or peer.peer == ROOF else largest_difference(peer.losses, own.losses)


def failures(peers: Sequence[PeerOutcome]) -> list[str]:
    """Who did not do the work, and why; a line for all numbers of workers that failed alike."""
    alike: dict[tuple[str, str], list[str]] = {}
    for peer in peers:
        if isinstance(peer, PeerFailed):
            alike.setdefault((peer.peer, peer.reason), []).append(str(peer.workers))
    return [
        f"{title_of(name)} on {', '.join(workers)} worker(s): {reason}"
        for (name, reason), workers in alike.items()
    ]
