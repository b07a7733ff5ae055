"""The picture of a bench: tokens a second by workers, of the run and of every peer, and their losses."""

from __future__ import annotations

from collections.abc import Sequence

from rpft.draw.chart import Chart, Line
from rpft.draw.chart_file import chart_file
from rpft.draw.chart_style import MOST_LINES
from rpft.draw.figures import short
from rpft.train.bench import Measured
from rpft.train.bench_peers import PeerMeasured, PeerOutcome, title_of
from rpft.train.bench_report import OWN, ROOF, failures, trained
from rpft.train.bench_workers import Failed

_LONGEST_LINE = 110


def bench_chart(heading: str, results: Sequence[Measured | Failed], peers: Sequence[PeerOutcome]) -> str:
    """An SVG file's text."""
    own = [result for result in results if isinstance(result, Measured)]
    names = list(dict.fromkeys(peer.peer for peer in peers))
    style = {name: 1 + number % (MOST_LINES - 1) for number, name in enumerate(names)}
    roof = next((p for p in peers if isinstance(p, PeerMeasured) and p.peer == ROOF), None)
    speeds = [Line(OWN, [(m.workers, m.steady_tokens_per_second) for m in own], 0, dots=True)]
    layers = [(m.workers, m.roof_tokens_per_second) for m in own]
    speeds.append(Line("roof, own layers", layers, MOST_LINES - 1))
    if roof is not None:
        speed = roof.steady_tokens_per_second
        counts = [result.workers for result in results]
        speeds.append(Line(title_of(ROOF), [(n, n * speed) for n in counts], style[ROOF]))
    speeds += [
        Line(
            name,
            [
                (p.workers, p.steady_tokens_per_second)
                for p in peers
                if isinstance(p, PeerMeasured) and p.peer == name
            ],
            style[name],
            dots=True,
        )
        for name in names
        if name != ROOF
    ]
    charts = [
        Chart(
            "Tokens a second",
            speeds,
            lambda speed: f"{speed:,.0f}",
            "long run, median of windows",
            zero=True,
            x_name="workers",
        )
    ]
    losses = [
        Line(f"{name}, {one.workers}", list(enumerate(one.losses, 1)), style.get(name, 0), dots=True)
        for name, one in trained(results, peers)
    ]
    if losses:
        charts.append(
            Chart(
                "Loss",
                losses,
                short,
                "the same batches from the same first weights; name, workers",
                values_in_names=False,
            )
        )
    return chart_file(heading, charts, [line[:_LONGEST_LINE] for line in failures(peers)])
