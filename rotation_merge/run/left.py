"""Keys and values that layers leave for later layers in shared mappings (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.utils import _pytree

from rotation_merge.run.store import Store


class SharedKVCache:
    """Entries that layers add to shared mappings, kept in the store of hidden states."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._before: dict[str, dict[Any, Any]] = {}
        self._forms: dict[str, Any] = {}

    def entered(self, arguments: Mapping[str, Any]) -> None:
        """A layer is about to run on these arguments."""
        self._before = {
            name: dict(mapping) for name, mapping in arguments.items() if isinstance(mapping, MutableMapping)
        }

    def keep(self, key: str, arguments: Mapping[str, Any]) -> None:
        """Store the entries that the layer has added."""
        put = {
            name: {entry: x for entry, x in arguments[name].items() if before.get(entry) is not x}
            for name, before in self._before.items()
        }
        if any(put.values()):
            leaves, self._forms[key] = _pytree.tree_flatten(put)
            self.store.put(key, leaves)

    def put_back(self, key: str, arguments: Mapping[str, Any], device: torch.device) -> None:
        """Restore a layer's entries without running it."""
        if key in self._forms:
            put = _pytree.tree_unflatten(self.store.get(key, device), self._forms[key])
            for name, entries in put.items():
                arguments[name].update(entries)
