"""Table 2 of "Beyond the Permutation Symmetry of Transformers": two ViTs merged, by average and by matching.

Accuracy on scikit-learn's test digits, halves of two ViTs of other seeds, mean and spread over pairs. Statistics,
plans, learned matching and refit see 200 training images without labels (Fisher 64), and statistics are measured after
matching. Two matchings (residual, learned) and refit are not in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator

from apparatus import Given, run, spread
from digits import accuracies, percent
from merges import MATCHINGS
from record import Row

NAME = "papers-table2"
TABLES = {NAME: ("average", *MATCHINGS)}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    found = accuracies(given)
    seeds = [seed for pair in given.pairs() for seed in pair]
    alone = [given.kept(f"accuracy, vit-{seed}", lambda s=seed: percent(given.model(f"vit-{s}"))) for seed in seeds]
    empty = dict.fromkeys(MATCHINGS, "")
    yield NAME, {"average": "each model alone", **empty, next(iter(empty)): spread(alone)}
    for average in dict.fromkeys(average for average, _ in found):
        cells = {m: spread(found[average, m]) if (average, m) in found else "" for m in MATCHINGS}
        yield NAME, {"average": average, **cells}


run(__name__)
