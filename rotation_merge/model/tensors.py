"""Tensors by name, shapes and storage types known, nothing read before it is asked for; and their fingerprints."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError

KEPT = 1 << 26
"""Bytes of a model that stay in memory where it is read again and again."""

Shapes = Mapping[str, tuple[int, ...]]
Dtypes = Mapping[str, torch.dtype]
"""Shapes and dtypes of tensors by name."""

TensorSource = Mapping[str, Tensor]
"""Tensors by name: lazy ones, a view, a state dict."""

Names = str | tuple[str, ...]
"""A tensor's name; or those of several of one shape, to be read as one: experts that are stored apart."""

Read = Callable[[Names], Tensor]
"""Gives one tensor; or several stacked, along a new first dimension."""


class Tensors(Mapping[str, Tensor]):
    """A lazy, read-only mapping from names to tensors.

    Attributes:
        shapes: of every tensor, by name.
        dtypes: that they are stored in; a computed tensor may come in a wider one.
        read: called each time that a tensor, or a stack of them, is asked for.
    """

    def __init__(self, shapes: Shapes, dtypes: Dtypes, read: Read) -> None:
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

    def map(
        self, change: Callable[[str, Tensor], Tensor], shapes: Shapes | None = None, dtypes: Dtypes | None = None
    ) -> Tensors:
        """The same with every tensor changed when it is read.

        Args:
            change: takes a tensor's name and the tensor.
            shapes, dtypes: of the changed tensors, where they are others.
        """

        def read(names: Names) -> Tensor:
            stored = self.read(names)
            if isinstance(names, str):
                return change(names, stored)
            pieces = stored.unbind(0)
            changed = [change(name, piece) for name, piece in zip(names, pieces, strict=True)]
            unchanged = all(after is before for after, before in zip(changed, pieces, strict=True))
            return stored if unchanged else torch.stack(changed)

        return Tensors(shapes or self.shapes, dtypes or self.dtypes, read)

    def on(self, device: torch.device | str) -> Tensors:
        """The same with tensors brought to a device when they are read."""
        return Tensors(self.shapes, self.dtypes, lambda names: self.read(names).to(device))

    def renamed(self, names: Mapping[str, str]) -> Tensors:
        """The same under other names as well.

        Args:
            names: by new name the present one; all other tensors keep theirs.
        """
        unchanged = {name: name for name in self.shapes if name not in names}
        return _picked({new: (self, old) for new, old in {**names, **unchanged}.items() if old in self.shapes})

    def only(self, names: Iterable[str]) -> Tensors:
        """Those of some names, in this order; names that are not here are left out."""
        return _picked({name: (self, name) for name in names if name in self.shapes})

    def replaced(self, replacements: Mapping[str, Tensor]) -> Tensors:
        """The same with some tensors replaced, or added."""
        further = as_tensors(replacements)
        return _picked({name: (source, name) for source in (self, further) for name in source.shapes})

    def cached(self, room: float = KEPT) -> Tensors:
        """The same with the tensors that were read kept in memory, up to a limit in bytes."""
        known: dict[Names, Tensor] = {}
        free = [room]

        def read(names: Names) -> Tensor:
            if names in known:
                return known[names]
            tensor = self.read(names)
            size = tensor.untyped_storage().nbytes()  # of all experts, where it is one of them
            if size <= free[0]:
                free[0] -= size
                known[names] = tensor
            return tensor

        return Tensors(self.shapes, self.dtypes, read)


def _picked(places: Mapping[str, tuple[Tensors, str]]) -> Tensors:
    """Tensors of several sources, by new name the source and its name of each."""

    def read(names: Names) -> Tensor:
        if isinstance(names, str):
            source, name = places[names]
            return source.read(name)
        source = places[names[0]][0]
        if any(places[name][0] is not source for name in names):
            return torch.stack([read(name) for name in names])
        return source.read(tuple(places[name][1] for name in names))

    shapes = {new: source.shapes[name] for new, (source, name) in places.items()}
    return Tensors(shapes, {new: source.dtypes[name] for new, (source, name) in places.items()}, read)


def by_name(read: Callable[[str], Tensor]) -> Read:
    """Reads several tensors one by one."""
    return lambda names: read(names) if isinstance(names, str) else torch.stack([read(name) for name in names])


def as_tensors(source: Mapping[str, Tensor], model: str = "") -> Tensors:
    """Any mapping of tensors as lazy ones: themselves, those of a view, or of a state dict.

    Args:
        model: name of the state dict's model, for the error of a tensor without numbers (device 'meta').
    """
    if isinstance(source, Tensors):
        tensors: Tensors = getattr(source, "tensors", source)
        return tensors  # of a view its own

    def read(name: str) -> Tensor:
        tensor = source[name]
        if tensor.is_meta and type(tensor) in (Tensor, torch.nn.Parameter):  # a subclass may hold its numbers elsewhere
            problem, remedy = f"tensor '{name}' has no numbers (device 'meta')", "load its weights, or give its folder"
            raise CheckpointError(problem, where=model or None, remedy=remedy)
        return tensor

    shapes = {name: tuple(tensor.shape) for name, tensor in source.items()}
    return Tensors(shapes, {name: tensor.dtype for name, tensor in source.items()}, by_name(read))


def are_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same values, perhaps in two types."""
    dtype = torch.promote_types(first.dtype, second.dtype)
    return torch.equal(first.to(dtype), second.to(dtype))


def mean_of(sources: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """The mean of tensors that all sources have, in float32 at least; equal sources give the same, bit for bit."""
    every = [as_tensors(source) for source in sources]

    def read(names: Names) -> Tensor:
        first = every[0].read(names)
        if not first.is_floating_point():
            return first
        start = first.to(torch.promote_types(first.dtype, torch.float32))
        total, apart = start.clone(), torch.empty_like(start)
        for tensors in every[1:]:
            total.add_(torch.sub(tensors.read(names).to(start), start, out=apart), alpha=1 / len(every))
        return total

    common = every[0].only(name for name in every[0] if all(name in tensors for tensors in every))
    return Tensors(common.shapes, common.dtypes, read)


_CONFIG_NOISE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")


def checksum(tensor: Tensor) -> str:
    """Dtype, shape and CRC-32 of a tensor's bytes, in words."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(data.data):08x}"


class Fingerprint(dict[str, str]):
    """The checksums of one model's tensors by name (see `checksum`), added in any order.

    A CRC-32 of every tensor's bytes, then a hash over the config and the names, dtypes, shapes and sums of all tensors.
    It tells models apart at a few gigabytes a second; it is no protection against forgery.
    """

    def add(self, name: str, tensor: Tensor) -> Tensor:
        """Add a stored tensor, and return it; each name counts once."""
        if name not in self:
            self[name] = checksum(tensor)
        return tensor

    def complete(self, names: Iterable[str], source: TensorSource) -> None:
        """Read the tensors that have not been added yet."""
        for name in names:
            if name not in self and name in source:
                self.add(name, source[name])

    def hexdigest(self, config: Mapping[str, Any]) -> str:
        """The digest of the config and the tensors so far, 40 characters."""
        digest = hashlib.blake2b(digest_size=20)
        compared = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
        digest.update(json.dumps(compared, sort_keys=True, default=str).encode())
        for name in sorted(self):
            digest.update(f"\n{name} {self[name]}".encode())
        return digest.hexdigest()
