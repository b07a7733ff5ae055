"""A finished trace says how much copying hid behind compute, and is written as JSON and as a small picture."""

import json
import random
import runpy
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rpft.engine.trace import HOST, PART, TASK, WAIT, Span, Trace, read_chrome_trace
from rpft.engine.trace_svg import write_svg
from rpft.errors import UserError

PURPOSES = ["compute", "weights up", "activations up", "activations down", "gradients down"]
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "timeline.py"


def hand_made():
    """10 seconds of one worker: compute in 1-4 and 5-7, copies in 0-2 (up), 3-6 (down) and 8-9 (down)."""

    def task(stream, what, start, end, copied_bytes=0, worker="cuda:0"):
        return Span(worker, stream, TASK, what, start, end, start, copied_bytes)

    spans = [
        task("compute", "slot 0 (forward stage [0..1]) microbatch 0", 1.0, 4.0),
        task("compute", "slot 1 (backward stage [0..1]) microbatch 0", 5.0, 7.0),
        Span("cuda:0", "compute", WAIT, "wait: slot 1", 4.0, 5.0, 4.0),
        task("weights up", "slot 0 (forward stage [0..1]) weights", 0.0, 2.0, 4000),
        task("weights up", "slot 1 (backward stage [0..1]) gradients up", 2.0, 2.5),
        task("gradients down", "slot 1 (backward stage [0..1]) gradients", 3.0, 6.0, 9000),
        task("gradients down", "slot 1 (backward stage [0..1]) gradients", 8.0, 9.0, 1000),
        task("optimizer", "the update of step 1", 2.0, 3.0, worker=HOST),
        task("optimizer", "the update of step 2", 7.0, 8.0, worker=HOST),
    ]
    rows = [("cuda:0", "compute"), ("cuda:0", "weights up"), ("cuda:0", "gradients down"), (HOST, "optimizer")]
    return Trace(rows, spans, 0.0, 10.0)


def test_overlap_of_a_known_trace():
    [o] = hand_made().overlap()
    assert o.worker == "cuda:0"
    assert o.copied_bytes == 14000
    assert o.transfer_seconds == pytest.approx(6.0)  # 2 + 3 + 1
    assert o.hidden_seconds == pytest.approx(3.0)  # 1-2, 3-4, 5-6
    assert o.hidden == pytest.approx(0.5)
    assert o.compute_busy == pytest.approx(0.5)
    assert o.only_transfers == pytest.approx(0.3)  # 0-1, 4-5, 8-9
    assert o.idle == pytest.approx(0.2)  # 7-8, 9-10


def test_overlap_counts_transfers_of_two_streams_at_once_twice_and_never_more_than_they_last():
    trace = hand_made()
    trace.spans.append(Span("cuda:0", "weights up", TASK, "more", 5.5, 6.5, 5.5, 10))
    [o] = trace.overlap()
    assert o.transfer_seconds == pytest.approx(7.0)
    assert o.hidden_seconds == pytest.approx(4.0)
    assert o.only_transfers == pytest.approx(0.3)


def test_use_of_each_stream_of_a_known_trace():
    uses = {use.stream: use for use in hand_made().streams()}
    assert list(uses) == ["compute", "weights up", "gradients down", "optimizer"]
    assert uses["compute"].busy_seconds == pytest.approx(5.0)
    assert uses["compute"].waiting_seconds == pytest.approx(1.0)
    assert uses["weights up"].busy_seconds == pytest.approx(2.5)
    assert uses["weights up"].transfer_seconds == pytest.approx(2.0)
    assert uses["gradients down"].copied_bytes == 10000
    assert uses["gradients down"].num_tasks == 2


def test_a_window_cuts_spans_and_their_bytes():
    cut = hand_made().between(1.0, 4.0)
    assert (cut.start_seconds, cut.end_seconds) == (1.0, 4.0)
    [up] = [s for s in cut.spans if s.copied_bytes and s.stream == "weights up"]
    assert (up.start_seconds, up.end_seconds, up.copied_bytes) == (1.0, 2.0, 2000)
    [down] = [s for s in cut.spans if s.stream == "gradients down"]
    assert (down.start_seconds, down.end_seconds, down.copied_bytes) == (3.0, 4.0, 3000)
    [o] = cut.overlap()
    assert o.compute_busy == pytest.approx(1.0)
    assert o.hidden == pytest.approx(1.0)


def test_a_step_runs_from_update_to_update_and_one_that_is_not_whole_is_refused():
    step = hand_made().step(2)
    assert (step.start_seconds, step.end_seconds) == (3.0, 8.0)
    with pytest.raises(UserError, match=r"whole of step 1; it holds \[2\]"):
        hand_made().step(1)


def test_kinds_follow_from_stream_and_name():
    assert [s.kind for s in hand_made().spans] == [
        "forward",
        "backward",
        "compute",
        "weights",
        "gradients",
        "gradients",
        "gradients",
        "optimizer",
        "optimizer",
    ]


# -- files -------------------------------------------------------------------------------------------------


def test_the_json_has_a_process_a_worker_and_a_thread_a_stream_and_reads_back_equal(tmp_path):
    trace = hand_made()
    trace.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [(processes[pid], name) for (pid, _), name in threads.items()] == trace.rows
    drawn = [e for e in events if e["ph"] == "X"]
    assert [(processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"]) for e in drawn] == [
        (s.worker, s.stream, s.what) for s in trace.spans
    ]
    assert (drawn[0]["ts"], drawn[0]["dur"]) == (1e6, 3e6)
    assert read_chrome_trace(tmp_path / "trace.json") == trace


def test_spans_that_follow_one_another_do_not_overlap_by_a_nanosecond_in_the_file(tmp_path):
    rng = random.Random(0)
    times = sorted(rng.uniform(0.0, 10.0) for _ in range(500))
    spans = [Span(HOST, "optimizer", TASK, "", a, b, a) for a, b in pairwise(times)]
    Trace([(HOST, "optimizer")], spans, 0.0, 10.0).write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [(round(e["ts"] * 1e3), round(e["dur"] * 1e3)) for e in events if e["ph"] == "X"]
    assert all(ts + dur == following for (ts, dur), (following, _) in pairwise(drawn))


def svg_of(trace, path):
    write_svg(trace, path)
    root = ElementTree.parse(path).getroot()
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{name}text")]
    return root, texts, list(root.iter(f"{name}rect"))


def test_the_picture_has_rows_legend_axis_and_a_bar_where_the_work_was(tmp_path):
    root, texts, rects = svg_of(hand_made(), tmp_path / "trace.svg")
    for expected in ("cuda:0", HOST, "compute", "weights up", "gradients down", "optimizer"):
        assert expected in texts
    for kind in ("forward", "backward", "gradients", "waits"):
        assert kind in texts
    assert "fused" not in texts
    assert "0 ms" in texts
    assert "10000" in texts
    assert texts.count("[0..1]") == 2  # the two slots are named in their bars
    width = float(root.attrib["width"])
    assert all(float(r.attrib["x"]) + float(r.attrib["width"]) <= width for r in rects)
    [forward] = [r for r in rects if r.get("fill") == "#56b4e9" and r.get("height") == "14"]
    [backward] = [r for r in rects if r.get("fill") == "#0072b2" and r.get("height") == "14"]
    assert float(forward.attrib["width"]) == pytest.approx(1.5 * float(backward.attrib["width"]), abs=0.2)
    assert float(forward.attrib["x"]) < float(backward.attrib["x"])


def test_where_parts_were_noted_the_task_is_pale_behind_them(tmp_path):
    trace = hand_made()
    trace.spans.append(Span(HOST, "optimizer", PART, "the update of step 1: layer 0", 2.5, 2.6, 2.5))
    _, _, rects = svg_of(trace, tmp_path / "trace.svg")
    bars = [r.get("opacity") for r in rects if r.get("fill") == "#8f7fd6" and r.get("height") == "14"]
    assert sorted(bars, key=str) == [".3", ".3", None]


def test_the_picture_stays_small_however_much_was_noted(tmp_path):
    spans = []
    for number in range(40000):  # two kinds in turn, which never touch their like
        kind = ("forward", "backward")[number % 2]
        what = f"slot {number} ({kind} stage [0..1]) microbatch 0"
        spans.append(Span("cuda:0", "compute", TASK, what, number * 1e-3, number * 1e-3 + 5e-4, number * 1e-3))
    rows = [(f"cuda:{w}", purpose) for w in range(8) for purpose in PURPOSES]
    _, texts, rects = svg_of(Trace(rows, spans, 0.0, 40.0), tmp_path / "trace.svg")
    assert (tmp_path / "trace.svg").stat().st_size < 300_000
    assert 2 < len(rects) < 4000
    assert texts.count("compute") == 8


def test_the_script_prints_the_tables_and_draws_a_step(tmp_path, monkeypatch, capsys):
    trace, svg = tmp_path / "trace.json", tmp_path / "step.svg"
    hand_made().write_chrome_trace(trace)

    def timeline(*arguments):
        monkeypatch.setattr(sys, "argv", ["timeline.py", str(trace), *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return end.value.code

    assert timeline("--step", "2", "--svg", str(svg)) == 0
    printed = capsys.readouterr().out
    assert "| cuda:0 | 60.0% | 20.0% | 20.0% | 3000 ms | 66.7% |" in printed
    assert "| cuda:0 gradients down | 1 | 60.0% | 0.0% | 0.000 GB | 0.0 GB/s |" in printed
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "it holds [2]" in str(timeline("--step", "9"))
    assert "nothing between 9000 and 1000 ms" in str(timeline("--from", "9000", "--to", "1000"))
