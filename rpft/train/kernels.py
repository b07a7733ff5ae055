"""What runs layers and optimizer, and how precise gradients wait: as the recipe says, or as the machine can."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from rpft.errors import UserError
from rpft.host import CXX_NAMES, find_compiler
from rpft.model.graphs import KernelKind
from rpft.recipe.checks import several_rounds


class KernelChoice(NamedTuple):
    """The kernels of a run."""

    kind: KernelKind
    missing: str | None = None
    """What the machine lacks for compiled ones, where these would have been chosen, and the way out."""

    @property
    def graphs(self) -> bool:
        """Whether layers run as graphs, which are made anew for every shape of a microbatch."""
        return self.kind != "eager"


def choose_kernels(setting: Literal["auto", "eager", "trace", "compile"], device_type: str) -> KernelChoice:
    """What ``engine.kernels`` means on a device of ``device_type``; UserError where it cannot be had."""
    if setting == "eager" or setting == "trace":
        return KernelChoice(setting)
    if setting == "auto" and device_type == "cpu":
        return KernelChoice("eager")
    missing = _missing_for_compilation(device_type)
    if missing is None:
        return KernelChoice("compile")
    if setting == "compile":
        raise UserError(f"engine.kernels is compile, and {missing}; or set engine.kernels to trace or eager")
    return KernelChoice("trace", missing)


def _missing_for_compilation(device_type: str) -> str | None:
    if device_type == "cpu":
        names, variable, language = CXX_NAMES, "CXX", "C++"
    else:
        names, variable, language = ("gcc", "clang"), "CC", "C"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed: pip install triton, in the version that this torch asks for"
    if find_compiler(variable, names) is None:
        own = os.environ.get(variable)
        looked = f"${variable}, {own}, is not one" if own else f"install {names[0]} or set ${variable}"
        return f"no {language} compiler is found: {looked}"
    if not (_include_folder() / "Python.h").is_file():
        return "Python's headers are missing: install those of this Python (python3-dev or python3-devel)"
    return None


def _include_folder() -> Path:
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder where the headers of its Python are not.
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))


def choose_gradient_dtype(
    setting: Literal["auto", "float32", "bfloat16"],
    dtype: torch.dtype,
    num_microbatches: int,
    accumulation: int,
    rounds_come_from: str,
) -> torch.dtype:
    """What ``engine.host_gradients`` means for a model of ``dtype`` and rounds of ``num_microbatches``.

    Rounding is possible where it happens once, after the sum over all of a step. UserError for bfloat16 where
    it is not; ``rounds_come_from`` begins its reason.
    """
    one_round = num_microbatches >= accumulation
    if setting == "bfloat16" and not one_round:
        raise UserError(several_rounds(f"{rounds_come_from} {num_microbatches}", accumulation))
    possible = dtype == torch.bfloat16 and one_round
    return torch.bfloat16 if possible and setting != "float32" else torch.float32
