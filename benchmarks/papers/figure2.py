"""Figure 2 of "Beyond the Permutation Symmetry of Transformers": losses at A, B, AB and AB', B' being the matched B.

Two ViTs of other seeds, all 540 test digits. Rows: the losses of the ends and of the averages AB and AB', the barriers,
and distances; mean and spread over pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

from apparatus import Given, run, spread
from landscape import CALLED, VITS, Two, distance, mixed, pairs
from record import Row

from rotation_merge.diagnose.matchings import NAMED

NAME = "papers-figure2"
MATCHED = ("paper", "residual")
TABLES = {
    NAME: ("matching", "A", "B", "AB", "AB'", "barrier A to B", "barrier A to B'", "B' from A", "B from A"),
}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    twos = pairs(given, VITS)
    for name in MATCHED[:1] if given.quick else MATCHED:
        found = [two.kept(f"plane, points, {name}", lambda t=two, n=name: points(t, n)) for two in twos]
        cells = {key: spread([one[key] for one in found], "{:.3f}") for key in found[0]}
        yield NAME, {"matching": CALLED[name], **cells}


def points(two: Two, name: str) -> dict[str, float]:
    """Losses at the ends and of both averages, barriers by them, distances."""
    a, b, c = two.moved(NAMED[name])
    ends = two.loss_and_accuracy(a)[0], two.loss_and_accuracy(b)[0]
    middles = [two.loss_and_accuracy(mixed({"A": a, "B": one}, [0.5, 0.5]))[0] for one in (b, c)]
    rises = [middle - sum(ends) / 2 for middle in middles]
    values = (*ends, *middles, *rises, distance(a, c), distance(a, b))
    return dict(zip(TABLES[NAME][1:], values, strict=True))


run(__name__)
