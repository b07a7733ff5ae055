"""What models answered to rows of their runs, for pages: before training and after, of one run or several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from rpft.train.run_report import RunReport
from rpft.train.samples import MOST_NEW_TOKENS, Sample


def samples_of(report: RunReport) -> str:
    """The samples of one run, or how they are made."""
    if not report.samples:
        return (
            "<p class='soft'>None were asked for: <code>rpft report RUN --samples</code> has the model answer a"
            " few rows as it was before training and as it is now.</p>"
        )
    first = report.samples[0]
    return "\n".join([_how(first.held_out, f"After: {first.after_of}."), *map(_one, report.samples)])


def samples_side_by_side(runs: Mapping[str, RunReport]) -> str:
    """Answers of each run to the rows that more than one was asked; "" where there are none."""
    asked: dict[str, dict[str, Sample]] = {}
    for name, run in runs.items():
        for sample in run.samples:
            asked.setdefault(sample.asked, {})[name] = sample
    shared = [by_run for by_run in asked.values() if len(by_run) > 1]
    if not shared:
        return ""
    return "\n".join([_how(all(s.held_out for each in shared for s in each.values())), *map(_several, shared)])


def _how(held_out: bool, after: str = "") -> str:
    rows = "evaluation, which training has not seen" if held_out else "training"
    told = f"Rows of the {rows}; always the likeliest token, {MOST_NEW_TOKENS} tokens at most. {after}"
    return f"<p class='soft'>{escape(told)}</p>"


def _one(sample: Sample) -> str:
    return _answers(sample, [("before", sample.before), ("after", sample.after)])


def _several(by_run: Mapping[str, Sample]) -> str:
    befores = {name: sample.before for name, sample in by_run.items()}
    told: list[tuple[str, str]] = []
    if len(set(befores.values())) == 1:
        told.append(("before", next(iter(befores.values()))))
    else:
        told += [(f"before, {name}", said) for name, said in befores.items()]
    told += [(f"after, {name}", sample.after) for name, sample in by_run.items()]
    return _answers(next(iter(by_run.values())), told)


def _answers(sample: Sample, told: list[tuple[str, str]]) -> str:
    return "\n".join(
        ["<dl class='sample'>", *_rows([("asked", sample.asked), ("the row", sample.wanted), *told]), "</dl>"]
    )


def _rows(told: list[tuple[str, str]]) -> Iterator[str]:
    for name, said in told:
        shown = escape(said.strip()) or "<i class='soft'>nothing</i>"
        yield f"<dt>{escape(name)}</dt><dd><pre>{shown}</pre></dd>"
