"""A plan as one HTML page that needs no other file: its timeline, stages, memory, and what would change it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape

from rpft.console.plan_timeline import draw_step
from rpft.draw import page
from rpft.draw.colours import KINDS, shade
from rpft.draw.figures import duration
from rpft.plan.bill import gib
from rpft.recipe.dump import dump_recipe
from rpft.train.plan_report import LIMITS, MemoryReport, PlanReport, SlotReport

_COPY_FILLS = {
    "weights up": KINDS["weights"],
    "activations up": KINDS["activations"],
    "activations down": KINDS["activations"],
    "gradients down": KINDS["gradients"],
}


def render_plan(report: PlanReport) -> str:
    """The page."""
    planned, prediction = report.planned, report.prediction
    title = f"Plan: {report.model_name} on {report.machine_name}"
    memory = report.memory
    vram, ram = memory["vram_bytes"], memory["host_bytes"]
    share = prediction.saved_seconds[prediction.limited_by] / prediction.step_seconds
    figures = [
        ("predicted", f"{prediction.tokens_per_second:,.0f}", "tokens a second"),
        ("a step", duration(prediction.step_seconds), f"{planned.rounds} round(s)"),
        ("bubble", f"{prediction.bubble:.1%}", "of the workers' time they are idle"),
        ("limited by", prediction.limited_by, f"{share:.0%} of a step"),
        ("memory of each worker", gib(vram.takes), _there_is(vram)),
        ("RAM", gib(ram.takes), _there_is(ram)),
    ]
    return page.page(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            f"<p class='soft'>{escape(report.headline)}</p>",
            _verdict(report),
            page.tiles(figures),
            page.section("A step", _about_step(report), draw_step(report.playback())),
            "<div class='columns'>",
            page.section("What limits a step", *_limits(report)),
            page.section(report.changes_title, *_changes(report)),
            "</div>",
            page.section("Memory", *_memory(report)),
            page.section("Stages", *_stages(report), css_class="long"),
            "<div class='columns'>",
            page.section("Machine", page.facts(report.machine_facts())),
            page.section("Run", page.facts(report.run_facts()), _recipe(report)),
            "</div>",
            f"<p class='soft'>Made {time.strftime('%Y-%m-%d %H:%M')} with {escape(_versions(report))}.</p>",
        ],
    )


def _of(kind: MemoryReport) -> str:
    return gib(kind.takes) if kind.limit is None else f"{gib(kind.takes)} of {gib(kind.limit)}"


def _there_is(kind: MemoryReport) -> str:
    return "no limit known" if kind.limit is None else f"of {gib(kind.limit)}"


def _verdict(report: PlanReport) -> str:
    if report.planned.fits:
        return "<p class='verdict good'>✓ It fits.</p>"
    short = "; ".join(
        f"{kind.name}: {gib(kind.takes - kind.limit)} too little"
        for kind in report.memory.values()
        if kind.limit is not None and kind.short
    )
    return f"<p class='verdict bad'>✗ It does not fit. {escape(short)}.</p>"


def _about_step(report: PlanReport) -> str:
    late = (
        "late: the next step runs while this one's weights are updated"
        if report.planned.delayed
        else ("exact: a step's first forward waits for the update of the step before")
    )
    given = (
        "to the workers where they are done first" if report.planned.plan.dispatch else "to the workers in turn"
    )
    return (
        f"<p class='soft'>As the simulator plays it, in the long run. Slots go {given}; numbers in"
        " them are layers. Above each worker what comes up from RAM, below what goes down. The steps before and"
        " after are faint; grey is idle time, pale copies take the link for a part of the time. Updates are"
        f" {late}.</p>"
    )


def _limits(report: PlanReport) -> Iterator[str]:
    prediction = report.prediction
    yield "<p class='soft'>How much shorter a step would be, were each alone free. They overlap.</p>"
    saved = sorted(prediction.saved_seconds.items(), key=lambda item: -item[1])
    rows = []
    for name, seconds in saved:
        share = seconds / prediction.step_seconds
        fill = KINDS["backward"] if name == prediction.limited_by else KINDS["forward"]
        shown = f"<span title='{escape(LIMITS[name])}'>{escape(name)}</span>"
        rows.append((shown, share, fill, f"{share:.0%}  {duration(seconds)}"))
    yield page.bar_list(rows)
    yield f"<p><b>{escape(prediction.limited_by)}</b>: {escape(LIMITS[prediction.limited_by])}.</p>"


def _changes(report: PlanReport) -> Iterator[str]:
    saved = report.prediction.saved_seconds["memory"] / report.prediction.step_seconds
    if saved:
        yield f"<p>With memory without end the best plan would save {saved:.0%} of a step.</p>"
    if not report.changes:
        yield "<p>None of the settings that were tried makes a difference worth naming.</p>"
        return
    yield "<p class='soft'>Each line was tried without the others, and planned anew.</p><table class='loose'>"
    for change in report.changes:
        cells = f"<td><code>{_breakable(change.setting)}</code></td>"
        if report.planned.fits:
            cells += f"<td class='n'>{change.gain:+.0%}</td><td>tokens/s</td>"
        else:
            needs = ", ".join(f"{report.memory[k].name} {gib(change.memory[k])}" for k in report.planned.short_of)
            fits = "<span class='good'>✓ fits</span>" if change.fits else "still too much"
            cells += f"<td>{escape(needs)}</td><td>{fits}</td>"
        yield f"<tr>{cells}</tr>"
    yield "</table>"


def _breakable(setting: str) -> str:
    return escape(setting).replace(".", ".<wbr>").replace("=", "=<wbr>")


def _memory(report: PlanReport) -> Iterator[str]:
    for key, kind in report.memory.items():
        limit = kind.limit
        # What is page-locked is a part of the RAM, and is drawn against it.
        against = report.memory["host_bytes"].limit if key == "pinned_bytes" else limit
        sizes = kind.parts or {kind.name: kind.takes}
        parts = [page.Part(name, size, gib(size)) for name, size in sizes.items() if size]
        mark = "<span class='bad'>✗</span> " if kind.short else ""
        yield f"<h3>{mark}{escape(kind.name)}: {escape(_of(kind))}</h3>"
        said = "" if against is None else f"{'RAM ' if key == 'pinned_bytes' else ''}{gib(against)}"
        over = "" if limit is None else f"{gib(max(0, kind.takes - limit))} more than there is"
        yield page.whole(parts, against, said, over)
        if kind.parts:
            yield page.part_keys(parts)


def _stages(report: PlanReport) -> Iterator[str]:
    plan = report.planned.plan
    yield (
        f"<p class='soft'>A round has {len(report.slots)} slots of {plan.num_microbatches} microbatches, a step"
        f" {report.planned.rounds} round(s). Times are of one slot, of lines of the usual length; what takes"
        " longest sets its pace, since copies run beside compute.</p>"
    )
    yield "<div class='scroll tall' tabindex='0' role='region' aria-label='stages'><table><thead><tr>"
    yield "<th class='n'>slot</th><th>kind</th><th>layers</th>"
    yield "<th class='n'>weights</th><th class='n'>gradients</th>"
    yield "<th class='n'>compute</th><th class='n'>weights<br>up</th><th class='n'>activations<br>up</th>"
    yield "<th class='n'>activations<br>down</th><th class='n'>gradients<br>down</th>"
    yield "<th>compute, and the<br>longest copy</th><th>sets the pace</th></tr></thead><tbody>"
    most = max(max(slot.seconds.values()) for slot in report.slots)
    top = plan.num_layers - 1
    for slot in report.slots:
        yield _stage(slot, most, top)
    yield "</tbody></table></div>"


def _stage(slot: SlotReport, most: float, top: int) -> str:
    first, last = slot.stage
    fill = shade(slot.kind, (first + last) / 2 / top)
    copy = slot.longest_copy
    times = "".join(
        f"<td class='n{' most' if name == slot.longest else ''}'>{duration(seconds) if seconds else '-'}</td>"
        for name, seconds in slot.seconds.items()
    )
    meters = page.meter(slot.seconds["compute"] / most, fill) + page.meter(
        slot.seconds[copy] / most, _COPY_FILLS[copy]
    )
    layers = f"{first} to {last}" if last > first else str(first)
    gradients = gib(slot.gradient_bytes) if slot.gradient_bytes else "-"
    return (
        f"<tr><td class='n'>{slot.slot}</td><td>{page.key(fill, slot.kind)}</td><td>{layers}</td>"
        f"<td class='n'>{gib(slot.weights_bytes)}</td><td class='n'>{gradients}</td>{times}"
        f"<td>{meters}</td><td>{slot.longest}</td></tr>"
    )


def _recipe(report: PlanReport) -> str:
    text = escape(dump_recipe(report.planned.recipe))
    return f"<details><summary>The whole recipe</summary><pre>{text}</pre></details>"


def _versions(report: PlanReport) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.versions.items())
