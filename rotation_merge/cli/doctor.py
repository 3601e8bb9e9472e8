"""`rotation-merge doctor`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rotation_merge.cli.command import cli_command
from rotation_merge.cli.paths import NEW_FOLDER, PARENT, PATIENT
from rotation_merge.cli.show import Answer
from rotation_merge.errors import RecipeError, RotationMergeError

if TYPE_CHECKING:
    from rotation_merge.diagnose.doctor.case import Cause
    from rotation_merge.model.adapters import Adapter


def doctor(
    patient: Annotated[str, PATIENT, "MERGED | RECIPE | BASE ADAPTER MERGED"],
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

    With BASE ADAPTER MERGED it says whether the adapter was merged into that base rightly, by whatever tool: it names
    changes that are missing, scaled, transposed or cut, ties that were lost, and other tensors that changed.

    --mend corrects the folder and prints each correction; each file is replaced atomically. Tensors never change.
    """
    from rotation_merge.diagnose.doctor import diagnose, open_case
    from rotation_merge.diagnose.doctor.adapter import opened_adapter
    from rotation_merge.model.open import several
    from rotation_merge.workers import listener

    names = list(map(os.fspath, several(parents, "parents")))
    if names and (adapter := opened_adapter(names[0])) is not None:
        if len(names) != 2 or mend or out:
            raise RecipeError("is an adapter", where=names[0], remedy="write 'doctor BASE ADAPTER MERGED', no options")
        return _of_adapter(os.fspath(patient), adapter, names[1])
    case = open_case(os.fspath(patient), names)
    corrected = _mended(case, out) if mend or out else []
    if corrected or out:
        case = open_case(out or patient, case.parents)
    causes = diagnose(case, listener())
    facts = {"merged": case.merged, "parents": case.parents, "absent": case.absent, "method": case.method}
    lines = [f"corrected {line}" for line in corrected]
    lines += [f"{name} cannot be found, so it was not compared with the others." for name in case.absent]
    if not case.parents and case.merged is not None:
        lines.append(
            "The parents of the merge are not known, so only the merge was checked. Name the parents after it."
        )
    lines += [*_numbered(causes), *case.unexamined]
    if not causes:
        lines.append("No cause of a bad merge was found; 'rotation-merge merge' measures whether another is better.")
    return _answer(causes, {**facts, "mended": corrected, "unexamined": case.unexamined}, lines)


command = cli_command(
    "rotation-merge doctor ./merged",
    "rotation-merge doctor recipe.yml",
    "rotation-merge doctor ./merged org/parent-a org/parent-b",
    "rotation-merge doctor ./base ./adapter ./merged",
)(doctor)


def _numbered(causes: Sequence[Cause]) -> list[str]:
    """Lines of causes, each with its remedy below."""
    return [
        f"{number}. {cause.name} ({cause.word}): {cause.where}: {cause.what}\n   {cause.remedy}"
        for number, cause in enumerate(causes, 1)
    ]


def _answer(causes: Sequence[Cause], facts: Mapping[str, Any], lines: Sequence[str]) -> Answer:
    """Causes with the facts beside them; the exit code is 1 if one is likely."""
    from rotation_merge.diagnose.doctor.case import LIKELY

    words = [{**asdict(cause), "word": cause.word} for cause in causes]
    return Answer({**facts, "causes": words}, lines, int(any(cause.likelihood >= LIKELY for cause in causes)))


def _of_adapter(base: str, adapter: Adapter, merged: str) -> Answer:
    """Whether an adapter was merged into a base rightly."""
    from rotation_merge.diagnose.doctor.adapter import AdapterMerge, of_adapter
    from rotation_merge.workers import listener

    causes, facts = of_adapter(AdapterMerge.open(base, adapter, merged), listener())
    right = f"{facts['right']} of {facts['changes']} changes of {adapter.path} are in {merged} rightly"
    if facts["right"]:
        right += f", at most {facts['deviation']:.2g} units of rounding off (in '{facts['at']}')"
    lines = [*_numbered(causes), f"{right}." if causes else f"{right}; all other tensors are those of {base}."]
    if facts["tied"]:
        lines.append(f"The head is tied to the embedding in {' and '.join(facts['tied'])}.")
    return _answer(causes, {"merged": merged, "parents": [base, adapter.path], **facts}, lines)


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
