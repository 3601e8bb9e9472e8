"""Fingerprints of models, taken while their tensors are read for something else."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rotation_merge.model.tensors import TensorSource

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
