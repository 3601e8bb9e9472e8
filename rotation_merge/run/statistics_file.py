"""Statistics as a file: written tensor by tensor, whole or not at all, and read tensor by tensor."""

from __future__ import annotations

import contextlib
import functools
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rotation_merge import files
from rotation_merge.errors import RotationMergeError, SpaceError, StatisticsError, no_space, short
from rotation_merge.files import Output, check_output
from rotation_merge.linalg.finite import all_finite

FORMAT = "rotation_merge.statistics.1"

NAME = "statistics.safetensors"
"""Name of the file beside a model."""

_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


@dataclass(frozen=True)
class Gram:
    """Second moments of a map's inputs.

    Attributes:
        matrix: of (x, 1), (..., n + 1, n + 1).
        count: rows that were seen, one number for each expert.
        split: whether x is a norm's normalised input, before gain and shift.
    """

    matrix: Tensor
    count: Tensor
    split: bool

    def to(self, device: str) -> Gram:
        """The same on a device."""
        return Gram(self.matrix.to(device), self.count, self.split)


@dataclass
class Statistics:
    """A statistics file, opened.

    Attributes:
        metadata: origin: model, fingerprint, family, data, samples, tokens, labels, versions.
        inputs: by tensor name, the name that the Gram of its inputs is stored under.
        split: names of Grams of norms' normalised inputs.
        uncalled: maps that never ran on the samples.
        read: gives one stored tensor.
    """

    path: str
    metadata: dict[str, Any]
    inputs: dict[str, str]
    split: frozenset[str]
    uncalled: frozenset[str]
    keys: frozenset[str]
    read: Callable[[str], Tensor] = field(repr=False)

    @classmethod
    def open(cls, path: Path | str) -> Statistics:
        """Read the head of a file.

        Raises:
            StatisticsError: it cannot be read, or is none.
        """
        try:
            file = safe_open(str(path), framework="pt")
            meta = file.metadata() or {}
            keys = frozenset(file.keys())
        except (OSError, SafetensorError) as error:
            raise StatisticsError(f"cannot be read ({short(error)})", where=str(path), remedy=ANEW) from error
        if meta.get("format") != FORMAT:
            raise StatisticsError("is not a statistics file of this version", where=str(path), remedy=ANEW)
        try:
            metadata, inputs = json.loads(meta["made"]), json.loads(meta["inputs"])
            split, uncalled = (frozenset(json.loads(meta[name])) for name in ("split", "uncalled"))
        except (KeyError, ValueError) as error:
            raise StatisticsError(f"its header is damaged ({short(error)})", where=str(path), remedy=ANEW) from error
        return cls(str(path), metadata, inputs, split, uncalled, keys, file.get_tensor)

    @classmethod
    def held(cls, tensors: Mapping[str, DeferredTensor], meta: Mapping[str, str], name: str) -> Statistics:
        """Statistics in memory.

        Args:
            meta: the head that the file would have.
            name: of the model.
        """
        split, uncalled = (frozenset(json.loads(meta[part])) for part in ("split", "uncalled"))
        metadata, inputs = json.loads(meta["made"]), json.loads(meta["inputs"])
        keys = frozenset(tensors)
        return cls(name, metadata, inputs, split, uncalled, keys, lambda key: tensors[key].load())

    def check(self, kind: str, fingerprint: str, model: str, remedy: str) -> None:
        """Refuse statistics of other weights, or without a kind of numbers.

        Args:
            fingerprint: of the model.

        Raises:
            StatisticsError: names their kinds, or their model.
        """
        kinds = self.metadata.get("kinds", ())
        if kind not in kinds:
            problem = f"'{self.path}' holds {', '.join(kinds) or 'nothing'}, the averaging needs {kind}"
            raise StatisticsError(problem, where=model, remedy=remedy)
        if self.metadata.get("fingerprint") != fingerprint:
            problem = f"'{self.path}' was measured on other weights than these ('{self.metadata.get('model')}')"
            raise StatisticsError(problem, where=model, remedy=remedy)

    def save(self, path: Path | str) -> None:
        """Write the file that `rotation-merge measure` writes, which recipes name under `statistics`.

        Raises:
            StatisticsError: it cannot be written; nothing is left behind.
            RotationMergeError: there is a file at that place that holds no statistics; it stays as it is.
        """
        check_output(Output(str(path), "path", wrote=holds_statistics, remedy="name another file, or move it away"))
        meta = {
            "made": json.dumps(self.metadata, sort_keys=True, default=str),
            "inputs": json.dumps(self.inputs, sort_keys=True),
            **{part: json.dumps(sorted(getattr(self, part))) for part in ("split", "uncalled")},
        }
        stored = {}
        for key in self.keys:
            tensor = self[key]
            stored[key] = DeferredTensor(tuple(tensor.shape), tensor.dtype, functools.partial(self.__getitem__, key))
        write_statistics(path, stored, meta)

    def __repr__(self) -> str:
        facts = self.metadata
        kinds = ", ".join(facts.get("kinds", ()))
        return f"Statistics({facts.get('model')}, {kinds}, {facts.get('samples')} samples of {facts.get('data')})"

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.keys))

    def __getitem__(self, key: str) -> Tensor:
        """One tensor; it must hold finite numbers.

        Raises:
            StatisticsError: it holds NaN or infinity, or cannot be read.
        """
        try:
            tensor = self.read(key)
        except (OSError, SafetensorError) as error:
            raise StatisticsError(f"'{key}' cannot be read ({short(error)})", where=self.path, remedy=ANEW) from error
        if not all_finite([tensor]):
            raise StatisticsError(f"'{key}' holds NaN or infinity", where=self.path, remedy=ANEW)
        return tensor

    def gram(self, name: str) -> Gram | None:
        """The Gram of a map's inputs; None if it has none."""
        key = self.inputs.get(name)
        if key is None or f"{key}.gram" not in self:
            return None
        return Gram(self[f"{key}.gram"], self[f"{key}.count"], key in self.split)


def holds_statistics(path: str) -> bool:
    """Whether a file holds statistics."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except (OSError, SafetensorError):
        return False


ANEW = "measure again with 'rotation-merge measure'"


@dataclass(frozen=True)
class DeferredTensor:
    """A tensor to write: its shape and dtype now, its values on demand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]


def write_statistics(
    path: Path | str, tensors: Mapping[str, DeferredTensor], meta: Mapping[str, str], label: Path | str | None = None
) -> None:
    """Write a safetensors file, one tensor in memory at a time; it takes its place when it is whole.

    Args:
        label: name for errors, if not its path.

    Raises:
        StatisticsError: it cannot be written, or a number is none; nothing is left behind.
    """
    head: dict[str, Any] = {"__metadata__": {"format": FORMAT, **meta}}
    begin = 0
    for key in sorted(tensors):
        stored = tensors[key]
        end = begin + torch.Size(stored.shape).numel() * stored.dtype.itemsize
        head[key] = {"dtype": _DTYPES[stored.dtype], "shape": list(stored.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(head, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key in sorted(tensors):
            tensor = tensors[key].load().to("cpu", tensors[key].dtype).contiguous()
            if not all_finite([tensor]):
                problem, remedy = (
                    f"'{key}' would hold NaN or infinity",
                    "look at the model's weights, and at the samples",
                )
                raise StatisticsError(problem, where=str(label or path), remedy=remedy)
            file.write(tensor.numpy().tobytes())


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Any]:
    """A temporary file that replaces another once it is complete and synced.

    Raises:
        StatisticsError: it cannot be written; nothing is left behind.
    """
    try:
        with files.replacing(path) as temporary, open(temporary, "wb") as file:
            yield file
    except OSError as error:
        raise write_error(path, error) from error


SPACE = "free some space (the same command continues), or give another place with --out"
"""Remedy for a full disk."""


def write_error(path: Path | str, error: OSError) -> RotationMergeError:
    """The error for a file that cannot be written."""
    problem = f"cannot be written ({(error.strerror or str(error)).lower()})"
    if no_space(error):
        return SpaceError(problem, where=str(path), remedy=SPACE)
    return StatisticsError(problem, where=str(path), remedy="give another place with --out")
