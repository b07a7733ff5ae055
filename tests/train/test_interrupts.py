"""SIGINT and SIGTERM end a run at a step boundary, saved; a second one ends it at once."""

import errno
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from support.engines import plan_of
from support.recipes import chats, run_rpft, watch

import rpft.train.loop
from rpft.console.plain import PlainReporter
from rpft.train.interrupts import Interrupts, StoppedAtOnce

SECTIONS = {"train": {"max_steps": 6, "eval_every": 2}}


@pytest.fixture(scope="module")
def runs(project):
    made = project("interrupts", "llama", sections=SECTIONS)
    return made, made.train_well("unbroken")


def send_at(step, signals, monkeypatch):
    """Sends ``signals`` while step ``step`` computes: the loop reports a step when the next one is under way."""

    def on_step(record):
        if record.step == step - 1:
            for number in signals:
                os.kill(os.getpid(), number)

    watch(monkeypatch, on_step)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def no_signal_goes_through():
    """A signal that no run has caught fails its test, instead of ending the process of all tests."""

    def missed(number, frame):
        raise AssertionError(f"{signal.Signals(number).name} came when no run caught it")

    before = {number: signal.signal(number, missed) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(number, runs, monkeypatch):
    made, unbroken = runs
    handlers = [signal.getsignal(n) for n in SIGNALS]
    output = f"stopped by {number.name}"
    with monkeypatch.context() as patch:
        send_at(4, [number], patch)
        ran = made.train(output, "engine.workers=2")
    assert ran.code == 128 + number
    stopped = made.outcome(output)
    assert [line["step"] for line in stopped.steps] == [1, 2, 3, 4]
    assert stopped.checkpoints == ["step-00000004"]
    assert not stopped.result
    assert "Traceback" not in ran.err
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    advice = ran.out.partition("To go on: rpft ")[2].strip()
    resumed = run_rpft(*shlex.split(advice))
    assert resumed.code == 0, resumed.err
    assert made.outcome(output).numbers == unbroken.numbers
    assert made.outcome(output).result == unbroken.result


@pytest.mark.parametrize("times", [2, 3])
def test_more_signals_end_at_once_and_leave_the_earlier_checkpoint_whole(runs, times, monkeypatch):
    made, unbroken = runs
    name = f"{times} times"
    with monkeypatch.context() as patch:
        # The save of step 3 is at work then, or over. It began when that of step 2 was whole.
        send_at(4, [signal.SIGINT] * times, patch)
        ran = made.train(name, "checkpoint.every_steps=1")
    assert ran.code == 130
    assert "Traceback" not in ran.err
    assert "checkpoints/step-0000000" in ran.out.partition("interrupted. ")[2]
    assert "step-00000002" in made.outcome(name).checkpoints
    assert "step-00000004" not in made.outcome(name).checkpoints
    resumed = made.train_well(name, "--resume")
    assert resumed.numbers == unbroken.numbers
    assert resumed.result == unbroken.result


def test_an_interrupt_of_a_delayed_run_changes_no_number(project, monkeypatch):
    """What is in flight is saved as it is: masters and moments of this step, and the weights of the one before."""
    made = project("interrupts delayed", "llama", sections={**SECTIONS, "optimizer": {"update": "delayed"}})
    unbroken = made.train_well("unbroken")
    for step in (2, 5):
        with monkeypatch.context() as patch:
            send_at(step, [signal.SIGTERM], patch)
            assert made.train(f"stopped {step}").code == 143
        resumed = made.train_well(f"stopped {step}", "--resume", "engine.workers=2")
        assert resumed.numbers == unbroken.numbers
        assert resumed.result == unbroken.result


def test_two_steps_ahead_too(project, monkeypatch):
    """Late updates, and workers that have few slots of a step: every step is saved, and the run interrupted."""
    sections = {**SECTIONS, "optimizer": {"update": "delayed"}, "checkpoint": {"every_steps": 1, "keep_last": 9}}
    made = project("two steps ahead", "llama", sections=sections)
    unbroken = made.train_well("unbroken", "engine.workers=1")
    plan = made.folder / "plan.json"
    plan.write_text(plan_of([(0, 4)], [(5, 5), (0, 4)], 4, "layer").to_json())
    many = [f"engine.plan={plan}", "engine.workers=4"]
    ahead = []
    submit = rpft.train.loop.Machinery.steps_ahead.fget
    patched = property(lambda machinery: ahead.append(submit(machinery)) or ahead[-1])
    monkeypatch.setattr(rpft.train.loop.Machinery, "steps_ahead", patched)
    whole = made.train_well("whole", *many)
    assert set(ahead) == {2}
    assert whole.numbers == unbroken.numbers
    assert whole.result == unbroken.result
    assert whole.checkpoints == unbroken.checkpoints
    with monkeypatch.context() as patch:
        send_at(2, [signal.SIGTERM], patch)
        assert made.train("stopped", *many).code == 143
    resumed = made.train_well("stopped", "--resume", *many)
    assert resumed.numbers == unbroken.numbers
    assert resumed.result == unbroken.result


def test_a_signal_that_is_ignored_or_of_a_program_around_python_is_left_alone(monkeypatch):
    """Python gives None for a handler that it did not install, and takes no None back."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ask = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda n: None if n == signal.SIGTERM else ask(n))
    term = ask(signal.SIGTERM)
    interrupts, before = Interrupts(lambda line: None), ask(signal.SIGINT)

    def left_alone():
        return (ask(signal.SIGTERM), ask(signal.SIGHUP)) == (term, signal.SIG_IGN)

    with interrupts.caught():
        assert left_alone()
        signal.raise_signal(signal.SIGINT)
        assert interrupts.asked == signal.SIGINT
        assert left_alone()
        with pytest.raises(StoppedAtOnce):
            signal.raise_signal(signal.SIGINT)
        assert left_alone()
    assert left_alone()
    assert ask(signal.SIGINT) is before


def test_a_closed_terminal_asks_once_however_often_it_says_so(runs, monkeypatch):
    made, _ = runs
    with monkeypatch.context() as patch:
        send_at(4, [signal.SIGHUP] * 3, patch)
        assert made.train("closed").code == 128 + signal.SIGHUP
    assert made.outcome("closed").checkpoints == ["step-00000004"]


def test_an_output_that_is_gone_ends_no_run(runs, monkeypatch):
    made, unbroken = runs
    said = []

    def gone(self, text):
        said.append(text)
        if len(said) > 20:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(PlainReporter, "say", gone)
    outcome = made.train_well("gone")
    assert len(said) == 21
    assert (outcome.numbers, outcome.result) == (unbroken.numbers, unbroken.result)


def test_a_signal_during_the_last_step_lets_the_run_end_well(runs, monkeypatch):
    made, unbroken = runs
    with monkeypatch.context() as patch:
        send_at(6, [signal.SIGINT], patch)
        outcome = made.train_well("last step")
    assert outcome.numbers == unbroken.numbers
    assert outcome.result == unbroken.result


def test_a_signal_while_the_result_is_written_lets_it_be_written(runs, monkeypatch):
    made, unbroken = runs

    def on_step(record):
        if record.step == 6:
            monkeypatch.setattr("rpft.train.loop.save_result", interrupted_save)

    save = rpft.train.loop.save_result

    def interrupted_save(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        save(*arguments)

    watch(monkeypatch, on_step)
    outcome = made.train_well("while saving")
    assert outcome.result == unbroken.result


def test_an_interrupt_in_mid_accumulation_counts_whole_steps_only(project, monkeypatch):
    """With many microbatches a step, the signal comes between two of them; what is saved is a step boundary."""
    made = project("long steps", "llama", rows=chats(48), sections={"train": {"gradient_accumulation_steps": 24}})
    unbroken = made.train_well("unbroken", "train.max_steps=3")
    with monkeypatch.context() as patch:
        send_at(2, [signal.SIGINT], patch)
        assert made.train("stopped", "train.max_steps=3", "engine.num_microbatches=4").code == 130
    assert made.outcome("stopped").checkpoints == ["step-00000002"]
    resumed = made.train_well("stopped", "train.max_steps=3", "--resume")
    assert resumed.numbers == unbroken.numbers
    assert resumed.result == unbroken.result


@pytest.mark.slow
@pytest.mark.parametrize("wait_seconds", [0.0, 0.02, 0.05])
def test_a_killed_process_goes_on_from_its_last_whole_checkpoint(wait_seconds, runs):
    made, _ = runs
    words = ("train.max_steps=40", "checkpoint.every_steps=1", "train.eval_every=null")
    unbroken = made.train_well(f"forty {wait_seconds}", *words)
    output = made.folder / f"killed {wait_seconds}"
    command = [sys.executable, "-m", "rpft", "train", str(made.recipe), f"output_dir={output}", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and not list(output.glob("checkpoints/step-00000005")):
            time.sleep(0.005)
        time.sleep(wait_seconds)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    resumed = made.train_well(output.name, *words, "--resume")
    assert resumed.numbers == unbroken.numbers
    assert resumed.result == unbroken.result
