"""Carrying between two aligned bases by weights, and writing of the results."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from mergekit.common import dtype_from_name
from torch import Tensor

from rotation_merge.carrying.adapter import CarriedAdapter, carry_adapter
from rotation_merge.carrying.bases import Bases
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.delta import Delta, share
from rotation_merge.carrying.judge import parted
from rotation_merge.carrying.lora import adapter_of, left_out
from rotation_merge.carrying.tokens import AddedTokens
from rotation_merge.errors import RecipeError, not_written
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.options import WEIGHTS
from rotation_merge.matching.run import Run, change_note
from rotation_merge.model.adapter_files import AdapterWeights
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.card import metadata, notes, section, with_metadata
from rotation_merge.model.checkpoint import write_checkpoint
from rotation_merge.model.markdown import code, prose
from rotation_merge.model.open import parse_reference
from rotation_merge.model.origin import origins
from rotation_merge.model.rows import vocabulary_axes
from rotation_merge.model.staging import staged
from rotation_merge.model.tensors import TensorSource
from rotation_merge.model.writing import StorageOptions
from rotation_merge.record import REPORT_FILE, MergeReport, versions
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.workers import Progress

MOVED = (
    "Nothing was trained: the change was moved by the alignment of the old base with the new one. If the new base were "
    "the old one in other coordinates, it would have exactly the same effect. How much transfers to another base "
)
ENOUGH = 0.99
"""Share of a change's squared norm from which a higher rank is not advised."""
ASK = (
    "How much of its effect transfers is not measured. '--scale auto' measures it on samples, and tells you if "
    "training on the new base is better."
)
OTHER_WORDS = (
    "How much of its effect transfers is not measured, because the two vocabularies differ. Compare it on your task "
    "with the new base alone, and with training on the new base."
)


@dataclass(frozen=True)
class Execution:
    """Device, storage and other settings of a transfer's run.

    Attributes:
        device: to compute on.
        storage: options of writing models.
        ledger: store of matching's intermediate results, to resume from.
        force: carry adapters to the new base from one that is not their own.
        even_if_near: carry although the bases share their coordinates.
    """

    device: str = "cpu"
    storage: StorageOptions = field(default_factory=StorageOptions)
    ledger: Ledger = field(default=NOWHERE, repr=False)
    force: bool = False
    even_if_near: bool = False


@dataclass(frozen=True)
class TransferResult:
    """The result of carrying one fine-tune or adapter.

    Attributes:
        work: the adapter or fine-tune that was carried.
        out: where it lies; None: nothing was written, as it can be used as it is.
        lines: notes for the user.
        report: as it is written beside the result.
    """

    work: str
    out: str | None
    lines: list[str]
    report: MergeReport | None = None


@dataclass
class TransferSession:
    """Carries one change after the other between the same two bases.

    Attributes:
        carrier: moves changes of the old base to the new one.
        report: on the alignment of the two.
        scale: factor of changes that are carried by weights.
        tokens: tokens that the work adds to the old base; both bases of the carrier have rows for them.
    """

    bases: Bases
    carrier: Carrier
    report: MergeReport
    config: TransferConfig
    execution: Execution
    scale: float = 1.0
    tokens: AddedTokens | None = None

    def with_added_tokens(self, tokens: AddedTokens, tuned: TensorSource) -> TransferSession:
        """The session for work that added tokens.

        Args:
            tuned: its tensors that have a vocabulary, at least.
        """
        return replace(self, carrier=tokens.extended(self.carrier, tuned), tokens=tokens)

    @property
    def token_words(self) -> list[str]:
        """Lines on the result for the chat template and added tokens."""
        return [] if self.tokens is None else self.tokens.words()

    def write_tokens(self, folder: str) -> None:
        """Put tokenizer and template of the work in place of the new base's, as far as they came along."""
        if self.tokens is not None:
            self.tokens.write(folder)

    @classmethod
    def aligned(
        cls, bases: Bases, config: TransferConfig, execution: Execution, progress: Progress | None = None
    ) -> TransferSession:
        """A session with aligned bases: matched, from a file, or from a given alignment."""
        if isinstance(config.alignment, str):
            alignment, report = bases.given(config.alignment)
        else:
            match = matcher(config, bases, execution.device)
            alignment, report = bases.match(config.match, progress, match, execution.ledger)
        scale = 1.0 if config.factor is None else config.factor
        return cls(bases, bases.carrier(alignment, execution.storage.dtype), report, config, execution, scale)

    @property
    def measured(self) -> bool:
        """Whether samples chose the scale."""
        return self.report.lift is not None

    @property
    def advice_lines(self) -> list[str]:
        """Lines on the scale and on measuring a change that was carried by weights alone."""
        if self.measured:
            return []
        ask = ASK if self.bases.rows is None else OTHER_WORDS
        return [ask] if self.scale == 1 else [f"Its change was multiplied by {self.scale:g}.", ask]

    @property
    def how(self) -> str:
        """The method of carrying by weights, for a card."""
        return MOVED + ("is shown by the losses below." if self.measured else "was not measured.")

    def delta(self, tuned: TensorSource) -> Delta:
        """A fine-tune's change for the new base, at the session's scale."""
        return Delta(self.carrier, tuned, self.scale)

    def adapter(self, adapter: Adapter) -> tuple[AdapterWeights, list[str]]:
        """An adapter of the old base as one of the new base, and notes on it."""
        new, old = str(self.bases.new.reference), self.bases.old
        carried = carry_adapter(adapter, self.carrier, old.config, new, self.scale, old.rows)
        lines = _notes(carried, self.bases)
        if self.config.rank not in (0, adapter.rank):
            lines.append(f"The adapter keeps its rank {adapter.rank}: another rank is for whole fine-tunes.")
        return carried.adapter, lines

    def as_adapter(self, tuned: TensorSource, rank: int) -> tuple[AdapterWeights, list[str]]:
        """The change of a whole fine-tune as an adapter, with notes on it."""
        delta = self.delta(tuned)
        written, norms = adapter_of(delta, rank, self.bases.new)
        more = "; a higher rank keeps more" if share(norms) < ENOUGH else ""
        note = f"Rank {rank} keeps {share(norms):.1%} of the change (squared norm){more}."
        return written, [note, *left_out(self.bases.new)]

    def report_on(self, work: str) -> MergeReport:
        """The report on the bases, with the origin and licence of the work."""
        origin_facts = {name: {**facts, "carried": True} for name, facts in origins([parse_reference(work)]).items()}
        return replace(self.report, models={**self.report.models, **origin_facts})

    def write_adapter(
        self, work: str, out: str, written: AdapterWeights, lines: list[str], how: str = ""
    ) -> TransferResult:
        """An adapter, its report and card.

        Args:
            how: the method in words; empty: carried by weights.
        """
        lines = [*lines, *([] if how else self.advice_lines), *self.token_words]
        report = replace(self.report_on(work), notes=[*self.report.notes, *lines], relation="adapter")
        with staged(out) as staging:
            written.write(staging)
            self.write_tokens(staging)
            report.write(os.path.join(staging, REPORT_FILE))
            with open(os.path.join(staging, "README.md"), "w", encoding="utf-8") as file:
                file.write(card(self.bases, work, report, out, "adapter", how or self.how))
        return TransferResult(work, out, [verdict(self.bases, report), *report.notes], report)

    def write_model(self, work: str, out: str, tuned: TensorSource, progress: Progress | None) -> TransferResult:
        """A whole fine-tune as a model: the new base, folded where the alignment needs it, with the moved change."""
        run, delta = Run(), replace(self.delta(tuned), dtype=dtype_from_name(self.execution.storage.dtype))
        lines: list[str] = []
        report = replace(self.report_on(work), notes=lines)
        stale = self.bases.new.ignored if self.carrier.alignment.folded else []  # made for the norms as they were

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for _, pieces, change, before in delta.tensors():
                run.transport(work, change, before)
                yield from pieces.items()
            lines.extend([*self.report.notes, *run.transport_notes(), *self.advice_lines])
            lines.extend([*([not_written(stale)] if stale else []), *self.token_words])

        def text() -> str:
            return card(self.bases, work, report, out, "finetune", self.how)

        storage, beside = self.execution.storage, self.write_tokens
        write_checkpoint(self.bases.new, tensors(), report, text, out, storage, progress, left_out=stale, beside=beside)
        return TransferResult(work, out, [verdict(self.bases, report), *lines], report)

    def _grown(self, written: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the new base with rows for added tokens, except those that are written anyway."""
        if self.tokens is None or not self.tokens.rows:
            return
        for name in vocabulary_axes(self.carrier.architecture.tensors()):
            if name not in written and name in self.bases.new.shapes:
                yield name, self.carrier.new[name]

    def write_solved(
        self, work: str, out: str, delta: Delta, lines: list[str], how: str, progress: Progress | None
    ) -> TransferResult:
        """A change that was solved on samples, as a model: the new base with it."""
        report = replace(self.report_on(work), notes=[*self.report.notes, *lines, *self.token_words])
        text = card(self.bases, work, report, out, "finetune", how)
        storage, beside = self.execution.storage, self.write_tokens
        tensors = chain(delta.named(dtype_from_name(storage.dtype)), self._grown(delta.solved or ()))
        write_checkpoint(self.bases.new, tensors, report, text, out, storage, progress, beside=beside)
        return TransferResult(work, out, [verdict(self.bases, report), *report.notes], report)


def matcher(config: TransferConfig, bases: Bases, device: str) -> Match:
    """The function that aligns two bases."""
    alignment = config.alignment
    if isinstance(alignment, Alignment):
        return lambda *_, **__: alignment
    if config.matched_on == WEIGHTS:
        return match_model
    from rotation_merge.matching.match_on import SampleMatcher

    part = (lambda data: parted(data)[0]) if config.needs_samples else (lambda data: data)
    count, seed, length = config.sample_count, config.seed, config.length
    return SampleMatcher(config.matched_on, *bases.names, config.data, count, seed, device, length, part)


def check_head(bases: Bases, storage: StorageOptions, folded: bool) -> None:
    """Refuse a change of a head that is tied in the new base, without `untie`.

    Args:
        folded: whether the stream that the head reads is rotated.
    """
    tied = None if storage.untie else bases.new.tied_head
    if tied is None or not (folded or bases.old.tied_head is None):
        return
    problem = f"a rotated stream needs an untied head, '{tied}' is tied to the embedding"
    if not folded:
        problem = f"'{tied}' is tied to the embedding, which {bases.old.reference} has apart: its change has no place"
    unrotated = "use 'residual: permutation', " if folded else ""
    remedy = f"add 'untie' (the output then stores a separate head), {unrotated}or carry it as an adapter"
    raise RecipeError(problem, where=str(bases.new.reference), remedy=remedy)


def verdict(bases: Bases, report: MergeReport) -> str:
    """A line on the distance of the bases before and after the alignment."""
    words = report.verdict(str(bases.old.reference))
    return f"Alignment of {bases.old.reference} to {bases.new.reference}: {words}."


def _notes(carried: CarriedAdapter, bases: Bases) -> list[str]:
    change, before = map(sum, zip(*carried.norms.values(), strict=True))
    notes = [f"{len(carried.norms)} changed tensors were carried."]
    if warning := change_note("The change", change, before):
        notes.append(warning)
    if carried.constants:
        notes.append(
            f"{len(carried.constants)} modules got a bias (peft's lora_bias), because norms shift their inputs."
        )
    if bases.rows is not None:
        notes.append(f"The bases share {len(bases.rows[0])} tokens; changes of other tokens are not carried.")
    return notes


def card(bases: Bases, work: str, report: MergeReport, out: str, relation: str, how: str) -> str:
    """A model card for a carried `adapter` or `finetune` of the new base; `how` is the method in words."""
    old, new = str(bases.old.reference), str(bases.new.reference)
    name, full = os.path.basename(os.path.abspath(out)), replace(report, relation=relation)
    names = [str(work), old, new]
    classes = bases.new.config.get("architectures")
    options = f"\nOptions:\n\n```yaml\n{report.recipe}```\n" if report.recipe else ""
    body = (
        f"# {name}\n\n"
        f"This is {code(work)}, trained on {code(old)}, carried to {code(new)} by rotation_merge "
        f"{versions().get('rotation-merge', '')}. {prose(how, names)}\n\n"
        f"{prose(verdict(bases, report), names)}\n\n" + "\n".join(notes(report)) + "\n"
        f"{options}\n" + section(full, name, str(classes[0]) if classes else None)
    )
    return with_metadata(metadata(full), body)
