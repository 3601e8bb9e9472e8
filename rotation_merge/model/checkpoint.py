"""A model written as a checkpoint, whole or not at all: tensors in shards, config, tokenizer, report and card."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import torch
from mergekit.common import dtype_from_name
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.model.run_keys import unchanged
from rotation_merge.model.staging import free_name, staged
from rotation_merge.model.view import View, stored_dtype
from rotation_merge.model.writing import StorageOptions
from rotation_merge.record import REPORT_FILE, MergeReport
from rotation_merge.workers import Progress

Check = Callable[[str], tuple[bool, str]]
"""Checks a written checkpoint: whether to keep it, and the finding in words."""


def write_checkpoint(
    view: View,
    report: MergeReport,
    text: str,
    out: str,
    storage: StorageOptions,
    progress: Progress | None = None,
    check: Check | None = None,
) -> None:
    """A model as a normal checkpoint, whole or not at all.

    Args:
        text: the model card.
        check: checks the written files before they take their place.

    Raises:
        CheckpointError: it has not passed; it is kept as OUT.rejected.
    """
    dtype = dtype_from_name(storage.dtype)
    with staged(out) as staging:
        with unchanged([view]):
            view.write(staging, watched_blocks(view, dtype, progress), storage)
        passed, words = check(staging) if check is not None else (True, "")
        write_notes(staging, report, f"{text}\n{words[:1].upper()}{words[1:]}.\n" if words else text)
        if not passed:
            rejected = free_name(f"{out.rstrip(os.sep)}.rejected")
            shutil.move(staging, rejected)
            problem = f"does not compute what {view.name} computes ({words})"
            raise CheckpointError(problem, where=rejected, remedy="nothing else was written; please report it")


def watched_blocks(view: View, dtype: torch.dtype | None, progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a model that is being written, in a dtype, or in that of its files."""
    for number, (name, tensor) in enumerate(view.blocks()):
        if progress is not None:
            progress("writing", number, len(view))
        yield name, tensor.to(stored_dtype(tensor, dtype or view.stored_dtypes.get(name)))


def write_notes(folder: str, report: MergeReport, text: str) -> None:
    """Write the report and the card beside a model."""
    report.write(os.path.join(folder, REPORT_FILE))
    with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as file:
        file.write(text)
