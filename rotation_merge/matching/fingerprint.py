"""Fingerprints: which weights were these? Taken in passing, while a model's tensors are read for something else."""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotation_merge.architectures.model import Architecture
from rotation_merge.matching.state import TensorSource

_LANES = 4096
_POINT = np.uint64(0x9E3779B97F4A7C15)  # odd: no step loses a bit
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")


class Fingerprint:
    """The fingerprint of one model, put together from its tensors in whatever order they come.

    A checksum of every tensor's bytes, then a hash over the config and the names, dtypes, shapes and sums of all
    tensors. It tells models apart at several gigabytes a second; it is no protection against forgery.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def add(self, name: str, tensor: Tensor) -> None:
        """Look at a tensor as it is stored; at each name once."""
        with self._lock:
            if name in self._tensors:
                return
            self._tensors[name] = ""
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._tensors[name] = f"{tensor.dtype} {tuple(tensor.shape)} {checksum(data):08x}"

    def complete(self, names: Iterable[str], source: TensorSource) -> None:
        """Read those of the tensors that have not come by."""
        for name in names:
            if name not in self._tensors and name in source:
                self.add(name, source[name])

    def hexdigest(self, config: Mapping[str, Any]) -> str:
        """Of the config and the tensors so far, 40 characters."""
        digest = hashlib.blake2b(digest_size=20)
        kept = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
        for name in sorted(self._tensors):
            digest.update(f"\n{name} {self._tensors[name]}".encode())
        return digest.hexdigest()


def checksum(data: NDArray[np.uint8]) -> int:
    """Of bytes, 32 bits: the CRC of every column of rows of 8-byte words, taken as a polynomial modulo 2^64 with the
    last word at power 0, and of the bytes after the last whole row."""
    whole = len(data) - len(data) % (8 * _LANES)
    state = np.zeros(_LANES, dtype="<u8")
    for row in data[:whole].view("<u8").reshape(-1, _LANES):
        state *= _POINT
        state += row
    return zlib.crc32(data[whole:].data, zlib.crc32(state.data))


class Watched:
    """A source whose tensors leave their mark as they are read."""

    def __init__(self, source: TensorSource, mark: Fingerprint) -> None:
        self.source, self.mark = source, mark

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        tensor = self.source[name]
        self.mark.add(name, tensor)
        return tensor


def fingerprint(architecture: Architecture, source: TensorSource, config: Mapping[str, Any]) -> str:
    """Of a model's config and of every tensor of its architecture."""
    mark = Fingerprint()
    mark.complete(architecture.named(), source)
    return mark.hexdigest(config)
