"""A protocol with one wait less is caught: the numbers differ, turn to NaN, or the run raises.

Orders 2 to 4 are those of rpft/engine/controller.py. Order 1 holds where order 3 does, as long as an update starts
with the norm of a whole step, so tests/optim/test_adamw.py shows it alone. Order 5 is no event: one thread makes
all updates.
"""

from dataclasses import replace

import pytest
import torch
from support.engines import plan_of, run_engine
from support.sabotage import Sabotage

from rpft.engine.failure import EngineError

THREE = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "stage")
ONE = plan_of([(0, 4)], [(5, 5), (0, 4)], 2, "stage")
KEEPING = replace(plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 2, "layer"), keep_bytes_per_token=300)
ONE_KEEPING = replace(ONE, recompute="layer", keep_bytes_per_token=300)
FOUR = replace(THREE, num_microbatches=4)
SETTINGS = {
    KEEPING: {"kernels": "trace"},
    ONE_KEEPING: {"kernels": "trace"},
    FOUR: {"gradient_dtype": torch.bfloat16, "dtype": torch.bfloat16},
}
"""Of runs by plan. A step is one round where gradients leave rounded."""

# what is broken: plan, update_lag, (stream that waits, what for, number of the wait, tasks until the harm)
BREACHES = {
    "order 2: an upload starts before the optimizer's write": (THREE, 0, ("weights up", "written")),
    "order 3: the optimizer reads a gradient before it landed": (THREE, 0, ("optimizer", "landed", 0, 3)),
    "order 4: a gradient lands before the optimizer read the last": (
        THREE,
        1,
        ("gradients down", "gradient used"),
    ),
    "compute starts before the weights are there": (THREE, 0, ("compute", "uploaded", 1, 2)),
    "compute starts before its input is there": (THREE, 0, ("compute", "arrived")),
    "compute starts before the last round's gradients are there": (THREE, 0, ("compute", "computed", 0, 3)),
    "compute sums into a gradient buffer that is going down": (THREE, 0, ("compute", "gradient buffer free", 4)),
    "weights go up into a buffer in use": (THREE, 0, ("weights up", "weight buffer free")),
    "gradients go up into a buffer in use": (THREE, 0, ("weights up", "gradient buffer free")),
    "gradients go up before those of the last round landed": (THREE, 0, ("weights up", "landed")),
    "an input goes up into a buffer in use": (THREE, 0, ("activations up", "input buffer free")),
    "an input goes up before it was delivered": (THREE, 0, ("activations up", "delivered")),
    "an output goes down before it was computed": (THREE, 0, ("activations down", "computed")),
    "an output goes down over one that is still to be read": (ONE, 0, ("activations down", "arrived", 2)),
    "gradients go down before they are computed": (THREE, 0, ("gradients down", "computed")),
    "an output's gradient goes up into a buffer in use": (
        FOUR,
        0,
        ("activations up", "output gradient buffer free"),
    ),
    "rounding writes over gradients that are going down": (FOUR, 0, ("compute", "rounded buffer free")),
    "what was kept goes up into a buffer in use": (KEEPING, 0, ("activations up", "kept buffer free")),
    "what was kept goes up before it was delivered": (KEEPING, 0, ("activations up", "kept delivered")),
    "what was kept is used before it is there": (KEEPING, 0, ("compute", "kept arrived", 1, 3)),
    "what is kept goes down over what is still to be read": (
        ONE_KEEPING,
        0,
        ("activations down", "kept arrived", 3),
    ),
    "the step's loss is read before it is there": (THREE, 0, ("optimizer", "loss", 1)),
}

pytestmark = pytest.mark.usefixtures("functions_made_once")


@pytest.fixture(scope="module")
def run(checkpoint):
    """run(name of the breach, sabotage or None) -> outcome."""

    def run(name, sabotage):
        plan, update_lag, _ = BREACHES[name]
        settings = SETTINGS.get(plan, {})
        doubles = (
            {} if sabotage is None else {"make_device": sabotage.make_device, "before_run": sabotage.before_run}
        )
        return run_engine(
            checkpoint("llama"),
            plan,
            2,
            microbatches=4,
            steps=2 + update_lag,
            update_lag=update_lag,
            **settings,
            **doubles,
        )

    return run


@pytest.fixture(scope="module")
def expected(run):
    known = {}

    def of(name):
        key = BREACHES[name][:2]
        if key not in known:
            known[key] = run(name, None)
        return known[key]

    return of


@pytest.mark.parametrize("name", BREACHES)
def test_a_wait_left_out_is_caught(name, run, expected):
    whole = expected(name)  # first, so that no graph is made in a run that breaks
    sabotage = Sabotage(*BREACHES[name][2])
    try:
        differences = run(name, sabotage).differences(whole)
    except EngineError:
        differences = ["raised"]
    assert sabotage.chosen is not None
    assert sabotage.harmed.is_set() or differences == ["raised"]
    assert differences != []


@pytest.mark.parametrize("name", BREACHES)
def test_the_same_delay_with_the_wait_in_place_changes_nothing(name, run, expected):
    whole = expected(name)
    sabotage = Sabotage(*BREACHES[name][2], leave_out=False)
    assert run(name, sabotage).differences(whole) == []
    assert sabotage.chosen is not None


def test_memory_that_a_slot_left_behind_reads_as_nan(run, expected):
    name = "weights go up into a buffer in use"
    outcome = run(name, Sabotage(*BREACHES[name][2]))
    assert any(result.skipped for result in outcome.results)
    assert not any(result.skipped for result in expected(name).results)
