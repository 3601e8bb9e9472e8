"""`rotation-merge doctor`."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from rotation_merge.cli.paths import MODEL, MODELS_OR_RECIPE, NEW_FOLDER, writes
from rotation_merge.cli.show import Answer, Progress, note, say, shown

if TYPE_CHECKING:
    from rotation_merge.diagnose.doctor import Case


@click.command(
    epilog="""Examples: rotation-merge doctor ./merged; rotation-merge doctor recipe.yml;
    rotation-merge doctor ./merged org/parent-a org/parent-b"""
)
@click.argument("patient", type=MODELS_OR_RECIPE, metavar="MERGED | RECIPE")
@click.argument("parents", type=MODEL, nargs=-1)
@click.option("--mend", is_flag=True, help="Correct headers, configs and small files, in place.")
@click.option("--out", type=NEW_FOLDER, metavar="DIR", help="Correct a copy instead.")
@shown
@writes
def command(patient: str, parents: tuple[str, ...], mend: bool, out: str | None) -> Answer:
    """Find out why a merge is bad: the likeliest cause first, each with its remedy.

    Takes a merged model of any merge method, or a recipe before you run it. Parents are read from mergekit_config.yml
    and rotation_merge.json beside the model; otherwise name PARENTS. Checks the folder (tensors, index, config, token
    ids, small files of the parents), parents that do not fit, tokens at other ids, RoPE, config, tied heads, NaN,
    overflow of the dtype, models in other coordinates or trained separately, and weights and activations that vanish.
    Exit code 1: a likely cause.

    --mend corrects the folder and prints each correction; each file is replaced atomically. Tensors never change.
    """
    from rotation_merge.diagnose.doctor import diagnose, open_case
    from rotation_merge.diagnose.doctor.case import LIKELY

    case = open_case(patient, parents)
    corrected = _mended(case, out) if mend or out else []
    if corrected or out:
        case = open_case(out or patient, case.parents)
    progress = Progress()
    causes = diagnose(case, progress)
    progress.close()
    likely = any(cause.likelihood >= LIKELY for cause in causes)
    facts: dict[str, Any] = {
        "merged": case.merged,
        "parents": case.parents,
        "absent": case.absent,
        "method": case.method,
    }
    facts |= {"mended": corrected, "causes": [{**asdict(cause), "word": cause.word} for cause in causes]}

    def show() -> None:
        for line in corrected:
            say(f"corrected {line}", "green")
        for name in case.absent:
            note(f"{name} cannot be found, so it was not compared with the others.")
        if not case.parents and case.merged is not None:
            note("The parents of the merge are not known, so only the merge was checked. Name the parents after it.")
        for number, cause in enumerate(causes, 1):
            say(f"{number}. {cause.name} ({cause.word}): {cause.where}: {cause.what}", "red" if likely else "yellow")
            say(f"   {cause.remedy}")
        if not causes:
            another = "'rotation-merge merge' measures whether another merge is better."
            say(f"No cause of a bad merge was found. {another}", "green")

    return Answer(facts, show, 1 if likely else 0)


def _mended(case: Case, out: str | None) -> list[str]:
    """Correct the merged model, or a copy of it; returns a line for each correction.

    Raises:
        RotationMergeError: the case is a recipe, or a file cannot be written.
    """
    from rotation_merge.errors import RotationMergeError
    from rotation_merge.report.integrity.mending import mend, mended_copy

    if case.merged is None or not os.path.isdir(case.merged):
        raise RotationMergeError("is not a model folder", where=case.name, remedy="name a merged model")
    return mend(case.merged, case.folders) if out is None else mended_copy(case.merged, out, case.folders)
