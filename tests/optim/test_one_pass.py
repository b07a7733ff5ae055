"""One pass of AdamW over host memory: torch's numbers, exact rounding, any threads, nobody kept waiting."""

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from rpft.model.moments import Moments
from rpft.model.split_float import join, split_into
from rpft.optim import kernels as kernels_module
from rpft.optim import one_pass, threads
from rpft.optim.kernels import SQUARES_ROW, Part, Weights
from rpft.optim.one_pass import CompiledPass, FusedPass, Numbers, prepare

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    """The types of one update."""

    gradients: tuple[torch.dtype, ...]
    working: torch.dtype
    master: torch.dtype | None
    """As of ``Weights``."""
    two_copies: bool = False


ONE_USE = Case((BF16,), BF16, FP32)
TWO_USES = Case((FP32, FP32), FP32, None)
SPLIT = Case((BF16,), BF16, torch.int16)
CASES = [ONE_USE, TWO_USES, SPLIT, Case((BF16, BF16), BF16, torch.int16), Case((FP32,), BF16, torch.int16)]
CASES += [Case((FP32,), FP16, FP32), Case((FP32,), FP32, None), Case((BF16,), FP32, None)]
CASES += [case._replace(two_copies=True) for case in (ONE_USE, TWO_USES, SPLIT)]
SETTINGS = {"learning_rate": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "updates_before": 0}
LENGTHS = [1, 15, 16, 17, 4 * SQUARES_ROW + 37]
SPECIAL = [float("inf"), float("-inf"), float("nan"), -0.0, 1e-40, -1e-45, 3.4e38, 65519.0, 65520.0, 6e-8, 2.9e-8]
TIES = [1.00390625, 1.01171875, 1.00048828125, 1.00146484375]
"""Half-way between two neighbours, the even one below and above: bfloat16, float16."""

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def compiled_cases():
    return CompiledPass()


@pytest.fixture(params=[pytest.param("compiled", marks=needs_compiler), "fused"])
def kernels(request, monkeypatch):
    if request.param == "compiled":
        kernels = request.getfixturevalue("compiled_cases")
    else:
        monkeypatch.setattr(one_pass, "_FUSED_BLOCK", 2 * SQUARES_ROW)
        kernels = FusedPass()
    monkeypatch.setattr(kernels, "num_threads", None)
    return kernels


@pytest.fixture
def compiled(compiled_cases, monkeypatch):
    monkeypatch.setattr(compiled_cases, "num_threads", None)
    return compiled_cases


def random(length, dtype, seed):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(exp_avg, exp_avg_sq):
    """float32 moments."""
    return Moments("fp32", exp_avg, exp_avg_sq, torch.empty(0), torch.empty(0))


class State:
    """Weights and moments of a layer that has had no update; with two copies they take turns."""

    def __init__(self, case, length):
        self.case, values = case, random(length, FP32, 0)
        self.copies = [torch.zeros(length, dtype=case.working) for _ in range(1 + case.two_copies)]
        self.exp_avg, self.exp_avg_sq = torch.zeros(length), torch.zeros(length)
        self.master = None if case.master is None else torch.zeros(length, dtype=case.master)
        if case.master == torch.int16:
            split_into(self.working, self.master, values)
        else:
            self.working.copy_(values)
            if self.master is not None:
                self.master.copy_(values)

    @property
    def working(self):
        return self.copies[0]

    @property
    def values(self):
        if self.master is None:
            return self.working
        return join(self.working, self.master) if self.case.master == torch.int16 else self.master

    def update(self, kernels, gradients, **settings):
        before = self.copies[0]
        self.copies.append(self.copies.pop(0))
        kept = before.clone()
        weights = Weights(before, self.working, self.master)
        kernels.adamw_pass(gradients, weights, whole(self.exp_avg, self.exp_avg_sq), **SETTINGS | settings)
        assert not self.case.two_copies or torch.equal(before, kept)


def random_gradients(case, length, seed):
    return [random(length, dtype, 100 * seed + number) for number, dtype in enumerate(case.gradients, 1)]


def assert_torchs_numbers(kernels, case, length, weight_decay, divisor):
    state = State(case, length)
    parameter = torch.nn.Parameter(state.values.clone())
    reference = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    settings = {"weight_decay": weight_decay, "gradient_divisor": divisor}
    for step in range(5):
        gradients = random_gradients(case, length, step)
        kept = [gradient.clone() for gradient in gradients]
        state.update(kernels, gradients, updates_before=step, **settings)
        assert all(torch.equal(*pair) for pair in zip(gradients, kept, strict=True))
        parameter.grad = sum(gradient.float() for gradient in kept) / divisor
        reference.step()
    theirs = reference.state[parameter]
    torch.testing.assert_close(state.values, parameter.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state.exp_avg, theirs["exp_avg"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state.exp_avg_sq, theirs["exp_avg_sq"], rtol=1e-6, atol=1e-7)
    if case.master != torch.int16:
        assert torch.equal(state.working, state.values.to(case.working))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("weight_decay", "divisor"), [(0.1, 1.0), (0.0, 37.0)])
def test_the_update_is_torchs(kernels, case, length, weight_decay, divisor):
    assert_torchs_numbers(kernels, case, length, weight_decay, divisor)


@pytest.mark.parametrize("gradients", [(BF16,), (FP32, FP32)], ids=str)
def test_a_master_in_two_halves_takes_the_updates_of_a_whole_one_to_the_bit(kernels, gradients):
    length = 3 * SQUARES_ROW + 5
    undivided, split = (State(Case(gradients, BF16, dtype), length) for dtype in (FP32, torch.int16))
    for step in range(5):
        for state in (undivided, split):
            given = random_gradients(state.case, length, step)
            state.update(kernels, given, gradient_divisor=3.0, updates_before=step)
    assert torch.equal(undivided.master, split.values)
    assert torch.equal(undivided.exp_avg, split.exp_avg)
    assert torch.equal(undivided.exp_avg_sq, split.exp_avg_sq)
    assert (split.working.float() - undivided.master).abs().le(undivided.master.abs() * 2**-8).all()


def test_a_layer_without_elements_is_left_alone(kernels):
    empty = torch.zeros(0)
    weights = Weights(empty, empty, None)
    kernels.adamw_pass([empty, empty], weights, whole(empty, empty), **SETTINGS, gradient_divisor=1.0)
    assert kernels.square_sum([empty, empty]) == 0.0


def awkward_masters():
    return torch.cat([torch.tensor(SPECIAL + TIES), random(4133, FP32, 1), torch.tensor(SPECIAL + TIES)])


def bits(tensor):
    return tensor.view(torch.int16)


def test_working_weights_are_rounded_like_torchs_to_the_bit(kernels):
    master = awkward_masters()
    zero, working = torch.zeros_like(master), torch.zeros(len(master), dtype=BF16)
    before = master.clone()
    kernels.adamw_pass(
        [zero.bfloat16()],
        Weights(working, working, master),
        whole(zero.clone(), zero.clone()),
        **SETTINGS | {"weight_decay": 0.0, "gradient_divisor": 1.0},
    )
    torch.testing.assert_close(master, before, rtol=0, atol=0, equal_nan=True)
    rounded = before.to(BF16)
    nan = rounded.isnan()  # torch's own conversion gives one of two NaNs, depending on the tensor's length
    assert torch.equal(working.isnan(), nan)
    assert torch.equal(bits(working)[~nan], bits(rounded)[~nan])


@pytest.mark.parametrize("case", [ONE_USE, TWO_USES])
@pytest.mark.parametrize("length", [*LENGTHS, 1_000_003])
def test_the_square_sum_is_right(kernels, case, length):
    gradients = random_gradients(case, length, 3)
    exact = float(sum(gradient.float() for gradient in gradients).double().square().sum())
    assert kernels.square_sum(gradients) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("fault", [float("inf"), float("nan")])
def test_a_square_sum_shows_an_element_that_is_not_finite(kernels, fault, place):
    gradient = random(2 * SQUARES_ROW + 5, BF16, 0)
    gradient[place] = fault
    assert not torch.tensor(kernels.square_sum([gradient])).isfinite()


@pytest.mark.parametrize("case", [ONE_USE, TWO_USES, SPLIT])
def test_results_are_the_same_bits_for_any_number_of_threads(kernels, case):
    length = 977 * SQUARES_ROW + 37
    gradients = random_gradients(case, length, 1)
    outcomes = []
    for kernels.num_threads in (1, 2, 3, 7):
        state = State(case, length)
        state.update(kernels, gradients, gradient_divisor=3.0)
        outcomes.append((kernels.square_sum(gradients), state.values, state.exp_avg, state.exp_avg_sq))
    (first_sum, *first), *others = outcomes
    for square_sum, *state in others:
        assert square_sum == first_sum
        assert all(torch.equal(*pair) for pair in zip(state, first, strict=True))


def in_a_thread_of_its_own(work):
    """What ``work`` returns in a thread that has never used OpenMP."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux lists them")
def test_a_pass_has_the_threads_that_it_was_given_and_changes_no_other_setting(compiled):
    run = one_pass.scratch(compiled, 100_000)

    def threads_started():
        torch.get_num_threads()  # torch's own first use in a thread
        before = len(os.listdir("/proc/self/task")), torch.get_num_threads()
        compiled.num_threads = 4
        run()
        after = len(os.listdir("/proc/self/task")), torch.get_num_threads()
        return after[0] - before[0], after[1] == before[1]

    others = torch.get_num_threads()
    assert in_a_thread_of_its_own(threads_started) == (3, True)
    assert torch.get_num_threads() == others
    assert in_a_thread_of_its_own(torch.get_num_threads) == others


@needs_compiler
def test_other_threads_run_python_in_the_middle_of_a_pass(compiled):
    """One thread works upwards through the moments; only Python that runs meanwhile can see them half updated."""
    length = 1 << 22
    gradient, master = torch.ones(length, dtype=BF16), torch.ones(length)
    exp_avg, exp_avg_sq, working = torch.zeros(length), torch.zeros(length), torch.zeros(length, dtype=BF16)
    weights = Weights(working, working, master)
    seen = threading.Event()

    def update():
        compiled.num_threads = 1
        settings = SETTINGS | {"betas": (0.999, 0.999), "gradient_divisor": 1.0}
        for step in range(300):
            if seen.is_set():
                return
            settings["updates_before"] = step
            compiled.adamw_pass([gradient], weights, whole(exp_avg, exp_avg_sq), **settings)

    thread = threading.Thread(target=update)
    moments = exp_avg.numpy()
    thread.start()
    while thread.is_alive() and not seen.is_set():
        first = moments[0]  # read before the last: a whole update in between must not look like half of one
        if first > moments[-1]:
            seen.set()
    thread.join()
    assert seen.is_set()


@pytest.mark.parametrize("fault", ["none", "fails"])
def test_without_a_compiler_the_fused_kernel_does_it_and_says_so_once(fault, caplog, monkeypatch):
    one_pass._warn_once.cache_clear()
    monkeypatch.setattr(one_pass, "_compiled_once", kernels_module.CompiledKernels)
    found = None if fault == "none" else ["false"]
    monkeypatch.setattr(kernels_module, "find_compiler", lambda variable, names: found)
    with caplog.at_level(logging.WARNING):
        first, second = (prepare(num_threads=1) for _ in range(2))
    assert isinstance(first, FusedPass)
    assert isinstance(second, FusedPass)
    (message,) = [record.getMessage() for record in caplog.records if record.name == one_pass.__name__]
    assert ("install g++" if fault == "none" else "false -O3") in message
    assert_torchs_numbers(first, ONE_USE, 4133, 0.1, 3.0)


def test_a_pass_over_tensors_of_different_lengths_is_refused(kernels):
    state = State(ONE_USE, 64)
    with pytest.raises(AssertionError):
        state.update(kernels, [torch.zeros(65, dtype=BF16)], gradient_divisor=1.0)


def test_the_fewest_threads_within_three_percent_of_the_fastest_are_chosen():
    assert threads.choose({1: 2.0, 4: 1.02, 8: 1.0, 16: 1.01}) == 4
    assert threads.choose({1: 2.0, 4: 1.04, 8: 1.0}) == 8


@pytest.mark.parametrize(("cores", "spare", "counts"), [(2, 2, [1]), (4, 2, [1, 2]), (32, 2, [8, 11, 15, 22, 30])])
def test_no_trial_takes_the_spare_cores(cores, spare, counts, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert threads.thread_counts(spare) == counts


@pytest.mark.skipif(threads._openmp() is None, reason="needs GCC's OpenMP")
def test_a_trial_runs_on_its_number_of_threads():
    openmp = threads._openmp()
    assert openmp is not None
    used = []
    before = openmp.omp_get_max_threads()
    seconds = threads.measure([1, 3], lambda: lambda: used.append(openmp.omp_get_max_threads()))
    assert list(seconds) == [1, 3]
    assert sorted(set(used)) == [1, 3]
    assert openmp.omp_get_max_threads() == before


@pytest.mark.parametrize("case", [ONE_USE, TWO_USES, SPLIT, Case((FP32,), FP16, FP32)], ids=str)
def test_parts_that_were_looked_up_once_are_updated_as_one_after_the_other(kernels, case):
    lengths, settings = (16, SQUARES_ROW + 5), SETTINGS | {"gradient_divisor": 3.0}
    apart, bound = ([State(case, length) for length in lengths] for _ in range(2))
    gradients = [random_gradients(case, length, 7) for length in lengths]
    parts = [
        Part(given, Weights(s.working, s.working, s.master), whole(s.exp_avg, s.exp_avg_sq))
        for s, given in zip(bound, gradients, strict=True)
    ]
    update = kernels.bind(parts)
    for step in range(3):
        ways = [settings | {"updates_before": step, "learning_rate": rate} for rate in (0.01, 0.16)]
        for state, given, way in zip(apart, gradients, ways, strict=True):
            state.update(kernels, given, **way)
        update([Numbers(**way) for way in ways], 0)
        for given in gradients:
            given[0].mul_(-0.5)
    for one, other in zip(apart, bound, strict=True):
        assert torch.equal(one.values, other.values)
        assert torch.equal(one.working, other.working)
        assert torch.equal(one.exp_avg_sq, other.exp_avg_sq)


@needs_compiler
def test_prepared_kernels_measure_for_themselves(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)), raising=False)
    monkeypatch.setattr(one_pass, "_SCRATCH_ELEMENTS", 1 << 12)
    kernels = prepare()
    assert isinstance(kernels, CompiledPass)
    assert kernels.num_threads in threads.thread_counts(one_pass.SPARE_CORES)
