"""Stores hidden states between layers: in memory, or in files."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rotation_merge.errors import RotationMergeError, SpaceError, short
from rotation_merge.files.scratch import Scratch

SPILL = "name a folder for 'spill' that has more space, or give fewer samples"
"""What a recipe can do where hidden states find no space."""


class Store:
    """Tensors by key, off the accelerator.

    Args:
        folder: they are written to a new folder inside of it, which goes with the store; None: kept in memory.
        remedy: what there is to do where that has no space.
    """

    def __init__(self, folder: str | None = None, remedy: str = SPILL) -> None:
        self._remedy = remedy
        self._held: dict[str, list[Tensor]] = {}
        self._files: dict[str, str] = {}
        self._count = 0
        self._scratch = None if folder is None else _scratch(folder)
        self.folder = None if self._scratch is None else self._scratch.path

    def put(self, key: str, tensors: Sequence[Tensor], owned: bool = False) -> None:
        """Store tensors under a key; earlier ones are replaced.

        Args:
            owned: nobody else has them, so that they need not be copied.
        """
        stored = [tensor.detach().to("cpu", copy=not owned).contiguous() for tensor in tensors]
        if self.folder is None:
            self._held[key] = stored
            return
        if key not in self._files:
            self._count += 1
            self._files[key] = os.path.join(self.folder, f"{self._count}.safetensors")
        try:
            save_file({str(i): tensor for i, tensor in enumerate(stored)}, self._files[key])
        except (SafetensorError, OSError) as error:
            problem = f"hidden states cannot be written ({short(error)})"
            raise SpaceError(problem, where=os.path.dirname(self.folder), remedy=self._remedy) from error

    def get(self, key: str, device: torch.device | str = "cpu") -> list[Tensor]:
        """The tensors of a key."""
        if self.folder is None:
            return [tensor.to(device) for tensor in self._held[key]]
        tensors = load_file(self._files[key])
        return [tensors[str(i)].to(device) for i in range(len(tensors))]

    def __contains__(self, key: object) -> bool:
        return key in self._held or key in self._files

    def drop(self, key: str) -> None:
        """Forget a key."""
        self._held.pop(key, None)
        if key in self._files:
            os.remove(self._files.pop(key))

    def clear(self) -> None:
        """Forget everything; more may come."""
        for key in [*self._held, *self._files]:
            self.drop(key)

    def close(self) -> None:
        """Forget everything, for good."""
        self._held.clear()
        self._files.clear()
        if self._scratch is not None:
            self._scratch.close()


class BatchStore:
    """Named tensors of each batch in a store, which can be dropped one by one."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.store, self.prefix = store, prefix
        self._names: dict[int, list[str]] = {}

    def put(self, batch: int, known: Mapping[str, Tensor]) -> None:
        """Store a batch's tensors; earlier ones are replaced."""
        self.drop(batch, set(self._names.get(batch, [])) - known.keys())
        self.add(batch, known)

    def add(self, batch: int, known: Mapping[str, Tensor]) -> None:
        """Add tensors to a batch."""
        names = self._names.setdefault(batch, [])
        names += [name for name in known if name not in names]
        for name, tensor in known.items():
            self.store.put(self._key(batch, name), [tensor], owned=True)

    def get(self, batch: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The tensors of a batch."""
        return {name: self.store.get(self._key(batch, name), device)[0] for name in self._names.get(batch, [])}

    def keep(self, keep_names: Collection[str]) -> None:
        """Forget all but these names."""
        for batch, names in self._names.items():
            self.drop(batch, set(names) - set(keep_names))

    def drop(self, batch: int, names: Collection[str]) -> None:
        """Drop some tensors of a batch."""
        for name in names:
            self.store.drop(self._key(batch, name))
            self._names[batch].remove(name)

    def _key(self, batch: int, name: str) -> str:
        return f"{self.prefix}:{batch}:{name}"


def _scratch(parent: str) -> Scratch:
    try:
        return Scratch(parent)
    except OSError as error:
        raise RotationMergeError(
            f"cannot be written to ({short(error)})", where=parent, remedy="name a folder for 'spill' that can"
        ) from error
