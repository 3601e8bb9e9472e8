"""Figure 4 of "Beyond the Permutation Symmetry of Transformers": distance of whole models after each matching.

Frobenius norm of donor minus anchor over all tensors, as a share of what it is without matching. Git Re-Basin permutes
neurons, heads and what is inside them, in its second row the residual stream too; OT moves the donor by hard plans from
weights, with the residual stream in place or moved. Where the residual stream is turned, both models' norms are folded,
and so they are in the distance that it is compared with. Learned matching lowers a loss, not a distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apparatus import Given, run, spread
from merges import MATCHINGS, RESIDUAL, Pair, distance, vits
from merging import STILL, halves, merge
from record import Row

from rotation_merge import AlignConfig
from rotation_merge.model.open import open_model

NAME = "papers-figure4"
TABLES = {NAME: ("matching", "distance")}
PERMUTATIONS = {"attention": "permutation", "heads": "permutation", "scaling": False}
HARD = {**STILL, "delegate": "ot_fusion", "plan": "hard"}
WAYS: dict[str, AlignConfig | dict[str, Any] | None] = {
    "none": None,
    "Git Re-Basin": AlignConfig(**PERMUTATIONS),
    "Git Re-Basin, residual": AlignConfig(**PERMUTATIONS, residual="permutation"),
    "OT": {**HARD, "stream": "identity"},
    "OT, residual": HARD,
    "rotation": MATCHINGS["no rescaling"],
    "rotation, rescaling": MATCHINGS["both"],
    "residual rotation": MATCHINGS[RESIDUAL],
}
"""By words: options of our matching, parameters of a merge by transport plans, or nothing."""


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    pairs = vits(given, WAYS)
    for words in list(WAYS)[: 2 if given.quick else None]:
        found = [given.kept(f"distance, {pair.name}, {words}", lambda p=pair, w=words: share(p, w)) for pair in pairs]
        yield NAME, {"matching": words, "distance": spread(found, "{:.4f}")}


def share(pair: Pair, words: str) -> float:
    """The distance after a matching over that without it."""
    way = WAYS[words]
    if way is None:
        return 1.0
    if isinstance(way, dict):  # the merge is halfway
        merge(pair.anchor, halves(pair.anchor, pair.donor), pair.scratch / "halfway", way)
        middle, first, second = map(open_model, (pair.scratch / "halfway", pair.anchor, pair.donor))
        return 2 * distance(middle, first) / distance(second, first)
    first, second, third = pair.moved(words)
    return distance(third, first) / distance(second, first)


run(__name__)
