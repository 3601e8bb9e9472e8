"""The models of a search: their relation, samples in three parts, and the models' scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rotation_merge.errors import DataError, RotationMergeError
from rotation_merge.files import replacing
from rotation_merge.matching.aligned_output import match_pair
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.pair import open_pair
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
from rotation_merge.search.config import SearchConfig
from rotation_merge.search.judge import Ensemble, Figures, Judge
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

Sets = list[Data]
"""Samples of every parent, or one set for all."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Parents:
    """The models of a search and their measurements.

    Attributes:
        files: folder of samples, statistics and alignments that merges read.
        anchor: the first model.
        relations: of every other model: mean cosine of its matrices to the first one's.
        relation: of the models: shared, near or far.
        base: their common base, if known.
        training: samples to merge with, read; none where the models make them.
        data: for each model, file or source of its samples to merge with.
        deciding, reporting: judges on the selection and the reporting samples.
        figures, ensemble: scores of each model and of the ensemble on the reporting samples.
        base_figures: of the base on the selection samples; None if it writes no text.
    """

    config: SearchConfig
    files: Path
    anchor: View
    relations: Mapping[str, float]
    relation: str
    base: TaskVectorBase | None
    training: Sets
    data: Mapping[str, str]
    deciding: Judge
    reporting: Judge
    figures: Mapping[str, Figures]
    ensemble: Figures
    base_figures: Figures | None

    @property
    def tuned(self) -> tuple[str, ...]:
        """The models without their base."""
        return tuple(model for model in self.config.models if self.base is None or model != self.base.name)


def opened_parents(config: SearchConfig, files: Path, say: Say) -> Parents:
    """Open the models, read or make samples, and measure the models on them.

    Args:
        files: where samples are kept that merges read.
        say: shows a line.

    Raises:
        RotationMergeError: models that do not fit together, data without use.
    """
    say("opening the models ...")
    anchor = open_model(config.models[0], any_base=True)
    relations = _relations(config, anchor, say)
    relation = _relation(config, anchor, relations)
    base = _base(config, relation, say)
    close_files()
    loaded = {model: config.load(model) for model in config.models}
    training, *held_out = _samples(config, loaded)
    base_model, texts = (None, []) if base is None else _base_texts(config, base.name, loaded)
    deciding, reporting = (_judge(config, sets, anchor, texts) for sets in held_out)
    examples = sum(data.examples for judge in (deciding, reporting) for data in judge.sets)
    say(f"measuring {len(loaded)} models on {examples} samples ...")
    for judge in (deciding, reporting):
        judge.prepare(loaded)
    figures = {name: reporting.measure(model) for name, model in loaded.items()}
    ensemble = replace(reporting.measure(Ensemble(loaded.values(), reporting.task)), on_base=None)
    base_figures = deciding.measure(base_model) if texts else None
    data = _files(config, files, training)
    judged = deciding, reporting, figures, ensemble, base_figures
    return Parents(config, files, anchor, relations, relation, base, training, data, *judged)


# --- relation --------------------------------------------------------------------------------------------------------


def _relations(config: SearchConfig, anchor: View, say: Say) -> dict[str, float]:
    """Cosine of every other model to the first one; they are shown, with differences of configs.

    Raises:
        RotationMergeError: models of different token ids, or that do not fit together.
    """
    first, *further_models = config.models
    pairs = {model: open_pair(first, model, NOTHING, averaged=True) for model in further_models}
    for pair in pairs.values():
        if problem := other_ids(anchor, pair.donor):  # no sample would be the same for both
            remedy = "merge them by a recipe with 'tokenizer: {source: base}'"
            raise RotationMergeError(problem, where=str(pair.donor.reference), remedy=remedy)
    relations, names = {}, shortened(config.models)
    for model, pair in pairs.items():
        relations[model] = likeness(pair.anchor, pair.donor)
        say(f"{names[model]}: mean cosine of its matrices to those of {names[first]} {cosine_text(relations[model])}")
        for warning in pair.warnings:
            say(f"warning: {warning}")
    return relations


def _relation(config: SearchConfig, anchor: View, relations: Mapping[str, float]) -> str:
    """The models' relation: a few layers are matched if they are near."""
    if any(cosine < RELATED for cosine in relations.values()):
        return FAR
    layers = sorted({block.index for block in anchor.architecture.blocks if block.index is not None})
    probed = sorted({layers[(len(layers) - 1) * i // (PROBED - 1)] for i in range(PROBED)}) if layers else []
    options = AlignConfig(heads="permutation", layers=",".join(map(str, probed)) or "all")
    for model in config.models[1:]:
        pair = open_pair(config.models[0], model, options, watched=False)
        before, after = match_pair(pair, listener()).known_report.relative_distances(str(pair.donor.reference))
        if before - after > SMALL_GAIN * before:
            return NEAR
    return SHARED


def _base(config: SearchConfig, relation: str, say: Say) -> TaskVectorBase | None:
    """Find the models' base, if they may have one, and show it."""
    if config.base is None and relation == FAR:
        return None
    base = find_base(config.models, config.base)
    if base is None:
        say("base: not known, so task vectors are not merged; name it as 'base'")
    else:
        name = shortened([*dict.fromkeys([*config.models, base.name])])[base.name]
        say(f"base: {name} ({base.why}); mean cosine between the changes to it {cosine_text(base.cosine)}")
    return base


# --- samples ---------------------------------------------------------------------------------------------------------


def _samples(config: SearchConfig, loaded: Mapping[str, Any]) -> tuple[Sets, Sets, Sets]:
    """Training, deciding and reporting samples of the data; or such as the models make, apart from those for merging.

    Raises:
        DataError: the sources do not fit the models.
    """
    sources = config.data
    if made_up := [source for source in sources if source in SOURCES]:
        if len({*sources}) > 1:
            raise DataError(f"'{made_up[0]}' stands beside other data", remedy="give files, or that alone")
        return [], *_made_up(config, loaded)
    if len(sources) not in (1, len(config.models)):
        problem = f"{len(sources)} data for {len(config.models)} models"
        raise DataError(problem, remedy="give one, or one for each")
    first, limit = config.models[0], config.samples * 2
    read = [read_samples(first, x, limit, *config.reading, loaded[first], mixed=True) for x in sources]
    return split(read, config.seed)


def _made_up(config: SearchConfig, loaded: Mapping[str, Any]) -> tuple[Sets, Sets]:
    """Deciding and reporting samples that each model makes, in whole batches."""
    count = max(config.samples // 4, min(config.batch_size, LEAST_TEXTS))
    size = min(config.batch_size, count)
    count = -(-count // size) * size
    deciding, reporting = Sets(), Sets()
    for number, (name, model) in enumerate(loaded.items()):
        seed = config.seed + WRITTEN_APART + number
        data = read_samples(name, config.data[0], 2 * count, size, config.length, seed, model)
        half = len(data.batches) // 2
        deciding.append(data.with_batches(data.batches[:half]))
        reporting.append(data.with_batches(data.batches[half:]))
    return deciding, reporting


def split(samples: Sequence[Data], seed: int) -> tuple[Sets, Sets, Sets]:
    """Split every set of samples into training, deciding and reporting parts, by whole batches.

    Raises:
        DataError: a set has fewer than four examples.
    """
    parts = Sets(), Sets(), Sets()
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
    return parts


def _base_texts(config: SearchConfig, base: str, loaded: Mapping[str, Any]) -> tuple[Any, Sets]:
    """The base, and texts that it writes to measure forgetting, a set each; none if it writes no text."""
    model = loaded[base] if base in loaded else config.load(base)
    if not writes_text(model):
        return model, []
    ids = self_written(model, base, BASE_TEXTS, config.length, config.seed + WRITTEN_APART + len(loaded))
    return model, [Data([{"input_ids": row, "labels": row}], "next token", 1) for row in ids.split(1)]


def _judge(config: SearchConfig, part: Sets, anchor: View, texts: Sets) -> Judge:
    """The judge on some samples: one set for each model, if each gives its own answers."""
    labelled = config.data[0] not in SOURCES and all(data.task not in UNLABELLED for data in part)
    sets = [in_small_batches(data, vocabulary_size(anchor) or 1) for data in part]
    return Judge(sets * len(config.models) if len(sets) == 1 and not labelled else sets, labelled, texts)


def in_small_batches(data: Data, vocabulary: int) -> Data:
    """Samples of text in batches of few enough rows for their logits to stay below `LOGITS`."""
    batches = []
    for batch in data.batches:
        row = batch["input_ids"][0].numel() * vocabulary if data.task in BY_TOKEN and "input_ids" in batch else 1
        batches += by_rows(batch, max(1, LOGITS // row))
    return data.with_batches(batches)


def _files(config: SearchConfig, folder: Path, training: Sets) -> dict[str, str]:
    """Files of merge samples for each model (or the word that generates them)."""
    if not training:
        return dict.fromkeys(config.models, config.data[0])
    paths = [str(write_data(data, folder / f"{number}.safetensors")) for number, data in enumerate(training)]
    return {model: paths[number % len(paths)] for number, model in enumerate(config.models)}


def write_data(data: Data, path: Path) -> Path:
    """Write samples as a file for `--data` and recipes; rows of unequal length are padded and masked."""
    arrays = {name: tensor.contiguous() for name, tensor in joined(data.batches).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file(arrays, temporary)
    return path
