"""Figure 3 of "Beyond the Permutation Symmetry of Transformers": what each part of matching does to each average.

The accuracies of table 2 as bars, and how many points each part is worth: FFN only, attention only, both without and
with rescaling, over no matching; mean and spread over the same pairs of ViTs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from apparatus import Given, run, spread
from digits import accuracies
from drawing import bars
from merges import NONE
from record import Row

NAME = "papers-figure3"
PARTS = ("FFN only", "attention only", "no rescaling", "both")
TABLES = {NAME: ("average", NONE, *PARTS), f"{NAME}-gains": ("average", *PARTS)}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    found = accuracies(given)
    for average in dict.fromkeys(average for average, _ in found):
        each = {part: found[average, part] for part in (NONE, *PARTS)}
        yield NAME, {"average": average, **{part: f"{fmean(values):.1f}" for part, values in each.items()}}
        gains = {part: [new - old for new, old in zip(each[part], each[NONE], strict=True)] for part in PARTS}
        yield f"{NAME}-gains", {"average": average, **{part: spread(gain, "{:+.1f}") for part, gain in gains.items()}}


def picture(tables: Mapping[str, Sequence[Row]]) -> str:
    groups = {row["average"]: {name: float(row[name]) for name in (NONE, *PARTS)} for row in tables[NAME]}
    return bars(groups, "accuracy, %")


PICTURES = {"papers-figure3.svg": picture}
run(__name__)
