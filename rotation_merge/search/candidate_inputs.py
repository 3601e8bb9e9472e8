"""Prepares candidates: statistics of every model, an alignment learned on the samples."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rotation_merge.matching.fit import fit
from rotation_merge.matching.fit_records import FitConfig
from rotation_merge.run.data import Data, read_batches
from rotation_merge.run.functions import load
from rotation_merge.run.generated_samples import SOURCES
from rotation_merge.run.measure import MeasureConfig
from rotation_merge.run.statistics_writer import checkpoint_of, record
from rotation_merge.search.candidates import Candidate
from rotation_merge.search.job import SearchConfig
from rotation_merge.search.readers import Reader
from rotation_merge.workers.progress import listener

STEPS = 400
"""Of learning, where there is time."""


@dataclass(frozen=True)
class CandidateFiles:
    """Makes the files that candidates need, each once.

    Attributes:
        data: for each model the samples to merge with.
        training: these samples, read.
        files: folder of the results.
        tied: whether the output shares the embeddings' tensor.
        readers: reader of the samples for each model, if token ids differ.
    """

    config: SearchConfig
    data: Mapping[str, str]
    training: Sequence[Data]
    files: Path
    tied: bool
    readers: Mapping[str, Reader] = field(default_factory=dict)

    def ready(self, candidate: Candidate, seconds: float) -> Candidate:
        """The candidate with its files.

        Args:
            seconds: that learning may take.
        """
        if candidate.needs == "statistics":
            return candidate.with_files({m: {"statistics": self._statistics(m)} for m in candidate.models})
        if candidate.needs == "fit":
            files = self._learned(candidate, seconds)
            return candidate.with_files({model: {"alignment": file} for model, file in files.items()})
        return candidate

    def _statistics(self, model: str) -> str:
        number = self.config.models.index(model)
        path = self.files / f"statistics-{number}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            loaded = load(model)
            data = self._data(model, number, loaded)
            record(checkpoint_of(model), loaded, data, self.data[model], MeasureConfig(), path, listener())
        return str(path)

    def _data(self, model: str, number: int, loaded: object) -> Data:
        config, source = self.config, self.data[model]
        if source not in SOURCES and model in self.readers:
            return self.readers[model].read(self.training[number % len(self.training)])[0]
        limit = config.samples if source in SOURCES else None
        return read_batches(source, model, loaded, limit, config.batch_size, config.length, config.seed)

    def _learned(self, candidate: Candidate, seconds: float) -> dict[str, str]:
        place, tell = self.config.models.index, listener()
        stem = f"learned-{place(candidate.anchor)}"
        files = {m: str(self.files / f"{stem}-{place(m)}.safetensors") for m in candidate.models[1:]}
        if all(os.path.exists(file) for file in files.values()):
            return files
        loaded = [load(model, like=candidate.anchor) for model in candidate.models]
        batches = [batch for data in self.training for batch in data.batches]
        options = FitConfig(steps=STEPS, minutes=seconds / 60, seed=self.config.seed)
        result = fit(
            loaded[0], loaded[1:], batches, None, options, lambda done, total, _: tell("learning", done, total)
        )
        result.write(candidate.anchor, {file: model for model, file in files.items()}, self.tied)
        return files
