"""Short names of models and files for readers: hub names, else the last parts of paths."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rotation_merge.errors import RotationMergeError


def shortened(names: Sequence[str]) -> dict[str, str]:
    """The shortest trailing parts of paths that tell models apart."""
    for count in range(1, 9):
        short = {n: "+".join("/".join(p.rstrip("/").split("/")[-count:]) for p in n.split("+")) for n in names}
        if len(set(short.values())) == len(set(names)):
            return short
    return {name: name for name in names}


def check_different(models: Sequence[str]) -> None:
    """Refuse models that are named twice, before anything is opened.

    Raises:
        RotationMergeError: one is.
    """
    split = [model.split("+") for model in models]
    places = [[os.path.realpath(part) if os.path.exists(part) else part for part in parts] for parts in split]
    if twice := [model for model, place in zip(models, places, strict=True) if places.count(place) > 1]:
        raise RotationMergeError("is named twice", where=twice[-1], remedy="name models that differ")
