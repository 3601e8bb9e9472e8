"""Diagnoses of a bad merge: causes in a recipe or a merged model, each with its remedy, the likeliest first."""

from __future__ import annotations

import os

from rotation_merge.diagnose.doctor.case import CERTAIN, Case, Cause, open_case
from rotation_merge.diagnose.doctor.pairs import of_pairs
from rotation_merge.diagnose.doctor.span import SPOILS, of_span
from rotation_merge.diagnose.doctor.weights import of_activations, of_weights
from rotation_merge.errors import RotationMergeError
from rotation_merge.workers import Progress

__all__ = ["Case", "Cause", "diagnose", "open_case"]

UNREADABLE = ("damaged index", "damaged weight file", "index disagrees", "missing shard", "quantised parents")
"""Defects with which no weights can be examined."""

AGAIN = "correct what is named above, then run 'rotation-merge doctor' again"

FATAL, NOTED = 0.97, 0.3
"""Likelihoods of a defect for which a program refuses a folder or loads another model, and of others."""


def diagnose(case: Case, progress: Progress | None = None) -> list[Cause]:
    """Every cause that is found, the likeliest first; `case.unexamined` says what could not be looked at.

    Raises:
        RotationMergeError: a model or recipe cannot be read.
    """
    causes = [Cause(d.kind, FATAL, d.what, d.where, d.remedy) for d in case.parent_defects]
    causes += [
        Cause(d.kind, FATAL if d.fatal else NOTED, d.what, os.path.join(case.name, d.where), d.remedy)
        for d in case.defects
    ]
    readable = not case.quantised and not any(cause.name in UNREADABLE for cause in causes)
    try:
        if readable:
            case.merged_model  # noqa: B018  (names, shapes and config are read and checked)
    except RotationMergeError as error:
        readable = False
        if not any(cause.likelihood >= CERTAIN for cause in causes):
            damaged = Cause("damaged", FATAL, error.what, error.where or case.name, error.remedy or "merge again")
            causes.append(damaged)
    if readable:
        causes += _of_tensors(case, progress)
    else:
        reason = "they are quantised" if case.quantised else AGAIN
        case.unexamined.append(f"The weights of {case.name} were not examined: {reason}.")
    return sorted(dict.fromkeys(causes), key=lambda cause: -cause.likelihood)


def _of_tensors(case: Case, progress: Progress | None) -> list[Cause]:
    """Causes that weights show."""
    causes = list(of_pairs(case, progress))
    if any(cause.name == "do not fit" for cause in causes):
        case.unexamined.append(f"Weights were not compared with the parents': {AGAIN}.")
    else:
        causes += of_span(case, progress)
    causes += of_weights(case, progress)
    names = {cause.name for cause in causes}
    return causes if names & set(SPOILS) else [*causes, *of_activations(case, names)]
