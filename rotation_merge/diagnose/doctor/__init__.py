"""Diagnoses of a bad merge: causes in a recipe or a merged model, each with its remedy, the likeliest first."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rotation_merge.diagnose.doctor.case import CERTAIN, Case, Cause, open_case
from rotation_merge.diagnose.doctor.pairs import of_pairs
from rotation_merge.diagnose.doctor.span import SPOILS, of_span
from rotation_merge.diagnose.doctor.weights import of_activations, of_weights
from rotation_merge.errors import RotationMergeError
from rotation_merge.workers import Progress

__all__ = ["Case", "Cause", "diagnose", "open_case"]


def diagnose(case: Case, progress: Progress | None = None) -> list[Cause]:
    """Every cause that is found, the likeliest first.

    Raises:
        RotationMergeError: a model or recipe cannot be read.
    """
    causes = list(of_integrity(case))
    if any(cause.name in UNREADABLE for cause in causes):
        return sorted(causes, key=lambda cause: -cause.likelihood)
    if case.merged is not None:
        try:
            case.merged_model  # noqa: B018  (names, shapes and config are read and checked)
        except RotationMergeError as error:
            damaged = Cause("damaged", 0.97, error.what, error.where or case.name, error.remedy or "merge again")
            return causes if any(cause.likelihood >= CERTAIN for cause in causes) else [damaged, *causes]
    causes += of_pairs(case, progress)
    if "do not fit" not in [cause.name for cause in causes]:
        causes += of_span(case, progress)
    explained = any(cause.name in SPOILS for cause in causes)
    causes += of_weights(case, progress, norms=not explained)
    if not explained:
        causes += of_activations(case, [cause.name for cause in causes])
    return sorted(dict.fromkeys(causes), key=lambda cause: -cause.likelihood)


UNREADABLE = ("damaged index", "damaged weight file", "index disagrees", "missing shard")
"""Defects with which no weights can be examined."""

FATAL, NOTED = 0.97, 0.3
"""Likelihoods of a defect for which a program refuses a folder or loads another model, and of others."""


def of_integrity(case: Case) -> Iterator[Cause]:
    """Causes that headers and small files of the merged model's folder show."""
    for defect in case.defects:
        path = os.path.join(case.name, defect.where)
        yield Cause(defect.kind, FATAL if defect.fatal else NOTED, defect.what, path, defect.remedy)
