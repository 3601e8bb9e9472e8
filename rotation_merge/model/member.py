"""A model of a pair as its check sees it: config, architecture and shapes, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rotation_merge.architecture.bias_flags import missing_biases
from rotation_merge.architecture.model import Architecture

NEW_BIASES = "transformers makes new ones (set it to false in config.json if the model has none)"


@dataclass(frozen=True)
class Member:
    """One model of a pair, before its weights are read.

    Attributes:
        name: what to call it in messages.
        config: as in config.json, defaults filled in; empty where nothing is known of it.
        architecture: resolved for its own tensor names.
        shapes: of every tensor that it stores, by name.
        tied: a head that shares an embedding's tensor, and the stream it reads (`registry.tied_head`).
        note: what the reader of a report should know of it.
    """

    name: str
    config: Mapping[str, Any]
    architecture: Architecture
    shapes: Mapping[str, tuple[int, ...]]

    tied: tuple[str, str] | None = None
    note: str = ""

    @property
    def notes(self) -> list[str]:
        """What the reader of a report should know of it, one line each."""
        missing = missing_biases(self.config, self.architecture, self.shapes)
        return [*([self.note] if self.note else []), *(f"`{self.name}`: {words}; {NEW_BIASES}." for words in missing)]
