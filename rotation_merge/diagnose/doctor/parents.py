"""Parents of a merged model as the merge saw them: the layers that it took, in the coordinates it moved them to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.diagnose.doctor.case import Case, is_small
from rotation_merge.diagnose.donors import RecipeDonor
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.aligned_output import read_alignment
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.matching.options import NOTHING, WEIGHTS
from rotation_merge.matching.pair import Pair, open_pair
from rotation_merge.mergekit_plugin import METHOD
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.open import parse_reference
from rotation_merge.model.tensors import TensorSource
from rotation_merge.workers import Progress


@dataclass(frozen=True)
class Parent:
    """A parent as the merge saw it.

    Attributes:
        source: its tensors, as they are stored or as they were moved.
        layers: its layer by the merge's; None: each meets its own.
    """

    architecture: Architecture
    source: TensorSource
    layers: Mapping[int | None, int] | None = None

    @cached_property
    def _blocks(self) -> dict[tuple[str, str, int | None], Block]:
        return {(block.module, block.place, block.index): block for block in self.architecture.blocks}

    def tensor(self, block: Block, info: TensorInfo) -> Tensor | None:
        """The parent's counterpart of a tensor of the merge; None if there is none."""
        index = block.index if self.layers is None else self.layers.get(block.index, -1)
        parent_block = self._blocks.get((block.module, block.place, index))
        parent_info = None if parent_block is None else parent_block.tensor(info.key)
        return None if parent_info is None else read_tensor(parent_info, self.source)


@dataclass(frozen=True)
class ParentSpan:
    """All parents of a merged model.

    Attributes:
        complete: whether the merge lies in or near the span of the parents; else some parents are unknown or were
            changed.
    """

    members: list[Parent] = field(default_factory=list)
    complete: bool = True

    def tensors(self, block: Block, info: TensorInfo, shape: tuple[int, ...]) -> list[Tensor]:
        """The parents' counterparts of a tensor of the merge that have its shape, in float32."""
        tensors = (parent.tensor(block, info) for parent in self.members)
        return [tensor.float() for tensor in tensors if tensor is not None and tuple(tensor.shape) == shape]


def parents_of(case: Case, progress: Progress | None) -> ParentSpan:
    """The parents that are here, as the merge saw them.

    Raises:
        RotationMergeError: one cannot be read.
    """
    if case.recipe.get("slices") or case.recipe.get("modules"):
        named = {name: layers for name, layers in _sliced_parents(case).items() if name in case.models}
        sliced = [Parent(case.models[name].architecture, case.models[name], layers) for name, layers in named.items()]
        return ParentSpan(sliced, complete=case.method != METHOD and not case.absent)
    if case.method != METHOD:
        plain = [Parent(model.architecture, model) for model in case.models.values()]
        return ParentSpan(plain, complete=not case.absent)
    return _moved(case, progress)


def _sliced_parents(case: Case) -> dict[str, dict[int | None, int]]:
    """Models of a recipe with slices, each with its layers by the merge's layers.

    For a recipe of ours only the first model of each slice, which is not moved.
    """
    layers_of: dict[str, dict[int | None, int]] = {}
    modules: Any = case.recipe.get("modules") or {}
    for slices in [case.recipe.get("slices"), *(module.get("slices") for module in modules.values())]:
        begin = 0
        for piece in slices or []:
            for source in piece["sources"][: 1 if case.method == METHOD else None]:
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
    members = [Parent(layout, moved_tensors(layout, pairs[0][1].sources[0], {}, folded))]
    for donor, pair, alignment in pairs:
        sources = [pair.sources[1]]
        if donor.origin is not None:  # whose change was carried: the fine-tune moves as its base does
            sources.append(open_pair(donor.origin, donor.name, NOTHING, donor.untie, any_base=True).sources[1])
        moved = (moved_tensors(pair.architecture, source, alignment.transforms, folded) for source in sources)
        members += [Parent(pair.architecture, tensors) for tensors in moved]
    return ParentSpan(members, complete)


def _alignment(case: Case, donor: RecipeDonor, progress: Progress | None) -> tuple[Pair, Alignment] | None:
    """The alignment of a donor; None if it is unknown, or the models are large."""
    if donor.match_on != WEIGHTS or case.parameters.get("anchor") == "mean" or donor.name not in case.models:
        return None
    options, names = NOTHING if donor.file else donor.options, (donor.anchor, donor.matched)
    how: dict[str, Any] = {"words": donor.words, "unsupported": donor.unsupported, "excluded": donor.excluded}
    try:
        pair = open_pair(*names, options, donor.untie, any_base=True, **how)
        if donor.file:
            return pair, read_alignment(pair, donor.file)
        return (pair, case.match(pair, progress)) if is_small(donor.anchor) else None
    except RotationMergeError:
        return None
