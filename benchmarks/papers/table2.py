"""Table 2 of "Beyond the Permutation Symmetry of Transformers": two ViTs merged, by average and by matching.

Accuracy on scikit-learn's test digits, halves of two ViTs of other seeds, mean and spread over pairs. Statistics,
plans, learned matching and refit see 200 training images without labels (Fisher 64), and statistics are measured after
matching. Two matchings (residual, learned) and refit are not in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from apparatus import Given, run, spread
from merges import MATCHINGS, RESIDUAL, SAMPLES, judged, vits
from merging import accuracy
from record import Row

NAME = "papers-table2"
TABLES = {NAME: ("average", *MATCHINGS)}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    pairs, key = vits(given), f"accuracy, {SAMPLES} images"
    matchings = [matching for matching in MATCHINGS if matching != RESIDUAL or not given.quick]
    found = judged(given, key, pairs, lambda out, _: percent(out), matchings)
    models = [path for pair in pairs for path in (pair.anchor, pair.donor)]
    alone = [given.kept(f"accuracy, {path.name}", lambda p=path: percent(p)) for path in models]
    empty = dict.fromkeys(MATCHINGS, "")
    yield NAME, {"average": "each model alone", **empty, next(iter(empty)): spread(alone)}
    for average in dict.fromkeys(average for average, _ in found):
        cells = {m: spread(found[average, m]) if (average, m) in found else "" for m in MATCHINGS}
        yield NAME, {"average": average, **cells}


def percent(path: Path) -> float:
    """Of the 540 test digits."""
    return 100 * accuracy(path)


run(__name__)
