"""A device whose memory runs out in mid-run costs time and no number: the step is done again, planned smaller."""

import json
import tempfile
import threading
import time
import weakref

import pytest
import torch
from support.engines import plan_of
from support.recipes import chats, unbroken_runs, watch

from rpft import files
from rpft.engine.compute import SlotRun
from rpft.engine.cpu import CpuDevice
from rpft.engine.failure import POLL_SECONDS, Cancelled, Failure
from rpft.optim.host_optimizer import HostOptimizer
from rpft.train.machinery import Machinery
from rpft.train.planned import Planned
from rpft.train.planning import plan_job
from rpft.train.saver import Saver

KINDS = {
    "full": ("llama", {}),
    "LoRA": ("llama", {"adapter": {"r": 4, "dropout": 0.2}}),
    "delayed": ("llama", {"optimizer": {"update": "delayed"}, "model": {"dtype": "bfloat16"}}),
    "LoRA delayed": ("llama", {"optimizer": {"update": "delayed"}, "adapter": {"r": 4, "dropout": 0.2}}),
    "moments on disk": ("llama", {"optimizer": {"offload": tempfile.gettempdir()}}),
}
HANG_SECONDS = 60


@pytest.fixture(scope="module")
def runs(project):
    """runs(kind) -> the project, and its unbroken run of 5 steps with evaluations after 2 and 4."""
    return unbroken_runs(project, "memory", KINDS, {"max_steps": 5, "eval_every": 2})


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Cap:
    """A limit to the memory of every CPU stand-in: its buffers, and the activations of a segment as billed."""

    def __init__(self, monkeypatch):
        self.limit = float("inf")
        self.peak = 0
        self._buffers = {}
        allocate, reclaim, recompute = CpuDevice.allocate, CpuDevice.reclaim, SlotRun.recompute

        def capped_allocate(device, num_bytes):
            self._take(self._buffers.get(device.name, 0) + num_bytes)
            self._buffers[device.name] = self._buffers.get(device.name, 0) + num_bytes
            return allocate(device, num_bytes)

        def counted_reclaim(device):
            self._buffers.pop(device.name, None)
            self.peak = 0  # what comes is taken by another plan
            reclaim(device)

        def capped_recompute(run, task, segment, hidden, chain):
            shape = run.cap_shape
            states = 10 * shape.hidden_size + 4 * shape.intermediate_size
            activations = len(segment.layers) * task.batch.input_ids.numel() * shape.itemsize * states
            self._take(max(self._buffers.values()) + activations)
            return recompute(run, task, segment, hidden, chain)

        def shaped_plan_job(job, *arguments):
            SlotRun.cap_shape = job.shape
            return plan_job(job, *arguments)

        monkeypatch.setattr(CpuDevice, "allocate", capped_allocate)
        monkeypatch.setattr(CpuDevice, "reclaim", counted_reclaim)
        monkeypatch.setattr(SlotRun, "recompute", capped_recompute)
        monkeypatch.setattr(SlotRun, "cap_shape", None, raising=False)
        monkeypatch.setattr("rpft.train.prepare.plan_job", shaped_plan_job)

    def _take(self, num_bytes):
        if num_bytes > self.limit:
            raise out_of_memory()
        self.peak = max(self.peak, num_bytes)

    def tighten(self, share):
        """From now on there is only that ``share`` of what the plan at work took since the last call."""
        self.limit, self.peak = share * self.peak, 0


def check_same(outcome, unbroken):
    assert outcome.numbers == unbroken.numbers
    assert outcome.result == unbroken.result


CASES = [
    *(("full", 1), ("delayed", 3), ("LoRA", 3), ("LoRA delayed", 1)),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [("full", 3), ("delayed", 1), ("LoRA", 1), ("LoRA delayed", 3)]
    ),
]


@pytest.mark.parametrize(("kind", "workers"), CASES)
def test_under_a_shrinking_cap_plans_get_smaller_and_the_run_is_the_unbroken_one(kind, workers, runs, monkeypatch):
    made, unbroken = runs(kind)
    output = f"cap {workers}"
    with monkeypatch.context() as patch:
        cap = Cap(patch)
        watch(patch, lambda record: cap.tighten(0.8) if record.step in (1, 3) else None)
        words = (f"engine.workers={workers}", "checkpoint.every_steps=1", f"engine.plan={large_plan(made)}")
        ran = made.train(output, *words)
    assert ran.code == 0, ran.err
    outcome = made.outcome(output)
    check_same(outcome, unbroken)
    assert len(outcome.smaller_plans) >= 2
    assert ran.out.count("is undone and done again with a smaller plan") == len(outcome.smaller_plans)
    assert {line["step"] for line in outcome.smaller_plans} <= {0, 1, 2, 3, 4}
    last = outcome.smaller_plans[-1]["plan"]
    assert (last["recompute"], last["micro_batch_size"]) == ("layer", 1)
    assert json.loads((outcome.folder / "plan.json").read_text())["backward"] == last["backward"]


def large_plan(made):
    """A plan file with large stages."""
    path = made.folder / "large.json"
    path.write_text(plan_of([(0, 3)], [(4, 5), (0, 3)], 4, "stage").to_json())
    return path


class Moment:
    """Lets a worker run out of memory, once, while the update of step 3 stands in front of layer 4."""

    def __init__(self, monkeypatch):
        self.reached, self.failed = threading.Event(), threading.Event()
        write_layer, forward, fail = HostOptimizer._write_layer, SlotRun.forward, Failure.set

        def standing(optimizer, update, index, *arguments):
            if (update.ticket.step, index) == (3, 4) and not self.failed.is_set():
                self.reached.set()
                assert self.failed.wait(HANG_SECONDS)
            write_layer(optimizer, update, index, *arguments)

        def failing(*arguments):
            if self.reached.is_set() and not self.failed.is_set():
                raise out_of_memory()
            forward(*arguments)

        def seen(failure, error):
            fail(failure, error)
            self.failed.set()

        monkeypatch.setattr(HostOptimizer, "_write_layer", standing)
        monkeypatch.setattr(SlotRun, "forward", failing)
        monkeypatch.setattr(Failure, "set", seen)


@pytest.mark.parametrize("kind", ["full", "LoRA delayed", "moments on disk"])
def test_an_update_that_has_begun_is_finished_and_only_the_step_behind_it_is_undone(kind, runs, monkeypatch):
    made, unbroken = runs(kind)
    with monkeypatch.context() as patch:
        Moment(patch)
        outcome = made.train_well("begun", f"engine.plan={large_plan(made)}")
    assert [line["step"] for line in outcome.smaller_plans] == [3]
    check_same(outcome, unbroken)


def held_by_a_save(made, output, monkeypatch):
    """A run in which memory runs out in step 4 while update 3 waits, half done, for the save of step 2."""
    came = threading.Event()
    before_update, write = Saver.before_update, files.write

    def watched(saver, step, layer):
        if (step, layer) == (3, 4):
            came.set()
        before_update(saver, step, layer)

    def held(file, data):
        if file.name.endswith("step-00000002.partial/layer-00004.safetensors") and not came.is_set():
            assert came.wait(HANG_SECONDS)
            time.sleep(2 * POLL_SECONDS)  # the optimizer's thread looks meanwhile whether it is to end
        write(file, data)

    with monkeypatch.context() as patch:
        Moment(patch)
        patch.setattr(Saver, "before_update", watched)
        patch.setattr(files, "write", held)
        patch.setattr(Planned, "copies_bytes", 0)  # else it would not wait
        return made.train_well(output, "checkpoint.every_steps=2", f"engine.plan={large_plan(made)}")


@pytest.mark.parametrize("kind", ["full", "moments on disk"])
def test_an_update_that_waits_for_a_save_is_finished_too(kind, runs, monkeypatch):
    made, unbroken = runs(kind)
    outcome = held_by_a_save(made, "held", monkeypatch)
    assert len(outcome.smaller_plans) == 1
    check_same(outcome, unbroken)
    saved = outcome.folder / "checkpoints" / "step-00000002"
    check_same(made.train_well("held", "--resume", str(saved)), unbroken)


def test_layers_would_have_had_different_updates_if_it_were_not(runs, monkeypatch):
    made, unbroken = runs("full")
    monkeypatch.setattr(Failure, "cancel_if_lost", Failure.cancel_if_failed)
    assert held_by_a_save(made, "torn", monkeypatch).result != unbroken.result


def in_evaluation(number, monkeypatch):
    """The loss of an evaluation runs out of memory at its call of that number."""
    loss, calls = SlotRun.loss, iter(range(1, 1000))

    def failing(*arguments):
        if next(calls) == number:
            raise out_of_memory()
        loss(*arguments)

    monkeypatch.setattr(SlotRun, "loss", failing)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((2, "full"), (7, "delayed")),
        *(pytest.param(n, k, marks=pytest.mark.slow) for n in (12, 17) for k in ("full", "delayed")),
    ],
)
def test_in_any_evaluation_too(number, kind, runs, monkeypatch):
    """5 rows at the start, after steps 2 and 4, and at the end."""
    made, unbroken = runs(kind)
    with monkeypatch.context() as patch:
        in_evaluation(number, patch)
        outcome = made.train_well(f"evaluation {number}")
    assert len(outcome.smaller_plans) == 1
    check_same(outcome, unbroken)


def test_buffers_that_do_not_fit_at_the_start_are_made_smaller_before_the_first_step(runs, monkeypatch):
    made, unbroken = runs("full")
    with monkeypatch.context() as patch:
        cap = Cap(patch)
        made.train_well("measured", f"engine.plan={large_plan(made)}", "train.max_steps=1")
        cap.tighten(0.5)
        before = threading.active_count()
        outcome = made.train_well("start", f"engine.plan={large_plan(made)}", "engine.workers=2")
    assert threading.active_count() == before
    assert {line["step"] for line in outcome.smaller_plans} == {0}
    check_same(outcome, unbroken)


# Enough steps for one that begins after memory has shrunk for the second time: the next but one after a report.
FOUR_ROWS = {"train": {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6, "eval_every": 2}}


def test_when_no_plan_is_smaller_microbatches_are_and_the_sum_is_the_same_but_for_rounding(project, monkeypatch):
    made = project("four rows", "llama", rows=chats(48), sections=FOUR_ROWS)
    smallest = made.folder / "smallest.json"
    stages = [(layer, layer) for layer in range(5)]
    smallest.write_text(plan_of(stages, [(5, 5), *reversed(stages)], 2, "layer").to_json())
    unbroken = made.train_well("unbroken")
    with monkeypatch.context() as patch:
        cap = Cap(patch)
        shares = {1: 0.95, 3: 0.85}
        watch(patch, lambda record: cap.tighten(shares[record.step]) if record.step in shares else None)
        ran = made.train("cap", f"engine.plan={smallest}", "engine.workers=2", "checkpoint.every_steps=1")
    assert ran.code == 0, ran.err
    outcome = made.outcome("cap")
    plans = [line["plan"] for line in outcome.smaller_plans]
    assert [(plan["micro_batch_size"], plan["num_microbatches"]) for plan in plans] == [(2, 4), (1, 8)]
    assert "microbatches of 2 rows, not 4" in ran.out
    assert outcome.losses == pytest.approx(unbroken.losses, rel=1e-5)
    assert outcome.evaluations == pytest.approx(unbroken.evaluations, rel=1e-5)
    exact = ("step", "epoch", "learning_rate", "tokens", "trained_tokens", "skipped_steps")
    assert [[line[key] for key in exact] for line in outcome.steps] == [
        [line[key] for key in exact] for line in unbroken.steps
    ]
    again = made.train_well("cap", "checkpoint.every_steps=1", "--resume")
    assert (again.numbers, again.result) == (outcome.numbers, outcome.result)


def test_when_nothing_is_smaller_the_run_ends_with_where_memory_ran_out_and_goes_on_later(runs, monkeypatch):
    made, unbroken = runs("full")
    with monkeypatch.context() as patch:
        cap = Cap(patch)
        watch(patch, lambda record: cap.tighten(0.01) if record.step == 3 else None)
        ran = made.train("nothing", "checkpoint.every_steps=1")
    assert ran.code == 3
    assert "OutOfMemoryError: CUDA out of memory" in ran.err
    assert "microbatch" in ran.err
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("cpu:", "optimizer", "watchdog"))]
    check_same(made.train_well("nothing", "--resume"), unbroken)


def test_an_error_of_another_kind_at_the_same_time_ends_the_run():
    failure = Failure()
    failure.set(out_of_memory())
    assert not failure.lost
    failure.cancel_if_lost()
    failure.set(ValueError("something else"))
    assert failure.lost
    with pytest.raises(Cancelled):
        failure.cancel_if_lost()
    with pytest.raises(torch.OutOfMemoryError):
        failure.raise_if_failed()


def test_what_failed_is_gone_before_the_next_engine_takes_its_memory(runs, monkeypatch):
    made, unbroken = runs("full")
    buffers, left, calls = [], [], 0
    allocate, backward, let_go = CpuDevice.allocate, SlotRun.backward, Machinery._let_go

    def noted_allocate(device, num_bytes):
        buffer = allocate(device, num_bytes)
        buffers.append(weakref.ref(buffer))
        return buffer

    def backward_without_memory_once(run, *given):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise out_of_memory()
        backward(run, *given)

    def noted_let_go(machinery, error=None):
        let_go(machinery, error)
        left.append(sum(buffer() is not None for buffer in buffers))

    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice, "allocate", noted_allocate)
        patch.setattr(SlotRun, "backward", backward_without_memory_once)
        patch.setattr(Machinery, "_let_go", noted_let_go)
        outcome = made.train_well("gone", f"engine.plan={large_plan(made)}")
    assert left == [0], "of the engine that failed, buffers are held"
    check_same(outcome, unbroken)
