"""AdamW on flat host layers: torch's own numbers, fp32 masters behind bf16 weights, norms that stay exact."""

import pytest
import torch

from rpft.engine.accumulators import square_sum
from rpft.engine.controller import Ticket, Update, WeightVersion
from rpft.engine.failure import Failure
from rpft.engine.losses import Losses
from rpft.engine.streams import Delays, Event, happened
from rpft.model.host_store import HostStore
from rpft.model.layout import TensorSpec, build_layouts
from rpft.optim.adamw import AdamW
from rpft.optim.host_optimizer import HostOptimizer
from rpft.optim.one_pass import FusedPass
from rpft.optim.schedule import Schedule


def store_of(shapes, dtype=torch.float32, **settings):
    """One layer; tensors of two or more dimensions decay."""
    specs = [TensorSpec(f"t{i}", shape, dtype, True, len(shape) > 1, None) for i, shape in enumerate(shapes)]
    return HostStore(build_layouts([specs], {}), **settings)


def fill(store, seed):
    """Random weights, and the same as plain parameters."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name in store.names():
        value = torch.randn(store.tensor(name).shape, generator=generator)
        store.write(name, value)
        parameters[name] = torch.nn.Parameter(value.clone())
    return parameters


def close(ours, theirs):
    """Equal but for the last bits: torch's kernel rounds the last few elements of a buffer another way."""
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("divisor", [1.0, 4.0])
def test_updates_are_torchs_own_with_decay_on_matrices_only(divisor):
    store = store_of([(5, 7), (7,), (3, 2, 4), (1,)])
    parameters = fill(store, seed=1)
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-7, fused=True)
    ours = AdamW(betas=(0.8, 0.95), eps=1e-7, weight_decay=0.3)
    generator = torch.Generator().manual_seed(2)
    for step in range(5):
        for name, parameter in parameters.items():
            gradient = torch.randn(parameter.shape, generator=generator)
            store.trained_view(name, "gradient").copy_(gradient)
            parameter.grad = gradient / divisor
        plain.step()
        ours.update(FusedPass(), store.layers[0], [], 1e-2, step, divisor)
    for name, parameter in parameters.items():
        state = plain.state[parameter]
        close(store.tensor(name), parameter)
        close(store.trained_view(name, "exp_avg"), state["exp_avg"])
        close(store.trained_view(name, "exp_avg_sq"), state["exp_avg_sq"])


def test_a_hundred_small_updates_of_a_bf16_weight_add_up():
    """In bf16 itself 1.0 - 6e-4 is 1.0: without fp32 masters the weight would never move."""
    store = store_of([(4, 4)], torch.bfloat16)
    store.write("t0", torch.ones(4, 4))
    layer = store.layers[0]
    for step in range(100):
        store.trained_view("t0", "gradient").fill_(1.0)
        AdamW().update(FusedPass(), layer, [], 6e-4, step, 1.0)
    assert store.master("t0").mean() == pytest.approx(0.94, abs=1e-4)
    assert store.tensor("t0").float().mean() == pytest.approx(0.94, abs=4e-3)
    assert (torch.tensor(1.0).bfloat16() - torch.tensor(6e-4).bfloat16()) == 1.0


@pytest.fixture
def step_through():
    """step_through(store, gradients, ...) -> result of one update by a HostOptimizer."""
    optimizers = []

    def step(store, max_grad_norm=None, trained_tokens=1, rate=1e-3, target=0, readers=()):
        optimizer = HostOptimizer(
            store, AdamW(), Schedule("constant", rate, 9), max_grad_norm, Failure(), Delays(None)
        )
        optimizers.append(optimizer)
        count = len(store.layers)
        landed, after = [happened() for _ in range(count)], [Event() for _ in range(count)]
        squares = torch.stack([square_sum(layer.gradient) for layer in store.layers])
        ticket = Ticket(1, trained_tokens, landed, [Event() for _ in range(count)], Losses(), squares)
        before = WeightVersion.of(0, [happened() for _ in range(count)])
        replaced = WeightVersion(target, before.written, [list(readers) for _ in range(count)])
        optimizer.submit(Update(ticket, before, WeightVersion.of(target, after), replaced))
        result = optimizer.wait(1)
        assert all(event.wait(0.0) for event in [*ticket.read, *after])
        return result

    yield step
    for optimizer in optimizers:
        optimizer.close()
        assert optimizer.join(5.0)


class Reader(Event):
    """An upload that the optimizer waits for: it sees what lies in a copy just then."""

    def __init__(self, look):
        super().__init__()
        self._look, self.seen = look, None

    def synchronize(self, failure):
        self.seen = self._look()


@pytest.mark.parametrize("skipped", [False, True])
def test_new_weights_go_to_the_other_copy_after_every_reader_of_what_lies_there(skipped, step_through):
    store = store_of([(4, 4)], torch.bfloat16, two_copies=True)
    store.write("t0", torch.ones(4, 4))
    (layer,) = store.layers
    store.lagging_tensor("t0").fill_(5.0)
    store.trained_view("t0", "gradient").fill_(float("nan") if skipped else 1.0)
    reader = Reader(lambda: layer.copy(1).clone())
    result = step_through(store, rate=0.1, target=1, readers=[reader])
    assert result.skipped == skipped
    assert reader.seen is not None
    assert bool((reader.seen[:16] == 5.0).all())
    assert layer.latest == 1
    assert bool((store.lagging_tensor("t0") == 1.0).all())
    assert bool((store.tensor("t0") == 1.0).all()) == skipped
    assert float(store.master("t0").mean()) == pytest.approx(1.0 if skipped else 0.9, abs=1e-6)


def test_the_norm_of_a_large_layer_is_exact(step_through):
    """One float32 norm over 4 million elements is off by about 1e-4."""
    store = store_of([(2000, 2000)])
    gradient = torch.randn(2000, 2000, generator=torch.Generator().manual_seed(3))
    store.trained_view("t0", "gradient").copy_(gradient)
    result = step_through(store, trained_tokens=7)
    assert result.grad_norm == pytest.approx(float(gradient.double().norm()) / 7, rel=1e-6)


@pytest.mark.parametrize(("max_norm", "scale"), [(None, 1.0), (0.0, 1.0), (1e6, 1.0), (0.5, 0.5)])
def test_clipping_scales_the_mean_gradient_down_to_the_norm_and_never_up(max_norm, scale, step_through):
    store = store_of([(16, 16)])
    gradient = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    mean = gradient / 10
    mean /= mean.norm()  # a norm of 1
    store.trained_view("t0", "gradient").copy_(mean * 10)
    result = step_through(store, max_grad_norm=max_norm, trained_tokens=10)
    assert result.grad_norm == pytest.approx(1.0, rel=1e-6)
    torch.testing.assert_close(store.trained_view("t0", "exp_avg"), 0.1 * scale * mean, rtol=1e-5, atol=1e-9)


def test_a_zero_gradient_is_no_fault(step_through):
    store = store_of([(16, 16)])
    result = step_through(store, max_grad_norm=1.0)
    assert (result.grad_norm, result.skipped) == (0.0, False)
