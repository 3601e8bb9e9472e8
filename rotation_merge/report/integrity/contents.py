"""The content of a checkpoint folder from its headers and small files; damage is kept as data."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rotation_merge.errors import CheckpointError, short
from rotation_merge.model.headers import ADAPTER_CONFIG, header

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
STEMS = ("model.safetensors", "pytorch_model.bin")
"""Weight files, or with `.index.json` indices of them."""

SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file: the file's name, the dtype (as torch calls it, or safetensors' code), the shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class Contents:
    """A checkpoint folder, read when asked for and once.

    Attributes:
        damaged: reading errors by file; complete once the file has been read.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.damaged: dict[str, str] = {}
        self._json: dict[str, Any] = {}

    @cached_property
    def names(self) -> frozenset[str]:
        """Files of the folder, those of its folders too, by their paths in it."""
        paths = (
            os.path.relpath(os.path.join(place, name), self.folder)
            for place, inner, names in os.walk(self.folder)
            if _keep_visible(inner)
            for name in names
        )
        return frozenset(path.replace(os.sep, "/") for path in paths)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def text(self, name: str) -> str | None:
        """A text file; None if it is missing or not text."""
        if name not in self.names:
            return None
        try:
            with open(self.path(name), encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError) as error:
            self.damaged[name] = short(error)
            return None

    def json(self, name: str) -> Any:
        """A JSON file; None if it is missing or damaged."""
        if name not in self._json:
            text = self.text(name)
            try:
                self._json[name] = None if text is None else json.loads(text)
            except (ValueError, RecursionError) as error:
                self.damaged[name] = short(error)
                self._json[name] = None
        return self._json[name]

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object; empty where the file is not there or holds something else."""
        content = self.json(name)
        if content is not None and not isinstance(content, dict):
            self.damaged[name] = "does not hold a JSON object"
        return content if isinstance(content, dict) else {}

    @property
    def config(self) -> dict[str, Any]:
        return self.mapping(CONFIG)

    @property
    def is_adapter(self) -> bool:
        return ADAPTER_CONFIG in self.names and CONFIG not in self.names

    @cached_property
    def index(self) -> str | None:
        """The index of shards that is read."""
        return next((f"{stem}.index.json" for stem in STEMS if f"{stem}.index.json" in self.names), None)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Shards by tensor names, from the index; empty if it is absent or damaged."""
        if self.index is None:
            return {}
        weight_map = self.mapping(self.index).get("weight_map")
        places = list(weight_map.values()) if isinstance(weight_map, dict) else []
        inside = all(isinstance(s, str) and not os.path.isabs(s) and ".." not in re.split(r"[/\\]", s) for s in places)
        if not inside or not isinstance(weight_map, dict) or not weight_map:
            self.damaged.setdefault(self.index, "has no weight_map of names and files of this folder")
            return {}
        return dict(weight_map)

    @cached_property
    def shards(self) -> list[str]:
        """Weight files with shard names, whether or not the index has them."""
        return sorted(name for name in self.names if SHARD.fullmatch(name))

    @cached_property
    def weight_files(self) -> list[str]:
        """The weight files that are read: those of the index, else the single one, else all shards."""
        if self.weight_map:
            return sorted(set(self.weight_map.values()) & self.names)
        return [stem for stem in STEMS if stem in self.names][:1] or self.shards

    @cached_property
    def by_file(self) -> dict[str, dict[str, StoredTensor]]:
        """The tensors of each weight file that can be read, by name."""
        return {name: tensors for name in self.weight_files if (tensors := self.header(name)) is not None}

    def header(self, name: str) -> dict[str, StoredTensor] | None:
        """The tensors of a weight file; None if it is damaged."""
        path = self.path(name)
        try:
            known = header(path)
        except CheckpointError as error:
            self.damaged[name] = error.what
            return None
        return {tensor: StoredTensor(name, known.kinds[tensor], shape) for tensor, shape in known.shapes.items()}

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors of the weight files that are read; of one in two files, the later."""
        return {name: tensor for tensors in self.by_file.values() for name, tensor in tensors.items()}

    @property
    def whole_files(self) -> bool:
        """Whether every weight file that is named could be read."""
        named = set(self.weight_map.values()) or set(self.weight_files)
        return bool(named) and named == self.by_file.keys()


def _keep_visible(folders: list[str]) -> bool:
    """Leave out hidden folders, such as caches of downloads."""
    folders[:] = [name for name in folders if not name.startswith(".")]
    return True
