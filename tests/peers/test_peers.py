"""Peers do a run's work with a run's numbers; what cannot be done is a line that says why."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.recipes import make_project

from rpft.peers import PEERS, Peer, fsdp2, resident, start
from rpft.peers.harness import Result, read_result, run, write_result
from rpft.peers.process import reason, run_python
from rpft.peers.start import run_peer
from rpft.peers.work import IGNORED, Rows, read_steps, read_work, share
from rpft.recipe.load import load_recipe
from rpft.train.bench import compared_losses
from rpft.train.bench_peers import PeerFailed, PeerMeasured, cannot_share, do_work, hand_over
from rpft.train.prepare import prepare
from rpft.train.weights import load_weights

COMPARED = (1, 2, 3)

RUNS = {
    "full": ("qwen3", {"train": {"max_steps": 6}}),
    "lora": (
        "llama",
        {
            "adapter": {"r": 4, "alpha": 8, "lr_ratio_b": 4.0},
            "data": {"packing": True},
            "train": {"max_steps": 6, "max_grad_norm": 0.05},
        },
    ),
    "bfloat16": ("llama", {"model": {"dtype": "bfloat16"}, "train": {"max_steps": 6, "learning_rate": 0.001}}),
    "capped": ("gemma2", {"train": {"max_steps": 6}}),
}


@pytest.fixture(scope="module")
def handed(tmp_path_factory):
    """handed(kind) -> (folder of the work, the run's own losses), made once."""
    made = {}

    def make(kind):
        if kind not in made:
            family, sections = RUNS[kind]
            recipe = make_project(
                tmp_path_factory.mktemp("project"), family, eval_rows=0, sections=sections
            ).recipe
            prepared = prepare(load_recipe(recipe, []))
            store = load_weights(prepared, recipe.parent, lambda done, total: None)
            folder = tmp_path_factory.mktemp("work")
            hand_over(prepared, store, folder, COMPARED, 2)
            made[kind] = folder, compared_losses(prepared, store, COMPARED)
        return made[kind]

    return make


def quick(folder):
    """The work in ``folder`` with few windows."""
    return replace(read_work(folder), windows=2, warm_up=0)


@pytest.fixture
def one_process(monkeypatch):
    """A group of one process, as torchrun would have it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "apart"), [("full", 1e-5), ("lora", 1e-5), ("capped", 1e-5), ("bfloat16", 0.02)])
def test_plain_pytorch_reaches_the_losses_of_the_run(kind, apart, handed):
    folder, own = handed(kind)
    found = run(resident.build, quick(folder), folder, limited=True)
    assert found.losses == pytest.approx(own, rel=apart)
    assert own[0] - own[-1] > 0.01  # it learns
    assert [len(window) for window in found.windows] == [3] * 2
    assert all(sum(window) <= total for window, total in zip(found.windows, found.drained, strict=True))
    assert found.ram_bytes > 0


def test_fsdp2_reaches_the_losses_of_the_run(handed, one_process):
    folder, own = handed("lora")
    found = run(fsdp2.build, quick(folder), folder, limited=True)
    assert found.losses == pytest.approx(own, rel=1e-5)


def test_the_roof_has_no_optimizer(handed):
    folder, own = handed("full")
    found = run(resident.build_roof, quick(folder), folder, limited=False)
    assert found.losses[0] == pytest.approx(own[0], rel=1e-5)
    assert found.losses[-1] > own[-1] + 0.01


def test_microbatches_are_summed_in_float32_and_weights_are_rounded_masters():
    model = torch.nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    masters = resident.Masters(model)
    total = torch.zeros(2, 3)
    for scale in (1.0, 1 / 512):
        loss = (model(torch.ones(1, 3, dtype=torch.bfloat16)) * scale).sum()
        loss.backward()
        total += scale
    masters.gather(None)
    (master,) = masters.all
    assert torch.equal(master.grad, total)  # in bfloat16 the second would be lost
    with torch.no_grad():
        master.fill_(1 + 1 / 512)
    masters.hand_back()
    assert torch.equal(model.weight, torch.ones(2, 3, dtype=torch.bfloat16))
    assert master.grad is None


@pytest.mark.parametrize(("microbatches", "rows"), [(4, 1), (3, 2), (3, 1), (1, 1)])
def test_what_processes_compute_is_together_the_step_and_as_much_for_each(microbatches, rows):
    step = [
        Rows(ids := torch.full((rows, 4), 10 * n) + torch.arange(rows)[:, None], ids.clone(), None)
        for n in range(microbatches)
    ]
    parts = [share(step, rank, 2) for rank in range(2)]
    assert len(parts[0]) == len(parts[1])

    def trained(some):
        return sorted(int(line[0]) for part in some for line in part.labels if line[0] != IGNORED)

    assert sorted([*trained(parts[0]), *trained(parts[1])]) == trained(step)


def test_work_comes_back_from_its_folder_as_it_was_written(handed):
    folder, _ = handed("lora")
    work, steps = read_work(folder), read_steps(folder)
    assert work.compared == COMPARED
    assert work.window == (2, 1, 2)
    assert work.lr_ratio_b == 4.0
    assert set(steps) == {1, 2, 3}
    assert len(steps[1]) == 4
    assert all(rows.position_ids is not None for rows in steps[1])


def test_a_result_comes_back_from_its_file(tmp_path):
    found = Result([2.5, 2.25], [[0.5, 0.25]], [0.75], 1 << 40, 1 << 41, 7)
    write_result(found, tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == found


def test_a_peer_that_cannot_run_says_why_and_starts_nothing(tmp_path, monkeypatch):
    def never(*arguments, **more):
        raise AssertionError("a process was started")

    monkeypatch.setattr(start, "run_python", never)
    monkeypatch.setitem(PEERS, "absent", Peer("absent", "Absent", "no", "no_such_package", "no-such-package==1"))
    log = tmp_path / "log"
    assert run_peer("absent", tmp_path, 1, log, True) == (
        "no_such_package is not installed: pip install no-such-package==1"
    )
    monkeypatch.setattr(Peer, "missing", lambda self: None)
    assert run_peer("torchao", tmp_path, 1, log, False) == "it needs a GPU"
    nothing = "there is nothing to do: the run itself could not be prepared"
    assert do_work("plain", tmp_path, 2) == PeerFailed("plain", 2, nothing)


def test_of_a_process_that_fails_the_last_error_is_the_reason(tmp_path):
    code, lines = run_python(["-c", "print('a'); raise ValueError('no room')"], tmp_path / "log", 60)
    assert (code, reason(lines)) == (1, "ValueError: no room")
    assert "no room" in (tmp_path / "log").read_text()


def test_what_a_process_has_started_ends_with_it(tmp_path):
    """Also what runs in a session of its own, as torchrun's processes do."""
    pid = tmp_path / "pid"
    inner = f"""
import os, time
with open({str(pid)!r} + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename({str(pid)!r} + ".new", {str(pid)!r})
time.sleep(1000)
"""
    outer = f"""
from pathlib import Path
from rpft.peers.process import run_python
run_python(["-c", {inner!r}], Path({str(tmp_path / "log")!r}), 1000)
"""
    process = subprocess.Popen([sys.executable, "-c", outer], cwd=Path(start.__file__).parents[2])
    while not pid.exists():
        assert process.poll() is None
        os.sched_yield()
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ([], None),
        (["model.quantize=nf4", "adapter.r=4"], "model.quantize is nf4"),
        (["engine.emulate_link_gbps=12"], "engine.emulate_link_gbps"),
    ],
)
def test_work_that_peers_would_do_otherwise_is_not_given_to_them(change, why, tmp_path):
    recipe = make_project(tmp_path, eval_rows=0).recipe
    found = cannot_share(load_recipe(recipe, change))
    assert found is None if why is None else why in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "fsdp2"])
def test_two_processes_reach_the_losses_of_one(name, handed):
    folder, own = handed("full")
    for workers in (1, 2):
        found = do_work(name, folder, workers)
        assert isinstance(found, PeerMeasured), found
        assert found.losses == pytest.approx(own, rel=1e-5)
        assert min(found.windows + found.steady) > 0
    assert os.path.getsize(folder / f"{name}.log") > 0
