"""`rpft doctor`: everything is looked at, each finding says what it costs, and faults have an exit code."""

import json
from types import SimpleNamespace

import pytest
from support.recipes import run_rpft

from rpft.host import processor
from rpft.train import doctor


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No GPU, and nothing is measured that takes long."""
    monkeypatch.setattr(doctor, "cuda_available", lambda: False)
    monkeypatch.setattr(doctor, "measure_host_memory", lambda: 50e9)
    monkeypatch.setattr(doctor, "measured_rate", lambda one_pass: 2e9)
    monkeypatch.setattr(doctor, "_TRIED_BYTES", 1 << 24)
    monkeypatch.setattr(doctor, "_NVIDIA", doctor.Path("/nowhere"))


def findings(folder):
    ran = run_rpft("doctor", "--folder", str(folder), "--json")
    content = json.loads(ran.out)
    assert content["sound"] == (ran.code == 0)
    return ran.code, {finding["what"]: finding for finding in content["findings"]}


def test_everything_is_looked_at_and_the_disk_is_left_as_it_was(tmp_path):
    code, found = findings(tmp_path / "not" / "there" / "yet")
    assert code == 0
    assert list(found) == [
        "machine",
        "versions",
        "optional packages",
        "GPU",
        "compiled layers",
        "RAM",
        "memory bandwidth",
        "optimizer",
        "disk",
    ]
    assert processor() in found["machine"]["found"]
    assert found["machine"]["figures"]["cores"] > 0
    assert found["optimizer"]["figures"]["updates"] == 2e9
    assert "an update of an 8B takes 4 s" in found["optimizer"]["cost"]
    assert found["disk"]["figures"]["write"] > 0
    assert found["versions"]["figures"]["torch"]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_or_leave_to_write_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.files, "free_bytes", lambda path: 1 << 20)
    code, found = findings(tmp_path)
    assert (code, found["disk"]["grade"]) == (2, "fault")
    monkeypatch.setattr(doctor.files, "free_bytes", lambda path: 1 << 40)

    def fail(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor, "_written_rate", fail)
    code, found = findings(tmp_path)
    assert (code, "Permission denied" in found["disk"]["found"]) == (2, True)


def test_a_driver_that_torch_cannot_use_is_a_fault_and_a_machine_without_gpu_is_not(tmp_path, monkeypatch):
    assert findings(tmp_path)[1]["GPU"]["grade"] == "note"
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 580.1\nGCC version: 13\n")
    monkeypatch.setattr(doctor, "_NVIDIA", driver)
    code, found = findings(tmp_path)
    assert (code, found["GPU"]["grade"]) == (2, "fault")
    assert "NVRM version: 580.1" in found["GPU"]["cost"]


def test_a_missing_compiler_costs_speed_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "prepare", doctor.FusedPass)
    monkeypatch.setattr("shutil.which", lambda name, **more: None)
    code, found = findings(tmp_path)
    assert code == 0
    assert (found["optimizer"]["grade"], found["compiled layers"]["grade"]) == ("note", "note")
    assert "2 bytes a parameter more RAM" in found["optimizer"]["cost"]
    assert "no C++ compiler is found" in found["compiled layers"]["found"]


def test_optional_packages_that_are_missing_are_named_with_what_cannot_be_had_without(tmp_path, monkeypatch):
    missing = {"wandb", "deepspeed"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else object())
    [found] = [finding for finding in doctor.examine(tmp_path) if finding.what == "optional packages"]
    assert (found.grade, found.found) == ("note", "2 not installed")
    assert found.figures["missing"] == {"logging.wandb": "wandb", "rpft bench --peers deepspeed": "deepspeed"}
    for said in ("logging.wandb (pip install wandb)", "rpft bench --peers deepspeed (pip install deepspeed)"):
        assert said in found.cost
    missing.clear()
    assert doctor._optional_packages().grade == "good"


def test_page_locking_is_said_with_the_limit_of_this_process(monkeypatch):
    class Host:
        def __init__(self, locked):
            self.allocate_host = lambda num_bytes: SimpleNamespace(is_pinned=lambda: locked)

    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (64 << 10, 64 << 10))
    refused = doctor._page_locking(Host(False))
    assert (refused.grade, refused.found) == ("note", "refused; ulimit -l: 64 KiB")
    assert refused.figures == {"allowed": False, "limit_bytes": 65536}
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (doctor.resource.RLIM_INFINITY,) * 2)
    assert doctor._page_locking(Host(True)).found == "allowed; ulimit -l: unlimited"


def test_people_get_a_line_a_finding_and_what_it_costs(tmp_path):
    ran = run_rpft("doctor", "--folder", str(tmp_path))
    assert ran.code == 0
    assert "RAM: " in ran.out
    assert "the CPU pool trains" in ran.out
