"""What a search is asked for, and what tells one search from another."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass

from rotation_merge.model.checkpoint import parse_reference
from rotation_merge.model.gguf.place import weight_files


@dataclass(frozen=True)
class SearchConfig:
    """What the user asked for.

    Attributes:
        models: the first is the anchor.
        data: one source for all, or one for each model.
        budget: seconds.
        base: what the models were tuned from, where the user says it.
        subsets: of so many subsets of the models the best way's merge is measured, too.
    """

    models: tuple[str, ...]
    out: str
    data: tuple[str, ...]
    samples: int = 64
    budget: float = 600.0
    seed: int = 0
    length: int = 128
    batch_size: int = 8
    dtype: str | None = None
    base: str | None = None
    subsets: int = 0

    def key(self) -> str:
        """Stands for what is merged with what: the models, the samples, and their files as they are."""
        asked = {name: value for name, value in asdict(self).items() if name not in ("budget", "out", "subsets")}
        models = [*self.models, *([self.base] if self.base else [])]
        files = [path for model in models for path in _weights(model)] + list(filter(os.path.exists, self.data))
        stamps = [os.stat(path).st_mtime_ns for path in files]
        return hashlib.blake2b(json.dumps([asked, stamps]).encode(), digest_size=4).hexdigest()


def _weights(model: str) -> list[str]:
    """The weight files of a model that lies here, and of its adapter."""
    reference = parse_reference(model)
    folders = [part.path for part in (reference.model, reference.lora) if part is not None and os.path.isdir(part.path)]
    ends = (".safetensors", ".bin")
    files = [os.path.join(folder, n) for folder in folders for n in sorted(os.listdir(folder)) if n.endswith(ends)]
    return [*files, *weight_files(reference.model.path)]
