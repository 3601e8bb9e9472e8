"""A defect of a checkpoint folder, and the corrections that mend one: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rotation_merge.errors import named


@dataclass(frozen=True)
class JsonEntries:
    """Entries of a JSON file, by path (`text_config.vocab_size`); a value of None removes the entry."""

    file: str
    entries: Mapping[str, Any]

    @property
    def words(self) -> str:
        changes = (f"{key} removed" if value is None else f"{key}: {value!r}" for key, value in self.entries.items())
        return f"{self.file}: {named(changes)}"


@dataclass(frozen=True)
class JsonFile:
    """A JSON file written anew."""

    file: str
    content: Mapping[str, Any] = field(repr=False)

    @property
    def words(self) -> str:
        return f"{self.file}: written anew"


@dataclass(frozen=True)
class FileCopy:
    """A file of a parent."""

    file: str
    source: str

    @property
    def words(self) -> str:
        return f"{self.file}: copied from {self.source}"


@dataclass(frozen=True)
class ShardHeader:
    """The header of a safetensors file: tensors under other names, the format set; the bytes of tensors stay."""

    file: str
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        return f"{self.file}: header, {f'{len(self.names)} tensors renamed' if self.names else 'format set'}"


Correction = JsonEntries | JsonFile | FileCopy | ShardHeader


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
    def key(self) -> tuple[str, str]:
        """A key that is equal for the same defect in two folders."""
        return self.kind, self.what

    @property
    def line(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}; {self.remedy}"

    def inherited(self) -> Defect:
        """The defect, marked as one of a parent, too."""
        return replace(self, what=f"{self.what} (as in a parent)", fatal=False)
