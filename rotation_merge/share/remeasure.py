"""Commands that measure a recipe's unpublished statistics again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rotation_merge.model.hub import HubFile
from rotation_merge.run.sample_kinds import SOURCES
from rotation_merge.share.contents import PART

OPTIONS = ("samples", "seed", "length", "batch_size", "labels")
"""Fields that are options of `measure` by their own names."""


@dataclass(frozen=True)
class Measurement:
    """The measurement of a file of statistics.

    Attributes:
        file: as the recipe names it.
        model: of the hub.
        data: name of the samples: on the hub, the name of a file that is not published, or a source that `measure`
            knows.
        labels: whose labels gradients are of: `sampled` or `data`.
    """

    file: str
    model: str
    kinds: tuple[str, ...]
    data: str
    samples: int
    seed: int
    length: int | None = None
    batch_size: int | None = None
    labels: str = "sampled"

    @classmethod
    def of(cls, metadata: Mapping[str, Any], file: str, model: str, data: str) -> Measurement:
        """The measurement that the head of a file of statistics describes, with published names.

        Raises:
            KeyError, TypeError: a field is missing.
        """
        options = {
            name: metadata[name] for name in ("length", "batch_size", "labels") if metadata.get(name) is not None
        }
        samples, seed = int(metadata["samples"]), int(metadata["seed"])
        return cls(file, model, tuple(metadata["kinds"]), data, samples, seed, **options)

    @property
    def command(self) -> str:
        """The command that makes the statistics."""
        words = ["rotation-merge", "measure", self.model, "--data", self.data, "--kinds", ",".join(self.kinds)]
        defaults = {field.name: field.default for field in fields(self)}
        for name in OPTIONS:
            if (value := getattr(self, name)) != defaults[name]:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join([*words, "--out", self.file])


def is_source(data: str) -> bool:
    """Whether samples need no file of this machine: made by the model, of the package, or of the hub."""
    return data in SOURCES or data.startswith("demo:") or HubFile.of(data) is not None


def base_name(path: str) -> str:
    """The last part of a path, as a name for a published recipe."""
    name = re.sub(r"[^\w.@+ -]", "-", re.split(r"[/\\]", path.rstrip("/\\"))[-1])
    return name if PART.fullmatch(name) else f"file{name}"
