"""What a model's folder holds: weight files, config, tokenizer and other small files; sizes and storage types."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mergekit.common import parse_kmb
from mergekit.io.tensor_writer import TensorWriter
from torch import Tensor

from rotation_merge.errors import RotationMergeError, nearest
from rotation_merge.files import write_json
from rotation_merge.model.sentence import in_module, write_modules
from rotation_merge.model.staging import write_files

KEPT = (".json", ".txt", ".model", ".jinja", ".vocab", ".tiktoken", ".bpe")
"""Endings of a checkpoint's small files that are taken along (tokenizer, preprocessor, generation settings)."""

TEMPLATES = "additional_chat_templates"
"""A checkpoint's folder of chat templates beside the usual one."""

OWN = ("config.json", "adapter_config.json", "rotation_merge.json")


@dataclass(frozen=True)
class StorageOptions:
    """Options of writing a model: the largest weight file, the dtype (None: unchanged), an untied head."""

    shard_size: int = 5_000_000_000
    dtype: str | None = None
    untie: bool = False


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


class WeightFiles:
    """The weight files of a model in the making; modules of sentence-transformers have folders of their own.

    Args:
        folder: to write into.
        shard_size: bytes of a file at most.
        modules: after the transformer.
        source: folder with the settings of the modules; None: there are none.
    """

    def __init__(
        self, folder: str, shard_size: int, modules: list[dict[str, Any]] | None = None, source: str | None = None
    ) -> None:
        self.folder, self.modules, self.source = folder, modules or [], source
        self.written: set[str] = set()
        self._writer = TensorWriter(folder, max_shard_size=shard_size)
        self._of_modules: dict[str, Tensor] = {}

    def save(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.detach().cpu()
        if in_module(name, self.modules):
            self._of_modules[name] = tensor.clone()
        else:
            self._writer.save_tensor(name, tensor, clone=True)
        self.written.add(name)

    def finish(self) -> None:
        self._writer.finalize()
        if self.source is not None:
            write_modules(self.source, self.folder, self._of_modules)


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


def write_beside(source: str, out: str, storage: StorageOptions, changed: Mapping[str, Any] | None = None) -> None:
    """Config, tokenizer and other small files of a checkpoint, copied to where its weights have been written.

    Args:
        source: the checkpoint's folder.
        changed: entries of its config that are others.
    """
    write_files(out, small_files(source))
    with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
        config = {**json.load(file), **(changed or {})}
    if storage.dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = storage.dtype
    if storage.untie:
        config = untied(config)
    write_json(os.path.join(out, "config.json"), config)
