"""Tensors by name, with shapes and storage types known and nothing read before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError

KEPT = 1 << 26
"""Bytes of a model that stay in memory where it is read again and again."""

Value = TypeVar("Value")


class Tensors(Mapping[str, Tensor]):
    """A lazy, read-only mapping from names to tensors.

    Attributes:
        shapes: of every tensor, by name.
        dtypes: that they are stored in; a computed tensor may come in a wider one.
        read: gives one tensor; called each time that one is asked for.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        read: Callable[[str], Tensor],
    ) -> None:
        self.shapes, self.dtypes, self.read = shapes, dtypes, read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    __eq__, __hash__ = object.__eq__, object.__hash__  # a mapping would compare all tensors

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Tensors:
        """The same with every tensor changed when it is read; `change` takes its name and the tensor."""
        return Tensors(self.shapes, self.dtypes, lambda name: change(name, self.read(name)))

    def renamed(self, names: Mapping[str, str]) -> Tensors:
        """Tensors under other names.

        Args:
            names: by new name the present one; tensors that it does not list are left out, as are absent ones.
        """
        present = {new: old for new, old in names.items() if old in self.shapes}
        return Tensors(
            {new: self.shapes[old] for new, old in present.items()},
            {new: self.dtypes[old] for new, old in present.items()},
            lambda name: self.read(present[name]),
        )

    def only(self, names: Collection[str]) -> Tensors:
        """Those of some names, in this order."""
        return self.renamed({name: name for name in names})

    def replaced(self, others: Mapping[str, Tensor]) -> Tensors:
        """The same with some tensors replaced, or added."""
        further = others if isinstance(others, Tensors) else in_memory(others)
        return Tensors(
            {**self.shapes, **further.shapes},
            {**self.dtypes, **further.dtypes},
            lambda name: further.read(name) if name in further else self.read(name),
        )

    def cached(self, room: int = KEPT) -> Tensors:
        """The same with the tensors that were read kept in memory, up to a limit in bytes."""
        kept: dict[str, Tensor] = {}
        free = [room]

        def read(name: str) -> Tensor:
            if name in kept:
                return kept[name]
            tensor = self.read(name)
            size = tensor.untyped_storage().nbytes()  # of all experts, where it is one of them
            if size <= free[0]:
                free[0] -= size
                kept[name] = tensor
            return tensor

        return Tensors(self.shapes, self.dtypes, read)


def in_memory(state: Mapping[str, Tensor], model: str = "") -> Tensors:
    """Tensors of a state dict.

    Args:
        model: its name, for the error of a tensor without numbers (device 'meta').
    """

    def read(name: str) -> Tensor:
        tensor = state[name]
        if tensor.is_meta and type(tensor) in (Tensor, torch.nn.Parameter):  # a subclass may hold its numbers elsewhere
            problem, remedy = f"tensor '{name}' has no numbers (device 'meta')", "load its weights, or give its folder"
            raise CheckpointError(problem, where=model or None, remedy=remedy)
        return tensor

    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return Tensors(shapes, {name: tensor.dtype for name, tensor in state.items()}, read)
