"""What a model's folder holds beside its config: weight files, tokenizer and other small files; sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergekit.common import parse_kmb
from mergekit.io.tensor_writer import TensorWriter
from torch import Tensor

from rotation_merge.errors import RotationMergeError
from rotation_merge.model.sentence import in_module, write_modules

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
    with suppress(ValueError, IndexError):
        if (size := parse_kmb(text)) > 0:
            return size
    raise RotationMergeError(f"'{text}' is not a size", remedy="write a number of bytes above 0, or 500M, or 5B")


def write_weights(
    folder: str,
    tensors: Iterable[tuple[str, Tensor]],
    shard_size: int,
    modules: list[dict[str, Any]],
    source: str | None,
) -> None:
    """Write tensors to weight files; modules of sentence-transformers have folders of their own.

    Args:
        shard_size: bytes of a file at most.
        modules: after the transformer.
        source: folder with the settings of the modules; None: there are none.
    """
    writer, of_modules = TensorWriter(folder, max_shard_size=shard_size), {}
    for name, tensor in tensors:
        if in_module(name, modules):
            of_modules[name] = tensor.detach().cpu().clone()
        else:
            writer.save_tensor(name, tensor.detach().cpu(), clone=True)
    writer.finalize()
    if source is not None:
        write_modules(source, folder, of_modules)


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with an untied head, in nested configs, too."""
    parts = {
        name: {**part, "tie_word_embeddings": False}
        for name, part in config.items()
        if isinstance(part, dict) and "tie_word_embeddings" in part
    }
    return {**config, **parts, "tie_word_embeddings": False}


def small_files(folder: str) -> dict[str, bytes]:
    """Small files of a checkpoint or adapter that belong to it whatever its weights (tokenizer, preprocessor)."""
    paths = sorted(Path(folder).iterdir()) + sorted(Path(folder, TEMPLATES).glob("*"))
    small = (p for p in paths if p.name.endswith(KEPT) and p.name not in OWN and not p.name.endswith(".index.json"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in small if path.is_file()}
