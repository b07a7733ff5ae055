"""Several runs side by side: the same charts with a line a run, the keys in which they differ, final figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any, Literal

from rpft.console.run_charts import charts_side_by_side, time_of
from rpft.console.run_facts import facts_side_by_side
from rpft.console.run_idle import idle_bars
from rpft.console.run_samples import samples_side_by_side
from rpft.draw import page
from rpft.draw.chart import stroke_key
from rpft.draw.chart_style import STYLE
from rpft.draw.figures import count, short
from rpft.plan.bill import gib
from rpft.train.run_compare import Comparison
from rpft.train.run_report import RunReport, Totals

Better = Literal["low", "high"] | None


def final_figures(compared: Comparison) -> list[tuple[str, list[str], list[bool]]]:
    """(What, the figure of each run in words, whether it is the best of them); none is where all are alike."""
    reports = list(compared.runs.values())
    rows: list[tuple[str, list[str], list[bool]]] = [
        ("state", [report.standing for report in reports], [False] * len(reports)),
        ("steps", [_steps(report) for report in reports], [False] * len(reports)),
    ]
    for name, get, said, better in _FIGURES:
        values = [get(report.totals) for report in reports]
        if any(value is not None for value in values):
            rows.append((name, ["-" if v is None else said(v) for v in values], _best(values, better)))
    predicted = [report.predicted for report in reports]
    if any(predicted):
        rows.append(("predicted tokens/s", [short(p) if p else "-" for p in predicted], [False] * len(reports)))
    rows.append(
        ("skipped steps", [f"{report.totals.skipped_steps}" for report in reports], [False] * len(reports))
    )
    rows.append(("went back", [f"{len(report.rewinds)}" for report in reports], [False] * len(reports)))
    rows.append(("smaller plans", [f"{len(report.plan_changes)}" for report in reports], [False] * len(reports)))
    return rows


def said_of_key(value: Any) -> str:
    """A recipe's value as it would stand in it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def render_comparison(compared: Comparison) -> str:
    """The page."""
    names = list(compared.runs)
    title = f"{len(names)} runs: {', '.join(names)}"
    keys = "".join(
        f"<li>{stroke_key(i, name)} <span class='soft'>{escape(_what(report))}</span></li>"
        for i, (name, report) in enumerate(compared.runs.items())
    )
    cautions = "".join(f"<p class='bad'>{escape(said)}.</p>" for said in compared.cautions)
    return page.page(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            f"<ul class='keys'>{keys}</ul>",
            cautions,
            page.section(
                "In words and figures",
                "<div class='beside'><div><h3>Where the recipes differ</h3>",
                *_differing(compared),
                "</div><div><h3>At the end</h3>",
                *_final(compared),
                "</div></div>",
                css_class="long",
            ),
            page.section(
                "Step by step",
                "<p class='soft'>Point at a chart for its figures. Where there are many steps, pale: every"
                " one; strong: the running median.</p>",
                charts_side_by_side(compared.runs),
                css_class="long",
            ),
            *_traced(compared),
            *_samples(compared),
            page.section(
                "Data, machine, plan",
                "<p class='soft'>What is alike in all stands once.</p>",
                *facts_side_by_side(compared.runs, _head(compared, "")),
                css_class="long",
            ),
            f"<p class='soft'>Made {time.strftime('%Y-%m-%d %H:%M')}.</p>",
        ],
        STYLE,
    )


_FIGURES: list[tuple[str, Callable[[Totals], float | None], Callable[[Any], str], Better]] = [
    ("epochs", lambda t: t.epochs, "{:.2f}".format, None),
    ("tokens", lambda t: t.tokens, count, None),
    ("trained tokens", lambda t: t.trained_tokens, count, None),
    ("training loss, first step", lambda t: t.first_loss, "{:.4f}".format, None),
    ("training loss, median of last 20", lambda t: t.late_loss, "{:.4f}".format, "low"),
    ("last evaluation loss", lambda t: t.last_eval_loss, "{:.4f}".format, "low"),
    ("lowest evaluation loss", lambda t: t.best_eval_loss, "{:.4f}".format, "low"),
    ("after step", lambda t: t.best_eval_step, "{:,}".format, None),
    ("tokens/s", lambda t: t.tokens_per_second, "{:,.0f}".format, "high"),
    ("time in steps", lambda t: t.training_seconds, time_of, None),
    ("peak memory of a worker", lambda t: t.peak_worker_bytes, gib, "low"),
    ("peak RAM", lambda t: t.peak_host_bytes, gib, "low"),
]


def _steps(report: RunReport) -> str:
    totals = report.totals
    return f"{totals.steps:,}" + (f" of {totals.num_steps:,}" if totals.num_steps else "")


def _best(values: Sequence[float | None], better: Better) -> list[bool]:
    known = [value for value in values if value is not None]
    if better is None or len(set(known)) < 2:
        return [False] * len(values)
    best = min(known) if better == "low" else max(known)
    return [value == best for value in values]


def _what(report: RunReport) -> str:
    adapter = report.run.recipe.adapter
    return f"{report.run.recipe.model.path}, " + ("full" if adapter is None else f"LoRA {adapter.r}")


def _head(compared: Comparison, first: str, css_class: str = "") -> str:
    cells = "".join(f"<th{css_class}>{stroke_key(i, name)}</th>" for i, name in enumerate(compared.runs))
    return f"<thead><tr><th>{first}</th>{cells}</tr></thead>"


def _traced(compared: Comparison) -> Iterator[str]:
    """The workers of each run's last traced step."""
    workers, steps, causes = [], [], {}
    for name, run in compared.runs.items():
        if run.traces and run.traces[-1].idle:
            step, causes = run.traces[-1].idle[-1], run.traces[-1].causes
            workers += [(f"{name}, {worker['worker']}", worker) for worker in step["workers"]]
            steps.append(f"{step['step']} of {name}")
    if workers:
        told = f"Step {', '.join(steps)}; the pictures are on the runs' own pages."
        yield page.section(
            "Where the workers' time went", f"<p class='soft'>{escape(told)}</p>", idle_bars(workers, causes)
        )


def _samples(compared: Comparison) -> Iterator[str]:
    found = samples_side_by_side(compared.runs)
    if found:
        yield page.section("Samples before and after", found, css_class="long")


def _final(compared: Comparison) -> Iterator[str]:
    yield "<div class='scroll' tabindex='0' role='region' aria-label='final figures'><table>"
    yield _head(compared, "", " class='n'") + "<tbody>"
    for name, said, best in final_figures(compared):
        cells = "".join(
            f"<td class='n most'>✓ {escape(text)}</td>" if good else f"<td class='n'>{escape(text)}</td>"
            for text, good in zip(said, best, strict=True)
        )
        yield f"<tr><td>{escape(name)}</td>{cells}</tr>"
    yield "</tbody></table></div><p class='soft'>✓: the best of them.</p>"


def _differing(compared: Comparison) -> Iterator[str]:
    if not compared.differing:
        yield "<p>In nothing but output_dir.</p>"
        return
    yield "<div class='scroll' tabindex='0' role='region' aria-label='recipes'><table class='loose'>"
    yield _head(compared, "key") + "<tbody>"
    for key, values in compared.differing.items():
        cells = "".join(f"<td>{escape(said_of_key(value))}</td>" for value in values)
        yield f"<tr><td><code>{escape(key)}</code></td>{cells}</tr>"
    yield "</tbody></table></div>"
