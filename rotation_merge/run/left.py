"""What layers leave for layers after them in mappings that they are given: Gemma 4's keys and values."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.utils import _pytree

from rotation_merge.run.store import Store


class Left:
    """Entries of mappings, kept where hidden states are."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._before: dict[str, dict[Any, Any]] = {}
        self._forms: dict[str, Any] = {}

    def entered(self, given: Mapping[str, Any]) -> None:
        """A layer is about to run on these arguments."""
        self._before = {name: dict(one) for name, one in given.items() if isinstance(one, MutableMapping)}

    def keep(self, key: str, given: Mapping[str, Any]) -> None:
        """It has run: what it has put there is kept."""
        put = {
            name: {entry: x for entry, x in given[name].items() if before.get(entry) is not x}
            for name, before in self._before.items()
        }
        if any(put.values()):
            leaves, self._forms[key] = _pytree.tree_flatten(put)
            self.store.put(key, leaves)

    def put_back(self, key: str, given: Mapping[str, Any], device: torch.device) -> None:
        """It does not run again, and has put there what it did."""
        if key in self._forms:
            put = _pytree.tree_unflatten(self.store.get(key, device), self._forms[key])
            for name, entries in put.items():
                given[name].update(entries)
