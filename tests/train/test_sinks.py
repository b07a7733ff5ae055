"""Figures reach the services that a recipe names: a missing one stops a run early, one that fails does not."""

import json
import logging
import math
import sys
import threading
import types
import urllib.error
import urllib.request
from dataclasses import replace
from importlib.util import find_spec
from typing import ClassVar

import pytest
from support.recipes import make_project

from rpft import files
from rpft.recipe.load import load_recipe
from rpft.train.metrics import EvalRecord, StepRecord
from rpft.train.sinks import Sinks, figures_of, keep_id, known_id, open_sinks
from rpft.train.sinks.to_prometheus import ADDRESS, ToPrometheus, exposition


def record(step, loss=2.5):
    devices = [{"name": "cuda:0", "peak_bytes": 7}]
    return StepRecord(step, 0.5, loss, 1e-4, 1.5, 10, 20, 40.0, 0.5, 1, 1 << 30, devices, 0.25)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("sinks"), sections={"train": {"max_steps": 3}})


def recipe_of(made, output, *words):
    (made.folder / output).mkdir(exist_ok=True)
    return load_recipe(made.recipe, [f"output_dir={made.folder / output}", *words])


class Listed:
    """A sink that keeps what it is given, and fails where it is told to."""

    def __init__(self, name, fails_at=None):
        self.name, self.fails_at, self.calls = name, fails_at, []

    def begin(self, first_step):
        self.calls.append(("begin", first_step))

    def log(self, step, figures):
        if step == self.fails_at:
            raise ConnectionError("the server is gone")
        self.calls.append((step, figures))

    def close(self, failed):
        self.calls.append("close")


def test_the_figures_of_a_step_are_its_numbers_and_those_that_are_not_finite_are_left_out():
    figures = figures_of(record(3))
    assert figures["loss"] == 2.5
    assert figures["peak_bytes/cuda:0"] == 7.0
    assert figures["optimizer_seconds"] == 0.25
    assert "loss" not in figures_of(record(3, loss=math.nan))
    assert "router_aux_loss" not in figures
    assert figures_of(replace(record(3), router_aux_loss=2.5))["router_aux_loss"] == 2.5


def test_a_sink_that_fails_is_said_once_and_left_out_and_the_others_go_on(caplog):
    good, bad = Listed("good"), Listed("bad", fails_at=2)
    sinks = Sinks([bad, good])
    sinks.begin(1)
    for step in (1, 2, 3):
        sinks.stepped(record(step))
    sinks.evaluated(EvalRecord(3, 1.5, 10))
    sinks.close()
    assert [call if isinstance(call, str) else call[0] for call in good.calls] == ["begin", 1, 2, 3, 3, "close"]
    assert good.calls[-2] == (3, {"eval_loss": 1.5})
    assert [call[0] for call in bad.calls] == ["begin", 1]
    [said] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "bad failed: ConnectionError: the server is gone" in said
    assert "metrics.jsonl has them all" in said


def test_a_sink_that_hangs_holds_up_neither_the_run_nor_its_end(monkeypatch, caplog):
    monkeypatch.setattr("rpft.train.sinks._CLOSE_SECONDS", 0.05)
    monkeypatch.setattr("rpft.train.sinks._MOST_WAITING", 3)
    hanging, over = Listed("slow"), threading.Event()
    hanging.begin = lambda step: over.wait(30)
    sinks = Sinks([hanging])
    sinks.begin(1)
    for step in range(1, 20):
        sinks.stepped(record(step))
    sinks.close()
    sinks.close()  # waited for once
    over.set()
    said = [r.getMessage() for r in caplog.records]
    assert [text for text in said if "takes no figures" in text] == [
        "slow takes no figures; some are left out there"
    ]
    assert any("not waited for" in text for text in said)


@pytest.mark.parametrize(
    ("word", "package"),
    [
        ("logging.wandb.project=p", "wandb"),
        ("logging.mlflow.experiment=e", "mlflow"),
        ("logging.tensorboard=true", "tensorboard"),
    ],
)
def test_a_missing_package_is_said_before_anything_is_loaded(word, package, made, monkeypatch):
    def loading(*arguments):
        raise AssertionError("the run was prepared")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else find_spec(name))
    monkeypatch.setattr("rpft.train.prepare.prepare", loading)
    ran = made.train("missing", word)
    assert ran.code == 2
    assert f"pip install {package}" in ran.err
    assert word.rpartition(".")[0].removesuffix("logging") in ran.err
    assert not (made.folder / "missing").exists()


def test_without_a_service_no_thread_runs_and_nothing_is_imported(made):
    recipe = recipe_of(made, "none")
    before = threading.active_count()
    sinks = open_sinks(recipe)
    assert threading.active_count() == before
    sinks.stepped(record(1))
    sinks.close()
    assert not {"wandb", "mlflow"} & sys.modules.keys()


# -- Weights & Biases --------------------------------------------------------------------------------------


class FakeWandbRun:
    def __init__(self, identity):
        self.id, self.logged, self.metrics, self.finished = identity, [], [], False

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, figures):
        self.logged.append(figures)

    def finish(self, exit_code):
        self.finished, self.exit_code = True, exit_code


@pytest.fixture
def wandb(monkeypatch):
    """A module in the place of wandb; ``runs`` are those begun, ``asked`` what init was given."""
    fake = types.ModuleType("wandb")
    fake.__spec__ = find_spec("json")
    fake.runs, fake.asked, fake.refuses = [], [], None
    fake.Settings = lambda **settings: settings

    def init(**asked):
        if fake.refuses:
            raise RuntimeError(fake.refuses)
        fake.asked.append(asked)
        fake.runs.append(FakeWandbRun(asked["id"] or "abc123"))
        return fake.runs[-1]

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_weights_and_biases_gets_every_step_and_a_resumed_run_goes_on_in_the_same_one(made, wandb):
    words = ["logging.wandb.project=p", "checkpoint.every_steps=2"]
    made.train_well("wandb", *words)
    [run] = wandb.runs
    assert (run.finished, run.exit_code) == (True, 0)
    assert run.metrics == [("step", None), ("*", "step")]
    assert [f["step"] for f in run.logged if "loss" in f] == [1, 2, 3]
    assert [f["step"] for f in run.logged if "eval_loss" in f] == [0, 3]
    [asked] = wandb.asked
    assert (asked["project"], asked["name"], asked["mode"]) == ("p", "wandb", "online")
    assert asked["config"]["train.max_steps"] == 3
    ran = made.train("wandb", *words, "--resume")
    assert ran.code == 0, ran.err
    assert wandb.asked[1]["id"] == "abc123"
    assert [f["step"] for f in wandb.runs[1].logged if "loss" in f] == [3]


def test_ids_of_services_stay_known_when_the_disk_takes_no_new_one(made, monkeypatch):
    recipe = recipe_of(made, "ids")
    keep_id(recipe, "wandb", "abc")

    def full(file, data):
        file.write(bytes(data)[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        with pytest.raises(OSError, match="No space"):
            keep_id(recipe, "mlflow", "def")
    assert (known_id(recipe, "wandb"), known_id(recipe, "mlflow")) == ("abc", None)
    keep_id(recipe, "mlflow", "def")
    assert (known_id(recipe, "wandb"), known_id(recipe, "mlflow")) == ("abc", "def")


def test_a_login_that_is_missing_is_said_before_the_model_is_loaded(made, wandb):
    wandb.refuses = "api_key not configured"
    ran = made.train("no login", "logging.wandb.project=p")
    assert ran.code == 2
    assert "api_key not configured" in ran.err
    assert "logging.wandb.mode=offline" in ran.err
    assert "loading weights" not in ran.out


# -- MLflow ------------------------------------------------------------------------------------------------


class FakeMlflowClient:
    """Keeps runs by id, as a server does, over clients."""

    runs: ClassVar[dict] = {}

    def __init__(self, tracking_uri=None):
        self.uri = tracking_uri

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return f"id of {name}"

    def create_run(self, experiment, run_name):
        identity = f"run {len(self.runs)}"
        self.runs[identity] = {
            "name": run_name,
            "experiment": experiment,
            "params": {},
            "metrics": [],
            "status": "",
        }
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=identity))

    def update_run(self, run_id, status):
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100
        self.runs[run_id]["params"].update(params)
        self.runs[run_id]["metrics"] += metrics

    def set_terminated(self, run_id, status):
        self.runs[run_id]["status"] = status


@pytest.fixture
def mlflow(monkeypatch):
    fake, entities, tracking = (types.ModuleType(n) for n in ("mlflow", "mlflow.entities", "mlflow.tracking"))
    fake.__spec__ = find_spec("json")
    entities.Metric = lambda name, value, timestamp, step: (name, value, step)
    entities.Param = lambda key, value: (key, value)
    FakeMlflowClient.runs = {}
    tracking.MlflowClient = FakeMlflowClient
    for module in (fake, entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return FakeMlflowClient


def test_mlflow_gets_every_step_and_a_resumed_run_goes_on_in_the_same_one(made, mlflow):
    words = ["logging.mlflow.experiment=e", "checkpoint.every_steps=2"]
    made.train_well("mlflow", *words)
    [run] = mlflow.runs.values()
    assert (run["experiment"], run["name"], run["status"]) == ("id of e", "mlflow", "FINISHED")
    assert [step for name, _, step in run["metrics"] if name == "loss"] == [1, 2, 3]
    assert "peak_bytes/cpu_0" in {name for name, _, _ in run["metrics"]}
    assert run["params"]["train.max_steps"] == "3"
    ran = made.train("mlflow", *words, "--resume")
    assert ran.code == 0, ran.err
    [run] = mlflow.runs.values()
    assert [step for name, _, step in run["metrics"] if name == "loss"] == [1, 2, 3, 3]


def test_services_are_told_that_a_fault_ended_the_run(made, mlflow, wandb, monkeypatch):
    words = ["logging.mlflow.experiment=e", "logging.wandb.project=p"]
    with monkeypatch.context() as patch:
        patch.setattr("rpft.train.loop.Trainer.run", lambda trainer, checkpoint: 1 / 0)
        assert made.train("failed", *words).code == 1
    [run] = mlflow.runs.values()
    assert (run["status"], wandb.runs[0].exit_code) == ("FAILED", 1)


# -- TensorBoard -------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_reads_back_every_step(made):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome = made.train_well("board", "logging.tensorboard=true")
    events = EventAccumulator(str(outcome.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(outcome.losses, rel=1e-6)
    assert [event.step for event in events.Scalars("eval_loss")] == [0, 3]


# -- Prometheus --------------------------------------------------------------------------------------------


def get(port, path):
    with urllib.request.urlopen(f"http://{ADDRESS}:{port}{path}", timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_prometheus_reads_the_last_step_on_this_machine_only():
    sink = ToPrometheus(0)
    try:
        assert sink._server.server_address[0] == "127.0.0.1"
        sink.begin(1)
        for step in (1, 2):
            sink.log(step, figures_of(record(step)))
        sink.log(2, {"eval_loss": 1.25})
        kind, text = get(sink.port, "/metrics")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(sink.port, "/")
    finally:
        sink.close(failed=False)
    assert kind.startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values["rpft_step"] == "2"
    assert float(values["rpft_loss"]) == 2.5
    assert float(values["rpft_eval_loss"]) == 1.25
    assert float(values['rpft_peak_bytes{worker="cuda:0"}']) == 7.0
    assert text.count("# TYPE rpft_loss gauge\n") == 1


def test_the_text_names_each_metric_once_however_many_workers_there_are():
    text = exposition({"peak_bytes/cuda:0": 1.0, "peak_bytes/cuda:1": 2.0})
    assert text.splitlines() == [
        "# TYPE rpft_peak_bytes gauge",
        'rpft_peak_bytes{worker="cuda:0"} 1.0',
        'rpft_peak_bytes{worker="cuda:1"} 2.0',
    ]


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(made):
    sink = ToPrometheus(0)
    try:
        ran = made.train("taken", f"logging.prometheus_port={sink.port}")
    finally:
        sink.close(failed=False)
    assert ran.code == 2
    assert f"logging.prometheus_port {sink.port} of 127.0.0.1 cannot be used" in ran.err
    assert json.dumps("loss") not in ran.out
