"""`rpft report` and `rpft compare`: pages and JSON of runs that are finished, under way, stopped, or no runs."""

import json
import re
import shutil
import signal
from html import escape
from pathlib import Path

import pytest
from support.pages import assert_whole_and_alone, in_browser, needs_browser, visible
from support.recipes import chats, run_rpft, watch

from rpft.train.run_compare import read_runs
from rpft.train.run_lock import RunLock, holder
from rpft.train.run_report import report_run

SECTIONS = {
    "adapter": {"type": "lora", "r": 4},
    "train": {"max_steps": 6, "eval_every": 2},
    "checkpoint": {"every_steps": 3},
    "engine": {"trace_steps": [4], "workers": 2},
}


@pytest.fixture(scope="module")
def runs(project):
    """Folders of three finished runs; the first has a trace and evaluations, none is changed by a test."""
    made = project("reports", "qwen3", sections=SECTIONS)
    first = made.train_well("first").folder
    second = made.train_well("second", "adapter.r=8", "engine.trace_steps=[]").folder
    third = made.train_well("third", "train.learning_rate=0.002", "train.eval_every=null").folder
    return first, second, third


@pytest.fixture
def copy(runs, tmp_path):
    """A copy of the first run, to be changed."""
    return shutil.copytree(runs[0], tmp_path / "a copy & more")


def page_of(folder, tmp_path, *words):
    path = tmp_path / "page.html"
    ran = run_rpft("report", str(folder), "--html", str(path), *words)
    assert ran.code == 0, ran.err
    text = path.read_text(encoding="utf-8")
    assert_whole_and_alone(text)
    return text


def test_the_page_of_a_finished_run_says_all_that_the_run_left(runs, tmp_path):
    text = page_of(runs[0], tmp_path)
    seen = visible(text)
    report = report_run(runs[0])
    for title in ("Loss", "Learning rate", "Gradient norm", "Tokens a second", "Memory of workers", "RAM"):
        assert f"<figcaption>{title}" in text
    assert "<figcaption>Gradient norm of each layer" in text
    for said in (
        "Finished, step 6 of 6",
        "LoRA of rank 4",
        f"{report.totals.best_eval_loss:.4f}",
        f"{report.totals.late_loss:.4f}",
        "24 of 24",
        "step-00000003",
        "step-00000006",
        str(runs[0] / "adapter").replace("/", "/\u200b"),
        "2 x CPU",
        report.about["machine"]["processor"],
        "What each stream did in step-4",
        "cpu:1",
        "busy",
        "r: 4",
        "forward stages",
        "plan for 2 worker(s)",
    ):
        assert said in seen, said
    assert all(number in seen for number in report.about["versions"].values())
    assert text.count("src='data:image/svg+xml;base64,") == 1


def test_without_html_the_page_lies_in_the_run_and_one_line_says_how_it_went(copy):
    ran = run_rpft("report", str(copy))
    assert ran.code == 0, ran.err
    assert "finished, step 6 of 6, loss " in ran.out
    assert "<h1>Run: a copy &amp; more</h1>" in (copy / "report.html").read_text(encoding="utf-8")


def test_the_json_has_what_metrics_jsonl_says_and_writes_nothing(copy):
    before = sorted(copy.iterdir())
    ran = run_rpft("report", str(copy), "--json")
    told = json.loads(ran.out)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert sorted(copy.iterdir()) == before
    assert (told["state"], told["skipped"], told["rewinds"], told["plan_changes"]) == ("finished", [], [], [])
    assert told["evaluations"] == [line for line in lines if "eval_loss" in line]
    totals = told["totals"]
    assert (totals["steps"], totals["num_steps"], totals["epochs"]) == (6, 6, steps[-1]["epoch"])
    assert totals["tokens"] == sum(line["tokens"] for line in steps)
    assert totals["training_seconds"] == pytest.approx(sum(line["step_seconds"] for line in steps))
    later = sum(line["tokens"] for line in steps[1:]) / sum(line["step_seconds"] for line in steps[1:])
    assert totals["tokens_per_second"] == pytest.approx(later)
    assert totals["best_eval_loss"] == min(line["eval_loss"] for line in told["evaluations"])
    assert [each["name"] for each in told["checkpoints"]] == ["step-00000003", "step-00000006"]
    assert told["recipe"]["adapter"]["r"] == 4
    assert told["about"]["data"]["train"][0]["rows"] == 24


def test_samples_are_what_generate_says_before_and_after_training(copy, tmp_path):
    assert "rpft report RUN --samples" in visible(page_of(copy, tmp_path))
    assert json.loads(run_rpft("report", str(copy), "--json").out)["samples"] == []
    text = page_of(copy, tmp_path, "--samples")
    samples = json.loads(run_rpft("report", str(copy), "--json").out)["samples"]
    assert len(samples) == 4
    config = json.loads((Path(report_run(copy).run.recipe.model.path) / "config.json").read_text())
    positions = config["max_position_embeddings"]
    rows = chats(5, seed=99)  # the evaluation rows of a project
    for sample, row in zip(samples, rows, strict=False):
        question, answer = (message["content"] for message in row["messages"][:2])
        assert (sample["held_out"], sample["wanted"].strip()) == (True, answer)
        assert f"user\n{question}<|im_end|>" in sample["asked"]
        most = str(min(128, positions - len(sample["prompt"])))
        for checkpoint, said in (("base", sample["before"]), ("latest", sample["after"])):
            words = ["generate", str(copy), question, "--checkpoint", checkpoint, "--max-new-tokens", most]
            assert json.loads(run_rpft(*words, "--json").out)["text"] == said
        assert escape(sample["asked"].strip()) in text
        assert escape(sample["after"].strip()) in text
    assert "After: the finished result of" in visible(text)


def test_samples_of_a_run_under_way_or_without_questions_are_refused(copy):
    lock = RunLock(copy)
    lock.take()
    try:
        ran = run_rpft("report", str(copy), "--samples")
    finally:
        lock.release()
    assert (ran.code, "is in use by a run" in ran.err) == (2, True)
    (copy / "samples.json").unlink()
    ran = run_rpft("report", str(copy), "--samples")
    assert (ran.code, "no questions in samples.json" in ran.err) == (2, True)


def test_a_run_under_way_is_read_up_to_the_last_whole_line(copy, tmp_path):
    shutil.rmtree(copy / "adapter")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "epoch": 1.2, "los')
    lock = RunLock(copy)
    lock.take()
    try:
        assert re.fullmatch(r"process \d+ on .+", holder(copy) or "")
        text = page_of(copy, tmp_path)
        assert "Running (process" in visible(text)
        assert "result none yet" in visible(text)
        assert json.loads(run_rpft("report", str(copy), "--json").out)["totals"]["steps"] == 6
    finally:
        lock.release()
    assert holder(copy) is None


def test_looking_at_a_run_takes_no_lock_from_the_next(copy):
    assert holder(copy) is None
    lock = RunLock(copy)
    lock.take()
    lock.release()


def test_an_interrupted_run_is_stopped_and_says_where(fresh, monkeypatch, tmp_path):
    made = fresh("llama", sections={"train": {"max_steps": 9}})
    watch(monkeypatch, on_step=lambda record: record.step == 2 and signal.raise_signal(signal.SIGINT))
    assert made.train("cut").code == 130
    folder = made.folder / "cut"
    assert report_run(folder).standing == "stopped"
    seen = visible(page_of(folder, tmp_path))
    assert re.search(r"Stopped behind step \d of 9; rpft train RECIPE --resume goes on", seen)
    shutil.rmtree(folder / "checkpoints")
    seen = visible(page_of(folder, tmp_path))
    assert re.search(r"Stopped behind step \d of 9; nothing of it was saved", seen)
    assert "--resume" not in seen


def test_skipped_steps_rewinds_and_smaller_plans_are_marked_and_said(copy, tmp_path):
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] in (3, 4) and "loss" in line:
            line.update(loss=None, grad_norm=None, skipped_steps=line["step"] - 2)
    lines.insert(4, {"step": 2, "rewound_from": 4, "passed_over": [3, 4]})
    lines.insert(7, {"step": 5, "out_of_memory": "cuda:1 at slot 3", "plan": {}})
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page_of(copy, tmp_path)
    seen = visible(text)
    for said in (
        "went back here from step 4, since the loss had jumped; passed over: 3 to 4",
        "steps 3 to 4 skipped",
        "a smaller plan: cuda:1 at slot 3",
        "step 3 was skipped",
    ):
        assert said in seen, said
    assert text.count("class='event'>smaller plan<") == text.count("class='event'>back from 4<") >= 4
    told = json.loads(run_rpft("report", str(copy), "--json").out)
    assert told["skipped"] == [3, 4]


def test_a_step_whose_gradient_alone_was_not_finite_is_a_skipped_one(copy):
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] == 3 and "loss" in line:
            line.update(grad_norm=None, skipped_steps=1)
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report_run(copy).skipped == [3]


def test_a_run_without_about_json_and_plan_is_still_a_page(copy, tmp_path):
    for name in ("about.json", "plan.json"):
        (copy / name).unlink()
    shutil.rmtree(copy / "traces")
    text = page_of(copy, tmp_path)
    assert "not known" in text
    assert "No plan.json" in text
    assert "A traced step" not in text


def test_a_torn_checkpoint_is_named_on_the_page(copy, tmp_path):
    next((copy / "checkpoints" / "step-00000006").glob("*.safetensors")).write_bytes(b"")
    assert "not whole" in page_of(copy, tmp_path)


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_a_folder_that_is_no_run_and_a_run_without_a_step_are_refused(verb, copy, runs, tmp_path):
    others = [str(runs[1])] if verb == "compare" else []
    ran = run_rpft(verb, str(tmp_path / "nowhere"), *others)
    assert (ran.code, "no such folder" in ran.err) == (2, True)
    (copy / "metrics.jsonl").write_text("")
    ran = run_rpft(verb, str(copy), *others)
    assert (ran.code, "no step is on record" in ran.err) == (2, True)


def test_a_comparison_names_the_keys_that_differ_and_no_others(runs):
    compared = read_runs(runs, 8)
    assert list(compared.runs) == ["first", "second", "third"]
    assert compared.differing == {
        "adapter.r": [4, 8, 4],
        "train.learning_rate": [0.01, 0.01, 0.002],
        "train.eval_every": [2, 2, None],
        "engine.trace_steps": [[4], [], [4]],
    }
    assert compared.cautions == []


def test_a_comparison_as_page_table_and_json_says_the_same(runs, tmp_path):
    path = tmp_path / "compared.html"
    words = [str(folder) for folder in runs]
    ran = run_rpft("compare", *words, "--html", str(path))
    assert ran.code == 0, ran.err
    text = path.read_text(encoding="utf-8")
    assert_whole_and_alone(text)
    told = json.loads(run_rpft("compare", *words, "--json").out)
    seen = visible(text)
    for name, run in zip(("first", "second", "third"), told["runs"], strict=True):
        assert run["name"] == name
        for where in (seen, ran.out):
            assert f"{run['totals']['late_loss']:.4f}" in where
            assert name in where
    for key in told["differing"]:
        assert key in seen
        assert key in ran.out
    assert "optimizer.weight_decay" not in seen
    lines = re.findall(r"class='line (s\d)'", text.split("<figcaption>Training loss")[1].split("</figure>")[0])
    assert lines == ["s0", "s1", "s2"]
    best = min(run["totals"]["late_loss"] for run in told["runs"])
    assert f"✓ {best:.4f}" in seen


def test_a_comparison_has_layers_workers_facts_and_samples_side_by_side(runs, copy, tmp_path):
    other = shutil.copytree(runs[1], tmp_path / "other")
    path = tmp_path / "compared.html"
    for run in (copy, other):
        assert run_rpft("report", str(run), "--samples").code == 0
    assert run_rpft("compare", str(copy), str(other), "--html", str(path)).code == 0
    text = path.read_text(encoding="utf-8")
    assert_whole_and_alone(text)
    seen = visible(text)
    for said in (
        f"Gradient norm of each layer, {copy.name}".replace("&", "&amp;"),
        "Gradient norm of each layer, other",
        "Step 4 of a copy",
        "training rows 24, ",
        "forward stages",
        "after, other",
    ):
        assert said in seen, said
    sample = report_run(other).samples[0]
    assert text.count(escape(sample.asked.strip())) == 1, "asked once, answered by both"


def test_runs_of_one_name_are_told_apart_by_their_folders(runs, tmp_path):
    copies = [shutil.copytree(runs[0], tmp_path / name / "out") for name in ("x", "y")]
    compared = read_runs(copies, 8)
    assert list(compared.runs) == ["x/out", "y/out"]
    assert compared.differing == {}
    assert "nothing but output_dir" in run_rpft("compare", *map(str, copies)).out


def test_what_cannot_be_compared_is_said(runs, copy):
    shutil.rmtree(copy / "adapter")
    about = json.loads((copy / "about.json").read_text())
    about["machine"]["cores"] += 1
    (copy / "about.json").write_text(json.dumps(about))
    text = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(text.replace('"eval_tokens": ', '"eval_tokens": 1'))
    cautions = read_runs([runs[1], copy], 8).cautions
    assert [any(word in said for said in cautions) for word in ("evaluations", "machines", "not finished")] == [
        True
    ] * 3


def test_another_number_of_workers_is_not_another_machine(runs, copy):
    about = json.loads((copy / "about.json").read_text())
    for part in ("workers", "worker_memory_bytes"):
        about["machine"][part] = about["machine"][part][:1]
    (copy / "about.json").write_text(json.dumps(about))
    assert read_runs([runs[1], copy], 8).cautions == ["the runs had 2, 1 workers: their speeds are not of as many"]


@pytest.mark.parametrize(("picked", "said"), [([0], "give 2 to 8"), ([0, 1, 0], "is there twice")])
def test_one_run_and_the_same_run_twice_are_no_comparison(picked, said, runs):
    ran = run_rpft("compare", *(str(runs[i]) for i in picked))
    assert (ran.code, said in ran.err) == (2, True)


_MEASURE = """
const texts = [...document.querySelectorAll('.chart svg text')].filter(t => t.getBoundingClientRect().width);
const scale = t => t.ownerSVGElement.getBoundingClientRect().width / 640;
const out = texts.filter(t => { const b = t.getBoundingClientRect(), s = t.ownerSVGElement.getBoundingClientRect();
  return b.right > s.right + 1 || b.left < s.left - 1; });
const line = document.querySelector('.chart .line');
document.title = JSON.stringify({page: document.documentElement.scrollWidth, window: innerWidth,
  smallest: Math.min(...texts.map(t => parseFloat(getComputedStyle(t).fontSize) * scale(t))),
  out: out.map(t => t.textContent), charts: document.querySelectorAll('.chart svg').length,
  stroke: getComputedStyle(line).stroke, background: getComputedStyle(document.body).backgroundColor,
  columns: getComputedStyle(document.querySelector('.charts')).gridTemplateColumns.split(' ').length});
"""


@needs_browser
@pytest.mark.parametrize(("width", "dark", "columns"), [(1280, False, 2), (800, True, 1)])
def test_in_a_browser_the_charts_fit_and_are_read_at_any_width_light_and_dark(
    width, dark, columns, runs, tmp_path
):
    path = tmp_path / "compared.html"
    assert run_rpft("compare", *map(str, runs), "--html", str(path)).code == 0
    for text, charts in ((page_of(runs[0], tmp_path), 7), (path.read_text(encoding="utf-8"), 8 + len(runs))):
        with_script = text.replace("</body>", f"<script>{_MEASURE}</script></body>")
        found = in_browser(with_script, tmp_path, width, dark)
        assert found["page"] <= found["window"] + 1
        assert found["smallest"] >= 10
        assert (found["out"], found["charts"], found["columns"]) == ([], charts, columns)
        assert found["background"] == ("rgb(18, 21, 24)" if dark else "rgb(246, 247, 248)")
        assert found["stroke"] == ("rgb(98, 187, 242)" if dark else "rgb(0, 114, 178)")
