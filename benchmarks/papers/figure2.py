"""Figure 2 of "Beyond the Permutation Symmetry of Transformers": losses at A, B, AB and AB', B' being the matched B.

Two ViTs of other seeds, all 540 test digits. Rows: the losses of the ends and of the averages AB and AB', the barriers,
and distances; mean and spread over pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

from apparatus import Given, run, spread
from merges import RESIDUAL, Pair, distance, vits
from record import Row

import rotation_merge as rm

NAME = "papers-figure2"
MATCHED = ("both", RESIDUAL)
TABLES = {
    NAME: ("matching", "A", "B", "AB", "AB'", "barrier A to B", "barrier A to B'", "B' from A", "B from A"),
}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    for name in MATCHED[:1] if given.quick else MATCHED:
        found = [given.kept(f"plane, {pair.name}, {name}", lambda p=pair, n=name: points(p, n)) for pair in vits(given)]
        yield NAME, {"matching": name, **{key: spread([one[key] for one in found], "{:.3f}") for key in found[0]}}


def points(pair: Pair, name: str) -> dict[str, float]:
    """Losses at the ends and of both averages, barriers by them, distances."""
    a, b, c = pair.moved(name)
    config = rm.EvaluateConfig(limit=8 if pair.given.quick else 540)
    losses = [rm.evaluate(x, "demo:digits", config)["loss"] for x in (a, b, rm.average([a, b]), rm.average([a, c]))]
    rises = [middle - sum(losses[:2]) / 2 for middle in losses[2:]]
    return dict(zip(TABLES[NAME][1:], (*losses, *rises, distance(a, c), distance(a, b)), strict=True))


run(__name__)
