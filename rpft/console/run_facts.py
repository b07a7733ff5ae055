"""What runs ran on and with, in names and figures for pages: rows, machine, versions, plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape

from rpft.draw.figures import count, duration, short
from rpft.plan.bill import gib
from rpft.train.about import machine_facts
from rpft.train.run_report import RunReport

Facts = Iterator[tuple[str, str]]


def machine_of(report: RunReport) -> Facts:
    """Machine and versions."""
    if not report.about:
        yield "machine", "not known: the run was begun before rpft left an about.json"
        return
    yield from machine_facts(report.about)
    yield "kernels", report.about["kernels"]
    yield from ((name, number) for name, number in report.about["versions"].items())


def plan_of(report: RunReport) -> Facts:
    """The plan that the run has now."""
    plan = report.plan
    if not plan:
        yield "plan", "no plan.json is there"
        return
    yield "forward stages", _stages(plan["forward"])
    yield "backward stages", f"{_stages(plan['backward'])}; the first is fused with its forward"
    yield "microbatches a round", f"{plan['num_microbatches']}, of {plan['micro_batch_size']} row(s)"
    yield "rounds a step", f"{plan['rounds']}"
    yield "recompute", f"by {plan['recompute']}"
    memory = plan["memory"]
    yield "memory by the plan", f"each worker {gib(memory['vram_bytes'])}, RAM {gib(memory['host_bytes'])}"
    predicted = plan["predicted"]
    if predicted:
        yield (
            "predicted",
            f"{short(predicted['tokens_per_second'])} tokens/s, {duration(predicted['step_seconds'])} a step,"
            f" bubble {predicted['bubble_percent']:.1f}%, limited by {predicted['limited_by']}",
        )


def data_of(report: RunReport) -> Facts:
    """How many rows and tokens of training and evaluation."""
    told = report.about.get("data")
    for kind, name in (("train", "training"), ("eval", "evaluation")):
        entries = told[kind] if told else []
        if entries:
            rows, tokens, trained = (
                sum(entry[key] for entry in entries) for key in ("trained_rows", "tokens", "trained_tokens")
            )
            yield f"{name} rows", f"{rows:,}, {count(tokens)} tokens, {count(trained)} trained"


def facts_side_by_side(runs: Mapping[str, RunReport], head: str) -> Iterator[str]:
    """A table of all of it, a column a run under ``head``; what is alike in all stands once."""
    yield f"<div class='scroll' tabindex='0' role='region' aria-label='facts'><table class='loose'>{head}<tbody>"
    groups: Iterable[tuple[str, Callable[[RunReport], Facts]]] = (
        ("data", data_of),
        ("machine and versions", machine_of),
        ("plan", plan_of),
    )
    for group, facts_of in groups:
        by_run = [dict(facts_of(run)) for run in runs.values()]
        yield f"<tr><th colspan='{len(runs) + 1}'>{group}</th></tr>"
        for name in dict.fromkeys(name for facts in by_run for name in facts):
            said = [facts.get(name, "-") for facts in by_run]
            alike = len(set(said)) == 1 and len(said) > 1
            cells = (
                f"<td colspan='{len(said)}'>{escape(said[0])}</td>"
                if alike
                else "".join(f"<td>{escape(each)}</td>" for each in said)
            )
            yield f"<tr><td>{escape(name)}</td>{cells}</tr>"
    yield "</tbody></table></div>"


def _stages(stages: list[list[int]]) -> str:
    return " ".join(f"[{first}..{last}]" for first, last in stages) or "none"
