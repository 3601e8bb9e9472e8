"""Biases that a config promises and that no file holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.architecture.registry import find
from rotation_merge.model.view import View

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


def remarks(view: View) -> list[str]:
    """Notes on a model for the report, one line each."""
    missing = missing_biases(view.config, view.architecture, view.shapes)
    return [*view.remarks, *(f"`{view.name}`: {words}; {NEW_BIASES}." for words in missing)]
