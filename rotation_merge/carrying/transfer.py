"""Carries the change of a fine-tune or an adapter to another base: new + scale * moved(tuned - old), as one value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from mergekit.common import dtype_from_name
from torch import Tensor

from rotation_merge.carrying.adapter import carry_adapter
from rotation_merge.carrying.bases import Bases, Execution, is_adapter_folder, open_bases
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.delta import Delta, Record, share
from rotation_merge.carrying.lora import adapter_of, left_out
from rotation_merge.carrying.sampled import SampledChange, sampled_change
from rotation_merge.carrying.tokens import AddedTokens
from rotation_merge.errors import DataError, not_written
from rotation_merge.files import TemporaryFolder
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.run import change_note
from rotation_merge.model.adapter_files import AdapterWeights
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.gguf import quantised
from rotation_merge.model.open import ModelLike, open_model, parse_reference
from rotation_merge.model.origin import origins
from rotation_merge.model.view import View
from rotation_merge.record import MergeReport
from rotation_merge.run.data import Samples
from rotation_merge.workers import Progress

OWN_BASE = "name its own base, or a copy of it (the command carries it anyway with --force)"
ALONE = "carry by weights, at a given scale: they alone can be carried by shared tokens"
ENOUGH = 0.99
"""Share of a change's squared norm from which a higher rank is not advised."""


@dataclass(frozen=True)
class Work:
    """A fine-tune or an adapter of the old base, opened.

    Attributes:
        name: as the user names it.
        rank: of the adapter that it becomes; 0: it becomes a model.
        tokens: that it adds to the old base.
        adapter: the adapter; None: it is a model.
        model: the fine-tune, or the old base with the adapter; None: the adapter's factors are carried.
    """

    name: str
    rank: int
    tokens: AddedTokens
    adapter: Adapter | None = None
    model: View | None = None
    rows: Mapping[str, Tensor] | None = None

    @staticmethod
    def of(work: ModelLike, bases: Bases, config: TransferConfig) -> Work:
        """Open a fine-tune, or an adapter's folder.

        Raises:
            RotationMergeError: it is damaged, or no fine-tune of the old base.
        """
        if not is_adapter_folder(work):
            opened = open_model(work, "tuned", any_base=True)
            tokens = AddedTokens.of(bases, opened, not config.rank)
            return Work(str(opened.reference), config.rank, tokens, None, bases.tuned(opened, tokens.lengths[1]))
        adapter = Adapter(str(work))
        if not config.needs_samples:
            tokens, rows = AddedTokens.of_adapter(bases, adapter)
            return Work(str(work), adapter.rank, tokens, adapter, rows=rows)
        opened = open_model(f"{bases.names[1]}+{work}", any_base=True)
        tokens = AddedTokens.of(bases, opened, rows_held=False)
        model = bases.tuned(opened, tokens.lengths[1])
        return Work(str(work), config.rank or adapter.rank, tokens, adapter, model)


@dataclass(frozen=True)
class Transfer:
    """One change between two aligned bases.

    Attributes:
        carrier: moves changes; both of its bases have rows for tokens that the work adds.
        report: on the alignment, with the origin of the work.
        norms: squared norms of the change of each tensor of a carried view, and of the old base's, as it is computed.
    """

    work: Work
    bases: Bases
    carrier: Carrier
    report: MergeReport
    config: TransferConfig
    execution: Execution
    norms: list[tuple[float, float]] = field(default_factory=list, repr=False)

    @cached_property
    def base(self) -> View:
        """The new base with rows for added tokens, as the result is written: the head apart, or tied."""
        untie = self.execution.storage.untie or bool(self.work.rank)
        return self.work.tokens.with_rows(open_model(self.bases.new, untie=untie), self.carrier.new)

    @property
    def tied(self) -> str | None:
        """A head that stays the embedding's tensor."""
        return None if self.execution.storage.untie else self.bases.new.tied_head

    @property
    def delta(self) -> Delta:
        """The fine-tune's change, moved by weights."""
        assert self.work.model is not None
        return Delta(self.carrier, self.work.model.tensors, self.base)

    def value(self, place: str, samples: Samples = None, progress: Progress | None = None) -> View | AdapterWeights:
        """The work as a model or an adapter of the new base, with its notes and report.

        Args:
            place: that interrupted work waits beside.
            samples: that solve and judge; None: the config's `data`.
        """
        if not self.config.needs_samples:
            return self._by_weights(1.0 if self.config.factor is None else self.config.factor, self.report, [])
        chosen = self.chosen(place, samples, progress)
        report, rank = self._judged(chosen), self.work.rank
        if chosen.method == "weights":
            return self._by_weights(chosen.scale, report, chosen.lines)
        if not rank:
            return self._noted(self.stored(chosen.delta.scaled(chosen.scale)), report, chosen.lines)
        written, _ = adapter_of(chosen.delta.scaled(chosen.scale), rank, self.bases.new)
        return self._noted(written, report, [*left_out(self.bases.new), *chosen.lines])

    def chosen(self, place: str, samples: Samples = None, progress: Progress | None = None) -> SampledChange:
        """The change that samples choose: by the method, by another one, or none.

        Raises:
            RotationMergeError: the head has no place for its change, or the samples cannot be used.
        """
        if not self.work.rank:
            by_weights = self.config.method == "weights"
            self.bases.check_head(self.execution.storage, by_weights and bool(self.carrier.alignment.folded))
        return sampled_change(self, place, samples, progress)

    def _judged(self, chosen: SampledChange) -> MergeReport:
        used = {"of": f"carrying {self.work.name}", "source": self.config.data, "samples": self.config.sample_count}
        return replace(self.report, data=[*self.report.data, used], lift=chosen.lift.facts())

    def stored(self, delta: Delta, record: Record | None = None) -> View:
        """The new base with a change, in the dtype that it is stored in."""
        dtype, view = dtype_from_name(self.execution.storage.dtype), delta.applied(record=record)
        return view if dtype is None else view.to(dtype)

    def unchanged(self) -> View:
        """The new base as it is, in the dtype that it is stored in; of an adapter, as it is."""
        dtype = None if self.work.rank else dtype_from_name(self.execution.storage.dtype)
        return self.base if dtype is None else self.base.to(dtype)

    def size_note(self) -> str | None:
        """A warning if the change, all of which was computed, is too large to transfer."""
        if not self.norms:
            return None
        return change_note(f"The task vector of `{self.work.name}`", *map(sum, zip(*self.norms, strict=True)))

    def _by_weights(self, scale: float, report: MergeReport, lines: Sequence[str]) -> View | AdapterWeights:
        """The change moved by the alignment alone.

        Args:
            lines: on the samples that chose the scale.
        """
        new, storage = self.bases.new, self.execution.storage
        if self.work.adapter is not None:
            adapter, old = self.work.adapter, self.bases.old
            moved, notes = carry_adapter(adapter, self.carrier, old.config, str(new.reference), scale, old.rows)
            if self.config.rank not in (0, adapter.rank):
                notes.append(f"The adapter keeps its rank {adapter.rank}: another rank is for whole fine-tunes.")
            if self.bases.rows is not None:
                count = len(self.bases.rows[0])
                notes.append(f"The bases share {count} tokens; changes of other tokens are not carried.")
            return self._noted(moved, report, [*lines, *notes])
        delta, rank = self.delta.scaled(scale), self.work.rank
        if rank:
            written, norms = adapter_of(delta, rank, new)
            more = "; a higher rank keeps more" if share(norms) < ENOUGH else ""
            kept = f"Rank {rank} keeps {share(norms):.1%} of the change (squared norm){more}."
            return self._noted(written, report, [*lines, kept, *left_out(new)])
        self.bases.check_head(storage, bool(self.carrier.alignment.folded))
        stale = [not_written(new.ignored)] if self.carrier.alignment.folded and new.ignored else []
        view = self.stored(delta, lambda change, before: self.norms.append((change, before)))
        return self._noted(view, report, [*lines, *stale])

    def _noted(self, value: Any, report: MergeReport, lines: Sequence[str]) -> Any:
        """A view or an adapter with its notes and report."""
        tokens = self.work.tokens
        notes = list(dict.fromkeys([*report.notes, *lines, *tokens.words()]))
        adapter = isinstance(value, AdapterWeights)
        report = replace(report, notes=notes, relation="adapter" if adapter else "finetune")
        beside = tokens.files({}) if adapter and not tokens.empty else value.beside
        return replace(value, notes=tuple(notes), report=report, beside=beside)


def transfers(
    works: Sequence[ModelLike],
    bases: Bases,
    config: TransferConfig,
    execution: Execution,
    progress: Progress | None = None,
) -> list[Transfer]:
    """Open work and align its bases, once for all of it.

    Raises:
        RotationMergeError: a model or an adapter cannot be read, or they do not fit together.
    """
    if config.needs_samples and bases.rows is not None:
        new, old = bases.names
        problem = f"its vocabulary differs from that of {new}, so samples cannot be shared"
        raise DataError(problem, where=old, remedy=ALONE)
    opened = [Work.of(work, bases, config) for work in works]
    config, notes = _matched_as(config, bases, execution, opened)
    alignment, report = bases.aligned(config, execution, progress)
    report = replace(report, notes=[*notes, *report.notes])
    dtype = dtype_from_name(execution.storage.dtype)
    carrier = Carrier(bases.architecture, bases.sources[1], bases.sources[0], alignment, bases.rows, dtype)
    return [_transfer(work, bases, carrier, report, config, execution) for work in opened]


def _matched_as(
    config: TransferConfig, bases: Bases, execution: Execution, works: Sequence[Work]
) -> tuple[TransferConfig, list[str]]:
    """The config with what matching has nothing to find left out, and a line on it.

    Streams, and with them a tied head, stay where the bases share their coordinates.
    """
    if config.match.residual != "largest" or config.alignment is not None or not bases.nearness.shared:
        return config, []
    asks = config.match != TransferConfig().match or config.match_on is not None or config.needs_samples
    if execution.near == "added" and not asks and not any(work.rank or not work.tokens.empty for work in works):
        words = f"The bases share their coordinates ({bases.nearness.words})"
        return replace(config, match=NOTHING), [f"{words}: nothing was matched, the change is added as it is."]
    return replace(config, match=replace(config.match, residual="none")), []


def _transfer(
    work: Work, bases: Bases, carrier: Carrier, report: MergeReport, config: TransferConfig, execution: Execution
) -> Transfer:
    """The transfer of one work, with rows for its tokens, and its origin in the report."""
    model, stored = work.model, work.adapter is not None or (work.model is not None and work.model.files is not None)
    types = quantised(model.folder) if model is not None and model.files is not None else ""
    known = origins([parse_reference(work.name)] if stored else [])
    facts = {name: {**origin, "carried": True} for name, origin in known.items()}
    notes = [*report.notes, *([f"`{model.reference}` {types}."] if types and model is not None else [])]
    report = replace(report, models={**report.models, **facts}, notes=notes)
    extended = work.tokens.extended(carrier, work.rows or {} if model is None else model.tensors)
    return Transfer(work, bases, extended, report, config, execution)


@dataclass(frozen=True)
class CarriedView:
    """The new base as a fine-tune changes it.

    Attributes:
        view: by the new base's names, in its storage form; changed tensors are unrounded, in float32 or wider.
        alignment: of the old base to the new one.
        lift: facts of the recovered lift, where samples judged.
    """

    view: View
    notes: list[str]
    alignment: Alignment
    lift: dict[str, Any] | None


def carried_view(
    tuned: str,
    old: str,
    new: str,
    config: TransferConfig,
    execution: Execution,
    progress: Progress | None = None,
) -> CarriedView:
    """A fine-tune carried for a merge, which keeps the new base's vocabulary and tokenizer.

    Args:
        tuned: as it is loaded: a path, or `base+adapter`.

    Raises:
        RotationMergeError: a model or the samples cannot be read, or they do not fit together.
    """
    bases, opened = open_bases(new, old, execution.device), open_model(tuned, any_base=True)
    tokens = AddedTokens.of(bases, opened, rows_held=False)
    work = Work(tuned, 0, tokens, None, bases.tuned(opened))
    alignment, report = bases.aligned(config, execution, progress)
    carrier = Carrier(bases.architecture, bases.sources[1], bases.sources[0], alignment, bases.rows)
    transfer = Transfer(work, bases, carrier, report, config, execution)
    delta, notes, lift = transfer.delta.scaled(1.0 if config.factor is None else config.factor), report.notes, None
    if config.needs_samples:
        with TemporaryFolder() as folder:
            chosen = sampled_change(transfer, os.path.join(folder, "out"), progress=progress)
        delta, notes, lift = chosen.delta.scaled(chosen.scale), chosen.lines, chosen.lift.facts()
        if chosen.method != "weights":
            view = delta.applied().to(torch.float32)
            return CarriedView(view, [*notes, *tokens.words(merged=True)], alignment, lift)
    view = replace(transfer.base, tensors=delta.stored(transfer.tied))
    return CarriedView(view, [*notes, *tokens.words(merged=True)], alignment, lift)


def transferred(
    name: str,
    old: str,
    new: str,
    config: TransferConfig,
    execution: Execution | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], list[str], Alignment, dict[str, Any] | None]:
    """The tensors, notes, alignment and lift of `carried_view`."""
    carried = carried_view(name, old, new, config, execution or Execution(), progress)
    return dict(carried.view.blocks()), carried.notes, carried.alignment, carried.lift
