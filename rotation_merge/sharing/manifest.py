"""The manifest of a published folder: SHA-256 sums of its files, what made them, how far a rerun may be off."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rotation_merge.errors import RotationMergeError, short
from rotation_merge.report.card import TOLERANCE

FILE = "rotation_merge.manifest.json"
FORMAT = "rotation_merge.manifest.1"
DAMAGED = "ask who published it; do not use it"


@dataclass(frozen=True)
class Manifest:
    """What a folder holds.

    Attributes:
        files: by place in the folder, the SHA-256 sum and the size.
        versions: of what made the merge.
    """

    repo: str
    files: Mapping[str, tuple[str, int]]
    versions: Mapping[str, str]

    def text(self) -> str:
        import torch

        content = {
            "format": FORMAT,
            "repository": self.repo,
            "versions": dict(self.versions),
            "machine": {"processor": platform.machine(), "kernels": torch.backends.cpu.get_cpu_capability()},
            "reproduction": {
                "same machine and versions": "the same bytes",
                "elsewhere": f"most weights differ by up to {TOLERANCE:g}; 'rotation-merge verify' decides",
                "tolerance": TOLERANCE,
            },
            "files": {name: {"sha256": mark, "bytes": size} for name, (mark, size) in sorted(self.files.items())},
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def read(cls, path: str) -> Manifest:
        """
        Raises:
            RotationMergeError: it is none, or names files outside its folder.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content: dict[str, Any] = json.load(file)
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            files = {str(name): (str(facts["sha256"]), int(facts["bytes"])) for name, facts in content["files"].items()}
            found = cls(str(content["repository"]), files, dict(content["versions"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RotationMergeError(f"is no manifest ({short(error)})", where=path, remedy=DAMAGED) from error
        for name in found.files:
            if os.path.isabs(name) or not re.fullmatch(r"[\w.@+ -]+(/[\w.@+ -]+)*", name) or ".." in name.split("/"):
                raise RotationMergeError(f"names a file outside its folder: '{name}'", where=path, remedy=DAMAGED)
        return found

    def check(self, folder: str, names: list[str]) -> None:
        """
        Raises:
            RotationMergeError: names the first file that is not what was published.
        """
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                raise RotationMergeError("is missing, the manifest names it", where=name, remedy=DAMAGED)
            if sum_of(path) != self.files[name][0]:
                raise RotationMergeError("is not what was published (its SHA-256 differs)", where=name, remedy=DAMAGED)


def sum_of(source: str | bytes) -> str:
    """SHA-256 of a file, or of bytes."""
    digest = hashlib.sha256()
    if isinstance(source, bytes):
        digest.update(source)
        return digest.hexdigest()
    with open(source, "rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()
