"""Adapters carried to a new base and written as peft writes them, with report and card."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rotation_merge.architectures.model import Architecture
from rotation_merge.checkpoints.adapters import Adapter
from rotation_merge.checkpoints.bases import Bases, open_bases
from rotation_merge.checkpoints.carry import Carried, carry_adapter
from rotation_merge.checkpoints.output import staged
from rotation_merge.errors import CheckpointError
from rotation_merge.matching.carry import Carrier
from rotation_merge.matching.model import Progress
from rotation_merge.matching.options import MatchOptions
from rotation_merge.report.card import fingerprints
from rotation_merge.report.record import MergeReport, versions


@dataclass(frozen=True)
class Settings:
    """How work is carried.

    Attributes:
        match: the groups that the bases are matched by.
        largest: of the residual groups the largest that they admit, instead of the one in `match`.
        alignment: a file of maps to apply instead of matching.
        scale: what every change is multiplied by.
    """

    match: MatchOptions = field(default_factory=MatchOptions)
    largest: bool = False
    alignment: str | None = None
    scale: float = 1.0
    device: str = "cpu"


@dataclass(frozen=True)
class Done:
    """One adapter that was carried: where it came from, where it lies, and what the user should know."""

    work: str
    out: str
    lines: list[str]
    tensors: int
    constants: int


def carry_adapters(
    works: Mapping[str, str], old: str, new: str, settings: Settings, progress: Progress | None = None
) -> list[Done]:
    """Carry adapters of one base to another one; nothing is written before all of them are carried.

    Args:
        works: directories of adapters, by the directory that each is to be written to.

    Raises:
        RotationMergeError: a base or an adapter cannot be read, or they do not fit together.
    """
    adapters = {out: Adapter(path) for out, path in works.items()}
    bases = open_bases(new, old, settings.device)
    if settings.alignment is not None:
        alignment, report = bases.given(settings.alignment)
    else:
        alignment, report = bases.match(_chosen(settings, bases.architecture), progress)
    carrier = Carrier(bases.architecture, *bases.sources[::-1], alignment, bases.rows)
    done = {}
    for out, adapter in adapters.items():
        carried = carry_adapter(adapter, carrier, bases.old.config, new, settings.scale)
        notes = _notes(carried, bases, adapter.config)
        done[out] = carried, replace(report, notes=[*report.notes, *notes])
    for out, (carried, full) in done.items():
        with staged(out) as staging:
            carried.adapter.write(staging)
            full.write(os.path.join(staging, "rotation_merge.json"))
            with open(os.path.join(staging, "README.md"), "w", encoding="utf-8") as file:
                file.write(card(bases, works[out], full, os.path.basename(os.path.abspath(out))))
    return [
        Done(works[out], out, [_verdict(bases, full), *full.notes], len(carried.after), len(carried.constants))
        for out, (carried, full) in done.items()
    ]


def _chosen(settings: Settings, architecture: Architecture) -> MatchOptions:
    """The options, with the largest residual group that every stream admits where none was named."""
    if not settings.largest:
        return settings.match
    shared = [set(groups) for groups in architecture.stream_groups.values()]
    order = ("none", "permutation", "signed_permutation", "rotation")
    admitted = [group for group in order if group == "none" or (shared and all(group in own for own in shared))]
    return replace(settings.match, residual=admitted[-1])


def _verdict(bases: Bases, report: MergeReport) -> str:
    words = report.verdict(str(bases.old.reference))
    return f"{bases.old.reference} to {bases.new.reference}: {words}."


def _notes(carried: Carried, bases: Bases, config: Mapping[str, Any]) -> list[str]:
    notes = [f"{len(carried.after)} changed tensors were carried, each exactly as the bases were aligned."]
    if carried.constants:
        notes.append(
            f"{len(carried.constants)} modules got a bias (peft's lora_bias): norms of the old base shift their inputs."
        )
    trained_on = config.get("base_model_name_or_path")
    if trained_on and os.path.basename(str(trained_on)) != os.path.basename(str(bases.old.reference.model.path)):
        notes.append(f"The adapter's config names {trained_on} as its base, not {bases.old.reference}: check --from.")
    if bases.rows is not None:
        notes.append(f"The bases share {len(bases.rows[0])} tokens; what is learned of others is not carried.")
    return notes


def card(bases: Bases, work: str, report: MergeReport, name: str) -> str:
    """A model card for a carried adapter."""
    old, new = str(bases.old.reference), str(bases.new.reference)
    head = [f"base_model: {new}", "base_model_relation: adapter", "library_name: peft"]
    tags = "".join(f"- {tag}\n" for tag in ("rotation_merge", "re-basin", "lora"))
    return (
        "---\n" + "\n".join(head) + f"\ntags:\n{tags}---\n"
        f"# {name}\n\n"
        f"This is the adapter `{work}`, trained on `{old}`, carried to `{new}` by rotation_merge "
        f"{versions().get('rotation-merge', '')}. Nothing was trained: its factors were moved by the map that brings "
        f"`{old}` as near as possible to `{new}`. If the new base were the old one in other coordinates, the adapter "
        "would do here what it did there; how much of it arrives at another base was not measured.\n\n"
        f"{_verdict(bases, report)}\n\n" + "\n".join(report.notes) + "\n"
        f"\nOptions:\n\n```yaml\n{report.recipe}```\n" + "\n".join(fingerprints(report)) + "\n"
    )


def check_places(works: Sequence[str], places: Sequence[str]) -> None:
    """Refuse to write two adapters to one place.

    Raises:
        CheckpointError: names the two.
    """
    for i, place in enumerate(places):
        if place in places[:i]:
            raise CheckpointError(
                f"would be written to {place}, as {works[places.index(place)]}",
                where=works[i],
                remedy="carry them one by one",
            )
