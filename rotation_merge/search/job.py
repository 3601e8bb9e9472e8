"""The config of a search, and its key."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from rotation_merge.errors import RotationMergeError
from rotation_merge.model.folder import folder_of
from rotation_merge.model.open import parse_reference
from rotation_merge.run.functions import load, local_path, read_config
from rotation_merge.run.sample_kinds import SELF, SYNTHETIC
from rotation_merge.search.config import MergeConfig

CHANGEABLE = ("budget", "device", "out")
"""Options that may change when a search continues."""


@dataclass(frozen=True)
class SearchConfig(MergeConfig):
    """Config of a search: the models, the output and the options.

    Attributes:
        models: the first is the anchor.
        data: one source for all, or one for each model.
        device: to compute on.
    """

    models: tuple[str, ...]
    out: str
    data: tuple[str, ...]
    device: str = "cpu"

    def load(self, model: str) -> Any:
        """Load a model on the device, with its classes in the first model's order."""
        return load(model, like=self.models[0]).to(self.device)

    @property
    def reading(self) -> tuple[int, int, int]:
        """Batch size, length and seed of reading samples."""
        return self.batch_size, self.length, self.seed

    def key(self) -> str:
        """Stable key of the models, the samples and the options, and of the state of their files."""
        options = {name: value for name, value in asdict(self).items() if name not in CHANGEABLE}
        models = [*self.models, *([self.base] if self.base else [])]
        files = [path for model in models for path in _weights(model)] + list(filter(os.path.exists, self.data))
        stamps = [os.stat(path).st_mtime_ns for path in files]
        return hashlib.blake2b(json.dumps([options, stamps]).encode(), digest_size=4).hexdigest()


def usual_data(model: str) -> str:
    """Default data: texts written by the models, or random images.

    Raises:
        RotationMergeError: the model can make up neither.
    """
    config = read_config(local_path(model))
    name = str((config.get("architectures") or [""])[0])
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return SELF
    if "image_size" in config or "vision_config" in config:
        return SYNTHETIC
    raise RotationMergeError(f"{name or 'the model'} cannot write samples", where=model, remedy="give 'data'")


def _weights(model: str) -> list[str]:
    """The weight files of a model that is here, and of its adapter."""
    reference = parse_reference(model)
    folders = [folder_of(part) for part in (reference.model, reference.lora) if part is not None]
    files = [file for folder in folders if folder for file in sorted(Path(folder).iterdir())]
    return [str(file) for file in files if file.suffix in (".safetensors", ".bin")]
