"""Loss on straight paths under several matchings: anchor to donors, between donors, from each to their centre."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from rotation_merge.diagnose.donors import RecipeDonor
from rotation_merge.diagnose.matchings import ALIGNED, PLAIN, AlignedModels, Matching, Tick, moved, opened
from rotation_merge.errors import RecipeError
from rotation_merge.files.ledger import NOWHERE, Ledger
from rotation_merge.matching.options import VaryingOptions
from rotation_merge.model.heads import head_names
from rotation_merge.model.labels import labels
from rotation_merge.run.curves import CENTRE, Barrier, Curve
from rotation_merge.run.data import Data, read_batches
from rotation_merge.run.evaluate import path
from rotation_merge.run.functions import architecture_of, load

LOG = logging.getLogger(__name__)

Place = tuple[int, int]
"""A path by the numbers of its ends: 0 is the anchor, then the donors, then the centre."""


@dataclass(frozen=True)
class Paths:
    """Paths between an anchor and its donors, with the options of measuring them.

    With one donor there is the path from the anchor to it. With more, those between donors that are aligned to the
    anchor, and from every model to the centre (their mean), stand behind those from the anchor to each.

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

    @cached_property
    def names(self) -> list[str]:
        """Names of the models, the anchor's first."""
        return [self.donors[0].anchor, *(donor.title for donor in self.donors)]

    @cached_property
    def places(self) -> list[Place]:
        count = len(self.names)
        return list(itertools.combinations(range(count), 2)) + [(i, count) for i in range(count) if count > 2]

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the head tensors that every model keeps."""
        return self.donors[0].own

    def tasks(self, place: Place) -> list[int]:
        """Numbers of the data that a path is measured on."""
        return [n for n in range(len(self.sources)) if not self.own or n in place]

    def models(self, matchings: Sequence[Matching], each: bool = False) -> int:
        """Largest number of models measured on all paths; arguments as for `barriers`."""
        turns = (len(self.names) - 1) * sum(matching is not PLAIN for matching in matchings) if each else 0
        return (len(matchings) + turns) * sum(len(self.tasks(place)) for place in self.places) * self.points

    def barriers(self, matchings: Sequence[Matching], each: bool = False) -> list[Barrier]:
        """Every path on each of the data, with a curve for every matching.

        Args:
            each: also the barriers with every model as the anchor in turn.

        Raises:
            RotationMergeError: models do not fit together, or cannot be the anchor in turn.
        """
        self.check(matchings, each)
        anchor = load(self.names[0])
        data = self._data(anchor)
        curves: dict[tuple[Place, int], list[Curve]] = {}
        for matching in matchings:
            ledger = self.ledger.under(matching.name)
            models = moved(self.recipe_path, anchor, self.donors, matching, self.tick, self.sources[0], ledger)
            for key, curve in self._curves(models, data, matching.name, ledger):
                curves.setdefault(key, []).append(curve)
        turns = self._turns(anchor, data, matchings) if each else {}
        return [
            self._barrier(place, number, data[number], curves[place, number], turns)
            for place in self.places
            for number in self.tasks(place)
        ]

    def _data(self, anchor: Any) -> list[Data]:
        """Each data source, as the model with its head reads it."""
        if not self.own:
            return [read_batches(source, self.names[0], anchor, **self.reading) for source in self.sources]
        names = (self.names[0], *(donor.name for donor in self.donors))
        pairs = zip(self.sources, names, strict=True)
        return [read_batches(source, name, load(name), **self.reading) for source, name in pairs]

    def check(self, matchings: Sequence[Matching], each: bool) -> None:
        """Collect all errors of models and matchings from headers."""
        if self.own and len(self.sources) != len(self.names):
            problem = f"{len(self.names)} models keep heads of their own, data are given {len(self.sources)} times"
            raise RecipeError(problem, where="--data", remedy="give it once for each model, in their order")
        if self.own and any(donor.origin is not None for donor in self.donors):
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
        first = self.donors[0].options
        alike = all(d.options == first and not isinstance(d.options, VaryingOptions) for d in self.donors)
        bound = any(d.origin or d.file or m.file for d in self.donors for m in matchings)
        if each and (bound or not alike):
            problem = "'--anchors each' does not work with alignment files, donors with a base, or different options"
            raise RecipeError(problem, where=self.recipe_path, remedy="leave out --anchors")

    def _curves(
        self, models: AlignedModels, data: Sequence[Data], name: str, ledger: Ledger
    ) -> Iterator[tuple[tuple[Place, int], Curve]]:
        """The curves of one matching; of models in different gauges only those from the anchor to each."""
        everyone = [models.anchors[0], *models.donors]
        alike = models.shares_one_anchor()
        if alike and len(everyone) > 2:
            everyone.append(mean(everyone, self._kept(everyone[0])))
        for first, second in self.places:
            if first == 0 and second < len(self.names):
                a, b = models.anchors[second - 1], models.donors[second - 1]
            elif alike:
                a, b = everyone[first], everyone[second]
            else:
                LOG.warning("%s: norms are folded for some donors only; no path between them is measured", name)
                return
            for number in self.tasks((first, second)):
                place_ledger = ledger.under(f"{first}-{second}/{number}")
                head_model = (a if number == first else b) if self.own else None
                how = self.points, name, self.tick, place_ledger, head_model, self._kept(head_model)
                yield ((first, second), number), path(a, b, data[number], *how)

    def _kept(self, model: Any) -> set[str]:
        """The parameters that each model keeps."""
        return head_names(architecture_of(model)) if self.own else set()

    def _turns(
        self, anchor: Any, data: Sequence[Data], matchings: Sequence[Matching]
    ) -> dict[tuple[Place, int, str], dict[str, float]]:
        """The barriers with every other model as the anchor, by path, number of the data and matching."""
        barriers: dict[tuple[Place, int, str], dict[str, float]] = {}
        for turn in range(1, len(self.names)):
            name, donor_names = self.names[turn], [n for i, n in enumerate(self.names) if i != turn]
            donors = [replace(self.donors[0], anchor=name, name=donor_name) for donor_name in donor_names]
            now = load(name)
            if not self.own and labels(now.config.to_dict()) != labels(anchor.config.to_dict()):
                data = [read_batches(source, name, now, **self.reading) for source in self.sources]
            for matching in (m for m in matchings if m is not PLAIN):
                ledger = self.ledger.under(f"{name}/{matching.name}")
                models = moved(self.recipe_path, now, donors, matching, self.tick, self.sources[0], ledger)
                aligned = models.donors
                everyone = [*aligned[:turn], models.anchors[0], *aligned[turn:]]
                still = AlignedModels([everyone[0]] * len(aligned), everyone[1:])
                for (place, number), curve in self._curves(still, data, matching.name, ledger):
                    barriers.setdefault((place, number, matching.name), {})[name] = curve.barrier()
        return barriers

    def _barrier(
        self,
        place: Place,
        number: int,
        data: Data,
        curves: list[Curve],
        turns: dict[tuple[Place, int, str], dict[str, float]],
    ) -> Barrier:
        first, second = (self.names[end] if end < len(self.names) else CENTRE for end in place)
        over = {
            curve.name: {self.names[0]: curve.barrier(), **turns[place, number, curve.name]}
            for curve in curves
            if (place, number, curve.name) in turns
        }
        donor = self.donors[place[1] - 1 if place[0] == 0 and second != CENTRE else 0]
        options = asdict(donor.options) if ALIGNED.name in [curve.name for curve in curves] else {}
        facts = (self.sources[number], data.task, data.examples, options)
        return Barrier(first, second, *facts, curves, over, self.names[number] if self.own else "")


@torch.no_grad()
def mean(models: Sequence[Any], excluded: Collection[str] = ()) -> Any:
    """The model with the mean of all weights, except tensors that stay the first model's; it has the first config."""
    centre = copy.deepcopy(models[0])
    each = [dict(model.named_parameters()) for model in models]
    for name, parameter in centre.named_parameters():
        if name not in excluded:
            parameter.copy_(sum(weights[name] for weights in each) / len(each))
    return centre
