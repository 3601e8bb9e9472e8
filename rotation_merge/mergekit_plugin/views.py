"""Every model of a recipe as a view of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial

import torch
from mergekit.common import ModelReference
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.carrying.delta import Delta
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.mergekit_plugin.block_match import BlockMatches, BlockMatching
from rotation_merge.mergekit_plugin.donors import Donor, Donors
from rotation_merge.mergekit_plugin.moved import MovedBlock, Transforms, named_as, output_tensors
from rotation_merge.mergekit_plugin.output import OutputBlock, same_block
from rotation_merge.mergekit_plugin.recipe import title
from rotation_merge.model.fold import Fold
from rotation_merge.model.rows import padded_as, vocabulary_axes
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import TensorOf, View


class RecipeViews:
    """Every model of a recipe as a view of the output: in the anchor's coordinates, by the output's names.

    Attributes:
        blocks: of the output.
        architecture: of the output.
        parts: by model, its part in each block of the output that it goes into.
        tensors: by model, all of its tensors.
    """

    def __init__(self, donors: Donors) -> None:
        session, blocks, base = donors.session, donors.blocks, donors.recipe.base
        self.donors, self.session, self.blocks = donors, session, blocks
        self.recipe, self.base = donors.recipe, donors.base
        self.architecture = replace(self.base.architecture, blocks=tuple(out.block for out in blocks))
        self.fold = Fold(self.base.architecture, donors.folded, donors.dtype) if donors.folded else None
        self.matches = BlockMatches(session.options.low_cpu_memory, pooled=session.on_cpu)
        session.run.endings.append(self.matches.end)
        models = dict.fromkeys([base, *(model for out in blocks for model in out.sources)])
        self.parts = {m: [self._part(out, m) for out in blocks if m in out.sources] for m in models}
        self.tensors = {model: output_tensors(parts) for model, parts in self.parts.items()}
        self.anchor = output_tensors([self._part(out, base) for out in blocks])

    def view(self, model: ModelReference) -> View:
        """A model in the anchor's coordinates, as a model of the output's architecture."""
        return replace(self.session.models[model], tensors=self.tensors[model], architecture=self.architecture, at=None)

    def served(self, model: ModelReference) -> View:
        """The same for mergekit: what is copied is the anchor's."""
        view = self.view(model)
        if model == self.recipe.base:
            return view
        names = (name for part in self.parts[model] for info in part.block.tensors for name in info.names)
        return replace(view, tensors=view.tensors.replaced(self.anchor.only(filter(self.recipe.excluded, names))))

    @cached_property
    def own_names(self) -> dict[ModelReference, dict[str, str]]:
        """By model, own names of the output's layers, where the model calls any of them otherwise."""
        names: dict[ModelReference, dict[str, str]] = {}
        for out in (out for out in self.blocks if out.block.index is not None):
            for model in out.sources:
                names.setdefault(model, {}).update(out.names_in(model))
        return {model: known for model, known in names.items() if any(new != old for new, old in known.items())}

    def storage(self, model: ModelReference, info: TensorInfo) -> torch.dtype | None:
        """Type in which a model's tensor would be written: the recipe's, else that of its file."""
        if self.recipe.dtype is not None:
            return self.recipe.dtype
        dtypes = self.session.models[model].stored_dtypes
        return next((dtypes[name] for name in (*info.names, *info.tied) if name in dtypes), None)

    @cached_property
    def _sources(self) -> Mapping[ModelReference, Tensors]:
        """All tensors of each model that is read, on the device of the thread that reads them."""
        origins = [donor.origin for donor in self.donors.by_model.values() if donor.origin is not None]
        models = dict.fromkeys([self.recipe.base, *self.donors.by_model, *origins])
        watched = {model: self.session.models.watched(model, self.session.run) for model in models}
        device = self.session.device

        def here(_: str, tensor: Tensor) -> Tensor:
            place = device()
            return tensor if place is None else tensor.to(place)

        return {model: tensors.map(here) for model, tensors in watched.items()}

    def _part(self, out: OutputBlock, model: ModelReference) -> MovedBlock:
        """A model's part in a block; where all models are aligned to a mean the anchor does not move either."""
        base, models = self.recipe.base, self.session.models
        donor = self.donors.by_model.get(model, Donor())
        block = out.anchor if model == base else out.sources[model]
        anchor, source, stored = named_as(self._sources[base], out.anchor, out.block), model, self._sources[model]
        if carried := donor.carried.view:  # the anchor with a change that samples chose

            def changed(name: str, tensor: Tensor) -> Tensor:
                return view[name].to(tensor.device) if name in (view := carried()) else tensor

            source, block, stored = base, same_block(models[base], block), self._sources[base].map(changed)
        part = MovedBlock(
            self.architecture,
            out.block,
            named_as(stored, block, out.block),
            anchor,
            str(source) if source is model else "the carried change",
            lambda info: self._dtype(source, block.tensor(info.key) or info),
            fold=self.fold,
            computed=source is not model or model.lora is not None,
        )
        if model == base or source is not model:
            return part
        if donor.origin is None:
            return replace(part, maps=self._maps(out, model, anchor, part.tensors))
        origin = named_as(self._sources[donor.origin], same_block(models[donor.origin], block), out.block)
        tuned = padded_as(part.tensors, origin, vocabulary_axes(out.block.tensors))

        def carried_by(alignment: Alignment) -> TensorOf:
            new = replace(self.base, architecture=part.architecture, tensors=anchor)
            change = Delta(new, origin, tuned, alignment, donor.rows, folding=self.fold, scale=donor.carried.scale)
            return replace(change, record=partial(self.session.run.transport, str(model))).tensor

        return replace(part, maps=self._maps(out, model, anchor, origin), carried=carried_by)

    def _maps(
        self, out: OutputBlock, model: ModelReference, anchor: Tensors, matched: Tensors
    ) -> Callable[[], Transforms] | None:
        """Gives the transforms of one donor's block: of the whole model, or matched block by block.

        Args:
            matched: tensors that are compared with the anchor's.
        """
        donor, session = self.donors.by_model[model], self.session
        whole, options = donor.whole, self.recipe.options(out.reader, out.anchor.name, model)
        straight = whole is not None and out.sources[model].index == out.anchor.index
        if straight or not wanted_spaces(out.anchor, options):
            return None if whole is None else lambda: whole().transforms
        names = str(self.recipe.base), title(model, donor.origin)
        job = BlockMatching(out, anchor, matched, names, options, session.run, self.fold, whole)
        self.matches.jobs.append(job)

        def maps() -> Transforms:
            streams = {} if whole is None else whole().transforms
            return {**streams, **self.matches.of(job, session.device())}

        return maps

    def _dtype(self, model: ModelReference, info: TensorInfo) -> torch.dtype | None:
        """The type that a moved tensor is rounded to; a method of our own rounds the result alone."""
        storage = self.storage(model, info)
        if self.recipe.own_method is None:
            return storage
        return torch.promote_types(storage or torch.float32, torch.float32)
