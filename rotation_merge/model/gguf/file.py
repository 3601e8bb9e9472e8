"""A GGUF file: its metadata, the places of its tensors, and tensors as floating-point numbers.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package decodes the blocks of a type; the
file's header is read here, so that damage is reported in one line.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError, RotationMergeError, short

ENDING = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)


def has_ending(name: str) -> bool:
    """Whether a file is called as a GGUF is."""
    return name.lower().endswith(ENDING)


_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata values, as `struct` writes them."""
_FLOAT, _STRING, _ARRAY = 6, 8, 9

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Types whose numbers are stored as they are; those of all others come as float32."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        shape: as torch has it, the dimension that is contiguous in memory last.
        kind: name of its type, such as Q4_K.
        path, start, size: which bytes of which file it is.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    path: str
    start: int
    size: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor when read."""
        return FLOATS.get(self.kind, torch.float32)

    def bytes(self) -> np.ndarray:
        """The tensor's bytes in the file, mapped."""
        return np.memmap(self.path, np.uint8, "r", self.start, (self.size,))

    def part(self, index: int) -> Entry:
        """One of the tensors that are stored in sequence in it."""
        size = self.size // self.shape[0]
        return replace(self, shape=self.shape[1:], start=self.start + index * size, size=size)

    def read(self) -> Tensor:
        """Its numbers.

        Raises:
            CheckpointError: the `gguf` package cannot read its type.
        """
        import gguf

        data = self.bytes()
        if self.kind in FLOATS:
            return torch.frombuffer(bytearray(data), dtype=self.dtype).reshape(self.shape)
        rows = math.prod(self.shape[:-1])
        try:
            numbers = gguf.dequantize(data.reshape(rows, -1), gguf.GGMLQuantizationType[self.kind])
        except NotImplementedError:
            problem = f"tensor '{self.name}' is of type {self.kind}, which the gguf package cannot turn into numbers"
            raise CheckpointError(problem, where=self.path, remedy=OTHER_TYPE) from None
        return torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).reshape(self.shape)


OTHER_TYPE = "update gguf, or quantise the model again to another type"


@dataclass(frozen=True)
class GgufFile:
    """A model in GGUF: one file, or the files that it was split into.

    Attributes:
        paths: of all files, in their order.
        metadata: by key; of the first file.
        entries: by the name of the tensor in the file.
    """

    paths: tuple[str, ...]
    metadata: Mapping[str, Any]
    entries: Mapping[str, Entry]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def value(self, key: str, default: Any = None) -> Any:
        """A value that belongs to the architecture, such as `block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def kinds(self) -> dict[str, int]:
        """Number of tensors of each type, the most frequent first."""
        kinds = [entry.kind for entry in self.entries.values()]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds), key=lambda kind: (-kinds.count(kind), kind))}


def open_gguf(path: str) -> GgufFile:
    """The header of a GGUF file and of its split parts; cached until the files change.

    Args:
        path: any one of the files.

    Raises:
        CheckpointError: it is truncated, damaged, no GGUF, or one of its files is missing.
    """
    paths = split_files(path)
    if missing := next((file for file in paths if not os.path.isfile(file)), None):
        problem = f"is one of {len(paths)} files, but {os.path.basename(missing)} is missing"
        raise CheckpointError(problem, where=path, remedy="download it, too")
    stamps = tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in map(os.stat, paths))
    return _opened(paths, stamps)


def split_files(path: str) -> tuple[str, ...]:
    """All files of the model that a file is a part of, by its name (NAME-00001-of-00003.gguf)."""
    match = _SPLIT.fullmatch(os.path.basename(path))
    if match is None:
        return (path,)
    count, folder = int(match["count"]), os.path.dirname(path)
    names = (f"{match['stem']}-{number:05}-of-{count:05}{ENDING}" for number in range(1, count + 1))
    return tuple(os.path.join(folder, name) for name in names)


@lru_cache(maxsize=16)
def _opened(paths: tuple[str, ...], stamps: tuple[tuple[int, int, int], ...]) -> GgufFile:
    heads = [_head(path) for path in paths]
    metadata, entries = heads[0][0], dict[str, Entry]()
    for path, (_, tensors) in zip(paths, heads, strict=True):
        if twice := next((name for name in tensors if name in entries), None):
            problem = f"holds tensor '{twice}', which another of its files holds, too"
            raise CheckpointError(problem, where=path, remedy="the files do not belong together; download them again")
        entries.update(tensors)
    count = metadata.get("split.count", 1)
    if len(paths) == 1 and isinstance(count, int) and count > 1:
        problem = f"is one of {count} files, but its name does not say which"
        raise CheckpointError(problem, where=paths[0], remedy=f"name them NAME-00001-of-{count:05}.gguf, as they were")
    total = metadata.get("split.tensors.count", len(entries))
    if total != len(entries):
        problem = f"has {len(entries)} tensors in {len(paths)} files, but its header says {total}"
        raise CheckpointError(problem, where=paths[0], remedy="the files do not belong together; download them again")
    return GgufFile(paths, metadata, entries)


def _head(path: str) -> tuple[dict[str, Any], dict[str, Entry]]:
    try:
        with open(path, "rb") as file:
            if file.read(4) != MAGIC:
                raise CheckpointError("is not a GGUF file", where=path, remedy="download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Head(path, data).read()
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise _truncated(path, "in the middle of its head") from error
    except OSError as error:
        raise CheckpointError(f"cannot be read: {str(error.strerror).lower()}", where=path) from error


def _truncated(path: str, place: str) -> CheckpointError:
    size = os.path.getsize(path)
    return CheckpointError(f"is truncated or damaged: it ends {place} ({size} bytes)", where=path, remedy=AGAIN)


AGAIN = "download it again"


@contextmanager
def damage_named(path: str) -> Iterator[None]:
    """Within the block, whatever damaged metadata make the code or a library raise becomes one line.

    Raises:
        CheckpointError: names the file.
    """
    try:
        yield
    except (RotationMergeError, OSError):
        raise
    except Exception as error:  # the tokenizers package raises errors of many classes
        raise CheckpointError(f"its metadata are damaged ({short(error)})", where=path, remedy=AGAIN) from error


class _Head:
    """Reads a head from its beginning to its end."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 4

    def read(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        version = self.number("I")
        if version not in VERSIONS:
            swapped = struct.unpack(">I", struct.pack("<I", version))[0] in VERSIONS
            problem = (
                "is big-endian" if swapped else f"is of version {version}, known are {VERSIONS[0]} and {VERSIONS[1]}"
            )
            raise CheckpointError(problem, where=self.path, remedy="write it again with llama.cpp")
        tensors, values = self.number("Q"), self.number("Q")
        metadata = dict[str, Any]()
        for _ in range(values):
            key = self.text()
            metadata[key] = self.value(self.number("I"))
        places = [self.place() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        begin = -(-self.at // alignment) * alignment
        return metadata, {name: self.entry(name, shape, kind, begin + start) for name, shape, kind, start in places}

    def number(self, form: str) -> Any:
        value = struct.unpack_from(f"<{form}", self.data, self.at)[0]
        self.at += struct.calcsize(f"<{form}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        if self.at + length > len(self.data):
            raise IndexError
        encoded = self.data[self.at : self.at + length]
        self.at += length
        return encoded.decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if count > len(self.data):
                raise IndexError
            if inner not in _SCALARS:
                return [self.value(inner) for _ in range(count)]
            form = f"<{count}{_SCALARS[inner]}"
            value = list(struct.unpack_from(form, self.data, self.at))
            self.at += struct.calcsize(form)
            return value
        if kind not in _SCALARS:
            raise IndexError
        value = self.number(_SCALARS[kind])
        return float(str(np.float32(value))) if kind == _FLOAT else value  # 1e-05, not 9.999999747378752e-06

    def place(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text()
        dims = tuple(self.number("Q") for _ in range(self.number("I")))
        return name, dims[::-1], self.number("I"), self.number("Q")

    def entry(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Entry:
        import gguf

        try:
            known = gguf.GGMLQuantizationType(kind)
        except ValueError:
            problem = f"tensor '{name}' is of type {kind}, which the gguf package does not know"
            raise CheckpointError(problem, where=self.path, remedy=OTHER_TYPE) from None
        block, of_block = gguf.GGML_QUANT_SIZES[known]
        if shape and shape[-1] % block:
            problem = f"tensor '{name}' has rows of {shape[-1]}, which {known.name} cannot store"
            raise CheckpointError(problem, where=self.path, remedy=AGAIN)
        size = math.prod(shape) // block * of_block
        if start + size > len(self.data):
            raise _truncated(self.path, f"before tensor '{name}' does")
        return Entry(name, shape, known.name, self.path, start, size)
