"""The optimizer's arithmetic in a few lines of torch, which Inductor compiles for the CPU.

Inductor's C++ entry releases the GIL for the whole call, so other threads go on launching work. The compilation
does not go through ``torch.compile``, whose guards look at torch's number of threads: where another thread has
another number they would compile again, in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch.fx.experimental.proxy_tensor import make_fx

Kernel = Callable[..., list[Tensor]]
"""A function of tensors only, for any length of them."""

SQUARES_ROW = 1024
"""Elements of which the squares are summed in float32; a vector's lanes share them, so an error is about 1e-7."""

_EXAMPLE_ELEMENTS = 1 << 22
"""A length to trace with: so many rows that Inductor never splits one row's sum over threads. Never touched."""

_INDUCTOR_OPTIONS = {
    "cpp_wrapper": True,  # the entry that releases the GIL
    "cpp.dynamic_threads": True,  # as many threads as OpenMP has been told, instead of a number in the code
    "compile_threads": 1,  # no pool of compiling processes for a handful of small kernels
}


def compile_update(gradients: Sequence[torch.dtype], working: torch.dtype | None) -> Kernel:
    """AdamW over (*gradients, master, exp_avg, exp_avg_sq, working if any, numbers), all but numbers [n].

    ``numbers`` is float32 [8], in the order in which it is unpacked here. Raises what the compiler raises.
    """
    count = len(gradients)

    def update(*tensors: Tensor) -> list[Tensor]:
        master, exp_avg, exp_avg_sq, *rounded, numbers = tensors[count:]
        scale, keep, new1, old2, new2, step_size, correction2, eps = numbers.unbind()
        gradient = _float_sum(tensors[:count]) * scale
        first = exp_avg + (gradient - exp_avg) * new1
        second = exp_avg_sq * old2 + gradient * gradient * new2
        updated = master * keep - step_size * first / (second.sqrt() * correction2 + eps)
        exp_avg.copy_(first)
        exp_avg_sq.copy_(second)
        for target in (master, *rounded):
            target.copy_(updated)
        return []

    written = [] if working is None else [working]
    return _compile(update, [*_examples(*gradients, *[torch.float32] * 3, *written), torch.empty(8)])


def compile_squares(gradients: Sequence[torch.dtype]) -> Kernel:
    """Squares of the sum of gradients [n], summed in rows: [float32 [n / SQUARES_ROW]]; n is whole rows."""

    def squares(*tensors: Tensor) -> list[Tensor]:
        return [_float_sum(tensors).view(-1, SQUARES_ROW).square().sum(dim=1)]

    return _compile(squares, _examples(*gradients))


def _float_sum(tensors: Sequence[Tensor]) -> Tensor:
    return sum((tensor.float() for tensor in tensors[1:]), tensors[0].float())


def _examples(*dtypes: torch.dtype) -> list[Tensor]:
    return [torch.empty(_EXAMPLE_ELEMENTS, dtype=dtype) for dtype in dtypes]


def _compile(graph: Kernel, examples: list[Tensor]) -> Kernel:
    """``graph`` compiled for any length of its long examples; no call of the result compiles again."""
    # Imported here because it loads all of Inductor, a second that only training needs.
    from torch._inductor import standalone_compile

    with torch.no_grad():
        traced = make_fx(graph, tracing_mode="symbolic")(*examples)
        inputs = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
        with tracing(TracingContext(inputs[0].fake_mode)):
            return standalone_compile(
                traced,
                inputs,
                dynamic_shapes="from_tracing_context",
                options={"config_patches": _INDUCTOR_OPTIONS},
            )
