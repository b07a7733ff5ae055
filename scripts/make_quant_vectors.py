"""Makes tests/model/vectors/quantised.safetensors: weights as bitsandbytes and torchao quantise them.

    pip install bitsandbytes torchao
    python scripts/make_quant_vectors.py

Kept are for small random weights what the libraries store of them, what they make of that again, and what a frozen
layer of theirs gives forward and backward; tests/model/test_quant.py compares rpft with it, so that the libraries
need not be installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

TARGET = Path(__file__).parent.parent / "tests" / "model" / "vectors" / "quantised.safetensors"
# bitsandbytes 0.50 dequantises wrongly on the CPU where a block of 64 goes on in the next row: no such widths.
CASES = (
    (24, 64, torch.float32),
    (20, 128, torch.bfloat16),
    (12, 64, torch.float16),
    (260, 64, torch.bfloat16),  # more than 256 blocks: their largest values are of two blocks themselves
)


def weights() -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(name, weight, input, gradient of the output)."""
    generator = torch.Generator().manual_seed(6)
    for rows, width, dtype in CASES:
        shapes = ((rows, width), (3, width), (3, rows))
        weight, hidden, grad = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
        yield f"{rows}x{width}", weight * 0.05, hidden, grad


def nf4(weight: torch.Tensor, nested: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(parts by the names that they have in a file, the weight that bitsandbytes makes of them)."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
    parts = {"packed": packed.flatten(), "absmax": state.absmax, "quant_map": state.code}
    if nested:
        parts |= {
            "nested_absmax": state.state2.absmax,
            "nested_quant_map": state.state2.code,
            "nested_offset": state.offset.reshape(1),
        }
    return parts, dequantize_4bit(packed, state)


def rows_scaled(kind: str, weight: torch.Tensor) -> Any:
    """torchao's weight-only tensor of ``weight``, with a scale a row."""
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    return {"int8": Int8Tensor, "fp8": Float8Tensor}[kind].from_hp(weight, granularity=PerRow())


def layer(hidden: torch.Tensor, weight: Any, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a frozen linear layer gives for ``hidden`` and ``grad``."""
    hidden = hidden.detach().requires_grad_()
    output = F.linear(hidden, weight)
    (grad_hidden,) = torch.autograd.grad(output, hidden, grad)
    return {"output": output.detach(), "grad_hidden": grad_hidden}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight, hidden, grad in weights():
        tensors |= {f"{name}.weight": weight, f"{name}.hidden": hidden, f"{name}.grad": grad}
        for nested in (True, False):
            parts, again = nf4(weight, nested)
            made = {**parts, "dequantised": again, **layer(hidden, again, grad)}
            tensors |= {f"{name}.nf4{'.nested' if nested else ''}.{key}": value for key, value in made.items()}
        for kind in ("int8", "fp8"):
            stored = rows_scaled(kind, weight)
            made = {"packed": stored.qdata, "scale": stored.scale, "dequantised": stored.dequantize()}
            made |= layer(hidden, stored, grad)
            tensors |= {f"{name}.{kind}.{key}": value for key, value in made.items()}
    TARGET.parent.mkdir(exist_ok=True)
    versions = {name: version(name) for name in ("bitsandbytes", "torchao", "torch")}
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, TARGET, versions)
    print(f"{TARGET}: {len(tensors)} tensors, {TARGET.stat().st_size / 1024:.0f} KiB, {versions}")


if __name__ == "__main__":
    main()
