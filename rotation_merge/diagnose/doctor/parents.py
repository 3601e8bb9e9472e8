"""Parents of a merged model as the merge saw them: the layers that it took, in the coordinates it moved them to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.diagnose.doctor.case import Case, is_small
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.options import WEIGHTS
from rotation_merge.mergekit_plugin import METHOD
from rotation_merge.mergekit_plugin.compile import opened_views
from rotation_merge.mergekit_plugin.document import Document
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.open import parse_reference
from rotation_merge.model.view import View


@dataclass(frozen=True)
class Parent:
    """A parent as the merge saw it.

    Attributes:
        view: its tensors, as they are stored or as they were moved.
        layers: its layer by the merge's; None: each meets its own.
    """

    view: View
    layers: Mapping[int | None, int] | None = None

    @cached_property
    def _blocks(self) -> dict[tuple[str, str, int | None], Block]:
        return {(block.module, block.place, block.index): block for block in self.view.architecture.blocks}

    def tensor(self, block: Block, info: TensorInfo) -> Tensor | None:
        """The parent's counterpart of a tensor of the merge, in float32; None if there is none."""
        index = block.index if self.layers is None else self.layers.get(block.index, -1)
        parent_block = self._blocks.get((block.module, block.place, index))
        parent_info = None if parent_block is None else parent_block.tensor(info.key)
        tensor = None if parent_info is None else read_tensor(parent_info, self.view)
        return None if tensor is None else tensor.float()


@contextmanager
def parents_of(case: Case) -> Iterator[tuple[list[Parent], bool]]:
    """The parents that are here, as the merge saw them; and whether the merge lies in or near their span.

    Else some parents are unknown, or were changed in a way that is not known; those of a recipe of ours are given as
    they are then, if norms of their tensors can be compared: no stream was moved.

    Raises:
        RotationMergeError: one cannot be read.
    """
    if case.method != METHOD:
        layers = _layers(case.recipe) if case.sliced else dict.fromkeys(case.models)
        yield (
            [Parent(case.models[name], places) for name, places in layers.items() if name in case.models],
            not case.absent,
        )
        return
    if (recipe := _known_recipe(case)) is not None:
        with opened_views(recipe) as views:
            yield [*map(Parent, map(views.served, views.stored))], True
        return
    still = all(donor.options.residual == "none" for donor in case.donors.values())
    yield [*map(Parent, case.models.values() if still else [case.models[case.parents[0]]])], False


def _known_recipe(case: Case) -> Recipe | None:
    """A recipe of ours whose merge can be repeated; None where it needs samples, or is of large models."""
    on_weights = all(donor.value("match_on") in (None, WEIGHTS) for donor in case.donors.values())
    known = case.donors and not case.absent and on_weights
    if not known or "carry" in str(case.recipe) or not is_small(case.parents[0]):
        return None
    with suppress(RotationMergeError):
        return Recipe.of(Document(dict(case.recipe)))
    return None


def _layers(recipe: Mapping[str, Any]) -> dict[str, dict[int | None, int]]:
    """Models of a recipe with slices, each with its layers by the merge's layers."""
    layers_of: dict[str, dict[int | None, int]] = {}
    for slices in [recipe.get("slices"), *(module.get("slices") for module in (recipe.get("modules") or {}).values())]:
        begin = 0
        for piece in slices or []:
            for source in piece["sources"]:
                known = layers_of.setdefault(str(parse_reference(str(source["model"]))), {})
                for offset, layer in enumerate(range(*source["layer_range"])):
                    known.setdefault(begin + offset, layer)
            begin += len(range(*piece["sources"][0]["layer_range"]))
    return layers_of
