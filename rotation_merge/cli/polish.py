"""`rotation-merge polish`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from rotation_merge.averaging.polish import PolishConfig
from rotation_merge.cli.options import config_of, config_options, data_option, device_option, usable_device
from rotation_merge.cli.paths import MODEL, NEW_MODEL, writes
from rotation_merge.cli.show import Answer, Progress, say, shown
from rotation_merge.errors import RotationMergeError
from rotation_merge.files import Store

if TYPE_CHECKING:
    from rotation_merge.averaging.polish import PolishReport
    from rotation_merge.model.view import View
    from rotation_merge.record import MergeReport


class MultiValueCommand(click.Command):
    """Options may be followed by several values: `--teachers A B`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = {name for p in self.params if isinstance(p, click.Option) and p.multiple for name in p.opts}
        result: list[str] = []
        last = ""
        for arg in args:
            if not arg.startswith("-") and last and result[-1] != last:
                result.append(last)
            elif arg.startswith("-"):
                last = arg if arg in several else ""
            result.append(arg)
        return super().parse_args(ctx, result)


@click.command(
    cls=MultiValueCommand,
    epilog="""Examples: rotation-merge polish ./merged ./polished --teachers org/a org/b;
    rotation-merge polish ./merged ./adapter --teachers org/a --data a.txt --lora 16""",
)
@click.argument("merged", type=MODEL)
@click.argument("out", type=NEW_MODEL)
@click.option("--teachers", "-t", type=MODEL, required=True, multiple=True, metavar="MODEL...", help="The parents.")
@data_option(
    "Samples: one for each teacher in their order, or one for all. {}; self (if not given): each teacher's own text; "
    "synthetic: images made of noise.",
    multiple=True,
    metavar="SOURCE...",
)
@config_options(PolishConfig)
@device_option("")
@shown
@writes
def command(
    merged: str, out: str, teachers: tuple[str, ...], data: tuple[str, ...], device: str, **values: Any
) -> Answer:
    """Distil the teachers into MERGED for a few steps and write OUT.

    The targets of each sample are the outputs of its teacher. Teachers answer first, one at a time; their answers are
    kept in OUT.unfinished, from which an interrupted run continues. A held-out part of the samples chooses learning
    rate and step. If nothing improves, nothing is written, and the exit code is 1.

    If MERGED was merged with `heads_of: each`, each teacher in MERGED/heads trains the body under its own head.
    """
    if len(data) not in (0, 1, len(teachers)):
        raise click.UsageError(f"give --data once, or for each of the {len(teachers)} teachers")
    sources = list(data) * (len(teachers) // len(data)) if data else ["self"] * len(teachers)
    report = _polished(merged, out, teachers, sources, config_of(PolishConfig, values), usable_device(device))
    text, place = report.verdict(), out if report.gained else None

    def show() -> None:
        say(f"{text[:1].upper()}{text[1:]}.")
        say(f"Written to {out}." if report.gained else "Nothing was written.", "green" if report.gained else None)

    return Answer({"out": place, **report.to_dict()}, show, 0 if report.gained else 1)


def _polished(
    merged: str, out: str, teachers: tuple[str, ...], sources: list[str], config: PolishConfig, device: str
) -> PolishReport:
    """Polish a merge into `out`; where nothing was gained, nothing is written."""
    from rotation_merge.averaging.polish_models import polished
    from rotation_merge.model.checkpoint import write_notes
    from rotation_merge.model.open import open_model, parse_reference
    from rotation_merge.model.writing import staged

    if config.lora and not config.merge_lora and parse_reference(merged).lora is not None:
        problem = "is a base with an adapter, so a new adapter cannot have it as its base"
        raise RotationMergeError(problem, where=merged, remedy="add '--merge-lora', or leave '--lora' out")
    opened, *parents = (open_model(name, unsupported="merge") for name in (merged, *teachers))
    progress = Progress()
    with Store(out) as work:
        work.begin("polish")
        more: dict[str, Any] = {"state": work.file("state"), "device": device, "progress": progress}
        result, report = polished(opened, parents, sources, config, work.path, **more)
        progress.close()
        if report.gained:
            record = _record(merged, teachers, sources, report, config)
            with staged(out) as staging:
                result.write(staging)
                write_notes(staging, record, _card(record, out, opened))
    return report


def _record(
    merged: str, teachers: tuple[str, ...], sources: list[str], report: PolishReport, config: PolishConfig
) -> MergeReport:
    """The report on a trained model: its start, teachers and samples."""
    from rotation_merge.matching.run import Run
    from rotation_merge.model.card import origins
    from rotation_merge.model.open import parse_reference

    run, weights = Run(), f"a LoRA of rank {config.lora}" if config.lora else "all weights"
    run.note(
        f"This model was **trained**: `{merged}` was distilled for {config.steps} steps ({weights}), every sample "
        f"answered by its own teacher, by rotation_merge. {report.verdict()[:1].upper()}{report.verdict()[1:]}."
    )
    for teacher, source in zip(teachers, sources, strict=True):
        run.used(f"answers of {teacher}", source, config.samples)
    parts = origins(dict.fromkeys(parse_reference(name) for name in (merged, *teachers)))
    relation = "adapter" if config.lora and not config.merge_lora else "finetune"
    return run.report(merged, "none", "", models=parts, relation=relation, base=merged)


def _card(record: MergeReport, out: str, merged: View) -> str:
    from rotation_merge.model.card import notes, updated_card, with_metadata

    name = os.path.basename(os.path.abspath(out))
    text = with_metadata({"tags": ["distillation"]}, "\n\n".join([f"# {name}", *notes(record)]))
    return updated_card(text, record, name, merged.config)
