"""The parts that a recipe's models take in its output, as views of whole models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import torch
from mergekit.common import ModelReference

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.mergekit_plugin.block_match import BlockMatches, BlockMatching
from rotation_merge.mergekit_plugin.definitions import read_as
from rotation_merge.mergekit_plugin.donors import Donor, Donors
from rotation_merge.mergekit_plugin.moved import ChangedBlock, MovedBlock, OutputTensors, named_as, touches
from rotation_merge.mergekit_plugin.output import MergeOutput, OutputBlock, same_block
from rotation_merge.mergekit_plugin.recipe import title
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.statistics import MovedStatistics, OutputStatistics
from rotation_merge.model.fold import Fold
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View, stored_dtype
from rotation_merge.run.statistics import Statistics
from rotation_merge.symmetry import Transform


class RecipeViews:
    """Every model of a recipe as a view of the output: in the anchor's coordinates, by the output's names.

    Attributes:
        models: all that are merged, and the anchor.
    """

    def __init__(self, session: Session, donors: Donors, output: MergeOutput) -> None:
        self.session, self.donors, self.output = session, donors, output
        self.recipe, self.run = session.recipe, session.run
        base = self.recipe.base
        self.models = list(dict.fromkeys([base, *(m for out in output.blocks for m in out.sources)]))
        self.fold = Fold(output.anchor, donors.folded, donors.dtype) if donors.folded else None
        options = session.options
        cpu = torch.device(options.device or "cpu").type == "cpu" and not options.multi_gpu
        self.matches = BlockMatches(single=options.low_cpu_memory, pooled=cpu)
        self.run.endings.append(self.matches.end)
        anchor = [(out, self._anchor(out)) for out in output.blocks]
        self.anchor = OutputTensors(anchor)
        self.blocks = {base: [(out, part) for out, part in anchor if base in out.sources]}
        for model in (model for model in self.models if model != base):
            of_model = ((out, out.sources[model]) for out in output.blocks if model in out.sources)
            self.blocks[model] = [(out, self._part(out, model, block)) for out, block in of_model]
        self.tensors = {model: OutputTensors(blocks).tensors for model, blocks in self.blocks.items()}

    def view(self, model: ModelReference) -> View:
        """A model in the anchor's coordinates, as a model of the output's architecture."""
        opened, tensors = self.session.models[model], self.tensors[model]

        def at(dtype: torch.dtype) -> Tensors:
            return tensors.map(lambda _, tensor: tensor.to(stored_dtype(tensor, dtype)))

        return replace(opened, tensors=tensors, architecture=self.output.architecture, at=at)

    def served(self, model: ModelReference) -> View:
        """The same for mergekit: what is copied is the anchor's, and names are those that the recipe's filters see."""
        view = self.view(model)
        if model != self.recipe.base:
            copied = filter(self.recipe.excluded, self._names(model))
            view = replace(view, tensors=view.tensors.replaced(self.anchor.tensors.only(copied)))
        names = {read_as(name, stored_name): name for name, stored_name in self.own_names.get(model, {}).items()}
        return replace(view, tensors=view.tensors.renamed(names).only(_served(view.tensors, names)))

    @cached_property
    def own_names(self) -> dict[ModelReference, dict[str, str]]:
        """By model, own names of the output's layers, where the model calls any of them otherwise."""
        result: dict[ModelReference, dict[str, str]] = {}
        for out in self.output.blocks:
            for model, block in out.sources.items() if out.index is not None else ():
                for info in out.block.tensors:
                    stored_names = (block.tensor(info.key) or info).names
                    result.setdefault(model, {}).update(zip(info.names, stored_names, strict=True))
        return {model: names for model, names in result.items() if any(new != old for new, old in names.items())}

    def statistics(self, model: ModelReference, stored: Statistics) -> OutputStatistics:
        """A model's statistics, moved with it, by the output's names."""
        rows = self.session.models[model].rows
        blocks = [MovedStatistics(out, part, out.sources[model], stored, rows) for out, part in self.blocks[model]]
        return OutputStatistics(blocks, stored)

    def _names(self, model: ModelReference) -> Iterator[str]:
        """Names of the output's tensors that a model has a part in."""
        return (name for out, _ in self.blocks[model] for info in out.block.tensors for name in info.names)

    def _anchor(self, out: OutputBlock) -> MovedBlock:
        """The anchor's part; where all models are aligned to a mean it does not move either."""
        return self._moved(out, self.recipe.base, out.anchor, None, whole=False)

    def _part(self, out: OutputBlock, model: ModelReference, block: Block) -> MovedBlock:
        donor = self.donors.found.get(model, Donor())
        if donor.carried.view is not None:
            return self._carried(out, model, block, donor)
        origin = None if donor.origin is None else same_block(self.session.models, donor.origin, block)
        maps = self._maps(out, model, block, donor)
        part = self._moved(out, model, block, maps, whole=donor.whole is not None)
        if donor.origin is None or origin is None:
            return part
        tensors = self._named(donor.origin, origin, out.anchor)
        anchor = self.session.models[self.recipe.base]
        return ChangedBlock(
            **vars(part), origin=tensors, base=anchor, rows=donor.rows, scale=donor.carried.scale, run=self.run
        )

    def _moved(
        self,
        out: OutputBlock,
        model: ModelReference,
        block: Block,
        maps: Callable[[], Mapping[str, Transform]] | None,
        whole: bool,
    ) -> MovedBlock:
        base = self.recipe.base
        return MovedBlock(
            self.output.anchor,
            out.anchor,
            self._named(model, block, out.anchor),
            self._named(base, out.anchor, out.anchor),
            str(model),
            maps,
            whole,
            self.fold,
            lambda info: self.storage(model, block.tensor(info.key) or info),
            self._rounds,
            model.lora is not None,
        )

    def _carried(self, out: OutputBlock, model: ModelReference, block: Block, donor: Donor) -> MovedBlock:
        """The anchor with a donor's change, which samples chose."""
        base_block = same_block(self.session.models, self.recipe.base, block)
        part = self._moved(out, self.recipe.base, base_block, None, whole=False)
        names: dict[str, str] = {}
        for info in out.anchor.tensors:
            names.update(zip(info.names, (base_block.tensor(info.key) or info).names, strict=True))

        def changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
            assert donor.carried.view is not None
            view = donor.carried.view()
            return view[names[name]].to(tensor.device) if names[name] in view else tensor

        return replace(part, tensors=part.tensors.map(changed), name="the carried change", computed=True)

    def _maps(
        self, out: OutputBlock, model: ModelReference, block: Block, donor: Donor
    ) -> Callable[[], Mapping[str, Transform]] | None:
        """Gives the transforms of one donor's block: of the whole model, or matched block by block."""
        if donor.whole is not None and block.index == out.anchor.index:
            return lambda: donor.whole().transforms  # type: ignore[misc]
        options = self.recipe.options(out.reader, out.anchor.name, model)
        if not wanted_spaces(out.anchor, options):
            return None if donor.whole is None else lambda: donor.whole().transforms  # type: ignore[misc]
        matched = donor.origin or model
        origin = block if donor.origin is None else same_block(self.session.models, donor.origin, block)
        base = self.recipe.base
        anchor = self._named(base, out.anchor, out.anchor)
        job = BlockMatching(
            key=f"{out.number}:{model}",
            label=out.label,
            block=out.anchor,
            keys=self._keys(out.anchor, whole=donor.whole is not None),
            anchor=anchor,
            donor=self._named(matched, origin, out.anchor),
            anchor_name=str(base),
            donor_name=title(model, donor.origin),
            options=options,
            run=self.run,
            fold=self.fold,
            whole=donor.whole,
            weights=sum(math.prod(shape) for shape in anchor.shapes.values()),
        )
        self.matches.add(job)
        device = self.donors.device

        def maps() -> Mapping[str, Transform]:
            whole = {} if donor.whole is None else donor.whole().transforms
            return {**whole, **self.matches.of(job, device())}

        return maps

    def _keys(self, block: Block, whole: bool) -> tuple[str, ...]:
        """Keys of the tensors that a block is matched by."""
        infos = [info for info in block.tensors if touches(info, block, whole)]
        if self.fold is None:
            return tuple(info.key for info in infos)
        return tuple(dict.fromkeys(key for info in infos for key in self.fold.inputs(block, info)))

    def _named(self, model: ModelReference, block: Block, named: Block) -> Tensors:
        """A model's tensors of a block, by the names of the anchor's, on the device of the merge."""
        tensors = named_as(self.watched[model], block, named)
        device = self.donors.device
        return tensors.map(lambda _, tensor: tensor if (place := device()) is None else tensor.to(place))

    @cached_property
    def watched(self) -> Mapping[ModelReference, Tensors]:
        origins = [donor.origin for donor in self.donors.found.values() if donor.origin is not None]
        models = self.session.models
        return {model: models.watched(model, self.run) for model in dict.fromkeys([*self.models, *origins])}

    def storage(self, model: ModelReference, info: TensorInfo) -> torch.dtype | None:
        """Type in which a model's tensor would be written: the recipe's, else that of its file."""
        if self.recipe.dtype is not None:
            return self.recipe.dtype
        dtypes = self.session.models[model].stored_dtypes
        return next((dtypes[name] for name in (*info.names, *info.tied) if name in dtypes), None)

    @property
    def _rounds(self) -> bool:
        """Whether models are rounded before they are averaged; a method of our own rounds the result alone."""
        return self.recipe.own_method is None


def _served(tensors: Tensors, names: Mapping[str, str]) -> list[str]:
    """The names of tensors, under the names that stand for some of them."""
    renamed = {old: new for new, old in names.items()}
    return [renamed.get(name, name) for name in tensors]
