"""Carries the change of a fine-tune or an adapter to another base: new + scale * moved(tuned - old), as one value."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rotation_merge.carrying.adapter import carry_adapter
from rotation_merge.carrying.bases import Execution, open_bases
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.chat import chat_lines, tokenizer_files
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.delta import share
from rotation_merge.carrying.lora import adapter_of, left_out
from rotation_merge.carrying.sampled import sampled_change
from rotation_merge.carrying.work import Transfer, Work
from rotation_merge.errors import not_written
from rotation_merge.files import TemporaryFolder
from rotation_merge.matching.alignment import Alignment
from rotation_merge.model.adapter_files import AdapterWeights
from rotation_merge.model.open import open_model
from rotation_merge.model.view import View
from rotation_merge.run.data import Samples
from rotation_merge.workers import Progress

ENOUGH = 0.99
"""Share of a change's squared norm from which a higher rank is not advised."""


def carried(
    transfer: Transfer, place: str, samples: Samples = None, progress: Progress | None = None
) -> View | AdapterWeights:
    """Work as a model or an adapter of the new base, with notes and report; a model's tensors are computed lazily.

    Args:
        place: that interrupted work waits beside.
        samples: that solve and judge; None: the config's `data`.

    Raises:
        RotationMergeError: the samples cannot be used, or the new base has no place for a change.
    """
    config, bases, rank = transfer.config, transfer.bases, transfer.work.rank
    if not config.needs_samples:
        return _by_weights(transfer, 1.0 if config.factor is None else config.factor, [])
    if not rank:
        rotated = config.method == "weights" and bool(transfer.carrier.alignment.folded)
        bases.check_head(transfer.execution.storage, rotated)
    chosen = sampled_change(transfer, place, samples, progress)
    used = {"of": f"carrying {transfer.work.name}", "source": config.data, "samples": config.sample_count}
    report = replace(transfer.report, data=[*transfer.report.data, used], lift=chosen.lift.facts())
    transfer, delta = replace(transfer, report=report), chosen.delta.scaled(chosen.scale)
    if chosen.method == "weights":
        return _by_weights(transfer, chosen.scale, chosen.lines)
    if not rank:
        return _noted(transfer, transfer.stored(delta), chosen.lines)
    written, _ = adapter_of(delta, rank, bases.new)
    return _noted(transfer, written, [*left_out(bases.new), *chosen.lines])


def _by_weights(transfer: Transfer, scale: float, lines: Sequence[str]) -> View | AdapterWeights:
    """The change moved by the alignment alone.

    Args:
        lines: on the samples that chose the scale.
    """
    new, storage = transfer.bases.new, transfer.execution.storage
    if transfer.work.adapter is not None:
        adapter, old = transfer.work.adapter, transfer.bases.old
        moved, notes = carry_adapter(adapter, transfer.carrier, old.config, str(new.reference), scale, old.rows)
        if transfer.config.rank not in (0, adapter.rank):
            notes.append(f"The adapter keeps its rank {adapter.rank}: another rank is for whole fine-tunes.")
        return _noted(transfer, moved, [*lines, *notes])
    delta, rank = transfer.delta.scaled(scale), transfer.work.rank
    if rank:
        written, norms = adapter_of(delta, rank, new)
        more = "; a higher rank keeps more" if share(norms) < ENOUGH else ""
        kept = f"Rank {rank} keeps {share(norms):.1%} of the change (squared norm){more}."
        return _noted(transfer, written, [*lines, kept, *left_out(new)])
    transfer.bases.check_head(storage, bool(transfer.carrier.alignment.folded))
    stale = [not_written(new.ignored)] if transfer.carrier.alignment.folded and new.ignored else []
    view = transfer.stored(delta, lambda change, before: transfer.norms.append((change, before)))
    return _noted(transfer, view, [*lines, *stale])


def _noted(transfer: Transfer, value: Any, lines: Sequence[str]) -> Any:
    """A view or an adapter with its notes and report."""
    report, chat, same_ids = transfer.report, transfer.work.chat, transfer.bases.rows is None
    notes = list(dict.fromkeys([*report.notes, *lines, *chat_lines(chat, same_ids)]))
    adapter = isinstance(value, AdapterWeights)
    report = replace(report, notes=notes, relation="adapter" if adapter else "finetune")
    files = tokenizer_files(chat) if chat and same_ids else {}
    return replace(value, notes=tuple(notes), report=report, beside=files if adapter else value.beside)


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
    bases = open_bases(new, old, execution.device)
    work = Work(tuned, 0, model=bases.tuned(open_model(tuned, any_base=True)))
    alignment, report = bases.aligned(config, execution, progress)
    anchor, base = bases.sources
    carrier = Carrier(bases.architecture, base, anchor, alignment, bases.rows)
    transfer = Transfer(work, bases, carrier, report, config, execution)
    delta, notes, lift = transfer.delta.scaled(1.0 if config.factor is None else config.factor), report.notes, None
    if config.needs_samples:
        with TemporaryFolder() as folder:
            chosen = sampled_change(transfer, os.path.join(folder, "out"), progress=progress)
        delta, notes, lift = chosen.delta.scaled(chosen.scale), chosen.lines, chosen.lift.facts()
        if chosen.method != "weights":
            return CarriedView(delta.applied().to(torch.float32), notes, alignment, lift)
    view = replace(transfer.base, tensors=delta.stored(transfer.tied))
    return CarriedView(view, notes, alignment, lift)
