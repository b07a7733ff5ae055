"""Tiny projects, each made once a session, and runs that settle quickly."""

import gc
from types import SimpleNamespace

import pytest
from support.fixtures import checkpoint, choices_seen_once
from support.recipes import make_project

from rpft.plan import profile_file
from rpft.train.model_parts import model_keys, model_parts

__all__ = ["checkpoint", "choices_seen_once"]


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """project(key, ...) -> a Project, made by the first call with that key; outputs of tests must not collide."""
    made = {}

    def make(key, *words, **settings):
        if key not in made:
            made[key] = make_project(tmp_path_factory.mktemp("project"), *words, **settings)
        return made[key]

    return make


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """An empty cache of profiles, for all tests of a module: no plan depends on what the machine has measured."""
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_file, "cache_folder", lambda: folder)
        yield folder


@pytest.fixture(autouse=True, scope="module")
def a_quiet_machine():
    """Whatever else works here: what is measured is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rpft.train.measuring.others_cores", lambda: 0.0)
        yield


@pytest.fixture(autouse=True, scope="module")
def quick_to_settle():
    """A full round of the garbage collector over all that a session has imported takes longer than a tiny run."""
    quick = SimpleNamespace(collect=lambda: gc.collect(0), freeze=gc.freeze, unfreeze=gc.unfreeze)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rpft.engine.engine.gc", quick)
        yield


@pytest.fixture(autouse=True, scope="module")
def a_disk_anywhere():
    """Moments may lie wherever tests write, though that be RAM; to measure that disk takes longer than a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rpft.train.room.lies_in_ram", lambda folder: False)
        patch.setattr("rpft.train.tries.lies_in_ram", lambda folder: False)
        patch.setattr("rpft.train.prepare.turnover_rate", lambda folder: 1e9)
        patch.setattr("rpft.train.prepare.write_rate", lambda folder, num_bytes: 1e9)
        yield


@pytest.fixture(autouse=True, scope="module")
def models_built_once():
    """Runs of a module that say the same of the same model share its skeleton and layouts, which no run changes.

    To build them is a good part of a tiny run. Runs of other modules, and all of tests/model, build them anew.
    """
    known = {}

    def built_once(recipe, config, checkpoint, expert_groups=1):
        files = [(path.name, path.stat().st_mtime_ns) for path in sorted(checkpoint.folder.iterdir())]
        told = [repr(part) for part in (*model_keys(recipe), recipe.data.packing, files, expert_groups)]
        key = (type(config), config.to_json_string(), *told)
        if key not in known:
            known[key] = model_parts(recipe, config, checkpoint, expert_groups)
        return dict(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rpft.train.job.model_parts", built_once)
        yield


@pytest.fixture
def fresh(tmp_path):
    """fresh(...) -> a Project of this test alone."""
    return lambda *words, **settings: make_project(tmp_path, *words, **settings)
