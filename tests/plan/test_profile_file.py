"""Profiles: the file, the cache, rates and other lengths from it; and what a prediction says of a step."""

import json
import math
from dataclasses import replace

import pytest
import torch
from support.engines import plan_of

from rpft.errors import UserError
from rpft.plan import profile_file
from rpft.plan.costs import LayerLoad
from rpft.plan.predict import even_seconds, predict
from rpft.plan.profile import LayerProfile, measure_host_memory, measure_links_together
from rpft.plan.profile_file import (
    Beside,
    KindProfile,
    OtherLength,
    Profile,
    find_cached,
    keep_cached,
    read_profile,
)
from rpft.plan.rates import AT_ONCE, Rates
from rpft.plan.simulate import step_seconds
from rpft.plan.step_shape import StepShape

BLOCK = LayerProfile(2.0, 6.0, 10, 20, 30, 40, ((0, 1.0), (5, 0.5)))
EMBEDDING, HEAD = LayerProfile(1.0, 1.0, 1, 1), LayerProfile(1.0, 4.0, 0, 9)


def half(profile):
    return replace(profile, forward_seconds=profile.forward_seconds * 0.6, backward_seconds=1.0)


PROFILE = Profile(
    conditions={"sequence": 64, "machine": {"workers": ["A", "A"]}},
    kinds=(
        KindProfile("embedding", (0,), 100, 200, 50, EMBEDDING),
        KindProfile("block", (1, 3), 1000, 2000, 500, BLOCK),
        KindProfile("block", (2,), 1000, 2000, 500, HEAD),
        KindProfile("head", (4,), 100, 200, 50, HEAD),
    ),
    links=((10e9, 8e9), (12e9, 9e9)),
    links_together=(),
    updates=1e9,
    beside=Beside(updates=0.8e9, copied=30e9, copied_alone=40e9),
    lengths=(OtherLength(32, tuple(map(half, (EMBEDDING, BLOCK, HEAD, HEAD)))),),
    checks={3: BLOCK},
)


def test_a_profile_comes_back_from_its_file(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(PROFILE.to_json())
    assert read_profile(path) == PROFILE
    assert read_profile(path).layers == [EMBEDDING, BLOCK, HEAD, BLOCK, HEAD]


GOOD = json.loads(PROFILE.to_json())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such profile file"),
        ("{", "not a profile file"),
        ("[]", "not a profile file"),
        (json.dumps({**GOOD, "version": 0}), "version 0 is not 3"),
        (json.dumps({**GOOD, "links": []}), "not a profile file"),
        (json.dumps({**GOOD, "kinds": GOOD["kinds"][1:]}), "not a profile file.*layers"),
        (json.dumps({**GOOD, "colour": "red"}), "not a profile file.*colour"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "checks"}), "not a profile file.*checks"),
    ],
)
def test_a_faulty_profile_file_is_named(content, says, tmp_path):
    path = tmp_path / "p.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=says) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_times_of_other_lengths_lie_between_those_measured_and_go_with_the_length_below():
    assert PROFILE.at(64) == PROFILE.layers
    block = PROFILE.at(48)[1]
    assert block.forward_seconds == pytest.approx(2.0 * 0.8)
    assert block.backward_seconds == pytest.approx(3.5)
    assert block.backward_bytes == BLOCK.backward_bytes
    assert PROFILE.at(16)[3].backward_seconds == pytest.approx(0.5)


def test_links_that_hold_one_another_up_share_a_switch_and_others_do_not():
    alone = PROFILE.rates()
    assert (alone.up, alone.down, alone.update) == (10e9, 8e9, 1e9)
    assert (alone.workers_per_switch, alone.switch_share) == (1, 0.0)
    free = replace(PROFILE, links_together=((9.9e9, 8e9), (10e9, 8e9)))
    assert free.rates() == alone
    shared = replace(PROFILE, links_together=((5e9, 8e9), (5e9, 8e9))).rates()
    assert (shared.workers_per_switch, shared.switch_share) == (2, pytest.approx(1.0))


def test_copies_that_never_pause_leave_an_update_the_rate_that_was_measured_beside_them():
    beside = Beside(updates=0.6e9, copied=80e9, copied_alone=100e9)
    rates = replace(PROFILE, updates=1e9, beside=beside).rates()
    seconds = 3e9 / rates.update / (1 - beside.copied / rates.memory)  # of which copies take memory all the time
    assert 3e9 / rates.update + beside.copied * seconds / rates.memory == pytest.approx(seconds)
    assert 3e9 / seconds == pytest.approx(beside.updates)
    assert rates.copies_beside * beside.copied_alone == pytest.approx(beside.copied)
    nothing_shared = replace(PROFILE, updates=1e9, beside=Beside(1.1e9, 100e9, 99e9)).rates()
    assert (nothing_shared.memory, nothing_shared.copies_beside) == (math.inf, 1.0)


def test_the_cache_gives_what_was_kept_and_only_for_the_same_conditions(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_file, "cache_folder", lambda: tmp_path / "cache")
    assert find_cached(PROFILE.conditions) == (None, None)
    assert keep_cached(PROFILE) is None
    assert find_cached(PROFILE.conditions) == (PROFILE, None)
    assert find_cached({**PROFILE.conditions, "sequence": 63}) == (None, None)


def test_a_bad_old_or_foreign_file_in_the_cache_is_not_used_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_file, "cache_folder", lambda: tmp_path)
    path = profile_file.cached_path(PROFILE.conditions)
    foreign = json.dumps({**GOOD, "conditions": {"sequence": 8}})
    for content, says in (
        ("{", "not a profile"),
        (json.dumps({**GOOD, "version": 0}), "version 0"),
        (foreign, "else"),
    ):
        path.write_text(content)
        found, fault = find_cached(PROFILE.conditions)
        assert found is None
        assert fault is not None
        assert says in fault
        assert str(path) in fault


def test_a_cache_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(profile_file, "cache_folder", lambda: tmp_path / "file" / "cache")
    assert "could not be kept" in (keep_cached(PROFILE) or "")


def test_all_links_at_once_and_memory_are_rates():
    cpu = torch.device("cpu")
    allocate = lambda size: torch.zeros(size, dtype=torch.uint8)  # noqa: E731
    rates = measure_links_together([cpu, cpu, cpu], allocate, 1 << 16)
    assert len(rates) == 3
    assert all(up > 0 and down > 0 for up, down in rates)
    assert measure_host_memory(1 << 16) > 0


# ---- predictions

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 4, "stage")


def shape(workers=2, **load):
    one = LayerLoad(1.0, 3.0, weight_bytes=1, gradient_bytes=1, num_trained=1, **load)
    return StepShape([one] * 6, 1, 1, workers, 2, delayed=False, slot_seconds=0.0)


FAST = Rates(1e6, 1e6, 1e6)


@pytest.mark.parametrize(
    ("rates", "limit"),
    [(FAST, "compute"), (replace(FAST, up=0.005), "link"), (replace(FAST, update=0.001), "optimizer")],
)
def test_what_is_slow_is_what_limits(rates, limit):
    found = predict(PLAN, shape(), rates, tokens=100)
    assert found.limited_by == limit
    assert found.step_seconds == pytest.approx(step_seconds(PLAN, shape(), rates))
    assert found.tokens_per_second == pytest.approx(100 / found.step_seconds)
    assert all(0 <= seconds <= found.step_seconds for seconds in found.saved_seconds.values())


def test_one_worker_has_neither_fill_nor_drain():
    assert predict(PLAN, shape(1), AT_ONCE, 1).saved_seconds["fill-drain"] == pytest.approx(0, abs=1e-6)
    assert even_seconds(PLAN, shape(1)) == pytest.approx(2 * 4 * (4 * 1.0 + 6 * 3.0))


def test_more_workers_than_work_are_limited_by_fill_and_drain():
    assert predict(PLAN, shape(99), FAST, 1).saved_seconds["fill-drain"] > even_seconds(PLAN, shape(99))
