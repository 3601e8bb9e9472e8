"""Short names of models and files for readers: hub names, else the last parts of paths."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from rotation_merge.errors import RotationMergeError


def shortened(names: Sequence[str]) -> dict[str, str]:
    """The shortest trailing parts of paths that tell models apart."""
    for count in range(1, 9):
        short = {n: "+".join("/".join(p.rstrip("/").split("/")[-count:]) for p in n.split("+")) for n in names}
        if len(set(short.values())) == len(set(names)):
            return short
    return {name: name for name in names}


def is_path(name: str) -> bool:
    """Whether a name is a path of this machine, not one of the hub or a word."""
    return os.path.isabs(name) or name.startswith((".", "~")) or (os.sep in name and os.path.exists(name))


def without_paths(names: Iterable[str], hub: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces known paths of this machine in a text.

    Args:
        names: models and files that the text may name.
        hub: names of some of them on the hub.
    """
    paths = sorted({name for name in names if is_path(name)}, key=len, reverse=True)
    if not paths:
        return lambda text: text
    shown = {**shortened(paths), **{path: hub[path] for path in paths if path in hub}}
    pattern = re.compile(rf"(?<![\w./~@-])(?:{'|'.join(map(re.escape, paths))})(?![\w/@-])(?!\.\w)")
    return lambda text: pattern.sub(lambda match: shown[match[0]], text)


def check_different(models: Sequence[str]) -> None:
    """Refuse models that are named twice, before anything is opened.

    Raises:
        RotationMergeError: one is.
    """
    split = [model.split("+") for model in models]
    places = [[os.path.realpath(part) if os.path.exists(part) else part for part in parts] for parts in split]
    if twice := [model for model, place in zip(models, places, strict=True) if places.count(place) > 1]:
        raise RotationMergeError("is named twice", where=twice[-1], remedy="name models that differ")
