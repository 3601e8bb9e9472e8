"""Values that wait between forwards, such as hidden states: in memory, or in a folder, a file each."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils import _pytree

from rotation_merge.errors import RotationMergeError, SpaceError, short
from rotation_merge.files import TemporaryFolder

SPILL = "free some space, or name a folder that has more in TMPDIR"
"""Remedy in a recipe if hidden states do not fit."""


class StoredValue:
    """A value with its tensors off the accelerator; its file goes with it."""

    def __init__(self, value: Any, owned: bool, path: Path | None) -> None:
        leaves, self._form = _pytree.tree_flatten(value)
        tensors = {str(i): x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        stored = {key: x.detach().to("cpu", copy=not owned).contiguous() for key, x in tensors.items()}
        self._leaves = [None if isinstance(x, Tensor) else x for x in leaves]
        self._tensors, self._path = stored if path is None else {}, path
        if path is not None:
            weakref.finalize(self, path.unlink, missing_ok=True)
            save_file(stored, path)

    def get(self, device: torch.device | str = "cpu") -> Any:
        """The value, with its tensors on a device."""
        tensors = self._tensors if self._path is None else load_file(self._path)
        leaves = [tensors[str(i)].to(device) if str(i) in tensors else x for i, x in enumerate(self._leaves)]
        return _pytree.tree_unflatten(leaves, self._form)


class StateStore:
    """Where values wait: tensors, lists and mappings of them, outputs of modules.

    Args:
        folder: tensors are written to a new folder inside of it, which goes with the store; None: kept in memory.
        remedy: for a full disk.

    Raises:
        RotationMergeError: the folder cannot be written to.
    """

    def __init__(self, folder: str | None = None, remedy: str = SPILL) -> None:
        self._remedy, self._numbers = remedy, count()
        try:
            self._scratch = None if folder is None else TemporaryFolder(folder)
        except OSError as error:
            problem = f"cannot be written to ({short(error)})"
            raise RotationMergeError(problem, where=folder, remedy="name another folder in TMPDIR") from error

    def put(self, value: Any, owned: bool = False) -> StoredValue:
        """Store a value for as long as somebody holds the result.

        Args:
            owned: nobody else has its tensors, so that they need not be copied.
        """
        if self._scratch is None:
            return StoredValue(value, owned, None)
        path = Path(self._scratch.path, f"{next(self._numbers)}.safetensors")
        try:
            return StoredValue(value, owned, path)
        except (SafetensorError, OSError) as error:
            problem, where = f"hidden states cannot be written ({short(error)})", str(path.parent.parent)
            raise SpaceError(problem, where=where, remedy=self._remedy) from error

    def put_each(self, values: Mapping[str, Tensor]) -> dict[str, StoredValue]:
        """Store tensors that nobody else has, one by one."""
        return {name: self.put(value, owned=True) for name, value in values.items()}

    def close(self) -> None:
        """Remove the folder."""
        if self._scratch is not None:
            self._scratch.close()
