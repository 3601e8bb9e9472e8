"""Preparation of a search: relation of the models, samples in three parts, and the models' scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rotation_merge.architecture import Architecture
from rotation_merge.errors import DataError, RotationMergeError
from rotation_merge.files import replacing
from rotation_merge.matching.aligned_output import match_pair
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.pair import Pair, open_pair
from rotation_merge.model.folder import close_files
from rotation_merge.model.naming import shortened
from rotation_merge.model.nearness import RELATED, cosine_text, likeness
from rotation_merge.model.open import open_model
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import other_ids, vocabulary_size
from rotation_merge.record import SMALL_GAIN
from rotation_merge.run.batches import by_rows, joined
from rotation_merge.run.data import UNLABELLED, Data, read_samples
from rotation_merge.run.generated_samples import self_written, writes_text
from rotation_merge.run.sample_kinds import SOURCES
from rotation_merge.search.base import TaskVectorBase, find_base
from rotation_merge.search.job import SearchConfig
from rotation_merge.search.judge import Figures, Forgetting, Judge
from rotation_merge.workers import listener

WRITTEN_APART = 7919
"""Offset of the seed for self-written held-out samples; merges use other samples."""
BASE_TEXTS = 16
"""Number of texts that the base writes to measure forgetting."""
LEAST_TEXTS = 4
"""No fewer held-out texts are written, where a batch holds them."""
SHARED, NEAR, FAR = "shared", "near", "far"
"""How models lie to each other: in the same coordinates, so that alignment leaves them where they are; as fine-tunes of
one base that alignment brings nearer; or in other coordinates."""

PROBED = 3
"""So many layers are matched to see whether the models share their coordinates."""
HELD_OUT = 0.5
"""Share of the samples that no merge sees; half of them choose, the other half is reported."""
PARTS = 4
"""So many batches a set of samples needs: two to merge with, one for each other part."""
LOGITS = 1 << 24
"""A batch of held-out samples gives no more of them, if it has several rows."""
BY_TOKEN = ("next token", "masked token", "none")
"""Tasks whose models may give logits for every token."""


@dataclass(frozen=True)
class SampleSets:
    """Samples of every parent (or one set for all), in three parts."""

    training: list[Data]
    deciding: list[Data]
    reported: list[Data]


@dataclass(frozen=True)
class Parents:
    """The models of a search and their measurements.

    Attributes:
        relations: of every other model: mean cosine of its matrices to the first one's.
        relation: of the models: shared, near or far.
        base: their common base, if known.
        training: samples to merge with, read; none where the models make them.
        data: for each model, file or source of its samples to merge with.
        deciding, reporting: judges on the selection and the reporting samples.
        figures, ensemble: scores of each model and of the ensemble on the reporting samples.
        forgetting: measure of forgetting; None if the base writes no text.
    """

    anchor: View
    relations: Mapping[str, float]
    relation: str
    base: TaskVectorBase | None
    training: Sequence[Data]
    data: Mapping[str, str]
    deciding: Judge
    reporting: Judge
    figures: Mapping[str, Figures]
    ensemble: Figures
    forgetting: Forgetting | None

    @property
    def tied(self) -> bool:
        """Whether the output shares the embeddings' tensor, which a rotation of the stream has to part."""
        return self.anchor.tied_head is not None


class Preparation:
    """Opens the models of a search, reads or makes samples, and measures the models on them.

    Args:
        files: where samples are kept that merges read.
        say: shows a line.
    """

    def __init__(self, config: SearchConfig, files: Path, say: Callable[[str], None]) -> None:
        self.config, self.files, self.say = config, files, say

    def run(self) -> Parents:
        """Open and measure the models.

        Raises:
            RotationMergeError: models that do not fit together, data without use.
        """
        self.say("opening the models ...")
        anchor = open_model(self.config.models[0], any_base=True)
        relations = self._relations(anchor)
        relation = self._relation(anchor.architecture, relations)
        base = self._base(relation)
        close_files()
        loaded = {model: self.config.load(model) for model in self.config.models}
        sets = self._samples(loaded)
        deciding, reporting = (self._judge(part, anchor) for part in (sets.deciding, sets.reported))
        examples = sum(data.examples for judge in (deciding, reporting) for data in judge.sets)
        self.say(f"measuring {len(loaded)} models on {examples} samples ...")
        deciding.prepare(loaded)
        figures, ensemble = reporting.parents(loaded)
        forgetting = None if base is None else self._forgetting(base.name, loaded, deciding)
        if forgetting is not None:
            figures = {name: forgetting.measured(loaded[name], figures[name]) for name in figures}
        data = self._files(sets.training)
        judged = deciding, reporting, figures, ensemble, forgetting
        return Parents(anchor, relations, relation, base, sets.training, data, *judged)

    def _relations(self, anchor: View) -> dict[str, float]:
        """Cosine of every other model to the first one.

        Raises:
            RotationMergeError: models of different token ids, or that do not fit together.
        """
        first, *further_models = self.config.models
        pairs = {model: open_pair(first, model, NOTHING, averaged=True) for model in further_models}
        for pair in pairs.values():
            if problem := other_ids(anchor, pair.donor):  # no sample would be the same for both
                remedy = "merge them by a recipe with 'tokenizer: {source: base}'"
                raise RotationMergeError(problem, where=str(pair.donor.reference), remedy=remedy)
        return {model: self._relate(pair, model) for model, pair in pairs.items()}

    def _relate(self, pair: Pair, model: str) -> float:
        """Print the relation of a model to the first one: coordinates, and differences of configs."""
        cosine = likeness(pair.anchor, pair.donor)
        kind = "a fine-tune of the same base" if cosine >= RELATED else "other coordinates, or another base"
        names = shortened(self.config.models)
        anchor = names[self.config.models[0]]
        self.say(f"{names[model]}: {kind} (mean cosine of its matrices to those of {anchor}: {cosine_text(cosine)})")
        for warning in pair.warnings:
            self.say(f"warning: {warning}")
        return cosine

    def _relation(self, architecture: Architecture, relations: Mapping[str, float]) -> str:
        """The models' relation: a few layers are matched if they are near."""
        if any(cosine < RELATED for cosine in relations.values()):
            return FAR
        layers = sorted({block.index for block in architecture.blocks if block.index is not None})
        probed = sorted({layers[(len(layers) - 1) * i // (PROBED - 1)] for i in range(PROBED)}) if layers else []
        if not probed:
            return NEAR
        options = AlignConfig(heads="permutation", layers=",".join(map(str, probed)))
        for model in self.config.models[1:]:
            pair = open_pair(self.config.models[0], model, options, watched=False)
            before, after = match_pair(pair, listener()).known_report.relative_distances(str(pair.donor.reference))
            if before - after > SMALL_GAIN * before:
                return NEAR
        return SHARED

    def _base(self, relation: str) -> TaskVectorBase | None:
        """Find the models' base, if they may have one, and print it."""
        config = self.config
        if config.base is None and relation == FAR:
            return None
        base = find_base(config.models, config.base)
        if base is None:
            self.say("base: not known, so task vectors are not merged; name it as 'base'")
            return None
        names = shortened([*dict.fromkeys([*config.models, base.name])])
        lengths = ", ".join(f"{names[model]} {length:.3g}" for model, length in base.changes.lengths.items())
        self.say(
            f"base: {names[base.name]} ({base.why}); lengths of changes in a few matrices: {lengths} (ratio "
            f"{base.changes.ratio:.2g}), mean cosine between them {cosine_text(base.changes.cosine)}"
        )
        return base

    def _samples(self, loaded: Mapping[str, Any]) -> SampleSets:
        """Samples of the data; or such as the models write (or noise), separate from those for merging."""
        config = self.config
        if made_up := [source for source in config.data if source in SOURCES]:
            if len({*config.data}) > 1:
                raise DataError(f"'{made_up[0]}' stands beside other data", remedy="give files, or that alone")
            return self._made_up(loaded)
        if len(config.data) not in (1, len(config.models)):
            problem = f"{len(config.data)} data for {len(config.models)} models"
            raise DataError(problem, remedy="give one, or one for each")
        first, limit = config.models[0], config.samples * 2
        read = [read_samples(first, x, limit, *config.reading, loaded[first], mixed=True) for x in config.data]
        return split(read, config.seed)

    def _made_up(self, loaded: Mapping[str, Any]) -> SampleSets:
        config, sets = self.config, SampleSets([], [], [])
        count = max(config.samples // 4, min(config.batch_size, LEAST_TEXTS))
        size = min(config.batch_size, count)
        count = -(-count // size) * size  # whole batches
        for number, (name, model) in enumerate(loaded.items()):
            seed = config.seed + WRITTEN_APART + number
            data = read_samples(name, config.data[0], 2 * count, size, config.length, seed, model)
            half = len(data.batches) // 2
            sets.deciding.append(data.with_batches(data.batches[:half]))
            sets.reported.append(data.with_batches(data.batches[half:]))
        return sets

    def _judge(self, part: list[Data], anchor: View) -> Judge:
        """The judge on some samples: one set for each model, if each gives its own answers."""
        labelled = self.config.data[0] not in SOURCES and all(data.task not in UNLABELLED for data in part)
        rows = [in_small_batches(data, vocabulary_size(anchor) or 1) for data in part]
        return Judge(rows * len(self.config.models) if len(rows) == 1 and not labelled else rows, labelled)

    def _forgetting(self, base: str, loaded: Mapping[str, Any], deciding: Judge) -> Forgetting | None:
        """The measure of forgetting; None if the base writes no text."""
        model = loaded[base] if base in loaded else self.config.load(base)
        if not writes_text(model):
            return None
        seed = self.config.seed + WRITTEN_APART + len(loaded)
        ids = self_written(model, base, BASE_TEXTS, self.config.length, seed)
        return Forgetting.of(model, deciding.measure(model), ids)

    def _files(self, training: Sequence[Data]) -> dict[str, str]:
        """Files of merge samples for each model (or the word that generates them)."""
        if not training:
            return dict.fromkeys(self.config.models, self.config.data[0])
        paths = [str(write_data(data, self.files / f"{i}.safetensors")) for i, data in enumerate(training)]
        return {model: paths[i % len(paths)] for i, model in enumerate(self.config.models)}


def split(samples: Sequence[Data], seed: int) -> SampleSets:
    """Split every set of samples into training, selecting and reporting parts, by whole batches.

    Raises:
        DataError: a set has fewer than four examples.
    """
    parts: list[list[Data]] = [[], [], []]
    for data in samples:
        size = max(1, data.examples // PARTS)
        batches = data.batches if len(data.batches) >= PARTS else [p for b in data.batches for p in by_rows(b, size)]
        count = len(batches)
        if count < PARTS:
            problem = f"{data.examples} samples are too few to hold some out"
            raise DataError(problem, where=data.source or None, remedy=f"give {PARTS} or more")
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        half = max(1, round(count * HELD_OUT / 2))
        for part, rows in zip(parts, (order[2 * half :], order[:half], order[half : 2 * half]), strict=True):
            part.append(data.with_batches([batches[i] for i in sorted(rows)]))
    return SampleSets(*parts)


def in_small_batches(data: Data, vocabulary: int) -> Data:
    """Samples of text in batches of few enough rows for their logits to stay below `LOGITS`."""
    batches = []
    for batch in data.batches:
        row = batch["input_ids"][0].numel() * vocabulary if data.task in BY_TOKEN and "input_ids" in batch else 1
        batches += by_rows(batch, max(1, LOGITS // row))
    return data.with_batches(batches)


def write_data(data: Data, path: Path) -> Path:
    """Write samples as a file for `--data` and recipes; rows of unequal length are padded and masked."""
    arrays = {name: tensor.contiguous() for name, tensor in joined(data.batches).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file(arrays, temporary)
    return path
