"""Figure 2 of "Beyond the Permutation Symmetry of Transformers": loss over the plane through A, B and the matched B.

Two ViTs of other seeds, all 540 test digits. The paper's figure is a sketch; this is the plane itself, in units of
the distance from A to B. Rows: the losses of the ends and of the averages AB and AB', and the barriers, mean and spread
over pairs; the plane is that of the first pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from apparatus import Given, run, spread
from drawing import plane
from landscape import CALLED, VITS, State, Two, distance, mixed, pairs
from record import Row

from rotation_merge.diagnose.matchings import NAMED

NAME, PLANE = "papers-figure2", "papers-figure2-plane"
MATCHED = ("paper", "residual")
TABLES = {
    NAME: ("matching", "A", "B", "AB", "AB'", "barrier A to B", "barrier A to B'", "B' from A", "B from A"),
    PLANE: ("matching", "x from", "x to", "y", "losses", "B'"),
}
MARGIN = 0.3


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    twos, side = pairs(given, VITS), 4 if given.quick else 17
    for name in MATCHED[:1] if given.quick else MATCHED:
        found = [two.kept(f"plane, points, {name}", lambda t=two, n=name: points(t, n)) for two in twos]
        cells = {key: spread([one[key] for one in found], "{:.3f}") for key in found[0]}
        yield NAME, {"matching": CALLED[name], **cells}
        first = twos[0].kept(f"plane by {side}, {name}", lambda t=twos[0], n=name: grid(t, n, side))
        for y, losses in first["rows"]:
            yield (
                PLANE,
                {
                    **{"matching": CALLED[name], "x from": first["x"][0], "x to": first["x"][1], "y": y},
                    **{"losses": " ".join(f"{loss:.3f}" for loss in losses), "B'": " ".join(map(str, first["B'"]))},
                },
            )


def points(two: Two, name: str) -> dict[str, float]:
    """Losses at the ends and of both averages, barriers by them, distances."""
    a, b, c = two.moved(NAMED[name])
    ends = two.loss_and_accuracy(a)[0], two.loss_and_accuracy(b)[0]
    middles = [two.loss_and_accuracy(mixed({"A": a, "B": one}, [0.5, 0.5]))[0] for one in (b, c)]
    rises = [middle - sum(ends) / 2 for middle in middles]
    values = (*ends, *middles, *rises, distance(a, c), distance(a, b))
    return dict(zip(TABLES[NAME][1:], values, strict=True))


def grid(two: Two, name: str, side: int) -> dict[str, Any]:
    """Losses on a grid over the plane, rows from below, and where the matched B is."""
    a, b, c = two.moved(NAMED[name])
    whole = distance(a, b) ** 2
    x = sum(float(((c[key] - a[key]) * (b[key] - a[key])).sum()) for key in a) / whole
    y = max(distance(a, c) ** 2 / whole - x * x, 0.0) ** 0.5
    xs, ys = _range(min(0.0, x), max(1.0, x), side), _range(0.0, y, side)

    def at(u: float, v: float) -> State:
        """A + u (B - A) + v (C - A - x (B - A)) / y."""
        return mixed({"A": a, "B": b, "C": c}, [1 - u - v * (1 - x) / y, u - v * x / y, v / y])

    lines = [(round(v, 3), [two.loss_and_accuracy(at(u, v))[0] for u in xs]) for v in ys]
    return {"x": [round(xs[0], 3), round(xs[-1], 3)], "B'": [round(x, 3), round(y, 3)], "rows": lines}


def _range(low: float, high: float, count: int) -> list[float]:
    low, high = low - MARGIN, high + MARGIN
    return [low + (high - low) * i / (count - 1) for i in range(count)]


def picture(tables: Mapping[str, Sequence[Row]]) -> str:
    panels = {}
    for name in dict.fromkeys(row["matching"] for row in tables[PLANE]):
        chosen = [row for row in tables[PLANE] if row["matching"] == name]
        x, y = map(float, chosen[0]["B'"].split())
        marks = {"A": (0.0, 0.0), "B": (1.0, 0.0), "B'": (x, y), "AB": (0.5, 0.0), "AB'": (x / 2, y / 2)}
        losses = [[float(loss) for loss in row["losses"].split()] for row in chosen]
        edges = chosen[0]["x from"], chosen[0]["x to"], chosen[0]["y"], chosen[-1]["y"]
        panels[f"B' matched: {name}"] = (edges, losses, marks)
    return plane(panels, "loss, nats")


PICTURES = {"papers-figure2.svg": picture}
run(__name__)
