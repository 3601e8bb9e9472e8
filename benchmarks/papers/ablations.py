"""The ablations of "Update Your Transformer to the Latest Release", one step at a time: heads, inside heads, residual.

What arrives at scale 1 of fine-tunes carried to other bases: share of the gain at home, mean over tasks, and loss of
what the new base knows by itself; mean and spread over new bases. From TransFusion's way and from ours, each line
changes one thing. The paper's variant whose skip connections stay behind is no symmetry, and is not made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from apparatus import Given, run, spread
from carried import METHODS, NOT_ALIGNED, OURS, TRANSFUSION, Family, families
from record import Row
from transport import measured

from rotation_merge import AlignConfig

NAME = "papers-ablations"
TABLES = {NAME: ("models", "from", "changed", "share of the gain at home", "own skill lost")}
CHANGES: dict[str, dict[str, dict[str, object]]] = {
    TRANSFUSION: {
        "heads stay in order": {"heads": "none"},
        "heads paired jointly with what is inside": {"heads": "permutation"},
        "heads in order, nothing inside": {"heads": "none", "attention": "none"},
        "residual stream as it is": {"residual": "none"},
    },
    OURS: {
        "heads stay in order": {"heads": "none"},
        "permutations inside heads": {"attention": "permutation", "scaling": False},
        "nothing inside heads": {"attention": "none", "heads": "none"},
        "no rescaling": {"scaling": False},
        "residual stream as it is": {"residual": "none"},
        "residual permutation": {"residual": "permutation"},
    },
}
"""By the way that is changed: options, by what they change."""
SIGNED = "residual permutation with signs"
"""Where norms admit it."""


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    for family in families(given):
        for way, changed, options in list(_ways(family))[:: 5 if given.quick else 1]:
            name = next((method for method in METHODS if METHODS[method] == options), f"{way}, {changed}")
            found = [measured(family, base, name, options) for base in family.bases]
            shares = [family.share({task: at["1"][0] for task, at in base.items()}) for base in found]
            lost = [fmean(at["1"][2] for at in base.values()) for base in found]
            cells = (family.name, way, changed, spread(shares), spread(lost, "{:.3f}"))
            yield NAME, dict(zip(TABLES[NAME], cells, strict=True))


def _ways(family: Family) -> Iterator[tuple[str, str, AlignConfig | str | None]]:
    """Names of the ways and of what they change, empty where that is nothing, and their options."""
    yield NOT_ALIGNED, "", METHODS[NOT_ALIGNED]
    for way, changes in CHANGES.items():
        start = METHODS[way]
        assert isinstance(start, AlignConfig)
        yield way, "", start
        for changed, values in changes.items():
            yield way, changed, replace(start, **values)  # type: ignore[arg-type]
        if way == OURS and "signed_permutation" in family.old.architecture.residual_groups:
            yield way, SIGNED, replace(start, residual="signed_permutation")


run(__name__)
