"""A model of a pair as its check sees it: config, its flags of biases, architecture and shapes, no weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.architecture.registry import find

FLAGS = {
    "attention_bias": ("attention",),
    "qkv_bias": ("attention",),
    "use_qkv_bias": ("attention",),
    "mlp_bias": ("ffn",),
    "use_bias": ("attention", "ffn", "mixer"),
    "bias": ("attention", "ffn"),
}
"""Config entries that give linear maps a bias, and the kinds of spaces that those maps have an axis of."""


def missing_biases(config: Mapping[str, Any], architecture: Architecture, names: Collection[str]) -> Iterator[str]:
    """Entries of a config that are true although some layer stores no such bias, as words for a note.

    Args:
        names: of all tensors that the checkpoint stores.
    """
    spec = find(config)
    modules = {} if spec is None else spec.modules
    holders = {
        name[: at + 1] for name in names if name.endswith(".bias") for at, mark in enumerate(name) if mark == "."
    }
    for module, definition in modules.items():
        settings = (config.get(definition.config) or {}) if definition.config else config
        blocks = [block for block in architecture.blocks if block.module == module and block.index is not None]
        for flag in (flag for flag in FLAGS if settings.get(flag) is True):
            lacking = [block for block in blocks if not _parts(block, FLAGS[flag]) <= holders]
            if lacking:
                entry = f"{definition.config}.{flag}" if definition.config else flag
                yield f"'{entry}' is true, but no such bias is stored for {lacking[0].name}"


def _parts(block: Block, kinds: Collection[str]) -> set[str]:
    """Weight names of the linear maps of a block with an axis in some kinds of spaces."""
    return {
        info.name.rsplit(".", 2)[0] + "."
        for info in block.tensors
        if info.name.endswith(".weight") and len(info.axes) == 2 and any(s.kind in kinds for s in info.spaces())
    }


NEW_BIASES = "transformers makes new ones (set it to false in config.json if the model has none)"


@dataclass(frozen=True)
class PairedModel:
    """One model of a pair, before its weights are read.

    Attributes:
        name: its name in messages.
        config: as in config.json, defaults filled in; empty where nothing is known of it.
        architecture: resolved for its own tensor names.
        shapes: of every tensor that it stores, by name.
        tied: a head that shares an embedding's tensor, and the stream it reads (`registry.tied_head`).
        note: note for the report.
    """

    name: str
    config: Mapping[str, Any]
    architecture: Architecture
    shapes: Mapping[str, tuple[int, ...]]

    tied: tuple[str, str] | None = None
    note: str = ""

    @property
    def notes(self) -> list[str]:
        """Notes on the model for the report, one line each."""
        missing = missing_biases(self.config, self.architecture, self.shapes)
        return [*([self.note] if self.note else []), *(f"`{self.name}`: {words}; {NEW_BIASES}." for words in missing)]
