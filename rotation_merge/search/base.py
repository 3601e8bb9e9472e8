"""The common base of models: as named, from adapters or cards, or from the cosines of their changes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.pair import open_pair
from rotation_merge.model.card import metadata_in
from rotation_merge.model.contents import read_json
from rotation_merge.model.folder import absent_parts
from rotation_merge.model.hub import is_hub_name
from rotation_merge.model.nearness import RELATED, SampledChanges, likeness, sampled_changes
from rotation_merge.model.open import open_model, parse_reference
from rotation_merge.model.view import View

UNRELATED = 0.35
"""Fine-tunes change a base in directions of their own: the cosine of two changes to it is below this. Seen from a
sibling it is one half or more, as both changes hold the sibling's own."""

MOST_BESIDE = 32
"""So many models beside the others are looked at."""

MERGED = ("mergekit_config.yml", "rotation_merge.json")
"""Files of a merge, which is no base."""


@dataclass(frozen=True)
class TaskVectorBase:
    """The common base of the models.

    Attributes:
        name: a folder, or a name on the hub.
        why: the evidence, in words.
        changes: of the models to it.
    """

    name: str
    why: str
    changes: SampledChanges


def find_base(models: Sequence[str], base_name: str | None = None) -> TaskVectorBase | None:
    """The base of all models; None if it is unknown or not stored locally.

    Args:
        base_name: as the user named it.

    Raises:
        RotationMergeError: the named one is missing, does not fit, or is no base of a model.
    """
    opened = {name: open_model(name, any_base=True) for name in models}
    if base_name is not None:
        return _opened(base_name, "as given", opened)
    stated = (_tried(name, why, opened) for name, why in _named(opened))
    return next((base for base in stated if base is not None), None) or _nearest(models, opened)


def _opened(name: str, why: str, models: Mapping[str, View]) -> TaskVectorBase:
    """Open the base and check that the models were tuned from it.

    Raises:
        RotationMergeError: it is missing, or not the base of a model.
    """
    base = open_model(name, any_base=True)
    for model in models:
        if model == name:
            continue
        pair = open_pair(name, model, NOTHING, averaged=True)
        if (cosine := likeness(pair.anchor, pair.donor)) < RELATED:
            problem = f"is not the base of {model}: the mean cosine of their matrices is {cosine:.2f}"
            raise CheckpointError(
                problem, where=name, remedy="name the model that all others were fine-tuned from, or leave out 'base'"
            )
    tuned_models = {model: opened for model, opened in models.items() if model != name}
    return TaskVectorBase(name, why, sampled_changes(base, tuned_models))


def _tried(name: str, why: str, models: Mapping[str, View]) -> TaskVectorBase | None:
    try:
        return _opened(name, why, models)
    except RotationMergeError:
        return None


def _named(models: Mapping[str, View]) -> Iterator[tuple[str, str]]:
    """The base that adapters and cards name, if it is stored locally."""
    for name in models:
        reference = parse_reference(name)
        if reference.lora is not None:
            yield str(reference.model), f"base of the adapter ({os.path.basename(str(reference.lora))})"
    for name, model in models.items():
        stated = metadata_in(model.folder).get("base_model")
        names = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
        if len(names) == 1:  # a merge has several
            for place in _places(str(names[0]), model.folder):
                yield place, f"the card of {os.path.basename(name)} names it"


def _places(stated: str, folder: str) -> Iterator[str]:
    """Where a model is that the files in a folder name: in a folder, beside that folder, or in the hub's cache."""
    for place in (stated, os.path.join(os.path.dirname(folder), stated)):
        if stated and os.path.isdir(place):
            yield os.path.abspath(place)
    if is_hub_name(stated) and not os.path.exists(stated) and not absent_parts(parse_reference(stated)):
        yield stated


def _nearest(models: Sequence[str], opened: Mapping[str, View]) -> TaskVectorBase | None:
    """The model that all others differ from independently: one of them, or beside them, or named by their configs."""
    if len(models) < 2:
        return None
    candidates = [*(models if len(models) > 2 else []), *_beside(models), *_began_as(opened.values())]
    bases = [base for name in dict.fromkeys(candidates) if (base := _tried(name, "by its weights", opened)) is not None]
    bases = [base for base in bases if all(base.changes.lengths.values()) and abs(base.changes.cosine) < UNRELATED]
    return min(bases, key=lambda base: abs(base.changes.cosine), default=None)


def _beside(models: Sequence[str]) -> list[str]:
    """Folders with a model beside the models, without merges."""
    parents = {os.path.dirname(os.path.abspath(name)) for name in models if os.path.exists(name)}
    named = {os.path.realpath(name) for name in models}
    places = [place for parent in sorted(parents) for place in sorted(Path(parent).iterdir())]
    bases = (
        str(p) for p in places if (p / "config.json").is_file() and not any((p / file).exists() for file in MERGED)
    )
    return [place for place in bases if os.path.realpath(place) not in named][:MOST_BESIDE]


def _began_as(models: Iterable[View]) -> list[str]:
    """Stored models that configs name as those which were loaded before training (`_name_or_path`)."""
    stated = [(model, read_json(os.path.join(model.folder, "config.json")).get("_name_or_path")) for model in models]
    return [place for model, name in stated for place in _places(str(name or ""), model.folder)]
