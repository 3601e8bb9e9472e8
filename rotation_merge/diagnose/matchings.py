"""Loss on the straight paths from an anchor to its donors, under several ways of matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rotation_merge.diagnose.donors import RecipeDonor, carried_recipe
from rotation_merge.errors import RecipeError, nearest
from rotation_merge.matching.aligned_output import aligned_view, loaded, match_pair, read_alignment
from rotation_merge.matching.match_on import matcher
from rotation_merge.matching.options import ACTIVATIONS, BOTH, MATCH_ON, NOTHING, WEIGHTS, AlignConfig
from rotation_merge.matching.pair import Pair, open_pair
from rotation_merge.mergekit_plugin.run import moved_states
from rotation_merge.model.heads import head_names
from rotation_merge.model.open import open_model
from rotation_merge.model.tensors import as_tensors
from rotation_merge.report.plots import MOST_CURVES
from rotation_merge.run.curves import Barrier, Curve
from rotation_merge.run.data import Data, read_samples
from rotation_merge.run.evaluate import BarrierConfig, path
from rotation_merge.run.functions import architecture_of, in_memory, load
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.run.sample_kinds import SELF
from rotation_merge.run.sources import writes_text
from rotation_merge.workers import Progress

COMPARE = "--compare"


@dataclass(frozen=True)
class Matching:
    """One way to bring donors to their anchor.

    Attributes:
        options: groups to match; None: each donor's own options or file.
        file: of transforms that are applied instead.
        match_on: weights, activations or both.
    """

    name: str
    options: AlignConfig | None = None
    file: str | None = None
    match_on: str = WEIGHTS

    def of(self, donor: RecipeDonor) -> RecipeDonor:
        """The donor, to be matched in this way."""
        if self.file is None and self.options is None:
            return donor
        return replace(donor, options=self.options or NOTHING, file=self.file, match_on=self.match_on)


PLAIN, ALIGNED = Matching("plain", NOTHING), Matching("aligned")
"""Names of the curve without alignment and of the one with the recipe's or command's options."""

WHOLE = AlignConfig(heads="permutation", residual="largest")

NAMED = {
    "neurons": AlignConfig(attention="none", scaling=False),
    "rotation": AlignConfig(ffn="none", scaling=False),
    "paper": AlignConfig(scaling="sequential"),
    "permutation": AlignConfig(attention="permutation", heads="permutation", scaling=False, residual="permutation"),
    "local": AlignConfig(heads="permutation"),
    "residual": WHOLE,
    ACTIVATIONS: WHOLE,
    BOTH: WHOLE,
}
"""Matchings by name: the order of FFN neurons alone; rotations alone, of heads in their order; both, and scales after
them (the ICML 2025 paper's); permutations of neurons, heads, their dimensions and the stream (Git Re-Basin's); all
local groups; these and the largest group of the stream; the same matched on activations, alone or with weights."""


def matchings(text: str | None) -> list[Matching]:
    """Matchings named by `--compare`, the plain path first; without it plain and aligned.

    Args:
        text: names of `NAMED`, `aligned` and NAME=FILE, with commas between.

    Raises:
        RecipeError: a name is not known, or is named twice; too many.
    """
    words = [word.strip() for word in (text or ALIGNED.name).split(",")]
    chosen = [PLAIN, *(_matching(word) for word in words if word != PLAIN.name)]
    names = [matching.name for matching in chosen]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RecipeError(f"'{twice[0]}' is named twice", where=COMPARE, remedy="give each curve a different name")
    if len(chosen) > MOST_CURVES:
        remedy = f"a picture holds {MOST_CURVES} curves, the plain one among them"
        raise RecipeError(f"{len(chosen)} matchings", where=COMPARE, remedy=remedy)
    return chosen


def _matching(word: str) -> Matching:
    name, equals, file = (part.strip() for part in word.partition("="))
    if equals and name and file:
        return Matching(name, file=file)
    if equals:
        raise RecipeError(f"'{word}' names no file", where=COMPARE, remedy="write learned=FILE")
    if name != ALIGNED.name and name not in NAMED:
        remedy = f"{nearest(name, [PLAIN.name, ALIGNED.name, *NAMED])}; a file: name=FILE"
        raise RecipeError(f"there is no matching '{name}'", where=COMPARE, remedy=remedy)
    return Matching(name, NAMED.get(name), match_on=name if name in MATCH_ON else WEIGHTS)


def opened(donor: RecipeDonor) -> Pair:
    """Anchor and donor, checked to fit together under the donor's options, or under its file.

    Raises:
        RotationMergeError: they do not.
    """
    options, own_heads = donor.options if donor.file is None else NOTHING, donor.own_heads
    more: dict[str, Any] = {"unsupported": donor.unsupported, "excluded": lambda name: name in own_heads}
    carried = donor.origin is not None  # its adapter may be of that base
    return open_pair(donor.anchor, donor.name, options, donor.untie, any_base=carried, **more)


@dataclass(frozen=True)
class Paths:
    """The paths from an anchor to each of its donors, with the options of measuring them.

    Models may keep heads of their own, of any size: then each of the data is one model's, and is measured on the paths
    from and to that model, under its head and config, as a merged body is that stands under several heads.

    Attributes:
        recipe_path: the recipe, where donors come from one.
        sources: of data; where models keep their heads, one for each model, the anchor's first.
        tick: told about progress.
        ledger: store of intermediate results, to resume from.
    """

    recipe_path: str
    donors: Sequence[RecipeDonor]
    sources: Sequence[str]
    config: BarrierConfig
    tick: Progress = lambda *_: None
    ledger: Ledger = NOWHERE

    @property
    def names(self) -> list[str]:
        """Of the models, the anchor first."""
        return [self.donors[0].anchor, *(donor.name for donor in self.donors)]

    @property
    def own_heads(self) -> tuple[str, ...]:
        """Names of the head tensors that every model keeps."""
        return self.donors[0].own_heads

    @property
    def measured(self) -> list[tuple[int, int]]:
        """Numbers of the donor and of the data of everything that is measured."""
        pairs = ((donor, number) for donor in range(len(self.donors)) for number in range(len(self.sources)))
        return [(donor, number) for donor, number in pairs if not self.own_heads or number in (0, donor + 1)]

    def barriers(self, matchings: Sequence[Matching]) -> list[Barrier]:
        """The path to every donor on each of the data, with a curve for every matching.

        Raises:
            RotationMergeError: models do not fit together.
        """
        self.check(matchings)
        anchor = load(self.names[0])
        data = self._data(anchor)
        source = SELF if writes_text(anchor) else self.sources[0]  # to match on, where none is named
        donors = [donor if donor.data else replace(donor, data=source) for donor in self.donors]
        curves: dict[tuple[int, int], list[Curve]] = {pair: [] for pair in self.measured}
        for matching in matchings:
            ledger = self.ledger.under(matching.name)
            ends = [self._ends(anchor, d, matching, ledger.under(str(i))) for i, d in enumerate(donors)]
            for donor, number in self.measured:
                head: Any = ends[donor][min(number, 1)] if self.own_heads else None
                heads = head_names(architecture_of(head)) if self.own_heads else set()
                place, more = ledger.under(f"path-{donor}/{number}"), (head, heads)
                curve = path(*ends[donor], data[number], self.config.points, matching.name, self.tick, place, *more)
                curves[donor, number].append(curve)
        return [self._barrier(donor, number, data[number], curves[donor, number]) for donor, number in self.measured]

    def _ends(self, anchor: Any, unmatched: RecipeDonor, matching: Matching, ledger: Ledger) -> tuple[Any, Any]:
        """Anchor and donor as a matching makes them, in memory; the anchor's norms folded where the donor's are."""
        donor = matching.of(unmatched)
        if donor.origin is not None:
            return self._carried(donor, matching)
        if matching is PLAIN:
            return anchor, load(donor.name, like=None if donor.own_heads else donor.anchor)
        pair = opened(donor)
        if donor.file is None:
            bodies = replace(pair, architecture=pair.architecture.without(donor.own_heads))
            match = matcher(donor.match_on, donor.anchor, donor.name, samples=donor.data, count=donor.samples)
            alignment = match_pair(bodies, self.tick, match, ledger)
        else:
            alignment = read_alignment(pair, donor.file)
        if alignment.folded:
            anchor = loaded(pair.anchor, alignment.apply_anchor(pair.anchor_view, strict=False))
        return anchor, loaded(pair.donor, aligned_view(pair, alignment))

    def _carried(self, donor: RecipeDonor, matching: Matching) -> tuple[Any, Any]:
        """The anchor, and the anchor with the donor's task vector added, carried or unchanged."""
        values = {"match_on": matching.match_on, "data": donor.data, "samples": donor.samples}
        on_samples = values if matching.match_on != WEIGHTS else {}
        states = moved_states(carried_recipe(self.recipe_path, donor, matching.options, on_samples))
        view = open_model(donor.anchor, untie=donor.untie)
        anchor, tuned = (in_memory(replace(view, tensors=as_tensors(state))) for state in states)
        return anchor, tuned

    def _data(self, anchor: Any) -> list[Data]:
        """Each data source, as the model with its head reads it."""
        limits = {name: getattr(self.config, name) for name in ("limit", "batch_size", "length")}
        if not self.own_heads:
            return [read_samples(self.names[0], source, module=anchor, **limits) for source in self.sources]
        return [read_samples(name, data, **limits) for data, name in zip(self.sources, self.names, strict=True)]

    def check(self, matchings: Sequence[Matching]) -> None:
        """Refuse models and matchings that do not fit, from headers.

        Raises:
            RotationMergeError: names the model or the option.
        """
        carried = [donor for donor in self.donors if donor.origin is not None]
        if self.own_heads and len(self.sources) != len(self.names):
            problem = f"{len(self.names)} models keep heads of their own, data are given {len(self.sources)} times"
            raise RecipeError(problem, where="--data", remedy="give it once for each model, in their order")
        if self.own_heads and carried:
            problem = "a task vector has no output head, so it cannot be measured with 'heads_of: each'"
            raise RecipeError(problem, where=self.recipe_path, remedy="leave out 'heads_of', or 'finetuned_from'")
        for matching in matchings:
            for donor in (donor for donor in self.donors if donor.origin is None):
                opened(matching.of(donor))
            if matching.file is not None and (carried or len(self.donors) > 1):
                remedy = "give two models, or 'alignment' under the donor in the recipe"
                raise RecipeError("an alignment file is for two models", where=matching.file, remedy=remedy)

    def _barrier(self, donor: int, number: int, data: Data, curves: list[Curve]) -> Barrier:
        options = asdict(self.donors[donor].options) if ALIGNED.name in [curve.name for curve in curves] else {}
        facts, title = (self.sources[number], data.task, data.examples, options), self.donors[donor].title
        titles = [self.names[0], *(each.title for each in self.donors)]
        return Barrier(self.names[0], title, *facts, curves, titles[number] if self.own_heads else "")
