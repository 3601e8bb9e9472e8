"""The state of one merge from its recipe to its report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import torch
from mergekit import common
from mergekit.common import ModelReference
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.averaging.average import check_finite
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.pair import as_donor
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.model.labels import watched
from rotation_merge.model.open import check_present, open_model
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View


class Models(dict[ModelReference, View]):
    """The models of one recipe by reference, each opened once, when it is asked for."""

    def __init__(self, options: MergeOptions, unsupported: str = "error", untie: bool = False) -> None:
        super().__init__()
        self.options, self.unsupported, self.untie = options, unsupported, untie

    def __missing__(self, reference: ModelReference) -> View:
        facts = {"untie": self.untie, "unsupported": self.unsupported, "options": self.options}
        self[reference] = open_model(reference, any_base=True, **facts)
        return self[reference]

    def together(self, anchor: ModelReference, donors: Iterable[ModelReference], averaged: bool = False) -> None:
        """Open an anchor and its donors, and check that these have its architecture and sizes.

        Args:
            averaged: as of `check_pair`.

        Raises:
            CheckpointError, ArchitectureError: name the model and what differs.
        """
        references = list(dict.fromkeys([anchor, *donors]))
        for reference in references:
            if reference not in self:
                check_present(reference, self.options)
        for reference in references:
            self[reference]
        for reference in references[1:]:
            self[reference] = as_donor(self[anchor], self[reference], averaged)


class Session:
    """A recipe, its models (opened once each) and the record of the merge.

    Args:
        watched: whether there will be a report (as of `Run`).

    Attributes:
        source: gives a model as the merge reads it, on the device of the thread that reads it. A tensor that is read
            has to hold numbers, else a CheckpointError says so, and counts for the report, once.
        apart: tensors of sentence-transformers' modules, which have files of their own.
    """

    def __init__(self, recipe: Recipe, options: MergeOptions, watched: bool = True) -> None:
        self.recipe, self.options, self.run = recipe, options, Run(watched=watched)
        unsupported = "merge" if recipe.stock else recipe.value("unsupported")
        self.models = Models(options, unsupported, recipe.value("untie"))
        self.apart: dict[str, Tensor] = {}
        self.source = cache(self._source)

    @property
    def base(self) -> View:
        """The anchor."""
        return self.models[self.recipe.base]

    @property
    def seed(self) -> int:
        return self.options.random_seed or 0

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices for matching whole models: the merge's, or all of `--multi-gpu`, of which there has to be one."""
        if not self.options.multi_gpu:
            return (str(self.options.device or "cpu"),)
        try:
            count = common.get_torch_accelerator_count()
        except AttributeError:  # of the accelerator that is not there
            count = 0
        if not count:
            raise RotationMergeError("--multi-gpu: this machine has no GPU", remedy="leave it out")
        return tuple(f"{common.get_torch_accelerator_type()}:{number}" for number in range(count))

    def device(self) -> torch.device | None:
        """The accelerator on which this thread of the merge computes; None: the CPU."""
        if self.options.multi_gpu:
            return torch.empty(0).device
        device = torch.device(self.options.device or "cpu")
        return None if device.type == "cpu" else device

    def _source(self, model: ModelReference) -> View:
        view, seen = self.models[model], set[str]()

        def look(name: str, tensor: Tensor) -> Tensor:
            if name not in seen:
                check_finite(tensor, name, model)
                seen.add(name)
                if self.run.watched and name not in view.predicting_ahead:
                    view.mark.add(name, tensor)
            return tensor if (device := self.device()) is None else tensor.to(device)

        tensors = watched(view, look)
        return replace(view, tensors=Tensors(tensors.shapes, {**view.dtypes, **view.stored_dtypes}, tensors.read))
