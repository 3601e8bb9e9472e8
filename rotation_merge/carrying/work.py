"""Fine-tunes and adapters of an old base, opened and put between the old base and an aligned new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from rotation_merge.carrying.bases import Bases, Execution, is_adapter_folder
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.delta import Delta, Record
from rotation_merge.carrying.tokens import chat_folder, check_adapter_tokens, with_chat
from rotation_merge.errors import DataError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.run import change_note
from rotation_merge.model.adapter_base import check_base
from rotation_merge.model.adapters import Adapter, placed_changes
from rotation_merge.model.open import ModelLike, open_model, parse_reference
from rotation_merge.model.origin import origins
from rotation_merge.model.view import View
from rotation_merge.record import MergeReport
from rotation_merge.workers import Progress

OWN_BASE = "name its own base, or a copy of it (the command carries it anyway with --force)"
ALONE = "carry by weights, at a given scale: they alone can be carried to other ids"


@dataclass(frozen=True)
class Work:
    """A fine-tune or an adapter of the old base, opened.

    Attributes:
        name: as the user names it.
        rank: of the adapter that it becomes; 0: it becomes a model.
        chat: the folder whose tokenizer has a chat template that the old base lacks; empty: there is none.
        adapter: the adapter; None: it is a model.
        model: the fine-tune, or the old base with the adapter; None: the adapter's factors are carried.
    """

    name: str
    rank: int
    chat: str = ""
    adapter: Adapter | None = None
    model: View | None = None

    @staticmethod
    def of(work: ModelLike, bases: Bases, config: TransferConfig, force: bool = False) -> Work:
        """Open a fine-tune, or an adapter's folder.

        Args:
            force: also an adapter of another base.

        Raises:
            RotationMergeError: it is damaged, or no fine-tune of the old base.
        """
        if not is_adapter_folder(work):
            opened = open_model(work, "tuned", any_base=True)
            chat = chat_folder(bases.old, opened)
            return Work(str(opened.reference), config.rank, chat, None, bases.tuned(opened))
        adapter = adapter_of_base(str(work), bases, force)
        chat = chat_folder(bases.old, str(work))
        if not config.needs_samples:
            return Work(str(work), adapter.rank, chat, adapter)
        model = bases.tuned(open_model(f"{bases.names[1]}+{work}", any_base=True))
        return Work(str(work), config.rank or adapter.rank, chat, adapter, model)


def adapter_of_base(path: str, bases: Bases, force: bool) -> Adapter:
    """An adapter of the old base.

    Args:
        force: also one of another base.

    Raises:
        CheckpointError: it is damaged, or of another base, or it added tokens.
    """
    adapter = Adapter(path)
    if not force:
        check_base(adapter, [bases.old], path, open_model, OWN_BASE)
    whole = [change for change in placed_changes(adapter, bases.old.config) if change.value]
    axes = {change.value: change.spot.info.vocabulary_axis for change in whole}
    sizes = [adapter.shapes[name][axis] for name, axis in axes.items() if axis is not None]
    check_adapter_tokens(bases.old, path, max(sizes, default=None))
    return adapter


@dataclass(frozen=True)
class Transfer:
    """One change between two aligned bases.

    Attributes:
        alignment: of the old base to the new one.
        report: on the alignment, with the origin of the work.
        norms: squared norms of the change of each tensor of a carried view, and of the old base's, as it is computed.
    """

    work: Work
    bases: Bases
    alignment: Alignment
    report: MergeReport
    config: TransferConfig
    execution: Execution
    norms: list[tuple[float, float]] = field(default_factory=list, repr=False)

    @cached_property
    def base(self) -> View:
        """The new base as the result is written: the head apart, or tied, and with the fine-tune's chat template."""
        untie = self.config.untie or bool(self.work.rank)
        base = replace(open_model(self.bases.new, untie=untie), tensors=self.bases.sources[0])
        if not self.work.chat or self.work.model is None or self.bases.rows is not None:
            return base
        return with_chat(base, self.work.chat, self.bases.old, self.work.model)

    @property
    def tied(self) -> str | None:
        """A head that stays the embedding's tensor."""
        return None if self.config.untie else self.bases.new.tied_head

    @property
    def delta(self) -> Delta:
        """The change, moved by weights; of an adapter whose factors are carried none yet."""
        old = self.bases.sources[1]
        tuned = old if self.work.model is None else self.work.model.tensors
        return Delta(self.base, old, tuned, self.alignment, self.bases.rows)

    def applied(self, delta: Delta, record: Record | None = None) -> View:
        """The new base with a change, in the dtype that it is stored in; as an adapter changes it, unrounded."""
        view = delta.applied(record=record)
        dtype = torch.float32 if self.work.rank else self.execution.dtype
        return view if dtype is None else view.to(dtype)

    def size_note(self) -> list[str]:
        """A warning if the change, all of which was computed, is too large to transfer."""
        sums = map(sum, zip(*self.norms, strict=True))
        note = change_note(f"The task vector of `{self.work.name}`", *sums) if self.norms else None
        return [note] if note else []


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
    opened = [Work.of(work, bases, config, execution.force) for work in works]
    config, notes = _matched_as(config, bases, execution, opened)
    alignment, report = bases.aligned(config, execution, progress)
    report = replace(report, notes=[*notes, *report.notes])
    return [Transfer(work, bases, alignment, _with_origin(report, work), config, execution) for work in opened]


def _matched_as(
    config: TransferConfig, bases: Bases, execution: Execution, works: Sequence[Work]
) -> tuple[TransferConfig, list[str]]:
    """The config with what matching has nothing to find left out, and a line on it.

    Streams, and with them a tied head, stay where the bases share their coordinates.
    """
    if config.match.residual != "largest" or config.alignment is not None or not bases.nearness.shared:
        return config, []
    asks = config.match != TransferConfig().match or config.match_on is not None or config.needs_samples
    if execution.near == "added" and not asks and not any(work.rank or work.chat for work in works):
        words = f"The bases share their coordinates ({bases.nearness.words})"
        return replace(config, match=NOTHING), [f"{words}: nothing was matched, the change is added as it is."]
    return replace(config, match=replace(config.match, residual="none")), []


def _with_origin(report: MergeReport, work: Work) -> MergeReport:
    """The report with the origin of the work in it, and remarks on its files."""
    stored = work.adapter is not None or (work.model is not None and work.model.files is not None)
    known = origins([parse_reference(work.name)] if stored else [])
    facts = {name: {**origin, "carried": True} for name, origin in known.items()}
    remarks = [] if work.model is None else work.model.remarks
    return replace(report, models={**report.models, **facts}, notes=[*report.notes, *remarks])
