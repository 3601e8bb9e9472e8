"""Table 1 and the figures of scales of "Update Your Transformer to the Latest Release": fine-tunes carried elsewhere.

Gain on the task and loss of what the new base knows by itself, by method and scale: mean and spread over new bases. Not
aligned, the change is added as it stands; Git Re-Basin permutes neurons, the coordinates inside heads, and the
residual stream; OT moves the change by soft plans from weights; TransFusion pairs heads by their singular values and
permutes inside them, too; ours orders heads and turns them and the residual stream. No data is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from apparatus import Given, run, spread
from carried import METHODS, NOT_ALIGNED, TRANSFUSION, Family, Found, families, gained
from record import Row

from rotation_merge import AlignConfig

SCALES = (0.5, 1.0, 1.5, 2.0)
QUICK = (1.0,)
FAST = (NOT_ALIGNED, TRANSFUSION)
"""What is matched in a second."""
TABLE, SWEEP = "papers-transport", "papers-transport-scales"
AT = ("gain", "points", "own skill lost", "points lost")
TABLES = {
    TABLE: ("models", "task", "method", *AT, "best scale", "gain there", "own skill lost there"),
    SWEEP: ("models", "method", "scale", "share of the gain at home", "own skill lost"),
}


def rows(given: Given) -> Iterator[tuple[str, Row]]:
    for family in families(given, llamas=True):
        methods = FAST if given.quick and family.name == "Llamas" else tuple(METHODS)
        found = {m: [measured(family, base, m, METHODS[m]) for base in family.bases] for m in methods}
        for work in family.works:
            nats, points = family.home[work.task]
            yield TABLE, _row(family, work.task, "fine-tuned at home", [f"{nats:.3f}", f"{points:.1f}"])
            for method, bases in found.items():
                yield TABLE, _best(family, work.task, method, [base[work.task] for base in bases])
        for method, bases in found.items():
            for scale in map("{:g}".format, _scales(family)):
                shares = [family.share({task: at[scale][0] for task, at in base.items()}) for base in bases]
                lost = [fmean(at[scale][2] for at in base.values()) for base in bases]
                cells = (family.name, method, scale, spread(shares), spread(lost, "{:.3f}"))
                yield SWEEP, dict(zip(TABLES[SWEEP], cells, strict=True))


def measured(family: Family, base: str, way: str, options: AlignConfig | str | None) -> dict[str, Found]:
    """By task and scale (of a way that is no method: at scale 1 alone), what is gained and what is lost."""

    def compute() -> dict[str, Found]:
        found: dict[str, Found] = {}
        carried = family.carried(base, options)
        for work in family.works:
            test, own = family.alone(base, work)
            found[work.task] = at = {}
            for scale in _scales(family) if way in METHODS else QUICK:
                model = carried[work.task](scale)
                lost = [-value for value in gained(own, model, work.own)]
                at[f"{scale:g}"] = [*gained(test, model, work.test), *lost]
        return found

    return dict(family.given.kept(f"transport, {family.name}, {base}, {way}", compute))


def _scales(family: Family) -> tuple[float, ...]:
    return QUICK if family.given.quick else SCALES


def _best(family: Family, task: str, method: str, bases: Sequence[Found]) -> Row:
    best = max(map("{:g}".format, _scales(family)), key=lambda scale: fmean(at[scale][0] for at in bases))
    forms = ("{:.3f}", "{:.1f}", "{:.3f}", "{:.1f}")
    here = [spread([at["1"][which] for at in bases], form) for which, form in enumerate(forms)]
    there = [spread([at[best][which] for at in bases], "{:.3f}") for which in (0, 2)]
    return _row(family, task, method, [*here, best, *there])


def _row(family: Family, task: str, method: str, cells: Sequence[str]) -> Row:
    columns = TABLES[TABLE]
    values = [family.name, task, method, *cells]
    return dict(zip(columns, [*values, *[""] * (len(columns) - len(values))], strict=True))


run(__name__)
