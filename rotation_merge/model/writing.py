"""Checkpoints written whole or not at all: tensors in shards, config, tokenizer, report and card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mergekit.common import dtype_from_name, parse_kmb
from mergekit.io.tensor_writer import TensorWriter
from torch import Tensor

from rotation_merge.errors import CheckpointError, RotationMergeError, nearest
from rotation_merge.files import write_json
from rotation_merge.model.checkpoint import Model
from rotation_merge.model.run_keys import unchanged
from rotation_merge.model.sentence import module_of, write_modules
from rotation_merge.model.source import Progress
from rotation_merge.model.staging import free_name, staged, write_files
from rotation_merge.record import MergeReport

KEPT = (".json", ".txt", ".model", ".jinja", ".vocab", ".tiktoken", ".bpe")
"""Endings of a checkpoint's small files that are taken along (tokenizer, preprocessor, generation settings)."""

TEMPLATES = "additional_chat_templates"
"""A checkpoint's folder of chat templates beside the usual one."""

OWN = ("config.json", "adapter_config.json", "rotation_merge.json")

Check = Callable[[str], tuple[bool, str]]
"""Checks a written checkpoint: whether to keep it, and the finding in words."""


@dataclass(frozen=True)
class StorageOptions:
    """Options of writing a model: the largest weight file, the dtype (None: unchanged), an untied head."""

    shard_size: int = 5_000_000_000
    dtype: str | None = None
    untie: bool = False


def write_checkpoint(
    like: Model,
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
    dtype, written = dtype_from_name(storage.dtype), set[str]()
    apart: dict[str, Tensor] = {}
    with staged(out) as staging:
        writer = TensorWriter(staging, max_shard_size=storage.shard_size)

        def save(name: str, tensor: Tensor) -> None:
            write(name, stored(tensor, dtype or like.dtypes.get(name)))

        def write(name: str, storable: Tensor) -> None:
            if module_of(name, like.modules) is None:
                writer.save_tensor(name, storable, clone=True)
            else:
                apart[name] = storable.clone()
            written.add(name)

        for name, tensor in as_they_are:
            write(name, tensor)
        with unchanged([like.reference]):
            for name, tensor in tensors:
                if progress is not None:
                    progress("writing", len(written), len(like.names))
                save(name, tensor)
            for name in like.names:
                if name not in written and name not in left_out:
                    save(name, like[name])
        writer.finalize()
        write_modules(like.folder, staging, apart)
        report.write(os.path.join(staging, "rotation_merge.json"))
        write_beside(like, staging, storage)
        beside(staging)
        passed, words = check(staging) if check is not None else (True, "")
        if not passed:
            rejected = free_name(f"{out.rstrip(os.sep)}.rejected")
            shutil.move(staging, rejected)
            problem = f"does not compute what {like.reference} computes ({words})"
            raise CheckpointError(problem, where=rejected, remedy="nothing else was written; please report it")
        text = text if isinstance(text, str) else text()
        with open(os.path.join(staging, "README.md"), "w", encoding="utf-8") as file:
            file.write(f"{text}\n{words[:1].upper()}{words[1:]}.\n" if words else text)


def parse_size(text: str) -> int:
    """A file size such as 500M or 5B.

    Raises:
        RotationMergeError: it is none.
    """
    try:
        size = parse_kmb(text)
    except (ValueError, IndexError) as error:
        raise RotationMergeError(f"'{text}' is not a size", remedy="write bytes, or 500M, or 5B") from error
    if size <= 0:
        raise RotationMergeError(f"'{text}' is not a size", remedy="it must be positive")
    return size


def check_dtype(name: str | None) -> None:
    """Refuse a dtype that weights cannot be stored in.

    Raises:
        RotationMergeError: names the nearest known one.
    """
    known = ("bfloat16", "float16", "float32", "float64")
    if name is not None and name not in known:
        raise RotationMergeError(f"there is no dtype '{name}'", remedy=nearest(name, known))


def stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor for storage: on the CPU, a floating one in a dtype (None: unchanged)."""
    return tensor.to("cpu", dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with an untied head, in nested configs, too."""
    parts = {
        name: {**part, "tie_word_embeddings": False}
        for name, part in config.items()
        if isinstance(part, dict) and "tie_word_embeddings" in part
    }
    return {**config, **parts, "tie_word_embeddings": False}


def small_names(folder: str) -> list[str]:
    """Small files of a checkpoint or adapter that belong to it whatever its weights (tokenizer, preprocessor)."""
    names = sorted(os.listdir(folder))
    if os.path.isdir(templates := os.path.join(folder, TEMPLATES)):
        names += [os.path.join(TEMPLATES, name) for name in sorted(os.listdir(templates))]
    return [
        name
        for name in names
        if os.path.isfile(os.path.join(folder, name))
        and name.endswith(KEPT)
        and name not in OWN
        and not name.endswith(".index.json")
    ]


def small_files(folder: str) -> dict[str, bytes]:
    """These files, by name."""
    contents = {}
    for name in small_names(folder):
        with open(os.path.join(folder, name), "rb") as file:
            contents[name] = file.read()
    return contents


def write_beside(like: Model, out: str, storage: StorageOptions, changed: Mapping[str, Any] | None = None) -> None:
    """Config, tokenizer and other small files of a checkpoint, copied to where its weights have been written.

    Args:
        changed: entries of its config that are others.
    """
    source = like.loader.index.base_path
    write_files(out, small_files(source))
    with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
        config = {**json.load(file), **like.rewritten, **(changed or {})}
    if storage.dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = storage.dtype
    if storage.untie:
        config = untied(config)
    write_json(os.path.join(out, "config.json"), config)
