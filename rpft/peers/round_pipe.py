"""The reference implementation, roundpipe 0.1.1 from PyPI, through its public interface; one process for all GPUs.

It is under the LGPL: a package that a person may install, no part of this program. Its decoder layers are
compiled, the strongest way to run it, unless the work asks for it as it comes. The update is one step late where
the run's is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rpft.peers.harness import Place, groups, set_rate
from rpft.peers.model import blocks_of, load_model
from rpft.peers.round_pipe_setting import WarmUp, adapt_to_transformers_5
from rpft.peers.work import IGNORED, Step, Work

_STEPS_BEFORE_TIMINGS = 3
"""Its planner has no timings before; from then on its stages are even."""


@dataclass(frozen=True)
class Batch:
    """A step as it takes it: all lines, [rows, sequence] each, which it divides itself; labels are not shifted."""

    kwargs: dict[str, Any]
    microbatches: int


class RoundPipe:
    """The wrapped model and its optimizer."""

    on_device = False

    def __init__(self, work: Work) -> None:
        import roundpipe
        from roundpipe.device import device_list
        from roundpipe.optim import Adam
        from roundpipe.optim_stream import synchronize_optim

        if work.lr_ratio_b != 1.0:
            raise RuntimeError("adapter.lr_ratio_b: its parameters have no names by which to tell them apart")
        self._work, self._run_config = work, roundpipe.RoundPipeRunConfig
        self.devices = [torch.device(device.device) for device in device_list]
        self._inner = load_model(work, torch.device("cpu"), checkpointed=False)
        adapt_to_transformers_5(self._inner)
        self._compiled = work.compile and "as-it-comes" not in work.options
        if self._compiled:
            torch._dynamo.config.recompile_limit = 256
            for kind in {type(block) for block in blocks_of(self._inner)}:
                kind.forward = torch.compile(kind.forward, dynamic=False)
        self._warm_up = WarmUp(self._inner, work, self.devices, self._compiled)
        self._steps, self._planned = 0, False
        self._model: Any = roundpipe.wrap_model_to_roundpipe(
            self._inner,
            optim_dtype=torch.float32,
            use_sequential_preset=True,
            pin_model="alloc",
            name="bench",
            model_run_config=self._run_config(recompute_grain="stage", preserve_rng_state=False),
        )
        self._parameters = list(self._model.optim_parameters())
        named = [(str(number), parameter) for number, parameter in enumerate(self._parameters)]
        how = {"betas": work.betas, "eps": work.eps, "decoupled_weight_decay": True}
        self._optimizer = Adam(groups(named, work), lr=0.0, **how)
        self._synchronize = synchronize_optim

    def set_rate(self, rate: float) -> None:
        set_rate(self._optimizer, rate)

    def place(self, step: Step) -> Batch:
        """Lines of all microbatches, padded to the longest; what runs them is compiled, from the main thread."""
        widest = max(rows.input_ids.shape[1] for rows in step)

        def joined(tensors: list[Tensor], fill: int) -> Tensor:
            padded = [nn.functional.pad(t, (0, widest - t.shape[1]), value=fill) for t in tensors]
            return torch.cat(padded)

        shifted = joined([rows.labels for rows in step], IGNORED)
        labels = torch.full_like(shifted, IGNORED)
        labels[:, 1:] = shifted[:, :-1]
        ids = joined([rows.input_ids for rows in step], 0)
        kwargs = {"input_ids": ids, "labels": labels, "return_logits": False}
        positions = [rows.position_ids for rows in step if rows.position_ids is not None]
        if positions:
            kwargs["position_ids"] = joined(positions, 0)
        lines = len(labels)
        for size in {lines // len(step), -(-lines // len(step))}:
            self._warm_up.once(size, widest)
        return Batch(kwargs, len(step))

    def step(self, step: Batch, trained_tokens: int) -> Tensor:
        def loss_of(output: Any, labels: Tensor) -> Tensor:
            # Its loss is a mean over the microbatch.
            return output.loss * ((labels[:, 1:] != IGNORED).sum() / trained_tokens)

        loss = self._model.forward_backward(
            input_kwargs=step.kwargs,
            label=step.kwargs["labels"],
            loss_fn=loss_of,
            run_config=self._run_config(num_microbatch=step.microbatches),
        )
        self._model.step(self._update, is_async=self._work.delayed)
        self._steps += 1
        return loss.detach() * trained_tokens

    def _update(self) -> None:
        if self._work.max_grad_norm:
            nn.utils.clip_grad_norm_(self._parameters, self._work.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def finish(self) -> None:
        self._synchronize()
        if self._steps >= _STEPS_BEFORE_TIMINGS and not self._planned:
            self._planned = True
            self._model.model_timer.update_times()

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()


def build(work: Work, place: Place) -> RoundPipe:
    """The adapter."""
    if not torch.cuda.is_available():
        raise RuntimeError("roundpipe needs a CUDA device, and torch sees none")
    return RoundPipe(work)
