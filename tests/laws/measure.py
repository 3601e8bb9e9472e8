"""Lines of `pairs.tsv` for models that it lacks: every law is tried, and what holds is printed.

usage: python tests/laws/measure.py NAME >> tests/laws/pairs.tsv       (all models with NAME in `FAMILY/NAME`)

What fails is said on stderr, with the difference. The first model of a family is also tried for what is carried, and
by a recipe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

from programs import run
from subjects import FIRST, LISTED, MODELS, Pair, Subject, changed, subject
from test_laws import LAWS
from test_stock_commands import by, models_of

TOLERANCES = {"function": 1e-9, "planted": 1e-5, "saved": 1e-9, "adapter": 1e-8, "carried": 1e-8, "changes": 1e-8}
"""Of laws in memory, in double precision; matching computes in single, here and there."""

RECIPES = 1e-6
"""Of recipes, in single precision."""

GROUPS = ("permutation", "signed_permutation", "rotation")


def residual_groups(subject: Subject) -> list[str]:
    """The residual groups that some stream of a model admits, as the option `residual` names them."""
    (entry,) = json.loads(run("rotation-merge", "inspect", subject.folder, "--json").out)
    streams = entry["streams"]
    options = []
    for group in GROUPS:
        names = [name for name, groups in streams.items() if group in groups]
        if names:
            options.append(group if len(streams) == 1 else ",".join(f"{name}={group}" for name in names))
    return options


def candidates(model: str) -> Iterator[tuple[Pair, Callable[[], float]]]:
    """Every pair that may hold, and how it is measured."""
    tiny = subject(model)
    groups, first = ["", *residual_groups(tiny)], model in FIRST.values()
    for name, law in LAWS.items():
        if name == "planted_again" or (name in ("carried", "changes") and not first):
            continue
        for residual in groups if name in ("function", "planted") else [""] if name == "adapter" else groups[-1:]:
            moved = len(changed(tiny.module, tiny.drawn(tiny.module, residual)[1])) if name == "function" else 0
            pair = Pair(model, name, residual, TOLERANCES[name], moved, "")
            yield pair, partial(law, tiny, pair)
    if first:
        yield Pair(model, "recipe", "", RECIPES, 0, ""), lambda: by("linear")(models_of(model, ""))


def main() -> None:
    listed = {pair.model for pair in LISTED}
    for model in MODELS:
        if model in listed or not any(word in model for word in sys.argv[1:]):
            continue
        for pair, law in candidates(model):
            try:
                worst = law()
            except Exception as error:
                print(f"{pair.name}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
                continue
            if worst > pair.tolerance:
                print(f"{pair.name}: {worst:.1e} above {pair.tolerance:g}", file=sys.stderr)
            else:
                print(*(pair.model, pair.law, pair.residual, f"{pair.tolerance:g}", pair.moved, pair.mark), sep="\t")


if __name__ == "__main__":
    main()
