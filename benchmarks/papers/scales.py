"""A scale learned from a few samples, aligned and not ("Update Your Transformer", answer to the reviews).

A carried change gets the best of `carry`'s scales on 8 windows of the task's training text, or five images a class.
What is searched for is the loss on these alone, as in the paper, or, as `carry --scale auto` has it, its sum with the
loss on samples of what the new base knows by itself (text that it writes, or digits as they are). Gains on test
samples, mean and spread over new bases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from apparatus import Given, run, spread
from carried import METHODS, NOT_ALIGNED, OURS, TRANSFUSION, Family, ScaledChange, Work, families, gained
from record import Row

from rotation_merge.carrying.judge import SCALES
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import evaluate

NAME = "papers-scales"
AIMS = {"the task": False, "the task and the own skill": True}
"""By what is searched for: whether the new base's own skill counts."""
FIXED, ONE = "1", "one for all blocks"
TABLES = {NAME: ("models", "searched for", "method", "scale", "share of the gain at home", "points", "own skill lost")}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    methods = (TRANSFUSION,) if given.quick else (NOT_ALIGNED, OURS)
    for family in families(given):
        found = {method: [_measured(family, base, method) for base in family.bases] for method in methods}
        for method, bases in found.items():
            yield NAME, _row(family, "", method, FIXED, [base[FIXED] for base in bases])
        for aim in AIMS:
            for method, bases in found.items():
                yield NAME, _row(family, aim, method, ONE, [base[f"{aim}: {ONE}"] for base in bases])


def _row(family: Family, aim: str, method: str, scale: str, bases: Sequence[dict[str, list[float]]]) -> Row:
    shares = [family.share({task: values[0] for task, values in base.items()}) for base in bases]
    points = [fmean(values[1] for values in base.values()) for base in bases]
    lost = [fmean(values[2] for values in base.values()) for base in bases]
    cells = (family.name, aim, method, scale, spread(shares), spread(points), spread(lost, "{:.3f}"))
    return dict(zip(TABLES[NAME], cells, strict=True))


def _measured(family: Family, base: str, method: str) -> dict[str, dict[str, list[float]]]:
    """By way and task: gain in nats, in points, and what is lost of the own skill in nats."""

    def compute() -> dict[str, dict[str, list[float]]]:
        carried = family.carried(base, METHODS[method])
        found: dict[str, dict[str, list[float]]] = {}
        for work in family.works:
            ends = carried[work.task]
            test, lost = family.alone(base, work, ends)
            own = work.own_few(family.path(base))
            for way, scale in _searched(ends, work, own).items():
                model = ends.model(scale)
                values = [*gained(test, model, work.test), -gained(lost, model, work.own)[0]]
                found.setdefault(way, {})[work.task] = values
        return found

    return dict(family.given.kept(f"scales, {family.name}, {base}, {method}", compute))


def _searched(ends: ScaledChange, work: Work, own: Data) -> dict[str, float]:
    """The scale of every way."""
    models = {scale: ends.model(scale) for scale in SCALES}
    few = {scale: evaluate(model, work.few)[0] for scale, model in models.items()}
    known = {scale: evaluate(model, own)[0] for scale, model in models.items()}
    found = {FIXED: 1.0}
    for aim, counted in AIMS.items():
        found[f"{aim}: {ONE}"] = min(SCALES, key=lambda scale: few[scale] + (known[scale] if counted else 0.0))
    return found


run(__name__)
