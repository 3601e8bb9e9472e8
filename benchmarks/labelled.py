"""Four classification tasks from texts that Debian packages ship.

Needs `apt-get update` (descriptions of packages), and the packages wordnet-base, fortunes-min and fortunes installed,
or unpacked somewhere (`dpkg -x FILE ROOT`).
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

Labelled = Iterable[tuple[str, str]]
"""Texts with the names of their classes."""

FORTUNES = "people definitions cookie computers songs-poems politics work science men-women zippy knghtbrd platitudes"


TRAINING, HELD, TEST = 3200, 800, 800
"""Texts of a task, at most, that are spread evenly over classes."""
MORE = 1200
"""Further texts for testing, as far as classes have some left; the others do not depend on it."""


@dataclass(frozen=True)
class Task:
    """Texts with classes.

    Attributes:
        classes: their names.
        training, held, test: texts and numbers of their classes, in random order; test texts in two parts, first as
            many of every class as for training, then what classes have left.
    """

    classes: list[str]
    training: list[tuple[str, int]]
    held: list[tuple[str, int]]
    test: list[tuple[str, int]]


def tasks(root: Path) -> dict[str, Task]:
    """By name: as many texts of every class, none twice; then `MORE` for testing.

    Args:
        root: where the Debian packages lie.
    """
    found: dict[str, tuple[Labelled, int]] = {
        "packages": (packages(), 10),
        "nouns": (glosses(root / "usr/share/wordnet/data.noun"), 10),
        "verbs": (glosses(root / "usr/share/wordnet/data.verb"), 10),
        "fortunes": (fortunes(root / "usr/share/games/fortunes"), 12),
    }
    return {name: _task(texts, classes) for name, (texts, classes) in found.items()}


def packages() -> Iterator[tuple[str, str]]:
    """Short descriptions of Debian's packages, by section."""
    shown = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
    for entry in shown.split("\n\n"):
        fields = dict(re.findall(r"^(Section|Description): (.*)$", entry, re.MULTILINE))
        if len(fields) == 2 and "/" not in fields["Section"]:
            yield fields["Description"], fields["Section"]


def glosses(file: Path) -> Iterator[tuple[str, str]]:
    """WordNet's definitions, without examples, by lexical file (wndb(5WN): the second field)."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("  "):
            head, _, gloss = line.partition(" | ")
            yield re.split(r'; *"', gloss)[0].strip(), head.split()[1]


def fortunes(folder: Path) -> Iterator[tuple[str, str]]:
    """Fortunes by file."""
    for name in FORTUNES.split():
        for text in (folder / name).read_text(encoding="utf-8").split("\n%\n"):
            yield " ".join(text.split()), name


def _task(texts: Labelled, most: int) -> Task:
    """The `most` largest classes, all of the size of the smallest of them but for `MORE` test texts."""
    whole = TRAINING + HELD + TEST
    of: dict[str, set[str]] = defaultdict(set)
    for text, name in texts:
        if text:
            of[text].add(name)
    single = [(text, next(iter(names))) for text, names in of.items() if len(names) == 1]
    sizes = Counter(name for _, name in single)
    classes = sorted(sorted(sizes, key=lambda name: (-sizes[name], name))[:most])
    each = min([whole // len(classes), *(sizes[name] for name in classes)])
    draw = torch.Generator().manual_seed(0)
    chosen: list[tuple[str, int]] = []
    left: list[tuple[str, int]] = []
    for number, name in enumerate(classes):
        mine = sorted(text for text, other in single if other == name)
        drawn = [(mine[i], number) for i in torch.randperm(len(mine), generator=draw).tolist()]
        chosen += drawn[:each]
        left += drawn[each : each + MORE // len(classes)]
    order = torch.randperm(len(chosen), generator=draw).tolist()
    first, last = (len(order) * part // whole for part in (TEST, TEST + HELD))
    taught, kept, asked = ([chosen[i] for i in part] for part in (order[last:], order[first:last], order[:first]))
    return Task(classes, taught, kept, asked + left)
