"""A model with an adapter, read by mergekit's interface."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

from torch import Tensor

from rotation_merge.model.tensors import Tensors


class AdaptedLoader:
    """Reads like mergekit's `LazyTensorLoader`."""

    def __init__(self, base: Any, merged: Callable[[], Tensors]) -> None:
        """Wrap the base model's loader; `merged` is called when the first tensor is read."""
        self.base, self.index, self._merged = base, base.index, merged

    @cached_property
    def tensors(self) -> Tensors:
        return self._merged()

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: Collection[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        if key not in self.index.tensor_paths:
            key = next((alias for alias in aliases or () if alias in self.index.tensor_paths), key)
        if key not in self.index.tensor_paths:
            missing: Tensor | None = self.base.get_tensor(key, device, None, raise_on_missing)
            return missing
        return self.tensors[key].to(device)

    def flush(self) -> None:
        self.base.flush()
