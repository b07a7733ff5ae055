"""A loss that jumps sends a run back to before the steps where it did, if asked for, and it passes them over."""

import json
import random
import tempfile
from dataclasses import replace

import pytest
from support.recipes import Crash, watch

from rpft.optim.host_optimizer import HostOptimizer
from rpft.train.loop import Trainer
from rpft.train.spikes import SpikeGuard

KINDS = {
    "full": {},
    "delayed": {"optimizer": {"update": "delayed"}, "model": {"dtype": "bfloat16"}},
    "moments on disk": {"optimizer": {"offload": tempfile.gettempdir()}},
}
TRAIN = {"gradient_accumulation_steps": 1, "max_steps": 26, "warmup_ratio": 0, "learning_rate": 1e-3}
BAD = (21, 22)
WORDS = ("checkpoint.spike_deviations=50", "checkpoint.spike_steps=2", "checkpoint.every_steps=4")


@pytest.fixture(scope="module")
def runs(project):
    """runs(kind) -> the project, and a run that knew from the start which steps to pass over."""
    known = {}

    def of(kind):
        if kind not in known:
            made = project(f"spikes {kind}", "llama", eval_rows=0, sections={**KINDS[kind], "train": TRAIN})
            with pytest.MonkeyPatch.context() as patch:
                make = Trainer.__init__

                def knowing(trainer, *arguments):
                    make(trainer, *arguments)
                    trainer._state = replace(trainer._state, passed_over=list(BAD))

                patch.setattr(Trainer, "__init__", knowing)
                known[kind] = made, made.train_well("knew")
        return known[kind]

    return of


@pytest.fixture
def jumps(monkeypatch):
    """jumps(steps): the loss of these steps is a hundred times what it is."""

    def at(steps):
        apply = HostOptimizer._apply

        def jumping(optimizer, update):
            result = apply(optimizer, update)
            return replace(result, loss_sum=100 * result.loss_sum) if result.step in steps else result

        monkeypatch.setattr(HostOptimizer, "_apply", jumping)

    return at


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_back_passes_the_steps_over_and_ends_as_if_it_had_known(kind, runs, jumps, monkeypatch):
    made, knew = runs(kind)
    jumps(BAD)
    ran = made.train("jumped", *WORDS)
    assert ran.code == 0, ran.err
    outcome = made.outcome("jumped")
    assert outcome.numbers == knew.numbers
    assert outcome.result == knew.result
    assert [line["loss"] for line in outcome.steps if line["step"] in BAD] == [None, None]
    assert outcome.steps[-1]["skipped_steps"] == 2
    (rewound,) = [line for line in outcome.lines if "rewound_from" in line]
    assert rewound == {"step": 20, "rewound_from": 22, "passed_over": list(BAD)}
    assert "back to" in ran.out
    assert [
        json.loads(file.read_text())["step"] for file in sorted((outcome.folder / "loss_spike").iterdir())
    ] == [*BAD]
    state = json.loads((outcome.folder / "checkpoints" / "step-00000024" / "state.json").read_text())
    assert (state["passed_over"], state["rewinds"], state["updates_applied"]) == (list(BAD), 1, 22)
    resumed = made.train_well("jumped", *WORDS, "--resume")
    assert (resumed.numbers, resumed.result) == (knew.numbers, knew.result)


@pytest.mark.parametrize(("step", "time"), [(21, 1), (21, 2), (25, 1)])
def test_a_run_that_is_broken_before_or_after_it_went_back_goes_on_alike(step, time, runs, jumps, monkeypatch):
    made, knew = runs("full")
    jumps(BAD)

    def on_step(record):
        crashes.append(record.step)
        if crashes.count(step) == time:
            raise Crash

    crashes = []
    with monkeypatch.context() as patch:
        watch(patch, on_step)
        assert made.train(f"broken {step} {time}", *WORDS).code == 1
    resumed = made.train_well(f"broken {step} {time}", *WORDS, "--resume")
    assert (resumed.numbers, resumed.result) == (knew.numbers, knew.result)


def test_a_loss_that_keeps_jumping_ends_the_run(runs, jumps):
    made, _ = runs("full")
    jumps(range(21, 27))
    ran = made.train("keeps", *WORDS, "checkpoint.most_rewinds=1")
    assert ran.code == 6
    assert "the run has gone back 1 time(s) already (checkpoint.most_rewinds)" in ran.err
    assert "the last checkpoint from before them is" in ran.err
    assert "checkpoints/step-00000020" in ran.err
    assert not made.outcome("keeps").result


def test_without_a_checkpoint_from_before_it_is_said_and_the_run_goes_on(runs, jumps):
    made, _ = runs("full")
    jumps(BAD)
    ran = made.train("none before", *WORDS[:2], "checkpoint.every_steps=25")
    assert ran.code == 0, ran.err
    assert "there is no checkpoint from before them to go back to" in ran.out
    assert made.outcome("none before").steps[-1]["skipped_steps"] == 0


def test_a_guard_without_checkpoints_is_refused(runs):
    made, _ = runs("full")
    ran = made.train("refused", "checkpoint.spike_deviations=10")
    assert ran.code == 2
    assert "checkpoint.spike_deviations needs checkpoints to go back to" in ran.err


def noisy(count, seed=0):
    rng = random.Random(seed)
    return [2.0 + rng.gauss(0, 0.05) for _ in range(count)]


def seen(guard, losses):
    found = [guard.see(step, loss) for step, loss in enumerate(losses, start=1)]
    return [steps for steps in found if steps is not None]


def test_noise_a_falling_loss_one_bad_step_and_nothing_to_compare_with_are_no_spike():
    for losses in (
        noisy(500),
        [10 * 0.99**step for step in range(500)],
        [*noisy(50), 9.0, *noisy(50)],
        [1.0] * 50 + [1.001] * 50,
        [*noisy(10), 9.0, 9.0, 9.0],
        [*noisy(50), float("nan"), float("inf"), float("nan")],
    ):
        assert seen(SpikeGuard(10, 3), losses) == []


def test_a_spike_is_found_once_with_its_steps_and_then_becomes_what_is_usual():
    assert seen(SpikeGuard(10, 3), [*noisy(50), *[9.0] * 100])[0] == range(51, 54)
    assert seen(SpikeGuard(10, 3), [*noisy(50), *[9.0] * 100])[-1].stop < 100
    found = seen(SpikeGuard(10, 3), [*noisy(50), 3.0, 9.0, float("nan"), 9.0, *noisy(20)])
    assert found == [range(51, 55)]
    assert seen(SpikeGuard(None, 3), [*noisy(50), *[9.0] * 60]) == []


def test_a_guard_that_begins_with_the_losses_so_far_is_where_another_is():
    losses = [*noisy(50), 9.0, 9.0]
    guard = SpikeGuard(10, 3)
    guard.begin(enumerate(losses, start=1))
    assert guard.see(53, 9.0) == range(51, 54)
