"""Preparation of a search: relation of the models, samples in three parts, and the models' scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

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
from rotation_merge.run.data import UNLABELLED, Data, examples_in, read_samples
from rotation_merge.run.functions import Batch
from rotation_merge.run.generated_samples import SOURCES, writes_text
from rotation_merge.search.base import TaskVectorBase, find_base
from rotation_merge.search.candidates import FAR, NEAR, SHARED
from rotation_merge.search.forgetting import Forgetting
from rotation_merge.search.job import SearchConfig
from rotation_merge.search.judge import Figures, Judge
from rotation_merge.workers import listener

WRITTEN_APART = 7919
"""Offset of the seed for self-written held-out samples; merges use other samples."""
BASE_TEXTS = 16
"""Number of texts that the base writes to measure forgetting."""
LEAST_TEXTS = 4
"""No fewer held-out texts are written, where a batch holds them."""
LOGITS = 1 << 24
"""A batch of held-out samples gives no more of them, if it has several rows; all models answer it side by side."""
LOOKED_AT = 3
"""So many layers are matched to see whether the models share their coordinates."""


@dataclass(frozen=True)
class Parents:
    """The models of a search and their measurements.

    Attributes:
        tied: whether the output shares the embeddings' tensor.
        relations: of every other model: mean cosine of its matrices to the first one's.
        relation: of the models: shared, near or far (see `candidates`).
        training: samples to merge with, read; none where the models make them.
        data: for each model, file or source of its samples to merge with.
        deciding, reporting: judges on the selection and the reporting samples.
        figures, ensemble: scores of each model and of the ensemble on the reporting samples.
        order: the models by their scores on the selection samples.
        base: their common base, if known.
        forgetting: measure of forgetting; None if the base writes no text.
    """

    architecture: Architecture
    tied: bool
    relations: Mapping[str, float]
    relation: str
    training: Sequence[Data]
    data: Mapping[str, str]
    deciding: Judge
    reporting: Judge
    figures: Mapping[str, Figures]
    ensemble: Figures
    order: Sequence[str]
    base: TaskVectorBase | None = None
    forgetting: Forgetting | None = None


class Preparation:
    """Opens the models of a search, reads or makes samples, and measures the models on them.

    Args:
        files: where samples are kept that merges read.
        say: shows a line.
    """

    def __init__(self, config: SearchConfig, files: Path, say: Callable[[str], None]) -> None:
        self.config, self.files, self.say = config, files, say
        self.made_up = config.data[0] in SOURCES

    def run(self) -> Parents:
        """Open and measure the models.

        Raises:
            RotationMergeError: models that do not fit together, data without use.
        """
        models = self.config.models
        self.say("opening the models ...")
        anchor = open_model(models[0], any_base=True)
        relations = self._relations(anchor)
        relation = self._relation(anchor.architecture, relations)
        base = self._base(relation)
        close_files()
        loaded = {model: self.config.load(model) for model in models}
        sets = self._sampled(loaded) if self.made_up else split(self._given(loaded[models[0]]), self.config.seed)
        labelled = not self.made_up and all(data.task not in UNLABELLED for data in sets.deciding)
        vocabulary = vocabulary_size(anchor) or 1
        rows = [[in_small_batches(data, vocabulary) for data in part] for part in (sets.deciding, sets.reported)]
        parts = [self._for_each(part, labelled) for part in rows]
        deciding, reporting = (Judge(part, labelled) for part in parts)
        examples = sum(data.examples for part in parts for data in part)
        self.say(f"measuring {len(loaded)} models on {examples} samples ...")
        chosen, _ = deciding.parents(loaded)
        figures, ensemble = reporting.parents(loaded)
        forgetting = self._forgetting(base, loaded, deciding)
        if forgetting is not None:
            figures = {name: forgetting.measured(loaded[name], figures[name]) for name in figures}
        return Parents(
            anchor.architecture,
            anchor.tied_head is not None,
            relations,
            relation,
            sets.training,
            self._files(sets.training),
            deciding,
            reporting,
            figures,
            ensemble,
            sorted(models, key=lambda name: chosen[name].score),
            base,
            forgetting,
        )

    def _relations(self, anchor: View) -> dict[str, float]:
        """Cosine of every other model to the first one.

        Raises:
            RotationMergeError: models of different token ids, or that do not fit together.
        """
        models = self.config.models
        pairs = {model: open_pair(models[0], model, NOTHING, averaged=True) for model in models[1:]}
        for pair in pairs.values():
            if problem := other_ids(anchor, pair.donor):  # no sample would be the same for both
                remedy = "merge them by a recipe with 'tokenizer: {source: base}'"
                raise RotationMergeError(problem, where=str(pair.donor.reference), remedy=remedy)
        return {model: self._relate(pair, model) for model, pair in pairs.items()}

    def _base(self, relation: str) -> TaskVectorBase | None:
        """Find the models' base, if they may have one, and print it."""
        config = self.config
        if config.base is None and relation == FAR:
            return None
        base = find_base(config.models, config.base)
        if base is None:
            self.say("base: not known, so task vectors are not merged; name it as 'base'")
            return None
        names = shortened([*config.models, *([base.name] if base.name not in config.models else [])])
        lengths = ", ".join(f"{names[model]} {length:.3g}" for model, length in base.changes.lengths.items())
        self.say(
            f"base: {names[base.name]} ({base.why}); lengths of changes in a few matrices: {lengths} (ratio "
            f"{base.changes.ratio:.2g}), mean cosine between them {cosine_text(base.changes.cosine)}"
        )
        return base

    def _forgetting(self, base: TaskVectorBase | None, loaded: Mapping[str, Any], deciding: Judge) -> Forgetting | None:
        """The measure of forgetting; None if there is no base that writes text."""
        if base is None:
            return None
        model = loaded[base.name] if base.name in loaded else self.config.load(base.name)
        if not writes_text(model):
            return None
        config = self.config
        seed = config.seed + WRITTEN_APART + len(loaded)
        return Forgetting.of(model, base.name, deciding, BASE_TEXTS, config.length, config.batch_size, seed)

    def _for_each(self, part: list[Data], labelled: bool) -> list[Data]:
        """One set of samples for each model, if each gives its own answers."""
        return part * len(self.config.models) if len(part) == 1 and not labelled else part

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
        probed = sorted({layers[(len(layers) - 1) * i // (LOOKED_AT - 1)] for i in range(LOOKED_AT)}) if layers else []
        if not probed:
            return NEAR
        options = AlignConfig(heads="permutation", layers=",".join(map(str, probed)))
        for model in self.config.models[1:]:
            pair = open_pair(self.config.models[0], model, options, watched=False)
            before, after = match_pair(pair, listener()).known_report.relative_distances(str(pair.donor.reference))
            if before - after > SMALL_GAIN * before:
                return NEAR
        return SHARED

    def _given(self, model: Any) -> list[Data]:
        config = self.config
        if len(config.data) not in (1, len(config.models)):
            problem = f"{len(config.data)} data for {len(config.models)} models"
            raise DataError(problem, remedy="give one, or one for each")
        reading = 2 * config.samples, config.batch_size, config.length, config.seed
        return [read_samples(config.models[0], source, *reading, model, mixed=True) for source in config.data]

    def _sampled(self, loaded: dict[str, Any]) -> SampleSets:
        """Held-out samples that the models write (or noise), separate from those for merging."""
        config = self.config
        count = max(config.samples // 4, min(config.batch_size, LEAST_TEXTS))
        size = min(config.batch_size, count)
        count = -(-count // size) * size  # whole batches
        parts: tuple[list[Data], list[Data]] = ([], [])
        for k, (name, model) in enumerate(loaded.items()):
            seed = config.seed + WRITTEN_APART + k
            data = read_samples(name, config.data[0], 2 * count, size, config.length, seed, model)
            half = len(data.batches) // 2
            for part, batches in zip(parts, (data.batches[:half], data.batches[half:]), strict=True):
                part.append(with_batches(data, batches))
        return SampleSets([], *parts)

    def _files(self, training: Sequence[Data]) -> dict[str, str]:
        """Files of merge samples for each model (or the word that generates them)."""
        if not training:
            return dict.fromkeys(self.config.models, self.config.data[0])
        paths = [str(write_data(data, self.files / f"{i}.safetensors")) for i, data in enumerate(training)]
        return {model: paths[i % len(paths)] for i, model in enumerate(self.config.models)}


HELD_OUT = 0.5
"""Share of the samples that no merge sees; half of them choose, the other half is reported."""
PARTS = 4
"""So many batches a set of samples needs: two to merge with, one for each other part."""


@dataclass(frozen=True)
class SampleSets:
    """Samples of every parent (or one set for all), in three parts."""

    training: list[Data]
    deciding: list[Data]
    reported: list[Data]


def split(samples: Sequence[Data], seed: int) -> SampleSets:
    """Split every set of samples into training, selecting and reporting parts, by whole batches.

    Raises:
        DataError: a set has fewer than four examples.
    """
    parts: list[list[Data]] = [[], [], []]
    for data in samples:
        batches = _in_parts(data)
        count = len(batches)
        if count < PARTS:
            problem = f"{data.examples} samples are too few to hold some out"
            raise DataError(problem, where=data.source or None, remedy=f"give {PARTS} or more")
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        half = max(1, round(count * HELD_OUT / 2))
        for part, rows in zip(parts, (order[2 * half :], order[:half], order[half : 2 * half]), strict=True):
            part.append(with_batches(data, [batches[i] for i in sorted(rows)]))
    return SampleSets(*parts)


def with_batches(data: Data, batches: Sequence[Batch]) -> Data:
    """A subset of the batches of a set of samples."""
    return replace(data, batches=[*batches], examples=sum(map(examples_in, batches)))


def _in_parts(data: Data) -> list[Batch]:
    """Batches, split into smaller ones if there are too few."""
    if len(data.batches) >= PARTS or not all(_has_rows(batch) for batch in data.batches):
        return data.batches
    size = max(1, sum(map(examples_in, data.batches)) // PARTS)
    return [part for batch in data.batches for part in _by_rows(batch, size)]


def _by_rows(batch: Batch, size: int) -> list[Batch]:
    """The batch in parts of so many examples."""
    starts = range(0, examples_in(batch), size)
    return [{name: tensor[first : first + size] for name, tensor in batch.items()} for first in starts]


BY_TOKEN = ("next token", "masked token", "none")
"""Tasks whose models may give logits for every token."""


def in_small_batches(data: Data, vocabulary: int) -> Data:
    """Samples of text in batches of few enough rows for their logits to stay below `LOGITS`."""
    batches = []
    for batch in data.batches:
        row = batch["input_ids"][0].numel() * vocabulary if data.task in BY_TOKEN and "input_ids" in batch else 1
        size = max(1, LOGITS // row)
        batches += _by_rows(batch, size) if size < examples_in(batch) and _has_rows(batch) else [batch]
    return with_batches(data, batches)


def _has_rows(batch: Batch) -> bool:
    """Whether every input holds a row for each example."""
    return len({len(tensor) for tensor in batch.values()}) == 1


def write_data(data: Data, path: Path) -> Path:
    """Write samples as a file for `--data` and recipes; rows of unequal length are padded and masked."""
    names = list(data.batches[0])
    longest = {n: max(b[n].shape[-1] if b[n].ndim > 1 else 0 for b in data.batches) for n in names}
    arrays = {}
    for name in names:
        fill = -100 if name == "labels" else 0
        rows = [_padded(batch[name], longest[name], fill) for batch in data.batches]
        arrays[name] = torch.cat(rows).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file(arrays, temporary)
    return path


def _padded(tensor: Tensor, length: int, fill: int) -> Tensor:
    if tensor.ndim < 2 or tensor.is_floating_point() or tensor.shape[-1] == length:
        return tensor
    return torch.nn.functional.pad(tensor, (0, length - tensor.shape[-1]), value=fill)
