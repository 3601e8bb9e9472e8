"""One reading of a model's folder: config, index, headers and small files. Damage is kept as data."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rotation_merge.errors import CheckpointError, named, short
from rotation_merge.model.headers import ADAPTER_CONFIG, INDEX, WEIGHT_FILES, header, read_json, refuse_adapter

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"

SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")

AGAIN = "download or merge it again"
MEND = "rewrite it ('rotation-merge doctor --mend')"
SETS = "two sets of weights"
APART = "move away the files of the other model: transformers and mergekit would read different weights"

_COUNT = re.compile(r"(.*_)?(layers?|depth|experts)")
"""Entries of a config that count modules."""

_PLAUSIBLE = 4096
"""So many layers or experts are taken however few tensors there are: weights may not be here, experts may share one."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file: the file's name, the dtype (as torch calls it, or safetensors' code), the shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


Faults = Iterator[tuple[str, CheckpointError]]
"""The kind of each, a few words, and the error; it is in the file that the error's place ends with."""


class Contents:
    """A model's folder, read when asked for and once.

    Attributes:
        damaged: reading errors by file; complete once the file has been read.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.damaged: dict[str, str] = {}
        self._json: dict[str, dict[str, Any]] = {}

    @cached_property
    def names(self) -> frozenset[str]:
        """Files of the folder, those of its folders too, by their paths in it; nothing that is hidden."""
        paths = glob.iglob("**", root_dir=self.folder, recursive=True)
        return frozenset(path.replace(os.sep, "/") for path in paths if os.path.isfile(self.path(path)))

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return os.path.exists(self.path(name))

    def text(self, name: str) -> str | None:
        """A text file; None if it is missing or not text."""
        if not self.has(name):
            return None
        try:
            with open(self.path(name), encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError) as error:
            self.damaged[name] = short(error)
            return None

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object; empty where the file is missing, damaged, or holds something else."""
        if name not in self._json:
            try:
                self._json[name] = read_json(self.path(name)) if self.has(name) else {}
            except CheckpointError as error:
                self.damaged[name], self._json[name] = error.what, {}
        return self._json[name]

    @property
    def config(self) -> dict[str, Any]:
        return self.mapping(CONFIG)

    @property
    def is_adapter(self) -> bool:
        return self.has(ADAPTER_CONFIG) and not self.has(CONFIG)

    @cached_property
    def opened(self) -> str | None:
        """The weight file, or index of shards, that mergekit opens; None if there is none.

        It takes safetensors before pickles, and an index before a single file.
        """
        return next(filter(self.has, (stem + end for stem in WEIGHT_FILES for end in (INDEX, ""))), None)

    @property
    def index(self) -> str | None:
        """The index of shards that is read."""
        return self.opened if self.opened and self.opened.endswith(INDEX) else None

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Shards by tensor names, from the index; empty if it is absent or damaged."""
        if self.index is None:
            return {}
        shards = self.mapping(self.index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(map(_is_inside, shards.values())):
            problem = "has no weight_map of names and files, or names one outside of its directory"
            self.damaged.setdefault(self.index, problem)
            return {}
        return shards

    @cached_property
    def shards(self) -> list[str]:
        """Weight files with shard names, whether or not the index has them."""
        return sorted(filter(SHARD.fullmatch, os.listdir(self.folder)))

    @property
    def single(self) -> str | None:
        """The single weight file that is read, or would be without the index."""
        stem = (self.opened or WEIGHT_FILES[0]).removesuffix(INDEX)
        return stem if self.has(stem) else None

    @cached_property
    def weight_files(self) -> list[str]:
        """The weight files that are read: those of the index, else the single one, else all shards."""
        if self.weight_map:
            return sorted(filter(self.has, set(self.weight_map.values())))
        return [self.single] if self.single else self.shards

    @cached_property
    def by_file(self) -> dict[str, dict[str, StoredTensor]]:
        """The tensors of each weight file that can be read, by name."""
        return {name: tensors for name in self.weight_files if (tensors := self.header(name)) is not None}

    def header(self, name: str) -> dict[str, StoredTensor] | None:
        """The tensors of a weight file; None if it is damaged."""
        try:
            known = header(self.path(name))
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

    def faults(self) -> Faults:
        """Why the weights cannot be read, or why mergekit and transformers would read different ones."""
        if self.opened is None and not self.shards:
            yield "no weights", self._error("there are no weights", WEIGHT_FILES[0])
        if self.index and self.single and set(self.weight_map.values()) - {self.single}:
            yield SETS, self._error(f"{self.single} and {self.index} both exist", self.single, APART)
        if self.index is not None:
            yield from self._index_faults(self.index)
        for name in self.weight_files:
            if name not in self.by_file:
                yield "damaged weight file", self._error(self.damaged[name], name)
        holders: dict[str, list[str]] = {}
        for file, tensors in self.by_file.items():
            for name in tensors:
                holders.setdefault(name, []).append(file)
        for name, files in holders.items():
            if len(files) > 1 and self.weight_map.get(name) != files[-1]:  # transformers reads the last of them
                problem = f"more than one set of weights: tensor '{name}' is in {files[0]} and in {files[-1]}"
                yield "tensor twice", self._error(problem, files[-1], APART)
                return

    def _error(self, problem: str, file: str, remedy: str = AGAIN) -> CheckpointError:
        return CheckpointError(problem, where=self.path(file), remedy=remedy)

    def _index_faults(self, index: str) -> Faults:
        """An index that is damaged, or does not match its shards."""
        if not self.weight_map:
            yield "damaged index", self._error(self.damaged[index], index)
        elif absent := sorted(shard for shard in set(self.weight_map.values()) if not self.has(shard)):
            yield "missing shard", self._error(f"names shards that are not there: {named(absent)}", index)
        elif self.whole_files:
            wrong = [name for name, shard in self.weight_map.items() if name not in self.by_file[shard]]
            if wrong:
                problem = f"puts {len(wrong)} tensors, '{wrong[0]}' first, into files that do not hold them"
                yield "index disagrees", self._error(problem, index, MEND)


def _is_inside(file: object) -> bool:
    return isinstance(file, str) and not os.path.isabs(file) and ".." not in re.split(r"[/\\]", file)


def tensor_files(folder: str) -> dict[str, str]:
    """Each tensor of a directory and the file that holds it, which mergekit and transformers would both open.

    Raises:
        CheckpointError: there are no weights, or the first of their faults.
    """
    contents = Contents(folder)
    if contents.opened is None:
        refuse_adapter(folder)
        remedy = "model.safetensors or pytorch_model.bin (or the index of shards of either) is needed"
        raise CheckpointError("there are no weights", where=folder, remedy=remedy)
    stated = contents.config.get("transformers_weights")
    if contents.has(ADAPTER_CONFIG):
        problem = f"{contents.opened} and {ADAPTER_CONFIG} both exist"
        raise CheckpointError(problem, where=folder, remedy=APART)
    if stated not in (None, contents.opened):
        problem = f"config.json names '{stated}' (transformers_weights), but the folder also has {contents.opened}"
        raise CheckpointError(problem, where=folder, remedy=APART)
    for _, error in contents.faults():
        raise error
    return contents.weight_map or dict.fromkeys(contents.tensors, contents.opened)


def check_config(folder: str) -> None:
    """Check that a config does not claim more layers or experts than its files can hold.

    Raises:
        CheckpointError: names the entry; or config.json is missing or damaged.
    """
    contents, parts = Contents(folder), [read_json(os.path.join(folder, CONFIG))]
    tensors = len(contents.weight_map or contents.tensors)
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for name, value in part.items():
            if _COUNT.fullmatch(name) and isinstance(value, int | float) and value > max(tensors, _PLAUSIBLE):
                problem = f"'{name}' is {value:.15g} in config.json, but the weight files hold {tensors} tensors"
                raise CheckpointError(problem, where=folder, remedy="config.json is damaged, or that of another model")
