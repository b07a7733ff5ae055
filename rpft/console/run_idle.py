"""What workers did and waited for in a traced step, as bars for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rpft.draw import page
from rpft.draw.colours import KINDS

_NO_CAUSE = "#c4c4c4"
_FILLS = {
    "busy": KINDS["backward"],
    "input": KINDS["activations"],
    "input copy": "#7fcfb2",
    "weights": KINDS["weights"],
    "disk": "#9c6b30",
    "optimizer": KINDS["optimizer"],
    "gradients": KINDS["gradients"],
    "launch": "#8c8c8c",
    "no work": _NO_CAUSE,
}
_LEAST_SHARE = 0.001


def idle_bars(workers: Sequence[tuple[str, dict[str, Any]]], causes: Mapping[str, str]) -> str:
    """(name, what an idle.json says of a worker) as a bar each, with a legend of the causes that are there."""
    seen: dict[str, None] = {}
    rows = []
    for name, worker in workers:
        window = worker["window_seconds"] or 1.0
        parts = [("busy", worker["busy_seconds"] / window)]
        waits = [(cause, seconds / window) for cause, seconds in worker["idle_seconds"].items()]
        parts += [(cause, share) for cause, share in waits if share >= _LEAST_SHARE]
        seen |= dict.fromkeys(part for part, _ in parts)
        said = ", ".join(f"{part} {share:.1%}" for part, share in parts)
        drawn, at = [], 0.0
        for part, share in parts:
            fill = _FILLS.get(part, _NO_CAUSE)
            drawn.append(f"<i style='left:{at:.2%};width:{share:.2%};background:{fill}'></i>")
            at += share
        rows.append(
            f"<span>{escape(name)}</span><i class='shares' role='img' aria-label='{escape(said)}'"
            f" title='{escape(said)}'>{''.join(drawn)}</i><span>{parts[0][1]:.0%} busy</span>"
        )
    entries = (
        f"<li title='{escape(causes.get(part, ''))}'>{page.key(_FILLS.get(part, _NO_CAUSE), part)}</li>"
        for part in seen
    )
    waited = "; ".join(f"{part}: waited for {causes[part]}" for part in seen if part in causes)
    return "\n".join(
        [
            f"<div class='bars'>{''.join(rows)}</div>",
            f"<ul class='keys'>{''.join(entries)}</ul>",
            f"<p class='soft'>{escape(waited)}</p>",
        ]
    )
