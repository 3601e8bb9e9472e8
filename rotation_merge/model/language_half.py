"""Reads a text-only model as a multimodal one, whose other parts come from the anchor.

The language half of a multimodal model such as Gemma 3 with vision has the tensors of the text-only family under
another prefix. A donor of that family is treated as a model of the multimodal class whose other tensors are the
anchor's, so that these stay unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from rotation_merge.architecture import resolve
from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.architecture.registry import find
from rotation_merge.model.view import View


def _language_part(wrapper: View, text_model: View) -> tuple[str, str, dict[str, str]] | None:
    """The module that a text-only model matches: its entry in the config, its name, and the names of its tensors."""
    spec, anchor, donor = find(wrapper.config), wrapper.architecture, text_model.architecture
    if spec is None or anchor.family == donor.family or len(donor.layers_key) != 1:
        return None
    for module, definition in spec.modules.items():
        if definition.config and (names := _names(anchor, module, donor)):
            return definition.config, module, names
    return None


def _names(anchor: Architecture, module: str, donor: Architecture) -> dict[str, str] | None:
    """The anchor's names of a module's tensors, and another model's names; None if the modules differ."""
    blocks = {(block.place, block.index): block for block in anchor.blocks if block.module == module}
    names: dict[str, str] = {}
    for block in donor.blocks:
        anchor_block = blocks.pop((block.place, block.index), None)
        if anchor_block is None or not _alike(anchor_block, block):
            return None
        for info in block.tensors:
            names.update(zip(anchor.names(info, block.index), info.names, strict=True))
    return None if blocks else names


def _alike(block: Block, donor_block: Block) -> bool:
    """Whether a block has the tensors of another, along the same axes, but for optional ones."""
    labels = {info.key: [axis.label for axis in info.axes] for info in donor_block.tensors}
    return all(
        labels[info.key] == [axis.label for axis in info.axes] if info.key in labels else info.optional
        for info in block.tensors
    )


def within(view: View, anchor: View, complete: bool = False) -> View | None:
    """A text-only model as the language half of one of the anchor's class; None if it matches none.

    Args:
        complete: give it the anchor's other tensors as well.
    """
    part = _language_part(anchor, view)
    if part is None:
        return None
    entry, module, half = part
    names = {name: text_name for name, text_name in half.items() if text_name in view.tensors}
    tensors = view.tensors.renamed(names).only(names)
    text = {**(anchor.config.get(entry) or {}), **{k: v for k, v in view.config.items() if k != "architectures"}}
    top = {k: view.config[k] for k in ("tie_word_embeddings",) if k in anchor.config and k in view.config}
    config = {**anchor.config, **top, entry: text}
    if complete:
        infos = [info for block in anchor.architecture.blocks if block.module == module for info in block.tensors]
        language_names = {name for info in infos for name in (*info.names, *info.tied)} | half.keys()
        remaining = (name for name in anchor.shapes if name not in language_names)
        tensors = tensors.replaced(anchor.as_filed.tensors.only(remaining))
        note = f"It is read as the language half of `{anchor.name}`; all other tensors stay as they are."
        remarks = (*view.remarks, f"`{view.name}` is text only. {note}")
        architecture = resolve(config, list(tensors), view.name, keep_unknown=True, untie=view.untie)
        template = None if anchor.files is None else anchor.files.folder
        dtypes = {**tensors.dtypes, **{name: view.stored_dtypes[text_name] for name, text_name in names.items()}}
        files = None if view.files is None else replace(view.files, dtypes=dtypes, template=template)
        return replace(view, tensors=tensors, config=config, architecture=architecture, remarks=remarks, files=files)
    absent = {info.name for info in anchor.architecture.tensors() if info.names[0] not in names}
    architecture = anchor.architecture.without(absent)  # which no file describes by itself
    return replace(view, tensors=tensors, config=config, architecture=architecture, text=view, text_names=names)
