"""The report of one merge, as data: what `rotation_merge.json` holds."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rotation_merge.report.run import Run

FORMAT = 1
SMALL_GAIN = 0.01
"""A fall of the relative distance by less than this fraction counts as nothing gained."""

RELATED = 0.7
"""Relative distance from which on models are not said to share coordinates: half of what unrelated ones have. At 1 the
donor may as well have vanished."""


@dataclass(frozen=True)
class SpaceRow:
    """One space of one donor."""

    donor: str
    block: str
    layer: int | None
    space: str
    kind: str
    group: str
    distance_before: float
    distance_after: float
    anchor_norm: float
    from_identity: dict[str, float]
    seconds: float
    gap: float | None
    head_order: list[int] | None
    notes: list[str]


@dataclass(frozen=True)
class MergeReport:
    """Everything a merge did.

    Distances are Frobenius norms of donor - anchor over the tensors that have an axis in the space. `files` are the
    alignment files by which donors were moved, nothing being matched. Fingerprints, by
    model, are those of alignment files; where not all tensors were read, the words after it say of how many.
    """

    anchor: str
    delegate: str
    recipe: str
    rows: list[SpaceRow]
    whole: dict[str, dict[str, object]]
    notes: list[str]
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, run: Run, anchor: object, delegate: str, recipe: str, fingerprints: Mapping[str, str] | None = None
    ) -> MergeReport:
        rows = [
            SpaceRow(
                *(donor, block, layer, match.space, match.kind, match.group),
                distance_before=math.sqrt(max(match.before, 0.0)),
                distance_after=math.sqrt(max(match.after, 0.0)),
                anchor_norm=math.sqrt(max(match.anchor, 0.0)),
                from_identity=match.distances,
                seconds=match.seconds,
                gap=match.gap,
                head_order=match.head_order,
                notes=match.notes,
            )
            for donor, block, layer, match in sorted(run.records, key=lambda r: (r[0], r[2] is None, r[2] or 0, r[1]))
        ]
        return cls(
            str(anchor),
            delegate,
            recipe,
            rows,
            dict(run.whole),
            [*run.notes, *run.transport_notes()],
            time.perf_counter() - run.began,
            versions(),
            dict(fingerprints or {}),
            dict(run.files),
        )

    def donors(self) -> list[str]:
        return list(dict.fromkeys([*(row.donor for row in self.rows), *self.whole, *self.files]))

    def relative_distances(self, donor: str) -> tuple[float, float]:
        """Relative distance of a donor before and after: of the whole model where its stream was matched (the stream's
        row says it), else over its matched spaces."""
        rows = [row for row in self.rows if row.donor == donor]
        rows = [row for row in rows if row.kind == "stream"][:1] or rows
        norm = math.sqrt(sum(row.anchor_norm**2 for row in rows)) or 1.0
        before = math.sqrt(sum(row.distance_before**2 for row in rows))
        after = math.sqrt(sum(row.distance_after**2 for row in rows))
        return before / norm, after / norm

    def verdict(self, donor: str) -> str:
        """One honest sentence on what alignment did for a donor."""
        before, after = self.relative_distances(donor)
        if donor in self.files:
            return f"moved by the transforms in {self.files[donor]}, nothing was matched"
        if not any(row.donor == donor for row in self.rows):
            return "nothing was matched"
        if before == 0:
            return "the donor equals the anchor in every matched tensor: alignment had nothing to do"
        gain = 1 - after / before
        if gain < SMALL_GAIN:
            why = "the models share their coordinates" if before < RELATED else "no map brings the models nearer"
            return (
                f"alignment had next to nothing to do (relative distance {before:.4g} before, {after:.4g} after): "
                f"{why}, the merge is practically the plain one"
            )
        return f"relative distance {before:.4g} before, {after:.4g} after alignment ({gain:.0%} less)"

    def to_dict(self) -> dict[str, Any]:
        summary = {
            donor: dict(
                zip(("relative_before", "relative_after"), self.relative_distances(donor), strict=True),
                verdict=self.verdict(donor),
            )
            for donor in self.donors()
        }
        return {"format": FORMAT, "summary": summary, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MergeReport:
        fields = {"fingerprints": {}, "files": {}, **data}
        fields = {name: fields[name] for name in cls.__dataclass_fields__}
        fields["rows"] = [SpaceRow(**row) for row in fields["rows"]]
        return cls(**fields)

    def write(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)
            file.write("\n")


def versions() -> dict[str, str]:
    """Versions of what computed the result."""
    found = {"python": platform.python_version()}
    for package in ("rotation-merge", "mergekit", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
