"""Loss on the straight paths from an anchor to its donors, as they are and aligned."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rotation_merge.diagnose.donors import PairRecipe
from rotation_merge.errors import RecipeError, nearest
from rotation_merge.matching.options import ACTIVATIONS, BOTH, NOTHING, AlignConfig
from rotation_merge.matching.pair import OUTSIDE_RECIPES, check_shapes
from rotation_merge.mergekit_plugin.compile import opened_views
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.model.checkpoint import mark_of
from rotation_merge.model.heads import head_names
from rotation_merge.model.open import open_model
from rotation_merge.report.plots import MOST_CURVES
from rotation_merge.run.config import BarrierConfig
from rotation_merge.run.data import Data, read_samples
from rotation_merge.run.evaluate import Barrier, Curve, path
from rotation_merge.run.functions import architecture_of, in_memory, load
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.run.sample_kinds import SELF
from rotation_merge.run.sources import writes_text
from rotation_merge.workers import listener

Curves = Mapping[str, Mapping[str, Any] | None]
"""By name of a curve, what is said of matching in the place of a recipe's or a command's own; None: those."""

COMPARE = "--compare"
PLAIN, ALIGNED = "plain", "aligned"
"""The curve between the models as they are, and that between them as the recipe or the options align them."""

WHOLE = asdict(AlignConfig(heads="permutation", residual="largest"))

NAMED: Curves = {
    PLAIN: asdict(NOTHING),
    ALIGNED: None,
    "neurons": asdict(AlignConfig(attention="none", scaling=False)),
    "rotation": asdict(AlignConfig(ffn="none", scaling=False)),
    "paper": asdict(AlignConfig(scaling="sequential")),
    "permutation": asdict(
        AlignConfig(attention="permutation", heads="permutation", scaling=False, residual="permutation")
    ),
    "local": asdict(AlignConfig(heads="permutation")),
    "residual": WHOLE,
    **{match_on: {**WHOLE, "match_on": match_on} for match_on in (ACTIVATIONS, BOTH)},
}
"""The order of FFN neurons alone; rotations alone, of heads in their order; both, and scales after them (the ICML 2025
paper's); permutations of neurons, heads, their dimensions and the stream (Git Re-Basin's); all local groups; these and
the largest group of the stream; the same matched on activations, alone or with weights."""


def curves_of(text: str | None) -> Curves:
    """The curves that `--compare` names, the plain one first; without it plain and aligned.

    Args:
        text: names of `NAMED`, and NAME=FILE, with commas between.

    Raises:
        RecipeError: a name is not known, or is named twice; too many.
    """
    curves = {PLAIN: NAMED[PLAIN]}
    for word in (word.strip() for word in (text or ALIGNED).split(",") if word.strip() != PLAIN):
        name, equals, file = (part.strip() for part in word.partition("="))
        if name in curves:
            raise RecipeError(f"'{name}' is named twice", where=COMPARE, remedy="give each curve a different name")
        if equals and not (name and file):
            raise RecipeError(f"'{word}' names no file", where=COMPARE, remedy="write learned=FILE")
        if not equals and name not in NAMED:
            remedy = f"{nearest(name, NAMED)}; a file: name=FILE"
            raise RecipeError(f"there is no matching '{name}'", where=COMPARE, remedy=remedy)
        curves[name] = {"alignment": file} if equals else NAMED[name]
    if len(curves) > MOST_CURVES:
        remedy = f"a picture holds {MOST_CURVES} curves, the plain one among them"
        raise RecipeError(f"{len(curves)} matchings", where=COMPARE, remedy=remedy)
    return curves


@dataclass(frozen=True)
class Paths:
    """The paths from an anchor to each of its donors, with the options of measuring them.

    Models may keep heads of their own, of any size: then each of the data is one model's, and is measured on the paths
    from and to that model, under its head and config, as a merged body is that stands under several heads.

    Attributes:
        recipe_path: the recipe, where donors come from one.
        sources: of data; where models keep their heads, one for each model, the anchor's first.
        curves: that are measured of each path.
        ledger: store of intermediate results, to resume from.
    """

    recipe_path: str
    donors: Sequence[PairRecipe]
    sources: Sequence[str]
    config: BarrierConfig
    curves: Curves = field(default_factory=lambda: curves_of(None))
    ledger: Ledger = NOWHERE

    @property
    def names(self) -> list[str]:
        """Of the models, the anchor first."""
        return [str(self.donors[0].anchor), *(str(donor.donor) for donor in self.donors)]

    @property
    def keep_heads(self) -> bool:
        """Whether every model keeps a head of its own."""
        return self.donors[0].values.get("heads_of") == "each"

    @property
    def measured(self) -> list[tuple[int, int]]:
        """Numbers of the donor and of the data of everything that is measured."""
        pairs = ((donor, number) for donor in range(len(self.donors)) for number in range(len(self.sources)))
        return [(donor, number) for donor, number in pairs if not self.keep_heads or number in (0, donor + 1)]

    def mark(self) -> str:
        """A stable key of these barriers: the models' files, those that are read beside them, and all options."""
        models = dict.fromkeys(name for d in self.donors for name in (str(d.anchor), str(d.donor), d.origin) if name)
        values = [{**(of_one or {})} for of_one in (*(donor.values for donor in self.donors), *self.curves.values())]
        words = (word for of_donor in values for word in of_donor.values() if isinstance(word, str))
        files, opened = [self.recipe_path, *self.sources, *words], (open_model(name, any_base=True) for name in models)
        return mark_of(opened, files, values=values, curves=[*self.curves], sources=[*self.sources], config=self.config)

    def barriers(self) -> list[Barrier]:
        """The path to every donor on each of the data, with every curve.

        Raises:
            RotationMergeError: models do not fit together.
        """
        options, anchor = self._check(), load(self.names[0])
        data = self._data(anchor)
        source = SELF if writes_text(anchor) else self.sources[0]  # to match on, where none is named
        curves: dict[tuple[int, int], list[Curve]] = {pair: [] for pair in self.measured}
        for name, instead in self.curves.items():
            ledger = self.ledger.under(name)
            recipes = [donor.recipe(source, instead) for donor in self.donors]
            ends = [self._ends(anchor, recipe, ledger.under(str(i))) for i, recipe in enumerate(recipes)]
            for donor, number in self.measured:
                head: Any = ends[donor][min(number, 1)] if self.keep_heads else None
                heads = head_names(architecture_of(head)) if self.keep_heads else set()
                place, more = ledger.under(f"path-{donor}/{number}"), (head, heads)
                curve = path(*ends[donor], data[number], self.config.points, name, listener(), place, *more)
                curves[donor, number].append(curve)
        names = [self.names[0], *(donor.title for donor in self.donors)]
        return [
            Barrier(
                names[0],
                names[donor + 1],
                self.sources[number],
                data[number].task,
                data[number].examples,
                options[donor],
                curves[donor, number],
                names[number] if self.keep_heads else "",
            )
            for donor, number in self.measured
        ]

    def _ends(self, anchor: Any, recipe: Recipe, ledger: Ledger) -> tuple[Any, Any]:
        """Anchor and donor as a recipe makes them, in memory; the anchor's norms folded where the donor's are."""
        with opened_views(recipe, ledger) as views:
            views.prepare()
            base, end = views.view(recipe.base), anchor
            for model, donor in views.donors.items():
                carried = replace(base, tensors=views.served(model).tensors)
                end = in_memory(views.moved(model) if donor.origin is None else carried)
            return in_memory(base) if views.folded else anchor, end

    def _data(self, anchor: Any) -> list[Data]:
        """Each data source, as the model with its head reads it."""
        limits = {name: getattr(self.config, name) for name in ("limit", "batch_size", "length")}
        if not self.keep_heads:
            return [read_samples(self.names[0], source, module=anchor, **limits) for source in self.sources]
        return [read_samples(name, data, **limits) for data, name in zip(self.sources, self.names, strict=True)]

    def _check(self) -> list[dict[str, Any]]:
        """Refuse models that do not fit, from headers; gives the options for each donor.

        Raises:
            RotationMergeError: names the model or the option.
        """
        if self.keep_heads and len(self.sources) != len(self.names):
            problem = f"{len(self.names)} models keep heads of their own, data are given {len(self.sources)} times"
            raise RecipeError(problem, where="--data", remedy="give it once for each model, in their order")
        if self.keep_heads and any(donor.origin is not None for donor in self.donors):
            problem = "a task vector has no output head, so it cannot be measured with 'heads_of: each'"
            raise RecipeError(problem, where=self.recipe_path, remedy="leave out 'heads_of', or 'finetuned_from'")
        several = len(self.donors) > 1 or any(donor.origin is not None for donor in self.donors)
        files = [str(values["alignment"]) for values in self.curves.values() if values and "alignment" in values]
        if files and several:
            remedy = "give two models, or 'alignment' under the donor in the recipe"
            raise RecipeError("an alignment file is for two models", where=files[0], remedy=remedy)
        options: list[dict[str, Any]] = [{} for _ in self.donors]
        for (name, instead), (number, donor) in itertools.product(self.curves.items(), enumerate(self.donors)):
            with opened_views(donor.recipe(SELF, instead)) as views:
                models, excluded = views.session.models, views.recipe.excluded
                if donor.origin is None:
                    check_shapes(views.base, models[donor.donor], excluded, remedy=OUTSIDE_RECIPES)
                if name == ALIGNED:
                    options[number] = next((asdict(opened.options) for opened in views.donors.values()), {})
        return options
