"""Carries changes to another base, new + scale * moved(tuned - old): as values, or to folders with report and card."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rotation_merge.carrying.adapter import carry_adapter
from rotation_merge.carrying.bases import Bases, Transfer
from rotation_merge.carrying.config import HOW, NONE
from rotation_merge.carrying.sampled import sampled_change
from rotation_merge.carrying.tokens import tokenizer_files
from rotation_merge.errors import CheckpointError, named
from rotation_merge.matching.run import change_note
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.card import notes, updated_card
from rotation_merge.model.checkpoint import unchanged, write_notes
from rotation_merge.model.markdown import code, prose
from rotation_merge.model.view import View
from rotation_merge.model.writing import staged
from rotation_merge.record import MergeReport, versions
from rotation_merge.workers import Progress

ASK = (
    "How much of its effect transfers is not measured. '--scale auto' measures it on samples, and tells you if "
    "training on the new base is better (between bases with other token ids, compare it on your task yourself)."
)


AS_MODEL = "carry it as a whole model, not as an adapter"


def carried(transfer: Transfer, place: str | None = None, progress: Progress | None = None) -> View | Adapter:
    """Work as a model or an adapter of the new base, with notes and report; a model's tensors are computed lazily.

    Args:
        place: that interrupted work waits beside; None: it is lost.

    Raises:
        RotationMergeError: the samples cannot be used, or the new base has no place for a change.
    """
    config, adapter, bases = transfer.config, transfer.adapter, transfer.bases
    if not transfer.rank and not config.untie:
        bases.check_head(transfer.tuned)
    delta, notes, method, share = transfer.delta.scaled(config.factor or 0.0), list[str](), "weights", 1.0
    lost: Mapping[str, float] = {}
    if config.needs_samples:
        chosen, lift, notes = sampled_change(transfer, place, progress)
        used = {"of": f"carrying {transfer.name}", "source": config.data, "samples": config.sample_count}
        report = replace(transfer.report, data=[*transfer.report.data, used], lift=lift.facts())
        transfer, delta, method = replace(transfer, report=report), chosen.delta.scaled(chosen.scale), chosen.method
        share, lost = chosen.share, chosen.lost
    value: View | Adapter
    if not transfer.rank:
        record = (lambda *squares: transfer.norms.append(squares)) if method == "weights" else None
        value = transfer.applied(replace(delta, record=record))
    elif adapter is not None and config.method == "weights" and method in ("weights", NONE):
        value, more = carry_adapter(adapter, delta, bases.donor.config, bases.donor.rows)
        notes = [*notes, *more, *transfer.unloadable(value)]
        if config.rank not in (0, adapter.rank):
            notes.append(f"The adapter keeps its rank {adapter.rank}: another rank is for whole fine-tunes.")
    else:
        cut = transfer.as_adapter(delta)
        share *= cut.share  # what was judged was cut already
        value, notes = cut.weights, [*notes, f"Rank {cut.rank} keeps {share:.1%} of the change (squared norm)."]
        notes += left_out(lost or cut.lost)
        if problem := cut.places.problem(value):
            raise CheckpointError(f"peft does not load the adapter ({problem})", where=transfer.name, remedy=AS_MODEL)
        if delta.base.tied_head:
            notes.append(f"The embedding stays the new base's, as `{delta.base.tied_head}` is tied to it.")
    ahead = [] if transfer.tuned is None else transfer.tuned.predicting_ahead
    if ahead and (transfer.rank or not delta.further):
        notes.append(f"Its layers that predict further tokens were not carried: {named(ahead)}.")
    return _noted(transfer, value, notes)


def left_out(lost: Mapping[str, float]) -> list[str]:
    """A line on the tensors whose changes have no place in an adapter, if there are any: by name, their shares."""
    if not lost:
        return []
    names = sorted(lost, key=lambda name: -lost[name])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    listed = ", ".join(map(code, names[:3]))
    return [f"{sum(lost.values()):.1%} of the change has no place in the adapter, whatever its rank: {listed}{more}."]


def _noted(transfer: Transfer, value: View | Adapter, lines: Sequence[str]) -> View | Adapter:
    """A view or an adapter with its notes and report."""
    adapter, files, chat = isinstance(value, Adapter), value.beside, transfer.chat
    same_ids = transfer.bases.shared is None
    copied = "copied" if same_ids else "not copied: the new base has its tokens at other ids"
    of_chat = [f"Its chat template was {copied}."] if chat else []
    notes = dict.fromkeys([*transfer.report.notes, *lines, *of_chat])
    if adapter and chat and same_ids:
        files = tokenizer_files(chat)
    report = replace(transfer.report, notes=[*notes], relation="adapter" if adapter else "finetune")
    return replace(value, notes=tuple(notes), report=report, beside=files)


def carry(job: Transfer, out: str, shard_size: int, progress: Progress | None = None) -> View | Adapter:
    """Carry an adapter or a fine-tune of one base to another, into a folder with report and card.

    Args:
        shard_size: bytes of a model's largest file.

    Returns:
        The value that was written; the first note of its report is on the distance of the bases.

    Raises:
        RotationMergeError: the samples cannot be used, or the new base has no place for a change.
    """
    bases, value = job.bases, carried(job, out, progress)
    lines, report = [*value.notes, *_advice(job)], value.report
    assert report is not None
    with staged(out) as staging, unchanged([bases.anchor]):
        if isinstance(value, View):
            value.write(staging, shard_size, progress)
        else:
            value.write(staging)
        warning = change_note(f"The task vector of `{job.name}`", job.norms)  # which are there once all is written
        report = replace(report, notes=[*lines, *filter(None, [warning])])
        write_notes(staging, report, card(bases, job.name, report, out))
    return replace(value, report=replace(report, notes=[verdict(bases, report), *report.notes]))


def _advice(job: Transfer) -> list[str]:
    """Lines on a change that no samples judged: its scale, measuring it, and what else the bases allow."""
    factor, (new, old) = job.config.factor, job.bases.names
    if job.config.needs_samples or factor is None:
        return []
    lines = [] if factor == 1 else [f"Its change was multiplied by {factor:g}."]
    if job.bases.nearness.shared and job.adapter is None:
        recipe = f"merge_method: rotation_merge, delegate: wudi, base_model: {old}, models {new} and {job.name}"
        lines.append(f"A merge of both as fine-tunes of {old} keeps more of what {new} knows ({recipe}).")
    return [*lines, ASK]


def verdict(bases: Bases, report: MergeReport) -> str:
    """A line on the distance of the bases before and after the alignment."""
    new, old = bases.names
    return f"Alignment of {old} to {new}: {report.verdict(old)}."


def card(bases: Bases, work: str, report: MergeReport, out: str) -> str:
    """A model card for a carried adapter or fine-tune of the new base."""
    new, old = bases.names
    name, names = os.path.basename(os.path.abspath(out)), [work, old, new]
    how = HOW["weights" if report.lift is None else report.lift["method"]]
    options = f"\nOptions:\n\n```yaml\n{report.recipe}```\n" if report.recipe else ""
    text = (
        f"# {name}\n\n"
        f"This is {code(work)}, trained on {code(old)}, carried to {code(new)} by rotation_merge "
        f"{versions().get('rotation-merge', '')}. {prose(how, names)}\n\n"
        f"{prose(verdict(bases, report), names)}\n\n" + "\n".join(notes(report)) + f"\n{options}"
    )
    return updated_card(text, report, name, bases.anchor.config)
