"""An old base and an aligned new one, and the change of a fine-tune or an adapter of the old one between the two."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import yaml
from mergekit.common import dtype_from_name

from rotation_merge.architecture.registry import says_tied
from rotation_merge.carrying.adapter import NewAdapter, new_adapter
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.delta import Delta
from rotation_merge.carrying.judge import parted
from rotation_merge.carrying.places import AdapterPlaces
from rotation_merge.carrying.tokens import (
    chat_folder,
    check_adapter_tokens,
    check_same_set,
    check_tuned_tokens,
    with_chat,
)
from rotation_merge.errors import CheckpointError, DataError, RecipeError
from rotation_merge.matching.aligned_output import pair_report
from rotation_merge.matching.alignment import Alignment, load_for
from rotation_merge.matching.match_on import matcher
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.pair import Pair, check_pair, open_pair, options_of
from rotation_merge.matching.run import Run
from rotation_merge.model.adapter_parts import adapter_parts
from rotation_merge.model.adapters import Adapter, is_adapter
from rotation_merge.model.card import origins
from rotation_merge.model.forms import restructured
from rotation_merge.model.labels import in_class_order, label_rows
from rotation_merge.model.nearness import Nearness, equality, nearness
from rotation_merge.model.open import ModelLike, check_base, open_model, parse_reference
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import matched_on, padded_as, shared_rows, vocabulary_size
from rotation_merge.record import MergeReport
from rotation_merge.run.data import Samples
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.workers import Progress

OWN_BASE = "name its own base, or a copy of it (the command carries it anyway with --force)"
ALONE = "carry by weights, at a given scale: they alone can be carried to other ids"


class Bases(Pair):
    """The old base of a fine-tune or adapter, and the new base: the donor and the anchor of a pair.

    Rows of shared tokens are known whatever is matched; `shared` is None if the vocabularies are equal.
    """

    @staticmethod
    def of(new: ModelLike, old: ModelLike, device: str = "cpu", untie: bool = True, watched: bool = True) -> Bases:
        """Two bases of one architecture and sizes.

        Ids of their tokens may differ, and so may the form of their files: experts apart or stacked.

        Raises:
            RotationMergeError: one is missing, damaged, quantised or not supported, or they do not fit together.
        """
        pair = open_pair(new, old, NOTHING, untie, device, words=False, watched=watched)
        check_same_set(pair.anchor, pair.donor)
        return Bases(**{**vars(pair), "shared": shared_rows([pair.anchor, pair.donor])})

    @property
    def names(self) -> tuple[str, str]:
        """Names of the new base and of the old one."""
        return str(self.anchor.reference), str(self.donor.reference)

    @cached_property
    def sources(self) -> tuple[Tensors, Tensors]:
        """New and old tensors under the new base's names."""
        new, old = super().sources
        return new, restructured(old, self.donor.architecture, self.architecture)

    @property
    def old_as_new(self) -> View:
        """The old base in the form of the new one's files, in which their spaces meet."""
        new, old = self.anchor, self.sources[1]
        return replace(self.donor.as_filed, tensors=old, architecture=new.architecture, untie=new.untie)

    @cached_property
    def nearness(self) -> Nearness:
        """The nearness of the two bases by a few matrices, cached."""
        return nearness(self.architecture, *self.sources)

    def tuned(self, model: ModelLike) -> View:
        """A fine-tune of the old base, in the new base's class order and under its names.

        Raises:
            RotationMergeError: it is missing, damaged, or no fine-tune of that base; or it added tokens.
        """
        base = self.donor.as_filed
        pair = open_pair(base, model, NOTHING, True, self.device, words=False, any_base=True, watched=False)
        check_tuned_tokens(pair.anchor, pair.donor)
        donor = pair.donor.as_filed
        pair = replace(pair, donor=in_class_order(donor, label_rows(self.anchor, donor)))
        stored, source = pair.sources
        source = padded_as(source, stored, pair.architecture)
        length, size = (vocabulary_size(view) or 0 for view in (pair.anchor, pair.donor))
        config = _resized(pair.donor.config, size, length)
        tensors = restructured(source, pair.donor.architecture, self.architecture)
        return replace(pair.donor, tensors=tensors, architecture=self.architecture, config=config, untie=True)

    def adapter(self, path: str, force: bool) -> Adapter:
        """An adapter of the old base.

        Args:
            force: or of another base.

        Raises:
            RotationMergeError: it is damaged, or not of the old base, or added tokens.
        """
        adapter, old = Adapter.open(path), self.donor.as_filed
        if not force:
            check_base(adapter, [self.donor], path, OWN_BASE)
        parts = adapter_parts(adapter, old, path, adds=True)
        axes = {part.change.value: part.info.vocabulary_axis for part in parts if part.change.value}
        sizes = [adapter.shapes[name][axis] for name, axis in axes.items() if axis is not None]
        check_adapter_tokens(self.donor, path, max(sizes, default=None))
        return adapter

    def aligned(
        self,
        config: TransferConfig,
        samples: Samples = None,
        ledger: Ledger = NOWHERE,
        progress: Progress | None = None,
    ) -> tuple[Alignment, MergeReport]:
        """The alignment of the old base to the new one, and its report: from a file, or matched.

        Args:
            samples: batches for matching on activations; None: the config's `data`.
            ledger: store of matching's intermediate results, to resume from.

        Raises:
            RotationMergeError: the file cannot be read, or was made for other weights; or they cannot be matched.
        """
        run, (new, old), known = Run(), self.names, config.alignment
        file = known if isinstance(known, str) else None
        if isinstance(known, str):
            run.note(f"The bases were aligned by the file {known}; nothing was matched.")
            known = load_for(known, self.anchor, self.donor)
        options = self._match_options(config, run) if known is None else options_of(known.transforms, known.folded)
        options = check_pair(self.anchor, self.old_as_new, options).options
        if self.shared is not None and file is None:
            run.note(matched_on(self.anchor, self.donor, len(self.shared[0])))
        matching: dict[str, Any] = {"count": config.sample_count, "seed": config.seed, "length": config.length}
        if config.needs_samples:
            matching["part"] = lambda data: parted(data)[0]
        source = config.data if samples is None else samples
        models, recipe = (self.anchor.as_filed, self.donor.as_filed), yaml.safe_dump(asdict(options), sort_keys=False)
        match = matcher(config.matched_on, *models, source, device=self.device, **matching)
        alignment = known or match(self.architecture, *self.matched, options, progress, ledger=ledger)
        run.aligned(old, alignment, file)
        return alignment, pair_report(self, run, "" if file else recipe, new)

    def _match_options(self, config: TransferConfig, run: Run) -> AlignConfig:
        """What is matched, without what there is nothing to find for; if nothing is, the run has a note.

        Where the bases share their coordinates, streams stay, and with them a tied head; without options of matching or
        samples the change is added as it is.
        """
        match = config.match
        if match.residual != "largest" or not self.nearness.shared:
            return match
        if match != TransferConfig().match or config.match_on is not None or config.needs_samples:
            return replace(match, residual="none")
        words = f"The bases share their coordinates ({self.nearness.words})"
        run.note(f"{words}: nothing was matched, the change is added as it is.")
        return NOTHING

    def check_head(self, tuned: View | None) -> None:
        """Refuse to change a model's head that is tied in the new base and apart in the old one or the fine-tune.

        Raises:
            RecipeError: names it.
        """
        if (name := self.anchor.tied_head) is None:
            return
        (new, holder), apart = self.names, self.donor.tied_head is None
        if tuned is not None and not apart:
            holder, apart = tuned.name, not says_tied(tuned.config)
        if apart:
            problem = f"'{name}' is tied to the embedding, which {holder} has apart: its change has no place"
            remedy = "add 'untie' (the output then stores a separate head), or carry it as an adapter"
            raise RecipeError(problem, where=new, remedy=remedy)


def _resized(config: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """A config, or a part of one, in which the size of a vocabulary is another."""
    parts = {name: _resized(part, before, after) if isinstance(part, dict) else part for name, part in config.items()}
    return {**parts, "vocab_size": after} if config.get("vocab_size") == before else parts


@dataclass(frozen=True)
class Transfer:
    """The change of a fine-tune or an adapter, between two aligned bases.

    Attributes:
        name: of the fine-tune or adapter, as the user names it.
        alignment: of the old base to the new one.
        report: on the alignment, with the origin of the fine-tune or adapter.
        rank: of the adapter that the change becomes; 0: it becomes a model.
        adapter: None: it is a model.
        tuned: the fine-tune, or the old base with the adapter; None: the adapter's factors are carried.
        chat: the folder whose tokenizer has a chat template that the old base lacks; empty: there is none.
        dtype: that a model is stored in; None: the new base's.
        samples: batches that solve and judge; None: the config's `data`.
        norms: squared norms of the change of each tensor of a carried view, and of the old base's, as it is computed.
    """

    name: str
    bases: Bases
    config: TransferConfig
    alignment: Alignment
    report: MergeReport
    rank: int = 0
    adapter: Adapter | None = None
    tuned: View | None = None
    chat: str = ""
    dtype: str | None = None
    samples: Samples = field(default=None, repr=False)
    norms: list[tuple[float, float]] = field(default_factory=list, repr=False)

    @classmethod
    def of(
        cls,
        work: ModelLike,
        old: ModelLike,
        new: ModelLike,
        config: TransferConfig,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        untie: bool = False,
        watched: bool = True,
        force: bool = False,
        samples: Samples = None,
        ledger: Ledger = NOWHERE,
        progress: Progress | None = None,
    ) -> Transfer:
        """Open a fine-tune, or an adapter's folder, with its base and a new one, and align the bases.

        Args:
            untie: match heads as tensors of their own, also where the change becomes a model with a tied one.
            watched, ledger: as of `open_pair` and `Bases.aligned`.
            samples: batches that match, solve and judge; None: the config's `data`.
            force: also an adapter of another base.

        Raises:
            RotationMergeError: one is of no use, they do not fit together, or samples would be read by models of two
                vocabularies.
        """
        is_lora = is_adapter(work)
        untie = untie or config.untie or bool(config.rank) or is_lora or config.method != "weights"
        bases = Bases.of(new, old, device, untie, watched)
        model = open_model(work, "tuned", any_base=True) if not is_lora else None
        name = str(work) if model is None else str(model.reference)
        adapter = bases.adapter(name, force) if is_lora else None
        if adapter is not None and config.needs_samples:
            model = open_model(f"{bases.names[1]}+{name}", any_base=True)
        tuned = None if model is None else bases.tuned(model)
        if config.needs_samples and bases.shared is not None:
            problem = f"its vocabulary differs from that of {bases.names[0]}, so samples cannot be shared"
            raise DataError(problem, where=bases.names[1], remedy=ALONE)
        alignment, report = bases.aligned(config, samples, ledger, progress)
        stored = adapter is not None or (tuned is not None and tuned.files is not None)
        origin = {key: {**facts, "carried": True} for key, facts in origins([parse_reference(name)] * stored).items()}
        remark = "" if model is None or is_lora else equality(bases.donor.as_filed, model)
        notes = [*report.notes, *([] if tuned is None else tuned.remarks), *([f"`{name}` {remark}."] * bool(remark))]
        report = replace(report, models={**report.models, **origin}, notes=notes)
        rank = config.rank if adapter is None else adapter.rank
        if adapter is not None and config.needs_samples:
            rank = config.rank or rank
        chat = chat_folder(bases.donor, name if model is None or is_lora else model)
        return cls(name, bases, config, alignment, report, rank, adapter, tuned, chat, dtype, samples)

    @cached_property
    def base(self) -> View:
        """The new base as the result is written: the head apart, or tied, and with the fine-tune's chat template."""
        untie = self.config.untie or bool(self.rank)
        base = replace(open_model(self.bases.anchor, untie=untie), tensors=self.bases.sources[0])
        if not self.chat or self.tuned is None or self.bases.shared is not None:
            return base
        return with_chat(base, self.chat, self.bases.donor, self.tuned)

    @cached_property
    def delta(self) -> Delta:
        """The change, moved by weights; of an adapter whose factors are carried none yet."""
        old = self.bases.sources[1]
        tuned = old if self.tuned is None else self.tuned.tensors
        return Delta(self.base, old, tuned, self.alignment, self.bases.shared)

    def as_adapter(self, delta: Delta, trained: Collection[str] = ()) -> NewAdapter:
        """A change of the new base as an adapter of this rank; arguments as of `new_adapter`."""
        return new_adapter(delta, self._places, self.rank, trained)

    def unloadable(self, carried: Adapter) -> list[str]:
        """A line where peft does not load a carried adapter; it may be one that it did not load before."""
        try:
            problem = self._places.problem(carried)
        except CheckpointError:  # no class of transformers is that of the base
            return []
        return [f"This version of peft does not load it: {problem}."] if problem else []

    @cached_property
    def _places(self) -> AdapterPlaces:
        return AdapterPlaces.of(self.base)

    def applied(self, delta: Delta) -> View:
        """The new base with a change, in the dtype that it is stored in; as an adapter changes it, unrounded."""
        dtype = torch.float32 if self.rank else dtype_from_name(self.dtype)
        return delta.applied() if dtype is None else delta.applied().to(dtype)
