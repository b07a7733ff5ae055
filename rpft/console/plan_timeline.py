"""A step that the simulator played, as a picture: workers as rows, slots by stage and kind, copies, what idles."""

from __future__ import annotations

from dataclasses import dataclass

from rpft.draw.colours import KINDS, SHADES, shade
from rpft.draw.figures import duration
from rpft.draw.page import key
from rpft.draw.timeline import Block, Lane, Named, Ruler, axis, bars, fitted, text
from rpft.plan.playback import Playback, SlotPlayed, Stretch

_NAMES = 96
"""Width of the column of names, in pixels."""

_TOP, _COMPUTE, _COPY, _GAP = 22, 22, 4, 11
_PIXELS, _MOST_BLOCKS = 4000, 6000
"""How wide a picture may be zoomed before gaps that were closed would show; blocks of a picture."""

_MARGIN = 0.12
"""Of a step, shown before and after it."""

_UP, _DOWN = ("weights_up", "activations_up"), ("activations_down", "gradients_down")
_COPY_KINDS = {
    "weights_up": "weights",
    "activations_up": "activations",
    "activations_down": "activations",
    "gradients_down": "gradients",
}


@dataclass(frozen=True)
class _Window:
    start: float
    end: float

    def shows(self, stretch: Stretch) -> bool:
        return stretch[1] > self.start and stretch[0] < self.end

    def cut(self, stretch: Stretch) -> Stretch:
        return max(stretch[0], self.start), min(stretch[1], self.end)


def draw_step(played: Playback) -> str:
    """The picture with its legend and ways to zoom, as HTML."""
    window = _window(played)
    ruler = Ruler(window.start, window.end)
    copies = sum(len(getattr(slot, name)) for slot in played.slots for name in _COPY_KINDS)
    each_alone = copies <= _MOST_BLOCKS / 2
    rows = [_lanes_of(played, worker, window, each_alone) for worker in range(played.num_workers)]
    host = Lane(
        [
            Block("optimizer", *window.cut(stretch), faint=step != played.step - 1)
            for step, stretch in played.updates
            if window.shows(stretch)
        ],
        [
            Named(
                *window.cut(stretch),
                "update",
                KINDS["optimizer"],
                f"update {_of_step(played, step)}: {duration(stretch[1] - stretch[0])}",
            )
            for step, stretch in played.updates
            if window.shows(stretch)
        ],
    )
    lanes = [lane for row in rows for lane in row] + [host]
    blocks, _ = fitted([lane.blocks for lane in lanes], ruler.seconds, _PIXELS, _MOST_BLOCKS)
    for lane, kept in zip(lanes, blocks, strict=True):
        lane.blocks = kept
    plot, names, y = [], [], float(_TOP)
    for worker, row in enumerate(rows):
        heights = [_COPY] * len(_UP) + [_COMPUTE] + [_COPY] * len(_DOWN)
        middle = y + 2 * (_COPY + 1) + _COMPUTE / 2
        names.append(text(0, middle, f"worker {worker}", weight="bold"))
        names.append(text(0, middle + 13, f"{_busy(played, worker):.0%} busy", css_class="soft"))
        for lane, height in zip(row, heights, strict=True):
            plot += _rail(y, height, "idle" if height == _COMPUTE else "rail")
            plot += bars(lane, ruler, y, height)
            y += height + 1
        y += _GAP
    names.append(text(0, y + 12, "CPU: update", weight="bold"))
    plot += _rail(y, 16, "rail")
    plot += bars(host, ruler, y, 16)
    y += 16 + 6
    marks = [
        f'<line class="mark" x1="{ruler.x(at)}" x2="{ruler.x(at)}" y1="4" y2="{y:g}"/>'
        for at in (played.start_seconds, played.end_seconds)
    ]
    middle = ruler.x((played.start_seconds + played.end_seconds) / 2)
    one = f"one step: {duration(played.end_seconds - played.start_seconds)}"
    marks.append(text(middle, 13, one, "middle", weight="bold", css_class="mark"))
    height = y + 20
    size = f'height="{height:g}" font-family="inherit"'
    svg = [
        f'<svg width="100%" {size} role="img" aria-label="What each worker does in a step; the table of stages'
        ' says the same in figures">',
        *axis(ruler, played.start_seconds, _TOP, y),
        *plot,
        *marks,
        "</svg>",
    ]
    zoom = "".join(
        f"<input type='radio' name='zoom' class='screen' id='zoom{n}'{' checked' if n == 1 else ''}>"
        f"<label class='screen' for='zoom{n}'>{n}x</label>"
        for n in (1, 2, 4, 8)
    )
    return "\n".join(
        [
            _legend(),
            f"<div class='picture'>{zoom}",
            f"<div class='timeline'><svg class='names' width='{_NAMES}' {size} aria-hidden='true'>",
            *names,
            "</svg>",
            "<div class='scroll' tabindex='0' role='region' aria-label='timeline'><div class='plot'>",
            *svg,
            "</div></div></div></div>",
        ]
    )


def _window(played: Playback) -> _Window:
    """A step, all of its slots, and a margin."""
    margin = _MARGIN * (played.end_seconds - played.start_seconds)
    own = [slot for slot in played.slots if slot.step == played.step]
    start = min(played.start_seconds, min(slot.computed[0][0] for slot in own if slot.computed))
    end = max(played.end_seconds, max(slot.computed[-1][1] for slot in own if slot.computed))
    return _Window(max(0.0, start - margin), end + margin)


def _lanes_of(played: Playback, worker: int, window: _Window, each_alone: bool) -> list[Lane]:
    """Of one worker: what goes up, compute, what comes down; copies ``each_alone`` or those of a slot as one."""
    slots = [slot for slot in played.slots if slot.worker == worker]
    copies = {name: Lane([]) for name in (*_UP, *_DOWN)}
    compute = Lane([])
    for slot in slots:
        faint = slot.step != played.step
        for name, lane in copies.items():
            some = [window.cut(stretch) for stretch in getattr(slot, name) if window.shows(stretch)]
            lane.blocks += _copies(_COPY_KINDS[name], some, faint, each_alone)
        if not slot.computed:
            continue
        kind, stage = played.kind(slot.slot), played.stages[slot.slot]
        top = played.plan.num_layers - 1
        fill = shade(kind, (stage.first + stage.last) / 2 / top)
        some = (window.cut(stretch) for stretch in slot.computed if window.shows(stretch))
        compute.blocks += [Block(kind, *stretch, fill=fill, faint=faint) for stretch in some]
        extent = slot.computed[0][0], slot.computed[-1][1]
        if window.shows(extent):
            name = f"{stage.first}-{stage.last}" if len(stage.layers) > 1 else str(stage.first)
            compute.named.append(Named(*window.cut(extent), name, fill, _said(played, slot), faint))
    return [*(copies[name] for name in _UP), compute, *(copies[name] for name in _DOWN)]


def _copies(kind: str, stretches: list[Stretch], faint: bool, each_alone: bool) -> list[Block]:
    """A block each, or one for all that is paler the less there is of them."""
    if each_alone or not stretches:
        return [Block(kind, *stretch, faint=faint) for stretch in stretches]
    start, end = min(a for a, _ in stretches), max(b for _, b in stretches)
    busy = min(end - start, sum(b - a for a, b in stretches))
    return [Block(kind, start, end, faint=faint, busy_seconds=busy)]


def _said(played: Playback, slot: SlotPlayed) -> str:
    stage, start = played.stages[slot.slot], played.start_seconds
    begin, end = slot.computed[0][0], slot.computed[-1][1]
    busy = sum(b - a for a, b in slot.computed)
    copies = [
        f"{name.replace('_', ' ')} {duration(sum(b - a for a, b in getattr(slot, name)))}"
        for name in (*_UP, *_DOWN)
        if getattr(slot, name)
    ]
    layers = f"layers {stage.first} to {stage.last}" if len(stage.layers) > 1 else f"layer {stage.first}"
    return (
        f"{played.kind(slot.slot)}, {layers} (slot {slot.slot}, round {slot.round + 1},"
        f" {_of_step(played, slot.step)}, worker {slot.worker})\n{duration(begin - start)} to"
        f" {duration(end - start)}: computes {duration(busy)}, waits"
        f" {duration(max(0.0, end - begin - busy))}\n{', '.join(copies)}"
    )


def _of_step(played: Playback, step: int) -> str:
    words = {-1: "of the step before", 0: "of this step", 1: "of the next step"}
    return words.get(step - played.step, "of another step")


def _busy(played: Playback, worker: int) -> float:
    """Share of the step's time in which a worker computes, for whichever step."""
    start, end = played.start_seconds, played.end_seconds
    stretches = (stretch for slot in played.slots if slot.worker == worker for stretch in slot.computed)
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in stretches) / (end - start)


def _rail(y: float, height: int, css_class: str) -> list[str]:
    return [f'<rect class="{css_class}" x="0" y="{y:g}" width="100%" height="{height}"/>']


def _legend() -> str:
    def ramp(kind: str) -> str:
        low, high = SHADES[kind]
        return f"linear-gradient(90deg,{low},{high})"

    entries = [
        key(ramp("forward"), "forward, pale: low layers"),
        key(ramp("backward"), "backward"),
        key(KINDS["fused"], "fused: forward, loss and backward at once"),
        key("var(--idle)", "idle"),
        key(KINDS["weights"], "weights up"),
        key(KINDS["activations"], "activations up and down"),
        key(KINDS["gradients"], "gradients down"),
        key(KINDS["optimizer"], "update"),
    ]
    return f"<ul class='keys'>{''.join(f'<li>{entry}</li>' for entry in entries)}</ul>"
