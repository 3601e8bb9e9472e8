"""Loss on the straight paths from an anchor to its donors, under several matchings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rotation_merge.diagnose.donors import RecipeDonor
from rotation_merge.diagnose.matchings import ALIGNED, Matching, Tick, moved, opened
from rotation_merge.errors import RecipeError
from rotation_merge.model.heads import head_names
from rotation_merge.run.curves import Barrier, Curve
from rotation_merge.run.data import Data, read_samples
from rotation_merge.run.evaluate import path
from rotation_merge.run.functions import architecture_of, load
from rotation_merge.run.ledger import NOWHERE, Ledger


@dataclass(frozen=True)
class Paths:
    """The paths from an anchor to each of its donors, with the options of measuring them.

    Models may keep heads of their own, of any size: then each of the data is one model's, and is measured on the paths
    from and to that model, under its head and config, as a merged body is that stands under several heads.

    Attributes:
        recipe_path: the recipe, where donors come from one.
        sources: of data; where models keep their heads, one for each model, the anchor's first.
        points: models on each path.
        reading: limit, batch_size and length of the data.
        tick: told about progress.
        ledger: store of intermediate results, to resume from.
    """

    recipe_path: str
    donors: Sequence[RecipeDonor]
    sources: Sequence[str]
    points: int
    reading: dict[str, Any]
    tick: Tick = lambda *_: None
    ledger: Ledger = NOWHERE

    @property
    def anchor(self) -> str:
        return self.donors[0].anchor

    @property
    def own_heads(self) -> tuple[str, ...]:
        """Names of the head tensors that every model keeps."""
        return self.donors[0].own_heads

    @property
    def measured(self) -> list[tuple[int, int]]:
        """Numbers of the donor and of the data of everything that is measured."""
        return [
            (donor, number)
            for donor in range(len(self.donors))
            for number in range(len(self.sources))
            if not self.own_heads or number in (0, donor + 1)
        ]

    def models(self, matchings: Sequence[Matching]) -> int:
        """Largest number of models measured on all paths."""
        return len(matchings) * len(self.measured) * self.points

    def barriers(self, matchings: Sequence[Matching]) -> list[Barrier]:
        """The path to every donor on each of the data, with a curve for every matching.

        Raises:
            RotationMergeError: models do not fit together.
        """
        self.check(matchings)
        anchor = load(self.anchor)
        data = self._data(anchor)
        curves: dict[tuple[int, int], list[Curve]] = {}
        for matching in matchings:
            ledger = self.ledger.under(matching.name)
            ends = moved(self.recipe_path, anchor, self.donors, matching, self.tick, self.sources[0], ledger)
            for donor, number in self.measured:
                place = ledger.under(f"path-{donor}/{number}")
                curve = self._curve(ends[donor], data[number], number, matching.name, place)
                curves.setdefault((donor, number), []).append(curve)
        return [self._barrier(donor, number, data[number], curves[donor, number]) for donor, number in self.measured]

    def _data(self, anchor: Any) -> list[Data]:
        """Each data source, as the model with its head reads it."""
        if not self.own_heads:
            return [read_samples(self.anchor, source, module=anchor, **self.reading) for source in self.sources]
        names = (self.anchor, *(donor.name for donor in self.donors))
        pairs = zip(self.sources, names, strict=True)
        return [read_samples(name, source, **self.reading) for source, name in pairs]

    def check(self, matchings: Sequence[Matching]) -> None:
        """Collect all errors of models and matchings from headers."""
        count = len(self.donors) + 1
        if self.own_heads and len(self.sources) != count:
            problem = f"{count} models keep heads of their own, data are given {len(self.sources)} times"
            raise RecipeError(problem, where="--data", remedy="give it once for each model, in their order")
        if self.own_heads and any(donor.origin is not None for donor in self.donors):
            problem = "a task vector has no output head, so it cannot be measured with 'heads_of: each'"
            raise RecipeError(problem, where=self.recipe_path, remedy="leave out 'heads_of', or 'finetuned_from'")
        for donor, matching in itertools.product(self.donors, matchings):
            if donor.origin is None:
                opened(matching.of(donor))
            elif matching.file is not None:
                remedy = "give it in the recipe, as 'alignment' under the donor"
                raise RecipeError(f"there is no alignment file for {donor.title}", where="--compare", remedy=remedy)
            if matching.file is not None and len(self.donors) > 1:
                raise RecipeError("an alignment file is for two models", where=matching.file, remedy="give two")

    def _curve(self, ends: tuple[Any, Any], data: Data, number: int, name: str, ledger: Ledger) -> Curve:
        """The curve of one matching on one of the data, under the head of the model whose data they are."""
        head: Any = ends[min(number, 1)] if self.own_heads else None
        kept = head_names(architecture_of(head)) if self.own_heads else set()
        return path(*ends, data, self.points, name, self.tick, ledger, head, kept)

    def _barrier(self, donor: int, number: int, data: Data, curves: list[Curve]) -> Barrier:
        names = [self.anchor, *(donor.title for donor in self.donors)]
        options = asdict(self.donors[donor].options) if ALIGNED.name in [curve.name for curve in curves] else {}
        facts = (self.sources[number], data.task, data.examples, options)
        return Barrier(names[0], names[donor + 1], *facts, curves, names[number] if self.own_heads else "")
