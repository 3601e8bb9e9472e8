"""A defect of a checkpoint folder, and the corrections that mend one, each of one file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rotation_merge.errors import named
from rotation_merge.files import replacing, write_text


@dataclass(frozen=True)
class Correction:
    """A change of one file.

    Attributes:
        words: what is changed.
        make: makes the change, given the file's path.
    """

    file: str
    words: str
    make: Callable[[str], None] = field(repr=False)


@dataclass(frozen=True)
class Defect:
    """A defect of a checkpoint folder.

    Attributes:
        kind: a few words, the same for each defect of the kind.
        what: the finding, with figures and names.
        where: the file in the folder.
        remedy: the next step.
        fatal: whether a program refuses the folder, or loads another model than was merged.
        corrections: changes that mend it, if known.
    """

    kind: str
    what: str
    where: str
    remedy: str
    fatal: bool = True
    corrections: tuple[Correction, ...] = field(default=(), compare=False)

    @property
    def line(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}; {self.remedy}"


def json_file(file: str, content: Mapping[str, Any]) -> Correction:
    """Writes a JSON file anew."""
    return Correction(file, "written anew", lambda path: _write(path, content))


def json_entries(file: str, entries: Mapping[str, Any]) -> Correction:
    """Sets entries of a JSON file, by path (`text_config.vocab_size`); a value of None removes the entry."""

    def make(path: str) -> None:
        with open(path, encoding="utf-8") as stream:
            content: dict[str, Any] = json.load(stream)
        for place, value in entries.items():
            *steps, last = place.split(".")
            part = content
            for step in steps:
                part = part.setdefault(step, {})
            part[last] = value
            if value is None:
                del part[last]
        _write(path, content)

    return Correction(file, named(f"{key}: {value!r}" for key, value in entries.items()), make)


def _write(path: str, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def file_copy(file: str, source: str) -> Correction:
    """Copies a file of a parent."""

    def make(path: str) -> None:
        with replacing(path) as temporary:
            shutil.copyfile(source, temporary)

    return Correction(file, f"copied from {source}", make)


def shard_header(file: str, names: Mapping[str, str]) -> Correction:
    """Sets the format of a safetensors file, and gives tensors other names: by present name the new one."""

    def make(path: str) -> None:
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(path, framework="pt") as stream:
            metadata = stream.metadata() or {}
            tensors = {names.get(name, name): stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        with replacing(path) as temporary:
            save_file(tensors, temporary, {"format": "pt", **metadata})

    return Correction(file, f"header written anew, {len(names)} tensors renamed", make)
