"""Figure 2 of "Beyond the Permutation Symmetry of Transformers": losses at A, B, AB and AB', B' being the matched B.

Two ViTs of other seeds, all 540 test digits. Rows: the losses of the ends and of the averages AB and AB', the barriers,
and distances; mean and spread over pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from apparatus import Given, run, spread
from landscape import DATA, MATCHINGS, VITS, Two, distance, moved, pairs
from record import Row

import rotation_merge as rm
from rotation_merge.run.data import read_samples

NAME = "papers-figure2"
MATCHED = ("both", "residual")
TABLES = {
    NAME: ("matching", "A", "B", "AB", "AB'", "barrier A to B", "barrier A to B'", "B' from A", "B from A"),
}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    twos = pairs(given, VITS)
    for name in MATCHED[:1] if given.quick else MATCHED:
        found = [two.kept(f"plane, points, {name}", lambda t=two, n=name: points(t, n)) for two in twos]
        cells = {key: spread([one[key] for one in found], "{:.3f}") for key in found[0]}
        yield NAME, {"matching": name, **cells}


def points(two: Two, name: str) -> dict[str, float]:
    """Losses at the ends and of both averages, barriers by them, distances."""
    a, b, c = moved(*map(Path, two.ends), MATCHINGS[name])
    data = read_samples(two.ends[0], DATA[VITS], **two.reading).batches
    losses = [rm.evaluate(view, data)["loss"] for view in (a, b, rm.average([a, b]), rm.average([a, c]))]
    rises = [middle - sum(losses[:2]) / 2 for middle in losses[2:]]
    return dict(zip(TABLES[NAME][1:], (*losses, *rises, distance(a, c), distance(a, b)), strict=True))


run(__name__)
