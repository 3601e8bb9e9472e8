"""What a model's folder holds beside its weights: a config, a tokenizer and other small files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mergekit.common import parse_kmb

from rotation_merge.errors import RotationMergeError

KEPT = (".json", ".txt", ".model", ".jinja", ".vocab", ".tiktoken", ".bpe")
"""Endings of a checkpoint's small files that are taken along (tokenizer, preprocessor, generation settings)."""

TEMPLATES = "additional_chat_templates"
"""A checkpoint's folder of chat templates beside the usual one."""

OWN = ("config.json", "adapter_config.json", "rotation_merge.json")


SHARD_SIZE = 5_000_000_000
"""Bytes of a weight file at most."""


def parse_size(text: str) -> int:
    """A file size such as 500M or 5B.

    Raises:
        RotationMergeError: it is none.
    """
    with suppress(ValueError, IndexError):
        if (size := parse_kmb(text)) > 0:
            return size
    raise RotationMergeError(f"'{text}' is not a size", remedy="write a number of bytes above 0, or 500M, or 5B")


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
