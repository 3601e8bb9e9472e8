"""Parents of a merged model as the merge saw them: the layers that it took, in the coordinates it moved them to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.diagnose.doctor.case import Case
from rotation_merge.diagnose.donors import RecipeDonor
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.alignment import Alignment, aligned_source
from rotation_merge.matching.open_pair import Pair, open_pair, read_alignment
from rotation_merge.matching.options import NOTHING, WEIGHTS
from rotation_merge.mergekit_plugin.recipe.names import METHOD
from rotation_merge.model.biases import Aligned
from rotation_merge.model.checkpoint import parse_reference
from rotation_merge.model.source import Progress, TensorSource, read_tensor
from rotation_merge.report.estimate import estimate

LONGEST = 120.0
"""Seconds that matching a parent once more may take, as estimated."""

Layers = Mapping[int | None, int]
"""A parent's layer by the merge's."""


@dataclass(frozen=True)
class Parent:
    """A parent as the merge saw it.

    Attributes:
        source: its tensors, as they are stored or as they were moved.
        layers: its layer by the merge's; None: each meets its own.
    """

    architecture: Architecture
    source: TensorSource
    layers: Layers | None = None

    @cached_property
    def _blocks(self) -> dict[tuple[str, str, int | None], Block]:
        return {(block.module, block.place, block.index): block for block in self.architecture.blocks}

    def tensor(self, block: Block, info: TensorInfo) -> Tensor | None:
        """What meets a tensor of the merge; None where nothing does."""
        index = block.index
        if self.layers is not None:
            if index not in self.layers:
                return None
            index = self.layers[index]
        parent_block = self._blocks.get((block.module, block.place, index))
        parent_info = None if parent_block is None else parent_block.tensor(info.key)
        if parent_block is None or parent_info is None:
            return None
        return (
            self.source.tensor(parent_block, parent_info)
            if isinstance(self.source, Aligned)
            else read_tensor(parent_info, self.source)
        )


@dataclass(frozen=True)
class ParentSpan:
    """All parents of a merged model.

    Attributes:
        complete: whether the merge lies in what they span, or near it; else some of them are not known as they were
            averaged.
    """

    members: list[Parent] = field(default_factory=list)
    complete: bool = True

    def tensors(self, block: Block, info: TensorInfo, shape: tuple[int, ...]) -> list[Tensor]:
        """What of them meets a tensor of the merge that has this shape."""
        tensors = (parent.tensor(block, info) for parent in self.members)
        return [tensor for tensor in tensors if tensor is not None and tuple(tensor.shape) == shape]


def parents_of(case: Case, progress: Progress | None = None) -> ParentSpan:
    """The parents that are here, as the merge saw them.

    Raises:
        RotationMergeError: one cannot be read.
    """
    if case.recipe.get("slices") or case.recipe.get("modules"):
        named = {name: layers for name, layers in _sliced(case).items() if name in case.models}
        sliced = [Parent(case.models[name].architecture, case.models[name], layers) for name, layers in named.items()]
        return ParentSpan(sliced, complete=case.method != METHOD and not case.absent)
    if case.method != METHOD:
        plain = [Parent(model.architecture, model) for model in case.models.values()]
        return ParentSpan(plain, complete=not case.absent)
    return _moved(case, progress)


def _sliced(case: Case) -> dict[str, dict[int | None, int]]:
    """Models of a recipe with slices, each with its layers by those of the merge; of a recipe of ours the first of each
    slice, which nothing moves."""
    layers_of: dict[str, dict[int | None, int]] = {}
    modules: Any = case.recipe.get("modules") or {}
    for slices in [case.recipe.get("slices"), *(module.get("slices") for module in modules.values())]:
        begin = 0
        for piece in slices or []:
            sources = piece["sources"][:1] if case.method == METHOD else piece["sources"]
            for source in sources:
                known = layers_of.setdefault(str(parse_reference(str(source["model"]))), {})
                for offset, layer in enumerate(range(*source["layer_range"])):
                    known.setdefault(begin + offset, layer)
            begin += len(range(*piece["sources"][0]["layer_range"]))
    return layers_of


def _moved(case: Case, progress: Progress | None) -> ParentSpan:
    """The anchor and the donors of a recipe of ours: matched once more, or moved by their files."""
    anchor, complete = case.models[case.parents[0]], bool(case.donors) and not case.absent
    pairs: list[tuple[RecipeDonor, Pair, Alignment]] = []
    for donor in case.donors.values():
        aligned = _alignment(case, donor, progress)
        complete = complete and aligned is not None
        pairs += [] if aligned is None else [(donor, *aligned)]
    if not pairs:
        return ParentSpan([Parent(anchor.architecture, anchor)], complete)
    folded = next((alignment.folded for _, _, alignment in pairs if alignment.folded), ())
    layout = pairs[0][1].architecture
    members = [Parent(layout, aligned_source(layout, pairs[0][1].sources[0], Alignment({}, folded)))]
    for donor, pair, alignment in pairs:
        sources = [pair.sources[1]]
        if donor.origin is not None:  # whose change was carried: the fine-tune moves as its base does
            sources.append(open_pair(donor.origin, donor.name, NOTHING, donor.untie, any_base=True).sources[1])
        whole = Alignment(alignment.transforms, folded)
        members += [Parent(pair.architecture, aligned_source(pair.architecture, s, whole)) for s in sources]
    return ParentSpan(members, complete)


def _alignment(case: Case, donor: RecipeDonor, progress: Progress | None) -> tuple[Pair, Alignment] | None:
    """What moves a donor; None where it cannot be known, or takes too long to find again."""
    settings: Any = case.recipe.get("parameters") or {}
    if donor.unlike or donor.match_on != WEIGHTS or settings.get("anchor") == "mean" or donor.name not in case.models:
        return None
    options, names = NOTHING if donor.file else donor.options, (donor.anchor, donor.matched)
    extras: dict[str, Any] = {
        "untie": donor.untie,
        "words": donor.words,
        "unsupported": donor.unsupported,
        "excluded": donor.excluded,
    }
    try:
        pair = open_pair(*names, options, any_base=True, **extras)
        if donor.file:
            return pair, read_alignment(pair, donor.file, donor.untie)
        cost = estimate(pair.architecture, pair.anchor.shapes, pair.checked.options, 4, 4).seconds
        return None if cost > LONGEST else case.match(pair, progress)[:2]
    except RotationMergeError:
        return None
