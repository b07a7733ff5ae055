"""`rpft bench --peers`: what is asked of peers, and how what they did is told, in words, JSON and a picture."""

import json
import math
import re
import xml.etree.ElementTree as xml
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.pools import NoProcesses
from support.recipes import run_rpft

from rpft.console.bench_chart import bench_chart
from rpft.peers import PEERS
from rpft.recipe.load import load_recipe
from rpft.train import bench_workers
from rpft.train.bench import Measured
from rpft.train.bench_peers import PeerFailed, PeerMeasured, largest_difference
from rpft.train.bench_report import as_json, failures, loss_table, peer_table
from rpft.train.bench_workers import Comparison, Failed

OWN = Measured(
    workers=1,
    windows=[90.0, 100.0, 110.0],
    steady=[110.0, 120.0, 130.0],
    step_seconds=0.5,
    predicted_tokens_per_second=125.0,
    bubble=0.1,
    predicted_bubble=0.08,
    idle={},
    hidden=0.9,
    limited_by="compute",
    vram_peak_bytes=2 << 30,
    vram_bill_bytes=3 << 30,
    allocation_retries=0,
    ram_bytes=4 << 30,
    ram_bill_bytes=5 << 30,
    skipped_steps=0,
    on_cuda=True,
    roof_tokens_per_second=150.0,
    losses=[3.0, 2.0, 1.5],
)
PLAIN = PeerMeasured("plain", 1, [50.0], [60.0], [3.0, 2.25, 1.625], 6 << 30, 7 << 30, 1 << 30)
ROOF = PeerMeasured("roof", 1, [150.0], [160.0], [3.0, 3.0, 3.0], 1 << 30, 1 << 30, 1 << 30)
MISSING = "roundpipe is not installed: pip install roundpipe==0.1.1 beartype"
RESULTS = [OWN, replace(OWN, workers=2, steady=[200.0], losses=[3.0, 2.0, 1.25])]
PEER_RESULTS = [
    ROOF,
    PLAIN,
    PeerFailed("roundpipe", 1, MISSING),
    replace(PLAIN, workers=2, steady=[100.0]),
    PeerFailed("roundpipe", 2, MISSING),
    PeerFailed("fsdp2", 2, "OutOfMemoryError: of 24 GiB"),
]


@pytest.fixture(scope="module")
def made(project):
    return project("bench", "qwen3", eval_rows=0)


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the run and of peers, which is not done."""
    told = []

    class Here(NoProcesses):
        def submit(self, work, recipe, workers, num_steps, folder=None, num_losses=0):
            told.append(("rpft", workers, num_losses))
            found = next((r for r in RESULTS if r.workers == workers), Failed(workers, "no room"))
            return SimpleNamespace(result=lambda: found)

    def do_work(peer, folder, workers):
        told.append((peer, workers, folder.is_dir()))
        found = [p for p in PEER_RESULTS if (p.peer, p.workers) == (peer, workers)]
        return found[0] if found else PeerFailed(peer, workers, "not tried")

    monkeypatch.setattr(bench_workers, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(bench_workers, "do_work", do_work)
    return told


def cells(rows, name, column):
    return [row[rows[0].index(column)] for row in rows if row[0] == name]


def test_all_are_asked_on_each_number_of_workers_and_the_roof_once(made, asked, tmp_path):
    file, chart = tmp_path / "bench.json", tmp_path / "bench.svg"
    words = ("--workers", "1,2", "--peers", "roof,plain,roundpipe,fsdp2", "--losses", "3")
    ran = run_rpft("bench", str(made.recipe), *words, "--json", str(file), "--chart", str(chart))
    assert ran.code == 0, ran.err
    assert [one[:2] for one in asked] == [
        ("rpft", 1), ("roof", 1), ("plain", 1), ("roundpipe", 1), ("fsdp2", 1),
        ("rpft", 2), ("plain", 2), ("roundpipe", 2), ("fsdp2", 2),
    ]  # fmt: skip
    assert asked[0][2] == 3
    assert all(folder_there for name, _, folder_there in asked if name != "rpft")
    for said in ("of roof", "apart", "2.00000", f"roundpipe 0.1.1 on 1, 2 worker(s): {MISSING}"):
        assert said in ran.out
    told = json.loads(file.read_text())
    rows = {(peer["peer"], peer["workers"]): peer for peer in told["peers"]}
    assert rows["plain", 1]["largest_loss_difference"] == 0.25
    assert rows["plain", 1]["at_step"] == 2
    assert rows["plain", 1]["tokens_per_second"] == 50.0
    assert rows["fsdp2", 2]["failed"] == "OutOfMemoryError: of 24 GiB"
    assert "largest_loss_difference" not in rows["roof", 1]
    assert told["results"][0]["losses"] == OWN.losses
    assert told["results"][0]["share_of_roof"] == pytest.approx(0.8)
    assert "plain" in chart.read_text()


def test_all_names_every_peer(made, asked):
    assert run_rpft("bench", str(made.recipe), "--workers", "1", "--peers", "all").code == 0
    assert [name for name, *_ in asked] == ["rpft", *PEERS]


def test_work_that_no_peer_can_do_is_said_of_each_and_not_begun(made, asked):
    recipe = load_recipe(made.recipe, ["engine.emulate_link_gbps=12"])
    _, peers = bench_workers.bench(
        recipe,
        [1],
        2,
        lambda recipe: None,
        lambda line: None,
        Comparison(["plain", "fsdp2"], made.folder / "no", 3),
    )
    assert asked == [("rpft", 1, 0)]
    why = "engine.emulate_link_gbps slows down the transfers of rpft only"
    assert peers == [PeerFailed("plain", 1, why), PeerFailed("fsdp2", 1, why)]
    assert not (made.folder / "no").exists()


def test_shares_are_of_the_run_and_of_the_roof_times_the_workers():
    rows = peer_table(RESULTS, PEER_RESULTS)
    assert cells(rows, "rpft", "of rpft") == ["100%", "100%"]
    assert cells(rows, "rpft", "of roof") == ["75%", "62%"]
    assert cells(rows, "plain", "of rpft") == ["50%", "50%"]
    assert cells(rows, "plain", "of roof") == ["38%", "31%"]
    assert cells(rows, "plain", "loss\napart") == ["2.5e-01\nstep 2", "3.8e-01\nstep 3"]
    assert cells(rows, "roof", "loss\napart") == ["-"]
    assert cells(rows, "rpft", "VRAM") == ["2.0 GiB", "2.0 GiB"]


def test_without_a_run_to_compare_with_peers_are_told_all_the_same():
    rows = peer_table([Failed(1, "no room")], PEER_RESULTS[1:3])
    assert [row[0] for row in rows] == ["", "plain"]
    assert cells(rows, "plain", "of rpft") == cells(rows, "plain", "of roof") == ["-"]


def test_losses_stand_side_by_side_step_by_step_and_the_roof_has_none():
    heading, *rows = loss_table(RESULTS, PEER_RESULTS)
    assert heading == ["step", "rpft, 1", "plain, 1", "rpft, 2", "plain, 2"]
    assert rows[1] == ["2", "2.00000", "2.25000", "2.00000", "2.25000"]
    assert len(rows) == 3
    assert loss_table([replace(OWN, losses=[])], [ROOF]) == []


def test_what_fails_alike_is_one_line():
    assert failures(PEER_RESULTS) == [
        f"roundpipe 0.1.1 on 1, 2 worker(s): {MISSING}",
        "FSDP2, CPU offload on 2 worker(s): OutOfMemoryError: of 24 GiB",
    ]


def test_the_largest_difference_says_its_step():
    assert largest_difference([1.0, 2.0, 3.5], [1.0, 2.25, 3.5]) == (0.25, 2)
    assert largest_difference([], [1.0]) is None
    assert largest_difference([1.0, math.nan], [1.0, 2.0]) == (math.inf, 2)


def test_a_loss_that_is_no_number_leaves_the_json_json():
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = as_json({}, [OWN], [replace(PLAIN, losses=[3.0, math.nan])])
    assert json.loads(text, parse_constant=refuse)["peers"][0]["losses"] == [3.0, None]


def test_the_picture_is_one_file_with_all_names_and_reasons():
    text = bench_chart("a <model>", RESULTS, PEER_RESULTS)
    root = xml.fromstring(text)
    said = " ".join(root.itertext())
    for name in ("a <model>", "rpft 200", "plain 100", "roof, own layers 150", "rpft, 2", MISSING):
        assert name in said
    assert not re.search(r"href|src=|url\(|@import|<script", text)
    assert len(root.findall(".//{*}polyline")) == 4 + 4  # speeds of four, losses of two on 1 and 2 workers


def test_the_picture_of_one_number_of_workers_has_one_tick():
    text = bench_chart("one", [replace(OWN, losses=[])], [])
    ticks = [e.text for e in xml.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert "1" in ticks
    assert not any(re.fullmatch(r"[01]\.\d+", tick or "") for tick in ticks)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("RECIPE", "--peers", "plain,dspeed"), "there is no 'dspeed'; there are roof, plain, fsdp2"),
        (("RECIPE", "--losses", "3"), "--losses can be had with --peers only"),
        (("RECIPE", "--peer-logs", "logs"), "--peer-logs can be had with --peers only"),
        (("RECIPE", "--chart", "no/such/folder.svg"), "there is no folder no/such"),
        (("--simulate", "8x4090", "--peers", "all"), "--peers cannot be had with --simulate"),
    ],
)
def test_what_contradicts_itself_is_refused(words, said, made):
    ran = run_rpft("bench", *(str(made.recipe) if word == "RECIPE" else word for word in words))
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.slow
def test_a_run_and_its_peers_in_processes_of_their_own_have_the_same_losses(made, tmp_path):
    logs = tmp_path / "logs"
    words = ("--workers", "1,2", "--steps", "2", "--peers", "all", "--losses", "3", "--peer-logs", str(logs))
    ran = run_rpft("bench", str(made.recipe), *words, "--json")
    assert ran.code == 0, ran.err
    peers = json.loads(ran.out)["peers"]
    done = {(p["peer"], p["workers"]): p for p in peers if "failed" not in p}
    assert {("roof", 1), ("plain", 1), ("plain", 2), ("fsdp2", 1), ("fsdp2", 2)} <= set(done)
    assert all(p["largest_loss_difference"] < 1e-4 for (name, _), p in done.items() if name != "roof")
    assert all(p["failed"] for p in peers if (p["peer"], p["workers"]) not in done)
    assert (logs / "2_workers" / "plain.log").exists()
