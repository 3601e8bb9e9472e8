"""An old and a new base of one architecture: matched, or aligned by a file; fine-tunes under the new base's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import yaml

from rotation_merge.architecture import Architecture
from rotation_merge.carrying.carrier import RowPair
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.judge import parted
from rotation_merge.carrying.vocabulary import check_no_added_tokens, check_same_set
from rotation_merge.errors import RecipeError
from rotation_merge.matching.aligned_output import pair_report, read_alignment
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.options import NOTHING, WEIGHTS
from rotation_merge.matching.pair import Pair, check_pair, open_pair
from rotation_merge.matching.run import AppliedAlignment, Run
from rotation_merge.model.adapters import is_adapter
from rotation_merge.model.forms import other_form, restructured, same_form
from rotation_merge.model.labels import in_class_order, label_rows
from rotation_merge.model.nearness import Nearness, nearness
from rotation_merge.model.open import ModelLike
from rotation_merge.model.rows import padded_as, vocabulary_axes, vocabulary_subset
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import check_token_ids, row_pair, vocabulary_size
from rotation_merge.model.writing import StorageOptions
from rotation_merge.record import MergeReport
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.workers import Progress


@dataclass(frozen=True)
class Execution:
    """Device, storage and other settings of a transfer's run.

    Attributes:
        device: to compute on.
        storage: options of writing models.
        ledger: store of matching's intermediate results, to resume from.
        force: carry adapters to the new base from one that is not their own.
        near: what becomes of work between bases that share their coordinates: `named`, as usable without carrying;
            `carried`; or `added`, without any matching, unless the config asks for some.
        match: aligns the bases, instead of what the config says.
        watched: take the bases' fingerprints, for a report that will be written.
    """

    device: str = "cpu"
    storage: StorageOptions = field(default_factory=StorageOptions)
    ledger: Ledger = field(default=NOWHERE, repr=False)
    force: bool = False
    near: Literal["named", "carried", "added"] = "named"
    match: Match | None = field(default=None, repr=False)
    watched: bool = True


@dataclass(frozen=True)
class Bases:
    """The old base of a fine-tune or adapter, and the new base.

    Attributes:
        compared: the old base in the form of the new one's files, in which their spaces meet.
    """

    pair: Pair
    compared: View

    @property
    def old(self) -> View:
        return self.pair.donor

    @property
    def new(self) -> View:
        return self.pair.anchor

    @property
    def architecture(self) -> Architecture:
        return self.pair.architecture

    @property
    def names(self) -> tuple[str, str]:
        """Names of the new base and of the old one."""
        return str(self.new.reference), str(self.old.reference)

    @cached_property
    def rows(self) -> RowPair | None:
        """Rows of the same tokens, the new base's first; None if the vocabularies are equal."""
        return row_pair(self.new, self.old)

    @property
    def sources(self) -> tuple[TensorSource, TensorSource]:
        """New and old tensors under the new base's names."""
        new, old = self.pair.sources
        return new, self._named(old, self.old)

    @cached_property
    def nearness(self) -> Nearness:
        """The nearness of the two bases by a few matrices, cached."""
        return nearness(self.architecture, *self.sources)

    @property
    def near_words(self) -> str:
        """Words on bases that share their coordinates."""
        new, old = self.names
        return f"{old} and {new} share their coordinates ({self.nearness.words})"

    def _named(self, source: TensorSource, model: View) -> TensorSource:
        """The tensors of the old base or of its fine-tune, under the new base's names."""
        if same_form(model.architecture, self.architecture):
            return source
        return restructured(source, model.architecture, self.architecture)

    def tuned(self, model: ModelLike) -> View:
        """A fine-tune of the old base, in the new base's class order and under its names.

        Raises:
            RotationMergeError: it is missing, damaged, or no fine-tune of that base; or it added tokens.
        """
        base, device = self.old.as_filed, self.pair.device
        pair = open_pair(base, model, NOTHING, True, device, words=False, any_base=True, watched=False)
        check_no_added_tokens(pair.anchor, pair.donor)
        check_token_ids(pair.anchor, pair.donor, tuned=True)
        donor = pair.donor.as_filed
        pair = replace(pair, donor=in_class_order(donor, label_rows(self.new, donor)))
        stored, source = pair.sources
        source = padded_as(source, stored, vocabulary_axes(pair.architecture.tensors()))
        length, size = (vocabulary_size(view) or 0 for view in (pair.anchor, pair.donor))
        config = {**pair.donor.config, **_sized(pair.donor.config, size, length)}
        tensors = as_tensors(self._named(source, pair.donor))
        return replace(pair.donor, tensors=tensors, architecture=self.architecture, config=config, untie=True)

    def aligned(
        self, config: TransferConfig, execution: Execution, progress: Progress | None = None
    ) -> tuple[Alignment, MergeReport]:
        """The alignment of the old base to the new one, and its report: from a file, or matched.

        Raises:
            RotationMergeError: the file cannot be read, or was made for other weights; or they cannot be matched.
        """
        run, (new, old) = Run(), self.names
        if isinstance(config.alignment, str):
            run.note(f"The bases were aligned by the file {config.alignment}; nothing was matched.")
            alignment = read_alignment(self.pair, config.alignment, self.compared)
            run.alignment_files[old] = AppliedAlignment(config.alignment, old, alignment.metadata)
            return alignment, pair_report(self.pair, run, base=new)
        options = check_pair(self.pair.view(self.new), self.compared, config.match, untie=self.pair.untie).options
        sources = self.sources
        if self.rows is not None:
            pairs = zip(sources, self.rows, strict=True)
            first, second = (vocabulary_subset(self.architecture, source, rows) for source, rows in pairs)
            sources = first, second
        match = execution.match or self._matcher(config, execution.device)
        alignment = match(self.architecture, *sources, options, progress, ledger=execution.ledger)
        run.aligned(old, alignment)
        if self.rows is not None:
            run.note(f"The bases share {len(self.rows[0])} tokens: embeddings and heads were matched on them.")
        return alignment, pair_report(self.pair, run, yaml.safe_dump(asdict(options), sort_keys=False), new)

    def _matcher(self, config: TransferConfig, device: str) -> Match:
        """The function that aligns the bases."""
        alignment = config.alignment
        if isinstance(alignment, Alignment):
            return lambda *_, **__: alignment
        if config.matched_on == WEIGHTS:
            return match_model
        from rotation_merge.matching.match_on import SampleMatcher

        part = (lambda data: parted(data)[0]) if config.needs_samples else (lambda data: data)
        count, seed, length = config.sample_count, config.seed, config.length
        return SampleMatcher(config.matched_on, *self.names, config.data, count, seed, device, length, part)

    def check_head(self, storage: StorageOptions, folded: bool) -> None:
        """Refuse a change of a head that is tied in the new base, without `untie`.

        Args:
            folded: whether the stream that the head reads is rotated.
        """
        tied = None if storage.untie else self.new.tied_head
        if tied is None or not (folded or self.old.tied_head is None):
            return
        problem = f"a rotated stream needs an untied head, '{tied}' is tied to the embedding"
        if not folded:
            problem = f"'{tied}' is tied to the embedding, which {self.names[1]} has apart: its change has no place"
        unrotated = "use 'residual: permutation', " if folded else ""
        remedy = f"add 'untie' (the output then stores a separate head), {unrotated}or carry it as an adapter"
        raise RecipeError(problem, where=self.names[0], remedy=remedy)


def _sized(config: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """Entries of a config, or of a part of it, that name the size of a vocabulary, with another size."""
    changed: dict[str, Any] = {"vocab_size": after} if config.get("vocab_size") == before else {}
    for name, part in config.items():
        if isinstance(part, dict) and part.get("vocab_size") == before:
            changed[name] = {**part, "vocab_size": after}
    return changed


def is_adapter_folder(work: ModelLike) -> bool:
    """Whether work is the folder of an adapter, not a model."""
    return not isinstance(work, View) and is_adapter(str(work))


def open_bases(new: ModelLike, old: ModelLike, device: str = "cpu", untie: bool = True, watched: bool = True) -> Bases:
    """Open two bases of one architecture and sizes.

    Ids of their tokens may differ, and so may the form of their files: experts apart or stacked.

    Raises:
        RotationMergeError: one is missing, damaged, quantised or not supported, or they do not fit together.
    """
    pair = open_pair(new, old, NOTHING, untie, device, words=False, watched=watched)
    check_same_set(pair.anchor, pair.donor)
    return Bases(pair, _in_form_of(pair.architecture, pair.donor.as_filed))


def _in_form_of(reference: Architecture, member: View) -> View:
    """A model with its weights in the file form of another one."""
    place = {(block.module, block.place, block.index): block for block in reference.blocks}
    blocks = []
    for block in member.architecture.blocks:
        reference_block = place.get((block.module, block.place, block.index))
        if reference_block is not None and (gained := other_form(block, reference_block)):
            spent = other_form(reference_block, block)
            remaining = (info for info in block.tensors if info.key not in spent)
            block = replace(
                block, tensors=(*remaining, *(info for info in reference_block.tensors if info.key in gained))
            )
        blocks.append(block)
    return replace(member, architecture=replace(member.architecture, blocks=tuple(blocks)))
