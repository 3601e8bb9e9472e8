"""The tensors of a GGUF under transformers' names, each turned into numbers when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mergekit.io.lazy_tensor_loader import ShardedTensorIndex, ShardInfo
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.model.gguf.config import family_of, read_config
from rotation_merge.model.gguf.file import FLOATS, Entry, GgufFile, damage_named, open_gguf
from rotation_merge.model.gguf.layout import FREQUENCIES, LONG, SHORT, Family, read_layout
from rotation_merge.model.gguf.place import gguf_files


@dataclass(frozen=True)
class GgufTensors:
    """The tensors of a GGUF, by transformers' names.

    Attributes:
        config: as transformers has it.
        entries: the bytes of each tensor, and their layout.
    """

    gguf: GgufFile
    config: Mapping[str, Any]
    entries: Mapping[str, tuple[Entry, str]]

    def __getitem__(self, name: str) -> Tensor:
        entry, layout = self.entries[name]
        return read_layout(layout, entry.read(), self.config).contiguous()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        empty = {name: torch.empty(entry.shape, device="meta") for name, (entry, _) in self.entries.items()}
        with damage_named(self.gguf.paths[0]):  # such as heads that do not divide the rows
            return {name: tuple(read_layout(self.entries[name][1], x, self.config).shape) for name, x in empty.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: entry.dtype for name, (entry, _) in self.entries.items()}


_latest: dict[str, GgufTensors] = {}


def gguf_tensors(path: str) -> GgufTensors:
    """The tensors of a GGUF, cached until its files change.

    Args:
        path: any one of its files.

    Raises:
        CheckpointError: it is damaged, or holds tensors that its family does not know.
    """
    gguf = open_gguf(path)
    known = _latest.get(path)
    if known is None or known.gguf is not gguf:
        with damage_named(path):
            family = family_of(gguf)
            config = read_config(gguf, family)
            known = _latest[path] = GgufTensors(gguf, config, _entries(gguf, family, config))
    return known


def _entries(gguf: GgufFile, family: Family, config: Mapping[str, Any]) -> dict[str, tuple[Entry, str]]:
    experts = gguf.value("expert_count") or 0
    names = {name for name in gguf.entries if name not in (FREQUENCIES, LONG, SHORT)}
    if config["tie_word_embeddings"]:
        names.discard("output.weight")
    entries = dict[str, tuple[Entry, str]]()
    used = set[str]()
    for stem, place in family.places(gguf.value("block_count"), experts):
        for end in (".weight", ".bias"):
            name = place.stem + end
            if name in names:
                used.add(name)
                entry = gguf.entries[name]
                entries[stem + end] = entry if place.expert is None else entry.part(place.expert), place.layout
    if unknown := sorted(names - used):
        problem = f"tensor '{unknown[0]}' has no place in a {family.class_name}"
        raise CheckpointError(problem, where=gguf.paths[0], remedy="take the model in safetensors")
    return entries


class GgufLoader:
    """Reads like mergekit's `LazyTensorLoader`, out of a GGUF."""

    lazy_unpickle = False

    def __init__(self, folder: str) -> None:
        """Open the GGUF file behind a folder.

        Args:
            folder: that was made of the file (`model/gguf/place.py`).
        """
        self.tensors = gguf_tensors(gguf_files(folder)[0])
        first, names = self.tensors.gguf.paths[0], list(self.tensors.entries)
        self.index = ShardedTensorIndex(folder, False, dict.fromkeys(names, first), [ShardInfo(first, names)])

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: Collection[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        if key not in self.index.tensor_paths:
            key = next((alias for alias in aliases or () if alias in self.index.tensor_paths), key)
        if key not in self.index.tensor_paths:
            if raise_on_missing:
                raise KeyError(key)
            return None
        return self.tensors[key].to(device)

    def flush(self) -> None:
        """Do nothing, because no tensor is cached."""


def quantised(folder: str) -> str:
    """Describe the quantisation of the weights of a folder made of a GGUF; empty for other folders."""
    paths = gguf_files(folder)
    if not paths:
        return ""
    kinds = open_gguf(paths[0]).kinds
    words = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    file = os.path.basename(paths[0])
    if set(kinds) <= set(FLOATS):
        return f"was read from {file}, whose tensors are {words}"
    return f"was read from {file}, whose weights were quantised (tensors: {words}); they were read as float32"
