"""An old and a new base, their relation, and the transfer of changes between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch
import yaml
from mergekit.common import dtype_from_name

from rotation_merge.architecture import Architecture
from rotation_merge.carrying.carrier import Carrier, RowPair
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.check_pair import check_pair
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.open_pair import Pair, open_pair, read_file
from rotation_merge.matching.options import NOTHING, AlignConfig
from rotation_merge.matching.run import AppliedAlignment, Run
from rotation_merge.model.adapters import Adapter, is_adapter, placed_changes
from rotation_merge.model.forms import other_form, restructured, same_form
from rotation_merge.model.labels import in_class_order, label_rows
from rotation_merge.model.nearness import Nearness, nearness
from rotation_merge.model.rows import resized_vocabulary, vocabulary_subset
from rotation_merge.model.tensors import TensorSource
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import check_token_ids, shared_rows, vocabulary_size
from rotation_merge.record import MergeReport
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.workers import Progress


@dataclass(frozen=True)
class Bases:
    """The old base of a fine-tune or adapter, and the new base."""

    pair: Pair

    @property
    def old(self) -> View:
        return self.pair.donor

    @property
    def new(self) -> View:
        return self.pair.anchor

    @property
    def architecture(self) -> Architecture:
        return self.pair.architecture

    @cached_property
    def rows(self) -> RowPair | None:
        """Rows of the shared tokens, the new base's first; None if the vocabularies are equal."""
        rows = shared_rows([self.new, self.old])
        return None if rows is None else (rows[0], rows[1])

    @property
    def sources(self) -> tuple[TensorSource, TensorSource]:
        """New and old tensors under the new base's names."""
        new, old = self.pair.sources
        return new, self._named(old, self.old)

    @cached_property
    def nearness(self) -> Nearness:
        """The nearness of the two bases by a few matrices, cached."""
        return nearness(self.architecture, *self.sources)

    def _named(self, source: TensorSource, model: View) -> TensorSource:
        """The tensors of the old base or of its fine-tune, under the new base's names."""
        if same_form(model.architecture, self.architecture):
            return source
        return restructured(source, model.architecture, self.architecture)

    def tuned(self, path: str, length: int | None = None) -> TensorSource:
        """A fine-tune of the old base.

        Args:
            length: rows that its vocabulary is brought to, those that it lacks the base's; None: the base's.

        Raises:
            RotationMergeError: it is missing, damaged, or no fine-tune of that base.
        """
        pair = open_pair(str(self.old.reference), path, NOTHING, True, self.pair.device, words=False, any_base=True)
        check_token_ids(pair.anchor, pair.donor, tuned=True)
        donor = pair.donor.as_filed
        pair = replace(pair, donor=in_class_order(donor, label_rows(self.new, donor)))
        base, source = pair.sources
        ends = [size or 0 for size in (vocabulary_size(pair.anchor), vocabulary_size(pair.donor))]
        if (length := length or ends[0]) != ends[1]:
            absent = torch.arange(min(ends), ends[0])
            source = resized_vocabulary(pair.architecture, source, length, base, (absent, absent))
        return self._named(source, pair.donor)

    def match(
        self,
        options: AlignConfig,
        progress: Progress | None = None,
        match: Match = match_model,
        ledger: Ledger = NOWHERE,
    ) -> tuple[Alignment, MergeReport]:
        """Match the old base to the new one: the alignment and its report."""
        new, old = self.sources
        architecture = self.architecture
        options = check_pair(self.pair.checked.anchor, self.pair.checked.donor, options, untie=True).options
        if self.rows is not None:
            new, old = (
                vocabulary_subset(architecture, source, rows)
                for source, rows in zip((new, old), self.rows, strict=True)
            )
        run = Run()
        alignment = match(architecture, new, old, options, progress, ledger=ledger)
        run.aligned(str(self.old.reference), alignment)
        if self.rows is not None:
            run.note(f"The bases share {len(self.rows[0])} tokens: embeddings and heads were matched on them.")
        return alignment, self.pair.report(
            run, yaml.safe_dump(asdict(options), sort_keys=False), str(self.new.reference)
        )

    @property
    def names(self) -> tuple[str, str]:
        """Names of the new base and of the old one."""
        return str(self.new.reference), str(self.old.reference)

    def given(self, path: str) -> tuple[Alignment, MergeReport]:
        """Read the alignment file for these two bases.

        Raises:
            RotationMergeError: it cannot be read, or was made for other weights.
        """
        run = Run()
        run.note(f"The bases were aligned by the file {path}; nothing was matched.")
        file, name = read_file(self.pair, path, untie=True), str(self.old.reference)
        run.moved_by(name, AppliedAlignment(path, name, file.metadata))
        return file.alignment, self.pair.report(run, base=str(self.new.reference))

    def carrier(self, alignment: Alignment, dtype: str | None = None) -> Carrier:
        """The carrier of changes from the old base to the new one.

        Args:
            dtype: that a carried model is stored in, if another than the new base's.
        """
        new, old = self.sources
        return Carrier(self.architecture, old, new, alignment, self.rows, dtype_from_name(dtype))


def open_bases(new: str, old: str, device: str = "cpu", untie: bool = True) -> Bases:
    """Open two bases of one architecture and sizes.

    Their vocabularies may differ, and so may the form of their files: experts apart or stacked.

    Raises:
        RotationMergeError: one is missing, damaged, quantised or not supported, or they do not fit together.
    """
    pair = open_pair(new, old, NOTHING, untie, device, words=False)
    donor = _in_form_of(pair.architecture, pair.checked.donor)
    return Bases(replace(pair, checked=replace(pair.checked, donor=donor)))


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


def usable_as_it_is(works: Mapping[str, str], bases: Bases) -> dict[str, list[str]] | None:
    """Lines on work that needs no carrying, by output directory; None if it must be carried.

    Raises:
        RotationMergeError: work cannot be read, or is not of the old base.
    """
    near = bases.nearness
    if not near.shared or bases.old.rows:
        return None
    if bases.rows is not None and any(_by_token(work, bases) for work in works.values()):
        return None
    old, new = bases.old.reference, bases.new.reference
    lines = {}
    for out, work in works.items():
        subject = f"{old} and {new} share their coordinates ({near.words})"
        if is_adapter(work):
            whole = [change.value for change in placed_changes(Adapter(work), bases.old.config) if change.value]
            lines[out] = [f"{subject}: {work} can be used on {new} as it is."]
            if whole:
                lines[out].append(f"It replaces {len(whole)} whole tensors of the new base.")
        else:
            bases.tuned(work)  # opened, so that what is no fine-tune of the old base is refused
            recipe = f"merge_method: task_arithmetic, base_model: {new}, weight 1 for {work} and -1 for {old}"
            merge = f"merge_method: rotation_merge, delegate: wudi, base_model: {old}, models {new} and {work}"
            lines[out] = [
                f"{subject}: the change of {work} can be added to {new} as it is ({recipe}).",
                f"A merge of {new} and {work} as two fine-tunes of {old} keeps more of what {new} knows ({merge}).",
            ]
        judging = "--scale auto --data FILE judges the change on samples"
        lines[out].append(f"Nothing was written. {judging}, --force carries it anyway.")
    return lines


def _by_token(work: str, bases: Bases) -> bool:
    """Whether work changes rows of a vocabulary, which may mean other tokens in another base."""
    if not is_adapter(work):
        return True
    changes = placed_changes(Adapter(work), bases.old.config)
    return any(change.spot.info.vocabulary_axis is not None for change in changes)
