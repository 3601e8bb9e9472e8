"""Every model of a recipe as a view of its output, in the anchor's coordinates; tensors are computed when asked for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cached_property, partial
from threading import Lock

import torch
from mergekit.common import ModelReference
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.averaging.average import check_finite
from rotation_merge.carrying.delta import Delta
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.matching.moving import Mover
from rotation_merge.mergekit_plugin.block_match import BlockMatches, BlockMatching, DonorTransforms
from rotation_merge.mergekit_plugin.donors import Donor, Donors
from rotation_merge.mergekit_plugin.output import same_block
from rotation_merge.mergekit_plugin.recipe import title
from rotation_merge.model.blocks import blockwise
from rotation_merge.model.fold import Fold, folded_tensors
from rotation_merge.model.rows import padded_as, vocabulary_axes
from rotation_merge.model.tensors import Tensors, by_name
from rotation_merge.model.view import TensorOf, View


class RecipeViews:
    """Every model of a recipe as a view of the output: in the anchor's coordinates, by the output's names.

    Attributes:
        blocks: of the output.
        architecture: of the output.
        spaces: the anchor's names of all spaces, by their names in the output.
        by_model: the blocks that each model goes into; the anchor goes into all.
        carried: by donor whose change samples chose, gives the anchor with that change.
        stored: by model, its tensors of these blocks, as they are stored.
        origins: the same of the base of each fine-tune whose change is carried by maps.
        transforms: by donor that moves, its transforms.
        tensors: by model, the same tensors in the anchor's coordinates.
    """

    def __init__(self, donors: Donors) -> None:
        session, blocks, base = donors.session, donors.blocks, donors.recipe.base
        self.donors, self.session, self.blocks = donors, session, blocks
        self.recipe, self.base = donors.recipe, donors.base
        self.architecture = replace(self.base.architecture, blocks=tuple(out.block for out in blocks))
        self.spaces = {name: name for name in self.architecture.streams}
        self.spaces.update(names for out in blocks for names in out.spaces.items())
        self.folded = tuple(name for name, anchor_name in self.spaces.items() if anchor_name in donors.folded)
        self.fold = Fold(self.architecture, self.folded, donors.dtype) if self.folded else None
        self.matches = BlockMatches(session.options.low_cpu_memory, None if session.on_cpu else session.device)
        session.run.endings.append(self.matches.end)
        models = dict.fromkeys([base, *(model for out in blocks for model in out.sources)])
        self.by_model = {model: [out for out in blocks if model in (base, *out.sources)] for model in models}
        self.carried = {model: view for model, donor in donors.by_model.items() if (view := donor.carried)}
        self.stored = {model: self._named(self._read(model), model) for model in models}
        moving = {model: donor for model, donor in donors.by_model.items() if model not in self.carried}
        origins = {model: donor.origin for model, donor in moving.items() if donor.origin is not None}
        self.origins = {model: self._named(self._sources[origin], model) for model, origin in origins.items()}
        transforms = {model: self._transforms(model, donor) for model, donor in moving.items()}
        self.transforms = {model: maps for model, maps in transforms.items() if maps is not None}
        self.tensors = {model: self._moved(model) for model in models}

    @property
    def anchor(self) -> Tensors:
        """The anchor's tensors, as they are stored."""
        return self.stored[self.recipe.base]

    def view(self, model: ModelReference) -> View:
        """A model in the anchor's coordinates, as a model of the output's architecture."""
        opened = self.session.models[model]
        return replace(opened, tensors=self.tensors[model], architecture=self.architecture, at=None)

    def served(self, model: ModelReference) -> View:
        """The same for mergekit: what is copied is the anchor's."""
        view, anchor = self.view(model), self.tensors[self.recipe.base]
        return replace(view, tensors=view.tensors.replaced(anchor.only(filter(self.recipe.excluded, anchor))))

    @cached_property
    def _sources(self) -> dict[ModelReference, View]:
        """Each model that is read, on the device of the thread that reads it."""
        origins = [donor.origin for donor in self.donors.by_model.values() if donor.origin is not None]
        models = dict.fromkeys([self.recipe.base, *self.donors.by_model, *origins])
        return {model: self._source(self.session.models[model], model) for model in models}

    def _source(self, view: View, model: ModelReference) -> View:
        device, read = self.session.device, self.session.models.watched(model, self.session.run)

        def here(_: str, tensor: Tensor) -> Tensor:
            place = device()
            return tensor if place is None else tensor.to(place)

        return replace(view, tensors=read.map(here, dtypes={**view.dtypes, **view.stored_dtypes}))

    def _read(self, model: ModelReference) -> View:
        """The model whose tensors stand for one: itself, or the anchor with a change that samples chose."""
        if (carried := self.carried.get(model)) is None:
            return self._sources[model]
        anchor = self._sources[self.recipe.base]

        def changed(name: str, tensor: Tensor) -> Tensor:
            return view[name].to(tensor.device) if name in (view := carried()) else tensor

        return replace(anchor, tensors=anchor.tensors.map(changed))

    def _named(self, view: View, model: ModelReference) -> Tensors:
        """A model's tensors under the names of the output; tied ones under their first name.

        Args:
            view: the model; or one that is read for it, whose blocks stand at the same places.
        """
        present: dict[str, str] = {}
        for out in self.by_model[model]:
            stored = same_block(view, out.source(model))
            for info in out.block.tensors:
                stored_info = stored.tensor(info.key) or info
                for new, old in zip(info.names, stored_info.names, strict=True):
                    known = next((name for name in (old, *stored_info.tied) if name in view), None)
                    present |= {} if known is None else {new: known}
        return view.tensors.renamed(present).only(present)

    def _transforms(self, model: ModelReference, donor: Donor) -> DonorTransforms | None:
        """The transforms of a donor: of the whole model, or matched block by block; None where it does not move."""
        names, jobs = (str(self.recipe.base), title(model, donor.origin)), dict[str, BlockMatching]()
        sources = self.anchor, self.origins.get(model, self.stored[model])
        anchor, matched = (folded_tensors(self.architecture, s, self.folded, self.donors.dtype) for s in sources)
        for out in self.by_model[model]:
            options = self.recipe.options(out.reader, out.anchor.name, model)
            straight = donor.whole is not None and out.sources[model].index == out.anchor.index
            if straight or not (spaces := wanted_spaces(out.anchor, options)):
                continue
            job = BlockMatching(out, anchor, matched, names, options, self.session.run, donor.whole)
            self.matches.jobs.append(job)
            wanted = [space.name for space in spaces]
            jobs |= {name: job for name, anchor_name in out.spaces.items() if anchor_name in wanted}
        return DonorTransforms(self.spaces, jobs, donor.whole, self.matches) if jobs or donor.whole else None

    def _moved(self, model: ModelReference) -> Tensors:
        """A model's tensors in the anchor's coordinates, each rounded once."""
        stored = self.stored[model]
        if not (self.folded or model.lora or model in {**self.carried, **self.transforms, **self.origins}):
            return stacks_once(self.architecture, stored)
        tensor_of, name = self._tensor_of(model), "the carried change" if model in self.carried else str(model)

        def compute(block: Block, info: TensorInfo) -> Tensor | None:
            dtype = self.recipe.dtype or stored.dtypes[info.name]
            if self.recipe.own_method is not None:  # which rounds the result alone
                dtype = torch.promote_types(dtype, torch.float32)
            tensor = tensor_of(block, info, dtype)
            return None if tensor is None else check_finite(tensor, info.name, name)

        return stacks_once(self.architecture, blockwise(self.architecture, stored, compute))

    def _tensor_of(self, model: ModelReference) -> TensorOf:
        """Computes tensors of a model, moved by its transforms; of a fine-tune the anchor's, with its change."""
        stored, alignment = self.stored[model], Alignment(self.transforms.get(model, {}), self.folded)
        if (origin := self.origins.get(model)) is None:
            biases = folded_tensors(self.architecture, self.anchor, self.folded)
            least = None if self.fold is None else self.fold.dtype
            return Mover(self.architecture, stored, alignment.transforms, self.folded, biases, least).tensor
        base = replace(self.base, architecture=self.architecture, tensors=self.anchor)
        donor = self.donors.by_model[model]
        tuned = padded_as(stored, origin, vocabulary_axes(self.architecture.tensors()))
        change = Delta(base, origin, tuned, alignment, donor.pair.shared, folding=self.fold, scale=donor.scale)
        return replace(change, record=partial(self.session.run.transport, str(model))).tensor


def stacks_once(architecture: Architecture, tensors: Tensors) -> Tensors:
    """The same for a reader of single tensors: those that are stored in pieces are read together."""
    places = architecture.places()
    stacks: dict[str, dict[str, Tensor]] = defaultdict(dict)
    locks: dict[str, Lock] = defaultdict(Lock)

    def read(name: str) -> Tensor:
        info = places[name][1]
        if not info.stacked:
            return tensors.read(name)
        with locks[info.name]:
            stack = stacks[info.name]
            if name not in stack:
                stack.update(zip(info.names, tensors.read(info.names).unbind(0), strict=True))
            return stack.pop(name)

    return Tensors(tensors.shapes, tensors.dtypes, by_name(read))
