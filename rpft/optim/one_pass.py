"""AdamW on flat host tensors in one pass over memory, with the gradient's norm and the rounding that belong to it.

A parameter costs 26 bytes of memory traffic: a bfloat16 gradient 2, two moments 8 each, the working weight and
what its master has beyond it 4 each. Where nothing can be compiled, torch's fused kernel does the same in blocks,
with more traffic.
"""

from __future__ import annotations

import functools
import logging
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rpft.model.moments import Moments, StateFormat, moments_bytes, moments_in
from rpft.model.split_float import join, split_into
from rpft.optim.kernels import SQUARES_ROW, CompiledKernels, Part, Weights
from rpft.optim.threads import choose, measure, openmp_threads, thread_counts

logger = logging.getLogger(__name__)

SPARE_CORES = 2
"""Cores left to other threads: the GIL lets one at a time issue work from Python, and what CUDA and autograd do
for it outside the GIL overlaps with the next one's."""

_FUSED_BLOCK = 1 << 22
"""Elements that the fused kernel is given at once: few enough for the cache, many enough for its start-up."""

_SCRATCH_ELEMENTS = 1 << 25
"""Parameters that numbers of threads are tried on: 0.5 GB, more than caches hold of it."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of one update."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    updates_before: int
    gradient_divisor: float

    @cached_property
    def packed(self) -> bytes:
        """As ``CompiledKernels.adamw`` takes them."""
        step, (beta1, beta2) = self.updates_before + 1, self.betas
        values = [
            1.0 / self.gradient_divisor,
            1.0 - self.learning_rate * self.weight_decay,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            self.learning_rate / (1.0 - beta1**step),
            1.0 / math.sqrt(1.0 - beta2**step),
            self.eps,
        ]
        return array("f", values).tobytes()


BoundUpdate = Callable[[Sequence[Numbers], int], None]
"""An update that takes the numbers of each of its parts, and 64 bits for what is rounded by chance."""


class OnePass(ABC):
    """What the optimizer does to flat host tensors; for one thread at a time. ``prepare`` makes one.

    Tensors are contiguous, [n] with any n, and lie in host memory. No call holds the GIL while it works.
    """

    num_threads: int | None = None
    """OpenMP threads of every call; None: as many as the calling thread has set otherwise."""

    def __init__(self, state_format: StateFormat = "fp32") -> None:
        """``state_format``: of the moments that are updated."""
        self.state_format: StateFormat = state_format

    def adamw_pass(
        self,
        gradients: Sequence[Tensor],
        weights: Weights,
        moments: Moments,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        updates_before: int,
        gradient_divisor: float,
        rounding_key: int = 0,
    ) -> None:
        """One update, as ``torch.optim.AdamW`` does it (Loshchilov and Hutter, arXiv 1711.05101).

        The gradient is the float32 sum of ``gradients``, which are not modified, over ``gradient_divisor``.
        Masters and ``moments`` are updated in place; ``weights.after`` becomes the
        masters rounded to nearest, a tie to even where they are whole and away from zero where they lie in two
        halves (model/split_float.py). ``updates_before`` counts the updates so far, for the bias correction.
        The update takes the new moments before they are rounded for their format (model/moments.py), with bf16 by
        chance that ``rounding_key``, 64 bits, and each element's place decide. No element's result depends on the
        number of threads.
        """
        numbers = Numbers(learning_rate, betas, eps, weight_decay, updates_before, gradient_divisor)
        self.bind([Part(gradients, weights, moments)])([numbers], rounding_key)

    def bind(self, parts: Sequence[Part]) -> BoundUpdate:
        """As ``adamw_pass`` of several parts, whose tensors are checked and looked up now and not every time."""
        for (before, after, master), gradients, moments in ((p.weights, p.gradients, p.moments) for p in parts):
            assert moments.format == self.state_format
            assert before.dtype == after.dtype
            if master is None or master.dtype == torch.int16:
                assert after.dtype == (torch.float32 if master is None else torch.bfloat16)
            masters = [] if master is None else [master]
            _assert_flat([*gradients, before, after, moments.exp_avg, moments.exp_avg_sq, *masters])
        bound = self._bind(parts)

        def update(numbers: Sequence[Numbers], rounding_key: int) -> None:
            with openmp_threads(self.num_threads):
                bound(numbers, rounding_key)

        return update

    def square_sum(self, gradients: Sequence[Tensor]) -> float:
        """The sum of the squares of the sum of ``gradients``; not finite when an element of it is not.

        Rows of fixed length are summed in float32 and the rows in double: right to about 1e-7, and the same to
        the bit for any number of threads.
        """
        _assert_flat(gradients)
        whole = len(gradients[0]) // SQUARES_ROW * SQUARES_ROW
        rest = sum((gradient[whole:].double() for gradient in gradients[1:]), gradients[0][whole:].double())
        total = float(np.square(rest.numpy()).sum())
        if whole > 0:
            with openmp_threads(self.num_threads):
                total += self._rows_square_sum([gradient[:whole] for gradient in gradients])
        return total

    @abstractmethod
    def _bind(self, parts: Sequence[Part]) -> BoundUpdate: ...

    @abstractmethod
    def _rows_square_sum(self, gradients: Sequence[Tensor]) -> float: ...


class CompiledPass(OnePass):
    """Compiled loops, one a combination of types."""

    def __init__(self, state_format: StateFormat = "fp32") -> None:
        """Compiles, once a process and format; OSError where that fails."""
        super().__init__(state_format)
        self._kernels = _compiled_once(state_format)

    def _bind(self, parts: Sequence[Part]) -> BoundUpdate:
        bound = self._kernels.adamw(parts)
        halves = [(w.after, w.master) for _, w, _ in parts if w.after.dtype == torch.float16]

        def update(numbers: Sequence[Numbers], rounding_key: int) -> None:
            bound(b"".join(each.packed for each in numbers), rounding_key)
            for after, master in halves:  # have no loop: torch rounds the master
                assert master is not None
                after.copy_(master)

        return update

    def _rows_square_sum(self, gradients: Sequence[Tensor]) -> float:
        return _sum_in_double(self._kernels.square_sums(gradients))


class FusedPass(OnePass):
    """torch's fused kernel and copies, block by block."""

    def __init__(self, state_format: StateFormat = "fp32") -> None:
        super().__init__(state_format)
        self._block = torch.empty(_FUSED_BLOCK, dtype=torch.float32)

    def _bind(self, parts: Sequence[Part]) -> BoundUpdate:
        def update(numbers: Sequence[Numbers], rounding_key: int) -> None:
            for part, own in zip(parts, numbers, strict=True):
                self._update(*part, rounding_key, own)

        return update

    def _update(
        self,
        gradients: Sequence[Tensor],
        weights: Weights,
        moments: Moments,
        rounding_key: int,
        numbers: Numbers,
    ) -> None:
        for part, gradient in self._summed(gradients):
            before, after = weights.before[part], weights.after[part]
            master = None if weights.master is None else weights.master[part]
            stored = moments[part]
            exp_avg, exp_avg_sq = stored.read()
            if master is None:
                values = after.copy_(before)
            else:
                values = join(before, master) if master.dtype == torch.int16 else master
            adamw(
                [values],
                [gradient.div_(numbers.gradient_divisor)],
                [exp_avg],
                [exp_avg_sq],
                [],
                [torch.tensor(float(numbers.updates_before))],
                fused=True,
                amsgrad=False,
                beta1=numbers.betas[0],
                beta2=numbers.betas[1],
                lr=numbers.learning_rate,
                weight_decay=numbers.weight_decay,
                eps=numbers.eps,
                maximize=False,
            )
            stored.write(exp_avg, exp_avg_sq, rounding_key)
            if master is not None and master.dtype == torch.int16:
                split_into(after, master, values)
            else:
                after.copy_(values)

    def _rows_square_sum(self, gradients: Sequence[Tensor]) -> float:
        return sum(
            _sum_in_double(torch.linalg.vector_norm(gradient.view(-1, SQUARES_ROW), dim=1).square_())
            for _, gradient in self._summed(gradients)
        )

    def _summed(self, gradients: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """The gradients' float32 sum, part by part in one and the same memory."""
        total = len(gradients[0])
        for start in range(0, total, _FUSED_BLOCK):
            part = slice(start, min(start + _FUSED_BLOCK, total))
            block = self._block[: part.stop - start].copy_(gradients[0][part])
            for gradient in gradients[1:]:
                block.add_(gradient[part])
            yield part, block


def prepare(
    state_format: StateFormat = "fp32", *, spare_cores: int = SPARE_CORES, num_threads: int | None = None
) -> OnePass:
    """Compiled kernels for moments of ``state_format``, on ``num_threads`` or what a measurement finds best.

    Compiles here and nowhere later, which takes about a second. Where that fails torch's fused kernel is used, and
    a warning says so once.

    The measurement takes under a second and 0.5 GB for that long. It tries no more threads than the process has
    cores less ``spare_cores``; where that leaves one, there is nothing to measure.
    """
    kernels = _compiled_or_fused(state_format)
    if num_threads is None:
        counts = thread_counts(spare_cores)
        num_threads = counts[0]
        if len(counts) > 1:
            num_threads = choose(measure(counts, lambda: scratch(kernels)))
    kernels.num_threads = num_threads
    return kernels


def scratch(kernels: OnePass, num_params: int = _SCRATCH_ELEMENTS) -> Callable[[], None]:
    """A pass over ``num_params`` made-up parameters in bfloat16, to be measured."""
    state = torch.zeros(moments_bytes(kernels.state_format, num_params), dtype=torch.uint8)
    moments = moments_in(state, kernels.state_format, num_params)
    gradient, working = (torch.ones(num_params, dtype=torch.bfloat16) for _ in range(2))
    weights = Weights(working, working, torch.zeros(num_params, dtype=torch.int16))
    return lambda: kernels.adamw_pass(
        [gradient],
        weights,
        moments,
        learning_rate=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        updates_before=0,
        gradient_divisor=1.0,
    )


def _compiled_or_fused(state_format: StateFormat) -> OnePass:
    try:
        return CompiledPass(state_format)
    except OSError as error:
        _warn_once(
            "the optimizer's one-pass kernel could not be compiled, so torch's fused kernel is used: the same"
            f" update, slower ({error})"
        )
        return FusedPass(state_format)


@functools.cache
def _compiled_once(state_format: StateFormat) -> CompiledKernels:
    return CompiledKernels(state_format)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _sum_in_double(rows: Tensor) -> float:
    """In numpy, whose sum runs in one thread, so that its order is always the same."""
    return float(np.sum(rows.numpy(), dtype=np.float64))


def _assert_flat(tensors: Sequence[Tensor]) -> None:
    """Compiled code takes lengths and strides on trust."""
    shape = tensors[0].shape
    assert len(shape) == 1
    assert all(tensor.shape == shape and tensor.is_contiguous() and tensor.is_cpu for tensor in tensors)
