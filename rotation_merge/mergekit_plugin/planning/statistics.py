"""Statistics for delegates: the models' files, and the tasks that move them to the anchor's coordinates."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.averaging.methods import Plan, plan_of
from rotation_merge.errors import RotationMergeError, StatisticsError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.statistics import moved_fisher, moved_gram, value_shift
from rotation_merge.mergekit_plugin.planning.block_moves import BlockMoves, Move
from rotation_merge.mergekit_plugin.planning.blocks import same_block
from rotation_merge.mergekit_plugin.planning.delegate import AuxiliaryInput, DelegateTask
from rotation_merge.mergekit_plugin.planning.donors import Donors
from rotation_merge.mergekit_plugin.planning.opened import Models
from rotation_merge.mergekit_plugin.planning.output_tensor import OutputTensor
from rotation_merge.mergekit_plugin.planning.tasks import Loads, load_arguments, loaded, map_arguments
from rotation_merge.model.biases import read_by
from rotation_merge.model.blocks import Get
from rotation_merge.model.fold import Fold
from rotation_merge.model.hub import HubFile, local_file
from rotation_merge.model.labels import in_order
from rotation_merge.model.view import View
from rotation_merge.run.maps import LinearMap, linear_map
from rotation_merge.run.statistics import NAME, Gram, Statistics
from rotation_merge.symmetry import SpaceTransform


@dataclass
class StatisticsFiles:
    """The statistics files of a merge, opened and checked once each."""

    plan: Plan
    name: str
    models: Models
    opened: dict[ModelReference, Statistics] = field(default_factory=dict)

    def of(self, model: ModelReference, setting: str | None) -> Statistics:
        """A model's statistics.

        Args:
            setting: value in the recipe.

        Raises:
            StatisticsError: none exist, they belong to other weights, or lack an entry that the delegate needs.
        """
        if model not in self.opened:
            statistics = self.models.statistics.get(model)
            self.opened[model] = self._open(self.models[model], setting) if statistics is None else statistics
        return self.opened[model]

    def _open(self, model: View, setting: str | None) -> Statistics:
        path = self._place(model, setting)
        model_name, command = str(model.reference), self._command(model, setting, path is not None)
        if path is None:
            problem = f"there are no statistics at '{setting}'" if setting else "there are no statistics beside it"
            raise StatisticsError(f"{problem}, delegate {self.name} needs them", where=model_name, remedy=command)
        statistics = Statistics.open(path)
        statistics.check(self.plan.statistics, model.fingerprint, model_name, command)
        return statistics

    @staticmethod
    def _place(model: View, setting: str | None) -> str | None:
        reference = model.reference
        folder = reference.lora.path if reference.lora is not None else reference.model.path
        beside = folder if model.files is None or os.path.isdir(folder) else model.files.folder
        places = [os.path.join(beside, NAME)] if setting is None else [setting, os.path.join(beside, setting)]
        if setting is not None and HubFile.of(setting) is not None and not os.path.isfile(places[1]):
            return local_file(setting, model.options.transformers_cache)
        return next((place for place in places if os.path.isfile(place)), None)

    def _command(self, model: View, setting: str | None, exists: bool) -> str:
        """The commands that make a model's statistics where the recipe finds them."""
        kinds = "" if self.plan.statistics == "gram" else f" --kinds {self.plan.statistics}"
        out = f" --out {setting}" if setting and not exists else ""
        hint = ", and name the file that it writes under 'statistics'" if setting and exists else ""
        return f"run 'rotation-merge measure {model.reference} --data DATA{kinds}{out}'{hint}"


class CarriedStatistics:
    """Statistics of the models, carried along with them, for delegates that average by them."""

    def __init__(self, donors: Donors) -> None:
        self.donors, self.recipe, self.models, self.run = donors, donors.recipe, donors.models, donors.run
        method: Any = self.recipe.delegate
        self.plan, self.name = plan_of(method), str(method.spec.name)
        self.device = str(donors.options.device or "cpu")
        self.books = StatisticsFiles(self.plan, self.name, self.models)
        if self.plan.maps_only:
            note = f"Delegate {self.name}: embeddings, biases, norms and other tensors that are not linear maps"
            head = (
                ", and the head, which is tied to the embedding ('untie: true' gives it its own tensor),"
                if donors.tied_head is not None
                else ""
            )
            self.run.note(f"{note}{head} keep the average.")

    def needs(self, request: OutputTensor, models: Sequence[ModelReference]) -> dict[ModelReference, AuxiliaryInput]:
        info, moves = request.info, request.moves
        if self.plan.maps_only and linear_map(moves.out.anchor.block, info) is None:
            return {}
        books = self._books(models, request.reader)
        if self._no_parameter(info, moves, books):
            return {}
        called = [model for model in models if not self._uncalled(books[model], info, moves, model)]
        return {m: AuxiliaryInput((self._carry(info, moves, m, books[m]),), books[m].metadata, True) for m in called}

    def _books(self, models: Sequence[ModelReference], reader: ConfigReader) -> dict[ModelReference, Statistics]:
        """
        Raises:
            StatisticsError: names every model whose statistics are of no use, with the command that makes them.
        """
        books, wrong = {}, []
        for model in models:
            try:
                books[model] = self._book(model, reader)
            except StatisticsError as error:
                wrong.append(error)
        if len(wrong) == 1:
            raise wrong[0]
        if wrong:
            problem, remedy = "; ".join(f"{e.where}: {e.what}" for e in wrong), "; ".join(str(e.remedy) for e in wrong)
            raise StatisticsError(problem, remedy=remedy)
        return books

    def _book(self, model: ModelReference, reader: ConfigReader) -> Statistics:
        setting = self.recipe.of_model("statistics", reader, model)
        book = self.books.of(model, setting)
        source, count = str(book.metadata.get("data")), int(book.metadata.get("samples") or 0)
        self.run.used(f"statistics of {model}", source, count, None if setting else str(book.path))
        return book

    def _uncalled(self, book: Statistics, info: TensorInfo, moves: BlockMoves, model: ModelReference) -> bool:
        """Whether a map never ran on the samples that a model was measured on."""
        return self.plan.maps_only and self._names(info, moves, model)[0] in book.uncalled

    def _no_parameter(self, info: TensorInfo, moves: BlockMoves, books: Mapping[ModelReference, Statistics]) -> bool:
        """Whether no gradient could reach a tensor of any model, which then gets the mean."""
        buffers = self.plan.statistics == "fisher" and all(
            set(self._names(info, moves, name)) <= set(book.metadata.get("buffers", ())) for name, book in books.items()
        )
        if buffers:
            self.run.note(f"Delegate {self.name}: buffers, which no gradient reaches, keep the average.")
        return buffers

    @staticmethod
    def _names(info: TensorInfo, moves: BlockMoves, model: ModelReference) -> tuple[str, ...]:
        return (moves.found[model].source.block.tensor(info.key) or info).names

    def _carry(self, info: TensorInfo, moves: BlockMoves, model: ModelReference, book: Statistics) -> DelegateTask:
        move, names = moves.found[model], self._names(info, moves, model)
        framed = move.frame.tensor(info.key) or info
        shared = book.axes.get(names[0], names[0]) if self.plan.statistics == "gram" else names[0]
        mapped = linear_map(move.frame, framed) if self.plan.maps_only else None
        norm = None if mapped is None else mapped.norm
        feeds = [] if norm is None else [key for key in (norm.gain, norm.shift) if key and move.frame.tensor(key)]
        keys = moves.folded_from(move.frame, feeds)
        biases = moves.folded_from(move.frame, self._biases(move, framed))
        work = CarryStatistics(
            block=move.frame,
            info=framed,
            names=names,
            kind=self.plan.statistics,
            model_name=str(model),
            statistics=book,
            feeds=moves.loads(move.source, keys),
            biases=moves.loads(move.source, biases),
            anchor=moves.loads(same_block(self.models, self.recipe.base, move.frame), biases),
            fold=moves.fold,
            device=self.device,
            rows=self.models[model].rows.get(names[0]),
        )
        loads = load_arguments(feeds=work.feeds, biases=work.biases, anchor=work.anchor)
        return DelegateTask(
            key=f"statistics:{moves.out.number}:{model}:{shared}",
            label=moves.out.label,
            work=work,
            needs={**loads, **map_arguments(move.transforms, move.whole)},
        )

    def _biases(self, move: Move, info: TensorInfo) -> list[str]:
        """Keys of biases that change the inputs of a map, if its statistics can follow (see `carry.py`)."""
        value_bias = read_by(move.frame, info)
        matched = move.origin is None and (move.transforms is not None or move.whole is not None)
        if value_bias is None or not matched:
            return []
        if self.plan.statistics == "fisher":
            self.run.note(
                "Fisher diagonals of attention's output maps weigh by the donors' own inputs, before the anchor's "
                "biases are set."
            )
            return []
        return [value_bias.info.key]


@dataclass(frozen=True)
class CarryStatistics:
    """A model's statistics of one map (or of one tensor), in the anchor's coordinates.

    Attributes:
        names: of the tensor in the model's own checkpoint, one for each stored piece.
        feeds: loads of the gain and shift of the norm before the map.
        biases, anchor: loads of the values' bias that the map reads, in the model and in the anchor.
        rows: order that brings the model's classes into the anchor's (see `model/labels.py`).
    """

    block: Block
    info: TensorInfo
    names: tuple[str, ...]
    kind: str
    model_name: str
    statistics: Statistics
    feeds: Loads
    biases: Loads
    anchor: Loads
    fold: Fold | None
    device: str
    rows: tuple[int, tuple[int, ...]] | None

    def __call__(
        self,
        transforms: dict[str, SpaceTransform] | None = None,
        whole: Alignment | None = None,
        **values: Tensor | None,
    ) -> dict[str, Tensor]:
        maps = {**(whole.transforms if whole else {}), **(transforms or {})}
        try:
            if self.kind == "fisher":
                return {"fisher": self._fisher(maps)}
            linear = linear_map(self.block, self.info)
            if linear is None:
                raise StatisticsError(f"'{self.info.name}' is not a linear map")
            fed = self._behind_norm(linear, values)
            return {"gram": moved_gram(linear, fed.matrix, maps, self._shift(linear, maps, values))[..., :-1, :-1]}
        except RotationMergeError as error:
            raise StatisticsError(error.what, where=error.where or self.model_name, remedy=error.remedy) from error

    def _fisher(self, maps: Mapping[str, SpaceTransform]) -> Tensor:
        if self.fold is not None:
            raise StatisticsError(
                "a Fisher diagonal cannot be kept when norm gains are folded, which 'residual: rotation' needs",
                remedy="leave that out, or use delegate regmean",
            )
        pieces = [self.statistics[f"{name}.fisher"] for name in self.names if f"{name}.fisher" in self.statistics]
        if len(pieces) < len(self.names):
            raise StatisticsError(f"hold nothing of tensor '{self.names[0]}'", where=self.statistics.path)
        tensor = torch.stack(pieces) if self.info.stacked else pieces[0]
        return moved_fisher(self.info, in_order(tensor, self.rows).to(self.device), maps)

    def _shift(
        self, linear: LinearMap, maps: Mapping[str, SpaceTransform], values: Mapping[str, Tensor | None]
    ) -> Tensor | None:
        """The shift that the anchor's value bias adds to the map's inputs."""
        if not self.biases:
            return None

        donor, anchor = self._read("biases", self.biases, values), self._read("anchor", self.anchor, values)
        shift = value_shift(linear, donor, anchor, maps)
        return None if shift is None else shift.to(self.device)

    def _read(self, side: str, loads: Loads, values: Mapping[str, Tensor | None]) -> Get:
        """Gives loaded tensors by key, folded where the merge folds."""
        tensors, fold = loaded(side, loads, self.block, values), self.fold

        def get(key: str) -> Tensor | None:
            info = self.block.tensor(key)
            if info is None or key not in tensors:
                return None
            return tensors[key] if fold is None else fold.tensor(self.block, info, tensors.get)

        return get

    def _behind_norm(self, linear: LinearMap, values: Mapping[str, Tensor | None]) -> Gram:
        """The Gram of what the map reads, behind the gain and shift of its norm, folded where the merge folds."""
        gram = self.statistics.gram(self.names[0])
        if gram is None:
            problem, remedy = (
                f"hold nothing of tensor '{self.names[0]}'",
                "if transformers runs it in parts, use 'refit'",
            )
            raise StatisticsError(problem, where=self.statistics.path, remedy=f"measure again; {remedy}")
        norm = linear.norm
        if norm is not None and not gram.split and self.fold is not None and norm.stream in self.fold.streams:
            raise StatisticsError(
                f"the Gram of '{linear.info.name}' was measured after a norm gain that this merge folds",
                remedy="leave out 'residual: rotation', or measure the donor that 'align' wrote",
            )
        read = self._read("feeds", self.feeds, values)
        gain, shift = (None if norm is None else read(key or "") for key in (norm and norm.gain, norm and norm.shift))
        gain, shift = (None if x is None else x.to(self.device) for x in (gain, shift))
        gain = None if gain is None or norm is None else gain.double() + norm.offset
        return gram.to(self.device).behind_norm(linear, gain, shift)
