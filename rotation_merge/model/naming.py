"""Names of models and files for readers: hub names, else the last parts of paths; and texts with such names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rotation_merge.errors import RotationMergeError

WORD = re.compile(r"[\w-]+")
"""A name that might be a word of any text."""

BY_NAME = ("models", "fingerprints", "files", "whole", "summary")
"""Entries of reports and of heads of files whose keys are models."""


def shortened(names: Sequence[str]) -> dict[str, str]:
    """The shortest trailing parts of paths that tell models apart."""
    for count in range(1, 9):
        short = {n: "+".join("/".join(p.rstrip("/").split("/")[-count:]) for p in n.split("+")) for n in names}
        if len(set(short.values())) == len(set(names)):
            return short
    return {name: name for name in names}


def check_different(models: Sequence[str]) -> None:
    """Refuse models that are named twice, before anything is opened.

    Raises:
        RotationMergeError: one is.
    """
    split = [model.split("+") for model in models]
    places = [[os.path.realpath(part) if os.path.exists(part) else part for part in parts] for parts in split]
    if twice := [model for model, place in zip(models, places, strict=True) if places.count(place) > 1]:
        raise RotationMergeError("is named twice", where=twice[-1], remedy="name models that differ")


class Renaming:
    """Replaces local names in texts by names on the hub, the longest first.

    A folder may be called as a word of any text is (`a`, `anchor`): such a name is one only where something sets it
    apart, as an entry of YAML, in quotes or in a table.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = {name: target for name, target in names.items() if name != target}
        paths, words = _alternatives(self.names, words=False), _alternatives(self.names, words=True)
        before, after = r"(?<![\w./~@-])", r"(?![\w/@-])(?!\.\w)"
        apart = (
            r"(?:(?<=[`'\"])|(?<=[|:*-] )|(?<= of )|(?<= to )|(?<= using ))",
            r"(?=\s*(?:[`'\"|,}\]#]|$| as a base))",
        )
        known = [f"{before}(?:{paths}){after}"] if paths else []
        known += [f"{apart[0]}(?:{words}){apart[1]}"] if words else []
        self._pattern = re.compile("|".join(known), re.MULTILINE) if known else None

    def text(self, text: str) -> str:
        return self._pattern.sub(lambda match: self.names[match[0]], text) if self._pattern else text

    def value(self, value: Any, within: str = "") -> Any:
        """The same for JSON: strings, and keys that are paths or, by the key they are `within`, models."""
        if isinstance(value, str):
            return self.names.get(value) or self.text(value)
        if isinstance(value, Mapping):
            words = () if within in BY_NAME else filter(WORD.fullmatch, map(str, value))
            names = {str(key): self.value(str(key)) for key in value} | {word: word for word in words}
            return {names[str(key)]: self.value(item, str(key)) for key, item in value.items()}
        return [self.value(item, within) for item in value] if isinstance(value, list) else value


def _alternatives(names: Iterable[str], words: bool) -> str:
    chosen = (name for name in names if bool(WORD.fullmatch(name)) == words)
    return "|".join(re.escape(name) for name in sorted(chosen, key=len, reverse=True))
