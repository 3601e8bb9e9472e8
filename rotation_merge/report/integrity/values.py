"""Values of the weights: the only check of a folder that reads them."""

from __future__ import annotations

from collections.abc import Iterator

from rotation_merge.errors import CheckpointError
from rotation_merge.linalg.finite import all_finite
from rotation_merge.model.contents import Contents
from rotation_merge.model.folder import stored_tensors
from rotation_merge.report.integrity.defect import Defect


def check_values(contents: Contents) -> Iterator[Defect]:
    """The first tensor that holds NaN or infinity; every tensor is read once, file by file.

    Files that cannot be read have a defect of their own.
    """
    try:
        tensors, _ = stored_tensors(contents.folder, [])
    except CheckpointError:
        return
    for name in sorted(tensors, key=lambda name: contents.files[name]):
        if not all_finite([tensor := tensors[name]]):
            count = int((~tensor.isfinite()).sum())
            problem = f"tensor '{name}' holds {count} values that are NaN or infinite"
            yield Defect("NaN", problem, contents.files[name], f"'rotation-merge doctor {contents.folder}' says why")
            return
