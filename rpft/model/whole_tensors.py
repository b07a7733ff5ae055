"""The host store's tensors by the names that the model has for them, in whatever slices they lie."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rpft.model.host_store import HostStore
from rpft.model.layout import LayerLayout, TensorSpec


class WholeTensors:
    """Reads and writes tensors that may lie in slices, none of them quantised."""

    def __init__(self, store: HostStore) -> None:
        self._store = store
        self._specs: dict[str, list[TensorSpec]] = {}
        for spec in (spec for layer in store.layers for spec, _ in layer.layout.own.values()):
            self._specs.setdefault(spec.whole_name, []).append(spec)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The working tensor: a view of its host buffer, or, of one in slices, a copy."""
        specs = self._specs[name]
        if specs[0].slice is None:
            return self._store.tensor(name)
        whole = torch.empty(specs[0].whole_shape, dtype=specs[0].dtype)
        for spec in specs:
            assert spec.slice is not None
            spec.slice.put_into(whole, self._store.tensor(spec.name))
        return whole

    def write(self, name: str, value: torch.Tensor) -> None:
        """Stores ``value``; see ``HostStore.write``."""
        for spec in self._specs[name]:
            self._store.write(spec.name, value if spec.slice is None else spec.slice.cut_out(value))

    def named(self, pick: Callable[[LayerLayout], list[str]]) -> dict[str, torch.Tensor]:
        """What ``pick`` names of each layer, by each name under which a layer uses it."""
        found: dict[str, torch.Tensor] = {}
        for layer in self._store.layers:
            weights, own = self._store.layer_weights(layer.layout.layer), layer.layout.own
            for name in pick(layer.layout):
                whole = own[name][0].whole_name if name in own else name  # what is borrowed is whole
                if whole not in found:
                    found[whole] = weights[name] if whole == name else self[whole]
        return found
