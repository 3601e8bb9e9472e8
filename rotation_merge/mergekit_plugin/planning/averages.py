"""The tasks of delegates that average by statistics: statistics found, carried along, and used."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from mergekit.graph import Task
from pydantic import Field
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.averaging.methods import HALF, Averaging, Source, averaged
from rotation_merge.averaging.moved_statistics import (
    Feeding,
    carried_fisher,
    carried_gradient,
    carried_gram,
    feeding,
    feeding_keys,
)
from rotation_merge.errors import RotationMergeError, StatisticsError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.planning.blocks import same_block
from rotation_merge.mergekit_plugin.planning.moves import Move, Moves
from rotation_merge.mergekit_plugin.planning.tasks import KeyedTask, Loads, load_arguments, loaded, map_arguments
from rotation_merge.mergekit_plugin.planning.wanted import Wanted
from rotation_merge.mergekit_plugin.recipe.reading import Recipe
from rotation_merge.model.apply import transform_tensor
from rotation_merge.model.biases import along, read_by, shifted
from rotation_merge.model.checkpoint import Model, Models
from rotation_merge.model.fold import Fold
from rotation_merge.model.hub import HubFile, local_file
from rotation_merge.model.labels import in_order
from rotation_merge.run.maps import LinearMap, linear_map
from rotation_merge.run.statistics_file import NAME, Statistics
from rotation_merge.symmetry import SpaceTransform


@dataclass
class Books:
    """The statistics files of a merge, opened and checked once each."""

    method: Averaging
    models: Models
    found: dict[ModelReference, Statistics] = field(default_factory=dict)

    def of(self, model: ModelReference, given: str | None) -> Statistics:
        """A model's statistics.

        Args:
            given: what the recipe says.

        Raises:
            StatisticsError: there are none, they are of other weights or do not hold what the delegate needs.
        """
        if model not in self.found:
            self.found[model] = self._open(self.models[model], given)
        return self.found[model]

    def _open(self, model: Model, given: str | None) -> Statistics:
        path = self._place(model, given)
        where, command = str(model.reference), self._command(model, given, path is not None)
        if path is None:
            what = f"no statistics are at '{given}'" if given else "no statistics lie beside it"
            raise StatisticsError(f"{what}, delegate {self.method.spec.name} needs them", where=where, remedy=command)
        found = Statistics.open(path)
        if self.method.kind not in found.made.get("kinds", ()):
            raise StatisticsError(
                f"'{path}' holds {', '.join(found.made.get('kinds', ())) or 'nothing'}, "
                f"delegate {self.method.spec.name} needs {self.method.kind}",
                where=where,
                remedy=command,
            )
        if found.made.get("fingerprint") != model.fingerprint:
            raise StatisticsError(
                f"'{path}' was measured on other weights than these ('{found.made.get('model')}')",
                where=where,
                remedy=command,
            )
        return found

    @staticmethod
    def _place(model: Model, given: str | None) -> str | None:
        reference = model.reference
        folder = reference.lora.path if reference.lora is not None else reference.model.path
        beside = folder if os.path.isdir(folder) else str(model.loader.index.base_path)
        places = [os.path.join(beside, NAME)] if given is None else [given, os.path.join(beside, given)]
        if given is not None and HubFile.of(given) is not None and not os.path.isfile(places[1]):
            return local_file(given, model.options.transformers_cache)
        return next((place for place in places if os.path.isfile(place)), None)

    def _command(self, model: Model, given: str | None, found: bool) -> str:
        """How to make a model's statistics, and have the recipe find them."""
        kinds = "" if self.method.kind == "gram" else f" --kinds {self.method.kind}"
        out = f" --out {given}" if given and not found else ""
        told = ", and name the file that it writes under 'statistics'" if given and found else ""
        return f"run 'rotation-merge measure {model.reference} --data DATA{kinds}{out}'{told}"


@dataclass
class Averages:
    """Plans the tensors of a merge whose delegate averages by statistics."""

    method: Averaging
    recipe: Recipe
    models: Models
    run: Run
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.books = Books(self.method, self.models)
        self.weighed: set[str] = set()
        self.run.told_later(self._words)
        if self.method.maps_only:
            note = (
                f"Delegate {self.method.spec.name}: embeddings, biases, norms and other tensors that are no linear maps"
            )
            tied = self.models[self.recipe.base].tied_head is not None and not self.recipe.untie
            head = ", and the head, which is tied to the embedding ('untie: true' would free it)," if tied else ""
            self.run.note(f"{note}{head} keep the average.")

    def task(self, wanted: Wanted) -> AverageTensor:
        """
        Raises:
            RotationMergeError: statistics are missing or of other weights, a parameter means nothing.
        """
        self.method.check(wanted.parameters)
        wanted.check_shares(self.method.spec.name)
        order, info, moves = wanted.models(self.recipe.base), wanted.info, wanted.moves
        one = linear_map(moves.out.anchor.block, info)
        by_statistics = not self.method.maps_only or one is not None
        books = self._books(order, wanted.reader) if by_statistics else {}
        by_statistics = by_statistics and not self._no_parameter(info, moves, books)
        called = [model for model in order if not self._uncalled(books.get(model), info, moves, model)]
        carried = [self._carry(info, moves, model, books[model]) for model in called] if by_statistics else []
        if self.method.kind == "kfac" and any(b.is_half(self._names(info, moves, m)[0]) for m, b in books.items()):
            self.run.note(HALF)
        if carried:
            self.weighed.update(info.names)
        return AverageTensor(
            key=wanted.key,
            label=wanted.label,
            gather=wanted.gather,
            method=self.method,
            order=tuple(called if carried else order),
            shares=tuple(wanted.shares[model] for model in (called if carried else order)),
            parameters=dict(wanted.parameters),
            carried=tuple(carried),
            flipped=bool(carried) and self.method.maps_only and one is not None and one.reads < one.gives,
            piece=wanted.piece if info.stacked else None,
        )

    def _words(self) -> list[str]:
        """What was averaged by statistics, for the report."""
        kind = "linear maps" if self.method.maps_only else "tensors"
        how = "by statistics of the models on samples, not by position"
        return [f"Delegate {self.method.spec.name} averaged {len(self.weighed)} {kind} {how}."]

    def _books(self, models: Sequence[ModelReference], reader: ConfigReader) -> dict[ModelReference, Statistics]:
        """
        Raises:
            StatisticsError: names every model whose statistics are of no use, with the command that makes them.
        """
        found, wrong = {}, []
        for model in models:
            try:
                found[model] = self._book(model, reader)
            except StatisticsError as error:
                wrong.append(error)
        if len(wrong) == 1:
            raise wrong[0]
        if wrong:
            what, remedy = "; ".join(f"{e.where}: {e.what}" for e in wrong), "; ".join(str(e.remedy) for e in wrong)
            raise StatisticsError(what, remedy=remedy)
        return found

    def _book(self, model: ModelReference, reader: ConfigReader) -> Statistics:
        given = self.recipe.of_model("statistics", reader, model)
        book = self.books.of(model, given)
        source, count = str(book.made.get("data")), int(book.made.get("samples") or 0)
        self.run.used(f"statistics of {model}", source, count, None if given else str(book.path))
        return book

    def _uncalled(self, book: Statistics | None, info: TensorInfo, moves: Moves, model: ModelReference) -> bool:
        """Whether a map never ran on the samples that a model was measured on."""
        return book is not None and self.method.maps_only and self._names(info, moves, model)[0] in book.uncalled

    def _no_parameter(self, info: TensorInfo, moves: Moves, books: Mapping[ModelReference, Statistics]) -> bool:
        """Whether no gradient could reach a tensor of any model, which then gets the mean."""
        found = self.method.kind == "fisher" and all(
            set(self._names(info, moves, model)) <= set(book.made.get("buffers", ())) for model, book in books.items()
        )
        if found:
            self.run.note(f"Delegate {self.method.spec.name}: buffers, which no gradient reaches, keep the average.")
        return found

    @staticmethod
    def _names(info: TensorInfo, moves: Moves, model: ModelReference) -> tuple[str, ...]:
        return (moves.found[model].source.block.tensor(info.key) or info).names

    def _carry(self, info: TensorInfo, moves: Moves, model: ModelReference, book: Statistics) -> CarryStatistics:
        move, names = moves.found[model], self._names(info, moves, model)
        framed = move.frame.tensor(info.key) or info
        shared = book.inputs.get(names[0], names[0]) if self.method.kind == "gram" else names[0]
        mine = linear_map(move.frame, framed) if self.method.maps_only else None
        feeds = [] if mine is None else feeding_keys(mine)
        keys = moves.folded_from(move.frame, feeds)
        biases = moves.folded_from(move.frame, self._biases(move, framed))
        return CarryStatistics(
            key=f"{moves.out.number}:{model}:{shared}",
            label=moves.out.label,
            block=move.frame,
            info=framed,
            names=names,
            kind=self.method.kind,
            model_name=str(model),
            statistics=book,
            feeds=moves.loads(move.source, keys),
            biases=moves.loads(move.source, biases),
            anchor=moves.loads(same_block(self.models, self.recipe.base, move.frame), biases),
            fold=moves.fold,
            transforms=move.transforms,
            whole=move.whole,
            device=self.device,
            rows=self.models[model].rows.get(names[0]),
        )

    def _biases(self, move: Move, info: TensorInfo) -> list[str]:
        """Keys of biases that a map reads and the donor is given anew, where its statistics follow (see `carry.py`)."""
        one = read_by(move.frame, info)
        matched = move.origin is None and (move.transforms is not None or move.whole is not None)
        if one is None or one.values is None or not matched:
            return []
        if self.method.kind == "fisher":
            self.run.note(
                "Fisher diagonals of the maps that read attention's values weigh by what the donors themselves read "
                "there, before they are given the anchor's biases."
            )
            return []
        return [one.values.key]


class CarryStatistics(KeyedTask):
    """What a model's statistics say of one map (or of one tensor), in the anchor's coordinates.

    Attributes:
        names: of the tensor in the model's own checkpoint, one for each stored piece.
        feeds: loads of the norm's gain and shift, and of the layer scale, that stand around the map.
        biases, anchor: loads of the values' bias that the map reads, in the model and in the anchor.
        rows: what puts the model's classes into the anchor's order (see `model/labels.py`).
    """

    block: Block = Field(repr=False)
    info: TensorInfo = Field(repr=False)
    names: tuple[str, ...]
    kind: str
    model_name: str
    statistics: Statistics = Field(repr=False)
    feeds: Loads = Field(default_factory=dict, repr=False)
    biases: Loads = Field(default_factory=dict, repr=False)
    anchor: Loads = Field(default_factory=dict, repr=False)
    fold: Fold | None = Field(default=None, repr=False)
    transforms: Task | None = None
    whole: Task | None = None
    device: str = "cpu"
    rows: tuple[int, tuple[int, ...]] | None = Field(default=None, repr=False)

    def arguments(self) -> dict[str, Task]:
        loads = load_arguments(feeds=self.feeds, biases=self.biases, anchor=self.anchor)
        return {**loads, **map_arguments(self.transforms, self.whole)}

    def execute(
        self,
        transforms: dict[str, SpaceTransform] | None = None,
        whole: Alignment | None = None,
        **values: Tensor | None,
    ) -> dict[str, Tensor]:
        maps = {**(whole.transforms if whole else {}), **(transforms or {})}
        try:
            if self.kind == "fisher":
                return {"fisher": self._fisher(maps)}
            one = linear_map(self.block, self.info)
            if one is None:
                raise StatisticsError(f"'{self.info.name}' is no linear map")
            return self._of_map(one, maps, self._feeding(one, values), self._shift(one, maps, values))
        except RotationMergeError as error:
            raise StatisticsError(error.what, where=error.where or self.model_name, remedy=error.remedy) from error

    def _fisher(self, maps: Mapping[str, SpaceTransform]) -> Tensor:
        if self.fold is not None:
            raise StatisticsError(
                "a Fisher diagonal does not survive folded gains, which 'residual: rotation' needs",
                remedy="leave that out, or use delegate kfac",
            )
        pieces = [self.statistics[f"{name}.fisher"] for name in self.names if f"{name}.fisher" in self.statistics]
        if len(pieces) < len(self.names):
            raise StatisticsError(f"hold nothing of tensor '{self.names[0]}'", where=self.statistics.path)
        tensor = torch.stack(pieces) if self.info.stacked else pieces[0]
        return carried_fisher(self.info, in_order(tensor, self.rows).to(self.device), maps)

    def _shift(
        self, one: LinearMap, maps: Mapping[str, SpaceTransform], values: Mapping[str, Tensor | None]
    ) -> Tensor | None:
        """What the anchor's bias of values adds to all that the map reads."""
        found = read_by(self.block, one.info) if self.biases else None
        if found is None or found.space.name not in maps:
            return None

        def of(side: str, loads: Loads, key: str) -> Tensor | None:
            info, tensors = self.block.tensor(key), loaded(side, loads, self.block, values)
            if info is None or key not in tensors:
                return None
            return tensors[key] if self.fold is None else self.fold.tensor(self.block, info, tensors.get)

        def moved(key: str) -> Tensor | None:
            own, info = of("biases", self.biases, key), self.block.tensor(key)
            return None if own is None or info is None else transform_tensor(own, info, maps)

        shift = shifted(found, moved, lambda key: of("anchor", self.anchor, key))
        return None if shift is None else along(found, one.info, one.reads, shift.to(self.device))

    def _of_map(
        self, one: LinearMap, maps: Mapping[str, SpaceTransform], feeding: Feeding, shift: Tensor | None
    ) -> dict[str, Tensor]:
        gram = self.statistics.gram(self.names[0])
        if gram is None:
            what, remedy = f"hold nothing of tensor '{self.names[0]}'", "if transformers runs it in parts, use 'refit'"
            raise StatisticsError(what, where=self.statistics.path, remedy=f"measure anew; {remedy}")
        found = carried_gram(one, gram.to(self.device), maps, feeding, shift)
        key = f"{self.names[0]}.gradient"
        if self.kind == "kfac" and key in self.statistics:
            behind = self.names[0] in self.statistics.behind
            gradient = self.statistics[key]
            for dim in (0, 1):
                gradient = in_order(gradient, self.rows and (dim, self.rows[1]))
            found["gradient"] = carried_gradient(one, gradient.to(self.device), behind, maps, feeding)
        return found

    def _feeding(self, one: LinearMap, values: Mapping[str, Tensor | None]) -> Feeding:
        tensors = loaded("feeds", self.feeds, self.block, values)
        return feeding({key: tensor.to(self.device) for key, tensor in tensors.items()}, one, self.fold)


class AverageTensor(KeyedTask):
    """One output tensor, averaged by a delegate of ours.

    Attributes:
        gather: gives each model's tensor.
        order: the models that count, the anchor first.
        carried: what gives each model's statistics, in that order; empty where the mean is taken.
        piece: which of the stacked pieces this is; None where it is not one of several.
    """

    gather: Task
    method: Averaging = Field(repr=False)
    order: tuple[ModelReference, ...] = Field(repr=False)
    shares: tuple[float, ...] = Field(repr=False)
    parameters: dict[str, Any] = Field(repr=False)
    carried: tuple[CarryStatistics, ...] = Field(default=(), repr=False)
    flipped: bool = False
    piece: int | None = None

    def arguments(self) -> dict[str, Task]:
        return {"tensors": self.gather, **{f"held{i}": task for i, task in enumerate(self.carried)}}

    def execute(self, tensors: dict[ModelReference, Tensor], **held: dict[str, Tensor]) -> Tensor:
        first = tensors[self.order[0]]
        if not first.is_floating_point():
            return first
        sources = []
        for number, (model, share) in enumerate(zip(self.order, self.shares, strict=True)):
            own = {name: self._of_piece(x) for name, x in held.get(f"held{number}", {}).items()}
            made = self.carried[number].statistics.made if self.carried else {}
            sources.append(Source(self._flip(tensors[model]), share, own, made))
        try:
            result = averaged(sources) if not self.carried else self._pieces(sources)
        except StatisticsError as error:
            raise StatisticsError(error.what, where=error.where or self.label, remedy=error.remedy) from error
        return self._flip(result).to(first.dtype)

    def _of_piece(self, held: Tensor) -> Tensor:
        return held if self.piece is None else held[self.piece]

    def _pieces(self, sources: list[Source]) -> Tensor:
        """The average; of a stack of maps in one tensor, one map after the other."""
        if self.method.maps_only and sources[0].weight.ndim == 3:
            rows = range(len(sources[0].weight))
            return torch.stack([self.method.average([_row(s, i) for s in sources], self.parameters) for i in rows])
        return self.method.average(sources, self.parameters)

    def _flip(self, tensor: Tensor) -> Tensor:
        """Maps as (outputs, inputs), whatever way they are stored; and back."""
        return tensor.mT if self.flipped else tensor


def _row(source: Source, row: int) -> Source:
    return Source(source.weight[row], source.share, {name: x[row] for name, x in source.held.items()}, source.made)
