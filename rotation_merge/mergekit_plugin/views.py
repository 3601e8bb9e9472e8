"""Every model of a recipe as a view of its output, in the anchor's coordinates; tensors are computed when asked for.

Local spaces are matched block by block ahead of the merge: matching hides behind reading, averaging and writing, and
scales with cores. Only a few blocks are matched ahead, so that a large model's files are still in memory when the merge
comes to read them. Until they are done the thread that asks computes with the threads that are left, at least one: more
would only wait for cores that others use.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
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
from rotation_merge.matching.block import BlockMatch, checked, match_block, named, wanted_spaces
from rotation_merge.matching.moving import moved_tensors, mover
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.donors import Donor
from rotation_merge.mergekit_plugin.output import OutputBlock, readers_of
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.apply import blockwise, read_block
from rotation_merge.model.fold import Fold, folded_tensors
from rotation_merge.model.tensors import Tensors, as_tensors, by_name
from rotation_merge.model.view import TensorOf, View
from rotation_merge.model.vocabulary import padded_as
from rotation_merge.symmetry import Transform
from rotation_merge.workers import in_order, workers_for

Transforms = Mapping[str, Transform]
MatchBlock = Callable[[torch.device | None], BlockMatch]


def on_device(transforms: Transforms, device: torch.device | None) -> Transforms:
    """Transforms on a device; None: where they are."""
    return transforms if device is None else {name: transform.to(device) for name, transform in transforms.items()}


class BlockMatches:
    """The matches of a merge's blocks, each found once: on a CPU by a pool, ahead of the merge.

    Args:
        run: records them, and has those of an earlier run.
        device: gives the accelerator of a thread; None: a pool works ahead on the CPU.
        single: one block at a time (`--low-cpu-memory`).
    """

    def __init__(self, run: Run, device: Callable[[], torch.device | None], single: bool = False) -> None:
        self.run, self.device, self.single, self.largest = run, device, single, 1
        self._jobs: dict[str, tuple[str, MatchBlock]] = {}
        self._ahead = self._matched_ahead()
        self._transforms: dict[str, Transforms] = {}
        self._locks: dict[str, Lock] = defaultdict(Lock)

    def add(self, label: str, donor: str, weights: int, match: MatchBlock) -> Callable[[], Transforms]:
        """Add one donor's block that is to be matched to the anchor's.

        Args:
            label: its first tensor's name, which sorts blocks in the order in which the merge asks for them.
            donor: its name in the report.
            weights: number of weights in the block.
            match: reads both blocks and matches them, on a device.

        Returns:
            What waits for the transforms of its local spaces, while the following blocks are begun.
        """
        key, self.largest = f"{label}:{donor}", max(self.largest, weights)  # also its name in the ledger
        self._jobs[key] = donor, match
        return partial(self._of, key)

    def _of(self, key: str) -> Transforms:
        device = self.device()
        if key not in self._transforms:
            with self._locks["" if device is None else key]:
                while key not in self._transforms:
                    matched, match = next(self._ahead) if device is None else (key, self._match(key, device))
                    self.run.record(self._jobs[matched][0], match.rows)
                    self._transforms[matched] = match.transforms
                if len(self._transforms) == len(self._jobs):
                    self.end()
        return on_device(self._transforms[key], device)

    def _match(self, key: str, device: torch.device | None = None) -> BlockMatch:
        known: BlockMatch | None = self.run.ledger.get(key)
        match = known or self._jobs[key][1](device)
        if known is None:
            self.run.ledger.keep(key, lambda: match)
        return match

    def _matched_ahead(self) -> Generator[tuple[str, BlockMatch], None, None]:
        """All matches, in the order in which the merge will ask for them."""
        keys, threads = sorted(self._jobs), torch.get_num_threads()
        count = 1 if self.single else workers_for(self.largest)
        for key, match in zip(keys, in_order([self._match] * count, keys), strict=True):
            torch.set_num_threads(max(1, threads - count))
            yield key, match

    def end(self) -> None:
        """Drop all waiting work; running blocks end by themselves, and no process waits for them."""
        self._ahead.close()


class LazyTransforms(dict[str, Transform]):
    """Transforms by space, each found whenever it is asked for.

    Args:
        finders: by space: gives transforms, and the space's name among them; without any nothing moves.
    """

    def __init__(self, finders: Mapping[str, tuple[Callable[[], Transforms], str]]) -> None:
        super().__init__()
        self.finders = finders

    def __missing__(self, space: str) -> Transform:
        find, name = self.finders[space]
        return find()[name]

    def __contains__(self, space: object) -> bool:
        find, name = self.finders.get(str(space), (dict, ""))
        return name in find()


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
        preparations: work on whole models, done before single tensors are merged.
    """

    def __init__(self, session: Session, blocks: Sequence[OutputBlock], donors: Mapping[ModelReference, Donor]) -> None:
        self.session, self.recipe, self.base = session, session.recipe, session.base
        self.blocks, self.donors, self.readers = blocks, donors, readers_of(blocks)
        self.architecture = replace(self.base.architecture, blocks=tuple(out.block for out in blocks))
        self.spaces = {name: name for name in self.architecture.streams}
        self.spaces.update(names for out in blocks for names in out.spaces.items())
        self.folded = tuple(name for name, anchor_name in self.spaces.items() if anchor_name in session.run.folded)
        self.matches = BlockMatches(session.run, session.device, session.options.low_cpu_memory)
        session.run.endings.append(self.matches.end)
        models = dict.fromkeys([self.recipe.base, *self.readers])
        self.stored = {model: self._named(self._read(model), model) for model in models}
        by_maps = {model: donor for model, donor in donors.items() if not donor.carried}
        self.origins = {m: self._named(session.source(d.origin), m) for m, d in by_maps.items() if d.origin}
        transforms = {model: self._transforms(model, donor) for model, donor in by_maps.items()}
        self.transforms = {model: maps for model, maps in transforms.items() if maps.finders}
        self.tensors = {model: stacks_once(self.architecture, self._moved(model)) for model in models}
        self.preparations = [find for donor in donors.values() for find in donor.preparations()]

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

    def moved(self, model: ModelReference) -> View:
        """A donor by itself: in the anchor's coordinates under its own names, with its own head."""
        view = self.session.models[model]
        transforms, folded = self.transforms_of(model), self.session.run.folded
        return replace(view, tensors=moved_tensors(view.architecture, view.tensors, transforms, folded), at=None)

    def view(self, model: ModelReference) -> View:
        """A model in the anchor's coordinates, as a model of the output's architecture."""
        opened = self.session.models[model]
        return replace(opened, tensors=self.tensors[model], architecture=self.architecture, at=None)

    def served(self, model: ModelReference) -> View:
        """The same for mergekit: what is copied is the anchor's."""
        view, anchor = self.view(model), self.tensors[self.recipe.base]
        whole = {name for out in self.blocks if not out.sources for info in out.block.tensors for name in info.names}
        copied = (name for name in anchor if name in whole or self.recipe.excluded(name))
        return replace(view, tensors=view.tensors.replaced(anchor.only(copied)))

    def transforms_of(self, model: ModelReference) -> dict[str, Transform]:
        """The transforms of a donor, all found, by the anchor's names of its spaces."""
        donor, transforms = self.donors[model], self.transforms.get(model)
        if transforms is None:
            return dict(self.session.run.transforms.get(donor.name, {}))
        whole = donor.whole().transforms if donor.whole else {}  # those of layers that the output leaves out, too
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
        names = {new: old for out in self.blocks_of(model) for new, old in out.names_in(model, view).items()}
        return view.tensors.renamed(names).only(names)

    def _transforms(self, model: ModelReference, donor: Donor) -> LazyTransforms:
        """The transforms of a donor: of the whole model, or matched block by block; none where it does not move."""
        whole = donor.whole
        streams: Callable[[], Transforms] = dict if whole is None else lambda: whole().transforms
        finders = {} if whole is None else {name: (streams, known) for name, known in self.spaces.items()}
        anchor, matched = map(self.folded_tensors, (self.anchor, self.origins.get(model, self.stored[model])))
        for out in self.blocks_of(model):
            options = donor.options_in(out.anchor.name, out.reader)
            spaces = [space.name for space in wanted_spaces(out.anchor, options)]
            straight = whole is not None and out.sources[model].index == out.anchor.index
            if spaces and not straight:
                find = self._matched_block(out, anchor, matched, donor.name, options, streams)
                finders |= {name: (find, known) for name, known in out.spaces.items() if known in spaces}
        return LazyTransforms(finders)

    def _matched_block(
        self,
        out: OutputBlock,
        anchor: Tensors,
        donor: Tensors,
        name: str,
        options: AlignConfig,
        streams: Callable[[], Transforms],
    ) -> Callable[[], Transforms]:
        """Gives the transforms of one block, of tensors that are folded, under those of the donor's streams."""
        local = {space.name for space in out.block.spaces.values()}
        compared = [info for info in out.block.tensors if any(space.name in local for space in info.spaces())]
        part = replace(out.block, tensors=tuple(compared))

        def match(device: torch.device | None) -> BlockMatch:
            blocks = read_block(part, anchor), read_block(part, donor)
            with named(str(self.recipe.base), name):
                return match_block(out.anchor, *checked(out.anchor, *blocks), options, on_device(streams(), device))

        tensors = [tensor for info in out.block.tensors for tensor in info.names]
        weights = sum(math.prod(anchor.shapes.get(tensor, (0,))) for tensor in tensors)
        return self.matches.add(min(tensors, default=""), name, weights, match)

    def _moved(self, model: ModelReference) -> Tensors:
        """A model's tensors in the anchor's coordinates, each rounded once."""
        stored, carried = self.stored[model], model in self.donors and self.donors[model].carried is not None
        if not (self.folded or model.lora or carried or model in self.transforms or model in self.origins):
            return stored
        tensor_of, name = self._tensor_of(model), "the carried change" if carried else str(model)

        def compute(block: Block, info: TensorInfo) -> Tensor | None:
            dtype = self.recipe.dtype or stored.dtypes[info.name]
            if self.recipe.own_method is not None:  # which rounds the result alone
                dtype = torch.promote_types(dtype, torch.float32)
            tensor = tensor_of(block, info, dtype)
            return None if tensor is None else check_finite(tensor, info.name, name)

        return blockwise(self.architecture, stored, compute)

    def _tensor_of(self, model: ModelReference) -> TensorOf:
        """Computes tensors of a model, moved by its transforms; of a fine-tune the anchor's, with its change."""
        stored, alignment = self.stored[model], Alignment(self.transforms.get(model, {}), self.folded)
        least = self.recipe.least_dtype if self.folded else None
        if (origin := self.origins.get(model)) is None:
            return mover(self.architecture, stored, alignment.transforms, self.folded, least)
        base, donor = replace(self.base, architecture=self.architecture, tensors=self.anchor), self.donors[model]
        fold = Fold(self.architecture, self.folded, least) if self.folded else None
        tuned = padded_as(stored, origin, self.architecture)
        change = Delta(base, origin, tuned, alignment, donor.pair.shared, folding=fold)
        scaled = change.scaled(donor.transfer.factor or 0.0)
        return replace(scaled, record=partial(self.session.run.transport, str(model))).tensor


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
