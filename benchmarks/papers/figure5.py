"""Figure 5 of "Beyond the Permutation Symmetry of Transformers": loss on the path between two models, by matching.

The paper's four curves (none, FFN only, attention only, both), Git
Re-Basin's permutations, the residual stream turned, too, and, for ViTs, this learned on 200 training images. ViTs of
other seeds on all 540 test digits, Llamas on 64 windows of Python text. `barrier` is the largest excess over the line
between the ends; the paper's LB is the range of the loss on the path, the ends among it. Mean and spread over pairs;
`docs/make_pictures.py` draws the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from apparatus import Given, run, spread
from merges import FULL, LEARNED, PAPER, Pair, vits
from record import Row

import rotation_merge as rm
from rotation_merge import AlignConfig
from rotation_merge.run.evaluate import Curve

NAME, PATHS = "papers-figure5", "papers-figure5-paths"
TABLES = {
    NAME: ("models", "matching", "barrier", "range", "loss in the middle", "accuracy in the middle"),
    PATHS: ("models", "matching", "losses"),
}
MATCHINGS = {
    "none": AlignConfig(attention="none", ffn="none", scaling=False),
    "FFN only": AlignConfig(attention="none", scaling=False),
    "attention only": AlignConfig(ffn="none", scaling=False),
    "both": PAPER,
    "Git Re-Basin": AlignConfig(attention="permutation", heads="permutation", scaling=False, residual="permutation"),
    "residual": FULL,
    LEARNED: FULL,
}
"""By the paper's words, where it has some. `both` is the paper's own."""
VITS, LLAMAS, QUICK = "ViTs", "Llamas", ("none", "FFN only")
DATA = {VITS: ("demo:digits", 540), LLAMAS: ("demo:python", 64)}
"""What models are measured on: its source, and how many examples of it."""
LLAMA_PAIRS = [(0, 1), (2, 3), (1, 2)]
"""Of seeds; there are four."""


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    seeds = [[given.model(f"llama-{seed}") for seed in pair] for pair in LLAMA_PAIRS[: given.seeds]]
    pairs = {VITS: vits(given, MATCHINGS), LLAMAS: [Pair(given, *ends, matchings=MATCHINGS) for ends in seeds]}
    for kind in DATA:
        for name in QUICK if given.quick else MATCHINGS:
            if name == LEARNED and kind == LLAMAS:
                continue
            curves = [curve(pair, kind, name) for pair in pairs[kind]]
            head, middle = {"models": kind, "matching": name}, [curve.middle() for curve in curves]
            cells = {
                "barrier": spread([curve.barrier() for curve in curves], "{:.3f}"),
                "range": spread([max(curve.loss) - min(curve.loss) for curve in curves], "{:.3f}"),
                "loss in the middle": spread([c.loss[i] for c, i in zip(curves, middle, strict=True)], "{:.3f}"),
                "accuracy in the middle": spread([100 * c.accuracy[i] for c, i in zip(curves, middle, strict=True)]),
            }
            yield NAME, {**head, **cells}
            yield PATHS, {**head, "losses": " ".join(f"{loss:.4f}" for loss in curves[0].loss)}


def curve(pair: Pair, kind: str, name: str) -> Curve:
    """The path of one matching."""
    (data, limit), quick = DATA[kind], pair.given.quick
    config = rm.BarrierConfig(points=3 if quick else 11, limit=8 if quick else limit, batch_size=64, length=128)

    def compute() -> dict[str, object]:
        anchor, _, donor = pair.moved(name)
        return asdict(rm.barrier(anchor, donor, data, config))

    return Curve(**pair.given.kept(f"path by {config.points}, {pair.name}, {name}", compute))


run(__name__)
