"""The optimizer takes layers in the order in which something waits for them."""

from queue import SimpleQueue

import pytest
from support.engines import HANG_SECONDS, plan_of, run_engine

PLAN = plan_of([(0, 1), (2, 3)], [(4, 5), (2, 3), (0, 1)], 4, "layer")


@pytest.fixture
def order_of(checkpoint):
    def order_of(family, **settings):
        """Of the layers in the updates of two steps; the same in both."""
        order = []

        def listen(engine, optimizer):
            optimizer._before_update = lambda step, layer: order.append(layer)

        run_engine(checkpoint(family), PLAN, 2, steps=2, before_run=listen, **settings)
        first, second = order[: len(order) // 2], order[len(order) // 2 :]
        assert first == second
        return first

    return order_of


def test_exact_updates_follow_the_next_forward(order_of):
    assert order_of("llama") == [0, 1, 2, 3, 4, 5]


def test_late_updates_follow_the_next_backward(order_of):
    assert order_of("llama", update_lag=1) == [5, 4, 3, 2, 1, 0]


def test_late_updates_of_tied_weights_come_before_the_gradient_that_they_share_is_let_go_of(order_of):
    assert order_of("llama_tied", update_lag=1) == [0, 5, 4, 3, 2, 1]


def test_a_late_update_holds_up_no_gradient_of_layers_that_it_is_done_with(checkpoint):
    """It stands still before its last stage until the next step's gradients of all others have landed."""
    second_step = SimpleQueue()

    def stand_still(engine, optimizer):
        submit = engine.submit_step

        def remember(step, batches):
            ticket = submit(step, batches)
            if step == 2:
                second_step.put(ticket)
            return ticket

        def wait(step, layer):
            if step == 1 and layer == 0:
                for landed in second_step.get(timeout=HANG_SECONDS).landed[2:]:
                    landed.synchronize(optimizer._failure)

        engine.submit_step, optimizer._before_update = remember, wait

    run_engine(checkpoint("llama"), PLAN, 2, steps=3, update_lag=1, before_run=stand_still)
