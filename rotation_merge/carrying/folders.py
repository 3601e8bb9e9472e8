"""Adapters and fine-tunes carried to folders, with report and card; work that needs no carrying is named."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rotation_merge.carrying.bases import Bases, Execution, is_adapter_folder, open_bases
from rotation_merge.carrying.chat import chat_folder
from rotation_merge.carrying.config import HOW, MOVED, TransferConfig
from rotation_merge.carrying.transfer import carried
from rotation_merge.carrying.work import Transfer, adapter_of_base, transfers
from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapter_files import AdapterWeights
from rotation_merge.model.adapters import placed_changes
from rotation_merge.model.card import metadata, notes, section, with_metadata
from rotation_merge.model.checkpoint import write_checkpoint, write_notes
from rotation_merge.model.markdown import code, prose
from rotation_merge.model.open import open_model
from rotation_merge.model.staging import staged
from rotation_merge.model.view import View
from rotation_merge.record import MergeReport, versions
from rotation_merge.workers import Progress

ASK = (
    "How much of its effect transfers is not measured. '--scale auto' measures it on samples, and tells you if "
    "training on the new base is better."
)
OTHER_WORDS = (
    "How much of its effect transfers is not measured, because the bases have their tokens at other ids. Compare it on "
    "your task with the new base alone, and with training on the new base."
)


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


def carry(
    works: Mapping[str, str],
    old: str,
    new: str,
    config: TransferConfig | None = None,
    execution: Execution | None = None,
    progress: Progress | None = None,
) -> list[TransferResult]:
    """Carry adapters and fine-tunes of one base to another, each to a separate folder.

    By weights, all are carried before anything is written.

    Args:
        works: folders of adapters and of whole models, by the folder that each is to be written to.

    Raises:
        RotationMergeError: a model, an adapter or the samples cannot be read, or they do not fit together.
    """
    config, execution = config or TransferConfig(), execution or Execution()
    by_adapter = all(is_adapter_folder(work) for work in works.values())
    untie = execution.storage.untie or bool(config.rank) or by_adapter or config.method != "weights"
    bases = open_bases(new, old, execution.device, untie)
    if (lines := usable_as_it_is(list(works.values()), bases, config, execution)) is not None:
        return [TransferResult(work, None, notes) for work, notes in zip(works.values(), lines, strict=True)]
    jobs = transfers(list(works.values()), bases, config, execution, progress)
    values = (carried(job, out, progress=progress) for job, out in zip(jobs, works, strict=True))
    ready = values if config.needs_samples else list(values)
    return [_written(job, value, out, progress) for job, value, out in zip(jobs, ready, works, strict=True)]


def usable_as_it_is(
    works: Sequence[str], bases: Bases, config: TransferConfig, execution: Execution
) -> list[list[str]] | None:
    """Lines on work that needs no carrying because the bases share their coordinates; None if it must be carried.

    A fine-tune with a chat template of its own is always carried, because plain addition would lose it.

    Raises:
        RotationMergeError: work cannot be read, or is not of the old base.
    """
    if execution.near != "named" or config.alignment is not None or not bases.nearness.shared or bases.old.rows:
        return None
    models = [open_model(work, any_base=True) for work in works if not is_adapter_folder(work)]
    if bases.rows is not None or any(chat_folder(bases.old, model) for model in models):
        return None
    for model in models:
        bases.tuned(model)  # refuses what is no fine-tune of the old base
    return [[*_usable(work, bases, execution.force), JUDGED] for work in works]


JUDGED = "Nothing was written. --scale auto --data FILE judges the change on samples, --force carries it anyway."


def _usable(work: str, bases: Bases, force: bool) -> list[str]:
    """Lines on the use of one work on the new base, whose coordinates are the old one's."""
    new, old = bases.names
    if is_adapter_folder(work):
        adapter = adapter_of_base(work, bases, force)
        whole = [change.value for change in placed_changes(adapter, bases.old.config) if change.value]
        lines = [f"{bases.near_words}: {work} can be used on {new} as it is."]
        return [*lines, f"It replaces {len(whole)} whole tensors of the new base."] if whole else lines
    recipe = f"merge_method: task_arithmetic, base_model: {new}, weight 1 for {work} and -1 for {old}"
    merge = f"merge_method: rotation_merge, delegate: wudi, base_model: {old}, models {new} and {work}"
    return [
        f"{bases.near_words}: the change of {work} can be added to {new} as it is ({recipe}).",
        f"A merge of {new} and {work} as two fine-tunes of {old} keeps more of what {new} knows ({merge}).",
    ]


def _written(job: Transfer, value: View | AdapterWeights, out: str, progress: Progress | None) -> TransferResult:
    """Write a carried model or adapter, with its report and card."""
    work, bases, lines = job.work.name, job.bases, [*value.notes, *_advice(job)]
    assert value.report is not None
    report = replace(value.report, notes=lines)
    if isinstance(value, View):
        stale = bases.new.ignored if value.left_out or job.carrier.alignment.folded else []
        value = replace(value, tensors=value.tensors.only(name for name in value if name not in stale))

        def text() -> str:
            lines.extend(filter(None, [job.size_note()]))
            return card(bases, work, report, out)

        write_checkpoint(value, report, text, out, job.execution.storage, progress)
    else:
        with staged(out) as staging:
            value.write(staging)
            write_notes(staging, report, card(bases, work, report, out))
    return TransferResult(work, out, [verdict(bases, report), *report.notes], report)


def _advice(job: Transfer) -> list[str]:
    """Lines on the scale and on measuring a change that no samples judged."""
    factor, ask = job.config.factor, ASK if job.bases.rows is None else OTHER_WORDS
    if job.config.needs_samples or factor is None:
        return []
    return [ask] if factor == 1 else [f"Its change was multiplied by {factor:g}.", ask]


def verdict(bases: Bases, report: MergeReport) -> str:
    """A line on the distance of the bases before and after the alignment."""
    new, old = bases.names
    return f"Alignment of {old} to {new}: {report.verdict(old)}."


def card(bases: Bases, work: str, report: MergeReport, out: str) -> str:
    """A model card for a carried adapter or fine-tune of the new base."""
    new, old = bases.names
    name, names, classes = os.path.basename(os.path.abspath(out)), [work, old, new], bases.new.config["architectures"]
    method = "weights" if report.lift is None else report.lift["method"]
    measured = "was not measured." if report.lift is None else "is shown by the losses below."
    how = f"{MOVED} {measured}" if method == "weights" else HOW[method]
    options = f"\nOptions:\n\n```yaml\n{report.recipe}```\n" if report.recipe else ""
    body = (
        f"# {name}\n\n"
        f"This is {code(work)}, trained on {code(old)}, carried to {code(new)} by rotation_merge "
        f"{versions().get('rotation-merge', '')}. {prose(how, names)}\n\n"
        f"{prose(verdict(bases, report), names)}\n\n" + "\n".join(notes(report)) + "\n"
        f"{options}\n" + section(report, name, str(classes[0]) if classes else None)
    )
    return with_metadata(metadata(report), body)


def check_places(works: Sequence[str], places: Sequence[str]) -> None:
    """Refuse to write two adapters to one place.

    Raises:
        CheckpointError: names the two.
    """
    for i, place in enumerate(places):
        if place in places[:i]:
            raise CheckpointError(
                f"has the same output as {works[places.index(place)]}: {place}",
                where=works[i],
                remedy="carry them one by one",
            )
