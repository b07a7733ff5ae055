"""Operations of our own that a graph holds as one node, at little cost a call.

``torch.library.custom_op`` takes 40 microseconds of the interpreter a call, for gradients that autograd would
want; these have none. An adapter's backward has 14 such calls, and the threads of all GPUs share one interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("rpft", "FRAGMENT")


def operation(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes of a function the operation ``torch.ops.rpft.<name>``, on every device, without a gradient.

    ``schema`` is that of torch.library, its name that of the function; ``fake`` gives the results' shapes.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"rpft::{function.__name__}", fake, lib=_LIBRARY)
        return function

    return register


def nothing(*args: Any) -> None:
    """The result of an operation that only writes into an argument."""
