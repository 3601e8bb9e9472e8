"""Figure 5 of "Beyond the Permutation Symmetry of Transformers": loss on the path between two models, by matching.

The paper's four curves (none, FFN only, attention only, both), Git
Re-Basin's permutations, the residual stream turned, too, and, for ViTs, this learned on 200 training images. ViTs of
other seeds on all 540 test digits, Llamas on 64 windows of Python text. `barrier` is the largest excess over the line
between the ends; the paper's LB is the range of the loss on the path, the ends among it. Mean and spread over pairs;
`docs/make_pictures.py` draws the first.
"""

from __future__ import annotations

from collections.abc import Iterator

from apparatus import Given, run, spread
from landscape import LEARNED, LLAMAS, MATCHINGS, VITS, pairs
from record import Row

NAME, PATHS = "papers-figure5", "papers-figure5-paths"
TABLES = {
    NAME: ("models", "matching", "barrier", "range", "loss in the middle", "accuracy in the middle"),
    PATHS: ("models", "matching", "losses"),
}
KINDS, QUICK = (VITS, LLAMAS), ("none", "FFN only")


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    for kind in KINDS:
        names = [name for name in MATCHINGS if name in QUICK or (not given.quick and (name != LEARNED or kind == VITS))]
        found = [two.paths(names, 3 if given.quick else 11) for two in pairs(given, kind)]
        for number, name in enumerate(names):
            curves = [of_pair[number] for of_pair in found]
            head = {"models": kind, "matching": name}
            middle = [curve.middle() for curve in curves]
            right = spread([100 * c.accuracy[i] for c, i in zip(curves, middle, strict=True)])
            yield (
                NAME,
                {
                    **head,
                    "barrier": spread([curve.barrier() for curve in curves], "{:.3f}"),
                    "range": spread([max(curve.loss) - min(curve.loss) for curve in curves], "{:.3f}"),
                    "loss in the middle": spread([c.loss[i] for c, i in zip(curves, middle, strict=True)], "{:.3f}"),
                    "accuracy in the middle": right,
                },
            )
            yield PATHS, {**head, "losses": " ".join(f"{loss:.4f}" for loss in curves[0].loss)}


run(__name__)
