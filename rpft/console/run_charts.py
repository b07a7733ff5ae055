"""The charts of one run, or of several side by side: which figures of metrics.jsonl stand in which picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from rpft.console.text import duration
from rpft.draw.chart import Chart, Line, Mark, draw, label_width
from rpft.draw.chart_style import MOST_LINES
from rpft.draw.figures import short
from rpft.draw.heatmap import Heatmap
from rpft.draw.scale import Point
from rpft.train.run_report import RunReport

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_ALIKE = 0.01
"""Share by which peaks of workers may differ that are drawn as one line."""

Figure = Callable[[dict[str, Any]], float | None]


def charts_of(report: RunReport) -> str:
    """All charts of one run, with what happened on the way."""
    steps, marks = report.steps, marks_of(report)
    clip = report.run.recipe.train.max_grad_norm
    unit, scale = _unit(max(line["host_rss_bytes"] for line in steps))
    loss = [Line("training", _points(steps, _key("loss")), 0, noisy=True)]
    if report.evaluations:
        loss.append(Line("evaluation", _points(report.evaluations, _key("eval_loss")), 1, dots=True))
    charts = [
        Chart("Loss", loss, short, "mean over trained tokens", marks=marks),
        Chart("Learning rate", [Line("", _points(steps, _key("learning_rate")))], short, zero=True),
        Chart(
            "Gradient norm",
            [Line("", _points(steps, _key("grad_norm")), noisy=True)],
            short,
            "before clipping",
            log=True,
            marks=marks,
            references=[(f"clipped at {clip:g}", clip)] if clip else [],
        ),
        Chart(
            "Tokens a second",
            [Line("", _points(steps, _key("tokens_per_second")), noisy=True)],
            short,
            zero=True,
            marks=marks,
            references=[("predicted", report.predicted)] if report.predicted else [],
        ),
        _worker_memory(steps, marks),
        Chart(
            "RAM",
            [Line("", _points(steps, lambda line: line["host_rss_bytes"] / scale))],
            short,
            f"{unit} of this process",
            zero=True,
            marks=marks,
        ),
    ]
    return _grid([*_drawn(charts), _layer_norms(report).draw()])


def charts_side_by_side(runs: Mapping[str, RunReport]) -> str:
    """The same charts with a line a run, and the loss over time."""
    steps = {name: run.steps for name, run in runs.items()}
    host_unit, host_scale = _unit(max(run.totals.peak_host_bytes or 1 for run in runs.values()))
    worker_unit, worker_scale = _unit(max(run.totals.peak_worker_bytes or 1 for run in runs.values()))

    def lines(get: Figure, noisy: bool = False) -> list[Line]:
        return [Line(name, _points(of, get), i, noisy) for i, (name, of) in enumerate(steps.items())]

    evaluations = [
        Line(name, _points(run.evaluations, _key("eval_loss")), i, dots=True)
        for i, (name, run) in enumerate(runs.items())
    ]
    charts = [Chart("Training loss", lines(_key("loss"), noisy=True), short, "mean over trained tokens")]
    if any(line.points for line in evaluations):
        charts.append(Chart("Evaluation loss", evaluations, short, "mean over trained tokens"))
    second_half = _second_halves(charts[0].lines)
    if any(line.points for line in second_half):
        charts.append(Chart("Training loss, second half", second_half, short, "running median"))
    over_time = [Line(name, _over_time(of), i, noisy=True) for i, (name, of) in enumerate(steps.items())]
    hours = max((line.points[-1][0] for line in over_time if line.points), default=0.0) > 7200
    if hours:
        over_time = [Line(o.name, [(x / 3600, y) for x, y in o.points], o.style, o.noisy) for o in over_time]
    charts += [
        Chart(
            "Training loss over time",
            over_time,
            short,
            "time in steps only",
            x_name="hours" if hours else "seconds",
            x_said=short,
            whole_x=False,
        ),
        Chart("Learning rate", lines(_key("learning_rate")), short, zero=True),
        Chart("Gradient norm", lines(_key("grad_norm"), noisy=True), short, "before clipping", log=True),
        Chart("Tokens a second", lines(_key("tokens_per_second"), noisy=True), short, zero=True),
        Chart(
            "Memory of a worker",
            lines(lambda line: _most(line) / worker_scale),
            short,
            f"{worker_unit}, peak of the one that took most",
            zero=True,
        ),
        Chart("RAM", lines(lambda line: line["host_rss_bytes"] / host_scale), short, host_unit, zero=True),
    ]
    heats = [_layer_norms(run, f"Gradient norm of each layer, {name}") for name, run in runs.items()]
    limits = [each for heat in heats if (each := heat.limits()) is not None]
    shared = (min(low for low, _ in limits), max(high for _, high in limits)) if limits else None
    drawn = _drawn([replace(chart, values_in_names=False) for chart in charts])
    return _grid(drawn) + _grid([heat.draw(shared) for heat in heats])


def marks_of(report: RunReport) -> list[Mark]:
    """What happened on the way, at the steps where it did."""
    marks = [Mark(step, f"step {step} was skipped", "point") for step in report.skipped]
    marks += [Mark(line["step"] + 0.5, f"back from {line['rewound_from']}") for line in report.rewinds]
    marks += [Mark(line["step"] + 0.5, "smaller plan") for line in report.plan_changes]
    return sorted(marks, key=lambda mark: mark.x)


def events_of(report: RunReport) -> list[tuple[str, str]]:
    """The same in words: (when, what)."""
    told = [
        (
            line["step"],
            f"after step {line['step']}",
            f"went back here from step {line['rewound_from']}, since the loss had jumped; passed over:"
            f" {spans(line['passed_over'])}",
        )
        for line in report.rewinds
    ]
    told += [
        (line["step"], f"after step {line['step']}", f"a smaller plan: {line['out_of_memory']}")
        for line in report.plan_changes
    ]
    if report.skipped:
        told.append((report.skipped[0], f"steps {spans(report.skipped)}", "skipped: no update was made of them"))
    return [(when, what) for _, when, what in sorted(told)]


def spans(numbers: Iterable[int]) -> str:
    """3, 4, 5, 9 as "3 to 5, 9"; long lists end in how many more there are."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = [f"{first}" if first == last else f"{first} to {last}" for first, last in runs[:12]]
    return ", ".join(told) + (f" and {len(runs) - 12} more stretches" if len(runs) > 12 else "")


def time_of(seconds: float) -> str:
    """How long a run took, for people."""
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


# -- figures -----------------------------------------------------------------------------------------------


def _key(name: str) -> Figure:
    return lambda line: line.get(name)


def _points(lines: Sequence[dict[str, Any]], get: Figure) -> list[Point]:
    return [(float(line["step"]), value) for line in lines if (value := get(line)) is not None]


def _second_halves(lines: Sequence[Line]) -> list[Line]:
    """The running medians of ``lines`` from the middle of the longest on, where runs hardly differ from afar."""
    half = max((line.points[-1][0] for line in lines if line.points), default=0.0) / 2
    return [replace(line, points=[p for p in line.middle or [] if p[0] >= half], noisy=False) for line in lines]


def _over_time(steps: Sequence[dict[str, Any]]) -> list[Point]:
    """Loss by the seconds that the steps so far took."""
    ends = accumulate(line["step_seconds"] for line in steps)
    return [(end, line["loss"]) for end, line in zip(ends, steps, strict=True) if line["loss"] is not None]


def _most(line: dict[str, Any]) -> float:
    return max((device["peak_bytes"] for device in line["devices"]), default=0)


def _worker_memory(steps: Sequence[dict[str, Any]], marks: Sequence[Mark]) -> Chart:
    """A line a worker; those that take the same share one, and beyond MOST_LINES lines the highest are shown."""
    series: dict[str, list[Point]] = {}
    for line in steps:
        for device in line["devices"]:
            series.setdefault(device["name"], []).append((float(line["step"]), float(device["peak_bytes"])))
    groups: list[tuple[list[str], list[Point]]] = []
    for name, points in series.items():
        for names, others in groups:
            if len(points) == len(others) and all(
                abs(y - other) <= _ALIKE * other for (_, y), (_, other) in zip(points, others, strict=True)
            ):
                names.append(name)
                break
        else:
            groups.append(([name], points))
    groups.sort(key=lambda group: -group[1][-1][1])
    unit, scale = _unit(groups[0][1][-1][1] if groups else 1)
    lines = [
        Line(_joined(names), [(x, y / scale) for x, y in points], i)
        for i, (names, points) in enumerate(groups[:MOST_LINES])
    ]
    return Chart("Memory of workers", lines, short, f"{unit}, peak so far", zero=True, marks=marks)


def _layer_norms(report: RunReport, title: str = "Gradient norm of each layer") -> Heatmap:
    """Those layers that have any, the embedding at the bottom."""
    lines = report.layer_norms
    count = max((len(line["norms"]) for line in lines), default=0)
    lines = [line for line in lines if len(line["norms"]) == count]  # steps that were passed over have none
    trained = [layer for layer in range(count) if any(line["norms"][layer] for line in lines)]
    names = ["embedding" if layer == 0 else "head" if layer == count - 1 else f"{layer}" for layer in trained]
    columns = [(line["step"], [line["norms"][layer] for layer in trained]) for line in lines]
    return Heatmap(title, names, columns if trained else [], "before clipping")


def _joined(names: Sequence[str]) -> str:
    return (
        names[0]
        if len(names) == 1
        else ", ".join(names)
        if len(names) == 2
        else f"{names[0]} and {len(names) - 1}"
    )


def _unit(num_bytes: float) -> tuple[str, int]:
    return next((unit for unit in _UNITS if num_bytes >= unit[1]), _UNITS[-1])


def _drawn(charts: Sequence[Chart]) -> list[str]:
    right = label_width(charts)
    return [draw(chart, right) for chart in charts]


def _grid(figures: Sequence[str]) -> str:
    return "\n".join(["<div class='charts'>", *figures, "</div>"])
