"""layer_norms.jsonl: the gradient norm of each layer, of fewer steps the longer a run, so that it stays small."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rpft import files

LAYER_NORMS_FILE = "layer_norms.jsonl"

MOST_LINES = 1000
"""From then on only every second step is noted, later every fourth; the lines between go."""


class LayerNormsFile:
    """Which steps are noted follows from their numbers alone, so a run that goes on or back needs no more state.

    The file is for looking at: what a full disk does not take is left out.
    """

    def __init__(self, folder: Path, most_lines: int = MOST_LINES) -> None:
        self.path = folder / LAYER_NORMS_FILE
        self._most_lines = most_lines

    def stride(self, step: int) -> int:
        """Every how many steps have a line when the run is at ``step``: 1, 2, 4 and so on."""
        stride = 1
        while step > self._most_lines * stride:
            stride *= 2
        return stride

    def append(self, step: int, norms: Sequence[float | None]) -> None:
        """Notes ``norms``, one a layer: null where it has no trained weight, or its gradient is not finite."""
        stride = self.stride(step)
        with suppress(OSError):
            if stride > self.stride(step - 1):
                self._keep(lambda line: line["step"] % stride == 0)
            if step % stride == 0:
                line = {"step": step, "norms": [_rounded(norm) for norm in norms]}
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    def keep_until(self, step: int) -> None:
        """Drops what stands after ``step``, and a last line that is not whole."""
        with suppress(OSError):
            self._keep(lambda line: line["step"] <= step)

    def lines(self) -> list[dict[str, Any]]:
        """Every whole line."""
        if not self.path.is_file():
            return []
        found = []
        for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                line = json.loads(text)
                if (
                    isinstance(line, dict)
                    and isinstance(line.get("step"), int)
                    and isinstance(line.get("norms"), list)
                ):
                    found.append(line)
        return found

    def _keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        if self.path.is_file():
            kept = (json.dumps(line) + "\n" for line in self.lines() if wanted(line))
            files.write_whole(self.path, "".join(kept))


def _rounded(norm: float | None) -> float | None:
    return None if norm is None or not math.isfinite(norm) else float(f"{norm:.4g}")
