"""The order in which late updates write layers, for the store and for the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def backward_order(owners: Sequence[Iterable[int]]) -> list[int]:
    """Layers from the last to the first, those that own what a layer borrows (``owners`` of each) before it.

    That in which late updates are made: HostStore.update_order.
    """
    order: dict[int, None] = {}
    for layer in reversed(range(len(owners))):
        order |= dict.fromkeys((*owners[layer], layer))
    return list(order)
