"""Figure 6 of "Beyond the Permutation Symmetry of Transformers": the average's loss when only some layers are matched.

Single layers, the last few, all; attention alone, as in the paper, and every group inside the layer. ViTs and Llamas of
other seeds, mean and spread over pairs, and two fine-tunes of one Llama, as the paper's text models are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from apparatus import Given, run, spread
from drawing import bars
from landscape import LLAMAS, TUNED, VITS, by_layers, pairs, parts, subsets
from record import Row

NAME = "papers-figure6"
TABLES = {NAME: ("models", "matched", "layers", "loss", "accuracy")}
KINDS = (VITS, LLAMAS, TUNED)


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    for kind in KINDS:
        twos = pairs(given, kind)
        for part in parts(given):
            found = [by_layers(two, part) for two in twos]
            for layers in subsets(twos[0]):
                losses, right = zip(*(one[layers] for one in found), strict=True)
                yield (
                    NAME,
                    {
                        **{"models": kind, "matched": part, "layers": layers},
                        **{"loss": spread(losses, "{:.3f}"), "accuracy": spread([100 * share for share in right])},
                    },
                )


def drawn(kind: str) -> Callable[[Mapping[str, Sequence[Row]]], str]:
    def picture(tables: Mapping[str, Sequence[Row]]) -> str:
        groups: dict[str, dict[str, float]] = {}
        for row in tables[NAME]:
            if row["models"] == kind:
                groups.setdefault(row["matched"], {})[row["layers"]] = float(row["loss"].split(" ")[0])
        return bars(groups, "loss, nats", width=520)

    return picture


PICTURES = {f"papers-figure6-{kind.lower()}.svg": drawn(kind) for kind in (VITS, LLAMAS)}
run(__name__)
