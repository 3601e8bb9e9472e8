"""The manifest of a published folder: SHA-256 sums of its files, versions, and the tolerance of a rerun."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rotation_merge.errors import RotationMergeError, short
from rotation_merge.model.card import TOLERANCE
from rotation_merge.record import MANIFEST_FILE
from rotation_merge.share.contents import belongs, included, well_formed
from rotation_merge.share.fields import checked_count, checked_word
from rotation_merge.share.remeasure import Measurement

FORMAT = "rotation_merge.manifest.1"
DAMAGED = "do not use it; ask its publisher"
SAMPLES = ", after the statistics are measured again on the same samples"
LARGEST = 10_000_000
"""Bytes that a manifest may have."""


@dataclass(frozen=True)
class Manifest:
    """The content of a published folder.

    Attributes:
        files: by place in the folder, the SHA-256 sum and the size.
        versions: of the software that made the merge.
        statistics: that the recipe reads and that are not published, as they are measured again.
    """

    repo: str
    files: Mapping[str, tuple[str, int]]
    versions: Mapping[str, str]
    statistics: Sequence[Measurement] = ()

    def text(self) -> str:
        import torch

        content: dict[str, Any] = {
            "format": FORMAT,
            "repository": self.repo,
            "versions": dict(self.versions),
            "machine": {"processor": platform.machine(), "kernels": torch.backends.cpu.get_cpu_capability()},
            "reproduction": {
                "same machine and versions": f"the same bytes{SAMPLES if self.statistics else ''}",
                "elsewhere": f"most weights differ by up to {TOLERANCE:g}; 'rotation-merge verify' decides",
                "tolerance": TOLERANCE,
            },
            "files": {name: {"sha256": mark, "bytes": size} for name, (mark, size) in sorted(self.files.items())},
        }
        if self.statistics:
            content["statistics"] = [measurement.to_dict() for measurement in self.statistics]
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def read(cls, path: str, repo: str | None = None, include: Iterable[str] = ()) -> Manifest:
        """The manifest of a repository, everything in it checked.

        Args:
            repo: where it was downloaded from; None: it lies here, and nothing is taken by it.
            include: patterns of files that are taken although a merge has no such files.

        Raises:
            RotationMergeError: it is none, is that of another repository, or names files that a merge does not have.
        """
        try:
            manifest = cls._checked(_content(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            source = path if repo is None else f"{repo}, {MANIFEST_FILE}"
            raise RotationMergeError(f"is not a manifest ({short(error)})", where=source, remedy=DAMAGED) from error
        if repo is None:
            return manifest
        if manifest.repo.casefold() != repo.casefold():
            remedy = f"pull {manifest.repo}, or ask who published it"
            raise RotationMergeError(f"its manifest belongs to '{manifest.repo}'", where=repo, remedy=remedy)
        for name in manifest.files:
            if not well_formed(name):
                problem = f"its manifest names a hidden file, or one outside its folder: '{name}'"
                raise RotationMergeError(problem, where=repo, remedy=DAMAGED)
            if not belongs(name) and not included(name, include):
                problem = f"its manifest names a file that is not part of a merge: '{name}'"
                remedy = f"ask its publisher; if you trust them, --include '{name}' downloads it"
                raise RotationMergeError(problem, where=repo, remedy=remedy)
        return manifest

    @classmethod
    def _checked(cls, content: Mapping[str, Any]) -> Manifest:
        """
        Raises:
            ValueError, KeyError, TypeError, AttributeError: a field is invalid.
        """
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        repo = checked_word(content["repository"], r"[\w.-]+/[\w.-]+", "repository")
        files = {
            name: (
                checked_word(facts["sha256"], r"[0-9a-f]{64}", "sha256"),
                checked_count(facts["bytes"], "number of bytes"),
            )
            for name, facts in content["files"].items()
        }
        versions = {
            checked_word(name, r"[\w.-]{1,40}", "name of a package"): checked_word(
                version, r"[\w.+ -]{1,40}", "version"
            )
            for name, version in content["versions"].items()
        }
        statistics = tuple(Measurement.checked(entry) for entry in content.get("statistics", []))
        return cls(repo, files, versions, statistics)

    def check(self, folder: str, name: str) -> None:
        """
        Raises:
            RotationMergeError: a file differs from the published one.
        """
        path = os.path.join(folder, name)
        mark, size = self.files[name]
        if not os.path.isfile(path):
            raise RotationMergeError("is missing, the manifest names it", where=name, remedy=DAMAGED)
        if os.path.getsize(path) != size:
            problem = f"is not what was published ({os.path.getsize(path)} bytes, {size} in the manifest)"
            raise RotationMergeError(problem, where=name, remedy=DAMAGED)
        if sha256_of(path) != mark:
            raise RotationMergeError("is not what was published (its SHA-256 differs)", where=name, remedy=DAMAGED)


def _content(path: str) -> Any:
    if os.path.getsize(path) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def sha256_of(source: str | bytes) -> str:
    """SHA-256 of a file, or of bytes."""
    digest = hashlib.sha256()
    if isinstance(source, bytes):
        digest.update(source)
        return digest.hexdigest()
    with open(source, "rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()
