"""Adapters carried to a new base and written as peft writes them, with report and card."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from rotation_merge.carrying.adapters_carried import Carried, carry_adapter
from rotation_merge.carrying.bases import Bases, open_bases
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.lora_of_tuned import left_out, lora_of_tuned
from rotation_merge.carrying.tuned import Scale, Tuned, share
from rotation_merge.carrying.unlike import Unlike
from rotation_merge.carrying.unmoved import usable_as_it_is
from rotation_merge.errors import CheckpointError, RecipeError, not_written
from rotation_merge.files.ledger import NOWHERE, Ledger
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.match import Match, match_model
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.run import Run, how_far
from rotation_merge.model.adapter_base import check_base
from rotation_merge.model.adapters import Adapter, is_adapter
from rotation_merge.model.card import metadata, notes, section, with_metadata
from rotation_merge.model.checkpoint import parse_reference
from rotation_merge.model.lora import Written
from rotation_merge.model.markdown import code, prose
from rotation_merge.model.origin import origins
from rotation_merge.model.output import staged
from rotation_merge.model.source import Progress, TensorSource
from rotation_merge.model.writing import Storage, write_checkpoint
from rotation_merge.record import REPORT_FILE, MergeReport, versions

MOVED = (
    "Nothing was trained: what it changes was moved by the map that brings the old base as near as possible to the new "
    "one. If the new base were the old one in other coordinates, it would do here what it did there; how much of it "
    "arrives at another base "
)
ASK = (
    "How much of it arrives in function was not measured: '--scale auto' measures it on samples, and says when to "
    "train on the new base instead."
)
OWN_BASE = "name its own base (--from), or carry it all the same with --force"
OTHER_WORDS = (
    "How much of it arrives in function was not measured: samples mean other things to models of two vocabularies. "
    "Compare it on your task with the new base alone, and with training on that."
)


@dataclass(frozen=True)
class Settings:
    """How work is carried.

    Attributes:
        match: the groups that the bases are matched by.
        alignment: a file of maps to apply instead of matching.
        scale: what every change is multiplied by.
        lora: rank of the adapters that whole fine-tunes are written as; 0: as models.
        unlike: what of the bases' shapes may differ.
        matcher: what finds the map between the bases.
        ledger: where what matching finds is kept, and looked for.
        force: carry adapters to the new base from one that is not their own.
        even_if_near: carry although the bases share their coordinates.
    """

    match: AlignConfig = field(default_factory=AlignConfig)
    alignment: str | None = None
    scale: Scale = 1.0
    device: str = "cpu"
    lora: int = 0
    storage: Storage = field(default_factory=Storage)
    unlike: Unlike = field(default_factory=Unlike)
    matcher: Match = field(default=match_model, repr=False)
    ledger: Ledger = field(default=NOWHERE, repr=False)
    force: bool = False
    even_if_near: bool = False


@dataclass(frozen=True)
class Done:
    """One thing that was carried: where it came from, where it lies (None: nothing was written, as it can be used as it
    is), and what the user should know."""

    work: str
    out: str | None
    lines: list[str]


def carry_all(
    works: Mapping[str, str], old: str, new: str, settings: Settings, progress: Progress | None = None
) -> list[Done]:
    """Carry adapters and fine-tunes of one base to another one; nothing is written before all adapters are carried.

    Args:
        works: directories of adapters and of whole models, by the directory that each is to be written to.

    Raises:
        RotationMergeError: a model or an adapter cannot be read, or they do not fit together.
    """
    adapters = {out: Adapter(path) for out, path in works.items() if is_adapter(path)}
    whole = {out: path for out, path in works.items() if out not in adapters}
    if settings.unlike.asked:  # an adapter's change is read as its model's, which it makes of low rank again
        whole, merged, adapters = {**whole, **{out: f"{old}+{a.path}" for out, a in adapters.items()}}, adapters, {}
    else:
        merged = {}
    ranks = {out: settings.lora or (merged[out].rank if out in merged else 0) for out in whole}
    untie = settings.storage.untie or all(ranks.get(out, 1) for out in works)
    bases = open_bases(new, old, settings.device, untie, settings.unlike)
    if (unmoved := left_as_they_are(works, bases, settings)) is not None:
        return unmoved
    bases = bases.settled(settings.match, progress)
    tuned = {out: bases.tuned(path) for out, path in whole.items()}
    alignment, report = aligned(bases, settings, progress)
    if not all(ranks.values()):
        check_head(bases, alignment, settings)
    carrying = Work(bases, bases.carrier(alignment, settings.storage.dtype), report, settings)
    ready = {out: carrying.adapter(adapter) for out, adapter in adapters.items()}
    ready |= {out: carrying.as_lora(source, ranks[out]) for out, source in tuned.items() if ranks[out]}
    tuned = {out: source for out, source in tuned.items() if not ranks[out]}
    return [
        *(carrying.write(works[out], out, *result) for out, result in ready.items()),
        *(carrying.write_tuned(works[out], out, source, progress) for out, source in tuned.items()),
    ]


def left_as_they_are(works: Mapping[str, str], bases: Bases, settings: Settings) -> list[Done] | None:
    """What to say of work that can be used as it is, because the bases share their coordinates; None: it is carried.

    Raises:
        RotationMergeError: an adapter cannot be read, or is of another base.
    """
    for work in works.values():
        if is_adapter(work) and not settings.force:
            check_base(Adapter(work), [bases.old], work, OWN_BASE)
    if settings.even_if_near or settings.alignment is not None:
        return None
    said = usable_as_it_is(works, bases)
    return None if said is None else [Done(works[out], None, lines) for out, lines in said.items()]


def aligned(bases: Bases, settings: Settings, progress: Progress | None) -> tuple[Alignment, MergeReport]:
    """What brings the old base to the new one, matched or from a file, and the report on it."""
    if settings.alignment is not None:
        return bases.given(settings.alignment)
    return bases.match(settings.match, progress, settings.matcher, settings.ledger)


@dataclass
class Work:
    """Carrying one thing after the other between the same two bases."""

    bases: Bases
    carrier: Carrier
    report: MergeReport
    settings: Settings

    @property
    def measured(self) -> bool:
        """Whether samples said the scales."""
        return isinstance(self.settings.scale, Mapping)

    @property
    def asked(self) -> list[str]:
        """What else to say where weights alone carried it: at which scale, and what would measure what arrives."""
        scale = self.settings.scale
        if isinstance(scale, Mapping):
            return []
        ask = ASK if self.bases.rows is None else OTHER_WORDS
        return [ask] if scale == 1 else [f"Its change was multiplied by {scale:g}.", ask]

    @property
    def how(self) -> str:
        """What weights alone do, for a card."""
        return MOVED + ("is said by the losses below." if self.measured else "was not measured.")

    def adapter(self, adapter: Adapter) -> tuple[Written, list[str]]:
        new = str(self.bases.new.reference)
        old = self.bases.old
        carried = carry_adapter(adapter, self.carrier, old.config, new, self.settings.scale, old.rows)
        notes = _notes(carried, self.bases)
        if self.settings.lora not in (0, adapter.rank):
            notes.append(f"It stays an adapter of rank {adapter.rank}: --lora is for whole fine-tunes.")
        return carried.adapter, notes

    def as_lora(self, source: TensorSource, rank: int) -> tuple[Written, list[str]]:
        """A whole fine-tune's change as an adapter."""
        tuned = Tuned(self.carrier, source, self.settings.scale)
        written, kept = lora_of_tuned(tuned, rank, self.bases.new)
        what = "what fine-tuning changed" if self.carrier.frame is None else "what has a place there"
        note = f"An adapter of rank {rank} keeps {share(kept):.1%} of the squared norm of {what}."
        return written, [*tuned.share(), note, *left_out(self.bases.new)]

    def report_on(self, work: str) -> MergeReport:
        """The report on the bases, which knows where the work came from and under which licence."""
        own = {name: {**facts, "carried": True} for name, facts in origins([parse_reference(work)]).items()}
        return replace(self.report, models={**self.report.models, **own})

    def write(self, work: str, out: str, written: Written, notes: list[str], how: str = "") -> Done:
        """An adapter, its report and card.

        Args:
            how: what was done; nothing: it was carried by weights.
        """
        notes = notes if how else [*notes, *self.asked]
        report = replace(self.report_on(work), notes=[*self.report.notes, *notes], relation="adapter")
        with staged(out) as staging:
            written.write(staging)
            report.write(os.path.join(staging, REPORT_FILE))
            with open(os.path.join(staging, "README.md"), "w", encoding="utf-8") as file:
                file.write(card(self.bases, work, report, out, "adapter", how or self.how))
        return Done(work, out, [verdict(self.bases, report), *report.notes])

    def write_tuned(self, work: str, out: str, source: TensorSource, progress: Progress | None) -> Done:
        """A whole fine-tune as a model: the new base, folded where the alignment needs it, with the moved change."""
        run, tuned = Run(), Tuned(self.carrier, source, self.settings.scale)
        notes: list[str] = []
        report = replace(self.report_on(work), notes=notes)
        stale = self.bases.new.ignored if self.carrier.alignment.folded else []  # made for the norms as they were

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for _, pieces, change, before in tuned.tensors():
                run.transport(work, change, before)
                yield from pieces.items()
            notes.extend([*self.report.notes, *tuned.share(), *run.transport_notes(), *self.asked])
            notes.extend([not_written(stale)] if stale else [])

        def text() -> str:
            return card(self.bases, work, report, out, "finetune", self.how)

        storage = self.settings.storage
        write_checkpoint(self.bases.new, tensors(), report, text, out, storage, progress, left_out=stale)
        return Done(work, out, [verdict(self.bases, report), *notes])


def check_head(bases: Bases, alignment: Alignment, settings: Settings) -> None:
    """Refuse a turned stream where the head is tied and no head of its own was asked for."""
    if alignment.folded and not settings.storage.untie and (tied := bases.new.tied_head) is not None:
        raise RecipeError(
            f"a turned stream needs a head of its own, '{tied}' is tied to the embedding",
            where=str(bases.new.reference),
            remedy="add --untie (the output then stores its head), or --residual permutation, or --lora RANK",
        )


def verdict(bases: Bases, report: MergeReport) -> str:
    """How far the bases were apart, before and after the alignment, in one line."""
    words = report.verdict(str(bases.old.reference))
    return f"{bases.old.reference} to {bases.new.reference}: {words}."


def _notes(carried: Carried, bases: Bases) -> list[str]:
    change, before = map(sum, zip(*carried.norms.values(), strict=True))
    notes = [
        f"{len(carried.norms)} changed tensors were carried.",
        how_far("Their change", change, before, "of what they were"),
    ]
    if carried.constants:
        notes.append(
            f"{len(carried.constants)} modules got a bias (peft's lora_bias): norms of the old base shift their inputs."
        )
    if bases.rows is not None:
        notes.append(f"The bases share {len(bases.rows[0])} tokens; what is learned of others is not carried.")
    return notes


def card(bases: Bases, work: str, report: MergeReport, out: str, relation: str, how: str) -> str:
    """A model card for what was carried: an `adapter` or a `finetune` of the new base; `how` says what was done."""
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


def check_places(works: Sequence[str], places: Sequence[str]) -> None:
    """Refuse to write two adapters to one place.

    Raises:
        CheckpointError: names the two.
    """
    for i, place in enumerate(places):
        if place in places[:i]:
            raise CheckpointError(
                f"would be written to {place}, as {works[places.index(place)]}",
                where=works[i],
                remedy="carry them one by one",
            )
