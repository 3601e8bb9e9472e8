"""A model written as a checkpoint, whole or not at all: tensors in shards, config, tokenizer, report and card."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable

from mergekit.common import dtype_from_name
from mergekit.io.tensor_writer import TensorWriter
from torch import Tensor

from rotation_merge.errors import CheckpointError
from rotation_merge.model.run_keys import unchanged
from rotation_merge.model.sentence import module_of, write_modules
from rotation_merge.model.staging import free_name, staged
from rotation_merge.model.view import View
from rotation_merge.model.writing import StorageOptions, stored, write_beside
from rotation_merge.record import MergeReport
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
    beside: Callable[[str], None] = lambda _: None,
) -> None:
    """A model as a normal checkpoint, whole or not at all.

    Args:
        like: whose config and tokenizer it has, and those of its tensors that `tensors` leaves out.
        text: the model card, or a function that returns it once all tensors are written.
        check: checks the written files before they take their place.
        left_out: those of its tensors that are not written at all.
        as_they_are: further tensors, which are not rounded.
        beside: changes the small files in the folder that it is told, once these have been copied.

    Raises:
        CheckpointError: it has not passed; it is kept as OUT.rejected.
    """
    with staged(out) as staging:
        files = _WeightFiles(like, staging, storage)
        for name, tensor in as_they_are:
            files.save(name, tensor)
        with unchanged([like.reference]):
            for name, tensor in tensors:
                if progress is not None:
                    progress("writing", len(files.written), len(like.names))
                files.save(name, files.rounded(name, tensor))
            for name in like.names:
                if name not in files.written and name not in left_out:
                    files.save(name, files.rounded(name, like[name]))
        files.finish()
        report.write(os.path.join(staging, "rotation_merge.json"))
        write_beside(like.template or like.folder, staging, storage, like.changed)
        beside(staging)
        passed, words = check(staging) if check is not None else (True, "")
        if not passed:
            rejected = free_name(f"{out.rstrip(os.sep)}.rejected")
            shutil.move(staging, rejected)
            problem = f"does not compute what {like.name} computes ({words})"
            raise CheckpointError(problem, where=rejected, remedy="nothing else was written; please report it")
        text = text if isinstance(text, str) else text()
        with open(os.path.join(staging, "README.md"), "w", encoding="utf-8") as file:
            file.write(f"{text}\n{words[:1].upper()}{words[1:]}.\n" if words else text)


class _WeightFiles:
    """The weight files of a model in the making; modules of sentence-transformers have folders of their own."""

    def __init__(self, like: View, folder: str, storage: StorageOptions) -> None:
        self.like, self.folder, self.dtype = like, folder, dtype_from_name(storage.dtype)
        self.written: set[str] = set()
        self._writer = TensorWriter(folder, max_shard_size=storage.shard_size)
        self._modules: dict[str, Tensor] = {}

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in its storage dtype: the one that is asked for, else that of the model's file."""
        return stored(tensor, self.dtype or self.like.stored_dtypes.get(name))

    def save(self, name: str, tensor: Tensor) -> None:
        if module_of(name, self.like.modules) is None:
            self._writer.save_tensor(name, tensor, clone=True)
        else:
            self._modules[name] = tensor.clone()
        self.written.add(name)

    def finish(self) -> None:
        self._writer.finalize()
        write_modules(self.like.template or self.like.folder, self.folder, self._modules)
