"""Causes that show before a weight is read: a folder that is not whole."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rotation_merge.diagnose.doctor.case import Case
from rotation_merge.diagnose.doctor.cause import Cause

FATAL, NOTED = 0.97, 0.3
"""Likelihoods of a defect for which a program refuses a folder or loads another model, and of others."""


def of_integrity(case: Case) -> Iterator[Cause]:
    """What headers and small files tell of the merged model's folder."""
    for defect in case.defects:
        path = os.path.join(case.name, defect.where)
        yield Cause(defect.kind, FATAL if defect.fatal else NOTED, defect.what, path, defect.remedy)
