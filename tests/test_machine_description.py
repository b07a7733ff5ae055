"""The description of the machine at hand: the same in every report that has one."""

import json
import platform

import torch

import rpft
from rpft.machine import counted, device_names, machine_of, places, versions
from rpft.train.bench_report import as_json

CPU = torch.device("cpu")


def test_a_bench_describes_the_machine_as_profiles_and_runs_do():
    told = json.loads(as_json({}, []))
    assert told["machine"] == machine_of(places())
    assert told["versions"] == versions()


def test_workers_are_counted_and_those_of_the_cpu_pool_have_a_name_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert places() == [CPU]
    assert device_names(places(3)) == ["CPU"] * 3
    assert counted(["A", "B", "A"]) == ["2 x A", "1 x B"]
    assert machine_of([CPU])["cuda"] is None


def test_where_there_are_gpus_each_is_a_place(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: f"card {place.index}")
    assert device_names(places()) == ["card 0", "card 1"]
    assert device_names(places(1)) == ["card 0"]
    assert machine_of(places())["workers"] == ["card 0", "card 1"]


def test_versions_are_those_that_run():
    assert versions()["rpft"] == rpft.__version__
    assert versions()["torch"] == str(torch.__version__)
    assert versions()["python"] == platform.python_version()
