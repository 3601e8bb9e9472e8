"""The models of a search: their relation, samples in three parts, and the models' scores."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from safetensors.torch import save_file

from rotation_merge.errors import DataError, RotationMergeError
from rotation_merge.files import replacing
from rotation_merge.matching.aligned_output import match_pair
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.pair import open_pair
from rotation_merge.model.checkpoint import mark_of
from rotation_merge.model.folder import close_files
from rotation_merge.model.naming import shortened
from rotation_merge.model.nearness import RELATED, cosine_text, equality, likeness
from rotation_merge.model.open import open_model
from rotation_merge.model.vocabulary import other_ids, vocabulary_size
from rotation_merge.record import SMALL_GAIN
from rotation_merge.run.batches import by_rows, check_labels, joined
from rotation_merge.run.data import UNLABELLED, Data, data_in_memory, read_samples, split_batches
from rotation_merge.run.functions import load
from rotation_merge.run.sample_kinds import SELF, SOURCES
from rotation_merge.run.sources import self_written, writes_text
from rotation_merge.search.base import TaskVectorBase, find_base
from rotation_merge.search.config import MergeConfig
from rotation_merge.search.judge import Figures, Judge
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
CHANGEABLE = ("budget", "device", "out")
"""Options that may change when a search continues."""
BY_TOKEN = ("next token", "masked token", "none")
"""Tasks whose models may give logits for every token."""


@dataclass(frozen=True)
class SearchConfig(MergeConfig):
    """Config of a search: the models, the output and the options.

    Attributes:
        models: the first is the anchor.
        data: one source for all, or one for each model.
        device: to compute on.
    """

    models: tuple[str, ...]
    out: str
    data: tuple[str, ...]
    device: str = "cpu"

    def load(self, model: str) -> Any:
        """Load a model on the device, with its classes in the first model's order."""
        return load(model, like=self.models[0]).to(self.device)

    @property
    def reading(self) -> tuple[int, int, int]:
        """Batch size, length and seed of reading samples."""
        return self.batch_size, self.length, self.seed

    def key(self) -> str:
        """Stable key of the models, the samples and the options, and of the state of their files."""
        options = {name: value for name, value in asdict(self).items() if name not in CHANGEABLE}
        views = [open_model(model, any_base=True) for model in filter(None, [*self.models, self.base])]
        return hashlib.blake2b(mark_of(views, self.data, options=options).encode(), digest_size=4).hexdigest()


class Parents:
    """The models of a search, opened, with samples.

    Attributes:
        anchor: the first model.
        relations: of every other model: mean cosine of its matrices to the first one's.
        relation: of the models: shared, near or far.
        base: their common base, if known.
        training: samples to merge with, read; none where the models make them.
        data: for each model, file or source of its samples to merge with.
        deciding, reporting: judges on the selection and the reporting samples.

    Args:
        files: folder of samples, statistics and alignments that merges read.
        say: shows a line.

    Raises:
        RotationMergeError: models that do not fit together, data without use.
    """

    def __init__(self, config: SearchConfig, files: Path, say: Callable[[str], None]) -> None:
        self.config, self.files, self.say = config, files, say
        say("opening the models ...")
        self.anchor = open_model(config.models[0], any_base=True)
        self.relations = self._relations()
        self.relation = self._relation()
        self.base = self._base()
        close_files()
        self._loaded: dict[str, Any] = {}
        self.training, *held_out = self._samples()
        self.data = self._files()
        texts = self._base_texts()
        self.deciding, self.reporting = (self._judge(part, texts) for part in held_out)
        if self.deciding.labelled:
            check_labels(
                [b for data in self.deciding.sets for b in data.batches],
                self._model(config.models[0]),
                self.deciding.task,
                "",
            )
        else:
            self.deciding.prepare({model: self._model(model) for model in config.models})
        self._loaded.clear()

    def _model(self, name: str) -> Any:
        """A model that samples are read or written for, loaded once."""
        if name not in self._loaded:
            self._loaded[name] = self.config.load(name)
        return self._loaded[name]

    @cached_property
    def base_figures(self) -> Figures | None:
        """Those of the base on the selection samples; None if it writes no text."""
        if self.base is None or self.deciding.texts is None:
            return None
        return self.deciding.measure(self.config.load(self.base.name))

    def measure(self, more: Callable[[], bool]) -> dict[str, Figures]:
        """Measure each model and their ensemble on the reporting samples, while there is time for more.

        Args:
            more: as of `Judge.compare`.
        """
        loaded = {model: self.config.load(model) for model in self.config.models}
        figures = self.reporting.compare(loaded, more, parents=True)
        for name, model in loaded.items():
            if texts := self.deciding.on_text(model):
                figures[name] = replace(figures[name], on_base=fmean(texts))
        return figures

    @property
    def tuned(self) -> tuple[str, ...]:
        """The models without their base."""
        return tuple(model for model in self.config.models if self.base is None or model != self.base.name)

    def _relations(self) -> dict[str, float]:
        """Cosine of every other model to the first one; they are shown, with differences of configs.

        Raises:
            RotationMergeError: models of different token ids, or that do not fit together.
        """
        first, *further_models = self.config.models
        pairs = {model: open_pair(first, model, NOTHING, averaged=True) for model in further_models}
        for pair in pairs.values():
            if problem := other_ids(self.anchor, pair.donor):  # no sample would be the same for both
                remedy = "merge them by a recipe with 'tokenizer: {source: base}'"
                raise RotationMergeError(problem, where=str(pair.donor.reference), remedy=remedy)
        relations, names = {}, shortened(self.config.models)
        for model, pair in pairs.items():
            cosine = relations[model] = likeness(pair.anchor, pair.donor)
            self.say(f"{names[model]}: mean cosine of its matrices to those of {names[first]} {cosine_text(cosine)}")
            remark = equality(pair.anchor, pair.donor)
            for warning in [*pair.warnings, *([f"{names[model]} {remark}"] if remark else [])]:
                self.say(f"warning: {warning}")
        return relations

    def _relation(self) -> str:
        """The models' relation: a few layers are matched if they are near."""
        if any(cosine < RELATED for cosine in self.relations.values()):
            return FAR
        layers = sorted({block.index for block in self.anchor.architecture.blocks if block.index is not None})
        probed = sorted({layers[(len(layers) - 1) * i // (PROBED - 1)] for i in range(PROBED)}) if layers else []
        options = AlignConfig(heads="permutation", layers=",".join(map(str, probed)) or "all")
        for model in self.config.models[1:]:
            pair = open_pair(self.config.models[0], model, options, watched=False)
            before, after = match_pair(pair, listener()).known_report.relative_distances(str(pair.donor.reference))
            if before - after > SMALL_GAIN * before:
                return NEAR
        return SHARED

    def _base(self) -> TaskVectorBase | None:
        """Find the models' base, if they may have one, and show it."""
        config = self.config
        if config.base is None and self.relation == FAR:
            return None
        base = find_base(config.models, config.base)
        if base is None:
            self.say("base: not known, so task vectors are not merged; name it as 'base'")
        else:
            name, cosine = shortened([*config.models, base.name])[base.name], cosine_text(base.cosine)
            self.say(f"base: {name} ({base.why}); mean cosine between the changes to it {cosine}")
        return base

    def _samples(self) -> tuple[list[Data], list[Data], list[Data]]:
        """Training, deciding and reporting samples of the data; or such as the models make, apart from those to merge.

        Raises:
            DataError: the sources do not fit the models.
        """
        config, sources = self.config, self.config.data
        if made_up := [source for source in sources if source in SOURCES]:
            if len({*sources}) > 1:
                raise DataError(f"'{made_up[0]}' stands beside other data", remedy="give files, or that alone")
            return self._made_up()
        if len(sources) not in (1, len(config.models)):
            problem = f"{len(sources)} data for {len(config.models)} models"
            raise DataError(problem, remedy="give one, or one for each")
        first, limit = config.models[0], config.samples * 2
        read = [read_samples(first, x, limit, *config.reading, self._model(first), mixed=True) for x in sources]
        return split(read, config.seed)

    def _made_up(self) -> tuple[list[Data], list[Data], list[Data]]:
        """Samples that each model makes to decide and to report, in whole batches."""
        config, source = self.config, self.config.data[0]
        count = max(config.samples // 4, min(config.batch_size, LEAST_TEXTS))
        size = min(config.batch_size, count)
        count = -(-count // size) * size
        halves, base = [], self._base_model() if source == SELF else None
        for number, name in enumerate(config.models):
            seed, model = config.seed + WRITTEN_APART + number, self._model(name)
            if source == SELF:
                data = self._written(name, model, 2 * count, size, seed, None if model is base else base)
            else:
                data = read_samples(name, source, 2 * count, size, config.length, seed, model)
            halves.append(split_batches(data, count))
        return [], [deciding for deciding, _ in halves], [reporting for _, reporting in halves]

    def _written(self, name: str, model: Any, count: int, size: int, seed: int, base: Any = None) -> Data:
        """Texts that a model writes, of a fine-tune of `base` what it has learned, in batches of one size."""
        ids = self_written(model, name, count, self.config.length, seed, base)
        return data_in_memory([{"input_ids": rows} for rows in ids.split(size)], model, name)

    def _base_model(self) -> Any:
        """The base, loaded; None if there is none, or it writes no text, nor does the first model."""
        if self.base is None or not writes_text(self._model(self.config.models[0])):
            return None
        model = self._model(self.base.name)
        return model if writes_text(model) else None

    def _files(self) -> dict[str, str]:
        """Files of merge samples for each model (or the word that generates them)."""
        if not self.training:
            return dict.fromkeys(self.config.models, self.config.data[0])
        paths = [write_data(data, self.files / f"{number}.safetensors") for number, data in enumerate(self.training)]
        return {model: str(paths[number % len(paths)]) for number, model in enumerate(self.config.models)}

    def _base_texts(self) -> Data | None:
        """Texts that the base writes to measure forgetting; None if it writes none."""
        config, model = self.config, self._base_model()
        if self.base is None or model is None:
            return None
        seed = config.seed + WRITTEN_APART + len(config.models)
        return self._written(self.base.name, model, BASE_TEXTS, config.batch_size, seed)

    def _judge(self, part: list[Data], texts: Data | None) -> Judge:
        """The judge on some samples."""
        labelled = self.config.data[0] not in SOURCES and all(data.task not in UNLABELLED for data in part)
        vocabulary = vocabulary_size(self.anchor) or 1
        sets, texts = [in_small_batches(x, vocabulary) for x in part], texts and in_small_batches(texts, vocabulary)
        return Judge(sets, labelled, texts, owners=1 if labelled or len(sets) > 1 else len(self.config.models))


def split(samples: Sequence[Data], seed: int) -> tuple[list[Data], list[Data], list[Data]]:
    """Split every set of samples into training, deciding and reporting parts, by whole batches.

    Raises:
        DataError: a set has fewer than four examples.
    """
    parts = list[Data](), list[Data](), list[Data]()
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
