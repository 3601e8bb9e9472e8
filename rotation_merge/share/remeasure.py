"""Commands that measure a recipe's unpublished statistics again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from rotation_merge.run.sample_kinds import SOURCES
from rotation_merge.run.sample_kinds import STATISTICS as KINDS
from rotation_merge.share.contents import PART
from rotation_merge.share.fields import checked_count, checked_word
from rotation_merge.share.paths import FILE_NAME, MODEL_NAME

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
        data_hash: of the samples as they were read; `inspect FILE` prints it.
        labels: whose labels gradients are of: `sampled` or `data`.
    """

    file: str
    model: str
    kinds: tuple[str, ...]
    data: str
    data_hash: str
    samples: int
    seed: int
    length: int | None = None
    batch_size: int | None = None
    labels: str = "sampled"

    @classmethod
    def checked(cls, content: Mapping[str, Any]) -> Measurement:
        """A manifest's entry, every field checked; unknown fields are ignored.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: a field is invalid.
        """
        numbers = {
            name: checked_count(content[name], name)
            for name in ("length", "batch_size")
            if content.get(name) is not None
        }
        kinds = content["kinds"]
        if not isinstance(kinds, list) or not kinds:
            raise ValueError(f"{kinds!r} is not a list of kinds of statistics")
        data = rf"{PART.pattern}|{FILE_NAME.pattern}|demo:\w+"
        return cls(
            checked_word(content["file"], PART.pattern, "name of a file"),
            checked_word(content["model"], MODEL_NAME.pattern, "model of the hub"),
            tuple(checked_word(kind, "|".join(KINDS), "kind of statistics") for kind in kinds),
            checked_word(content["data"], data, "name of samples"),
            checked_word(content["data_hash"], r"[0-9a-f]{40}", "hash of samples"),
            checked_count(content["samples"], "number of samples"),
            checked_count(content["seed"], "seed"),
            **numbers,
            labels=checked_word(content.get("labels", "sampled"), "sampled|data", "kind of labels"),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"kinds": list(self.kinds)}

    @property
    def command(self) -> str:
        """The command that makes the statistics."""
        words = ["rotation-merge", "measure", self.model, "--data", self.data, "--kinds", ",".join(self.kinds)]
        defaults = {field.name: field.default for field in fields(self)}
        for name in OPTIONS:
            if (value := getattr(self, name)) != defaults[name]:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join([*words, "--out", self.file])

    @property
    def needs_unpublished_file(self) -> bool:
        """Whether its samples are a file that is not published."""
        return self.data not in SOURCES and PART.fullmatch(self.data) is not None


def is_source(data: str) -> bool:
    """Whether samples need no file of this machine: made by the model, of the package, or of the hub."""
    return data in SOURCES or data.startswith("demo:") or FILE_NAME.fullmatch(data) is not None


def base_name(path: str) -> str:
    """The last part of a path, as a name for a published recipe."""
    name = re.sub(r"[^\w.@+ -]", "-", re.split(r"[/\\]", path.rstrip("/\\"))[-1])
    return name if PART.fullmatch(name) else f"file{name}"
