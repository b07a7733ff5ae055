"""A run as one HTML page that needs no other file: its charts, events, a traced step, what it is, what it left."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from html import escape
from typing import Any

from rpft.console.run_charts import charts_of, events_of, time_of
from rpft.console.run_facts import machine_of, plan_of
from rpft.console.run_idle import idle_bars
from rpft.console.run_samples import samples_of
from rpft.draw import page
from rpft.draw.chart_style import STYLE
from rpft.draw.figures import count
from rpft.draw.scale import NOISY_FROM
from rpft.plan.bill import gib
from rpft.recipe.dump import dump_recipe
from rpft.train.run_report import RunReport


def render_run(report: RunReport) -> str:
    """The page."""
    title = f"Run: {report.name}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class='soft'>{escape(_headline(report))}</p>",
        standing(report),
        page.tiles(_figures(report)),
        page.section("Step by step", _how_to_read(report), charts_of(report), _events(report), css_class="long"),
    ]
    if report.traces:
        body.append(page.section("A traced step", *_trace(report)))
    body += [
        page.section("Samples before and after", samples_of(report), css_class="long"),
        "<div class='columns'>",
        page.section("Data", *_data(report)),
        page.section("What it left", page.facts(_left(report))),
        "</div><div class='columns'>",
        page.section("Machine and versions", page.facts(machine_of(report))),
        page.section("Plan", *_plan(report)),
        "</div>",
        page.section(
            "Recipe", f"<pre class='wide'>{escape(dump_recipe(report.run.recipe))}</pre>", css_class="long"
        ),
        f"<p class='soft'>Made {time.strftime('%Y-%m-%d %H:%M')} from {escape(str(report.run.path))}.</p>",
    ]
    return page.page(title, body, STYLE)


def standing(report: RunReport) -> str:
    """Finished, running or stopped, and where."""
    totals = report.totals
    at = f"step {totals.steps:,}" + (f" of {totals.num_steps:,}" if totals.num_steps else "")
    if report.standing == "finished":
        return f"<p class='verdict good'>✓ Finished, {at}.</p>"
    if report.standing == "running":
        return f"<p class='verdict'>▶ Running ({escape(report.holder or '')}): {at} when this page was made.</p>"
    further = "<code>rpft train RECIPE --resume</code> goes on" if report.resumable else "nothing of it was saved"
    return f"<p class='verdict bad'>■ Stopped behind {at}; {further}.</p>"


def _headline(report: RunReport) -> str:
    recipe = report.run.recipe
    adapter = recipe.adapter
    what = f"{recipe.model.path}, " + ("every weight trained" if adapter is None else f"LoRA of rank {adapter.r}")
    return what + (f"; begun {report.about['begun']}" if report.about else "")


def _figures(report: RunReport) -> Iterator[tuple[str, str, str]]:
    totals = report.totals
    of = "" if totals.num_steps is None else f"of {totals.num_steps:,}, "
    yield "steps", f"{totals.steps:,}", f"{of}{totals.epochs:.2f} epochs"
    if totals.late_loss is not None and totals.first_loss is not None:
        yield (
            "training loss",
            f"{totals.late_loss:.4f}",
            f"median of the last 20 steps; first {totals.first_loss:.4f}",
        )
    if totals.best_eval_loss is not None:
        yield "lowest eval loss", f"{totals.best_eval_loss:.4f}", f"after step {totals.best_eval_step:,}"
    speed = totals.tokens_per_second
    if speed is not None:
        share = f", {speed / report.predicted:.0%} of predicted" if report.predicted else ""
        share += f", {speed / report.roof:.0%} of the roof" if report.roof else ""
        yield "speed", f"{speed:,.0f}", f"tokens a second{share}"
    yield "tokens", count(totals.tokens), f"{count(totals.trained_tokens)} of them trained"
    yield "time in steps", time_of(totals.training_seconds), "evaluations and start not counted"
    ram = "" if totals.peak_host_bytes is None else f"RAM {gib(totals.peak_host_bytes)}"
    if totals.peak_worker_bytes is not None:
        yield "peak memory of a worker", gib(totals.peak_worker_bytes), ram


def _how_to_read(report: RunReport) -> str:
    pale = " Pale: every step; strong: the running median." if len(report.steps) >= NOISY_FROM else ""
    return (
        f"<p class='soft'>Point at a chart for its figures.{pale} Red triangles at the axis: skipped steps; at"
        " an edge: figures beyond it, so that one spike does not flatten the rest.</p>"
    )


def _events(report: RunReport) -> str:
    told = events_of(report)
    return f"<h3>What happened on the way</h3>{page.facts(told)}" if told else ""


def _trace(report: RunReport) -> Iterator[str]:
    trace = report.traces[-1]
    picture = base64.b64encode(trace.picture.read_bytes()).decode()
    others = ", ".join(each.name for each in report.traces[:-1])
    also = f" Traced too: {escape(others)}." if others else ""
    yield (
        f"<p class='soft'>What each stream did in {escape(trace.name)};"
        f" <code>traces/{escape(trace.name)}.json</code> is the same for Perfetto.{also}</p>"
    )
    yield (
        "<div class='scroll' tabindex='0' role='region' aria-label='timeline'><img class='trace'"
        f" alt='What each stream did in {escape(trace.name)}' src='data:image/svg+xml;base64,{picture}'></div>"
    )
    if trace.idle:
        yield f"<h3>Where the workers' time went in step {trace.idle[-1]['step']}</h3>"
        yield idle_bars([(worker["worker"], worker) for worker in trace.idle[-1]["workers"]], trace.causes)


def _data(report: RunReport) -> Iterator[str]:
    told = report.about.get("data")
    if told is None:
        yield page.facts((entry.path, entry.format) for entry in report.run.recipe.data.train)
        yield "<p class='soft'>Counts are known of runs begun since rpft leaves an about.json.</p>"
        return
    yield "<div class='scroll'><table class='loose'><thead><tr><th>rows of</th><th class='n'>kept</th>"
    yield "<th class='n'>tokens</th><th class='n'>trained</th></tr></thead><tbody>"
    for kind in ("train", "eval"):
        for entry in told[kind]:
            yield f"<tr><td colspan='4'>{escape(_breakable(entry['path']))}</td></tr>"
            yield (
                f"<tr><td class='soft'>{kind}, {escape(entry['format'])}{escape(_lost(entry))}</td>"
                f"<td class='n'>{entry['trained_rows']:,} of {entry['rows']:,}</td>"
                f"<td class='n'>{entry['tokens']:,}</td><td class='n'>{entry['trained_tokens']:,}</td></tr>"
            )
    yield "</tbody></table></div>"
    for note in told["notes"]:
        yield f"<p class='soft'>{escape(note)}</p>"


def _breakable(path: str) -> str:
    return path.replace("/", "/\u200b")


def _lost(entry: dict[str, Any]) -> str:
    parts = [f"{count:,} dropped: {reason}" for reason, count in entry["dropped"].items()]
    parts += [f"{entry[name]:,} {name}" for name in ("cut", "trimmed") if entry[name]]
    return "".join(f"; {part}" for part in parts)


def _left(report: RunReport) -> Iterator[tuple[str, str]]:
    if report.result_bytes is not None:
        yield "result", f"{_breakable(str(report.run.result))}, {gib(report.result_bytes)}"
    else:
        yield "result", "none yet"
    best = report.totals.best_eval_step
    for each in report.checkpoints:
        step = int(each.name.rpartition("-")[2])
        lowest = "; the evaluation loss was lowest here" if step == best else ""
        torn = f"; not whole: {each.fault}" if each.fault else ""
        yield "checkpoint", f"{each.name}, {gib(each.num_bytes)}{lowest}{torn}"
    if not report.checkpoints:
        yield "checkpoint", "none"
    yield (
        "metrics",
        f"{report.run.metrics_path.name}: {len(report.steps):,} steps, {len(report.evaluations)} evaluations",
    )
    for trace in report.traces:
        yield "trace", f"traces/{trace.name}.json"


def _plan(report: RunReport) -> Iterator[str]:
    if not report.plan:
        yield "<p>No plan.json is there.</p>"
        return
    yield page.facts(plan_of(report))
    told = report.about.get("told")
    if told:
        lines = "\n".join(told)
        yield f"<details><summary>What the run said when it began</summary><pre>{escape(lines)}</pre></details>"
    yield f"<details><summary>plan.json</summary><pre>{escape(json.dumps(report.plan))}</pre></details>"
