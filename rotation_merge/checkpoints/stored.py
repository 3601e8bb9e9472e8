"""A checkpoint's tensors as its files have them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Opened(Protocol):
    """What reads them (`models.Model`)."""

    @property
    def loader(self) -> Any: ...


class Stored:
    """The tensors of a checkpoint as its files (and an adapter) have them, read when asked for by name."""

    def __init__(self, model: Opened) -> None:
        self.model = model

    def __contains__(self, name: object) -> bool:
        return name in self.model.loader.index.tensor_paths

    def __getitem__(self, name: str, /) -> Tensor:
        tensor: Tensor = self.model.loader.get_tensor(name)
        return tensor
