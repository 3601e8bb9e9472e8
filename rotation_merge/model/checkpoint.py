"""A model written as a checkpoint, whole or not at all: tensors in shards, config, tokenizer, report and card."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from rotation_merge.errors import CheckpointError
from rotation_merge.model.run_keys import unchanged
from rotation_merge.model.view import View
from rotation_merge.model.writing import SHARD_SIZE, free_name, staged
from rotation_merge.record import REPORT_FILE, MergeReport
from rotation_merge.workers import Progress

Check = Callable[[str], tuple[bool, str]]
"""Checks a written checkpoint: whether to keep it, and the finding in words."""


def write_checkpoint(
    view: View,
    report: MergeReport,
    text: str,
    out: str,
    shard_size: int = SHARD_SIZE,
    progress: Progress | None = None,
    check: Check | None = None,
) -> None:
    """A model as a normal checkpoint, whole or not at all.

    Args:
        text: the model card.
        shard_size: bytes of a weight file at most.
        check: checks the written files before they take their place.

    Raises:
        CheckpointError: it has not passed; it is kept as OUT.rejected.
    """
    with staged(out) as staging:
        with unchanged([view]):
            view.write(staging, shard_size, progress)
        passed, words = check(staging) if check is not None else (True, "")
        write_notes(staging, report, f"{text}\n{words[:1].upper()}{words[1:]}.\n" if words else text)
        if not passed:
            rejected = free_name(f"{out.rstrip(os.sep)}.rejected")
            shutil.move(staging, rejected)
            problem = f"does not compute what {view.name} computes ({words})"
            raise CheckpointError(problem, where=rejected, remedy="nothing else was written; please report it")


def write_notes(folder: str, report: MergeReport, text: str) -> None:
    """Write the report and the card beside a model."""
    report.write(os.path.join(folder, REPORT_FILE))
    with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as file:
        file.write(text)
