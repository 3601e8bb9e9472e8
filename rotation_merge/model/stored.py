"""A checkpoint's tensors as its files have them."""

from __future__ import annotations

from threading import Lock
from typing import Any, Protocol

from torch import Tensor

_UNPICKLING = Lock()
"""Held by whoever unpickles lazily: mergekit has all of torch read otherwise meanwhile, and two threads at once would
leave it so."""


def in_turn(loader: Any) -> Any:
    """A loader of mergekit's that reads when no other does, where it unpickles lazily."""
    if getattr(loader, "lazy_unpickle", False):
        loader.lock = _UNPICKLING
    return loader


class Opened(Protocol):
    """What reads them (`models.Model`)."""

    @property
    def loader(self) -> Any: ...


class CheckpointTensors:
    """The tensors of a checkpoint as its files (and an adapter) have them, read when asked for by name."""

    def __init__(self, model: Opened) -> None:
        self.model = model

    def __contains__(self, name: object) -> bool:
        return name in self.model.loader.index.tensor_paths

    def __getitem__(self, name: str, /) -> Tensor:
        tensor: Tensor = self.model.loader.get_tensor(name)
        return tensor
