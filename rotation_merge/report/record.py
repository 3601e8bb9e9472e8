"""The report of one merge, as data: what `rotation_merge.json` holds."""

from __future__ import annotations

import functools
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rotation_merge.errors import AlignmentError, short
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


def rows_of(run: Run) -> list[SpaceRow]:
    """What was done to each space of each donor: as it was matched, or as the file says that moved the donor."""
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
    for donor, given in sorted(run.given.items()):
        rows += [replace(row, donor=donor) for row in rows_in(given.made, given.file)]
    return rows


def figures(rows: Sequence[SpaceRow], whole: Mapping[str, object] | None = None) -> dict[str, Any]:
    """What matching or a fit found of one donor, for the head of its alignment file; `rows_in` reads it."""
    return {"rows": [asdict(row) for row in rows], "whole": dict(whole or {})}


def rows_in(made: Mapping[str, Any], path: str) -> list[SpaceRow]:
    """The rows in the head of an alignment file; none where it was written without.

    Raises:
        AlignmentError: they are damaged.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    try:
        kept = made.get("figures", {}).get("rows", [])
        return TypeAdapter(list[SpaceRow], config=ConfigDict(allow_inf_nan=False)).validate_python(kept, strict=False)
    except (ValidationError, AttributeError) as error:
        remedy = "write it anew with 'rotation-merge align'"
        raise AlignmentError(f"its figures are damaged ({short(error)})", where=path, remedy=remedy) from error


def whole_in(made: Mapping[str, Any]) -> dict[str, object]:
    """What matching the whole model found, as the head of an alignment file says it; see `rows_in`."""
    kept = made.get("figures", {}).get("whole", {})
    return dict(kept) if isinstance(kept, Mapping) else {}


def relative(rows: Sequence[SpaceRow]) -> tuple[float, float]:
    """Relative distance of a donor before and after: of the whole model where its stream was matched (the stream's row
    says it), else over its matched spaces."""
    rows = [row for row in rows if row.kind == "stream"][:1] or rows
    norm = math.sqrt(sum(row.anchor_norm**2 for row in rows)) or 1.0
    before = math.sqrt(sum(row.distance_before**2 for row in rows))
    after = math.sqrt(sum(row.distance_after**2 for row in rows))
    return before / norm, after / norm


def gained(before: float, after: float) -> str:
    """One honest sentence on what alignment did, from the relative distances."""
    if before == 0:
        return "the donor equals the anchor in every matched tensor: alignment had nothing to do"
    gain = 1 - after / before
    if gain < -SMALL_GAIN:
        return (
            f"the transforms lead further away (relative distance {before:.4g} before, {after:.4g} after): they were "
            "made for something else than nearness, such as a loss"
        )
    if gain < SMALL_GAIN:
        why = "the models share their coordinates" if before < RELATED else "no map brings the models nearer"
        return (
            f"alignment had next to nothing to do (relative distance {before:.4g} before, {after:.4g} after): "
            f"{why}, the merge is practically the plain one"
        )
    return f"relative distance {before:.4g} before, {after:.4g} after alignment ({gain:.0%} less)"


@dataclass(frozen=True)
class MergeReport:
    """Everything a merge did.

    Distances are Frobenius norms of donor - anchor over the tensors that have an axis in the space. `files` are the
    alignment files by which donors were moved, nothing being matched. Fingerprints, by
    model, are those of alignment files; where not all tensors were read, the words after it say of how many.

    Attributes:
        models: where each model came from, by its name here: `hub`, `revision`, `license`, and `adapter` with the same;
            `carried` of what was carried onto the base.
        relation: what the result is to its models, in the hub's words: `merge`, `finetune` or `adapter`.
        base: of a fine-tune or an adapter, the one among the models that it is one of.
        data: the samples that were used, each with `of` (what for), `source` and `samples`; `file` of statistics that
            lay beside a model.
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
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    relation: str = "merge"
    base: str | None = None
    data: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        run: Run,
        anchor: object,
        delegate: str,
        recipe: str,
        fingerprints: Mapping[str, str] | None = None,
        models: Mapping[str, dict[str, Any]] | None = None,
        relation: str = "merge",
        base: str | None = None,
    ) -> MergeReport:
        return cls(
            str(anchor),
            delegate,
            recipe,
            rows_of(run),
            {**run.whole, **{name: found for name, given in run.given.items() if (found := whole_in(given.made))}},
            [*run.notes, *run.transport_notes()],
            time.perf_counter() - run.began,
            versions(),
            dict(fingerprints or {}),
            {name: given.file for name, given in run.given.items()},
            dict(models or {}),
            relation,
            base,
            list(run.data),
        )

    def donors(self) -> list[str]:
        return list(dict.fromkeys([*(row.donor for row in self.rows), *self.whole, *self.files]))

    def relative_distances(self, donor: str) -> tuple[float, float]:
        """See `relative`."""
        return relative([row for row in self.rows if row.donor == donor])

    def verdict(self, donor: str) -> str:
        """One honest sentence on what alignment did for a donor."""
        words = gained(*self.relative_distances(donor))
        if not any(row.donor == donor for row in self.rows):
            words = "nothing was matched"
        return f"moved by the transforms in {self.files[donor]}: {words}" if donor in self.files else words

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
        later: dict[str, Any] = {
            "fingerprints": {},
            "files": {},
            "models": {},
            "relation": "merge",
            "base": None,
            "data": [],
        }
        fields = {**later, **data}
        fields = {name: fields[name] for name in cls.__dataclass_fields__}
        fields["rows"] = [SpaceRow(**row) for row in fields["rows"]]
        return cls(**fields)

    def write(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)
            file.write("\n")


def versions() -> dict[str, str]:
    """Versions of what computed the result."""
    return dict(_versions())


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("rotation-merge", "mergekit", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
