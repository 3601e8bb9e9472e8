"""A defect of a checkpoint folder, and the corrections that mend one: changes of single files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rotation_merge.files import replacing, write_text

Correction = Callable[[str], None]
"""Changes a file, given its path."""
Corrections = Mapping[str, Correction]
"""By file."""


@dataclass(frozen=True)
class Defect:
    """A defect of a checkpoint folder.

    Attributes:
        kind: a few words, the same for each defect of the kind.
        what: the finding, with figures and names.
        where: the file in the folder.
        remedy: the next step.
        fatal: whether a program refuses the folder, or loads another model than was merged.
        corrections: that mend it, by file; none where a person has to decide.
    """

    kind: str
    what: str
    where: str
    remedy: str
    fatal: bool = True
    corrections: Corrections = field(default_factory=dict, compare=False)

    @property
    def line(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}; {self.remedy}"


def json_file(file: str, content: Mapping[str, Any]) -> Corrections:
    """Writes a JSON file anew."""
    return {file: lambda path: write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")}


def json_entries(file: str, entries: Mapping[str, Any]) -> Corrections:
    """Sets entries, if any, of a JSON file, by path (`text_config.vocab_size`); None removes one."""

    def correct(path: str) -> None:
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
        json_file(file, content)[file](path)

    return {file: correct} if entries else {}


def file_copy(source: str) -> Correction:
    """Copies a file of a parent."""

    def correct(path: str) -> None:
        with replacing(path) as temporary:
            shutil.copyfile(source, temporary)

    return correct


def shard_header(names: Mapping[str, str]) -> Correction:
    """Sets the format of a safetensors file, and gives tensors other names: by present name the new one."""

    def correct(path: str) -> None:
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(path, framework="pt") as stream:
            metadata = stream.metadata() or {}
            tensors = {names.get(name, name): stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        with replacing(path) as temporary:
            save_file(tensors, temporary, {"format": "pt", **metadata})

    return correct
