"""Writes safetensors checkpoints that share most tensors with another one, whose bytes are copied."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from safetensors.torch import save
from torch import Tensor

from rotation_merge.model.headers import safetensors_entries, safetensors_in

CHUNK = 1 << 20
"""Bytes that are copied at once."""

INDEX = "model.safetensors.index.json"


@dataclass
class Spliced:
    """Writes a checkpoint that has tensors of another one, in files of the same names, and some of its own, which stand
    in the last file. Takes the place of mergekit's writer.

    Attributes:
        source: the folder of the other one.
        names: which of its tensors.
        out: the folder to write to.
    """

    source: str
    names: Collection[str]
    out: str
    _own: dict[str, Tensor] = field(default_factory=dict, init=False)

    def save_tensor(self, name: str, tensor: Tensor, clone: bool = False) -> None:
        self._own[name] = tensor.contiguous().clone() if clone else tensor.contiguous()

    def finalize(self) -> None:
        """Write everything."""
        files = list(safetensors_in(self.source) or {})
        places, total = dict[str, str](), 0
        for name in files:
            written, size = self._file(name, self._own if name == files[-1] else {})
            places.update(dict.fromkeys(written, name))
            total += size
        if len(files) > 1:
            with open(os.path.join(self.out, INDEX), "w", encoding="utf-8") as file:
                json.dump({"metadata": {"total_size": total}, "weight_map": places}, file, indent=2)

    def _file(self, name: str, tensors: dict[str, Tensor]) -> tuple[list[str], int]:
        """Write one file; gives the names of its tensors, and how many bytes they have."""
        path = os.path.join(self.source, name)
        (entries, start), names = safetensors_entries(path), set(self.names)
        data = save(tensors)
        begin = 8 + struct.unpack("<Q", data[:8])[0]
        new_entries = json.loads(data[8:begin])
        pieces = [_Piece(key, entry, start) for key, entry in entries.items() if key in names]
        pieces += [_Piece(key, entry, begin, data) for key, entry in new_entries.items()]
        pieces.sort(key=lambda piece: (-piece.width, piece.data is not None, piece.begin))
        head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for piece in pieces:
            head[piece.name] = {**piece.entry, "data_offsets": [end, end + piece.size]}
            end += piece.size
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "rb") as source, open(os.path.join(self.out, name), "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for piece in pieces:
                piece.copy(source, out)
        return [piece.name for piece in pieces], end


@dataclass(frozen=True)
class _Piece:
    """The bytes of a tensor: in a file, or in memory (`data`), whose tensors begin at `start`."""

    name: str
    entry: dict[str, Any]
    start: int
    data: bytes | None = None

    @property
    def begin(self) -> int:
        return self.start + int(self.entry["data_offsets"][0])

    @property
    def size(self) -> int:
        first, last = self.entry["data_offsets"]
        return int(last - first)

    @property
    def width(self) -> int:
        """Bytes of an element: the widest come first, so that each tensor begins at a multiple of its own."""
        return self.size // max(1, math.prod(self.entry["shape"]))

    def copy(self, source: BinaryIO, out: BinaryIO) -> None:
        if self.data is not None:
            out.write(self.data[self.begin : self.begin + self.size])
            return
        source.seek(self.begin)
        remaining = self.size
        while remaining:
            remaining -= out.write(source.read(min(remaining, CHUNK)))
