"""`rotation-merge polish`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import click

from rotation_merge.averaging.polish import PolishConfig, PolishReport
from rotation_merge.averaging.polish_models import polished
from rotation_merge.cli.command import Device, Model, cli_command, usable_device
from rotation_merge.cli.paths import MODEL, NEW_MODEL, SAMPLES
from rotation_merge.cli.show import Answer, Progress, sentence
from rotation_merge.errors import RotationMergeError
from rotation_merge.files import Store
from rotation_merge.matching.run import Run
from rotation_merge.model.card import notes, origins, updated_card, with_metadata
from rotation_merge.model.checkpoint import write_notes
from rotation_merge.model.open import open_model, parse_reference
from rotation_merge.model.view import View
from rotation_merge.model.writing import staged
from rotation_merge.record import MergeReport
from rotation_merge.run.sample_kinds import KINDS, SELF


class ValuesCommand(click.Command):
    """Repeated options may be followed by several values: `--teachers A B`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        repeated = {flag for p in self.params if isinstance(p, click.Option) and p.multiple for flag in p.opts}
        words, flag = list[str](), ""
        for arg in args:
            if arg.startswith("-"):
                flag = arg if arg in repeated else ""
            elif flag and words[-1] != flag:
                words.append(flag)
            words.append(arg)
        return super().parse_args(ctx, words)


@cli_command(
    "rotation-merge polish ./merged ./polished --teachers org/a org/b",
    "rotation-merge polish ./merged ./adapter --teachers org/a --data a.txt --lora 16",
    cls=ValuesCommand,
)
def command(
    merged: Model,
    out: Annotated[str, NEW_MODEL],
    *,
    teachers: Annotated[tuple[str, ...], MODEL, "--teachers", "-t", "MODEL...", "the parents"],
    data: Annotated[
        tuple[str, ...],
        SAMPLES,
        "DATA...",
        f"samples: one for each teacher in their order, or one for all. {KINDS}; self (if not given): each teacher's "
        "own text; synthetic: images made of noise",
    ] = (),
    config: PolishConfig,
    device: Device = "cpu",
    progress: Progress,
) -> Answer:
    """Distil the teachers into MERGED for a few steps and write OUT.

    The targets of each sample are the outputs of its teacher. Teachers answer first, one at a time; their answers are
    kept in OUT.unfinished, from which an interrupted run continues. A held-out part of the samples chooses learning
    rate and step. If nothing improves, nothing is written, and the exit code is 1.

    If MERGED was merged with `heads_of: each`, each teacher in MERGED/heads trains the body under its own head.
    """
    if len(data) not in (0, 1, len(teachers)):
        raise click.UsageError(f"give --data once, or for each of the {len(teachers)} teachers")
    if config.lora and not config.merge_lora and parse_reference(merged).lora is not None:
        problem = "is a base with an adapter, so a new adapter cannot have it as its base"
        raise RotationMergeError(problem, where=merged, remedy="add '--merge-lora', or leave '--lora' out")
    sources, device = list(data or [SELF]) * (len(teachers) if len(data) < 2 else 1), usable_device(device)
    base, *parents = (open_model(name, unsupported="merge") for name in (merged, *teachers))
    with Store(out) as work:
        work.begin("polish")
        more: dict[str, Any] = {"state": work.file("state"), "device": device, "progress": progress}
        result, report = polished(base, parents, sources, config, work, **more)
        if report.gained:
            record = _record(merged, teachers, sources, report, config)
            with staged(out) as staging:
                result.write(staging)
                write_notes(staging, record, _card(record, out, base))
    place = out if report.gained else None
    lines = sentence(report.verdict()), f"Written to {out}." if report.gained else "Nothing was written."
    return Answer({"out": place, **report.to_dict()}, lines, 0 if report.gained else 1)


def _record(
    merged: str, teachers: Sequence[str], sources: Sequence[str], report: PolishReport, config: PolishConfig
) -> MergeReport:
    """The report on a trained model: its start, teachers and samples."""
    run, weights = Run(), f"a LoRA of rank {config.lora}" if config.lora else "all weights"
    run.note(
        f"This model was **trained**: `{merged}` was distilled for {config.steps} steps ({weights}), every sample "
        f"answered by its own teacher, by rotation_merge. {sentence(report.verdict())}"
    )
    for teacher, source in zip(teachers, sources, strict=True):
        run.used(f"answers of {teacher}", source, config.samples)
    parts = origins(dict.fromkeys(parse_reference(name) for name in (merged, *teachers)))
    relation = "adapter" if config.lora and not config.merge_lora else "finetune"
    return run.report(merged, "none", "", models=parts, relation=relation, base=merged)


def _card(record: MergeReport, out: str, merged: View) -> str:
    """A model card for a trained model."""
    name = os.path.basename(os.path.abspath(out))
    text = with_metadata({"tags": ["distillation"]}, "\n\n".join([f"# {name}", *notes(record)]))
    return updated_card(text, record, name, merged.config)
