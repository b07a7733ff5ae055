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
from rpft.model.layout import LayerLayout
from rpft.model.parts import is_parameter_adapter
from rpft.model.skeleton import Skeleton
from rpft.model.whole_tensors import WholeTensors

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."
ADAPTER = "default"
"""peft's name of the one adapter that a model has."""

_WHOLE = f".modules_to_save.{ADAPTER}"


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adaptation (Hu et al., arXiv 2106.09685): W + alpha / r * B A on the target modules."""

    r: int
    alpha: float
    dropout: float
    target_modules: str | list[str]
    """``all-linear``, a list of module names, or a regular expression on the full name."""
    rslora: bool = False
    """Scaled by alpha / sqrt(r) (Kalajdzievski, arXiv 2312.03732)."""
    dora: bool = False
    """Lengths of W's rows are trained beside their direction (Liu et al., arXiv 2402.09353)."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole."""
    target_parameters: tuple[str, ...] = ()
    """Parameters that get adapters without being a module's weight, as fused experts: ends of their names."""


def inject_lora(skeleton: Skeleton, settings: LoraSettings, base_model: str) -> Any:
    """Freezes the base model and puts adapters, on meta, into ``skeleton.model``; returns the PeftModel.

    Raises UserError where no module or parameter of the model matches, or peft cannot do what is asked for.
    """
    from peft import LoraConfig, get_peft_model

    model = skeleton.model
    freeze_all(model)
    model.name_or_path = base_model
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        modules_to_save=list(settings.modules_to_save) or None,
        target_parameters=list(settings.target_parameters) or None,
        # A tied embedding that is trained whole stays tied: both its uses see what is trained.
        ensure_weight_tying=tied and bool(settings.modules_to_save),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model,
    )
    try:
        with warnings.catch_warnings():
            # peft asks transformers a question under a name that transformers is about to drop
            warnings.filterwarnings("ignore", category=FutureWarning)
            # peft gives fused gate and up twice the rank by a pattern, and looks for it among modules only
            warnings.filterwarnings("ignore", r".*_pattern keys did not match", RuntimeWarning)
            peft_model = get_peft_model(model, config, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    except (ValueError, TypeError, NotImplementedError) as error:
        keys = f"adapter.target_modules {settings.target_modules!r}"
        if settings.target_parameters:
            keys += f", target_parameters {list(settings.target_parameters)}"
        said = str(error).splitlines()[0]
        if "ParamWrapper" in said:
            said = (
                "they reach the experts, for which peft knows neither dropout nor DoRA; set adapter.dropout to 0"
                f" and adapter.dora to false, or name other modules ({said})"
            )
        raise UserError(f"{keys}: {said}") from error
    _drop_originals(skeleton, settings.modules_to_save)
    return peft_model


def _drop_originals(skeleton: Skeleton, modules_to_save: tuple[str, ...]) -> None:
    """Of a module that is trained whole, leaves the trained copy, to be read from the checkpoint itself."""
    from peft.utils import ModulesToSaveWrapper

    wrappers = [(n, m) for n, m in skeleton.model.named_modules() if isinstance(m, ModulesToSaveWrapper)]
    unmatched = [name for name in modules_to_save if not any(path.endswith(name) for path, _ in wrappers)]
    if unmatched:
        raise UserError(
            f"adapter.modules_to_save {list(modules_to_save)}: the model has no module {unmatched[0]!r} that could"
            " be trained whole; give the last part of a module's name, as in embed_tokens, lm_head or norm"
        )
    copies: dict[str, torch.nn.Parameter] = {}
    for _, wrapper in wrappers:
        copy = wrapper.modules_to_save[ADAPTER]
        for name, parameter in wrapper.original_module.named_parameters():
            checkpoint_name = skeleton.checkpoint_names[id(parameter)]
            trained = copies.setdefault(checkpoint_name, copy.get_parameter(name))
            parent, _, leaf = name.rpartition(".")
            setattr(copy.get_submodule(parent), leaf, trained)  # on meta, peft loses that two copies are tied
            skeleton.checkpoint_names[id(trained)] = checkpoint_name
        for name, buffer in wrapper.original_module.named_buffers():
            if (kept := skeleton.checkpoint_names.get(id(buffer))) is not None:
                skeleton.checkpoint_names[id(copy.get_buffer(name))] = kept
    for _, wrapper in wrappers:
        wrapper.original_module = torch.nn.Identity()


def initialise_lora(skeleton: Skeleton, store: HostStore, seed: int) -> None:
    """Writes peft's initial adapter weights into ``store``, each module's drawn from (seed, its number).

    The base weights must be there: the lengths that DoRA trains start as those of their rows.
    """
    from peft.tuners.lora import LoraLayer

    wholes, parameters = WholeTensors(store), skeleton.model.named_parameters(remove_duplicate=False)
    stored = {id(parameter): name for name, parameter in parameters if name in store}  # a tied one under one name
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
            module.reset_lora_parameters(ADAPTER, init_lora_weights=True)
        if ADAPTER in module.lora_magnitude_vector:
            _initialise_lengths(module, path, store, stored[id(module.get_base_layer().weight)])
        for part, container in parts:
            for name, parameter in container.named_parameters():
                wholes.write(f"{path}.{part}.{name}", parameter.detach())
            container.to("meta")  # the store alone holds weights


def _initialise_lengths(module: Any, path: str, store: HostStore, weight: str) -> None:
    """Writes what DoRA's magnitude vector of ``module`` starts from: lengths in ``weight``. A and B are real."""
    name, layer = f"{path}.lora_magnitude_vector.{ADAPTER}.weight", module.lora_magnitude_vector[ADAPTER]
    base = module.get_base_layer()
    meta, lengths = base.weight, layer.weight
    base.weight = torch.nn.Parameter(store.tensor(weight).float(), requires_grad=False)
    module.lora_variant[ADAPTER].init(module, adapter_name=ADAPTER)
    store.write(name, module.lora_magnitude_vector[ADAPTER].weight.detach())
    base.weight, layer.weight = meta, lengths
    module.lora_magnitude_vector[ADAPTER] = layer


def adapts_parameters(module: torch.nn.Module) -> bool:
    """Whether ``module`` has adapters of bare parameters (fused experts), which peft registers with torch."""
    return any(is_parameter_adapter(child) for child in module.modules())


def plain_name(name: str) -> str:
    """The name that a base weight, or a module trained whole, has in the model without adapters."""
    return name.replace(".base_layer", "").replace(_WHOLE, "")


def learns_faster(name: str, num_dimensions: int) -> bool:
    """Whether LoRA+ (Hayou et al., arXiv 2402.12354) gives a trained parameter its higher learning rate.

    As in peft: the factor that starts at zero, and vectors. Factors of embeddings keep the usual rate.
    """
    return ".lora_B." in name or num_dimensions == 1


def names_in_adapter(layout: LayerLayout) -> list[str]:
    """The tensors of a layer that an adapter's folder holds: trained ones, buffers of what is trained whole."""
    return [b.name for b in layout.bindings if b.grad_offset is not None or f"{_WHOLE}." in b.name]


def save_lora(peft_model: Any, store: HostStore, folder: Path) -> None:
    """Writes adapter_model.safetensors and adapter_config.json into ``folder``."""
    save_adapter(peft_model, WholeTensors(store).named(names_in_adapter), folder)


def save_adapter(peft_model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes ``tensors``, all of ``names_in_adapter`` of every layer, as a folder that peft loads."""
    state = {_PREFIX + name: tensor for name, tensor in tensors.items()}
    peft_model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)


def names_in_file(peft_model: Any, layouts: list[LayerLayout]) -> dict[str, str]:
    """For each of ``names_in_adapter`` of all layers, its name in adapter_model.safetensors."""
    from peft import get_peft_model_state_dict

    names = [name for layout in layouts for name in names_in_adapter(layout)]
    marked = {_PREFIX + name: torch.empty(0) for name in names}
    found = {id(tensor): name.removeprefix(_PREFIX) for name, tensor in marked.items()}
    kept = get_peft_model_state_dict(peft_model, state_dict=marked, save_embedding_layers=False)
    return {found[id(tensor)]: key for key, tensor in kept.items()}
