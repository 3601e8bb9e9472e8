"""The common base of models: as named, from adapters or cards, or from the cosines of their changes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.pair import open_pair
from rotation_merge.model.card import metadata_in
from rotation_merge.model.contents import read_json
from rotation_merge.model.folder import absent_parts
from rotation_merge.model.hub import is_hub_name
from rotation_merge.model.nearness import RELATED, likeness, sampled_changes
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
        cosine: mean over pairs of models, of the angle between their changes to it; 0 of one model.
        same: whether a model has its weights.
    """

    name: str
    why: str
    cosine: float = 0.0
    same: bool = False


def find_base(models: Sequence[str], base_name: str | None = None) -> TaskVectorBase | None:
    """The base of all models; None if it is unknown or not stored locally.

    Args:
        base_name: as the user named it.

    Raises:
        RotationMergeError: the named one is missing, does not fit, or is no base of a model.
    """
    opened = {name: open_model(name, any_base=True) for name in models}
    if base_name is not None:
        return _checked(base_name, "as given", opened)
    for base in _bases(_named(opened), opened):
        return base
    beside = dict.fromkeys(_candidates(opened), "by its weights")
    independent = [b for b in _bases(beside.items(), opened) if not b.same and abs(b.cosine) < UNRELATED]
    return min(independent, key=lambda base: abs(base.cosine), default=None)


def _checked(name: str, why: str, models: Mapping[str, View]) -> TaskVectorBase:
    """Open the base and check that the models were tuned from it.

    Raises:
        RotationMergeError: it is missing, or not the base of a model.
    """
    base, tuned = open_model(name, any_base=True), {model: view for model, view in models.items() if model != name}
    for model in tuned:
        pair = open_pair(name, model, NOTHING, averaged=True)
        if (cosine := likeness(pair.anchor, pair.donor)) < RELATED:
            problem = f"is not the base of {model}: the mean cosine of their matrices is {cosine:.2f}"
            remedy = "name the model that all others were fine-tuned from, or leave out 'base'"
            raise CheckpointError(problem, where=name, remedy=remedy)
    changes = sampled_changes(base, tuned)
    return TaskVectorBase(name, why, changes.cosine, not all(changes.lengths.values()))


def _bases(named: Iterable[tuple[str, str]], models: Mapping[str, View]) -> Iterator[TaskVectorBase]:
    """Those among candidates, with the evidence, that may be the base."""
    for name, why in named:
        with suppress(RotationMergeError):
            yield _checked(name, why, models)


def _named(models: Mapping[str, View]) -> Iterator[tuple[str, str]]:
    """The base that adapters and cards name, if it is stored locally."""
    for name in models:
        reference = parse_reference(name)
        if reference.lora is not None:
            yield str(reference.model), f"base of the adapter ({os.path.basename(str(reference.lora))})"
    for name, model in models.items():
        stated = metadata_in(model.folder).get("base_model")
        names = stated if isinstance(stated, list) else [stated]
        if len(names) == 1:  # a merge has several
            for place in _places(names[0], model.folder):
                yield place, f"the card of {os.path.basename(name)} names it"


def _candidates(models: Mapping[str, View]) -> list[str]:
    """Models that all others may differ from: one of them, folders beside them, and models that their configs name."""
    if len(models) < 2:
        return []
    names = list(models) if len(models) > 2 else []
    parents = {os.path.dirname(os.path.abspath(name)) for name in models if os.path.exists(name)}
    folders = [place for parent in sorted(parents) for place in sorted(Path(parent).iterdir())]
    model_places = {os.path.realpath(name) for name in models}
    beside = [
        str(place)
        for place in folders
        if (place / "config.json").is_file()
        and not any((place / file).exists() for file in MERGED)
        and os.path.realpath(place) not in model_places
    ]
    began = [(read_json(os.path.join(m.folder, "config.json")).get("_name_or_path"), m.folder) for m in models.values()]
    stated = [place for name, folder in began for place in _places(name, folder)]
    return list(dict.fromkeys([*names, *beside[:MOST_BESIDE], *stated]))


def _places(stated: object, folder: str) -> Iterator[str]:
    """Where a model is that the files in a folder name: in a folder, beside that folder, or in the hub's cache."""
    name = stated if isinstance(stated, str) else ""
    for place in (name, os.path.join(os.path.dirname(folder), name)):
        if name and os.path.isdir(place):
            yield os.path.abspath(place)
    if is_hub_name(name) and not os.path.exists(name) and not absent_parts(parse_reference(name)):
        yield name
