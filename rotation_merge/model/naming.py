"""How texts for readers call models and files: by their names on the hub, else by the last parts of their paths."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence


def shortened(names: Sequence[str]) -> dict[str, str]:
    """The last parts of models' names, as many as tell them apart."""
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
        hub: what some of them are called on the hub.
    """
    paths = sorted({name for name in names if is_path(name)}, key=len, reverse=True)
    if not paths:
        return lambda text: text
    shown = {**shortened(paths), **{path: hub[path] for path in paths if path in hub}}
    pattern = re.compile(rf"(?<![\w./~@-])(?:{'|'.join(map(re.escape, paths))})(?![\w/@-])(?!\.\w)")
    return lambda text: pattern.sub(lambda match: shown[match[0]], text)
