"""Reads a text-only model as a multimodal one, whose other parts come from the anchor.

The language half of a multimodal model such as Gemma 3 with vision has the tensors of the text-only family under
another prefix. A donor of that family is treated as a model of the multimodal class whose other tensors are the
anchor's, so that these stay unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rotation_merge.architecture import resolve
from rotation_merge.architecture.model import Architecture
from rotation_merge.architecture.registry import find
from rotation_merge.model.view import View

NOTE = "is text only. It is read as the language half of {anchor}; all other tensors stay as they are"


@dataclasses.dataclass(frozen=True)
class LanguageHalf:
    """The language part of a multimodal model.

    Attributes:
        part: entry of the wrapper's config that describes it.
        names: the wrapper's names of its tensors, and the text-only model's.
        remaining: the wrapper's names of all other tensors.
    """

    part: str
    names: Mapping[str, str]
    remaining: tuple[str, ...]

    def config(self, anchor: Mapping[str, Any], text_config: Mapping[str, Any]) -> dict[str, Any]:
        """The config of the text-only model as one of the wrapper's class."""
        text = {**(anchor.get(self.part) or {}), **{k: v for k, v in text_config.items() if k != "architectures"}}
        top = {k: text_config[k] for k in ("tie_word_embeddings",) if k in anchor and k in text_config}
        return {**anchor, **top, self.part: text}


def language_half(wrapper: View, text_model: View) -> LanguageHalf | None:
    """The language part of a multimodal model that another model matches; None if it matches none."""
    spec, anchor, donor = find(wrapper.config), wrapper.architecture, text_model.architecture
    if spec is None or anchor.family == donor.family or len(donor.layers_key) != 1:
        return None
    for module, definition in spec.modules.items():
        names = _names(anchor, module, donor) if definition.config else None
        if definition.config and names:
            text = [info for block in anchor.blocks if block.module == module for info in block.tensors]
            language_names = {name for info in text for name in (*info.names, *info.tied)} | names.keys()
            return LanguageHalf(
                definition.config, names, tuple(name for name in wrapper.shapes if name not in language_names)
            )
    return None


def _names(anchor: Architecture, module: str, donor: Architecture) -> dict[str, str] | None:
    """The anchor's names of a module's tensors, and another model's names; None if the modules differ."""
    blocks = {(block.place, block.index): block for block in anchor.blocks if block.module == module}
    if len(donor.blocks) != len(blocks):
        return None
    names: dict[str, str] = {}
    for block in donor.blocks:
        anchor_block = blocks.get((block.place, block.index))
        keys = {info.key for info in block.tensors}
        if anchor_block is None or any(info.key not in keys and not info.optional for info in anchor_block.tensors):
            return None
        for info in block.tensors:
            anchor_info = anchor_block.tensor(info.key)
            if anchor_info is not None and [axis.label for axis in anchor_info.axes] != [
                axis.label for axis in info.axes
            ]:
                return None
            names.update(zip(anchor.names(info, block.index), info.names, strict=True))
    return names


def within(view: View, anchor: View, complete: bool = False) -> View | None:
    """A text-only model as the language half of one of the anchor's class; None if it matches none.

    Args:
        complete: give it the anchor's other tensors as well.
    """
    half = language_half(anchor, view)
    if half is None:
        return None
    names = {name: text_name for name, text_name in half.names.items() if text_name in view.tensors}
    tensors = view.tensors.renamed(names).only(names)
    config = half.config(anchor.config, view.config)
    if complete:
        stored = anchor.as_filed.tensors
        tensors = tensors.replaced(stored.only(half.remaining))
        remarks = (*view.remarks, f"`{view.name}` {NOTE.format(anchor=f'`{anchor.name}`')}.")
        architecture = resolve(config, list(tensors), view.name, keep_unknown=True, untie=view.untie)
        template = None if anchor.files is None else anchor.files.folder
        files = None if view.files is None else replace(view.files, dtypes=tensors.dtypes, template=template)
        completed = replace(view, tensors=tensors, config=config, architecture=architecture, remarks=remarks)
        return replace(completed, files=files)
    absent = {info.name for info in anchor.architecture.tensors() if info.names[0] not in names}
    architecture = anchor.architecture.without(absent)  # which no file describes by itself
    return replace(view, tensors=tensors, config=config, architecture=architecture, text=view, text_names=names)
