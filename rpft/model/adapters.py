"""LoRA through peft: injected into the skeleton, initialised into the host store, saved in peft's own format."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpft.errors import UserError
from rpft.model.dropout import mix
from rpft.model.host_store import HostStore
from rpft.model.layers import freeze_all
from rpft.model.skeleton import Skeleton

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."
_ADAPTER = "default"


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adaptation (Hu et al., arXiv 2106.09685): W + alpha / r * B A on the target modules."""

    r: int
    alpha: float
    dropout: float
    target_modules: str | list[str]
    """``all-linear``, a list of module names, or a regular expression on the full name."""


def inject_lora(skeleton: Skeleton, settings: LoraSettings, base_model: str) -> Any:
    """Freezes the base model and puts adapters, on meta, into ``skeleton.model``; returns the PeftModel.

    Raises UserError where no module of the model matches.
    """
    from peft import LoraConfig, get_peft_model

    freeze_all(skeleton.model)
    skeleton.model.name_or_path = base_model
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model,
    )
    try:
        with warnings.catch_warnings():
            # peft asks transformers a question under a name that transformers is about to drop
            warnings.filterwarnings("ignore", category=FutureWarning)
            return get_peft_model(skeleton.model, config, adapter_name=_ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserError(
            f"adapter.target_modules {settings.target_modules!r}: {str(error).splitlines()[0]}"
        ) from error


def initialise_lora(skeleton: Skeleton, store: HostStore, seed: int) -> None:
    """Writes peft's initial adapter weights into ``store``, each module's drawn from (seed, its number)."""
    from peft.tuners.lora import LoraLayer

    for number, (path, module) in enumerate(skeleton.model.named_modules()):
        if not isinstance(module, LoraLayer):
            continue
        parts = [(part, getattr(module, part)) for part in ("lora_A", "lora_B")]
        parts += [(p, getattr(module, p)) for p in ("lora_embedding_A", "lora_embedding_B")]
        for _, container in parts:
            if isinstance(container, torch.nn.ParameterDict):
                for name in container:
                    container[name] = torch.nn.Parameter(torch.empty_like(container[name], device="cpu"))
            else:
                container.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix(seed, number))
            module.reset_lora_parameters(_ADAPTER, init_lora_weights=True)
        for part, container in parts:
            for name, parameter in container.named_parameters():
                store.write(f"{path}.{part}.{name}", parameter.detach())
            container.to("meta")  # the store alone holds weights


def caches_parametrizations(module: torch.nn.Module) -> bool:
    """Whether ``module`` has adapters of bare parameters (fused experts), which peft keeps in torch's cache."""
    # By name: importing peft takes a second, which a full run has no use for.
    return any(type(child).__name__ == "ParamWrapper" for child in module.modules())


def save_lora(peft_model: Any, store: HostStore, folder: Path) -> None:
    """Writes adapter_model.safetensors and adapter_config.json into ``folder``."""
    state = {
        _PREFIX + spec.name: store.tensor(spec.name)
        for layer in store.layers
        for spec, _ in layer.layout.own.values()
        if spec.trained
    }
    peft_model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
