"""Every model of a recipe as a view of its output, in the anchor's coordinates; tensors are computed when asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from rotation_merge.mergekit_plugin.block_match import BlockMatches, BlockMatching, Finder, LazyTransforms
from rotation_merge.mergekit_plugin.donors import Donor
from rotation_merge.mergekit_plugin.output import OutputBlock, readers_of, same_block
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.apply import blockwise
from rotation_merge.model.fold import Fold, folded_tensors
from rotation_merge.model.tensors import Tensors, as_tensors, by_name
from rotation_merge.model.view import TensorOf, View
from rotation_merge.model.vocabulary import padded_as
from rotation_merge.symmetry import Transform


class RecipeViews:
    """Every model of a recipe as a view of the output: in the anchor's coordinates, by the output's names.

    Args:
        blocks: of the output.

    Attributes:
        readers: by model that is merged, the lookup of its parameters.
        architecture: of the output.
        spaces: the anchor's names of all spaces, by their names in the output.
        folded: streams that are folded in every model.
        stored: by model, the anchor first, its tensors of the output, as they are stored.
        origins: the same of the base of each fine-tune whose change is carried by maps.
        transforms: by donor that moves, its transforms.
        tensors: by model, the same tensors in the anchor's coordinates.
        preparations: work on whole models.
    """

    def __init__(self, session: Session, blocks: Sequence[OutputBlock], donors: Mapping[ModelReference, Donor]) -> None:
        self.session, self.recipe, self.base = session, session.recipe, session.base
        self.blocks, self.donors, self.readers = blocks, donors, readers_of(blocks)
        self.architecture = replace(self.base.architecture, blocks=tuple(out.block for out in blocks))
        self.spaces = {name: name for name in self.architecture.streams}
        self.spaces.update(names for out in blocks for names in out.spaces.items())
        of_base = {stream for donor in donors.values() for stream in donor.folded}
        self.folded = tuple(name for name, anchor_name in self.spaces.items() if anchor_name in of_base)
        self.matches = BlockMatches(session.run, session.device, session.options.low_cpu_memory)
        session.run.endings.append(self.matches.end)
        models = dict.fromkeys([self.recipe.base, *self.readers])
        self.stored = {model: self._named(self._read(model), model) for model in models}
        origins = {model: donor.origin for model, donor in donors.items() if donor.origin and not donor.carried}
        self.origins = {model: self._named(session.source(origin), model) for model, origin in origins.items()}
        transforms = {model: self._transforms(model, donor) for model, donor in donors.items() if not donor.carried}
        self.transforms = {model: maps for model, maps in transforms.items() if maps.finders}
        self.tensors = {model: self._moved(model) for model in models}
        self.preparations: list[Callable[[], object]] = [donor.prepare for donor in donors.values()]

    def prepare(self) -> None:
        """Find all alignments of whole models, carry what needs samples, and refit."""
        for prepare in self.preparations:
            prepare()

    @property
    def anchor(self) -> Tensors:
        """The anchor's tensors, as they are stored."""
        return self.stored[self.recipe.base]

    def blocks_of(self, model: ModelReference) -> list[OutputBlock]:
        """The blocks of the output that a model goes into; the anchor goes into all."""
        return [out for out in self.blocks if model in (self.recipe.base, *out.sources)]

    def view(self, model: ModelReference) -> View:
        """A model in the anchor's coordinates, as a model of the output's architecture."""
        opened = self.session.models[model]
        return replace(opened, tensors=self.tensors[model], architecture=self.architecture, at=None)

    def served(self, model: ModelReference) -> View:
        """The same for mergekit: what is copied is the anchor's."""
        view, anchor = self.view(model), self.tensors[self.recipe.base]
        return replace(view, tensors=view.tensors.replaced(anchor.only(filter(self.recipe.excluded, anchor))))

    def transforms_of(self, model: ModelReference) -> dict[str, Transform]:
        """The transforms of a donor, all found, by the anchor's names of its spaces."""
        if (transforms := self.transforms.get(model)) is None:
            return dict(self.session.run.transforms.get(self.donors[model].name, {}))
        donor = self.donors[model]
        whole = donor.whole_transforms() if donor.whole else {}  # those of layers that the output leaves out, too
        return {**whole, **{known: transforms[name] for name, known in self.spaces.items() if name in transforms}}

    def folded_tensors(self, source: Tensors) -> Tensors:
        """Tensors of the output's names, the norms of its streams folded as the merge needs it."""
        return as_tensors(folded_tensors(self.architecture, source, self.folded, self.recipe.least_dtype))

    def _read(self, model: ModelReference) -> View:
        """The model whose tensors stand for one: itself, or the anchor with a change that samples chose."""
        if model not in self.donors or (carried := self.donors[model].carried) is None:
            return self.session.source(model)
        anchor = self.session.source(self.recipe.base)

        def changed(name: str, tensor: Tensor) -> Tensor:
            return view[name].to(tensor.device) if name in (view := carried()) else tensor

        return replace(anchor, tensors=anchor.tensors.map(changed))

    def _named(self, view: View, model: ModelReference) -> Tensors:
        """The tensors of a model, or of one read for it, by the output's names; tied ones under their first."""
        present: dict[str, str] = {}
        for out in self.blocks_of(model):
            stored = same_block(view, out.source(model))
            for info in out.block.tensors:
                stored_info = stored.tensor(info.key) or info
                for new, old in zip(info.names, stored_info.names, strict=True):
                    known = next((name for name in (old, *stored_info.tied) if name in view), None)
                    present |= {} if known is None else {new: known}
        return view.tensors.renamed(present).only(present)

    def _transforms(self, model: ModelReference, donor: Donor) -> LazyTransforms:
        """The transforms of a donor: of the whole model, or matched block by block; none where it does not move."""
        whole, names, finders = donor.whole, (str(self.recipe.base), donor.name), dict[str, Finder]()
        if whole is not None:
            finders = {name: (donor.whole_transforms, known) for name, known in self.spaces.items()}
        anchor, matched = map(self.folded_tensors, (self.anchor, self.origins.get(model, self.stored[model])))
        for out in self.blocks_of(model):
            options = self.recipe.options(out.reader, out.anchor.name, model)
            straight = whole is not None and out.sources[model].index == out.anchor.index
            if straight or not (wanted := [space.name for space in wanted_spaces(out.anchor, options)]):
                continue
            job = BlockMatching(out, anchor, matched, names, options, whole)
            self.matches.jobs.append(job)
            find = partial(self.matches.of, job)
            finders |= {name: (find, known) for name, known in out.spaces.items() if known in wanted}
        return LazyTransforms(finders)

    def _moved(self, model: ModelReference) -> Tensors:
        """A model's tensors in the anchor's coordinates, each rounded once."""
        stored, carried = self.stored[model], model in self.donors and self.donors[model].carried is not None
        if not (self.folded or model.lora or carried or model in self.transforms or model in self.origins):
            return stacks_once(self.architecture, stored)
        tensor_of, name = self._tensor_of(model), "the carried change" if carried else str(model)

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
        least = self.recipe.least_dtype if self.folded else None
        if (origin := self.origins.get(model)) is None:
            biases = folded_tensors(self.architecture, self.anchor, self.folded)
            return Mover(self.architecture, stored, alignment.transforms, self.folded, biases, least).tensor
        base = replace(self.base, architecture=self.architecture, tensors=self.anchor)
        donor = self.donors[model]
        tuned = padded_as(stored, origin, self.architecture)
        fold = Fold(self.architecture, self.folded, least) if self.folded else None
        change = Delta(base, origin, tuned, alignment, donor.pair.shared, folding=fold, scale=donor.scale)
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
