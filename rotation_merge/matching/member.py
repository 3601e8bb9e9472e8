"""A model of a pair as its check sees it: config, architecture and shapes, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rotation_merge.architectures.model import Architecture


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
