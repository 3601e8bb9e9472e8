"""What text and reviews of "Beyond the Permutation Symmetry of Transformers" say beside tables and figures.

Larger models benefit more from matching: ViTs of three widths. The path from a model to its own matched self has a
barrier. What single layers gain, summed, beside what all layers gain at once. Mean and spread over pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from apparatus import Given, run, spread
from landscape import CALLED, LLAMAS, VITS, Two, by_layers, mixed, pairs, parts
from record import Row

from rotation_merge.diagnose.matchings import NAMED

WIDTHS, SELVES, SUMS = "papers-widths", "papers-selves", "papers-sums"
MATCHED = ("paper", "residual")
TABLES = {
    WIDTHS: (
        *("width", "each alone", "matching", "loss, none", "loss, matched", "lower by", "accuracy", "points gained"),
    ),
    SELVES: ("models", "matching", "alone", "halfway to itself", "barrier"),
    SUMS: ("models", "matched", "sum of single layers", "all layers at once", "single layers that gain"),
}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    yield from widths(given)
    kinds, matched = ((VITS,), MATCHED[:1]) if given.quick else ((VITS, LLAMAS), MATCHED)
    for kind in kinds:
        for name in matched:
            found = [two.kept(f"self, {name}", lambda t=two, n=name: itself(t, n)) for two in pairs(given, kind)]
            alone, half = ([one[i] for one in found] for i in (0, 1))
            cells = {"alone": spread(alone, "{:.3f}"), "halfway to itself": spread(half, "{:.3f}")}
            rise = spread([b - a for a, b in found], "{:.3f}")
            yield SELVES, {"models": kind, "matching": CALLED[name], **cells, "barrier": rise}
    for kind in kinds:
        for part in parts(given):
            yield SUMS, {"models": kind, "matched": part, **sums(pairs(given, kind), part)}


def widths(given: Given) -> Iterator[tuple[str, Row]]:
    for width in (64,) if given.quick else (16, 32, 64):
        stem = "vit-" if width == 64 else f"vit-w{width}-"
        twos = [Two(given, VITS, f"{stem}{a}", f"{stem}{b}") for a, b in given.pairs()]
        each = [two.kept("alone", two.accuracies) for two in twos]
        alone = spread([100 * fmean(pair) for pair in each])
        before = [two.kept("half, none", lambda t=two: list(t.halfway(None))) for two in twos]
        for name in MATCHED[:1] if given.quick else MATCHED:
            after = [two.kept(f"half, {name}", lambda t=two, n=name: list(t.halfway(NAMED[n]))) for two in twos]
            loss, right = ([[one[i] for one in found] for found in (before, after)] for i in (0, 1))
            lower = [old - new for old, new in zip(*loss, strict=True)]
            gained = [100 * (new - old) for old, new in zip(*right, strict=True)]
            yield (
                WIDTHS,
                {
                    **{"width": width, "each alone": alone, "matching": CALLED[name]},
                    **{"loss, none": spread(loss[0], "{:.3f}"), "loss, matched": spread(loss[1], "{:.3f}")},
                    **{"lower by": spread(lower, "{:.3f}"), "accuracy": spread([100 * r for r in right[1]])},
                    "points gained": spread(gained),
                },
            )


def itself(two: Two, name: str) -> list[float]:
    """Loss of the donor, and of what is halfway between it and its matched self."""
    _, before, after = two.moved(NAMED[name])
    return [
        two.loss_and_accuracy(before)[0],
        two.loss_and_accuracy(mixed({"before": before, "after": after}, [0.5, 0.5]))[0],
    ]


def sums(twos: list[Two], part: str) -> Row:
    """Gains in loss of the average over no matching."""
    found = [by_layers(two, part) for two in twos]
    each = [[one["none"][0] - value[0] for words, value in one.items() if words.startswith("layer")] for one in found]
    whole = [one["none"][0] - one["all"][0] for one in found]
    gaining = sum(gain > 0 for gains in each for gain in gains)
    return {
        "sum of single layers": spread([sum(gains) for gains in each], "{:.3f}"),
        "all layers at once": spread(whole, "{:.3f}"),
        "single layers that gain": f"{gaining} of {sum(map(len, each))}",
    }


run(__name__)
