"""The donors of a recipe, one by one, and recipes of one donor, for commands that compare anchor and donor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mergekit.common import ModelReference
from mergekit.options import MergeOptions

from rotation_merge.errors import RecipeError
from rotation_merge.matching.options import WEIGHTS
from rotation_merge.mergekit_plugin import METHOD
from rotation_merge.mergekit_plugin.delegates import OWN
from rotation_merge.mergekit_plugin.document import Document, documents, is_ours, read_recipe
from rotation_merge.mergekit_plugin.donors import Donor, listed_donors
from rotation_merge.mergekit_plugin.keys import DONOR_ONLY, MATCHING, OPTIONS, PRESETS, UNMOVED, names
from rotation_merge.mergekit_plugin.recipe import Recipe, title
from rotation_merge.mergekit_plugin.session import Session

SHARED = (*OPTIONS, "preset", "unsupported", "untie", "heads_of")
"""Parameters of a whole recipe that say something about each of its donors."""


def donors_of(path: str) -> list[Donor]:
    """The donors of a recipe for one merge, each opened and checked when something is asked of it.

    Raises:
        RecipeError: the recipe, the last one in the file, is at fault, none of ours, or names none.
    """
    document, remedy = documents(read_recipe(path))[-1], "give two models instead"
    if not is_ours(document.value, misspelt=False):
        raise RecipeError(f"its merge_method is not {METHOD}", where=path, remedy=remedy)
    donors = listed_donors(Session(Recipe.of(document), MergeOptions(quiet=True), watched=False))
    if not donors:
        raise RecipeError("names no donor under 'models'", where=path, remedy=remedy)
    return donors


@dataclass(frozen=True)
class PairRecipe:
    """A recipe of an anchor and one donor.

    Attributes:
        values: the parameters of a recipe that hold for the two.
    """

    anchor: ModelReference
    donor: ModelReference
    values: Mapping[str, Any]

    @classmethod
    def of(cls, donor: Donor) -> PairRecipe:
        """The part of a recipe that says how one of its donors is brought to the anchor."""
        recipe = donor.session.recipe
        still = PRESETS[UNMOVED] if recipe.config.merge_method in OWN else {}
        return cls(recipe.base, donor.model, {**donor.given(), **still})

    @property
    def title(self) -> str:
        """The donor's name in reports."""
        return title(self.donor, self.origin)

    @property
    def origin(self) -> Any:
        """The model that the donor was fine-tuned from, if its task vector is carried over."""
        origin = self.values.get("finetuned_from")
        return None if origin in (False, "none") else origin

    def recipe(self, data: str, instead: Mapping[str, Any] | None = None) -> Recipe:
        """The recipe that merges the two.

        Args:
            data: to match on, where samples are needed and none are named.
            instead: what is said of matching in the place of the parameters; None: as they say.

        Raises:
            RecipeError: it is at fault.
        """
        values, shared, of_donor = dict(self.values), set(SHARED), {*names(DONOR_ONLY), "match_on"}
        if instead is not None:
            values = {name: value for name, value in values.items() if name not in (*MATCHING, "alignment")}
            values |= instead
        if self.origin is not None:
            shared.add("exclude")
        if values.get("match_on", WEIGHTS) != WEIGHTS:
            values.setdefault("data", data)
        if self.origin is not None or "match_on" in values:
            of_donor |= {"data", "samples"}
        entries = {model: {"weight": 0.5} for model in (self.anchor, self.donor)}
        entries[self.donor] |= {name: value for name, value in values.items() if name in of_donor}
        whole = {"delegate": "linear", **{name: value for name, value in values.items() if name in shared}}
        models = [{"model": model, "parameters": parameters} for model, parameters in entries.items()]
        keys = {"merge_method": METHOD, "base_model": self.anchor, "models": models, "dtype": "float32"}
        if self.origin is None and values.get("heads_of") != "each":
            keys["tokenizer_source"] = "base"  # tokens at other ids are measured as they stand
        return Recipe.of(Document({**keys, "parameters": whole}))
