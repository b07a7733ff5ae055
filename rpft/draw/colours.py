"""The colours of pictures: kinds of work that the colour-blind can tell apart (Okabe and Ito); their shades."""

from __future__ import annotations

KINDS = {
    "forward": "#56b4e9",
    "fused": "#cc79a7",
    "backward": "#0072b2",
    "loss": "#9ad0c2",
    "weights": "#e69f00",
    "activations": "#009e73",
    "gradients": "#d55e00",
    "optimizer": "#8f7fd6",
    "other": "#a0a0a0",
}
"""Kind of work to fill."""

NAMES = {"weights": "weights up", "loss": "evaluation"}
"""What a legend calls those kinds that it does not call by their key."""

INK = "#6e7781"
"""A grey that is read on white and on black alike."""

SHADES = {"forward": ("#b5dff7", "#4aa8de"), "backward": ("#3a8ccb", "#07507f")}
"""From the lowest layers to the highest. Forward is lighter than backward throughout, so that no hue is needed."""


_AS_GOOD_IN_BLACK = 0.179
"""Relative luminance of a fill on which black and white are read equally well."""


def shade(kind: str, depth: float) -> str:
    """The fill of work of ``kind`` on layers that lie at ``depth``, 0 the lowest and 1 the highest."""
    if kind not in SHADES:
        return KINDS[kind]
    low, high = (_channels(colour) for colour in SHADES[kind])
    return "#" + "".join(f"{round(a + (b - a) * depth):02x}" for a, b in zip(low, high, strict=True))


def ink_on(fill: str) -> str:
    """Black or white, whichever is read better on ``fill``."""
    return "#000" if luminance(fill) > _AS_GOOD_IN_BLACK else "#fff"


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` by WCAG, 0 to 1."""
    linear = []
    for channel in _channels(colour):
        share = channel / 255
        linear.append(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
