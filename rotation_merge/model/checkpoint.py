"""A model written as a checkpoint, whole or not at all: tensors in shards, config, tokenizer, report and card."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

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
    like: View,
    tensors: Iterable[tuple[str, Tensor]],
    report: MergeReport,
    text: str | Callable[[], str],
    out: str,
    storage: StorageOptions,
    progress: Progress | None = None,
    check: Check | None = None,
    left_out: Collection[str] = (),
    as_they_are: Iterable[tuple[str, Tensor]] = (),
) -> None:
    """A model as a normal checkpoint, whole or not at all.

    Args:
        like: whose config and tokenizer it has, and those of its tensors that `tensors` leaves out.
        text: the model card, or a function that returns it once all tensors are written.
        check: checks the written files before they take their place.
        left_out: those of its tensors that are not written at all.
        as_they_are: further tensors, which are not rounded.

    Raises:
        CheckpointError: it has not passed; it is kept as OUT.rejected.
    """
    dtype = dtype_from_name(storage.dtype)
    written: set[str] = set()

    def complete() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in as_they_are:
            written.add(name)
            yield name, tensor
        remaining = ((name, like[name]) for name in like.names if name not in written and name not in left_out)
        for name, tensor in chain(tensors, remaining):
            if progress is not None:
                progress("writing", len(written), len(like.names))
            written.add(name)
            yield name, tensor.to(stored_dtype(tensor, dtype or like.stored_dtypes.get(name)))

    with staged(out) as staging:
        with unchanged([like]):
            like.write(staging, complete(), storage)
        report.write(os.path.join(staging, REPORT_FILE))
        passed, words = check(staging) if check is not None else (True, "")
        if not passed:
            rejected = free_name(f"{out.rstrip(os.sep)}.rejected")
            shutil.move(staging, rejected)
            problem = f"does not compute what {like.name} computes ({words})"
            raise CheckpointError(problem, where=rejected, remedy="nothing else was written; please report it")
        text = text if isinstance(text, str) else text()
        with open(os.path.join(staging, "README.md"), "w", encoding="utf-8") as file:
            file.write(f"{text}\n{words[:1].upper()}{words[1:]}.\n" if words else text)
