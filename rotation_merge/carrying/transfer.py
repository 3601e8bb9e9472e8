"""Carries the change of a fine-tune or an adapter to another base: new + scale * moved(tuned - old), as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from rotation_merge.carrying.adapter import carry_adapter
from rotation_merge.carrying.chat import chat_lines, tokenizer_files
from rotation_merge.carrying.config import NONE
from rotation_merge.carrying.delta import Delta
from rotation_merge.carrying.lora import new_adapter
from rotation_merge.carrying.sampled import sampled_change
from rotation_merge.carrying.work import Transfer
from rotation_merge.model.adapter_files import AdapterWeights
from rotation_merge.model.view import View
from rotation_merge.run.data import Samples
from rotation_merge.workers import Progress

ENOUGH = 0.99
"""Share of a change's squared norm from which a higher rank is not advised."""

V = TypeVar("V", View, AdapterWeights)


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
    config, work, bases = transfer.config, transfer.work, transfer.bases
    if not work.rank:
        bases.check_head(config.untie, config.method == "weights" and bool(transfer.alignment.folded))
    delta, lines, method = transfer.delta.scaled(config.factor or 0.0), list[str](), "weights"
    if config.needs_samples:
        chosen = sampled_change(transfer, place, samples, progress)
        used = {"of": f"carrying {work.name}", "source": config.data, "samples": config.sample_count}
        report = replace(transfer.report, data=[*transfer.report.data, used], lift=chosen.lift.facts())
        transfer, delta = replace(transfer, report=report), chosen.delta.scaled(chosen.scale)
        lines, method = chosen.lines, chosen.method
    if not work.rank:
        return _noted(transfer, transfer.applied(delta, lambda *squares: transfer.norms.append(squares)), lines)
    if work.adapter is not None and config.method == "weights" and method in ("weights", NONE):
        adapter, notes = carry_adapter(work.adapter, delta, bases.old.config, bases.old.rows)
        if config.rank not in (0, work.adapter.rank):
            notes.append(f"The adapter keeps its rank {work.adapter.rank}: another rank is for whole fine-tunes.")
        return _noted(transfer, adapter, [*lines, *notes])
    return _new_adapter(transfer, delta, lines, cut=not config.needs_samples)


def _new_adapter(transfer: Transfer, delta: Delta, lines: Sequence[str], cut: bool) -> AdapterWeights:
    """A change as a new adapter.

    Args:
        cut: say how much of the change it keeps.
    """
    rank, head = transfer.work.rank, transfer.bases.new.tied_head
    adapter, notes = new_adapter(delta, rank, head), [*lines]
    if cut:
        more = "; a higher rank keeps more" if adapter.share < ENOUGH else ""
        notes.append(f"Rank {rank} keeps {adapter.share:.1%} of the change (squared norm){more}.")
    if head:
        tied = f"`{head}` is tied to it, and an adapter would change only one of the two."
        notes.append(f"The embedding stays the new base's: {tied}")
    return _noted(transfer, adapter.weights, notes)


def _noted(transfer: Transfer, value: V, lines: Sequence[str]) -> V:
    """A view or an adapter with its notes and report."""
    chat, same_ids = transfer.work.chat, transfer.bases.rows is None
    notes = list(dict.fromkeys([*transfer.report.notes, *lines, *chat_lines(chat, same_ids)]))
    adapter = isinstance(value, AdapterWeights)
    report = replace(transfer.report, notes=notes, relation="adapter" if adapter else "finetune")
    files = tokenizer_files(chat) if chat and same_ids else {}
    return replace(value, notes=tuple(notes), report=report, beside=files if adapter else value.beside)
