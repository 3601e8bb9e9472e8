"""`rotation-merge doctor`."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any

from rotation_merge.cli.command import cli_command
from rotation_merge.cli.paths import NEW_FOLDER, PARENT, PATIENT
from rotation_merge.cli.show import Answer
from rotation_merge.errors import RotationMergeError


def doctor(
    patient: Annotated[str, PATIENT, "MERGED | RECIPE"],
    parents: Annotated[tuple[str, ...], PARENT] = (),
    *,
    mend: Annotated[bool, "correct headers, configs and small files, in place"] = False,
    out: Annotated[str | None, NEW_FOLDER, "correct a copy instead"] = None,
) -> Answer:
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
    from rotation_merge.model.open import several
    from rotation_merge.workers import listener

    case = open_case(os.fspath(patient), list(map(os.fspath, several(parents, "parents"))))
    corrected = _mended(case, out) if mend or out else []
    if corrected or out:
        case = open_case(out or patient, case.parents)
    causes = diagnose(case, listener())
    likely = any(cause.likelihood >= LIKELY for cause in causes)
    facts = {"merged": case.merged, "parents": case.parents, "absent": case.absent, "method": case.method}
    lines = [f"corrected {line}" for line in corrected]
    lines += [f"{name} cannot be found, so it was not compared with the others." for name in case.absent]
    if not case.parents and case.merged is not None:
        lines.append(
            "The parents of the merge are not known, so only the merge was checked. Name the parents after it."
        )
    for number, cause in enumerate(causes, 1):
        lines.append(f"{number}. {cause.name} ({cause.word}): {cause.where}: {cause.what}\n   {cause.remedy}")
    lines += case.unexamined
    if not causes:
        lines.append("No cause of a bad merge was found; 'rotation-merge merge' measures whether another is better.")
    words = [{**asdict(cause), "word": cause.word} for cause in causes]
    results = {"mended": corrected, "causes": words, "unexamined": case.unexamined}
    return Answer({**facts, **results}, lines, 1 if likely else 0)


command = cli_command(
    "rotation-merge doctor ./merged",
    "rotation-merge doctor recipe.yml",
    "rotation-merge doctor ./merged org/parent-a org/parent-b",
)(doctor)


def _mended(case: Any, out: str | None) -> list[str]:
    """Correct the merged model, or a copy of it; returns a line for each correction.

    Raises:
        RotationMergeError: the case is a recipe, or a file cannot be written.
    """
    from rotation_merge.report.integrity.mending import mend, mended_copy

    if case.merged is None or not os.path.isdir(case.merged):
        raise RotationMergeError("is not a model folder", where=case.name, remedy="name a merged model")
    folders = list(case.folders.values())
    return mend(case.merged, folders) if out is None else mended_copy(case.merged, out, folders)
