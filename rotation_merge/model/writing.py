"""What is written beside the tensors of a model: config, tokenizer and other small files; sizes and storage types."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from mergekit.common import parse_kmb
from safetensors.torch import save
from torch import Tensor

from rotation_merge.errors import RotationMergeError, nearest
from rotation_merge.files.durable import write_json
from rotation_merge.model.headers import safetensors_entries, safetensors_in
from rotation_merge.model.output import write_files

KEPT = (".json", ".txt", ".model", ".jinja", ".vocab", ".tiktoken", ".bpe")
"""Endings of a checkpoint's small files that are taken along (tokenizer, preprocessor, generation settings)."""

TEMPLATES = "additional_chat_templates"
"""A checkpoint's folder of chat templates beside the usual one."""

OWN = ("config.json", "adapter_config.json", "rotation_merge.json")


@dataclass(frozen=True)
class StorageOptions:
    """Options of writing a model: the largest weight file, the dtype (None: unchanged), an untied head."""

    shard_size: int = 5_000_000_000
    dtype: str | None = None
    untie: bool = False


def parse_size(text: str) -> int:
    """A file size such as 500M or 5B.

    Raises:
        RotationMergeError: it is none.
    """
    try:
        size = parse_kmb(text)
    except (ValueError, IndexError) as error:
        raise RotationMergeError(f"'{text}' is not a size", remedy="write bytes, or 500M, or 5B") from error
    if size <= 0:
        raise RotationMergeError(f"'{text}' is not a size", remedy="it must be positive")
    return size


def check_dtype(name: str | None) -> None:
    """Refuse a dtype that weights cannot be stored in.

    Raises:
        RotationMergeError: names the nearest known one.
    """
    known = ("bfloat16", "float16", "float32", "float64")
    if name is not None and name not in known:
        raise RotationMergeError(f"there is no dtype '{name}'", remedy=nearest(name, known))


def stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor for storage: on the CPU, a floating one in a dtype (None: unchanged)."""
    return tensor.to("cpu", dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with an untied head, in nested configs, too."""
    parts = {
        name: {**part, "tie_word_embeddings": False}
        for name, part in config.items()
        if isinstance(part, dict) and "tie_word_embeddings" in part
    }
    return {**config, **parts, "tie_word_embeddings": False}


def small_names(folder: str) -> list[str]:
    """Small files of a checkpoint or adapter that belong to it whatever its weights (tokenizer, preprocessor)."""
    names = sorted(os.listdir(folder))
    if os.path.isdir(templates := os.path.join(folder, TEMPLATES)):
        names += [os.path.join(TEMPLATES, name) for name in sorted(os.listdir(templates))]
    return [
        name
        for name in names
        if os.path.isfile(os.path.join(folder, name))
        and name.endswith(KEPT)
        and name not in OWN
        and not name.endswith(".index.json")
    ]


def small_files(folder: str) -> dict[str, bytes]:
    """These files, by name."""
    contents = {}
    for name in small_names(folder):
        with open(os.path.join(folder, name), "rb") as file:
            contents[name] = file.read()
    return contents


def write_beside(source: str, out: str, storage: StorageOptions, changed: Mapping[str, Any] | None = None) -> None:
    """Config, tokenizer and other small files of a checkpoint, copied to where its weights have been written.

    Args:
        source: the checkpoint's folder.
        changed: entries of its config that are others.
    """
    write_files(out, small_files(source))
    with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
        config = {**json.load(file), **(changed or {})}
    if storage.dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = storage.dtype
    if storage.untie:
        config = untied(config)
    write_json(os.path.join(out, "config.json"), config)


CHUNK = 1 << 20
"""Bytes that are copied at once."""

INDEX = "model.safetensors.index.json"


@dataclass
class SplicedWriter:
    """Writes a checkpoint with the files of another one, and additional tensors in the last file.

    Takes the place of mergekit's writer.

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
        """Write one file; returns the names and bytes of its tensors."""
        path = os.path.join(self.source, name)
        (entries, start), names = safetensors_entries(path), set(self.names)
        data = save(tensors)
        begin = 8 + struct.unpack("<Q", data[:8])[0]
        new_entries = json.loads(data[8:begin])
        pieces = [_TensorBytes(key, entry, start) for key, entry in entries.items() if key in names]
        pieces += [_TensorBytes(key, entry, begin, data) for key, entry in new_entries.items()]
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
class _TensorBytes:
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
