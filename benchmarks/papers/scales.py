"""Scales of each layer learned from a few samples, aligned and not ("Update Your Transformer", answer to the reviews).

A carried change gets one scale for all blocks (embeddings, each layer, head), then one for each, by `carry`'s own
search on 8 windows of the task's training text, or five images a class. What is searched for is the loss on these
alone, as in the paper, or, as `carry --scale auto` has it, its sum with the loss on samples of what the new base knows
by itself (text that it writes, or digits as they are). Gains on test samples, mean and spread over new bases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from apparatus import Given, run, spread
from carried import METHODS, NOT_ALIGNED, OURS, TRANSFUSION, Family, Work, families, gained
from record import Row

from rotation_merge.carrying.judge import Both, ScaledChange, Scales, search
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import evaluate

NAME = "papers-scales"
AIMS = {"the task": False, "the task and the own skill": True}
"""By what is searched for: whether the new base's own skill counts."""
FIXED, ONE, EACH = "1", "one for all blocks", "one for each block"
TABLES = {NAME: ("models", "searched for", "method", "scale", "share of the gain at home", "points", "own skill lost")}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    methods = (TRANSFUSION,) if given.quick else (NOT_ALIGNED, OURS)
    for family in families(given):
        found = {method: [_measured(family, base, method) for base in family.bases] for method in methods}
        for method, bases in found.items():
            yield NAME, _row(family, "", method, FIXED, [base[FIXED] for base in bases])
        for aim in AIMS:
            for scale in (ONE, EACH):
                for method, bases in found.items():
                    yield NAME, _row(family, aim, method, scale, [base[f"{aim}: {scale}"] for base in bases])


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
            blocks = ends.blocks[:1] if family.given.quick else ends.blocks
            for way, scales in _searched(ends, blocks, work, own).items():
                model = ends.model(scales)
                values = [*gained(test, model, work.test), -gained(lost, model, work.own)[0]]
                found.setdefault(way, {})[work.task] = values
        return found

    return dict(family.given.kept(f"scales, {family.name}, {base}, {method}", compute))


def _searched(ends: ScaledChange, blocks: Sequence[str], work: Work, own: Data) -> dict[str, float | Scales]:
    """The scales of every way."""
    found: dict[str, float | Scales] = {FIXED: 1.0}
    for aim, counted in AIMS.items():
        equal: dict[float, float] = {}

        def losses(scales: Mapping[str, float], counted: bool = counted, equal: dict[float, float] = equal) -> Both:
            model = ends.model(scales)
            both = evaluate(model, work.few)[0], evaluate(model, own)[0] if counted else 0.0
            if len(values := set(scales.values())) == 1:
                equal[values.pop()] = sum(both)
            return both

        found[f"{aim}: {EACH}"] = search(blocks, losses)[0]
        found[f"{aim}: {ONE}"] = min(equal, key=lambda scale: equal[scale])
    return found


run(__name__)
