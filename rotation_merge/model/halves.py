"""A text-only model beside one that sees, too: read as one of the other's kind, whose other half is the other's own.

What a wrapper such as Gemma 3 with vision calls its language half has, in its architecture file, the tensors of the
text-only family under another prefix. A donor of that family is then a model of the wrapper's whose remaining tensors
are the anchor's, so that whatever is done to such a pair leaves these as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from torch import Tensor

from rotation_merge.architecture.model import Architecture
from rotation_merge.architecture.registry import find

NOTE = "is text only. It is read as the language half of {anchor}; all other tensors stay as they are"


@dataclasses.dataclass(frozen=True)
class Half:
    """A language half.

    Attributes:
        part: entry of the wrapper's config that describes it.
        names: the wrapper's names of its tensors, and the text-only model's.
        rest: the wrapper's names of all other tensors.
    """

    part: str
    names: Mapping[str, str]
    rest: tuple[str, ...]

    def config(self, anchor: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """The config of the text-only model as one of the wrapper's kind."""
        text = {**(anchor.get(self.part) or {}), **{k: v for k, v in own.items() if k != "architectures"}}
        top = {k: own[k] for k in ("tie_word_embeddings",) if k in anchor and k in own}
        return {**anchor, **top, self.part: text}

    def all_of(self, own: Mapping[str, Any], anchor: Mapping[str, Any]) -> dict[str, Any]:
        """What is known of the tensors of either, by the wrapper's names."""
        return {
            **{name: own[theirs] for name, theirs in self.names.items() if theirs in own},
            **{name: anchor[name] for name in self.rest if name in anchor},
        }


class Known(Protocol):
    """What has to be known of a model (`models.Model`, `matching.member.Member`)."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def architecture(self) -> Architecture: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...


def language_half(wrapper: Known, other: Known) -> Half | None:
    """What part of a model another one of another family is, if it is its language half."""
    spec, anchor, donor = find(wrapper.config), wrapper.architecture, other.architecture
    if spec is None or anchor.family == donor.family or len(donor.layers_key) != 1:
        return None
    for module, definition in spec.modules.items():
        found = _names(anchor, module, donor) if definition.config else None
        if definition.config and found:
            text = [info for block in anchor.blocks if block.module == module for info in block.tensors]
            own = {name for info in text for name in (*info.names, *info.tied)} | found.keys()
            return Half(definition.config, found, tuple(name for name in wrapper.shapes if name not in own))
    return None


def _names(anchor: Architecture, module: str, donor: Architecture) -> dict[str, str] | None:
    """Names of a module's tensors in the anchor, and those of another model; None where the two are not alike."""
    blocks = {(block.place, block.index): block for block in anchor.blocks if block.module == module}
    if len(donor.blocks) != len(blocks):
        return None
    found: dict[str, str] = {}
    for block in donor.blocks:
        mine = blocks.get((block.place, block.index))
        here = {info.key for info in block.tensors}
        if mine is None or any(info.key not in here and not info.optional for info in mine.tensors):
            return None
        for info in block.tensors:
            own = mine.tensor(info.key)
            if own is not None and [axis.label for axis in own.axes] != [axis.label for axis in info.axes]:
                return None
            found.update(zip(anchor.names(info, block.index), info.names, strict=True))
    return found


class HalfLoader:
    """Reads like mergekit's `LazyTensorLoader`: the language half from one checkpoint, the rest from another."""

    def __init__(self, own: Any, anchor: Any, half: Half) -> None:
        self.own, self.anchor, self.half = own, anchor, half
        paths = half.all_of(own.index.tensor_paths, anchor.index.tensor_paths)
        self.index = dataclasses.replace(anchor.index, tensor_paths=paths)

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: Collection[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        if key not in self.index.tensor_paths:
            key = next((alias for alias in aliases or () if alias in self.index.tensor_paths), key)
        theirs = self.half.names.get(key)
        source, name = (self.own, theirs) if theirs is not None else (self.anchor, key)
        found: Tensor | None = source.get_tensor(name, device, None, raise_on_missing)
        return found

    def flush(self) -> None:
        self.own.flush()
