"""The statistics that a recipe's models bring: where they lie, and whether they are of any use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from torch import Tensor

from rotation_merge.architecture.model import Block
from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.errors import StatisticsError
from rotation_merge.matching.basis import hidden_biases
from rotation_merge.matching.statistics import moved_statistics
from rotation_merge.mergekit_plugin.moved import MovedBlock
from rotation_merge.mergekit_plugin.output import OutputBlock
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.hub import HubFile, local_file
from rotation_merge.model.view import View
from rotation_merge.run.statistics import NAME, Gram, Statistics


@dataclass(frozen=True)
class RecipeStatistics:
    """Opens and checks the statistics that a method asks of every model."""

    session: Session
    method: OwnMethod

    def opened(self, readers: Mapping[ModelReference, ConfigReader]) -> dict[ModelReference, Statistics]:
        """The statistics of some models.

        Args:
            readers: look up the parameters of each.

        Raises:
            StatisticsError: names every model whose statistics are of no use, with the command that makes them.
        """
        books, wrong = dict[ModelReference, Statistics](), list[StatisticsError]()
        for model, reader in readers.items():
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
        setting = self.session.recipe.of_model("statistics", reader, model)
        book = self._open(self.session.models[model], setting)
        source, count = str(book.metadata.get("data")), int(book.metadata.get("samples") or 0)
        self.session.run.used(f"statistics of {model}", source, count, None if setting else str(book.path))
        return book

    def _open(self, model: View, setting: str | None) -> Statistics:
        path = _place(model, setting)
        model_name, command = str(model.reference), self._command(model, setting, path is not None)
        if path is None:
            problem = f"there are no statistics at '{setting}'" if setting else "there are no statistics beside it"
            needs = f"{problem}, delegate {self.method.spec.name} needs them"
            raise StatisticsError(needs, where=model_name, remedy=command)
        statistics = Statistics.open(path)
        statistics.check(self.method.statistics, model.fingerprint, model_name, command)
        return statistics

    def _command(self, model: View, setting: str | None, exists: bool) -> str:
        """The commands that make a model's statistics where the recipe finds them."""
        kinds = "" if self.method.statistics == "gram" else f" --kinds {self.method.statistics}"
        out = f" --out {setting}" if setting and not exists else ""
        hint = ", and name the file that it writes under 'statistics'" if setting and exists else ""
        return f"run 'rotation-merge measure {model.reference} --data DATA{kinds}{out}'{hint}"


def _place(model: View, setting: str | None) -> str | None:
    """The file of a model's statistics: the one that is named, or the one beside the model."""
    reference = model.reference
    folder = reference.lora.path if reference.lora is not None else reference.model.path
    beside = folder if model.files is None or os.path.isdir(folder) else model.files.folder
    places = [os.path.join(beside, NAME)] if setting is None else [setting, os.path.join(beside, setting)]
    if setting is not None and HubFile.of(setting) is not None and not os.path.isfile(places[1]):
        return local_file(setting, model.options.transformers_cache)
    return next((place for place in places if os.path.isfile(place)), None)


@dataclass(frozen=True)
class MovedStatistics:
    """One model's statistics of one output block, moved as the model's part is, by the names of the output.

    Attributes:
        model_block: the model's block.
        stored: of the whole model, as measured.
        rows: what puts the model's classes into the anchor's order, by its own names.
    """

    out: OutputBlock
    part: MovedBlock
    model_block: Block
    stored: Statistics
    rows: Mapping[str, tuple[int, tuple[int, ...]]]

    @cached_property
    def own_names(self) -> dict[str, str]:
        """By the anchor's name of a tensor the model's."""
        pairs = ((info, self.model_block.tensor(info.key) or info) for info in self.part.block.tensors)
        return {new: old for info, model_info in pairs for new, old in zip(info.names, model_info.names, strict=True)}

    @cached_property
    def output_names(self) -> dict[str, str]:
        """By the output's name of a tensor the anchor's."""
        return {new: old for info, frame in self.out.pairs() for new, old in zip(info.names, frame.names, strict=True)}

    @cached_property
    def moved(self) -> Statistics:
        block, folded = replace(self.part.architecture, blocks=(self.part.block,)), self.part.folded
        matched = type(self.part) is MovedBlock and self.part.maps is not None
        anchor, donor = (
            hidden_biases(block, source, folded) if matched else {} for source in (self.part.anchor, self.part.tensors)
        )
        rows = {new: self.rows[old] for new, old in self.own_names.items() if old in self.rows}
        maps, stored = self.part.alignment.transforms, self.stored.renamed(self.own_names)
        moved = moved_statistics(stored, block, maps, folded, (anchor, donor), rows, torch.float64)
        return moved.renamed(self.output_names)


class OutputStatistics:
    """The statistics of one model by the names of the output; each block's are moved when they are asked for.

    Attributes:
        metadata: of the file; its `buffers` by the names of the output.
        path: of the file.
        uncalled: maps that never ran on the samples.
    """

    def __init__(self, blocks: Sequence[MovedStatistics], stored: Statistics) -> None:
        self.blocks = {name: block for block in blocks for name in block.output_names}
        names = {name: block.own_names[block.output_names[name]] for name, block in self.blocks.items()}
        buffers = stored.metadata.get("buffers", ())
        self.metadata: dict[str, Any] = {
            **stored.metadata,
            "buffers": [name for name, stored_name in names.items() if stored_name in buffers],
        }
        self.path, self.uncalled = (
            stored.path,
            frozenset(n for n, stored_name in names.items() if stored_name in stored.uncalled),
        )

    def gram(self, name: str) -> Gram | None:
        """The Gram of a map's inputs."""
        return self.blocks[name].moved.gram(name)

    def __contains__(self, key: object) -> bool:
        name = str(key).rpartition(".")[0]
        return name in self.blocks and key in self.blocks[name].moved

    def __getitem__(self, key: str) -> Tensor:
        return self.blocks[key.rpartition(".")[0]].moved[key]
