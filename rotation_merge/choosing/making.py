"""What candidates need before they can be merged: statistics of every model, an alignment learned on the samples."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rotation_merge.averaging.measure import MeasureOptions
from rotation_merge.averaging.record import checkpoint_of, record
from rotation_merge.checkpoints.pair import open_pair, write_alignment
from rotation_merge.choosing.candidates import Candidate
from rotation_merge.learning.engine import renamed
from rotation_merge.learning.fit import fit
from rotation_merge.learning.records import FitOptions
from rotation_merge.samples.data import Data, read_batches
from rotation_merge.samples.functions import load
from rotation_merge.samples.written import SOURCES


@dataclass(frozen=True)
class Wish:
    """What the user asked for.

    Attributes:
        models: the first is the anchor.
        data: one source for all, or one for each model.
        budget: seconds.
    """

    models: tuple[str, ...]
    out: str
    data: tuple[str, ...]
    samples: int = 64
    budget: float = 600.0
    seed: int = 0
    length: int = 128
    batch_size: int = 8
    dtype: str | None = None


@dataclass(frozen=True)
class Maker:
    """Makes it, once.

    Attributes:
        data: for each model the samples to merge with.
        training: these samples, read.
        files: where what is made is kept.
        tied: whether the output shares the embeddings' tensor.
    """

    wish: Wish
    data: Mapping[str, str]
    training: Sequence[Data]
    files: Path
    tied: bool

    def ready(self, candidate: Candidate, seconds: float) -> Candidate:
        """The candidate with what must be made before it.

        Args:
            seconds: that learning may take.
        """
        if candidate.needs == "statistics":
            return self._with(candidate, {model: {"statistics": self._statistics(model)} for model in candidate.models})
        if candidate.needs == "fit":
            files = self._learned(candidate, seconds)
            return self._with(candidate, {model: {"alignment": file} for model, file in files.items()})
        return candidate

    @staticmethod
    def _with(candidate: Candidate, of_model: dict[str, dict[str, Any]]) -> Candidate:
        return Candidate(candidate.name, candidate.anchor, candidate.models, candidate.parameters, of_model)

    def _statistics(self, model: str) -> str:
        number = self.wish.models.index(model)
        path = self.files / f"statistics-{number}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            loaded = load(model)
            source = self.data[model]
            limit = self.wish.samples if source in SOURCES else None
            data = read_batches(source, model, loaded, limit, self.wish.batch_size, self.wish.length, self.wish.seed)
            record(checkpoint_of(model), loaded, data, source, MeasureOptions(), path, lambda *_: None)
        return str(path)

    def _learned(self, candidate: Candidate, seconds: float) -> dict[str, str]:
        place = self.wish.models.index
        stem = f"learned-{place(candidate.anchor)}"
        files = {m: str(self.files / f"{stem}-{place(m)}.safetensors") for m in candidate.models[1:]}
        if all(os.path.exists(file) for file in files.values()):
            return files
        minutes = seconds / 60
        loaded = [load(model, like=candidate.anchor) for model in candidate.models]
        batches = [batch for data in self.training for batch in data.batches]
        result = fit(loaded[0], loaded[1:], batches, None, FitOptions(steps=400, minutes=minutes, seed=self.wish.seed))
        for (model, file), alignment in zip(files.items(), result.alignments, strict=True):
            pair = open_pair(candidate.anchor, model, result.match, self.tied)
            transforms = renamed(alignment.transforms, result.architecture, pair.architecture)
            facts = {"learned": result.report.to_dict()}
            write_alignment(pair, replace(alignment, transforms=transforms), file, result.match, facts=facts)
        return files
