"""Parents of a merged model as the merge saw them: the layers that it took, in the coordinates it moved them to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from rotation_merge.model.view import View
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

    @classmethod
    def of(cls, model: View, layers: Mapping[int | None, int] | None = None) -> Parent:
        return cls(model.architecture, model, layers)

    @cached_property
    def _blocks(self) -> dict[tuple[str, str, int | None], Block]:
        return {(block.module, block.place, block.index): block for block in self.architecture.blocks}

    def tensor(self, block: Block, info: TensorInfo) -> Tensor | None:
        """The parent's counterpart of a tensor of the merge, in float32; None if there is none."""
        index = block.index if self.layers is None else self.layers.get(block.index, -1)
        parent_block = self._blocks.get((block.module, block.place, index))
        parent_info = None if parent_block is None else parent_block.tensor(info.key)
        tensor = None if parent_info is None else read_tensor(parent_info, self.source)
        return None if tensor is None else tensor.float()


def parents_of(case: Case, progress: Progress | None) -> tuple[list[Parent], bool]:
    """The parents that are here, as the merge saw them; and whether the merge lies in or near their span.

    Else some parents are unknown, or were changed in a way that is not known.

    Raises:
        RotationMergeError: one cannot be read.
    """
    if case.sliced:
        layers = {name: places for name, places in _layers(case).items() if name in case.models}
        parents = [Parent.of(case.models[name], places) for name, places in layers.items()]
        return parents, case.method != METHOD and not case.absent
    if case.method != METHOD:
        return [Parent.of(model) for model in case.models.values()], not case.absent
    return _moved(case, progress)


def _layers(case: Case) -> dict[str, dict[int | None, int]]:
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


def _moved(case: Case, progress: Progress | None) -> tuple[list[Parent], bool]:
    """The anchor and the donors of a recipe of ours: matched once more, or moved by their files.

    Donors whose maps are not known are taken as they are, if only norms are to be compared: no stream was moved.
    """
    aligned = {donor.name: _alignment(case, donor, progress) for donor in case.donors.values()}
    known = {name: pair for name, pair in aligned.items() if pair is not None}
    complete = bool(known) and len(known) == len(aligned) and not case.absent
    anchor = case.models[case.parents[0]]
    if not complete:
        still = all(donor.options.residual == "none" for donor in case.donors.values())
        return [Parent.of(model) for model in (case.models.values() if still else [anchor])], False
    folded = next((alignment.folded for _, alignment in known.values() if alignment.folded), ())
    first, _ = next(iter(known.values()))
    parents = [Parent(first.architecture, moved_tensors(first.architecture, first.sources[0], {}, folded))]
    for name, (pair, alignment) in known.items():
        for source in _sources(case.donors[name], pair):
            moved = moved_tensors(pair.architecture, source, alignment.transforms, folded)
            parents.append(Parent(pair.architecture, moved))
    return parents, True


def _sources(donor: RecipeDonor, pair: Pair) -> Iterator[TensorSource]:
    """What a donor's maps move: where its change was carried, the fine-tune moves as its base does."""
    yield pair.sources[1]
    if donor.origin is not None:
        yield open_pair(donor.origin, donor.name, NOTHING, donor.untie, any_base=True).sources[1]


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
