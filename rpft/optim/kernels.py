"""The compiled optimizer: one_pass.cpp, built by this machine's C++ compiler when a run starts.

Inductor turns an update into vector code only where every tensor is a float; masters that lie in two halves
(model/split_float.py) are not, and its code for them is five times slower than this. The build takes a second, so
that nothing is kept on the disk that could be another machine's. Calls go through ctypes, which releases the GIL.
"""

from __future__ import annotations

import ctypes
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from rpft.host import CXX_NAMES, find_compiler
from rpft.model import dynamic_map
from rpft.model.dropout import halves
from rpft.model.moments import Moments, StateFormat

SQUARES_ROW = 1024
"""Elements of which the squares are summed in float32; a vector's lanes share them, so an error is about 1e-7."""

_FLAGS = "-O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -std=c++17 -shared -fPIC"

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Weights(NamedTuple):
    """Weights of an update, flat [n]."""

    before: Tensor
    """Working weights."""
    after: Tensor
    """What becomes of them; may be ``before`` itself."""
    master: Tensor | None
    """float32; or int16, the half that working weights of bfloat16 lack; or None, where they are float32."""


class _State(ctypes.Structure):
    """State of one_pass.cpp."""

    _fields_ = [
        *((name, _POINTER) for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")),
        *((name, _POINTER) for name in ("signed_values", "unsigned_values", "signed_search", "unsigned_search")),
        ("first_place", _LONG),
        ("keys", ctypes.c_uint32 * 2),
    ]

    @classmethod
    def of(cls, moments: Moments) -> _State:
        stored = moments.exp_avg, moments.exp_avg_sq, moments.exp_avg_scale, moments.exp_avg_sq_scale
        maps = [
            table(signed) for table in (dynamic_map.values, dynamic_map.search_table) for signed in (True, False)
        ]
        pointers = [tensor.data_ptr() for tensor in (*stored, *maps)]
        return cls(*pointers, moments.first_place)


class Part(NamedTuple):
    """Elements of an update that are updated alike."""

    gradients: Sequence[Tensor]
    """One or two, float32 or bfloat16, which are to be added."""
    weights: Weights
    moments: Moments


class _Part(ctypes.Structure):
    """Part of one_pass.cpp."""

    _fields_ = [
        ("n", _LONG),
        *((name, _POINTER) for name in ("first", "second", "before", "after", "master", "remainder")),
        ("state", _State),
        ("bfloat16_gradients", ctypes.c_int32),
    ]

    @classmethod
    def of(cls, part: Part) -> _Part:
        before, after, master = part.weights
        split = master is not None and master.dtype == torch.int16
        first, second, bfloat16 = _of_gradients(part.gradients)
        return cls(
            len(after),
            first,
            second,
            before.data_ptr(),
            after.data_ptr() if after.dtype != torch.float16 else None,
            None if master is None or split else master.data_ptr(),
            master.data_ptr() if master is not None and split else None,
            _State.of(part.moments),
            bfloat16,
        )


class CompiledKernels:
    """The loops of one_pass.cpp over contiguous host tensors [n]; what they take is not checked again."""

    def __init__(self, state_format: StateFormat = "fp32") -> None:
        """Compiles for moments of ``state_format``; OSError where there is no compiler or it fails."""
        source = files("rpft.optim").joinpath("one_pass.cpp").read_text(encoding="utf-8")
        library = _build(source, f"-DSTATE_FORMAT={get_args(StateFormat).index(state_format)}")
        self._adamw, self._square_sums = library.adamw, library.square_sums
        self._adamw.argtypes = [_LONG, _POINTER, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32]
        self._square_sums.argtypes = [_LONG, _LONG, _POINTER, _POINTER, _INT, _POINTER]
        self._adamw.restype = self._square_sums.restype = None

    def adamw(self, parts: Sequence[Part]) -> Callable[[bytes, int], None]:
        """AdamW of ``parts``, whose places are looked up now: one call, without the GIL, does all of them.

        It takes numbers and a rounding key. Numbers are float32, 8 a part: the scale of the gradient, what weight
        decay leaves, 1 - beta1, beta2, 1 - beta2, the learning rate and the root of the second moment both with
        their bias correction, eps.
        Working weights of float16 are not written. Moments of bfloat16 are rounded by chance, as the key, 64 bits,
        has it.
        """
        placed = (_Part * len(parts))(*map(_Part.of, parts))
        held, adamw = list(parts), self._adamw  # tensors live as long as what has their addresses

        def update(numbers: bytes, rounding_key: int) -> None:
            adamw(len(held), placed, numbers, *halves(rounding_key))

        return update

    def square_sums(self, gradients: Sequence[Tensor]) -> Tensor:
        """The squares of the sum of ``gradients``, summed in rows: float32 [n / SQUARES_ROW]; n is whole rows."""
        sums = torch.empty(len(gradients[0]) // SQUARES_ROW, dtype=torch.float32)
        self._square_sums(len(sums), SQUARES_ROW, *_of_gradients(gradients), sums.data_ptr())
        return sums


def _build(source: str, define: str) -> ctypes.CDLL:
    command = find_compiler("CXX", CXX_NAMES)
    if command is None:
        raise OSError("no C++ compiler is found: install g++ or set $CXX")
    with tempfile.TemporaryDirectory(prefix="rpft-") as folder:
        library = Path(folder) / "one_pass.so"
        words = [*command, *_FLAGS.split(), define, "-x", "c++", "-", "-o", str(library)]
        done = subprocess.run(words, input=source, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip() or "no reason given").splitlines()[0]
            raise OSError(f"{shlex.join(command)} {_FLAGS} fails: {said}")
        return ctypes.CDLL(str(library))


def _of_gradients(gradients: Sequence[Tensor]) -> tuple[int, int | None, bool]:
    """(first, second if there are two, whether they are bfloat16), as the loops take them."""
    first, *others = gradients
    return first.data_ptr(), others[0].data_ptr() if others else None, first.dtype == torch.bfloat16
