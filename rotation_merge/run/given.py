"""Arguments of a layer on each batch, with which it can be run again by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from rotation_merge.run.store import Store

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Place = tuple[str, int]
"""A tensor in the store: its key, and which of those it holds."""

PLAIN = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)
"""What is kept; whatever else a layer is given may remember what was done to it."""


class LayerArguments:
    """The arguments of one layer on each batch, kept in the store of hidden states.

    Attributes:
        alone: whether the layer can be run by itself: it is entered once in a forward, is given nothing but tensors and
            plain values, and leaves them as they are.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self.store, self.prefix = store, prefix
        self.alone = False
        self._looks: list[list[tuple[Tensor, int]]] | None = None
        self._kept: dict[int, tuple[Any, list[Place | None], list[Any]]] = {}

    def look(self) -> None:
        """Watch the next forward to learn whether the layer can be run by itself."""
        self.clear()
        self._looks = []

    def begins(self) -> None:
        """A forward begins."""
        self._looks = None if self._looks is None else []

    def looked(self) -> None:
        """Stop watching."""
        looks, self._looks = self._looks or [], None
        unchanged = all(tensor._version == version for look in looks for tensor, version in look)
        self.alone = self.store.folder is None and len(looks) == 1 and unchanged

    def entered(self, batch: int, arguments: Arguments, known: Mapping[int, Place]) -> None:
        """The layer is about to run in a forward.

        Args:
            known: by the id of a tensor, where the store has it.
        """
        if self._looks is None and (not self.alone or batch in self._kept):
            return
        leaves, form = _pytree.tree_flatten(arguments)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        plain = all(isinstance(x, PLAIN) for x in leaves)
        if self._looks is not None:
            self._looks += [[(x, x._version) for x in tensors]] if plain else [[], []]
            return
        new_tensors = [x for x in tensors if id(x) not in known]
        if not plain or not tensors or sum(x.numel() for x in new_tensors[1:]) > tensors[0].numel():
            return  # more than the hidden states themselves: computed anew
        self.store.put(self._key(batch), new_tensors, owned=True)
        places = [known.get(id(x)) if isinstance(x, Tensor) else None for x in leaves]
        self._kept[batch] = (form, places, [_OWN if isinstance(x, Tensor) else x for x in leaves])

    def get(self, batch: int, device: torch.device) -> Arguments | None:
        """The layer's arguments on a batch; None if unknown."""
        if batch not in self._kept:
            return None
        form, places, still = self._kept[batch]
        new_tensors = iter(self.store.get(self._key(batch), device))
        leaves = [
            self.store.get(place[0], device)[place[1]] if place is not None else next(new_tensors) if x is _OWN else x
            for place, x in zip(places, still, strict=True)
        ]
        arguments: Arguments = _pytree.tree_unflatten(leaves, form)
        return arguments

    def drop(self, batch: int) -> None:
        """Forget the arguments of a batch."""
        if self._kept.pop(batch, None) is not None:
            self.store.drop(self._key(batch))

    def clear(self) -> None:
        """Forget everything, for the next layer."""
        for batch in list(self._kept):
            self.drop(batch)
        self.alone = False

    def _key(self, batch: int) -> str:
        return f"{self.prefix}:given:{batch}"


_OWN = object()
"""Stands for a tensor that nobody else keeps."""
