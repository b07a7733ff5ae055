"""RAM for copies of a save is what a plan leaves free, never more; what that leaves to wait for is said before."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.recipes import run_rpft

from rpft.plan.disk_rate import write_rate
from rpft.recipe.load import load_recipe
from rpft.train.hold_up import about_saves
from rpft.train.planned import COPIES, Planned
from rpft.train.planning import plan_job
from rpft.train.prepare import prepare
from rpft.train.tries import smaller

EVERY = "checkpoint.every_steps=10"


@pytest.fixture(scope="module")
def made(project):
    return project("hold up", "llama")


def planned_with(made, *words):
    return prepare(load_recipe(made.recipe, [EVERY, *words]))


def with_ram(planned, ram_bytes, write_rate=None):
    """``planned`` on a machine with that much RAM, whose disk has that rate."""
    return replace(planned, target=replace(planned.target, ram_bytes=ram_bytes, write_rate=write_rate))


@pytest.mark.parametrize("words", [[], ["optimizer.update=delayed"], ["optimizer.state=8bit"], ["adapter.r=4"]])
def test_with_ram_to_spare_copies_hold_all_that_a_checkpoint_does(words, made):
    planned = planned_with(made, *words)
    assert planned.copies_bytes == planned.most_copies_bytes == planned.host_parts[COPIES]
    assert 0 < planned.copies_bytes <= planned.checkpoint_bytes <= planned.copies_bytes + 140_000
    assert planned.memory["host_bytes"] == planned.bill.host + planned.copies_bytes
    assert about_saves(planned) is None


def test_without_saves_on_the_way_and_with_moments_in_a_file_there_are_none(made):
    for words in (["checkpoint.every_steps=null"], [f"optimizer.offload={made.folder}"]):
        planned = planned_with(made, *words)
        assert planned.copies_bytes == 0
        assert COPIES not in planned.host_parts
        assert planned.memory["host_bytes"] == planned.bill.host


def test_they_are_taken_from_what_the_plan_leaves_free_and_a_twentieth_stays(made):
    planned = planned_with(made)
    need, most = planned.bill.host, planned.most_copies_bytes
    seen = set()
    for spare in (-(1 << 20), 0, most // 3, most - 1, most, 2 * most):
        little = with_ram(planned, int((need + spare) / 0.95) + 1)
        assert little.copies_bytes == pytest.approx(min(max(0, spare), most), abs=3)
        assert little.fits
        seen.add(little.copies_bytes)
    assert len(seen) == 4
    assert with_ram(planned, need - 1).copies_bytes == 0
    assert with_ram(planned, need - 1).short_of == ["host_bytes"]


@pytest.mark.parametrize("short_by", [0, 1])
def test_no_plan_and_no_refusal_depends_on_them(short_by, made):
    saving, not_saving = planned_with(made), planned_with(made, "checkpoint.every_steps=null")
    target = replace(saving.target, ram_bytes=saving.bill.host - short_by)
    plans = [plan_job(planned, target, None) for planned in (saving, not_saving)]
    assert plans[0].plan == plans[1].plan
    assert plans[0].bill == plans[1].bill
    assert plans[0].needs["host_bytes"] == plans[1].needs["host_bytes"]
    assert plans[0].fits == plans[1].fits


def test_what_would_need_less_is_compared_without_them(made):
    """A setting that frees RAM for copies still frees it."""
    planned = planned_with(made)
    short = plan_job(planned, replace(planned.target, ram_bytes=planned.bill.host // 2), None)
    assert "host_bytes" in short.short_of
    for tried in smaller(short):
        assert tried.planned.needs["host_bytes"] == tried.planned.bill.host < short.bill.host


def test_what_a_save_is_expected_to_hold_up_is_said(made, monkeypatch):
    planned = planned_with(made)
    most = planned.most_copies_bytes
    half = with_ram(planned, int((planned.bill.host + most / 2) / 0.95) + 1, write_rate=most / 40)
    monkeypatch.setattr(Planned, "prediction", lambda self: None)
    said = about_saves(half)
    assert said is not None
    assert "RAM has" in said
    assert "holds up training for at most about 20 s" in said
    assert "of the time between" not in said  # nobody knows how long a step takes
    # Written by the time that the next update comes: an eighth. A half has room.
    monkeypatch.setattr(Planned, "prediction", lambda self: SimpleNamespace(step_seconds=5.0))
    said = about_saves(half)
    assert said is not None
    assert "for about 15 s, 30.0% of the time between saves" in said
    assert "the next waits" not in said
    often = replace(half, recipe=half.recipe.with_values("checkpoint", every_steps=4))
    assert "it takes 40 s to write, and the next waits for it" in str(about_saves(often))
    assert "for about 15 s, 75.0% of the time" in str(about_saves(often))
    by_time = replace(half, recipe=half.recipe.with_values("checkpoint", every_steps=None, every_minutes=30.0))
    assert "for about 15 s, 0.8% of the time" in str(about_saves(by_time))
    monkeypatch.setattr(Planned, "prediction", lambda self: SimpleNamespace(step_seconds=21.0))
    assert about_saves(half) is None
    assert "until the disk has written the rest" in str(about_saves(with_ram(half, half.target.ram_bytes)))


def test_the_disk_is_measured_only_where_copies_do_not_hold_all(made, monkeypatch):
    asked = []
    monkeypatch.setattr("rpft.train.prepare.write_rate", lambda folder, num_bytes: asked.append(num_bytes) or 1e3)
    planned_with(made)
    assert asked == []
    planned = planned_with(made, f"optimizer.offload={made.folder}")
    assert asked == [planned.checkpoint_bytes]
    ran = run_rpft("train", made.recipe, EVERY, f"optimizer.offload={made.folder}", "--dry-run")
    assert ran.code == 0, ran.err
    assert (
        "RAM has none for copies of it; none are made of moments that lie in a file: at 1e-06 GB/s each" in ran.out
    )


def test_of_a_machine_that_is_only_described_the_plan_says_what_waits_for_the_disk(made, tmp_path):
    machine = tmp_path / "machine.yaml"
    machine.write_text(
        "gpus: [{name: g, count: 1, memory_gib: 16, tflops: 100, link_gbps: 20}]\n"
        "host: {ram_gib: 64, memory_gbps: 50, cores: 8}\n"
    )
    words = ["plan", made.recipe, EVERY, "--machine", machine]
    ran = run_rpft(*words)
    assert ran.code == 0, ran.err
    assert COPIES in ran.out
    assert "for copies of it" not in ran.out
    ran = run_rpft(*words, "optimizer.offload=/not/here")
    assert COPIES not in ran.out
    assert "each save holds up training until the disk has written the rest" in ran.out


def test_writing_is_measured_and_leaves_nothing(tmp_path):
    rate = write_rate(tmp_path / "not yet there", 1 << 20)
    assert rate is not None
    assert rate > 0
    assert list(tmp_path.iterdir()) == []
    assert write_rate(tmp_path / "not yet there", 1 << 20) == rate


def test_a_folder_that_cannot_be_written_has_no_rate(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError

    monkeypatch.setattr("rpft.plan.disk_rate.tempfile.TemporaryFile", refused)
    assert write_rate(tmp_path / "refused", 1 << 20) is None
